"""What all ranks compute once before the first step: where it is kept, that one job writes it, how far it is."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from common.cache import Cache
from common.errors import DataError
from common.files import FileLock
from common.text import duration
from parallel.collectives import Ranks, StopSignals, leave_if_stopped

T = TypeVar("T")
PROGRESS_SECONDS = 15
WAIT_SECONDS = 1.0  # between two looks whether another job is done


@dataclass(frozen=True)
class Once:
    """Who computes, where it is kept, and whom it is told. All of its methods are collective: every rank must call them."""

    cache: Cache
    ranks: Ranks
    signals: StopSignals
    info: Callable[[str], None]
    told: set[str] = field(default_factory=set)

    def place_to_write(self, rows, name: str = "") -> Path:
        """The folder for what is computed of these rows, told where it is not the usual one.

        Raises:
            DataError: none can be written.
        """
        def find() -> list[str]:
            place, why = self.cache.place_to_write(rows.folder, rows.fingerprint, name)
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DataError(f"{place} cannot be made: {error}; set CACHE_DIR to another folder") from error
            return [str(place), why]

        place, why = self.ranks.broadcast(self.ranks.on_rank0(find))
        if why and why not in self.told:
            self.told.add(why)
            self.info(f"{why}; what is computed once goes to {self.cache.otherwise} (CACHE_DIR would be another place)")
        return Path(place)

    @contextmanager
    def one_writer(self, path: Path) -> Iterator[None]:
        """A `with` block that one job at a time is in; rank 0 holds the lock for its job. The others wait, and tell for whom.

        Args:
            path: of the lock.
        Raises:
            DataError: it cannot be written.
            Interrupted: a rank was signalled while this job waited.
        """
        def open_lock() -> FileLock:
            try:
                return stack.enter_context(FileLock(path))
            except OSError as error:
                raise DataError(f"{path} cannot be written: {error.strerror or error}; make it writable, or set CACHE_DIR to "
                                "another folder") from error

        def take() -> str:
            try:
                return lock.take()
            except OSError as error:
                self.info(f"{path} cannot be locked on this file system ({error}); let no other job compute the same meanwhile")
                return ""

        with ExitStack() as stack:
            lock, told = self.ranks.on_rank0(open_lock), False
            while holder := self.ranks.broadcast(self.ranks.on_rank0(take)):
                if not told:
                    self.info(f"{holder} computes the same ({path}); waiting for it")
                told = True
                leave_if_stopped(self.ranks, self.signals)
                time.sleep(WAIT_SECONDS)
            yield

    def blocks(self, blocks: Sequence[T], what: str) -> Iterator[T]:
        """The blocks of a long computation; how much of `what` is done is told now and then.

        Raises:
            Interrupted: a rank was signalled.
        """
        started = told = time.perf_counter()
        for number, block in enumerate(blocks, start=1):
            leave_if_stopped(self.ranks, self.signals)
            yield block
            now, share = time.perf_counter(), number / len(blocks)
            if now - told > PROGRESS_SECONDS:
                self.info(f"{what}: {share:.0%} | ETA: {duration((now - started) * (1 - share) / share)}")
                told = now
