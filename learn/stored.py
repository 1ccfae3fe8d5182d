"""Outputs of frozen models, computed once before the first step and stored beside the data.

These are a reference's log-probabilities and a teacher's most likely tokens. Shapes: B rows, T tokens, P
pairs of a row, E examples of the data, M positions with a target, V vocabulary, K tokens kept, C = K + 1
classes, the last of which is all other tokens.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint.tensors import write_tensors
from common.errors import DataError, SettingsError
from common.files import FileLock, atomic_write, disk_errors, free_bytes
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.shards import Cache, WatchedFile, file_stamp, load_verified, save_verified
from dataloaders import Batch, ExampleRows
from fused.head import IGNORE_INDEX, LOWEST_LOGPROB, chunk_tokens, slices
from learn.objectives import frozen_logprobs
from parallel.ranks import RunContext, collective

T = TypeVar("T")
WAIT_SECONDS = 1.0  # between attempts to take a lock that another job holds
COMMIT_SECONDS = 10
FORMAT = 1  # of a teacher's outputs
BLOCK_ROWS = 16  # rows to verify between checks for stop signals
DISK_ADVICE = ("make it writable (stored rows are kept), or set CACHE_DIR to another folder, or "
               "DISTILLATION_TOP_K=0 to run the teacher in each step")
LOW_PROBABILITY = 0.5  # if the kept tokens have less, most of the teacher's knowledge is lost


@dataclass(frozen=True)
class OutputStore:
    """Keeps outputs beside their data or in CACHE_DIR. Only one of several jobs computes the same outputs."""

    cache: Cache
    context: RunContext
    announced: set[str] = field(default_factory=set)

    @collective
    def get_or_compute(self, key: str, rows, compute: Callable[[Path, bool], Optional[T]]) -> T:
        """Return the rows with their outputs.

        Args:
            key: name of the file or folder with the outputs.
            compute: collective; compute(path, may_write) returns the rows with the outputs at this path. If
                some are missing or damaged, it recomputes and stores them if it may write, and else returns
                None.
        """
        ranks, context, folder = self.context.ranks, self.context, rows.token_set.folder
        for place in self.cache.places(folder, rows.fingerprint):
            if (stored := compute(place / key, False)) is not None:
                return stored

        def open_lock() -> list[str]:
            nonlocal lock
            place, why = self.cache.place_to_write(folder, rows.fingerprint, key)
            with disk_errors(place, DataError, "make it writable, or set CACHE_DIR to another folder"):
                place.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(FileLock(place / f".{key}.lock"))
            return [str(place), why]

        def take_lock() -> str:
            return lock.take(lambda why: context.log.info(
                f"{why}; make sure that no other job computes the same outputs at the same time"))

        with ExitStack() as stack:
            lock, waiting = None, False
            place, why = ranks.broadcast(ranks.on_rank0(open_lock))
            path = Path(place) / key
            if why and why not in self.announced:
                self.announced.add(why)
                context.log.info(f"{why}; storing the results in {self.cache.fallback} (set CACHE_DIR to "
                                 "choose another folder)")
            # Polled, so that a signal can end the wait.
            while holder := ranks.broadcast(ranks.on_rank0(take_lock)):
                if not waiting:
                    context.log.info(f"waiting for {holder}, which is computing {path}")
                waiting = True
                context.leave_if_stopped()
                time.sleep(WAIT_SECONDS)
            return compute(path, True)


# --------------------------------------------------------------------------- a reference's log-probabilities


@dataclass(frozen=True)
class ReferencedRows:
    """Rows of pairs; their batches contain `stored["reference_BP2"]`."""

    rows: ExampleRows
    logprob_E2: Tensor  # of the chosen and the rejected answer

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


@collective
def with_reference(store: OutputStore, rows: ExampleRows, split: str, provenance: Mapping[str, str],
                   load_model: Callable[[], nn.Module], micro_batch_size: int) -> ReferencedRows:
    """Return the rows with the reference's log-probabilities, stored in a file named after its weights.

    Args:
        provenance: the reference's `weights_sha256` and `compute_dtype`.
        load_model: loads the reference; called only if needed.
    """
    ranks, log = store.context.ranks, store.context.log
    provenance = {**provenance, "data": rows.fingerprint, "max_seq_len": str(rows.row_tokens)}

    def compute(path: Path, may_write: bool) -> Optional[ReferencedRows]:
        # Rank 0 reads the file for all ranks, which may not see its disk.
        logprob_E2, why_not = ranks.on_rank0(lambda: _read_reference(path, provenance)) or (None, "")
        is_there, why_not = ranks.broadcast([logprob_E2 is not None, why_not])
        if is_there:
            zeros = torch.zeros(len(rows.example_set), 2)
            return ReferencedRows(rows, ranks.all_reduce_sum(zeros if logprob_E2 is None else logprob_E2))
        if not may_write:
            return None
        if why_not:
            log.info(f"{path} {why_not}; recomputing it")

        # Every rank computes equally many batches. Pairs without a place in a row keep 0.
        model, size = load_model(), micro_batch_size
        HEARTBEAT.enter("reference")
        batches = -(-len(rows) // (size * ranks.world_size))
        log.info(f"Reference: the log-probabilities of {rows.examples:,} pairs, computed once")
        logprob_E2 = torch.zeros(len(rows.example_set), 2)
        for number in store.context.progress(range(batches), batches, "Reference"):
            first = (ranks.rank * batches + number) * size
            indices = np.arange(first, min(first + size, len(rows)))
            # A rank without rows left still runs: every forward of a sharded model needs all ranks.
            batch = rows(indices if len(indices) else np.arange(1))
            logprob_BP2 = frozen_logprobs(model, batch.to(ranks.device)).float().cpu()
            for row, index in enumerate(indices.tolist()):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                logprob_E2[examples] = logprob_BP2[row, :len(examples)]
        logprob_E2 = ranks.all_reduce_sum(logprob_E2)
        if error := ranks.broadcast(ranks.on_rank0(lambda: write(path, logprob_E2))):
            log.info(f"{path} cannot be written: {error}; this run keeps the results in memory, and the next "
                     "run recomputes them")
        return ReferencedRows(rows, logprob_E2)

    def write(path: Path, logprob_E2: Tensor) -> str:
        try:
            with atomic_write(path) as temporary:
                metadata = {**provenance, "sha256": _digest(logprob_E2)}
                write_tensors(temporary, {"logprob_E2": logprob_E2}, metadata)
        except OSError as error:
            return error.strerror
        return ""

    weights, precision = provenance["weights_sha256"][:16], provenance["compute_dtype"].removeprefix("torch.")
    key = f"reference-{weights}-{split}-{rows.row_tokens}-{precision}.safetensors"
    return store.get_or_compute(key, rows, compute)


def _read_reference(path: Path, provenance: Mapping[str, str]) -> tuple[Optional[Tensor], str]:
    """Return the stored values, or None with the reason, which is empty if there is no file."""
    try:
        if not path.is_file():
            return None, ""
        content = path.read_bytes()  # not memory-mapped: truncating a mapped file kills the process
        logprob_E2 = safetensors.torch.load(content)["logprob_E2"]
        stored = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    except (OSError, SafetensorError, KeyError) as error:
        return None, f"cannot be read: {error}"
    for name, value in provenance.items():
        if stored.get(name) != value:
            return None, f"is stale: its {name} was {stored.get(name)}, is {value}"
    if logprob_E2.dtype != torch.float32 or stored.get("sha256") != _digest(logprob_E2):
        return None, "is damaged"
    return logprob_E2, ""


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------------- a teacher's top tokens


class TeacherRows:
    """Rows with one teacher record per row in a folder; each rank of a job fills different rows.

    Batches contain `stored["teacher_ids"]`, (B, T, K) int32, and `stored["teacher_logprobs"]`, (B, T, C)
    float16. Both are 0 at positions without a target.

    `rows.bin` contains the records, `checksums.bin` a uint32 per record (0 = not stored), and `facts.json`
    their provenance. A checksum also covers the row's tokens, so that records of other data are not used. It
    is written after its record, so that a kill loses only the records since the last commit. The files are
    sparse: rows that are never read take no space. Files that have not changed since all records were
    verified (`is_verified`) are not read again at the next start.
    """

    def __init__(self, rows, folder: Path, provenance: Mapping[str, Any]):
        self.rows, self.folder, self.provenance = rows, folder, provenance
        k, id_type = provenance["top_k"], "<u2" if provenance["vocab_size"] <= 1 << 16 else "<i4"
        self.record = np.dtype([("ids", id_type, (rows.row_tokens, k)),
                                ("logprobs", "<f2", (rows.row_tokens, k + 1))])
        self.sizes = {"rows.bin": len(rows) * self.record.itemsize, "checksums.bin": 4 * len(rows)}
        self.descriptors: dict[str, int] = {}
        self.pending: list[tuple[int, int]] = []  # (row, checksum) of records since the last commit
        self.committed = time.monotonic()

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, indices: np.ndarray) -> Batch:
        batch, records = self.rows(indices), self.read(indices)
        for position, index in enumerate(indices.tolist()):
            if row_checksum(batch, position, records[position]) != self.checksums[index]:
                self.set_verified(False)
                problem = "damaged, or of other data" if self.checksums[index] else "missing"
                raise DataError(f"{self.folder}: the teacher's output for row {index} is {problem}; start "
                                "again to recompute it")
        batch.stored["teacher_ids"] = torch.from_numpy(records["ids"].astype(np.int32))
        batch.stored["teacher_logprobs"] = torch.from_numpy(records["logprobs"].copy())
        return batch

    @cached_property
    def checksums(self) -> np.ndarray:
        """The checksum of each row, as first read."""
        return self.read_checksums()

    @cached_property
    def _file(self) -> WatchedFile:
        return WatchedFile(self.folder / "rows.bin", scattered=True)

    def read(self, indices: np.ndarray) -> np.ndarray:
        size = self.record.itemsize
        content = b"".join(self._file.read(index * size, size) for index in indices.tolist())
        return np.frombuffer(content, self.record)

    def read_checksums(self) -> np.ndarray:
        """Return the current checksum of each row, uint32; all 0 if the files are incomplete."""
        with suppress(OSError):  # a file is missing or unreadable
            if all((self.folder / name).stat().st_size == size for name, size in self.sizes.items()):
                return np.fromfile(self.folder / "checksums.bin", "<u4")
        return np.zeros(len(self.rows), "<u4")

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Return those of the rows that are not stored."""
        return indices[self.read_checksums()[indices] == 0]

    def damaged(self, indices: np.ndarray) -> np.ndarray:
        """Return those of the stored rows that have a wrong checksum."""
        batch, records, checksums = self.rows(indices), self.read(indices), self.read_checksums()
        return np.array([index for position, index in enumerate(indices.tolist())
                         if row_checksum(batch, position, records[position]) != checksums[index]], np.int64)

    def _stamps(self) -> dict[str, dict[str, int]]:
        try:
            return {name: file_stamp((self.folder / name).stat()) for name in self.sizes}
        except OSError:  # a file is missing or unreadable
            return {}

    def is_verified(self) -> bool:
        """Return whether the files have not changed since all records were verified."""
        return load_verified(self.folder) == self._stamps() != {}

    def set_verified(self, verified: bool = True) -> None:
        """Remember that all records were verified, or make the next start verify them."""
        save_verified(self.folder, self._stamps() if verified else {})

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A `with` block that may write records, and commits at its end. Extends incomplete files."""
        with ExitStack() as files:
            with disk_errors(self.folder, DataError, DISK_ADVICE):
                self.folder.mkdir(parents=True, exist_ok=True)
                if not (self.folder / "facts.json").exists():
                    with atomic_write(self.folder / "facts.json") as temporary:
                        temporary.write_text(provenance_json(self.provenance), encoding="utf-8")
                for name, size in self.sizes.items():
                    descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
                    files.callback(os.close, descriptor)
                    if os.fstat(descriptor).st_size != size:  # new, or damaged, as the checksums will show
                        os.ftruncate(descriptor, size)
                    self.descriptors[name] = descriptor
            try:
                yield
            finally:
                self.commit()

    def write(self, batch: Batch, indices: np.ndarray, records: np.ndarray) -> None:
        """Write the records of the rows in `batch`. They count as stored after the next commit."""
        with disk_errors(self.folder, DataError, DISK_ADVICE):
            for position, index in enumerate(indices.tolist()):
                record = records[position].tobytes()
                # Not memory-mapped: on a full disk that kills the process.
                written = os.pwrite(self.descriptors["rows.bin"], record, index * len(record))
                if written != len(record):
                    raise OSError(f"{written:,} of a row's {len(record):,} bytes were written")
                self.pending.append((index, row_checksum(batch, position, records[position])))
        if time.monotonic() - self.committed > COMMIT_SECONDS:
            self.commit()

    def commit(self, strike_out: Sequence[int] = ()) -> None:
        """Flush the records to disk, then mark them as stored, and the rows in `strike_out` as missing."""
        with disk_errors(self.folder, DataError, DISK_ADVICE):
            os.fsync(self.descriptors["rows.bin"])
            for index, checksum in (*self.pending, *((index, 0) for index in strike_out)):
                os.pwrite(self.descriptors["checksums.bin"], checksum.to_bytes(4, "little"), 4 * index)
            os.fsync(self.descriptors["checksums.bin"])
        self.pending.clear()
        self.committed = time.monotonic()


def provenance_json(provenance: Mapping[str, Any]) -> str:
    return json.dumps(provenance, indent=1, sort_keys=True) + "\n"


def row_checksum(batch: Batch, position: int, record: np.void) -> int:
    """Return the CRC-32 of a row's record, tokens, targets and document ids; never 0."""
    checksum = zlib.crc32(record.tobytes())
    for tensor in (batch.tokens_BT, batch.targets_BT, batch.document_ids_BT):
        if tensor is not None:
            checksum = zlib.crc32(tensor[position].numpy().tobytes(), checksum)
    return checksum or 1


