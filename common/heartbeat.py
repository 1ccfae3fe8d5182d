"""What this process is doing at the moment, for the watchdog that ends a job which hangs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

KEEP_SECONDS = 0.5  # between two signs of life during a long call


class Heartbeat:
    """What this process is doing: a few attributes that the training thread writes and the watch reads, without a lock."""

    def __init__(self) -> None:
        self.folder: Optional[Path] = None  # for stacks
        self.step, self.phase, self.waits, self.moved = 0, "start-up", False, time.monotonic()

    def enter(self, phase: str, step: Optional[int] = None) -> None:
        """Note that a phase begins, at a step that stays until another is given."""
        self.phase = phase
        self.move()
        if step is not None:
            self.step = step

    def move(self) -> None:
        """Note that something is done, and the next begun."""
        self.moved, self.waits = time.monotonic(), False  # in this order: one that works has moved since it waited

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which this process waits for the others."""
        self.waits, self.moved = True, time.monotonic()
        try:
            yield
        finally:
            self.move()

    @contextmanager
    def kept_moving(self) -> Iterator[None]:
        """A `with` block in one long call that cannot say what it does, but ends by itself where nothing comes any more."""
        done = threading.Event()

        def keep() -> None:
            while not done.wait(KEEP_SECONDS):
                self.move()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def told(self) -> dict[str, Any]:
        """The same as a JSON-like value; `still` is the seconds since it moved."""
        return {"step": self.step, "phase": self.phase, "waits": self.waits, "still": time.monotonic() - self.moved}


HEARTBEAT = Heartbeat()
