"""What this process is doing now: the watchdog reads it to find a job that hangs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

BACKGROUND_SECONDS = 0.5  # between the beats of beat_in_background


class Heartbeat:
    """The phase and step of this process, and when it last made progress.

    The training thread writes a few attributes and the watchdog's threads read them, without a lock.
    """

    def __init__(self) -> None:
        self.stacks_folder: Optional[Path] = None  # where the watchdog writes stack traces
        self.step, self.phase, self.is_waiting, self.last_beat = 0, "start-up", False, time.monotonic()

    def enter(self, phase: str, step: Optional[int] = None) -> None:
        """Record that a phase begins; the step stays as it is unless one is given."""
        self.phase = phase
        self.beat()
        if step is not None:
            self.step = step

    def beat(self) -> None:
        """Record that this process made progress."""
        # In this order: a reader must not see a process that works but last beat before it waited.
        self.last_beat, self.is_waiting = time.monotonic(), False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which this process waits for other ranks."""
        self.is_waiting, self.last_beat = True, time.monotonic()
        try:
            yield
        finally:
            self.beat()

    @contextmanager
    def beat_in_background(self) -> Iterator[None]:
        """A `with` block around one long call that cannot beat itself but has time-outs of its own."""
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
