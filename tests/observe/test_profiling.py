"""Steps that are profiled and whose power is sampled are the same steps; what is written says what was in them."""

import csv
import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from factories import TinyRun, assert_same_run

from config import Config
from extensions import power, profile
from extensions.power import Reading, Sample
from extensions.profile import Measurements, Profiling

# What the run of `whole` measures besides.
MEASURED = {"PROFILE_STEPS": "3:4", "POWER_HZ": 200, "PEAK_TFLOPS": 0.001}


@pytest.fixture(scope="module")
def measured(prepared, tmp_path_factory):
    """A run of which everything is measured, and what it printed."""
    run, patch = TinyRun(prepared, tmp_path_factory.mktemp("measured"), **MEASURED), pytest.MonkeyPatch()
    meter = SimpleNamespace(read=lambda: Sample(50.0), close=lambda: None)  # 50 W
    patch.setattr(profile, "start_sampler", lambda run: power.PowerSampler(
        lambda: meter, "0", run.config.power_hz, run.folder / "power.csv", run.log.info, run.log.warn))
    try:
        assert run.train() == 0
    finally:
        patch.undo()
    return run


def test_a_measured_run_is_the_same_run(measured, whole):
    assert_same_run(measured, whole, 6)


def test_the_trace_and_the_tables_are_of_these_steps(measured):
    files = sorted(path.name for path in (measured.folder / "profile").iterdir())
    assert files == ["rank-0-steps-3-4.trace.json.gz", "rank-0-steps-3-4.txt"]
    events = json.loads(gzip.decompress((measured.folder / "profile" / files[0]).read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sorted(name for name in names if name.startswith("ProfilerStep")) == ["ProfilerStep#3", "ProfilerStep#4"]
    # Four micro-batches a step; a phase that another one interrupts has several parts.
    assert names.count("backward") == 8 <= names.count("forward") and names.count("optimizer") >= 2
    text = (measured.folder / "profile" / files[1]).read_text()
    assert text.count("Self CPU %") == 2 and "Top 25 by time" in text and "Top 25 by memory" in text
    log = (measured.folder / "log" / "rank-0.txt").read_text()
    assert all(f"Wrote {measured.folder / 'profile' / name}" in log for name in files)


def test_the_metrics_have_power_and_both_utilizations(measured):
    lines = {line["step"]: line for line in measured.metrics() if "mfu" in line}
    for line in lines.values():
        assert line["mfu"] == pytest.approx(line["hfu"]) and line["mfu"] > 0  # padded ids are few
    last = lines[6]
    assert last["power_watts"] == 50 and last["joules_per_token"] == 50 / last["tokens_per_second"]
    assert "gpu_utilization" not in last
    with open(measured.folder / "power.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {row["gpu"] for row in rows} == {"0"} and {"2", "3", "4"} & {row["step"] for row in rows}
    assert {row["phase"] for row in rows} & {"data", "forward", "backward", "optimizer"}


def fake_run(tmp_path, **settings):
    messages: list[str] = []
    ranks = SimpleNamespace(rank=0, local_rank=0, world_size=1, is_rank0=True, device=torch.device("cuda", 0))
    return SimpleNamespace(config=Config(**settings), ranks=ranks, folder=tmp_path, progress=SimpleNamespace(step=0), said=messages,
                           log=SimpleNamespace(info=messages.append, warn=messages.append, event=lambda *facts, **others: None))


def test_a_memory_snapshot_is_of_one_step_and_a_full_disk_ends_nothing(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: calls.append(("record", options)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    run = fake_run(tmp_path, memory_snapshot=2)
    looked = Profiling(run)
    for step in range(1, 4):
        looked.begin(step)
        looked.end(step)
    path = tmp_path / "profile" / "memory-step-2.pickle"
    assert calls == [("record", {"max_entries": profile.SNAPSHOT_EVENTS}), ("dump", str(path)), ("record", {"enabled": None})]
    assert run.said == [f"Wrote {path}; open it at pytorch.org/memory_viz"]

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    looked.end(2)
    assert "cannot be written" in run.said[-1] and "the run continues" in run.said[-1]


def test_the_readings_of_all_ranks_are_combined_and_a_slowdown_is_reported_once(tmp_path):
    nothing = Reading()
    one, other = Reading(300, 50, 0.5, 0x0, 10, 60, 1900), Reading(500, 100, 1, 0x24, 30, 80, 1200)
    assert power.power_metrics([one, nothing, other], 1600) == {
        "power_watts": 800, "joules_per_token": 0.5, "gpu_utilization": 75, "gpu_memory_bytes": 30,
        "gpu_temperature_celsius": 80, "gpu_clock_mhz": 1200, "gpu_throttled": 0.75}
    assert power.power_metrics([nothing], 1600) == {}
    run = fake_run(tmp_path)
    state = SimpleNamespace(run=run, warned_of=0)
    for _ in range(2):
        Measurements._warn_of_slowdowns(state, [one, other])
    assert run.said == [f"GPU1: slowed down by {cause}, to 1,200 MHz at 500 W and 80 °C; reported once"
                        for cause in ("its power limit", "heat")]
