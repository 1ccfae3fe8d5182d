"""The watchdog: ranks add up their progress in a store; if the sum stands still, it reports and exits."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional

from common.activity import ACTIVITY, tick
from common.errors import HangError
from common.text import print_safely
from parallel.process import write_error_file

POLL_SECONDS = 2.0  # between additions to the sum; at most a tenth of the time-out
ALARM_SECONDS = 0.05  # between looks after an alarm
PROGRESS, ALARM = "progress", "alarm"  # keys in the store: the sum, and whether a rank has seen a hang
REMEDY = ("The same command resumes from the last checkpoint; if a phase is merely slow, raise "
          "DISTRIBUTED_TIMEOUT")
# Set by extensions/hang_report.py: writes this rank's stacks, and reports for all ranks together.
report: Optional[Callable[["HangWatchdog"], None]] = None


class HangWatchdog:
    """Two threads in every rank: one adds its progress to the sum, the other ends this process after a hang.

    A job hangs if no rank makes progress for too long: a rank that waits depends on others, whose save may
    take long. The threads are separate because the store, which may be in rank 0's process or a launcher, can
    hang too.
    """

    def __init__(self, store: Any, rank: int, count: int, timeout_seconds: float, store_on_rank0: bool):
        self.store, self.rank, self.count, self.store_on_rank0 = store, rank, count, store_on_rank0
        self.set_timeout(timeout_seconds)
        self.sum = 0  # of all ranks' progress, as this rank knows it
        self.alarm = False
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    def set_timeout(self, seconds: float) -> None:
        self.timeout, self.interval = seconds, min(POLL_SECONDS, seconds / 10)

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
        self.alarm = True
        if report:
            report(self)
        else:
            faulthandler.dump_traceback(sys.stderr)
            report_sentence(f"hang: rank {self.rank} is in {ACTIVITY.phase} (step {ACTIVITY.step}); no rank "
                            f"made progress for DISTRIBUTED_TIMEOUT={self.timeout:g} s. {REMEDY}")
        os._exit(HangError.exit_code)


def report_sentence(sentence: str) -> None:
    """Report a hang to the launcher, or else on stderr."""
    if not write_error_file(HangError.exit_code, sentence):
        print_safely(f"error: {sentence}", sys.stderr)
