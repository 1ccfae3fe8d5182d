"""Checkpoints that a thread writes while training continues."""

import errno
import math
import os
import threading
import time

import pytest
import torch
from factories import UNMEASURED, assert_same_run, at_step, do_in_step, wait_until

import train
from checkpoint import store
from common.heartbeat import HEARTBEAT, Background, Cancelled
from run import life, saving

PATIENCE = 60


def hold(monkeypatch, until: threading.Event) -> None:
    """Let every thread that writes a checkpoint wait for an event."""
    original = life.write_tensors

    def write_tensors(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert until.wait(PATIENCE)
        return original(*arguments)

    monkeypatch.setattr(life, "write_tensors", write_tensors)


def test_training_continues_while_a_thread_writes_what_the_state_was(tiny_run, whole, monkeypatch):
    """The steps taken meanwhile are not in the checkpoint, and the bits of the run are the same."""
    run, written, seen = tiny_run(), threading.Event(), []
    hold(monkeypatch, written)

    def look() -> None:
        seen.extend(run.steps_saved())
        written.set()

    with at_step(4, look):
        assert run.train() == 0
    assert seen == [], "the save of step 2 ends after step 4"
    assert run.steps_saved() == [2, 4, 6]
    for step in (2, 4, 6):
        assert run.hashes(step) == whole.hashes(step) and store.verify(run.checkpoint(step))
    assert_same_run(run, whole, 6)
    saves = [(event["event"], event["step"]) for event in run.lines("events") if event["event"].startswith("save")]
    assert [step for name, step in saves if name == "save"] == [step for name, step in saves if name == "saved"] == [2, 4, 6]
    assert saves.index(("save", 2)) < saves.index(("saved", 2)) < saves.index(("save", 4)), "the next save waits"
    assert "; training stopped for " in (run.folder / "log" / "rank-0.txt").read_text()


def test_what_a_thread_cannot_write_ends_the_run_at_the_next_step(tiny_run, monkeypatch, capsys):
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1)

    def write_tensors(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(life, "write_tensors", write_tensors)
    with at_step(2, lambda: wait_until(lambda: "background" not in [thread.name for thread in threading.enumerate()])):
        assert run.train() == 5
    assert "step-00000001 could not be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert [line["step"] for line in run.lines("ledger")] == [1, 2]
    assert not [*(run.folder / "checkpoints").iterdir()]


def test_errors_that_pass_are_tried_again_in_the_thread_and_told(tiny_run, whole, monkeypatch, capsys):
    original, failures = life.write_tensors, iter([errno.ESTALE])

    def write_tensors(*arguments):
        if number := next(failures, None):
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    monkeypatch.setattr(life, "write_tensors", write_tensors)
    monkeypatch.setattr(store, "RETRY_SECONDS", (0.1,))
    run = tiny_run()
    assert run.train() == 0
    assert "step-00000002 could not be written: [Errno 116] Stale file handle" in capsys.readouterr().err
    assert_same_run(run, whole, 6)


@pytest.mark.parametrize("settings, plant", [({"ASYNC_SAVE": "false"}, None), ({}, "free_host_memory")])
def test_without_room_for_a_copy_training_stops_for_the_whole_save(tiny_run, whole, monkeypatch, capsys, settings, plant):
    run = tiny_run(**settings)
    if plant:
        monkeypatch.setattr(saving, plant, lambda: saving.SPARE_MEMORY)
    threads = []
    monkeypatch.setattr(saving, "Background", threads.append)
    assert run.train() == 0 and threads == []
    told = capsys.readouterr().err
    assert told.count("ASYNC_SAVE: training stops while checkpoints are written") == (1 if plant else 0), told
    assert_same_run(run, whole, 6)


def bad_gradient() -> None:
    train.gradient_norm = lambda model: torch.tensor(math.nan)


def test_a_bad_step_does_not_lose_the_checkpoint_that_is_being_written(tiny_run, monkeypatch):
    run, written = tiny_run(), threading.Event()
    hold(monkeypatch, written)
    monkeypatch.setattr(train, "gradient_norm", train.gradient_norm)
    original = train.guards.stop_non_finite

    def stop_non_finite(*arguments):
        assert run.steps_saved() == []
        written.set()
        original(*arguments)

    monkeypatch.setattr(train.guards, "stop_non_finite", stop_non_finite)
    with at_step(3, bad_gradient):
        assert run.train() == 4
    assert run.steps_saved() == [2] and store.verify(run.checkpoint(2))


def test_an_exit_that_does_not_wait_stops_the_thread_and_nothing_is_left_of_its_folder(tiny_run, monkeypatch):
    run, halted = tiny_run(), threading.Event()

    def write_tensors(*_):
        while True:
            HEARTBEAT.beat()
            halted.set()
            time.sleep(0.01)

    def fail() -> None:
        assert halted.wait(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(life, "write_tensors", write_tensors)
    with at_step(3, fail), pytest.raises(KeyboardInterrupt):
        run.train()
    assert not [*(run.folder / "checkpoints").iterdir()]


def fill_the_disk() -> None:
    """In a rank: let its thread fail, and train on until the ranks have agreed on it."""
    original = life.write_tensors

    def write_tensors(*arguments):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    life.write_tensors = write_tensors
    do_in_step(3, lambda: time.sleep(0.5))


def test_all_ranks_end_with_the_error_of_the_rank_that_writes(tiny_run):
    text = tiny_run().ends([5, 5], fill_the_disk)
    assert text.count("error: ") == 1 and "No space left on device" in text, text


def test_beats_of_a_thread_show_that_its_work_moves_but_not_that_the_process_does(monkeypatch):
    go, moved = threading.Event(), threading.Event()

    def work(warn) -> str:
        warn("slow")
        HEARTBEAT.beat()
        moved.set()
        assert go.wait(PATIENCE)
        return "done"

    HEARTBEAT.beat()
    before = HEARTBEAT.last_beat
    thread = Background(work)
    assert moved.wait(PATIENCE) and HEARTBEAT.last_beat == before
    go.set()
    told = []
    assert thread.result(told.append) == "done" and told == ["slow"]

    def endless(warn) -> None:
        while True:
            HEARTBEAT.beat()
            time.sleep(0.001)

    thread = Background(endless)
    thread.cancel()
    with pytest.raises(Cancelled):
        thread.result(told.append)


def test_a_wait_for_a_thread_that_moves_is_progress(monkeypatch):
    monkeypatch.setattr("common.heartbeat.BACKGROUND_SECONDS", 0.01)
    before = HEARTBEAT.last_beat

    def work(warn) -> None:
        wait_until(lambda: HEARTBEAT.beat() or HEARTBEAT.last_beat > before)

    Background(work).result(print)
    assert HEARTBEAT.last_beat > before
