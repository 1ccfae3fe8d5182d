"""Goodput of events that are written by hand, so that every second can be counted."""

import json

import pytest

from extensions.report.data import RunReader
from extensions.report.goodput import KILLED


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(time, step, previous_step=None, previous_time=None, **facts) -> dict:
    return {"time": time, "step": step, "event": "start", "world_size": 2, "previous_step": previous_step,
            "previous_time": previous_time, **facts}


def save(time, step, seconds=5) -> dict:
    return {"time": time, "step": step, "event": "save", "seconds": seconds, "checkpoint": f"step-{step:08d}"}


def line(time, step, step_seconds=None) -> dict:
    return {"step": step, "train_loss": 1.0, "time": time} | ({"step_seconds": step_seconds} if step_seconds else {})


@pytest.fixture
def read(tmp_path):
    """A function that reads a run with these events and these lines of metrics.jsonl."""
    def read(events, metrics) -> RunReader:
        write(tmp_path / "events.jsonl", events)
        write(tmp_path / "metrics.jsonl", metrics)
        (tmp_path / "config.json").write_text('{"MAX_STEPS": 40}')
        run = RunReader(tmp_path, "run")
        run.read()
        return run

    return read


def parts(found: dict) -> dict[str, float]:
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["seconds"])
    return {part["name"]: part["seconds"] for part in found["parts"] if part["seconds"]}


def test_a_run_without_interruption(read):
    """30 s of start-up, 20 steps of 2 s, two evaluations of 10 s, two saves of 5 s, and 5 s of which nobody knows."""
    evaluation = {"event": "evaluation", "what": "validation", "seconds": 10}
    run = read([start(1000, 0), {"time": 1040, "step": 0, **evaluation}, save(1065, 10),
                {"time": 1095, "step": 20, **evaluation}, save(1100, 20), {"time": 1105, "step": 20, "event": "end", "reason": "finished"}],
               [line(1040, 0), line(1060, 10, 2.0), line(1085, 20, 2.0)])
    found = run.data(100)["goodput"]
    assert parts(found) == {"start-up": 30, "steps": 40, "evaluation": 20, "saving": 10, "other": 5}
    assert (found["seconds"], found["share"], found["interruptions"]) == (105, pytest.approx(40 / 105), [])


def test_steps_that_a_kill_has_cost_are_repeated_steps(read):
    """Killed after step 17 was logged, resumed from 10: what came after the save of 10 is lost; then 100 s away."""
    run = read([start(0, 0), save(35, 10), start(149, 10, 17, 49), save(176, 20),
                {"time": 176, "step": 20, "event": "end", "reason": "finished"}],
               [line(20, 5, 2.0), line(30, 10, 2.0), line(171, 20, 2.0)])
    found = run.data(100)["goodput"]
    assert parts(found) == {"start-up": 12, "steps": 40, "saving": 10, "repeated steps": 14, "downtime": 100}
    assert found["interruptions"] == [{"time": 49, "step": 17, "resumed_from": 10, "resumed_time": 149, "reason": KILLED,
                                       "downtime_seconds": 100 + 2, "repeated_steps": 7}]


def test_a_stop_by_a_signal_repeats_no_steps_and_records_its_reason(read):
    run = read([start(0, 0), save(25, 12), {"time": 26, "step": 12, "event": "end", "reason": "rank 0 stops"},
                {"time": 40, "step": 12, "event": "end", "reason": "stopped by a signal"},
                start(86, 12, 12, 20, seconds=10), {"time": 110, "step": 20, "event": "end", "reason": "Loss spike at step 20."},
                start(120, 20, 20, 105), {"time": 130, "step": 22, "event": "end", "reason": "finished"}],
               [line(20, 12, 1.0), line(105, 20, 2.0), line(130, 22, 5.0)])
    found = run.data(100)["goodput"]
    assert [(each["reason"], each["downtime_seconds"], each["repeated_steps"]) for each in found["interruptions"]] == [
        ("stopped by a signal", 50 + 10 + 3, 0), ("Loss spike at step 20.", 10, 0)]
    assert parts(found) == {"start-up": 8 + 10 + 3, "steps": 12 + 16 + 10, "saving": 5, "downtime": 60, "other": 1 + 5}


def test_a_clock_that_is_set_back_between_two_starts_takes_no_time_away(read):
    """20 steps of 2 s; 10 s after the first process stopped, on a clock that was set back by an hour, 10 steps more."""
    run = read([start(10_000, 0), {"time": 10_041, "step": 20, "event": "end", "reason": "stopped by a signal"},
                start(6_451, 20, 20, 10_040), {"time": 6_472, "step": 30, "event": "end", "reason": "finished"}],
               [line(10_020, 10, 2.0), line(10_040, 20, 2.0), line(6_472, 30, 2.0)])
    data = run.data(100)
    found = data["goodput"]
    assert parts(found) == {"steps": 60, "start-up": 1, "other": 1} and found["share"] == pytest.approx(60 / 62)
    assert found["seconds"] == 62 and found["interruptions"][0]["downtime_seconds"] == 1
    times = data["curves"]["time"]["y"]
    assert times == sorted(times), "the page's axis of time"