@torch.no_grad()
def top_k_logprobs(teacher, batch: Batch, k: int, temperature: float,
                   vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the K most likely ids at each target, and the log-probabilities of the C classes.

    Returns:
        unordered ids (B, T, K) int64, and log-probabilities (B, T, C) float32; 0 where there is no target.
    """
    device, positions = batch.tokens_BT.device, batch.tokens_BT.numel()
    target_index_M = batch.target_index_M
    if target_index_M is None:
        target_index_M = torch.arange(positions, device=device)
    ids_PK = torch.zeros(positions, k, dtype=torch.long, device=device)
    logprobs_PC = torch.zeros(positions, k + 1, device=device)
    logits_of = teacher.logits(batch)
    for chunk in slices(len(target_index_M), chunk_tokens(vocab_size, device.type)):
        scaled_MV = logits_of(chunk) / temperature
        normaliser_M1 = scaled_MV.logsumexp(dim=-1, keepdim=True)
        kept_MK, ids_MK = scaled_MV.topk(k, sorted=False)
        others_M1 = scaled_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(dim=-1, keepdim=True)
        logprobs_MC = torch.cat([kept_MK, others_M1], dim=1) - normaliser_M1
        ids_PK[target_index_M[chunk]] = ids_MK
        logprobs_PC[target_index_M[chunk]] = logprobs_MC.clamp(min=LOWEST_LOGPROB)
    shape = batch.tokens_BT.shape
    return ids_PK.view(*shape, k).cpu().numpy(), logprobs_PC.view(*shape, k + 1).cpu().numpy()


@collective
def with_teacher(outputs: OutputStore, rows, provenance: Mapping[str, Any], load_teacher: Callable[[], Any],
                 config: Config, indices: Optional[np.ndarray] = None) -> TeacherRows:
    """Return the rows with the teacher's DISTILLATION_TOP_K most likely tokens of every target.

    Args:
        provenance: of the outputs apart from settings: teacher, vocab_size, data and split.
        load_teacher: loads the teacher; called only if needed.
        indices: the rows that the run will read; None = all.
    """
    context, ranks, k = outputs.context, outputs.context.ranks, config.distillation_top_k
    if k > provenance["vocab_size"]:
        raise SettingsError(f"DISTILLATION_TOP_K={k} exceeds the vocabulary of {provenance['vocab_size']:,}; "
                            "set it to a few dozen")
    indices = np.arange(len(rows)) if indices is None else np.unique(indices)
    provenance = {"format": FORMAT, **provenance, "temperature": config.distillation_temperature, "top_k": k,
                  "document_mask": config.document_mask, "rows": len(rows), "max_seq_len": rows.row_tokens}

    def compute(path: Path, may_write: bool) -> Optional[TeacherRows]:
        taught = TeacherRows(rows, path, provenance)

        def check() -> None:
            if missing := len(taught.missing(indices)):  # this machine does not share the folder
                raise DataError(f"{path} lacks {missing:,} rows that other ranks have written; set CACHE_DIR "
                                "to a folder that all machines share, or set DISTILLATION_TOP_K=0")

        if may_write:
            _complete(taught, indices, load_teacher, config, context)
        elif ranks.broadcast(ranks.on_rank0(lambda: len(taught.missing(indices)))):
            return None
        elif _find_damaged(taught, context)[1]:
            return None
        ranks.raise_on_all(check)
        if len(indices):
            batch = ranks.raise_on_all(lambda: taught(indices[:config.micro_batch_size]))
            others_BT = batch.stored["teacher_logprobs"][..., -1].float().exp()
            share = 1 - float(others_BT[batch.targets_BT != IGNORE_INDEX].mean())
            more = "; a lower temperature or larger DISTILLATION_TOP_K keeps more"
            advice = "" if share > LOW_PROBABILITY else more
            context.log.info(f"Teacher: the {k} most likely tokens hold {share:.0%} of its probability at "
                             f"DISTILLATION_TEMPERATURE={config.distillation_temperature:g}{advice}")
        return taught

    key = f"teacher-{hashlib.sha256(provenance_json(provenance).encode()).hexdigest()[:16]}"
    return outputs.get_or_compute(key, rows, compute)


def _complete(rows: TeacherRows, indices: np.ndarray, load_teacher: Callable[[], Any], config: Config,
              context: RunContext) -> None:
    """Compute missing and damaged records. An interruption keeps what is stored."""
    ranks, log, k = context.ranks, context.log, config.distillation_top_k

    def check_room() -> None:
        needed, free = sum(missing) * rows.record.itemsize, free_bytes(rows.folder)
        if needed > free:
            raise DataError(f"{rows.folder} needs {needed:,} more bytes, but {free:,} are free; set "
                            "CACHE_DIR to another disk, lower DISTILLATION_TOP_K, or set that to 0 to run "
                            "the teacher in each step")

    def fill(indices: np.ndarray) -> None:
        if len(indices):
            batch, records = rows.rows(indices), np.zeros(len(indices), rows.record)
            records["ids"], records["logprobs"] = top_k_logprobs(
                teacher, batch.to(ranks.device), k, config.distillation_temperature,
                rows.provenance["vocab_size"])
            rows.write(batch, indices, records)

    with ExitStack() as stack:
        ranks.raise_on_all(lambda: stack.enter_context(rows.writing()))
        damaged, total = _find_damaged(rows, context)
        if total:
            log.info(f"Teacher: {total:,} rows in {rows.folder} are damaged or belong to other data; "
                     "recomputing them")
        ranks.raise_on_all(lambda: rows.commit(strike_out=damaged.tolist()))
        local_rows = rows.missing(np.array_split(indices, ranks.world_size)[ranks.rank])
        missing = ranks.all_gather_json(len(local_rows))
        if any(missing):
            log.info(f"Teacher: the {k} most likely tokens of {sum(missing):,} rows, computed once")
            ranks.raise_on_all(check_room)
            teacher = ranks.raise_on_all(load_teacher)
            HEARTBEAT.enter("teacher")
            # Kernels may round differently in another batch, and ranks divide the rows.
            blocks = slices(max(missing), 1 if config.reproducible else config.micro_batch_size)
            for block in context.progress(blocks, len(blocks), "Teacher"):
                ranks.raise_on_all(partial(fill, local_rows[block]))
            ranks.raise_on_all(rows.commit)
    ranks.on_rank0(rows.set_verified)


def _find_damaged(rows: TeacherRows, context: RunContext) -> tuple[np.ndarray, int]:
    """Return the damaged rows that this rank finds, and the total over all ranks."""
    ranks = context.ranks
    if ranks.broadcast(ranks.on_rank0(rows.is_verified)):
        return np.arange(0), 0
    HEARTBEAT.enter("teacher")
    stored, damaged = np.array_split(np.flatnonzero(rows.read_checksums()), ranks.world_size)[ranks.rank], []
    blocks = slices(max(ranks.all_gather_json(len(stored))), BLOCK_ROWS)
    for block in context.progress(blocks, len(blocks), "Teacher: verifying the stored rows"):
        damaged.append(ranks.raise_on_all(partial(rows.damaged, stored[block])))
    total = sum(ranks.all_gather_json(sum(map(len, damaged))))
    if not total:
        ranks.on_rank0(rows.set_verified)
    return np.concatenate([np.arange(0), *damaged]), total
