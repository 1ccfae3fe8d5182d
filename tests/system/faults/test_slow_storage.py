"""A disk that answers late, fails now and then, or is full for a while: no hang, no lost line, and the goodput shows it."""

import errno
import os
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from factories import assert_same_run

from common.activity import ACTIVITY
from data_pipeline import shards
from dataloaders import Mixing, RowOrder, load_steps
from extensions.report.data import RunReader
from run import log as run_log


class Disk:
    """A log's file whose writes take some seconds, and of which some fail; a full disk takes half of the line before."""

    def __init__(self, file, fails, seconds: float):
        self.file, self.fails, self.seconds = file, fails, seconds

    def write(self, data: bytes) -> int:
        time.sleep(self.seconds)
        if error := self.fails():
            raise OSError(error, os.strerror(error))
        return self.file.write(data[:1 + len(data) // 2])

    def __getattr__(self, name):
        return getattr(self.file, name)


def on_disk(monkeypatch, fails=lambda: 0, seconds: float = 0.0, names=("",)) -> None:
    """Put the logs with these words in their names on such a disk."""
    opened = run_log.LineFile.open

    def open_there(lines, path):
        opened(lines, path)
        if any(name in path.name for name in names):
            lines.file = Disk(lines.file, fails, seconds)
        return lines

    monkeypatch.setattr(run_log.LineFile, "open", open_there)


def in_turn(*errors: int):
    """A function that returns these errors, or 0, in turn."""
    calls = iter(range(10**9))
    return lambda: errors[next(calls) % len(errors)]


@pytest.mark.parametrize("errors", [(0, 0, errno.EIO), (*[0] * 40, *[errno.ENOSPC] * 12)])
def test_no_line_is_lost_on_a_disk_that_fails_now_and_then_or_is_full_for_a_while(errors, whole, tiny_run, monkeypatch, capsys):
    run = tiny_run()
    monkeypatch.setattr(run_log, "CLOSE_RETRY_SECONDS", [0] * 30)
    on_disk(monkeypatch, in_turn(*errors))
    assert run.train() == 0
    assert_same_run(run, whole, 6)
    events = [sorted(line["event"] for line in each.lines("events")) for each in (run, whole)]  # "saved" comes when it comes
    assert events[0] == events[1]
    assert "cannot be written: " in capsys.readouterr().err


def test_a_read_that_fails_now_and_then_is_repeated_and_one_that_always_fails_ends_with_the_file(whole, tiny_run, monkeypatch, capfd):
    run, fails, read = tiny_run(), in_turn(0, 0, 0, 0, errno.EIO), os.pread

    def pread(descriptor, *arguments):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin") and (error := fails()):
            raise OSError(error, os.strerror(error))
        return read(descriptor, *arguments)

    monkeypatch.setattr(shards.os, "pread", pread)
    monkeypatch.setattr(shards, "READ_RETRY_SECONDS", (0.001, 0.002))
    assert run.train() == 0
    assert_same_run(run, whole, 6)
    assert "Input/output error; reading it again in 0.001 s" in capfd.readouterr().err
    fails = in_turn(errno.EIO)
    assert tiny_run(RUN_NAME="other").train() == 3 and "cannot be read: Input/output error" in capfd.readouterr().err


def test_a_slow_disk_shows_in_the_goodput_and_is_not_counted_as_steps(tiny_run, monkeypatch):
    run, seconds, phases = tiny_run(VALIDATE_EVERY=0, HELLASWAG_EVERY=0, SAMPLE_EVERY=0, SAVE_EVERY=0), 0.05, []
    on_disk(monkeypatch, lambda: phases.append(ACTIVITY.phase), seconds, names=("ledger", "metrics"))
    assert run.train() == 0
    assert set(phases) == {"other"}, "not a phase of the step"
    reader = RunReader(run.folder, "run")
    reader.read()
    parts = {part["name"]: part["seconds"] for part in reader.data(10)["goodput"]["parts"]}
    assert parts["other"] + parts["start-up"] > (len(phases) - 10) * seconds > 0


def test_a_slow_reader_makes_progress_and_one_that_does_not_read_makes_none():
    order, may_read = RowOrder(Mixing((8,)), 8, 1, 0, 0, 1), threading.Semaphore(0)

    def read_rows(rows: np.ndarray) -> torch.Tensor:
        may_read.acquire()
        return torch.zeros(1)

    with load_steps(read_rows, order, torch.device("cpu"), torch.numel, ahead=1) as steps:
        before = ACTIVITY.ticks
        time.sleep(0.1)
        assert ACTIVITY.ticks == before
        may_read.release(100)
        next(steps)
        assert ACTIVITY.ticks >= before + 8


def test_a_slow_log_makes_progress_and_the_threads_of_trackers_do_not(tmp_path):
    lines = run_log.LineFile(print).open(tmp_path / "lines")
    before = ACTIVITY.ticks
    lines.write("one")
    assert ACTIVITY.ticks == before + 1
    thread = threading.Thread(target=lines.write, args=("two",))
    thread.start()
    thread.join()
    assert ACTIVITY.ticks == before + 1
    with suppress(OSError):
        lines.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"
