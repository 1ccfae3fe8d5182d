"""The report of a hang: each rank writes its stacks, and one reports which ranks are where."""

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any

from common.activity import ACTIVITY
from common.errors import HangError
from common.text import print_safely
from parallel import process
from parallel.process import (
    ALARM,
    ALARM_SECONDS,
    HANG_REMEDY,
    HangWatchdog,
    report_sentence,
    write_error_file,
)

RESPONSE_SECONDS = 4.0  # for a rank to write its stacks, and for the store to respond
# Keys in the store: how many ranks have published their status, how many want to report, whether the report
# is written, and how many know that.
PUBLISHED, REPORTERS, REPORTED, LEAVING = "published", "reporters", "reported", "leaving"


def report(watchdog: HangWatchdog) -> None:
    """Write the stacks of this rank, and let one rank report for all."""
    folder, stream = ACTIVITY.stacks_folder, sys.stderr
    try:
        if folder is not None:
            folder.mkdir(exist_ok=True)
            stream = open(folder / f"stacks-rank-{watchdog.rank}.txt", "w", encoding="utf-8")
        faulthandler.dump_traceback(stream)
    except OSError as error:
        print_safely(f"no stacks of rank {watchdog.rank}: {error}", sys.stderr)
    own = {"phase": ACTIVITY.phase, "step": ACTIVITY.step, "waits": ACTIVITY.is_waiting}
    together = HangReport(watchdog, own)
    together.join(4 * (watchdog.interval + RESPONSE_SECONDS))
    if not together.is_complete:  # the store does not respond
        together.write({watchdog.rank: own}, is_connected=False)


process.report_hang = report


class HangReport(threading.Thread):
    """Publishes this rank's status; the first rank that knows all of them, or waited for them, reports."""

    def __init__(self, watchdog: HangWatchdog, own: dict[str, Any]):
        super().__init__(daemon=True)
        self.watchdog, self.own, self.is_complete = watchdog, own, False
        self.start()

    def run(self) -> None:
        store, rank, count = self.watchdog.store, self.watchdog.rank, self.watchdog.count
        with suppress(RuntimeError):  # the store's host has exited
            store.set(ALARM, b"1")
            store.set(f"rank-{rank}", json.dumps(self.own).encode())
            store.add(PUBLISHED, 1)
            self._wait(lambda: store.add(PUBLISHED, 0) >= count)
            if store.add(REPORTERS, 1) == 1:
                keys = {each: f"rank-{each}" for each in range(count)}
                self.write({each: json.loads(store.get(key)) for each, key in keys.items()
                            if store.check([key])})
                store.set(REPORTED, b"1")
            else:
                # A launcher ends all ranks when one exits, perhaps before the report is written.
                self._wait(lambda: store.check([REPORTED]))
                write_error_file(HangError.exit_code, f"rank {rank} stops, because the job hangs",
                                 is_secondary=True)
            self.is_complete = True
            store.add(LEAVING, 1)
            if self.watchdog.store_on_rank0 and rank == 0:
                self._wait(lambda: store.add(LEAVING, 0) >= store.add(PUBLISHED, 0))

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.watchdog.interval + RESPONSE_SECONDS
        while time.monotonic() < deadline and not until():
            time.sleep(ALARM_SECONDS)

    def write(self, statuses: dict[int, dict[str, Any]], is_connected: bool = True) -> None:
        """Report which ranks hang, where, and the remedy."""
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.watchdog.count) if is_connected else [self.watchdog.rank]:
            status = statuses.get(rank, {"phase": "", "step": 0, "waits": False})
            key = (rank in statuses, status["waits"], status["phase"], status["step"])  # suspects sort first
            groups.setdefault(key, []).append(rank)
        who = ", ".join(describe_ranks(ranks, *key) for key, ranks in sorted(groups.items()))
        if not is_connected:
            host = "rank 0" if self.watchdog.store_on_rank0 else "the first launcher"
            who += f"; nothing is known of the others, because the status store in {host} does not respond"
        folder = ACTIVITY.stacks_folder
        where = "above" if folder is None else f"in {folder / 'stacks-rank-*.txt'}"
        report_sentence(f"hang: {who}; no rank made progress for DISTRIBUTED_TIMEOUT="
                        f"{self.watchdog.timeout:g} s. The stack traces are {where}. {HANG_REMEDY}")


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
