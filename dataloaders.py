"""Which rows each step, rank and micro-batch reads, and how they become batches. Nothing here needs saving: the rows
follow from (seed, step), so a run goes on anywhere, on any number of ranks."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_pipeline.batch import Batch, ReadRows
from data_pipeline.row_order import RowOrder
from data_pipeline.shard_reader import TokenSet

CLOSING_SECONDS = 10


@dataclass(frozen=True)
class TokenRows:
    """The rows of a token set: row i holds the tokens [i*T, i*T + T] and is called with the indices that are wanted.

    With a `document_start_id`, batches number the documents of each row.
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

    @property
    def folder(self) -> Path:
        """Where the data lies."""
        return self.token_set.shards[0].path.parent

    def describe(self) -> str:
        """What there is, in words."""
        return f"{self.token_set.tokens:,} tokens"

    def __call__(self, indices: np.ndarray) -> Batch:
        length = self.row_tokens
        ids_BT = np.concatenate([self.token_set.read(index * length, length + 1) for index in indices.tolist()])
        ids_BT = ids_BT.reshape(-1, length + 1)
        tokens_BT, targets_BT = ids_BT[:, :-1].astype(np.int64), ids_BT[:, 1:].astype(np.int64)
        document_ids_BT = None
        if self.document_start_id is not None:
            document_ids_BT = torch.from_numpy(number_documents(ids_BT[:, :-1], self.document_start_id))
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), document_ids_BT)


def number_documents(ids_BT: np.ndarray, document_start_id: int) -> np.ndarray:
    """Return int32 document numbers: 1 from a row's first token on, whatever it is, one more at each later start."""
    starts_BT = ids_BT == document_start_id
    starts_BT[:, 0] = True
    return np.cumsum(starts_BT, axis=1, dtype=np.int32)


class StepLoader:
    """Iterate over the steps from `first_step` on: each is this rank's list of micro-batches on the device, and what `count`
    says of them together.

    A thread reads up to `ahead` steps in advance, into pinned memory where the device is a GPU, and counts on the CPU. Leaving
    the `with` block, or `close`, ends it. What goes wrong in the thread is raised where the next step is asked for.
    """

    def __init__(self, read_rows: ReadRows, order: RowOrder, device: torch.device, count: Callable[[Batch], torch.Tensor],
                 first_step: int = 0, ahead: int = 2):
        self._read_rows, self._order, self._device, self._count = read_rows, order, device, count
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(first_step,), name="read-ahead", daemon=True)
        self._thread.start()

    def _read_ahead(self, first_step: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread would pin through GPU 0, and take memory there
            for step in itertools.count(first_step):
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._ready.put(self._read_step(step))
        except BaseException as error:  # whatever it is: the main thread must not wait for a step that never comes
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
        """End the thread; one that is stuck in a dead file system is left behind, so that the process can still end."""
        self._closed.set()
        self._room.release()
        self._thread.join(CLOSING_SECONDS)

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def validation_batches(read_rows: ReadRows, rows: int, micro_batch_size: int, device: torch.device, rank: int = 0,
                       world_size: int = 1) -> Iterator[Batch]:
    """Yield one rank's part of the fixed rows 0 to rows-1.

    Every rank yields equally many batches of one shape. Rows beyond the last are padding without targets, so the sums
    over all ranks are those of a single process.
    """
    batches_per_rank = -(-rows // (micro_batch_size * world_size))
    for batch in range(rank * batches_per_rank, (rank + 1) * batches_per_rank):
        first = batch * micro_batch_size
        indices = np.arange(first, first + micro_batch_size)
        real = max(0, min(rows - first, micro_batch_size))
        read = read_rows(np.where(indices < rows, indices, 0))
        yield (read if real == micro_batch_size else read.ignore_from(real)).to(device)
