"""Outputs of a frozen model that all ranks compute once, before the first step, and store beside the data.

`ComputeOnce` is the mechanism; precompute.py has the kinds of outputs.


The outputs that are computed once and stored: a reference's log-probabilities, and a teacher's top tokens.

Shapes: B rows, T tokens, P pairs of a row, E examples of the data, M positions with a target, V vocabulary,
K tokens kept, C = K + 1 with all others as one class.
"""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional, Protocol, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint.tensors import write_tensors
from common.errors import DataError, SettingsError
from common.files import FileLock, atomic_write, read_plain
from common.heartbeat import HEARTBEAT
from common.text import duration
from config import Config
from data_pipeline.shards import Cache, WatchedFile, file_stamp, load_verified, save_verified
from dataloaders import Batch, ExampleRows, ReadRows
from fused.head import IGNORE_INDEX, LOWEST_LOGPROB, chunk_tokens, slices
from learn.objectives import frozen_logprobs
from parallel.ranks import Ranks, RunContext

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
    """A `with` block that writes records to a store; leaving it commits. Makes incomplete files whole."""

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


FORMAT = 1
BLOCK_ROWS = 16  # that are verified between two looks at the other ranks
LITTLE = 0.5  # of the teacher's probability: if less is kept, most of its knowledge is lost

# --------------------------------------------------------------------------- a reference's log-probabilities


