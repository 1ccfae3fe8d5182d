"""Keeps OpenMP's threads on a CPU from spinning when other programs begin after the start.

`choose_waiting` decides at the start, because GNU's OpenMP reads its limit of 300,000 turns only once. But
threads turn only 100 times if the program has more of them than the machine has cores (libgomp, wait.h and
env.c). So while the machine is busy, further threads exist that only sleep. Results do not depend on it.
"""

import os
import time
from functools import cache
from pathlib import Path
from threading import Event, Thread

import torch

from parallel.process import WAITING
from run.extensions import Extension
from run.run import Run

PERIOD = 2.0  # seconds between two looks
BUSY, IDLE = 0.15, 0.05  # share of its time that a thread waited for a core
STATISTICS = Path("/proc/self/schedstat")  # of the main thread: nanoseconds that it ran, and waited to run
GRAIN = 2**15  # numbers for each thread, at least, before torch uses a further one


class Waiting(Extension):
    """Watches from the start of a run."""

    def run_start(self, run: Run) -> None:
        watch()


EXTENSION = Waiting


@cache
def watch() -> None:
    """From now on, have sleeping threads while the machine is busy, unless the environment decides."""
    threads = torch.get_num_threads()
    if threads > 1 and STATISTICS.exists() and not any(name in os.environ for name in WAITING):
        Thread(target=look, args=(threads,), name="waiting", daemon=True).start()


def look(threads: int) -> None:
    release, is_held, before = Event(), False, (0, 0)
    while True:
        time.sleep(PERIOD)
        ran, waited = map(int, STATISTICS.read_text().split()[:2])
        spent, before = (ran - before[0], waited - before[1]), (ran, waited)
        share = spent[1] / max(1, sum(spent))
        if is_held and share < IDLE:
            release.set()
            release, is_held = Event(), False
        elif not is_held and share > BUSY:
            is_held = True
            for _ in range(1 + (len(os.sched_getaffinity(0)) - threads) // (threads - 1)):
                Thread(target=hold, args=(release,), name="waiting", daemon=True).start()


def hold(release: Event) -> None:
    """Begin OpenMP's threads by an operation. They sleep, and end with this thread."""
    torch.zeros(torch.get_num_threads() * GRAIN).exp_()
    release.wait()
