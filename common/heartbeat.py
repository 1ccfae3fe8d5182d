"""The current activity of this process, which the watchdog reads to detect hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

BACKGROUND_SECONDS = 0.5  # between beats in beat_in_background
# The first subphase of a phase, if its name differs.
SUBPHASES = {"forward and backward": "forward", "update": "optimizer", "start-up": "other",
             "the end": "other"}


def ignore(subphase: str, waits: bool) -> None:
    """Do nothing; the default of `Heartbeat.on_mark`."""


class Heartbeat:
    """The phase and step of this process, and when it last made progress.

    The training thread writes a few attributes and the watchdog's threads read them, without a lock.
    """

    def __init__(self) -> None:
        self.stacks_folder: Optional[Path] = None  # for the watchdog's stack traces
        self.step, self.phase, self.is_waiting, self.last_beat = 0, "start-up", False, time.monotonic()
        self.subphase, self.started = SUBPHASES[self.phase], time.time()
        # Called when a subphase begins, and when a wait in it begins or ends.
        self.on_mark: Callable[[str, bool], None] = ignore

    def enter(self, phase: str, step: Optional[int] = None) -> None:
        """Record the start of a phase, and of a step if one is given."""
        self.phase = phase
        if step is not None:
            self.step = step
        self.begin(SUBPHASES.get(phase, phase))

    def begin(self, subphase: str) -> None:
        """Record the start of a subphase, which is measured, but not named in reports of a hang."""
        self.subphase = subphase
        self.beat()
        self.on_mark(subphase, False)

    def beat(self) -> None:
        """Record that this process made progress."""
        # The time first: readers must not see a working process whose last beat was before its wait.
        self.last_beat, self.is_waiting = time.monotonic(), False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which this process waits for other ranks."""
        self.is_waiting, self.last_beat = True, time.monotonic()
        self.on_mark(self.subphase, True)
        try:
            yield
        finally:
            self.beat()
        self.on_mark(self.subphase, False)  # not after a device error, which a mark would raise again

    @contextmanager
    def beat_in_background(self) -> Iterator[None]:
        """A `with` block around a long call that cannot beat but has its own time-outs."""
        done = threading.Event()

        def keep_beating() -> None:
            while not done.wait(BACKGROUND_SECONDS):
                self.beat()

        thread = threading.Thread(target=keep_beating, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def status(self) -> dict[str, Any]:
        """Return the attributes as a JSON-like value, with the seconds since the last beat."""
        return {"step": self.step, "phase": self.phase, "waiting": self.is_waiting,
                "idle_seconds": time.monotonic() - self.last_beat}


HEARTBEAT = Heartbeat()
