"""Turn prepared sets into the batches of each step: order, read, pack and mix rows, and load them ahead.

Rows are a function of (seed, step, rank, world size), so no loader state is saved, and a run resumes on any
number of ranks. Chats and pairs are packed into rows when data is opened, so that MAX_SEQ_LEN can change.
"""

import itertools
import math
import queue
import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common.activity import tick
from common.errors import DataError, SettingsError
from common.files import json_sha256
from common.text import counted, percent
from config import KIND_OF_STAGE, Config
from data_pipeline import shards
from data_pipeline.examples import LENGTH_SHIFT, TARGET, ExampleSet, open_example_set
from data_pipeline.mixture import Mixture, Phase, is_mixture, read_mixture, source_table
from model_kernels.head import IGNORE_INDEX

FEISTEL_ROUNDS = 6
CLOSING_SECONDS, POLL_SECONDS = 10, 0.2


def permute(positions: np.ndarray, n: int, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    """Map positions through a pseudo-random permutation of [0, n), as int64, without storing it.

    A Feistel network over pairs (left, right) with left < a, right < b and a*b >= n, adding modulo a and b.
    Values of n or more go through it again until they are below n, which is rare since a*b < n + a.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 (walking) and 5 (a*b).
    """
    root = math.isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    # A trailing 0 changes nothing: NumPy pads seeds with zeros.
    keys = np.random.SeedSequence([seed, epoch, source]).generate_state(FEISTEL_ROUNDS, np.uint64)
    values, outside = np.array(positions, np.uint64), np.arange(len(positions))
    while len(outside):
        left, right = np.divmod(values[outside], b)
        for key_left, key_right in zip(keys[::2], keys[1::2]):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        values[outside] = left * b + right
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values. Source: splitmix64 (Steele et al. 2014), Stafford's variant 13."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def rows_at(positions: np.ndarray, n_rows: int, seed: int, source: int = 0) -> np.ndarray:
    """Return the int64 row indices at ascending positions; each epoch is a new permutation of all rows."""
    epochs, within = np.divmod(positions, n_rows)
    return np.concatenate([permute(within[epochs == epoch], n_rows, seed, epoch, source)
                           for epoch in np.unique(epochs).tolist()])


@dataclass(frozen=True)
class Mixing:
    """Assigns each position of a run to a row of one source, without any state.

    The first p positions of a phase are divided among the sources in order: each takes its weight's share of
    those that remain, rounded down. So at any time a source's share is exact to about one row.
    """

    sizes: tuple[int, ...]  # rows of each source; the rows are numbered source by source
    phases: tuple[Phase, ...] = (Phase(0, (1,)),)  # from position 0 on
    is_complete = True  # data of an extension may still be in preparation

    def has(self, rows: int) -> bool:
        """Return whether the first `rows` rows of the run are on disk."""
        return True

    def taken(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows taken from each source before each position, int64 (sources, positions)."""
        taken = np.zeros((len(self.sizes), len(positions)), np.int64)
        ends = [phase.start for phase in self.phases[1:]] + [1 << 38]
        for phase, end in zip(self.phases, ends):
            left, units = np.clip(positions, phase.start, end) - phase.start, sum(phase.weights)
            for source, weight in enumerate(phase.weights):
                if weight:  # the last source with a weight takes all remaining ones
                    given = left * weight // units
                    taken[source] += given
                    left, units = left - given, units - weight
        return taken

    def rows_at(self, positions: np.ndarray, seed: int | None) -> np.ndarray:
        """Return the int64 row indices at ascending positions; None as the seed means unshuffled."""
        before = self.taken(positions)
        sources = (self.taken(positions + 1) - before).argmax(axis=0)
        rows, first = np.empty(len(positions), np.int64), 0
        for source, size in enumerate(self.sizes):
            if len(indices := np.flatnonzero(sources == source)):
                taken = before[source, indices]
                rows[indices] = first + (taken % size if seed is None else rows_at(taken, size, seed, source))
            first += size
        return rows


@dataclass(frozen=True)
class RowOrder:
    """The rows that one rank reads: a contiguous share of each step's rows, divided into micro-batches."""

    mixing: Mixing
    rows_per_step: int  # over all ranks
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def all_rows(self, step: int) -> np.ndarray:
        positions = np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        return self.mixing.rows_at(positions, self.seed)

    def micro_batches(self, step: int) -> np.ndarray:
        """Return this rank's rows; the first ranks may have one micro-batch more."""
        micro_batches = self.all_rows(step).reshape(-1, self.micro_batch_size)
        return np.array_split(micro_batches, self.world_size)[self.rank]


def first_micro_batch(count: int, rank: int, world_size: int) -> int:
    each, more = divmod(count, world_size)
    return rank * each + min(rank, more)


# ---------------------------------------------------------------------------------- batches, and rows of text


@dataclass(frozen=True)
class Batch:
    """Rows for one forward. The targets are already shifted: each token's target is the next token."""

    tokens_BT: torch.Tensor  # int64
    targets_BT: torch.Tensor  # int64; IGNORE_INDEX = nothing to predict
    document_ids_BT: torch.Tensor | None = None  # int32, numbered from 1 in each row; None = no document mask
    target_index_M: torch.Tensor | None = None  # int64 positions of the flattened targets; None = all
    stored: dict[str, torch.Tensor] = field(default_factory=dict)  # precomputed outputs, by row
    padding: int = 0  # tokens that belong to no document
    host: "Batch | None" = None  # on the CPU, of which this is a copy

    @property
    def targets(self) -> int:
        """Number of positions that the head predicts, known without a GPU sync."""
        return self.targets_BT.numel() if self.target_index_M is None else len(self.target_index_M)

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device without waiting for it. The host reads the document ids."""
        on_cuda = device.type == "cuda"  # a copy to mps reads its source later, which may be gone
        host = self.pin_memory() if on_cuda and not self.tokens_BT.is_pinned() else self
        moved = host._map(lambda tensor: tensor.to(device, non_blocking=on_cuda))
        return replace(moved, document_ids_BT=host.document_ids_BT, host=host)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        tensors = (self.tokens_BT, self.targets_BT, self.document_ids_BT, self.target_index_M)
        return Batch(*(None if tensor is None else change(tensor) for tensor in tensors),
                     {name: change(tensor) for name, tensor in self.stored.items()}, self.padding)

    def pin_memory(self) -> "Batch":
        return self._map(torch.Tensor.pin_memory)

    def ignore_from(self, row: int) -> "Batch":
        """Return the batch without the targets of padding rows, which begin at `row`."""
        targets_BT, target_index_M = self.targets_BT.clone(), self.target_index_M
        targets_BT[row:] = IGNORE_INDEX
        if target_index_M is not None:
            target_index_M = target_index_M[target_index_M < row * targets_BT.shape[1]]
        return replace(self, targets_BT=targets_BT, target_index_M=target_index_M)


def join(batches: Sequence[Batch], order: np.ndarray) -> Batch:
    """Concatenate batches, and return them with row i taken from row order[i]."""
    def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        return None if tensors[0] is None else torch.cat(tensors)[torch.from_numpy(order)]

    tokens_BT, targets_BT, document_ids_BT = map(joined, zip(*(
        (batch.tokens_BT, batch.targets_BT, batch.document_ids_BT) for batch in batches)))
    target_index_M = None
    if batches[0].target_index_M is not None:
        target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    # The second axis of stored tensors, the pairs of a row, may differ: pad with zeros.
    stored = {}
    for name in batches[0].stored:
        rows = [row for batch in batches for row in batch.stored[name]]
        stored[name] = joined([pad_sequence(rows, batch_first=True)])
    return Batch(tokens_BT, targets_BT, document_ids_BT, target_index_M, stored,
                 sum(batch.padding for batch in batches))


class SourceRows:
    """The rows of one split of a prepared set. Calling them with indices returns a batch.

    A subclass defines all that is declared here, `__len__` and `describe`, and of examples `examples_in`.
    """

    token_set: shards.TokenSet
    example_set: ExampleSet | None  # None for text
    fingerprint: str
    row_tokens: int
    content: str  # such as "1,000 tokens"
    __call__: Callable[[np.ndarray], Batch]


@dataclass(frozen=True)
class TokenRows(SourceRows):
    """The rows of a token set: row i holds the tokens [i*T, i*T + T]."""

    token_set: shards.TokenSet
    row_tokens: int
    document_start_id: int | None = None
    example_set = None
    fingerprint = property(lambda self: self.token_set.fingerprint)
    content = property(lambda self: f"{self.token_set.tokens:,} tokens")

    def __len__(self) -> int:
        return (self.token_set.tokens - 1) // self.row_tokens

    def describe(self) -> str:
        return self.content

    def __call__(self, indices: np.ndarray) -> Batch:
        # One more token than a row has, for the last target.
        length = self.row_tokens
        ids_BT = np.stack([self.token_set.read(index * length, length + 1) for index in indices.tolist()])
        tokens_BT, document_ids_BT = ids_BT[:, :-1], None
        if self.document_start_id is not None:
            # Numbered from 1 in each row, whose first token always starts a document.
            starts_BT = tokens_BT == self.document_start_id
            starts_BT[:, 0] = True
            document_ids_BT = torch.from_numpy(np.cumsum(starts_BT, axis=1, dtype=np.int32))
        return Batch(torch.from_numpy(tokens_BT.astype(np.int64)),
                     torch.from_numpy(ids_BT[:, 1:].astype(np.int64)), document_ids_BT)


# ----------------------------------------------------------------------- packing, and rows of chats and pairs


@dataclass(frozen=True, eq=False)
class Packing:
    """The items of each bin; bin b holds `items[offsets[b]:offsets[b + 1]]`, longest first."""

    items: np.ndarray  # each item's index once
    offsets: np.ndarray  # int64, (bins + 1,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def items_in(self, bin: int) -> np.ndarray:
        return self.items[self.offsets[bin]:self.offsets[bin + 1]]


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack items with these lengths, 1 to `capacity`: longest first, each into the fullest bin that it fits.

    The result depends only on the lengths. Items of equal length are dealt out like cards, so that neighbours
    in the data, which are often similar, go to different bins. Source: best-fit decreasing, Johnson et al.
    1974, "Worst-case performance bounds for simple one-dimensional packing algorithms".
    """
    lengths = np.asarray(lengths)
    assert lengths.ndim == 1 and (not lengths.size or 1 <= lengths.min() and lengths.max() <= capacity)
    placements = list(_best_fit(np.bincount(lengths, minlength=capacity + 1), capacity))
    # Count the items of each bin.
    bins = max((first + count for first, count, _ in placements), default=0)
    offsets = np.zeros(bins + 1, np.int64)
    for first, count, each in placements:
        offsets[first + 1:first + count + 1] += each
    np.cumsum(offsets, out=offsets)
    # Sort the items by descending length. NumPy has a fast stable sort for 16-bit integers.
    by_length = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    items = np.empty(len(lengths), np.int32 if len(lengths) < 1 << 31 else np.int64)
    # Fill the bins placement by placement; `free` holds the next slot of each bin.
    free, placed = offsets[:-1].copy(), 0
    for first, count, each in placements:
        slots = free[first:first + count]
        items[slots + np.arange(each)[:, None]] = by_length[placed:placed + count * each].reshape(each, count)
        slots += each
        placed += count * each
    return Packing(items, offsets)


def _best_fit(counts: np.ndarray, capacity: int) -> Iterator[tuple[int, int, int]]:
    """Yield placements (first bin, bins, items per bin) by descending length, given the items of each length.

    Bins with equal free space are interchangeable. The fullest bin that fits an item stays the fullest, and
    takes as many items as it can, so whole ranges of bins are filled at once.
    """
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (first bin, bins) by free space
    free_sizes: list[int] = []  # the free space of existing bins, ascending
    opened = 0

    def add_range(free: int, first: int, bins: int) -> None:
        if bins:
            if not ranges[free]:
                insort(free_sizes, free)
            ranges[free].append((first, bins))

    for length in np.flatnonzero(counts)[::-1].tolist():
        items = int(counts[length])
        while items:
            if (fullest := bisect_left(free_sizes, length)) == len(free_sizes):
                bins = -(-items // (capacity // length))
                add_range(capacity, opened, bins)
                opened += bins
            free = free_sizes[fullest]
            first, bins = ranges[free].pop()
            if not ranges[free]:
                del free_sizes[fullest]
            # Fill the bins of one range; the last one may stay partly empty.
            per_bin = free // length
            full = min(bins, items // per_bin)
            rest = items - full * per_bin if full < bins else 0  # fewer than `per_bin`, for one more bin
            for start, count, taken in ((first, full, per_bin), (first + full, int(rest > 0), rest)):
                if count:
                    yield start, count, taken
                    add_range(free - taken * length, start, count)
            used = full + (rest > 0)
            add_range(free, first + used, bins - used)
            items -= full * per_bin + rest


class ExampleRows(SourceRows):
    """The rows of an example set of chats or pairs.

    A chat of n tokens takes n - 1 slots and is one document. A pair is two documents: the prompt with the
    chosen answer (number 2j - 1) and with the rejected one (2j). The rest of a row is padding: id 0, no
    targets, and the next document number. A fixed permutation orders the rows, so that the first rows, which
    validation reads, are a fair sample. For unpaired answers, `stored` has `label_BP`: 1 = the first answer
    of a pair is the record's own, and good; -1 = the second, and bad; 0 = padding.

    A document longer than `max_seq_len` is cut at its end, but with "keep_end" a pair's prompt is cut first,
    at its start: to the room beside the longer answer, or half a row. An example that keeps no target is left
    out. If a pair's documents do not fit into a row together, all rows are as long as such pairs need, up to
    2 `max_seq_len`; with "drop", those pairs are left out. Without `document_mask`, chats have no document
    ids and attend to earlier chats of the row; pairs never do.
    """

    def __init__(self, example_set: ExampleSet, max_seq_len: int, document_mask: bool = True,
                 truncation: str = "keep_end"):
        self.example_set, self.most, kind = example_set, max_seq_len + 1, example_set.kind
        self.token_set, self.fingerprint = example_set.tokens, example_set.fingerprint
        self.numbered = document_mask or kind == "pairs"
        # The tokens of each example's documents (D: one, or a pair's two), and those before the first target.
        prompts_E1 = example_set.first_targets.astype(np.int64)[:, None]
        lengths_ED, prompts_ED = np.diff(example_set.starts)[:, None], prompts_E1
        if kind == "pairs":
            answers_E2 = (example_set.segments >> LENGTH_SHIFT).astype(np.int64).reshape(-1, 3)[:, 1:]
            lengths_ED, prompts_ED = prompts_E1 + answers_E2, np.repeat(prompts_E1, 2, axis=1)
            if truncation == "keep_end":
                if example_set.labels is None:  # both answers follow the same prompt
                    answers_E2 = answers_E2.max(axis=1, keepdims=True)
                prompts_ED = np.minimum(prompts_ED, np.maximum(self.most - answers_E2, self.most // 2))
        self._prompts_ED = prompts_ED
        cut_ED = np.minimum(lengths_ED - prompts_E1 + prompts_ED, self.most)
        needed = prompts_ED.max(axis=1)
        if (kind, truncation) == ("pairs", "drop"):
            needed = (lengths_ED - 1).sum(axis=1)
        used = np.flatnonzero(needed <= max_seq_len)
        if not len(used):
            raise DataError(f"{example_set.path}: none of the {len(needed):,} {kind} keeps a target in a "
                            f"row of MAX_SEQ_LEN={max_seq_len} tokens; set it to {needed.max()} to keep all, "
                            f"or to at least {needed.min()}")
        slots = (cut_ED - 1).sum(axis=1)
        self.row_tokens = row_tokens = max(max_seq_len, int(slots[used].max()))
        if row_tokens > max_seq_len:  # the rows depend on these, too
            self.fingerprint = json_sha256([self.fingerprint, max_seq_len, truncation])
        packing = pack(slots[used], row_tokens)
        self._packing = Packing(used.astype(packing.items.dtype)[packing.items], packing.offsets)
        self._bins = permute(np.arange(len(packing)), len(packing), 0, 0)
        self.examples, self.left_out = len(used), len(needed) - len(used)
        self.tokens = int(slots[used].sum())
        self.truncated = int((cut_ED < lengths_ED).any(axis=1)[used].sum())
        self.fill = self.tokens / (len(self) * row_tokens)  # share of slots without padding
        self.content = counted(self.examples, example_set.content[:-1])

    def __len__(self) -> int:
        return len(self._bins)

    def describe(self) -> str:
        rows = counted(len(self), "row") + f" of {self.row_tokens:,} tokens" * (self.row_tokens >= self.most)
        packed = f"{self.content} in {rows}, {percent(self.fill)} full"
        truncated = f", {self.truncated:,} cut to MAX_SEQ_LEN={self.most - 1}" if self.truncated else ""
        left_out = f", {self.left_out:,} too long and left out" if self.left_out else ""
        return packed + truncated + left_out

    def examples_in(self, row: int) -> np.ndarray:
        return self._packing.items_in(self._bins[row])

    def __call__(self, indices: np.ndarray) -> Batch:
        shape = len(indices), self.row_tokens
        tokens_BT, targets_BT = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        document_ids_BT, padding = np.empty(shape, np.int32), 0
        for row, index in enumerate(indices.tolist()):
            end = 0
            for document, (ids, is_target) in enumerate(self._documents(index), 1):
                start, end = end, end + len(ids) - 1
                tokens_BT[row, start:end] = ids[:-1]
                np.copyto(targets_BT[row, start:end], ids[1:], where=is_target[1:])
                document_ids_BT[row, start:end] = document
            document_ids_BT[row, end:] = document + 1
            padding += self.row_tokens - end
        target_index_M, stored = np.flatnonzero(targets_BT != IGNORE_INDEX), {}
        if self.example_set.labels is not None:
            labels = [torch.from_numpy(self.example_set.labels[self.examples_in(row)]) for row in indices]
            stored["label_BP"] = pad_sequence(labels, batch_first=True)
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT),
                     torch.from_numpy(document_ids_BT) if self.numbered else None,
                     torch.from_numpy(target_index_M), stored, padding)

    def _documents(self, row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the token ids of each document of a row, and a mask of its targets."""
        for example in self.examples_in(row).tolist():
            ids, segments = self.example_set.read(example)
            lengths = segments >> LENGTH_SHIFT
            if self.example_set.kind == "chats":
                is_target = np.repeat((segments & TARGET).astype(bool), lengths)
                yield ids[:self.most], is_target[:self.most]
                continue
            prompt, *answers = np.split(ids, np.cumsum(lengths[:2]))
            for prompt_tokens, answer in zip(self._prompts_ED[example].tolist(), answers):
                document = np.concatenate([prompt[len(prompt) - prompt_tokens:], answer])[:self.most]
                yield document, np.arange(len(document)) >= prompt_tokens


# ---------------------------------------------------------------------------------------- rows of all sources


class WrappedRows(SourceRows):
    """The rows of a source with other batches; all else is that of `rows`."""

    rows: SourceRows

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)


@dataclass(frozen=True)
class Rows:
    """The rows of at least one source, numbered source by source. Calling it with indices returns a batch."""

    sources: tuple[SourceRows | None, ...]  # None = not read
    mixing: Mixing
    fingerprint: str
    mixture: Mixture | None = None
    chosen: np.ndarray | None = None  # the rows to read, in this order; None = all

    @classmethod
    def of(cls, source: SourceRows) -> "Rows":
        return cls((source,), Mixing((len(source),)), source.fingerprint)

    def __len__(self) -> int:
        return sum(self.mixing.sizes) if self.chosen is None else len(self.chosen)

    def describe(self) -> str:
        if self.mixture is None:
            return self.sources[0].describe()
        if self.chosen is None:
            tokens = sum(source.token_set.tokens for source in self.sources)
            return f"{tokens:,} tokens in a mixture of {counted(len(self.sources), 'source')}"
        sources = zip(self.mixture.sources, self.sources, self.mixture.weights[-1])
        missing = [source.label for source, rows, weight in sources if weight and rows is None]
        return counted(len(self), "row") + (f" (none of {', '.join(missing)})" if missing else "")

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's source, and its number there."""
        indices = indices if self.chosen is None else self.chosen[indices]
        ends = np.cumsum(self.mixing.sizes)
        sources = np.searchsorted(ends, indices, side="right")
        return sources, indices - (ends - self.mixing.sizes)[sources]

    def source_table(self, rows: int) -> list[dict[str, Any]]:
        """Return `source_table` with each source's exact share of a run of this many rows, and its passes.

        Empty without a mixture.
        """
        if self.mixture is None:
            return []
        taken = self.mixing.taken(np.array([rows]))[:, 0].tolist()
        return [entry | {"share": count / max(1, rows), "passes": count / size} for entry, count, size in
                zip(source_table(self.mixture), taken, self.mixing.sizes)]

    def first_batches(self, count: int, seed: int | None, size: int) -> list[list[np.ndarray]]:
        """Return the first `count` rows of a run as ascending batches of each source; no seed: in order."""
        taken = np.minimum(self.mixing.taken(np.array([count]))[:, 0], self.mixing.sizes).tolist()
        batches = []
        for source, (read, rows) in enumerate(zip(taken, self.mixing.sizes)):
            if rows:
                first = np.arange(read)
                first = first if seed is None else np.sort(permute(first, rows, seed, 0, source))
                batches.append(np.split(first, range(size, read, size)))
        return batches

    def map(self, change: Callable[[SourceRows], SourceRows]) -> "Rows":
        return replace(self, sources=tuple(source and change(source) for source in self.sources))

    def __call__(self, indices: np.ndarray) -> Batch:
        sources, within = self.locate(indices)
        positions = [np.flatnonzero(sources == source) for source in np.unique(sources)]
        batches = [self.sources[sources[each[0]]](within[each]) for each in positions]
        return batches[0] if len(batches) == 1 else join(batches, np.argsort(np.concatenate(positions)))


# ---------------------------------------------------------------------------------------- opening and loading

# Filled by extensions: `open_rows` for data that grows, and the rows of an example set of prompts.
OPENERS: dict[str, Callable] = {}


def cache_of(config: Config) -> shards.Cache:
    chosen = config.cache_dir and Path(config.cache_dir).expanduser()
    return shards.Cache(chosen, fallback=Path(config.output_dir) / ".cache")


def open_rows(config: Config, split: str, tokenizer, verify: str) -> Rows:
    """Open one split of the stage's data; `verify` is as in `open_token_set`."""
    path, stored = config.data_path, split
    if split == "validation" and config.validation_data_path:
        path = config.validation_data_path
        stored = shards.split_to_validate(Path(path))
    elif config.prepare_ahead:
        return OPENERS["growing"](config, split, tokenizer, verify)
    if is_mixture(path):
        return open_mixture(config, Path(path), split, tokenizer, verify)
    source = open_set(config, path, stored, tokenizer, verify)
    check_rows(config, path, split, len(source), f"its {source.content} fill")
    return Rows.of(source)


def open_set(config: Config, path: str | Path, split: str, tokenizer, verify: str) -> SourceRows:
    """Open one split of a single set."""
    cache = cache_of(config)
    if config.training_stage == "pretrain":
        tokens = shards.open_token_set(path, split, tokenizer, verify=verify, cache=cache)
        document_start_id = tokens.document_start_id if config.document_mask else None
        return TokenRows(tokens, config.max_seq_len, document_start_id)
    kind = KIND_OF_STAGE[config.training_stage]
    example_set = open_example_set(path, split, kind, tokenizer, verify, cache)
    if kind == "prompts":
        if kind not in OPENERS:
            raise SettingsError("TRAINING_STAGE=grpo needs extensions/online.py, and its name in EXTENSIONS")
        return OPENERS[kind](example_set, config)
    return ExampleRows(example_set, config.max_seq_len, config.document_mask, config.pair_truncation)


def check_rows(config: Config, path: str | Path, split: str, rows: int, content: str) -> None:
    """Raise DataError if there are fewer rows than a step reads, or none for validation."""
    needed, reader, lower = 1, "validation", "MAX_SEQ_LEN"
    if split == "train":
        needed, reader = config.rows_read, "a step"
        lower = "TOTAL_BATCH_SIZE and MICRO_BATCH_SIZE" if rows else lower
        if most := rows * config.answers_per_prompt // (config.micro_batch_size * config.world_size):
            most *= config.micro_batch_size * config.world_size * config.max_seq_len
            lower = f"TOTAL_BATCH_SIZE to {most} or less"
    if rows < needed:
        raise DataError(f"{path}: {content} {counted(rows, 'row')} of MAX_SEQ_LEN={config.max_seq_len} "
                        f"tokens, but {reader} reads {needed:,}; prepare more, or lower {lower}")


def open_mixture(config: Config, folder: Path, split: str, tokenizer, verify: str) -> Rows:
    """Open one split of a mixture.

    Validation always reads the same rows: the first by the last phase's weights, without too small sources.
    """
    mixture, sources, is_training = read_mixture(folder), [], split == "train"
    phases = mixture.phases_of_run(config.max_steps, config.rows_read)
    shortest_row = config.max_seq_len + 1 if config.training_stage == "pretrain" else 1
    for source, weight in zip(mixture.sources, phases[-1].weights):
        path = Path(source.set)
        stream = shards.read_data_manifest(path).splits.get(split)
        tokens = stream.tokens if stream else 0
        if not is_training and (tokens < shortest_row or not weight):
            sources.append(None)
            continue
        sources.append(open_set(config, path, split, tokenizer, verify))
        if tokens < shortest_row:
            raise DataError(f"{path}: its {tokens:,} tokens are fewer than a row of MAX_SEQ_LEN="
                            f"{config.max_seq_len} and one more; prepare more text, or leave "
                            f"{source.label!r} out of the mixture")
    if not any(sources):
        raise DataError(f"{folder}: no source has a row of validation; prepare more text, with a larger "
                        "VALIDATION_FRACTION, or set VALIDATE_EVERY=0")
    shards.allow_open_files(sum(len(rows.token_set.shards) for rows in sources if rows), folder)
    for rows in filter(None, sources if config.training_stage == "dpo" else ()):  # one batch holds all
        rows.row_tokens = max(each.row_tokens for each in sources if each)
    sizes = tuple(len(rows) if rows else 0 for rows in sources)
    fingerprint = mixture.fingerprint([rows.fingerprint if rows else "" for rows in sources])
    if is_training:
        check_rows(config, folder, split, sum(sizes), "its sources fill")
        return Rows(tuple(sources), Mixing(sizes, phases), fingerprint, mixture)
    weights = tuple(weight if rows else 0 for rows, weight in zip(sources, phases[-1].weights))
    mixing = Mixing(sizes, (Phase(0, weights),))
    chosen = mixing.rows_at(np.arange(min(config.validation_rows, sum(sizes))), seed=None)
    return Rows(tuple(sources), mixing, fingerprint, mixture, chosen)


@contextmanager
def load_steps(read_rows: Rows, order: RowOrder, device: torch.device,
               count: Callable[[Batch], torch.Tensor], first_step: int = 0,
               ahead: int = 2) -> Iterator[Iterator[tuple[list[Batch], int]]]:
    """A `with` block around an iterator over steps: this rank's micro-batches on the device, and their count.

    A thread reads up to `ahead` steps in advance, into pinned memory for a GPU, and adds up `count(batch)` on
    the CPU. `next()` raises its errors. It ends with the block, or is abandoned on a dead file system.
    """
    ready: queue.SimpleQueue = queue.SimpleQueue()
    free_slots, closed, on_gpu = threading.Semaphore(ahead), threading.Event(), device.type == "cuda"

    def read_ahead() -> None:
        try:
            if on_gpu:
                torch.cuda.set_device(device)  # otherwise the thread uses GPU 0 and memory on it
            for step in itertools.count(first_step):
                free_slots.acquire()
                while not (closed.is_set() or order.mixing.has((step + 1) * order.rows_per_step)):
                    closed.wait(POLL_SECONDS)
                if closed.is_set():
                    return
                batches = []
                for rows in order.micro_batches(step):
                    batches.append(read_rows(rows))
                    tick()  # a slow disk is not a hang
                units = sum(int(count(batch)) for batch in batches)
                ready.put(([batch.pin_memory() for batch in batches] if on_gpu else batches, units))
        except BaseException as error:  # of any kind: otherwise the training loop would wait forever
            ready.put(error)

    def steps() -> Iterator[tuple[list[Batch], int]]:
        while not isinstance(item := ready.get(), BaseException):
            free_slots.release()
            batches, units = item
            yield [batch.to(device) for batch in batches], units
        raise item

    thread = threading.Thread(target=read_ahead, name="read-ahead", daemon=True)
    thread.start()
    try:
        yield steps()
    finally:
        closed.set()
        free_slots.release()
        thread.join(CLOSING_SECONDS)


def validation_batches(read_rows: Rows, rows: int, micro_batch_size: int, device: torch.device,
                       rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield one rank's share of the fixed rows 0 to rows - 1, in equally many batches as on other ranks.

    Rows beyond the last one are padding without targets, so that sums are those of a single process.
    """
    batches_per_rank = -(-rows // (micro_batch_size * world_size))
    for number in range(rank * batches_per_rank, (rank + 1) * batches_per_rank):
        indices = number * micro_batch_size + np.arange(micro_batch_size)
        batch = read_rows(np.where(indices < rows, indices, 0))
        yield (batch if indices[-1] < rows else batch.ignore_from(int((indices < rows).sum()))).to(device)