class ReferencedRows:
    """Rows of pairs whose batches contain `stored["reference_BP2"]`.

    Args:
        logprob_E2: of each example's chosen and rejected answer.
    """

    def __init__(self, rows: ExampleRows, logprob_E2: Tensor):
        self.rows, self.logprob_E2 = rows, logprob_E2

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = self.rows(indices)
        reference_BP2 = torch.zeros(len(indices), int(batch.document_ids_BT.max()) // 2, 2)
        for row, index in enumerate(indices.tolist()):
            stored = self.logprob_E2[torch.from_numpy(self.rows.examples_in(index)).long()]
            reference_BP2[row, :len(stored)] = stored
        batch.stored["reference_BP2"] = reference_BP2
        return batch


class ReferenceOutputs:
    """The reference's log-probabilities of all pairs: a safetensors file that is named by its weights.

    Args:
        facts: what the values follow from; `weights_sha256` and `compute_dtype` are the reference's.
        load_model: loads the reference if it is needed.
    """

    def __init__(self, rows: ExampleRows, split: str, facts: Mapping[str, str],
                 load_model: Callable[[], nn.Module], micro_batch_size: int):
        self.rows, self.load_model, self.micro_batch_size = rows, load_model, micro_batch_size
        self.facts = {**facts, "data": rows.fingerprint, "max_seq_len": str(rows.row_tokens)}
        weights, precision = facts["weights_sha256"][:16], facts["compute_dtype"].removeprefix("torch.")
        self.name = f"reference-{weights}-{split}-{rows.row_tokens}-{precision}.safetensors"

    def load(self, path: Path, once: ComputeOnce) -> Optional[ReferencedRows]:
        """Return the rows with stored values; None if those are missing, stale or damaged."""
        logprob_E2, _ = self._read_on_all(path, once)
        return None if logprob_E2 is None else ReferencedRows(self.rows, logprob_E2)

    def complete(self, path: Path, once: ComputeOnce) -> ReferencedRows:
        """Compute and store the values, unless another job has done so meanwhile."""
        logprob_E2, why_not = self._read_on_all(path, once)
        if logprob_E2 is None:
            if why_not:
                once.info(f"{path} {why_not}; it is computed again")
            logprob_E2 = self._compute(once)
            if error := once.ranks.broadcast(once.ranks.on_rank0(lambda: self._write(path, logprob_E2))):
                once.info(f"{path} cannot be written: {error}; this run uses what it has computed, and the "
                          "next one computes it again")
        return ReferencedRows(self.rows, logprob_E2)

    def _read_on_all(self, path: Path, once: ComputeOnce) -> tuple[Optional[Tensor], str]:
        """Return what rank 0 reads on every rank, whether that sees rank 0's disk or not."""
        found, why_not = once.ranks.on_rank0(lambda: self._read(path)) or (None, "")
        exists, why_not = once.ranks.broadcast([found is not None, why_not])
        if not exists:
            return None, why_not
        return once.ranks.all_reduce_sum(self._zeros() if found is None else found), ""

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.rows.example_set), 2)

    def _compute(self, once: ComputeOnce) -> Tensor:
        """Return (E, 2) float32 log-probabilities of all pairs; 0 for those that are left out."""
        model = self.load_model()
        HEARTBEAT.enter("reference")
        ranks, rows, logprob_E2 = once.ranks, self.rows, self._zeros()
        batches_per_rank = -(-len(rows) // (self.micro_batch_size * ranks.world_size))
        once.info(f"Reference: the log-probabilities of {rows.examples:,} pairs are computed once")
        for number in once.progress(range(batches_per_rank), "Reference"):
            first = (ranks.rank * batches_per_rank + number) * self.micro_batch_size
            indices = np.arange(first, min(first + self.micro_batch_size, len(rows)))
            # A rank without rows left runs all the same: every forward of a sharded model needs all ranks.
            batch = rows(indices if len(indices) else np.arange(1))
            logprob_BP2 = frozen_logprobs(model, batch.to(ranks.device)).float().cpu()
            for row, index in enumerate(indices.tolist()):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                logprob_E2[examples] = logprob_BP2[row, :len(examples)]
        return ranks.all_reduce_sum(logprob_E2)

    def _write(self, path: Path, logprob_E2: Tensor) -> str:
        """Write the file; return the error if that fails, and "" otherwise."""
        try:
            with atomic_write(path) as temporary:
                metadata = {**self.facts, "sha256": _digest(logprob_E2)}
                write_tensors(temporary, {"logprob_E2": logprob_E2}, metadata)
        except OSError as error:
            return error.strerror
        return ""

    def _read(self, path: Path) -> tuple[Optional[Tensor], str]:
        """Return the stored values; or None, and why they cannot be used: "" if there is no file."""
        try:
            if not path.is_file():
                return None, ""
            content = path.read_bytes()  # not memory-mapped: truncating a mapped file kills the process
            logprob_E2 = safetensors.torch.load(content)["logprob_E2"]
            found = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        except (OSError, SafetensorError, KeyError) as error:
            return None, f"cannot be read: {error}"
        if stale := why_stale(found, self.facts):
            return None, stale
        sound = logprob_E2.dtype == torch.float32 and found.get("sha256") == _digest(logprob_E2)
        return (logprob_E2, "") if sound else (None, "is damaged")


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------------- a teacher's top tokens


class StoredTeacherRows:
    """Rows whose batches contain `stored["teacher_ids"]` (B, T, K) int32, and `stored["teacher_logprobs"]`
    (B, T, C) float16, the last of each for all other tokens; 0 where there is no target.
    """

    def __init__(self, rows: ReadRows, store: RowStore):
        self.rows, self.store, self.checksums = rows, store, store.checksums()

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, indices: np.ndarray) -> Batch:
        batch, records = self.rows(indices), self.store.read(indices)
        for position, index in enumerate(indices.tolist()):
            if row_checksum(batch, position, records[position]) != self.checksums[index]:
                self.store.clear_verified()
                what = "damaged, or of other data" if self.checksums[index] else "missing"
                raise DataError(f"{self.store.folder}: the teacher's output for row {index} is {what}; start "
                                "again to recompute it")
        batch.stored["teacher_ids"] = torch.from_numpy(records["ids"].astype(np.int32))
        batch.stored["teacher_logprobs"] = torch.from_numpy(records["logprobs"].copy())
        return batch


