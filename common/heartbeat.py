"""The current activity of this process, which the watchdog reads to detect hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

BACKGROUND_SECONDS = 0.5  # between beats in beat_in_background, and looks at a Background
CANCEL_SECONDS = 30.0
# The first subphase of a phase, if its name differs.
SUBPHASES = {"forward and backward": "forward", "update": "optimizer", "start-up": "other",
             "the end": "other"}


class Heartbeat:
    """The phase and step of this process, and when it last made progress; read without a lock."""

    def __init__(self) -> None:
        self.stacks_folder: Optional[Path] = None  # for the watchdog's stack traces
        self.step, self.phase, self.is_waiting, self.last_beat = 0, "start-up", False, time.monotonic()
        self.subphase, self.started = SUBPHASES[self.phase], time.time()
        # Called when a subphase begins, and when a wait in it begins or ends.
        self.on_mark: Callable[[str, bool], None] = lambda subphase, waits: None
        self.local = threading.local()  # its `on_beat` replaces the beats of a background thread

    def enter(self, phase: str, step: Optional[int] = None) -> None:
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
        if on_beat := getattr(self.local, "on_beat", None):
            return on_beat()
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
        return {"step": self.step, "phase": self.phase, "waiting": self.is_waiting,
                "idle_seconds": time.monotonic() - self.last_beat}


HEARTBEAT = Heartbeat()


class Cancelled(Exception):
    """The work of a Background was cancelled."""


class Background(threading.Thread):
    """A thread that calls work(warn). Its beats show that the work moves, but not that the process does."""

    def __init__(self, work: Callable[[Callable[[str], None]], Any]):
        super().__init__(name="background", daemon=True)
        self.work, self.warnings, self.beats, self.is_cancelled = work, list[str](), 0, False
        self.value: Any = None
        self.error: Optional[BaseException] = None
        self.start()

    def run(self) -> None:
        HEARTBEAT.local.on_beat = self._beat
        try:
            self.value = self.work(self.warnings.append)
        except BaseException as error:  # raised in the thread that waits
            self.error = error

    def _beat(self) -> None:
        self.beats += 1
        if self.is_cancelled:
            raise Cancelled

    def result(self, warn: Callable[[str], None]) -> Any:
        """Wait for the end of the work; return its value or raise its error, after its warnings."""
        while self.is_alive():
            before = self.beats
            self.join(BACKGROUND_SECONDS)
            if self.beats > before:
                HEARTBEAT.beat()
        for warning in self.warnings:
            warn(warning)
        if self.error:
            raise self.error
        return self.value

    def cancel(self) -> None:
        self.is_cancelled = True
        self.join(CANCEL_SECONDS)
