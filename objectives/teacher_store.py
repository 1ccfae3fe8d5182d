"""What a teacher says, computed once by all ranks and stored beside the data: the K likeliest tokens of every target.

Shapes: B rows, T tokens, M positions with a target, V vocabulary, K tokens kept, C = K + 1 with all others as one class.
"""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from common.errors import DataError, SettingsError
from common.heartbeat import HEARTBEAT
from common.watched_files import SEALS, WatchedFile, load_seals, save_seals, seal
from config import Config
from data_pipeline.batch import Batch, ReadRows
from fused.chunked_head import IGNORE_INDEX, LOWEST_LOGPROB, chunk_tokens, slices
from objectives.once import Once

FORMAT = 1
COMMIT_SECONDS = 10
BLOCK_ROWS = 16  # that are verified between two looks at the other ranks
LITTLE = 0.5  # of the teacher's probability, below which most of what it knows is lost

Ask = Callable[[Batch], tuple[np.ndarray, np.ndarray]]  # ids_BTK and logprobs_BTC of a batch


class TeacherStore:
    """A folder with `facts.json`, `rows.bin` (a record a row) and `checksums.bin` (a uint32 a row, 0 = not stored yet).

    A checksum covers the row's tokens too, and is written after its record: so a kill at any moment costs what was written
    since the last `commit`, and a row that has changed is not taken for what it was. Files are sparse: rows that are never
    asked for take no room. Once all that is stored was verified, the files are sealed: while they are what they were then, no
    start reads them again.

    Args:
        parent: where the folder is.
        facts: all that decides the contents; they name the folder, so other facts are another store.
    """

    def __init__(self, parent: Path, facts: Mapping[str, Any], rows: int, row_tokens: int, vocab_size: int, k: int):
        facts = {"format": FORMAT, **facts, "rows": rows, "max_seq_len": row_tokens, "vocab_size": vocab_size, "top_k": k}
        self.facts = json.dumps(facts, indent=1, sort_keys=True) + "\n"
        self.folder = Path(parent) / f"teacher-{hashlib.sha256(self.facts.encode()).hexdigest()[:16]}"
        id_type = "<u2" if vocab_size <= 1 << 16 else "<i4"
        self.record = np.dtype([("ids", id_type, (row_tokens, k)), ("logprobs", "<f2", (row_tokens, k + 1))])
        self.rows, self.k = rows, k
        self.sizes = {"rows.bin": rows * self.record.itemsize, "checksums.bin": 4 * rows}

    @cached_property
    def _file(self) -> WatchedFile:
        return WatchedFile(self.folder / "rows.bin", scattered=True)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """The records of the rows. Raises DataError where they cannot be read."""
        size = self.record.itemsize
        return np.frombuffer(b"".join(self._file.read(index * size, size) for index in indices.tolist()), self.record)

    def checksums(self) -> np.ndarray:
        """The uint32 of each row, as they are on the disk now; all 0 where the files are not whole."""
        try:
            facts = self.folder / "facts.json"
            whole = all((self.folder / name).stat().st_size == size for name, size in self.sizes.items())
            if whole and facts.is_file() and facts.read_bytes() == self.facts.encode():
                return np.fromfile(self.folder / "checksums.bin", "<u4")
        except OSError:  # it is not there, or not for this user
            pass
        return np.zeros(self.rows, "<u4")

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Those of the rows that are not stored."""
        return indices[self.checksums()[indices] == 0]

    def damaged(self, rows: ReadRows, indices: np.ndarray) -> np.ndarray:
        """Those of the stored rows that are not what was stored, or were stored of other data."""
        batch, records, checksums = rows(indices), self.read(indices), self.checksums()
        return np.array([index for position, index in enumerate(indices.tolist())
                         if row_checksum(batch, position, records[position]) != checksums[index]], np.int64)

    def _seals(self) -> dict[str, dict[str, int]]:
        return {name: seal((self.folder / name).stat()) for name in self.sizes}

    def is_sealed(self) -> bool:
        """Whether the files are as they were when all that is stored was verified."""
        with suppress(OSError):
            return load_seals(self.folder) == self._seals()
        return False

    def set_seal(self) -> None:
        """Note that all that is stored was verified."""
        with suppress(OSError):
            save_seals(self.folder, self._seals())

    def break_seal(self) -> None:
        """Note that not all that is stored is sound, so that the next start verifies it."""
        with suppress(OSError):
            (self.folder / SEALS).unlink()


class StoreWriter:
    """Writes rows to a store; the ranks of one job may, each its own rows. Leaving the `with` block commits.

    Files that are not whole are made so: what was in them is then found by its checksums.

    Raises:
        DataError: the folder cannot be written to.
    """

    def __init__(self, store: TeacherStore):
        self.store, self.committed = store, time.monotonic()
        self.pending: list[tuple[int, int]] = []
        self.files: dict[str, int] = {}
        folder = store.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            facts = folder / "facts.json"
            if not facts.is_file() or facts.read_bytes() != store.facts.encode():  # every process writes the same
                unfinished = folder / f"tmp-{os.getpid()}-facts.json"
                unfinished.write_text(store.facts, encoding="utf-8")
                unfinished.replace(facts)
            for name, size in store.sizes.items():
                self.files[name] = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
                if os.fstat(self.files[name]).st_size != size:  # it is new, or damaged
                    os.ftruncate(self.files[name], size)
        except OSError as error:
            self._close()
            raise self._refusal(error) from error

    def strike_out(self, indices: np.ndarray) -> None:
        """Mark rows as not stored."""
        try:
            for index in indices.tolist():
                os.pwrite(self.files["checksums.bin"], bytes(4), 4 * index)
            os.fsync(self.files["checksums.bin"])
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, batch: Batch, indices: np.ndarray, ids_BTK: np.ndarray, logprobs_BTC: np.ndarray) -> None:
        """Write the rows that were read as `batch`; after a `commit`, which comes now and then by itself, they are stored."""
        records = np.zeros(len(indices), self.store.record)
        records["ids"], records["logprobs"] = ids_BTK, logprobs_BTC
        try:
            for position, index in enumerate(indices.tolist()):
                record = records[position].tobytes()
                # Not through mapped memory, where a full disk ends the process instead of raising.
                written = os.pwrite(self.files["rows.bin"], record, index * len(record))
                if written != len(record):
                    raise OSError(f"{written:,} of a row's {len(record):,} bytes were written")
                self.pending.append((index, row_checksum(batch, position, records[position])))
        except OSError as error:
            raise self._refusal(error) from error
        if time.monotonic() - self.committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Bring what was written to the disk, and only then mark it as stored."""
        try:
            os.fsync(self.files["rows.bin"])
            for index, checksum in self.pending:
                os.pwrite(self.files["checksums.bin"], checksum.to_bytes(4, "little"), 4 * index)
            os.fsync(self.files["checksums.bin"])
        except OSError as error:
            raise self._refusal(error) from error
        self.pending.clear()
        self.committed = time.monotonic()

    def _refusal(self, error: OSError) -> DataError:
        return DataError(f"{self.store.folder} cannot be written: {error}; make room there, or the folder writable (what is "
                         "stored is kept), or set CACHE_DIR to another, or DISTILLATION_TOP_K=0 and the teacher runs along")

    def _close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_) -> None:
        try:
            self.commit()
        finally:
            self._close()


