"""Which rows each step, rank and micro-batch reads, and how they become batches. Nothing here needs saving: the rows
follow from (seed, step), so a run goes on anywhere, on any number of ranks."""

import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from data_pipeline.shard_reader import TokenSet
from fused.chunked_head import IGNORE_INDEX

FEISTEL_ROUNDS = 6
CLOSING_SECONDS = 10

Permutation = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Rows for one forward. Targets are already shifted; `document_ids_BT` is None where documents see each other."""

    tokens_BT: torch.Tensor  # int64
    targets_BT: torch.Tensor  # int64, IGNORE_INDEX where nothing is predicted
    document_ids_BT: torch.Tensor | None = None  # int32, documents numbered from 1 in each row
    target_index_M: torch.Tensor | None = None  # int64, where in the flattened targets something is predicted; None = everywhere
    stored: dict[str, torch.Tensor] = field(default_factory=dict)  # what was computed before, row by row

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, without waiting for the copy of pinned memory.

        The documents' numbers stay: the model makes what its kernels want of them on the CPU, and so waits for no GPU.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, document_ids_BT=self.document_ids_BT)

    def pin_memory(self) -> "Batch":
        """Return the batch in memory that a GPU can fetch from by itself."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        def optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else change(tensor)

        return Batch(change(self.tokens_BT), change(self.targets_BT), optional(self.document_ids_BT), optional(self.target_index_M),
                     {name: change(tensor) for name, tensor in self.stored.items()})

    def ignore_from(self, row: int) -> "Batch":
        """Return the batch with nothing to predict in the rows from `row` on, which are padding."""
        targets_BT = self.targets_BT.clone()
        targets_BT[row:] = IGNORE_INDEX
        target_index_M = self.target_index_M
        if target_index_M is not None:
            target_index_M = target_index_M[target_index_M < row * targets_BT.shape[1]]
        return replace(self, targets_BT=targets_BT, target_index_M=target_index_M)


ReadRows = Callable[[np.ndarray], Batch]


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


def permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Return a pseudo-random bijection on [0, n), from an array of positions to an int64 array, that takes no memory.

    A Feistel network over pairs (left, right) with left < a, right < b and a*b >= n, adding modulo a and b; a value
    beyond n is sent through again until it falls inside. As a*b < n + a, that is rarely needed.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 (walking) and 5 (a*b).
    """
    assert 1 <= n < 1 << 60 and seed >= 0 and epoch >= 0
    root = math.isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)

    def encipher(values: np.ndarray) -> np.ndarray:
        left, right = values // b, values % b
        for key_left, key_right in zip(keys[::2], keys[1::2]):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        return left * b + right

    def permute(positions: np.ndarray) -> np.ndarray:
        values = encipher(np.asarray(positions, np.uint64))
        while len(outside := np.flatnonzero(values >= n)):
            values[outside] = encipher(values[outside])
        return values.astype(np.int64)

    return permute


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every bit of uint64 values over all bits.

    Source: splitmix64's finaliser (Steele, Lea and Flood 2014), variant 13 of Stafford.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def rows_of_step(step: int, rows_per_step: int, n_rows: int, seed: int) -> np.ndarray:
    """Return the int64 indices of the rows that all ranks together read in a step, even across the end of an epoch."""
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    epochs, within = np.divmod(positions, n_rows)
    return np.concatenate([permutation(n_rows, seed, epoch)(within[epochs == epoch])
                           for epoch in np.unique(epochs).tolist()])


@dataclass(frozen=True)
class RowOrder:
    """Which rows one rank reads in each step: of the step's rows its contiguous part, cut into micro-batches."""

    n_rows: int
    rows_per_step: int  # of all ranks together
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        assert self.rows_per_step % (self.micro_batch_size * self.world_size) == 0

    def all_rows(self, step: int) -> np.ndarray:
        """Return the row indices that all ranks together read in a step, int64."""
        return rows_of_step(step, self.rows_per_step, self.n_rows, self.seed)

    def micro_batches(self, step: int) -> np.ndarray:
        """Return this rank's row indices of a step, int64 of shape (micro-batches, micro_batch_size)."""
        return self.all_rows(step).reshape(self.world_size, -1, self.micro_batch_size)[self.rank]


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
