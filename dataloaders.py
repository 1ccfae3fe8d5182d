"""The loaders of all stages: which rows each step, rank and micro-batch reads, and how they become batches.

Rows are a function of (seed, step), so no loader state is saved, and a run resumes on any number of ranks.
"""

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import numpy as np
import torch

from common.errors import DataError
from common.verified_files import Cache
from config import Config
from data_pipeline.batch import Batch, ReadRows
from data_pipeline.manifest import read_manifest
from data_pipeline.mixed_rows import MixedRows
from data_pipeline.mixture import is_mixture, read_mixture
from data_pipeline.packed_rows import ExampleRows, open_example_set
from data_pipeline.row_order import Mixing, Phase, RowOrder
from data_pipeline.shard_reader import TokenSet, Verification, allow_open_files, open_token_set

CLOSING_SECONDS = 10

# ------------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class TokenRows:
    """The rows of a token set: row i holds the tokens [i*T, i*T + T]. Called with indices, it gives a batch.

    With a `document_start_id`, batches contain the document ids of each row.
    """

    token_set: TokenSet
    row_tokens: int
    document_start_id: int | None = None

    def __len__(self) -> int:
        return (self.token_set.tokens - 1) // self.row_tokens

    @property
    def fingerprint(self) -> str:
        """A hash of the data, the same on every rank."""
        return self.token_set.fingerprint

    def describe(self) -> str:
        """Return a description of the rows for the user."""
        return f"{self.token_set.tokens:,} tokens"

    def __call__(self, indices: np.ndarray) -> Batch:
        length = self.row_tokens
        # One token more than a row, for the last target.
        read = self.token_set.read
        ids_BT = np.concatenate([read(index * length, length + 1) for index in indices.tolist()])
        ids_BT = ids_BT.reshape(-1, length + 1)
        tokens_BT, targets_BT = ids_BT[:, :-1].astype(np.int64), ids_BT[:, 1:].astype(np.int64)
        document_ids_BT = None
        if self.document_start_id is not None:
            document_ids_BT = torch.from_numpy(number_documents(ids_BT[:, :-1], self.document_start_id))
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), document_ids_BT)


def number_documents(ids_BT: np.ndarray, document_start_id: int) -> np.ndarray:
    """Return int32 document ids: 1 from each row's first token on, and one more at each later start."""
    starts_BT = ids_BT == document_start_id
    starts_BT[:, 0] = True
    return np.cumsum(starts_BT, axis=1, dtype=np.int32)


Rows = Union[TokenRows, ExampleRows, MixedRows]


def cache_of(config: Config) -> Cache:
    """Return the folders for what is computed from the data."""
    return Cache(config.cache_dir and Path(config.cache_dir).expanduser(), Path(config.output_dir) / ".cache")


def open_rows(config: Config, split: str, tokenizer, verify: str) -> Rows:
    """Open one split of the stage's data: rows of tokens, of packed chats or pairs, or of a mixture.

    Args:
        verify: "auto", "always" or "never" (`Verification.mode`).
    Raises:
        DataError: the data cannot be used, or is too small for a step.
    """
    path = {"pretrain": config.pretrain_data_path, "sft": config.sft_data_path,
            "dpo": config.dpo_data_path}[config.training_stage]
    if is_mixture(path):
        return open_mixture(config, Path(path), split, tokenizer, verify)
    minimum = (config.total_batch_size if split == "train" else config.max_seq_len) + 1
    rows = open_set(config, path, split, tokenizer, verify, minimum)
    if config.training_stage != "pretrain" and split == "train":
        check_step(config, path, len(rows), f"its {rows.examples:,} {rows.example_set.kind} fill")
    return rows


def open_set(config: Config, path: str | Path, split: str, tokenizer, verify: str,
             minimum_tokens: int = 2) -> TokenRows | ExampleRows:
    """Open one split of a single set. Raises DataError; text has at least `minimum_tokens`."""
    verification = Verification(verify, cache_of(config))
    if config.training_stage == "pretrain":
        token_set = open_token_set(path, split, tokenizer, minimum_tokens=minimum_tokens,
                                   verification=verification)
        return TokenRows(token_set, config.max_seq_len,
                         token_set.document_start_id if config.document_mask else None)
    kind = "chats" if config.training_stage == "sft" else "pairs"
    example_set = open_example_set(path, split, kind, tokenizer, verification)
    return ExampleRows(example_set, config.max_seq_len, config.document_mask)


def check_step(config: Config, path: str | Path, rows: int, what: str) -> None:
    """Raise DataError if a step reads more rows than there are."""
    if rows < config.rows_per_step:
        at_once = config.micro_batch_size * config.world_size
        largest = rows // at_once * at_once * config.max_seq_len
        lower = f" to {largest} or less" if largest else " and MICRO_BATCH_SIZE"
        raise DataError(f"{path}: {what} {rows:,} rows of MAX_SEQ_LEN={config.max_seq_len} tokens, but a "
                        f"step reads {config.rows_per_step:,}; prepare more, or lower "
                        f"TOTAL_BATCH_SIZE{lower}")


