"""The watchdog: ranks add up their progress in a store; if the sum stands still, it reports and exits."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any

from common.activity import ACTIVITY, tick
from common.errors import HangError
from common.text import print_safely
from parallel.process import write_error_file

POLL_SECONDS = 2.0  # between additions to the sum; at most a tenth of the time-out
RESPONSE_SECONDS = 4.0  # for a rank to write its stacks, and for the store to respond
ALARM_SECONDS = 0.05  # between looks into the store after an alarm
# Keys in the store: the sum of all ranks' progress, whether a rank has raised the alarm, how many have then
# published their status, how many want to report, whether the report is written, and how many know that.
PROGRESS, ALARM, PUBLISHED, REPORTERS, REPORTED, LEAVING = ("progress", "alarm", "published", "reporters",
                                                            "reported", "leaving")


class HangWatchdog:
    """Two threads in every rank: one adds its progress to the sum, the other ends this process after a hang.

    A job hangs if no rank makes progress for too long: a rank that waits depends on others, whose save may
    take long. The threads are separate because the store, which may be in rank 0's process or a launcher, can
    hang too.
    """

    def __init__(self, store: Any, rank: int, count: int, timeout_seconds: float, store_on_rank0: bool):
        self.store, self.rank, self.count, self.store_on_rank0 = store, rank, count, store_on_rank0
        self.timeout, self.interval = timeout_seconds, min(POLL_SECONDS, timeout_seconds / 10)
        self.sum = 0  # of all ranks' progress, as this rank knows it
        self.alarm = self.was_reported = False
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Stop both threads; after an alarm, wait instead for the watching thread to end this process."""
        while self.alarm and self.threads[1].is_alive():
            time.sleep(ALARM_SECONDS)
        self.stopped.set()
        for thread in self.threads:
            thread.join(POLL_SECONDS)

    def _exchange(self) -> None:
        added = 0
        # The store ends with its host process; other ranks then fail in a collective, or hang.
        with suppress(RuntimeError):
            while not self.stopped.wait(self.interval):
                if ACTIVITY.in_foreign_call:
                    tick()
                ticks = ACTIVITY.ticks
                self.sum, added = self.store.add(PROGRESS, ticks - added), ticks
                self.alarm = self.alarm or self.store.check([ALARM])

    def _progress(self) -> Any:
        return self.sum, ACTIVITY.ticks

    def _watch(self) -> None:
        before, idle_seconds, looked_at = None, 0.0, time.monotonic()
        while not self.stopped.wait(self.interval / 2):
            seconds, looked_at = time.monotonic() - looked_at, time.monotonic()
            if seconds < 1 + 3 * self.interval:  # else suspended, perhaps with the whole job
                idle_seconds += seconds
            if (progress := self._progress()) != before:
                before, idle_seconds = progress, 0.0
            if self.alarm or idle_seconds > self.timeout:
                self._end_process()

    def _end_process(self) -> None:
        """Write the stacks, let one rank report for all, and exit."""
        self.alarm = True
        folder, stream = ACTIVITY.stacks_folder, sys.stderr
        try:
            if folder is not None:
                folder.mkdir(exist_ok=True)
                stream = open(folder / f"stacks-rank-{self.rank}.txt", "w", encoding="utf-8")
            faulthandler.dump_traceback(stream)
        except OSError as error:
            print_safely(f"no stacks of rank {self.rank}: {error}", sys.stderr)
        own = {"phase": ACTIVITY.phase, "step": ACTIVITY.step, "waits": ACTIVITY.is_waiting}
        thread = threading.Thread(target=self._agree_and_report, args=(own,), daemon=True)
        thread.start()
        thread.join(4 * (self.interval + RESPONSE_SECONDS))
        if not self.was_reported:  # the store does not respond
            self._report({self.rank: own}, is_connected=False)
        os._exit(HangError.exit_code)

    def _agree_and_report(self, own: dict[str, Any]) -> None:
        """Publish this rank's status; the first rank that knows all of them, or waited for them, reports."""
        with suppress(RuntimeError):  # the store's host has exited
            self.store.set(ALARM, b"1")
            self.store.set(f"rank-{self.rank}", json.dumps(own).encode())
            self.store.add(PUBLISHED, 1)
            self._wait(lambda: self.store.add(PUBLISHED, 0) >= self.count)
            if self.store.add(REPORTERS, 1) == 1:
                keys = {rank: f"rank-{rank}" for rank in range(self.count)}
                self._report({rank: json.loads(self.store.get(key)) for rank, key in keys.items()
                              if self.store.check([key])})
                self.store.set(REPORTED, b"1")
            else:
                # A launcher ends all ranks when one exits, perhaps before the report is written.
                self._wait(lambda: self.store.check([REPORTED]))
                write_error_file(HangError.exit_code, f"rank {self.rank} stops, because the job hangs",
                                 is_secondary=True)
            self.was_reported = True
            self.store.add(LEAVING, 1)
            if self.store_on_rank0 and self.rank == 0:
                self._wait(lambda: self.store.add(LEAVING, 0) >= self.store.add(PUBLISHED, 0))

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.interval + RESPONSE_SECONDS
        while time.monotonic() < deadline and not until():
            time.sleep(ALARM_SECONDS)

    def _report(self, statuses: dict[int, dict[str, Any]], is_connected: bool = True) -> None:
        """Report which ranks hang, where, and the remedy: to the launcher, or else on stderr."""
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.count) if is_connected else [self.rank]:
            status = statuses.get(rank, {"phase": "", "step": 0, "waits": False})
            key = (rank in statuses, status["waits"], status["phase"], status["step"])  # suspects sort first
            groups.setdefault(key, []).append(rank)
        who = ", ".join(describe_ranks(ranks, *key) for key, ranks in sorted(groups.items()))
        if not is_connected:
            host = "rank 0" if self.store_on_rank0 else "the first launcher"
            who += f"; nothing is known of the others, because the status store in {host} does not respond"
        folder = ACTIVITY.stacks_folder
        where = "above" if folder is None else f"in {folder / 'stacks-rank-*.txt'}"
        sentence = (f"hang: {who}; no rank made progress for DISTRIBUTED_TIMEOUT={self.timeout:g} s. The "
                    f"stack traces are {where}. The same command resumes from the last checkpoint; if a "
                    "phase is merely slow, raise DISTRIBUTED_TIMEOUT")
        if not write_error_file(HangError.exit_code, sentence):
            print_safely(f"error: {sentence}", sys.stderr)


def describe_ranks(ranks: list[int], responds: bool, waits: bool, phase: str, step: int) -> str:
    """Return a clause such as "ranks 0, 2-7 wait in save (step 500)"."""
    runs = [[rank for _, rank in run]
            for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    one = len(ranks) == 1
    noun, wait, be, do = ("rank", "waits", "is", "does") if one else ("ranks", "wait", "are", "do")
    if not responds:
        return f"{noun} {names} {do} not respond"
    return f"{noun} {names} {wait if waits else be} in {phase} (step {step})"
