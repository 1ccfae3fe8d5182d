"""What this process is doing now: the watchdog reads it to find a job that hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

BACKGROUND_SECONDS = 0.5  # between the beats of beat_in_background
# The parts that phases begin with, where their names differ.
PARTS = {"forward and backward": "forward", "update": "optimizer", "start-up": "other", "the end": "other"}


def ignore(part: str, waits: bool) -> None:
    """Nobody measures the phases."""


class Heartbeat:
    """The phase and step of this process, and when it last made progress.

    The training thread writes a few attributes and the watchdog's threads read them, without a lock.
    """

    def __init__(self) -> None:
        self.stacks_folder: Optional[Path] = None  # where the watchdog writes stack traces
        self.step, self.phase, self.is_waiting, self.last_beat = 0, "start-up", False, time.monotonic()
        self.part, self.started = PARTS[self.phase], time.time()
        # Told of each part that begins, and when a wait in it begins and ends.
        self.on_mark: Callable[[str, bool], None] = ignore

    def enter(self, phase: str, step: Optional[int] = None) -> None:
        """Record that a phase begins; the step stays as it is unless one is given."""
        self.phase = phase
        if step is not None:
            self.step = step
        self.begin(PARTS.get(phase, phase))

    def begin(self, part: str) -> None:
        """Record that a part of the phase begins, which reports of a hang do not name."""
        self.part = part
        self.beat()
        self.on_mark(part, False)

    def beat(self) -> None:
        """Record that this process made progress."""
        # In this order: a reader must not see a process that works but last beat before it waited.
        self.last_beat, self.is_waiting = time.monotonic(), False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which this process waits for other ranks."""
        self.is_waiting, self.last_beat = True, time.monotonic()
        self.on_mark(self.part, True)
        try:
            yield
        finally:
            self.beat()
        self.on_mark(self.part, False)  # not after an error of the device, which the mark would raise again

    @contextmanager
    def beat_in_background(self) -> Iterator[None]:
        """A `with` block around one long call that cannot beat but has its own time-outs."""
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
