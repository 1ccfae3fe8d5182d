"""The power trace: samples of several GPUs and marks of phases on one axis, sharp where the samples are dense."""

import numpy as np
import pytest

from report.power import MOST_POINTS, PowerTrace

HEADER = "time,gpu,watts,utilization,memory_bytes,temperature,sm_clock_mhz,throttle_reasons,phase,step\n"
START = 1_795_000_000.0


def sample(seconds: float, gpu: int, watts: float) -> str:
    return f"{START + seconds:.6f},{gpu},{watts},99,70000000000,60,1755,0,forward,3\n"


def mark(seconds: float, phase: str, step: int) -> str:
    return f"{START + seconds:.6f},,,,,,,,{phase},{step}\n"


@pytest.fixture
def trace(tmp_path):
    return PowerTrace(tmp_path)


def test_samples_and_marks_of_rotated_files_and_other_ranks_share_one_axis(trace, tmp_path):
    (tmp_path / "power.1.csv").write_text(HEADER + sample(0, 0, 100) + sample(0.001, 1, 300))
    (tmp_path / "power.csv").write_text(HEADER + sample(10, 0, 110) + sample(10.001, 1, 310) + mark(10.5, "data", 4) + "17950000")
    (tmp_path / "power-rank-8.csv").write_text(HEADER + sample(5, 0, 500) + "garbage,0\n" + sample(15, 0, 510))
    trace.read()
    found = trace.data()
    assert found["start"] == START
    assert found["gpus"] == {"0": {"x": [0, 10_000], "y": [100, 110]}, "1": {"x": [1, 10_001], "y": [300, 310]},
                             "rank 8, GPU 0": {"x": [5000, 15_000], "y": [500, 510]}}
    assert found["marks"] == [[10.5, "data", 4]]
    with open(tmp_path / "power.csv", "a") as file:
        file.write(sample(20, 0, 120)[len("17950000"):])
    trace.read()
    assert trace.data()["gpus"]["0"] == {"x": [0, 10_000, 20_000], "y": [100, 110, 120]}


def test_what_was_not_sampled_for_long_is_a_gap(trace, tmp_path):
    (tmp_path / "power.csv").write_text(HEADER + "".join(sample(second, 0, 100) for second in (*range(10), *range(1000, 1010))))
    (tmp_path / "power-rank-1.csv").write_text(HEADER + "".join(sample(90 * number, 1, 200) for number in range(10)))
    trace.read()
    gap, rare = trace.data()["gpus"].values()
    assert gap["x"] == [*range(0, 10_000, 1000), 504_500, *range(1_000_000, 1_010_000, 1000)]
    assert gap["y"] == [*10 * [100], None, *10 * [100]] and rare["y"] == 10 * [200]


def test_a_rotation_while_it_is_read_loses_and_repeats_nothing(trace, tmp_path):
    """At the third one the names stay the same: power.csv becomes power.1.csv, which becomes power.2.csv, and that is dropped."""
    for turn in range(4):
        for number in (1, 0):
            if (older := tmp_path / ("power.1.csv" if number else "power.csv")).exists():
                older.rename(tmp_path / f"power.{number + 1}.csv")
        (tmp_path / "power.csv").write_text(HEADER + sample(turn, 0, 100 + turn))
        trace.read()
        assert trace.data()["gpus"]["0"]["y"] == [100 + each for each in range(max(0, turn - 2), turn + 1)]


def test_a_dense_window_stays_sharp_in_a_trace_of_days(trace, tmp_path):
    """A day at 1 Hz, and in it ten seconds at 50 Hz with a spike of a single sample."""
    slow = [(second, 500 + second % 7) for second in range(86_400) if not 40_000 <= second < 40_010]
    dense = [(40_000 + tick / 50, 900 if tick == 333 else 600) for tick in range(500)]
    (tmp_path / "power.csv").write_text(HEADER + "".join(sample(at, 0, watts) for at, watts in sorted(slow + dense)))
    trace.read()
    found = trace.data()["gpus"]["0"]
    time, watts = np.array(found["x"]) / 1000, found["y"]
    assert len(time) <= MOST_POINTS and (np.diff(time) > 0).all()
    assert abs(time[watts.index(900)] - (40_000 + 333 / 50)) < 0.02
    assert ((time > 40_000) & (time < 40_010)).sum() > 450


def test_without_samples_there_is_no_trace(trace, tmp_path):
    trace.read()
    assert trace.data() is None
    (tmp_path / "power.csv").write_text(HEADER + mark(0, "data", 1))
    trace.read()
    assert trace.data() is None
