"""The power trace: samples of several GPUs and marks of phases on one axis, sharp where the samples are dense."""

import numpy as np
import pytest

from report.power import MOST_VALUES, PowerTrace

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
    assert found["files"] == ["power.1.csv", "power.csv", "power-rank-8.csv"] and found["start"] == START
    assert found["time"] == sorted(found["time"]) and found["time"][0] == 0 and found["time"][-1] == 15
    at = {gpu: dict(zip(found["time"], column)) for gpu, column in found["gpus"].items()}
    assert (at["0"][0], at["0"][10], at["1"][0], at["1"][10]) == (100, 110, 300, 310)
    assert (at["rank 8, GPU 0"][5], at["rank 8, GPU 0"][15], at["rank 8, GPU 0"][0]) == (500, 510, None)
    assert at["0"][5] == 105 and at["0"][15] is None, "drawn as a line between its own samples, and not beyond them"
    assert found["marks"] == [[10.5, "data", 4]]
    with open(tmp_path / "power.csv", "a") as file:
        file.write(sample(20, 0, 120)[len("17950000"):])
    trace.read()
    assert trace.data()["gpus"]["0"][-1] == 120 and trace.data()["time"][-1] == 20


def test_what_was_not_sampled_for_long_is_a_gap(trace, tmp_path):
    (tmp_path / "power.csv").write_text(HEADER + "".join(sample(second, 0, 100) for second in (*range(10), *range(1000, 1010))))
    (tmp_path / "power-rank-1.csv").write_text(HEADER + "".join(sample(second + 0.4, 1, 200) for second in range(1010)))
    trace.read()
    found = trace.data()
    gap, whole = ([*zip(found["time"], column)] for column in found["gpus"].values())
    assert {watts for time, watts in gap if time < 9 or 1000 <= time < 1009} == {100}
    assert {watts for time, watts in gap if 10 < time < 999} == {None}
    assert {watts for time, watts in whole if time > 1} == {200}


def test_a_rotation_while_it_is_read_loses_and_repeats_nothing(trace, tmp_path):
    """At the third one the names stay the same: power.csv becomes power.1.csv, which becomes power.2.csv, and that is dropped."""
    for turn in range(4):
        for number in (1, 0):
            if (older := tmp_path / ("power.1.csv" if number else "power.csv")).exists():
                older.rename(tmp_path / f"power.{number + 1}.csv")
        (tmp_path / "power.csv").write_text(HEADER + sample(turn, 0, 100 + turn))
        trace.read()
        assert trace.data()["gpus"] == {"0": [100 + each for each in range(max(0, turn - 2), turn + 1)]}


def test_a_dense_window_stays_sharp_in_a_trace_of_days(trace, tmp_path):
    """A day at 1 Hz, and in it ten seconds at 50 Hz with a spike of a single sample."""
    slow = [(second, 500 + second % 7) for second in range(86_400) if not 40_000 <= second < 40_010]
    dense = [(40_000 + tick / 50, 900 if tick == 333 else 600) for tick in range(500)]
    (tmp_path / "power.csv").write_text(HEADER + "".join(sample(at, 0, watts) for at, watts in sorted(slow + dense)))
    trace.read()
    found = trace.data()
    time, watts = np.array(found["time"]), found["gpus"]["0"]
    assert len(time) <= MOST_VALUES and (np.diff(time) > 0).all()
    assert abs(time[watts.index(900)] - (40_000 + 333 / 50)) < 0.02
    assert ((time > 40_000) & (time < 40_010)).sum() > 450


def test_without_samples_there_is_no_trace(trace, tmp_path):
    trace.read()
    assert trace.data() is None
    (tmp_path / "power.csv").write_text(HEADER + mark(0, "data", 1))
    trace.read()
    assert trace.data() is None
