"""What this process does now: its phase, its step, and a counter of progress, which the watchdog reads.

The counter advances at the begin and the end of each phase and each wait for other ranks. Only a long loop
without these calls `tick`, and a library's call that cannot is a `foreign_call`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

CANCEL_SECONDS = 30.0
COMMUNICATION = "communication"  # a phase within any other: a wait for other ranks


class Activity:
    """The activity of this process; its threads read it without a lock."""

    def __init__(self) -> None:
        self.started = time.time()
        self.phase, self.step = "start-up", 0  # a step counts from 1 once it begins
        self.is_waiting = False  # for other ranks, in its phase
        self.ticks = 0  # of its progress; a process is stuck while they stand still
        self.in_foreign_call = False  # which cannot tick, but has its own time-out
        self.stacks_folder: Optional[Path] = None  # for the watchdog's stack traces
        self.hooks: Sequence[Callable[[str], AbstractContextManager]] = ()  # `Extension.phase` of a run


ACTIVITY = Activity()


def tick() -> None:
    """Count the progress of a long loop; a thread that was cancelled ends here."""
    if getattr(threading.current_thread(), "is_cancelled", False):
        raise Cancelled
    ACTIVITY.ticks += 1


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A `with` block around a part of the work, which extensions measure and the watchdog names."""
    before = ACTIVITY.phase
    if name == COMMUNICATION:
        ACTIVITY.is_waiting = True
    else:
        ACTIVITY.phase = name
    ACTIVITY.ticks += 1
    with ExitStack() as stack:
        for hook in ACTIVITY.hooks:
            stack.enter_context(hook(name))
        yield
    # Not after an error, whose report names the phase.
    ACTIVITY.phase, ACTIVITY.is_waiting = before, False
    ACTIVITY.ticks += 1


waiting = partial(phase, COMMUNICATION)  # a `with` block in which this process waits for other ranks


@contextmanager
def foreign_call() -> Iterator[None]:
    """A `with` block around a long call of a library that cannot tick, but has its own time-outs."""
    ACTIVITY.in_foreign_call = True
    try:
        yield
    finally:
        ACTIVITY.in_foreign_call = False


class Cancelled(Exception):
    """The work of a Background was cancelled."""


class Background(threading.Thread):
    """A thread that calls work(warn), which must tick: only there can it be cancelled."""

    def __init__(self, work: Callable[[Callable[[str], None]], Any]):
        super().__init__(name="background", daemon=True)
        self.work, self.warnings, self.is_cancelled = work, list[str](), False
        self.value: Any = None
        self.error: Optional[BaseException] = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.work(self.warnings.append)
        except BaseException as error:  # raised in the thread that waits
            self.error = error

    def result(self, warn: Callable[[str], None]) -> Any:
        """Wait for the end of the work; return its value or raise its error, after its warnings."""
        self.join()
        for warning in self.warnings:
            warn(warning)
        if self.error:
            raise self.error
        return self.value

    def cancel(self) -> None:
        self.is_cancelled = True
        self.join(CANCEL_SECONDS)
