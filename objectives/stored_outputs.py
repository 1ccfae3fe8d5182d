"""Outputs of a frozen model that all ranks compute once, before the first step, and store beside the data.

`ComputeOnce` is the mechanism; precompute.py has the kinds of outputs.
"""

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Protocol, TypeVar

import numpy as np

from common.errors import DataError
from common.files import FileLock, atomic_write, read_plain
from common.text import duration
from common.verified_files import Cache, WatchedFile, file_stamp, load_verified, save_verified
from data_pipeline.batch import Batch, ReadRows
from parallel.collectives import Ranks, RunContext

T = TypeVar("T")
PROGRESS_SECONDS = 15
WAIT_SECONDS = 1.0  # between two attempts to take another job's lock
COMMIT_SECONDS = 10


class StoredOutputs(Protocol[T]):
    """One kind of outputs for the rows of one split. Collective: every rank must call each method."""

    rows: Any  # of dataloaders.Rows
    name: str  # of the file or folder

    def load(self, path: Path, once: "ComputeOnce") -> Optional[T]:
        """Return the rows with their outputs; None if those at `path` are missing, stale or damaged."""

    def complete(self, path: Path, once: "ComputeOnce") -> T:
        """Compute and store what `load` misses at `path`; return the rows with their outputs."""


@dataclass(frozen=True)
class ComputeOnce:
    """Loads outputs, or computes them while other jobs wait. Collective: every rank must call each method."""

    cache: Cache
    context: RunContext
    announced: set[str] = field(default_factory=set)

    @property
    def ranks(self) -> Ranks:
        """The process group."""
        return self.context.ranks

    def info(self, message: str) -> None:
        """Log a message."""
        self.context.log.info(message)

    def load_or_compute(self, outputs: StoredOutputs[T]) -> T:
        """Return the rows with their outputs, loaded or else computed and stored.

        Raises:
            DataError: there is no folder to store them in.
            Interrupted: a rank was signalled.
        """
        rows = outputs.rows
        for place in self.cache.places(rows.token_set.folder, rows.fingerprint):
            if (found := outputs.load(place / outputs.name, self)) is not None:
                return found
        path = self._place_to_write(rows, outputs.name) / outputs.name
        with self._one_writer(path.with_name(f".{outputs.name}.lock")):
            return outputs.complete(path, self)

    def _place_to_write(self, rows, name: str) -> Path:
        def find() -> list[str]:
            place, why = self.cache.place_to_write(rows.token_set.folder, rows.fingerprint, name)
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DataError(f"{place} cannot be created: {error}; set CACHE_DIR elsewhere") from error
            return [str(place), why]

        place, why = self.ranks.broadcast(self.ranks.on_rank0(find))
        if why and why not in self.announced:
            self.announced.add(why)
            self.info(f"{why}; what is computed once is stored in {self.cache.fallback} (or set CACHE_DIR)")
        return Path(place)

    @contextmanager
    def _one_writer(self, path: Path) -> Iterator[None]:
        """A `with` block that one job at a time enters: its rank 0 holds the lock, and other jobs wait."""
        def open_lock() -> FileLock:
            try:
                return stack.enter_context(FileLock(path))
            except OSError as error:
                raise DataError(f"{path} cannot be written: {error.strerror or error}; make it writable, or "
                                "set CACHE_DIR to another folder") from error

        def take() -> str:
            try:
                return lock.take()
            except OSError as error:
                self.info(f"{path} cannot be locked on this file system ({error}); make sure that no other "
                          "job computes the same at the same time")
                return ""

        with ExitStack() as stack:
            lock, waiting = self.ranks.on_rank0(open_lock), False
            # Polled, and not waited for: a signal must be able to end this.
            while holder := self.ranks.broadcast(self.ranks.on_rank0(take)):
                if not waiting:
                    self.info(f"{holder} computes the same ({path}); waiting for it")
                waiting = True
                self.context.leave_if_stopped()
                time.sleep(WAIT_SECONDS)
            yield

    def progress(self, blocks: Sequence[T], what: str) -> Iterator[T]:
        """Yield the blocks of a long computation, and log the progress. Raises Interrupted after a signal."""
        started = logged = time.perf_counter()
        for number, block in enumerate(blocks, start=1):
            self.context.leave_if_stopped()
            yield block
            now, share = time.perf_counter(), number / len(blocks)
            if now - logged > PROGRESS_SECONDS:
                self.info(f"{what}: {share:.0%} | ETA: {duration((now - started) * (1 - share) / share)}")
                logged = now


