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
    values = {gpu: [watts for watts in column if watts is not None] for gpu, column in found["gpus"].items()}
    assert values == {"0": [100, 110], "1": [300, 310], "rank 8, GPU 0": [500, 510]}
    assert found["marks"] == [[10.5, "data", 4]]
    with open(tmp_path / "power.csv", "a") as file:
        file.write(sample(20, 0, 120)[len("17950000"):])
    trace.read()
    assert trace.data()["gpus"]["0"][-1] == 120 and trace.data()["time"][-1] == 20


def test_a_rotation_while_it_is_read_loses_nothing(trace, tmp_path):
    (tmp_path / "power.csv").write_text(HEADER + sample(0, 0, 100))
    trace.read()
    (tmp_path / "power.csv").rename(tmp_path / "power.1.csv")
    (tmp_path / "power.csv").write_text(HEADER + sample(1, 0, 200))
    trace.read()
    assert trace.data()["gpus"] == {"0": [100, 200]}


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
