"""The loaders of all stages: which rows each step, rank and micro-batch reads, and how they become batches.

Rows are a function of (seed, step), so no loader state is saved, and a run resumes on any number of ranks.
"""

import itertools
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
from data_pipeline.packed_rows import ExampleRows, open_example_set
from data_pipeline.row_order import RowOrder
from data_pipeline.shard_reader import TokenSet, Verification, open_token_set

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


Rows = Union[TokenRows, ExampleRows]


def cache_of(config: Config) -> Cache:
    """Return the folders for what is computed from the data."""
    return Cache(config.cache_dir and Path(config.cache_dir).expanduser(), Path(config.output_dir) / ".cache")


def open_rows(config: Config, split: str, tokenizer, verify: str) -> Rows:
    """Open one split of the stage's data: rows of tokens, or of packed chats or pairs.

    Args:
        verify: "auto", "always" or "never" (`Verification.mode`).
    Raises:
        DataError: the data cannot be used, or is too small for a step.
    """
    verification = Verification(verify, cache_of(config))
    if config.training_stage == "pretrain":
        minimum = (config.total_batch_size if split == "train" else config.max_seq_len) + 1
        token_set = open_token_set(config.pretrain_data_path, split, tokenizer, minimum_tokens=minimum,
                                   verification=verification)
        return TokenRows(token_set, config.max_seq_len,
                         token_set.document_start_id if config.document_mask else None)
    is_sft = config.training_stage == "sft"
    path, kind = (config.sft_data_path, "chats") if is_sft else (config.dpo_data_path, "pairs")
    example_set = open_example_set(path, split, kind, tokenizer, verification)
    rows = ExampleRows(example_set, config.max_seq_len, config.document_mask)
    if split == "train" and len(rows) < config.rows_per_step:
        at_once = config.micro_batch_size * config.world_size
        largest = len(rows) // at_once * at_once * config.max_seq_len
        lower = f" to {largest} or less" if largest else " and MICRO_BATCH_SIZE"
        raise DataError(f"{path}: its {rows.examples:,} {kind} fill {len(rows):,} rows of MAX_SEQ_LEN="
                        f"{config.max_seq_len} tokens, but a step reads {config.rows_per_step:,}; prepare "
                        f"more, or lower TOTAL_BATCH_SIZE{lower}")
    return rows


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