def why_stale(found: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return how the facts that outputs were computed from differ from those of now; "" if they do not."""
    return next((f"is stale: its {name} was {found.get(name)}, is {fact}" for name, fact in facts.items()
                 if found.get(name) != fact), "")


def describe(facts: Mapping[str, Any]) -> str:
    """Return facts as the text of facts.json."""
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


# ------------------------------------------------------------------------------------------- records by row


class RowStore:
    """A folder with a record for each row, which the ranks of a job fill, each its own rows.

    `rows.bin` contains the records, `checksums.bin` a uint32 for each (0 = not stored), and `facts.json` what
    they follow from. A checksum covers the row's tokens too, so a record of other data is not used, and it is
    written after its record, so a kill loses only what was written since the last commit. The files are
    sparse: rows that are never read take no space. While the files are unchanged since all records were
    verified, no start reads them again.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], rows: int, record: np.dtype):
        self.folder, self.facts, self.rows, self.record = folder, facts, rows, record
        self.sizes = {"rows.bin": rows * record.itemsize, "checksums.bin": 4 * rows}

    @cached_property
    def _file(self) -> WatchedFile:
        return WatchedFile(self.folder / "rows.bin", scattered=True)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the records of rows. Raises DataError if they cannot be read."""
        size = self.record.itemsize
        content = b"".join(self._file.read(index * size, size) for index in indices.tolist())
        return np.frombuffer(content, self.record)

    def has_facts(self) -> bool:
        """Return whether facts.json is there and agrees."""
        with suppress(OSError, ValueError, RecursionError):
            return not why_stale(json.loads(read_plain(self.folder / "facts.json")), self.facts)
        return False

    def checksums(self) -> np.ndarray:
        """Return the uint32 of each row as they are on the disk now; all 0 if the files are incomplete."""
        with suppress(OSError):  # it does not exist, or not for this user
            whole = all((self.folder / name).stat().st_size == size for name, size in self.sizes.items())
            if whole and self.has_facts():
                return np.fromfile(self.folder / "checksums.bin", "<u4")
        return np.zeros(self.rows, "<u4")

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Return those of the rows that are not stored."""
        return indices[self.checksums()[indices] == 0]

    def damaged(self, rows: ReadRows, indices: np.ndarray) -> np.ndarray:
        """Return those of the stored rows whose checksum is wrong."""
        batch, records, checksums = rows(indices), self.read(indices), self.checksums()
        return np.array([index for position, index in enumerate(indices.tolist())
                         if row_checksum(batch, position, records[position]) != checksums[index]], np.int64)

    def _stamps(self) -> dict[str, dict[str, int]]:
        return {name: file_stamp((self.folder / name).stat()) for name in self.sizes}

    def is_verified(self) -> bool:
        """Return whether the files are unchanged since all records were verified."""
        with suppress(OSError):
            return load_verified(self.folder) == self._stamps()
        return False

    def set_verified(self) -> None:
        """Remember that all records were verified."""
        with suppress(OSError):
            save_verified(self.folder, self._stamps())

    def clear_verified(self) -> None:
        """Have the next start verify all records."""
        save_verified(self.folder, {})


class RowWriter:
    """A `with` block that writes records to a store; leaving it commits. Makes incomplete files whole.

    Raises:
        DataError: the folder cannot be written to.
    """

    def __init__(self, store: RowStore):
        self.store, self.committed = store, time.monotonic()
        self.pending: list[tuple[int, int]] = []
        self.files = {}
        with self._disk_errors():
            store.folder.mkdir(parents=True, exist_ok=True)
            if not store.has_facts():
                with atomic_write(store.folder / "facts.json") as temporary:
                    temporary.write_text(describe(store.facts), encoding="utf-8")
            for name, size in store.sizes.items():
                descriptor = os.open(store.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
                self.files[name] = open(descriptor, "r+b", buffering=0)
                if os.fstat(descriptor).st_size != size:  # new, or damaged, which its checksums will show
                    os.ftruncate(descriptor, size)

    def strike_out(self, indices: np.ndarray) -> None:
        """Mark rows as not stored."""
        with self._disk_errors():
            self._write_checksums([(index, 0) for index in indices.tolist()])

    def write(self, batch: Batch, indices: np.ndarray, records: np.ndarray) -> None:
        """Write the records of the rows that were read as `batch`. They are stored after the next commit."""
        with self._disk_errors():
            for position, index in enumerate(indices.tolist()):
                record = records[position].tobytes()
                # Not memory-mapped: on a full disk that kills the process instead of raising.
                written = os.pwrite(self.files["rows.bin"].fileno(), record, index * len(record))
                if written != len(record):
                    raise OSError(f"{written:,} of a row's {len(record):,} bytes were written")
                self.pending.append((index, row_checksum(batch, position, records[position])))
        if time.monotonic() - self.committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flush the written records to the disk, and only then mark them as stored."""
        with self._disk_errors():
            os.fsync(self.files["rows.bin"].fileno())
            self._write_checksums(self.pending)
        self.pending.clear()
        self.committed = time.monotonic()

    def _write_checksums(self, checksums: Sequence[tuple[int, int]]) -> None:
        descriptor = self.files["checksums.bin"].fileno()
        for index, checksum in checksums:
            os.pwrite(descriptor, checksum.to_bytes(4, "little"), 4 * index)
        os.fsync(descriptor)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self.store.folder} cannot be written: {error}; make room there, or make it "
                            "writable (what is stored is kept), or set CACHE_DIR to another folder, or "
                            "DISTILLATION_TOP_K=0 to run the teacher in each step") from error

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *_) -> None:
        try:
            self.commit()
        finally:
            for file in self.files.values():
                file.close()


def row_checksum(batch: Batch, position: int, record: np.void) -> int:
    """Return the CRC-32 of a row's record, tokens, targets and document ids; never 0."""
    checksum = zlib.crc32(record.tobytes())
    for part in (batch.tokens_BT, batch.targets_BT, batch.document_ids_BT):
        if part is not None:
            checksum = zlib.crc32(part[position].numpy().tobytes(), checksum)
    return checksum or 1
