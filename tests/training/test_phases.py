"""Where the time of a step goes, and which rank is named as slow."""

import os
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from factories import UNMEASURED, TinyRun, a_step, uneven_batches

import train
from common.heartbeat import HEARTBEAT, Heartbeat
from parallel.collectives import Ranks
from training import phases, state
from training.phases import COMPARED, CudaClock, Phases, SlowRanks, median_of_others


class Log:
    """Keeps what is logged."""

    def __init__(self):
        self.events, self.lines = [], []
        self.info = self.warn = self.lines.append

    def event(self, event, step, **facts):
        self.events.append((event, step, facts))


def fake_run(world_size=1, device="cpu"):
    ranks = SimpleNamespace(rank=0, world_size=world_size, device=SimpleNamespace(type=device),
                            all_reduce_floats=lambda values: [float(value) for value in values])
    return SimpleNamespace(ranks=ranks, log=Log())


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still until `clock.now` is changed; Unix time is 1000 more."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 1000 + clock.now))
    monkeypatch.setattr(phases.HostClock, "now", lambda self: clock.now)
    return clock


@pytest.fixture(autouse=True)
def quiet_heartbeat():
    """The heartbeat as at the start of a process."""
    HEARTBEAT.step, HEARTBEAT.part = 0, "start-up"
    yield
    HEARTBEAT.enter("start-up", 0)


def after(clock, seconds: float) -> None:
    clock.now += seconds


def take_step(clock, step: int, scale: float = 1.0) -> None:
    """A step of two micro-batches: data 1 s, forward 2 and 3, backward 4 and 5, waits of 10 and 20, update 6."""
    HEARTBEAT.enter("data", step)
    after(clock, 1 * scale)
    HEARTBEAT.enter("forward and backward")
    with HEARTBEAT.waiting():
        after(clock, 10 * scale)
    for forward, backward in ((2, 4), (3, 5)):
        HEARTBEAT.begin("forward")
        after(clock, forward * scale)
        HEARTBEAT.begin("backward")
        after(clock, backward * scale)
    HEARTBEAT.enter("update")
    with HEARTBEAT.waiting():
        after(clock, 20 * scale)
    after(clock, 6 * scale)
    HEARTBEAT.begin("other")
    after(clock, 100)


SECONDS = {"data": 1, "forward": 5, "backward": 9, "optimizer": 6, "communication": 30}


def test_each_second_of_a_step_counts_to_one_phase_and_pauses_to_none(clock):
    run = fake_run(world_size=2)
    run.ranks.all_reduce_floats = lambda values: [2 * value for value in values]  # the other rank has zeros: the mean is its own
    with Phases(run) as measured:
        for step, scale in ((1, 1), (2, 3)):
            take_step(clock, step, scale)
        read = measured.read_steps()
        assert read == {"step_seconds": 102, **{f"{name}_seconds": 2 * value for name, value in SECONDS.items()}}
        take_step(clock, 3)
        assert measured.read_steps()["step_seconds"] == 51, "only the steps since the last reading"
    assert HEARTBEAT.on_mark.__name__ == "ignore"


def test_a_single_rank_waits_for_nobody(clock):
    with Phases(fake_run()) as measured:
        take_step(clock, 1)
        assert measured.read_steps() == {"step_seconds": 51, "data_seconds": 1, "forward_seconds": 15, "backward_seconds": 9,
                                         "optimizer_seconds": 26}


def test_evaluations_and_saves_are_summed_and_each_evaluation_is_an_event(clock):
    run = fake_run(world_size=2)
    with Phases(run) as measured:
        take_step(clock, 1)
        HEARTBEAT.enter("validation", 1)
        after(clock, 3)
        with HEARTBEAT.waiting():
            after(clock, 4)
        HEARTBEAT.enter("a new task", 1)
        after(clock, 1)
        assert measured.read_pauses() == {"evaluation_seconds": 8}
        HEARTBEAT.enter("save", 1)
        after(clock, 7)
        HEARTBEAT.enter("data", 2)
        assert measured.read_pauses() == {"save_seconds": 7}
        assert measured.read_pauses() == {}
        assert measured.own_pauses == {"evaluation": 4, "save": 7}, "without the waits"
    assert run.log.events == [("evaluation", 1, {"what": "validation", "seconds": 7}),
                              ("evaluation", 1, {"what": "a new task", "seconds": 1})]


def test_marks_are_told_in_order_with_their_unix_times(clock):
    told = []
    with Phases(fake_run(world_size=2), lambda *mark: told.append(mark)) as measured:
        take_step(clock, 7)
        HEARTBEAT.enter("save", 7)
        measured.read_steps()
    assert told == [(1000, "other", 0), (1000, "data", 7), (1001, "forward", 7), (1001, "communication", 7),
                    (1011, "forward", 7), (1013, "backward", 7), (1017, "forward", 7), (1020, "backward", 7),
                    (1025, "optimizer", 7), (1025, "communication", 7), (1045, "optimizer", 7), (1051, "other", 7)], \
        "also that of the pause"


