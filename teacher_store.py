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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from chunked_head import IGNORE_INDEX, LOWEST_LOGPROB, chunk_tokens, slices
from config import Config
from dataloaders import Batch, ReadRows
from errors import DataError, SettingsError
from pulse import PULSE
from ranks import Ranks, StopSignals, leave_if_stopped
from run_log import duration

FORMAT = 1
PROGRESS_SECONDS = 15
COMMIT_SECONDS = 10
LITTLE = 0.5  # of the teacher's probability, below which most of what it knows is lost


class TeacherStore:
    """A folder with `facts.json`, `rows.bin` (a record a row) and `checksums.bin` (a uint32 a row, 0 = not stored yet).

    A checksum covers the row's tokens too, and is written after its record: so a kill at any moment costs what was written
    since the last `commit`, and a row that has changed is not taken for what it was. Files are sparse: rows that are never
    asked for take no room.

    Args:
        parent: where the folder is.
        facts: all that decides the contents; they name the folder, so other facts are another store.
    Raises:
        DataError: the folder holds something else.
    """

    def __init__(self, parent: Path, facts: Mapping[str, Any], rows: int, row_tokens: int, vocab_size: int, k: int):
        facts = {"format": FORMAT, **facts, "rows": rows, "max_seq_len": row_tokens, "vocab_size": vocab_size, "top_k": k}
        self.facts = json.dumps(facts, indent=1, sort_keys=True) + "\n"
        self.folder = Path(parent) / f"teacher-{hashlib.sha256(self.facts.encode()).hexdigest()[:16]}"
        id_type = "<u2" if vocab_size <= 1 << 16 else "<i4"
        self.record = np.dtype([("ids", id_type, (row_tokens, k)), ("logprobs", "<f2", (row_tokens, k + 1))])
        self.rows = rows
        self.sizes = {"rows.bin": rows * self.record.itemsize, "checksums.bin": 4 * rows}
        if self.folder.exists():
            self._check()

    def _check(self) -> None:
        sound = {"facts.json": lambda path: path.read_bytes() == self.facts.encode(),
                 **{name: lambda path, size=size: path.stat().st_size in (0, size) for name, size in self.sizes.items()}}
        for name, is_sound in sound.items():
            path = self.folder / name
            try:
                if path.exists() and not is_sound(path):
                    raise DataError(f"{path} is not what it was written as; delete {self.folder}, and it is made anew")
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error

    @cached_property
    def records(self) -> np.ndarray:
        """The record of each row, read-only."""
        return np.memmap(self.folder / "rows.bin", self.record, "r", shape=(self.rows,))

    def checksums(self) -> np.ndarray:
        """The uint32 of each row, as they are on the disk now."""
        path = self.folder / "checksums.bin"
        stored = np.fromfile(path, "<u4") if path.exists() else np.zeros(0, "<u4")
        return stored if len(stored) else np.zeros(self.rows, "<u4")

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Those of the rows that are not stored."""
        return indices[self.checksums()[indices] == 0]


class StoreWriter:
    """Writes rows to a store; several processes may, each its own rows. Leaving the `with` block commits.

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
            if not (folder / "facts.json").exists():  # every process writes the same
                unfinished = folder / f"tmp-{os.getpid()}-facts.json"
                unfinished.write_text(store.facts, encoding="utf-8")
                unfinished.replace(folder / "facts.json")
            for name, size in store.sizes.items():
                self.files[name] = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
                os.ftruncate(self.files[name], size)  # only a new file has another
        except OSError as error:
            self._close()
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
        return DataError(f"{self.store.folder} cannot be written: {error}; make room, or the data's folder writable (what is "
                         "stored is kept), or set DISTILLATION_TOP_K=0 and the teacher runs along")

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
    for part in (batch.tokens_BT, batch.targets_BT, batch.documents_BT):
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
        batch = self.rows(indices)
        records = self.store.records[indices]
        for position, index in enumerate(indices.tolist()):
            if row_checksum(batch, position, records[position]) != self.checksums[index]:
                what = "damaged, or of other data" if self.checksums[index] else "missing"
                raise DataError(f"{self.store.folder}: what the teacher says of row {index} is {what}; delete the folder, and "
                                "it is made anew")
        batch.stored["teacher_ids"] = torch.from_numpy(records["ids"].astype(np.int32))
        batch.stored["teacher_logprobs"] = torch.from_numpy(records["logprobs"].copy())
        return batch


