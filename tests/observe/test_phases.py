"""Where the time of the steps goes, phase by phase, and which rank is named as slow."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from factories import UNMEASURED

import train
from common.activity import ACTIVITY, phase, waiting
from extensions import phases
from extensions.phases import Phases, SlowRanks
from extensions.profile import Measurements
from learn.objectives import NextToken
from run import run as run_module


@contextmanager
def marking(phases: Phases) -> Iterator[Phases]:
    """A `with` block in which phases are measured, as in a run."""
    measurements = Measurements()
    measurements.phases, measurements.profiling = phases, SimpleNamespace(mark=lambda name: None)
    measurements._mark("other", False)
    ACTIVITY.hooks = [measurements.phase]
    yield phases
    ACTIVITY.hooks = ()


def fake_run(world_size=1, device="cpu"):
    ranks = SimpleNamespace(rank=0, world_size=world_size, device=SimpleNamespace(type=device),
                            all_gather_json=lambda values: [values] * world_size)
    log = SimpleNamespace(events=[], info=pytest.fail, warn=pytest.fail)
    log.event = lambda event, step, **facts: log.events.append((event, step, facts))
    return SimpleNamespace(ranks=ranks, log=log, progress=SimpleNamespace(step=0))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still until `clock.now` is changed; Unix time is 1000 more."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 1000 + clock.now))
    monkeypatch.setattr(phases.HostClock, "now", lambda self: clock.now)
    return clock


def after(clock, seconds: float) -> None:
    clock.now += seconds


def take_step(clock, measured: Phases, scale: float = 1.0) -> None:
    """A step of two micro-batches: data 1 s, forward 2 and 3, backward 4 and 5, waits of 10 and 20, update 6."""
    measured.begin_step()
    with phase("data"):
        after(clock, 1 * scale)
    with phase("optimizer"):
        with phase("forward"), waiting():
            after(clock, 10 * scale)
        for forward, backward in ((2, 4), (3, 5)):
            with phase("forward"):
                after(clock, forward * scale)
            with phase("backward"):
                after(clock, backward * scale)
        with waiting():
            after(clock, 20 * scale)
        after(clock, 6 * scale)
    measured.run.progress.step += 1
    after(clock, 100)


SECONDS = {"data": 1, "forward": 5, "backward": 9, "optimizer": 6, "communication": 30}


def expected(scale: float = 1.0) -> dict[str, float]:
    """The metrics of steps on two equal ranks; before the backward each needs 1 s of data and 5 s of forward."""
    ranks = {"fastest_rank": 0, "slowest_rank": 0, "fastest_rank_seconds": 6, "slowest_rank_seconds": 6}
    return {name: value if name in ("fastest_rank", "slowest_rank") else scale * value
            for name, value in ({f"{name}_seconds": value for name, value in SECONDS.items()} | ranks).items()}


def test_each_second_of_a_step_counts_to_one_phase_and_pauses_to_none(clock):
    run = fake_run(world_size=2)
    with marking(Phases(run)) as measured:
        for scale in (1, 3):
            take_step(clock, measured, scale)
        read = measured.read_steps()
        assert read == {"step_seconds": 102, **expected(2)}
        assert [step.total() for step in measured.to_compare] == [153], "without the first step, which compiles"
        take_step(clock, measured)
        assert measured.read_steps()["step_seconds"] == 51, "only the steps since the last reading"
        assert [step.total() for step in measured.to_compare] == [153, 51]


def test_evaluations_and_saves_are_summed_and_each_evaluation_is_an_event(clock):
    run = fake_run(world_size=2)
    with marking(Phases(run)) as measured:
        take_step(clock, measured)
        with phase("validation"):
            after(clock, 3)
            with waiting():
                after(clock, 4)
        with phase("a new task"):
            after(clock, 1)
        assert measured.read_pauses() == {"evaluation_seconds": 8}
        with phase("save"):
            after(clock, 7)
        assert measured.read_pauses() == {"save_seconds": 7}
        assert measured.read_pauses() == {}
        assert measured.own_pauses == {"evaluation": 4, "save": 7}, "without the waits"
    assert run.log.events == [("evaluation", 1, {"what": "validation", "seconds": 7}),
                              ("evaluation", 1, {"what": "a new task", "seconds": 1})]


def compare(slow: SlowRanks, forward=(1, 1, 1, 1), data=(0, 0, 0, 0), save=(0, 0, 0, 0), evaluation=(0, 0, 0, 0), error=0.01):
    """A comparison of four ranks whose steps take 3 s."""
    own_RP = np.array([data, forward, evaluation, save], float).T
    return slow.compare(own_RP, error**2 * np.array([[1, 1, 0, 0]] * 4), np.array([3, 3, 30, 30]))


def test_a_slow_rank_is_reported_once_when_it_becomes_slow_and_once_when_it_is_no_longer():
    slow = SlowRanks()
    assert compare(slow, (1, 1, 1.25, 1)) == []
    assert compare(slow, (1, 1, 1.25, 1)) == [(2, "forward", 1.25)]
    assert compare(slow, (1, 1, 1.25, 1)) == compare(slow) == compare(slow, (1, 1, 1.25, 1)) == compare(slow) == []
    assert compare(slow) == [(2, "forward", 0)]
    assert compare(slow) == []


@pytest.mark.parametrize(("kind", "values"), [
    ("less than 1.15 times", {"forward": (1, 1, 1.14, 1)}), ("less than 2 % of a step", {"data": (0.01, 0.01, 0.06, 0.01)}),
    ("within the noise", {"forward": (1, 1, 1.25, 1), "error": 1.0}), ("an uneven evaluation", {"evaluation": (2, 2, 2.9, 2)}),
    ("rank 0 writes", {"save": (20, 0.1, 0.1, 0.1)}), ("a quick save", {"save": (1, 0.01, 0.2, 0.01)})])
def test_noise_and_uneven_work_name_no_slow_rank(kind, values):
    slow = SlowRanks()
    assert [compare(slow, **values) for _ in range(5)] == [[]] * 5


FORWARD, SLOW_FORWARD, SLOW_READ, SLOW_SAVE = 0.05, 0.12, 0.5, 0.6  # seconds that a rank takes


def take(delays: dict) -> None:
    """In a rank: its clock of the phases moves by these seconds in each call of (module, name), and a little with each look."""
    clock = SimpleNamespace(now=0.0)

    def look(*_) -> float:
        clock.now += 0.0001
        return clock.now

    def plant(module, name, seconds) -> None:
        original = getattr(module, name)

        def delayed(*arguments):
            clock.now += seconds
            return original(*arguments)

        setattr(module, name, delayed)

    phases.HostClock.now, phases.time = look, SimpleNamespace(perf_counter=look, time=look)
    for (module, name), seconds in delays.items():
        plant(module, name, seconds)


def slow() -> None:
    """Rank 1 is slow in the forward, 2 while it waits for its data, 3 in the save."""
    rank = int(os.environ["RANK"])
    take({(NextToken, "loss_sum"): SLOW_FORWARD if rank == 1 else FORWARD, (train, "learning_rate"): SLOW_READ * (rank == 2),
          (run_module, "named_parameters"): SLOW_SAVE * (rank == 3)})


def test_slow_ranks_are_reported_with_their_phase_within_20_steps(tiny_run):
    run = tiny_run(MAX_STEPS=20, SAVE_EVERY=10, LOG_EVERY=10, **UNMEASURED)
    text = run.ends([0] * 4, slow)
    named = {(event["rank"], event["phase"]): event["ratio"] for event in run.lines("events") if event["event"] == "slow rank"}
    assert named.keys() == {(1, "forward"), (2, "data"), (3, "save")}, text
    assert 1.3 < named[1, "forward"] < SLOW_FORWARD / FORWARD + 0.2
    assert "[CPU0] warning: rank 1 is slow: its forward takes " in text
    metrics = run.metrics()[-1]
    assert FORWARD < metrics["forward_seconds"] < metrics["step_seconds"]
    fastest, slowest = metrics["fastest_rank"], metrics["slowest_rank"]
    assert fastest in (0, 3) and slowest in (1, 2)
    shown = f"{metrics['fastest_rank_seconds']:.3f} s (rank {fastest}) to {metrics['slowest_rank_seconds']:.3f} s (rank {slowest})"
    assert f" | Ranks: {shown} | ETA: " in text