@torch.no_grad()
def top_k_logprobs(teacher, batch: Batch, k: int, temperature: float,
                   vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the K most likely ids of each target, and log-probabilities at the temperature: theirs, and last
    that of all other tokens together.

    Returns:
        (B, T, K) int64 in no order, and (B, T, C) float32; 0 where there is no target.
    """
    device, positions = batch.tokens_BT.device, batch.tokens_BT.numel()
    target_index_M = batch.target_index_M
    if target_index_M is None:
        target_index_M = torch.arange(positions, device=device)
    ids_PK = torch.zeros(positions, k, dtype=torch.long, device=device)
    logprobs_PC = torch.zeros(positions, k + 1, device=device)
    logits_of = teacher.logits(batch)
    for part in slices(len(target_index_M), chunk_tokens(vocab_size, device.type)):
        scaled_MV = logits_of(part) / temperature
        normaliser_M1 = scaled_MV.logsumexp(dim=-1, keepdim=True)
        kept_MK, ids_MK = scaled_MV.topk(k, sorted=False)
        others_M1 = scaled_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(dim=-1, keepdim=True)
        logprobs_MC = torch.cat([kept_MK, others_M1], dim=1) - normaliser_M1
        ids_PK[target_index_M[part]] = ids_MK
        logprobs_PC[target_index_M[part]] = logprobs_MC.clamp(min=LOWEST_LOGPROB)
    shape = batch.tokens_BT.shape
    return ids_PK.view(*shape, k).cpu().numpy(), logprobs_PC.view(*shape, k + 1).cpu().numpy()


class TeacherOutputs:
    """The teacher's DISTILLATION_TOP_K most likely tokens of every target: a `RowStore` named by its facts.

    Args:
        facts: what they follow from besides the settings: teacher, data and split.
        load_teacher: loads the teacher if it is needed.
        indices: the rows that the run will read; None = all.
    """

    def __init__(self, rows, facts: Mapping[str, Any], load_teacher: Callable[[], Any], config: Config,
                 vocab_size: int, indices: Optional[np.ndarray] = None):
        k = config.distillation_top_k
        if k > vocab_size:
            raise SettingsError(f"DISTILLATION_TOP_K={k} exceeds the vocabulary of {vocab_size:,}; set it to "
                                "a few dozen")
        self.rows, self.load_teacher, self.config, self.vocab_size = rows, load_teacher, config, vocab_size
        self.indices = np.arange(len(rows)) if indices is None else np.unique(indices)
        self.facts = {
            "format": FORMAT, **facts, "temperature": config.distillation_temperature, "top_k": k,
            "document_mask": config.document_mask, "rows": len(rows), "max_seq_len": rows.row_tokens,
            "vocab_size": vocab_size}
        self.name = f"teacher-{hashlib.sha256(describe(self.facts).encode()).hexdigest()[:16]}"

    def store(self, path: Path) -> RowStore:
        """Return the store at a path."""
        id_type, k = "<u2" if self.vocab_size <= 1 << 16 else "<i4", self.config.distillation_top_k
        record = np.dtype([("ids", id_type, (self.rows.row_tokens, k)),
                           ("logprobs", "<f2", (self.rows.row_tokens, k + 1))])
        return RowStore(path, self.facts, len(self.rows), record)

    def load(self, path: Path, once: ComputeOnce) -> Optional[StoredTeacherRows]:
        """Return the rows with stored outputs; None if some are missing or damaged."""
        store = self.store(path)
        missing = once.ranks.broadcast(once.ranks.on_rank0(lambda: len(store.missing(self.indices))))
        if missing or self._find_damaged(store, once)[1]:
            return None
        return self._stored_rows(store, once)

    def complete(self, path: Path, once: ComputeOnce) -> StoredTeacherRows:
        """Compute what is missing or damaged. After an interruption, what is stored is kept."""
        ranks, config, store = once.ranks, self.config, self.store(path)
        with ranks.raise_on_all(lambda: RowWriter(store)) as writer:
            # What is damaged counts as missing.
            damaged, total = self._find_damaged(store, once)
            if total:
                once.info(f"Teacher: {total:,} rows in {path} are damaged or of other data; recomputing them")
            ranks.raise_on_all(lambda: writer.strike_out(damaged))
            own = store.missing(np.array_split(self.indices, ranks.world_size)[ranks.rank])
            missing = ranks.all_gather_json(len(own))
            if any(missing):
                once.info(f"Teacher: the {config.distillation_top_k} most likely tokens of {sum(missing):,} "
                          "rows are computed once")
                ranks.raise_on_all(lambda: _check_room(store, sum(missing)))
                teacher = ranks.raise_on_all(self.load_teacher)
                HEARTBEAT.enter("teacher")
                for block in once.progress(slices(max(missing), config.micro_batch_size), "Teacher"):
                    ranks.raise_on_all(partial(self._fill, writer, teacher, own[block], ranks.device))
                ranks.raise_on_all(writer.commit)
        ranks.on_rank0(store.set_verified)
        return self._stored_rows(store, once)

    def _fill(self, writer: RowWriter, teacher, indices: np.ndarray, device: torch.device) -> None:
        if len(indices):
            batch, config = self.rows(indices), self.config
            records = np.zeros(len(indices), writer.store.record)
            records["ids"], records["logprobs"] = top_k_logprobs(
                teacher, batch.to(device), config.distillation_top_k, config.distillation_temperature,
                self.vocab_size)
            writer.write(batch, indices, records)

    def _find_damaged(self, store: RowStore, once: ComputeOnce) -> tuple[np.ndarray, int]:
        """Return the damaged rows that this rank has found, and the number of those of all ranks."""
        ranks = once.ranks
        if ranks.broadcast(ranks.on_rank0(store.is_verified)):
            return np.arange(0), 0
        HEARTBEAT.enter("teacher")
        own = np.array_split(np.flatnonzero(store.checksums()), ranks.world_size)[ranks.rank]
        blocks, found = slices(max(ranks.all_gather_json(len(own))), BLOCK_ROWS), [np.arange(0)]
        for block in once.progress(blocks, "Teacher: verifying what is stored"):
            found.append(ranks.raise_on_all(partial(store.damaged, self.rows, own[block])))
        damaged = np.concatenate(found)
        total = sum(ranks.all_gather_json(len(damaged)))
        if not total:
            ranks.on_rank0(store.set_verified)
        return damaged, total

    def _stored_rows(self, store: RowStore, once: ComputeOnce) -> StoredTeacherRows:
        """Return the rows, after telling the user how much of the teacher's probability is kept."""
        once.ranks.raise_on_all(lambda: _check_complete(store, self.indices))
        rows, config = StoredTeacherRows(self.rows, store), self.config
        if len(self.indices):
            batch = once.ranks.raise_on_all(lambda: rows(self.indices[:config.micro_batch_size]))
            others_BT = batch.stored["teacher_logprobs"][..., -1].float().exp()
            share = 1 - float(others_BT[batch.targets_BT != IGNORE_INDEX].mean())
            advice = "" if share > LITTLE else "; a lower temperature or larger DISTILLATION_TOP_K keeps more"
            once.info(f"Teacher: the {config.distillation_top_k} most likely tokens hold {share:.0%} of its "
                      f"probability at DISTILLATION_TEMPERATURE={config.distillation_temperature:g}{advice}")
        return rows


def _check_room(store: RowStore, rows: int) -> None:
    parent = next(folder for folder in (store.folder, *store.folder.parents) if folder.exists())
    needed, free = rows * store.record.itemsize, shutil.disk_usage(parent).free
    if needed > free:
        raise DataError(f"{store.folder} needs {needed:,} bytes more, and {free:,} are free; set CACHE_DIR "
                        "to another disk, lower DISTILLATION_TOP_K, or set that to 0 to run the teacher in "
                        "each step")


def _check_complete(store: RowStore, indices: np.ndarray) -> None:
    """Raise DataError if rows are missing, as on a machine that does not share the folder."""
    missing = store.missing(indices)
    if len(missing):
        raise DataError(f"{store.folder} lacks {len(missing):,} rows that other ranks have written; share "
                        "the folder between all machines (CACHE_DIR), or set DISTILLATION_TOP_K=0")