@torch.no_grad()
def likeliest(teacher, batch: Batch, k: int, temperature: float, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The K likeliest ids of each target and their log-probabilities at the temperature, all other tokens' together last.

    Returns:
        (B, T, K) int64 in no order, and (B, T, C) float32; 0 where there is no target.
    """
    device, positions = batch.tokens_BT.device, batch.tokens_BT.numel()
    positions_M = torch.arange(positions, device=device) if batch.positions_M is None else batch.positions_M
    ids_PK = torch.zeros(positions, k, dtype=torch.long, device=device)
    logprobs_PC = torch.zeros(positions, k + 1, device=device)
    logits_of = teacher.logits(batch)
    for part in slices(len(positions_M), chunk_tokens(vocab_size, device.type)):
        scaled_MV = logits_of(part) / temperature
        normaliser_M1 = scaled_MV.logsumexp(dim=-1, keepdim=True)
        kept_MK, ids_MK = scaled_MV.topk(k, sorted=False)
        others_M1 = scaled_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(dim=-1, keepdim=True)
        ids_PK[positions_M[part]] = ids_MK
        logprobs_PC[positions_M[part]] = (torch.cat([kept_MK, others_M1], dim=1) - normaliser_M1).clamp(min=LOWEST_LOGPROB)
    shape = batch.tokens_BT.shape
    return ids_PK.view(*shape, k).cpu().numpy(), logprobs_PC.view(*shape, k + 1).cpu().numpy()


def with_stored_teacher(rows, folder: Path, facts: Mapping[str, Any], make_teacher: Callable[[], Any], config: Config,
                        vocab_size: int, ranks: Ranks, signals: StopSignals, say: Callable[[str], None],
                        indices: Optional[np.ndarray] = None) -> StoredTeacherRows:
    """The rows with what the teacher says, which is computed by all ranks where it is not stored yet.

    Collective: every rank must call it.

    Args:
        folder: beside the data.
        facts: what it follows from besides DISTILLATION_TOP_K and _TEMPERATURE: the teacher's, the data's fingerprint.
        make_teacher: loads it, in case that something is to be computed.
        indices: the rows that will be read; None = all.
    Raises:
        SettingsError: DISTILLATION_TOP_K exceeds the vocabulary.
        DataError: the store cannot be written, or what is there is damaged.
        Interrupted: a rank was signalled; what is stored is kept.
    """
    k = config.distillation_top_k
    if k > vocab_size:
        raise SettingsError(f"DISTILLATION_TOP_K={k} exceeds the vocabulary of {vocab_size:,}; a few dozen do")
    facts = {**facts, "temperature": config.distillation_temperature, "document_mask": config.document_mask}
    store = ranks.together(lambda: TeacherStore(folder, facts, len(rows), rows.row_tokens, vocab_size, k))
    indices = np.arange(len(rows)) if indices is None else np.unique(indices)
    own = store.missing(np.array_split(indices, ranks.world_size)[ranks.rank])
    missing = ranks.gather(len(own))
    if any(missing):
        say(f"Teacher: its {k} likeliest tokens of {sum(missing):,} rows are computed once")
        ranks.together(lambda: check_room(store, sum(missing)))
        teacher = ranks.together(make_teacher)

        def ask(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
            return likeliest(teacher, batch.to(ranks.device), k, config.distillation_temperature, vocab_size)

        with ranks.together(lambda: StoreWriter(store)) as writer:
            fill(writer, rows, ask, slices(max(missing), config.micro_batch_size), own, ranks, signals, say)
        ranks.together(lambda: check_complete(store, indices))
    stored = StoredTeacherRows(rows, store)
    share = ranks.together(lambda: kept_share(stored(indices[:config.micro_batch_size])))
    advice = "" if share > LITTLE else "; a lower temperature or a larger DISTILLATION_TOP_K would teach more"
    say(f"Teacher: the {k} likeliest tokens hold {share:.0%} of its probability at DISTILLATION_TEMPERATURE="
        f"{config.distillation_temperature:g}{advice}")
    return stored


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
        raise DataError(f"{store.folder} needs {needed:,} bytes more, and {free:,} are free; lower DISTILLATION_TOP_K, or set "
                        "it to 0 and the teacher runs along")


def check_complete(store: TeacherStore, indices: np.ndarray) -> None:
    """See that all of the rows are stored.

    Raises:
        DataError: they are not, as on machines that do not share the folder.
    """
    missing = store.missing(indices)
    if len(missing):
        raise DataError(f"{store.folder} lacks {len(missing):,} rows that other ranks have written; let all machines share "
                        "the data's folder, or set DISTILLATION_TOP_K=0")


def fill(writer: StoreWriter, rows: ReadRows, ask: Callable[[Batch], tuple[np.ndarray, np.ndarray]], blocks: list[slice],
         own: np.ndarray, ranks: Ranks, signals: StopSignals, say: Callable[[str], None]) -> None:
    """Store this rank's `own` rows, block by block. Collective: every rank must call it, with as many blocks."""
    def store(indices: np.ndarray) -> None:
        if len(indices):
            batch = rows(indices)
            writer.write(batch, indices, *ask(batch))

    PULSE.enter("teacher")
    started = told = time.perf_counter()
    for number, block in enumerate(blocks, start=1):
        leave_if_stopped(ranks, signals)
        ranks.together(partial(store, own[block]))
        now, share = time.perf_counter(), number / len(blocks)
        if now - told > PROGRESS_SECONDS:
            say(f"Teacher: {share:.0%} of the rows | ETA: {duration((now - started) * (1 - share) / share)}")
            told = now
    ranks.together(writer.commit)