def open_mixture(config: Config, folder: Path, split: str, tokenizer, verify: str) -> MixedRows:
    """Open one split of a mixture.

    Of the validation split it has the first rows by the weights of the last phase, so that validation is the
    same through the whole run; a source that held out less than a row is left out there.

    Raises:
        DataError: a set cannot be used, or is too small.
    """
    mixture, parts = read_mixture(folder), []
    phases = mixture.phases_of_run(config.max_steps, config.rows_per_step)
    if split == "validation":
        phases = (phases[-1]._replace(start=0),)
    shortest_row = config.max_seq_len + 1 if config.training_stage == "pretrain" else 1
    for number, source in enumerate(mixture.sources):
        path = Path(os.path.normpath(folder / source.set))
        stream = read_manifest(path).splits.get(split)
        tokens = stream.tokens if stream else 0
        if split == "validation" and (tokens < shortest_row or not phases[0].weights[number]):
            parts.append(None)
            continue
        parts.append(open_set(config, path, split, tokenizer, verify))
        if tokens < shortest_row:
            raise DataError(f"{path}: its {tokens:,} tokens are fewer than a row of MAX_SEQ_LEN="
                            f"{config.max_seq_len} and one more; prepare more text, or leave "
                            f"{source.label!r} out of the mixture")
    if not any(parts):
        raise DataError(f"{folder}: no source has a row of validation; prepare more text, with a larger "
                        "VALIDATION_FRACTION, or set VALIDATE_EVERY=0")
    allow_open_files(sum(len(part.token_set.shards) for part in parts if part), folder)
    sizes = tuple(len(part) if part else 0 for part in parts)
    fingerprint = mixture.fingerprint([part.fingerprint if part else "" for part in parts])
    if split == "train":
        check_step(config, folder, sum(sizes), "its sources fill")
        return MixedRows(folder, mixture, tuple(parts), Mixing(sizes, phases), fingerprint)
    weights = tuple(weight if part else 0 for part, weight in zip(parts, phases[0].weights))
    mixing = Mixing(sizes, (Phase(0, weights),))
    chosen = mixing.rows_at(np.arange(min(config.validation_rows, sum(sizes))), seed=None)
    return MixedRows(folder, mixture, tuple(parts), mixing, fingerprint, chosen)


# -------------------------------------------------------------------------------------------------- batches


class StepLoader:
    """Iterate over the steps from `first_step` on: this rank's micro-batches of each on the device, and the
    sum of `count` over them.

    A thread reads up to `ahead` steps in advance, into pinned memory for a GPU, and counts on the CPU. An
    error in the thread is raised by the next `next()`. Leaving the `with` block, or `close`, ends the thread.
    """

    def __init__(self, read_rows: ReadRows, order: RowOrder, device: torch.device,
                 count: Callable[[Batch], torch.Tensor], first_step: int = 0, ahead: int = 2):
        self._read_rows, self._order, self._device, self._count = read_rows, order, device, count
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(first_step,), name="read-ahead",
                                        daemon=True)
        self._thread.start()

    def _read_ahead(self, first_step: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread would use GPU 0, and memory there
            for step in itertools.count(first_step):
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._ready.put(self._read_step(step))
        except BaseException as error:  # of any kind: nobody must wait for a step that never comes
            self._ready.put(error)

    def _read_step(self, step: int) -> tuple[list[Batch], int]:
        batches = [self._read_rows(rows) for rows in self._order.micro_batches(step)]
        count = sum(int(self._count(batch)) for batch in batches)
        return [batch.pin_memory() for batch in batches] if self._device.type == "cuda" else batches, count

    def __iter__(self) -> Iterator[tuple[list[Batch], int]]:
        return self

    def __next__(self) -> tuple[list[Batch], int]:
        assert not self._closed.is_set(), "the loader is closed"
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)
            raise item
        self._room.release()
        batches, count = item
        return [batch.to(self._device) for batch in batches], count

    def close(self) -> None:
        """End the thread, or abandon it if a dead file system blocks it, so that the process can end."""
        self._closed.set()
        self._room.release()
        self._thread.join(CLOSING_SECONDS)

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def validation_batches(read_rows: ReadRows, rows: int, micro_batch_size: int, device: torch.device,
                       rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield one rank's part of the fixed rows 0 to rows-1.

    All ranks yield the same number of batches of the same shape. Rows beyond the last are padding without
    targets, so that the sums over all ranks equal those of a single process.
    """
    batches_per_rank = -(-rows // (micro_batch_size * world_size))
    for batch in range(rank * batches_per_rank, (rank + 1) * batches_per_rank):
        first = batch * micro_batch_size
        indices = np.arange(first, first + micro_batch_size)
        real = max(0, min(rows - first, micro_batch_size))
        read = read_rows(np.where(indices < rows, indices, 0))
        yield (read if real == micro_batch_size else read.ignore_from(real)).to(device)