def row_checksum(batch: Batch, position: int, record: np.void) -> int:
    """CRC-32 of what is stored of a row and of its tokens, targets and documents; never 0."""
    checksum = zlib.crc32(record.tobytes())
    for part in (batch.tokens_BT, batch.targets_BT, batch.document_ids_BT):
        if part is not None:
            checksum = zlib.crc32(part[position].numpy().tobytes(), checksum)
    return checksum or 1


class StoredTeacherRows:
    """Rows whose batches carry what was stored: `stored["teacher_ids"]` (B, T, K) int32, and `stored["teacher_logprobs"]`
    (B, T, C) float16, the last of each for all other tokens; 0 where there is no target.

    Raises:
        DataError: when called for rows that are missing in the store, damaged, or were stored of other data.
    """

    def __init__(self, rows: ReadRows, store: TeacherStore):
        self.rows, self.store, self.checksums = rows, store, store.checksums()

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, indices: np.ndarray) -> Batch:
        batch, records = self.rows(indices), self.store.read(indices)
        for position, index in enumerate(indices.tolist()):
            if row_checksum(batch, position, records[position]) != self.checksums[index]:
                self.store.break_seal()
                what = "damaged, or of other data" if self.checksums[index] else "missing"
                raise DataError(f"{self.store.folder}: what the teacher says of row {index} is {what}; start again, and it is "
                                "computed again")
        batch.stored["teacher_ids"] = torch.from_numpy(records["ids"].astype(np.int32))
        batch.stored["teacher_logprobs"] = torch.from_numpy(records["logprobs"].copy())
        return batch


@torch.no_grad()
def top_k_logprobs(teacher, batch: Batch, k: int, temperature: float, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The K likeliest ids of each target and their log-probabilities at the temperature, all other tokens' together last.

    Returns:
        (B, T, K) int64 in no order, and (B, T, C) float32; 0 where there is no target.
    """
    device, positions = batch.tokens_BT.device, batch.tokens_BT.numel()
    target_index_M = torch.arange(positions, device=device) if batch.target_index_M is None else batch.target_index_M
    ids_PK = torch.zeros(positions, k, dtype=torch.long, device=device)
    logprobs_PC = torch.zeros(positions, k + 1, device=device)
    logits_of = teacher.logits(batch)
    for part in slices(len(target_index_M), chunk_tokens(vocab_size, device.type)):
        scaled_MV = logits_of(part) / temperature
        normaliser_M1 = scaled_MV.logsumexp(dim=-1, keepdim=True)
        kept_MK, ids_MK = scaled_MV.topk(k, sorted=False)
        others_M1 = scaled_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(dim=-1, keepdim=True)
        ids_PK[target_index_M[part]] = ids_MK
        logprobs_PC[target_index_M[part]] = (torch.cat([kept_MK, others_M1], dim=1) - normaliser_M1).clamp(min=LOWEST_LOGPROB)
    shape = batch.tokens_BT.shape
    return ids_PK.view(*shape, k).cpu().numpy(), logprobs_PC.view(*shape, k + 1).cpu().numpy()


def with_stored_teacher(rows, facts: Mapping[str, Any], make_teacher: Callable[[], Any], config: Config, vocab_size: int,
                        once: Once, indices: Optional[np.ndarray] = None) -> StoredTeacherRows:
    """The rows with what the teacher says, which is computed by all ranks where it is not stored yet, or damaged.

    Collective: every rank must call it.

    Args:
        facts: what it follows from besides DISTILLATION_TOP_K and _TEMPERATURE: the teacher's, the data's fingerprint.
        make_teacher: loads it, in case that something is to be computed.
        indices: the rows that will be read; None = all.
    Raises:
        SettingsError: DISTILLATION_TOP_K exceeds the vocabulary.
        DataError: the store cannot be written.
        Interrupted: a rank was signalled; what is stored is kept.
    """
    k, ranks = config.distillation_top_k, once.ranks
    if k > vocab_size:
        raise SettingsError(f"DISTILLATION_TOP_K={k} exceeds the vocabulary of {vocab_size:,}; a few dozen do")
    facts = {**facts, "temperature": config.distillation_temperature, "document_mask": config.document_mask}
    indices = np.arange(len(rows)) if indices is None else np.unique(indices)

    def store_in(place: Path) -> TeacherStore:
        return TeacherStore(place, facts, len(rows), rows.row_tokens, vocab_size, k)

    def ask(teacher, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return top_k_logprobs(teacher, batch.to(ranks.device), k, config.distillation_temperature, vocab_size)

    places = once.cache.places(rows.folder, rows.fingerprint)
    whole = ranks.broadcast(ranks.on_rank0(
        lambda: [number for number, place in enumerate(places) if not len(store_in(place).missing(indices))]))
    store = store_in(places[whole[0] if whole else 0])
    if not whole or find_damaged(store, rows, once)[1]:
        name = store.folder.name
        store = store_in(once.place_to_write(rows, name))
        with once.one_writer(store.folder.with_name(f".{name}.lock")):
            complete(store, rows, indices, lambda: partial(ask, make_teacher()), once, config.micro_batch_size)
    ranks.raise_on_all(lambda: check_complete(store, indices))
    stored = StoredTeacherRows(rows, store)
    if not len(indices):
        return stored
    share = ranks.raise_on_all(lambda: kept_share(stored(indices[:config.micro_batch_size])))
    advice = "" if share > LITTLE else "; a lower temperature or a larger DISTILLATION_TOP_K would teach more"
    once.info(f"Teacher: the {k} likeliest tokens hold {share:.0%} of its probability at DISTILLATION_TEMPERATURE="
             f"{config.distillation_temperature:g}{advice}")
    return stored


def find_damaged(store: TeacherStore, rows: ReadRows, once: Once) -> tuple[np.ndarray, int]:
    """The stored rows that are not what they were: those that this rank has found, and the number of all. Without any the store
    is sealed. Collective: every rank must call it."""
    ranks = once.ranks
    if ranks.broadcast(ranks.on_rank0(store.is_sealed)):
        return np.arange(0), 0
    HEARTBEAT.enter("teacher")
    own = np.array_split(np.flatnonzero(store.checksums()), ranks.world_size)[ranks.rank]
    found = [np.arange(0)]
    for block in once.blocks(slices(max(ranks.all_gather_json(len(own))), BLOCK_ROWS), "Teacher: what is stored, verified"):
        found.append(ranks.raise_on_all(partial(store.damaged, rows, own[block])))
    own = np.concatenate(found)
    total = sum(ranks.all_gather_json(len(own)))
    if not total:
        ranks.on_rank0(store.set_seal)
    return own, total


def complete(store: TeacherStore, rows: ReadRows, indices: np.ndarray, make_ask: Callable[[], Ask], once: Once,
             micro_batch_size: int) -> None:
    """Compute what a store lacks of these rows, and what of it is damaged. Collective: every rank must call it.

    Raises:
        DataError: it cannot be written.
        Interrupted: a rank was signalled; what is stored is kept.
    """
    ranks = once.ranks
    with ranks.raise_on_all(lambda: StoreWriter(store)) as writer:
        damaged, total = find_damaged(store, rows, once)
        if total:
            once.info(f"Teacher: {total:,} rows in {store.folder} are damaged, or of other data; they are computed again")
        ranks.raise_on_all(lambda: writer.strike_out(damaged))
        own = store.missing(np.array_split(indices, ranks.world_size)[ranks.rank])
        missing = ranks.all_gather_json(len(own))
        if any(missing):
            once.info(f"Teacher: its {store.k} likeliest tokens of {sum(missing):,} rows are computed once")
            ranks.raise_on_all(lambda: check_room(store, sum(missing)))
            ask = ranks.raise_on_all(make_ask)

            def fill(block: np.ndarray) -> None:
                if len(block):
                    batch = rows(block)
                    writer.write(batch, block, *ask(batch))

            HEARTBEAT.enter("teacher")
            for block in once.blocks(slices(max(missing), micro_batch_size), "Teacher"):
                ranks.raise_on_all(partial(fill, own[block]))
            ranks.raise_on_all(writer.commit)
    ranks.on_rank0(store.set_seal)


def kept_share(batch: Batch) -> float:
    """The mean share of the teacher's probability that the kept tokens have where there is a target."""
    others_BT = batch.stored["teacher_logprobs"][..., -1].float().exp()
    return 1 - float(others_BT[batch.targets_BT != IGNORE_INDEX].mean())


def check_room(store: TeacherStore, rows: int) -> None:
    """See that so many rows more fit on the disk.

    Raises:
        DataError: they do not; it names the bytes.
    """
    parent = next(folder for folder in (store.folder, *store.folder.parents) if folder.exists())
    needed, free = rows * store.record.itemsize, shutil.disk_usage(parent).free
    if needed > free:
        raise DataError(f"{store.folder} needs {needed:,} bytes more, and {free:,} are free; set CACHE_DIR to another disk, "
                        "lower DISTILLATION_TOP_K, or set it to 0 and the teacher runs along")


def check_complete(store: TeacherStore, indices: np.ndarray) -> None:
    """See that all of the rows are stored.

    Raises:
        DataError: they are not, as on machines that do not share the folder.
    """
    missing = store.missing(indices)
    if len(missing):
        raise DataError(f"{store.folder} lacks {len(missing):,} rows that other ranks have written; let all machines share "
                        "it (CACHE_DIR), or set DISTILLATION_TOP_K=0")
