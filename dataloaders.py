"""A batch of rows, as the model and the objectives read it.

Packing examples into rows by their lengths: best fit decreasing, at a cost per distinct length.

Prepared chats and preference pairs, and the rows that they are packed into.

Rows are computed from the lengths when the data is opened: another MAX_SEQ_LEN needs no new preparation.


The rows of a mixture of prepared sets.

Held-out prompts with their answers, as they are stored in prepared chats and preference pairs.

The loaders of all stages: which rows each step, rank and micro-batch reads, and how they become batches.

Rows are a function of (seed, step), so no loader state is saved, and a run resumes on any number of ranks.
"""

import hashlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple, Union

import numpy as np
import torch

from common.errors import DataError
from config import Config
from data_pipeline.mixture import Mixture, is_mixture, read_mixture, source_facts
from data_pipeline.row_order import Mixing, Phase, RowOrder, permutation
from data_pipeline.shards import (
    Cache,
    TokenizerFacts,
    TokenSet,
    Verification,
    allow_open_files,
    open_segments,
    open_token_set,
    read_manifest,
)
from fused.head import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Rows for one forward. Targets are already shifted: the target of a token is the token after it."""

    tokens_BT: torch.Tensor  # int64
    targets_BT: torch.Tensor  # int64, IGNORE_INDEX where nothing is predicted
    document_ids_BT: torch.Tensor | None = None  # int32, from 1 in each row; None = no document mask
    target_index_M: torch.Tensor | None = None  # int64, where the flattened targets are; None = everywhere
    stored: dict[str, torch.Tensor] = field(default_factory=dict)  # precomputed; the first axis is the row
    padding: int = 0  # tokens that belong to no document

    @property
    def targets(self) -> int:
        """The positions that the head predicts; known without a GPU sync."""
        return self.targets_BT.numel() if self.target_index_M is None else len(self.target_index_M)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, without waiting for the copy of pinned memory.

        `document_ids_BT` stays on the CPU: the model derives its attention mask there, without a GPU sync.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, document_ids_BT=self.document_ids_BT)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, which a GPU can copy asynchronously."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        tensors = (self.tokens_BT, self.targets_BT, self.document_ids_BT, self.target_index_M)
        return Batch(*(None if tensor is None else change(tensor) for tensor in tensors),
                     stored={name: change(tensor) for name, tensor in self.stored.items()},
                     padding=self.padding)

    def ignore_from(self, row: int) -> "Batch":
        """Return the batch without targets in the rows from `row` on, which are padding."""
        targets_BT = self.targets_BT.clone()
        targets_BT[row:] = IGNORE_INDEX
        target_index_M = self.target_index_M
        if target_index_M is not None:
            target_index_M = target_index_M[target_index_M < row * targets_BT.shape[1]]
        return replace(self, targets_BT=targets_BT, target_index_M=target_index_M)


def join(batches: Sequence[Batch], order: np.ndarray) -> Batch:
    """Return the rows of several batches as one: its row i is row order[i] of all of them.

    Stored tensors that differ in their second axis (the pairs of a row) are filled up with zeros.
    """
    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors)[torch.from_numpy(order)]

    def padded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        missing = [max(other.shape[1] for other in tensors) - tensor.shape[1] for tensor in tensors]
        return [torch.cat([tensor, tensor.new_zeros(len(tensor), count, *tensor.shape[2:])], 1)
                for tensor, count in zip(tensors, missing)]

    targets_BT = joined([batch.targets_BT for batch in batches])
    document_ids_BT, target_index_M = None, None
    if batches[0].document_ids_BT is not None:
        document_ids_BT = joined([batch.document_ids_BT for batch in batches])
    if batches[0].target_index_M is not None:
        target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    stored = {name: joined(padded([batch.stored[name] for batch in batches])) for name in batches[0].stored}
    return Batch(joined([batch.tokens_BT for batch in batches]), targets_BT, document_ids_BT, target_index_M,
                 stored, sum(batch.padding for batch in batches))


ReadRows = Callable[[np.ndarray], Batch]


@dataclass(frozen=True, eq=False)
class Packing:
    """The items of each bin: bin b holds `items[offsets[b]:offsets[b + 1]]`, the longest first."""

    items: np.ndarray  # every item's index once
    offsets: np.ndarray  # int64, one more than there are bins

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def items_in(self, bin: int) -> np.ndarray:
        """Return the indices of the items in one bin."""
        return self.items[self.offsets[bin]:self.offsets[bin + 1]]


class _Placement(NamedTuple):
    """Consecutive bins that each receive the same number of items of one length."""

    first_bin: int
    bins: int
    items_per_bin: int


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Put every item into a bin: the longest first, each into the fullest bin that it fits in.

    The result depends on the lengths only. Items of equal length are dealt out like cards, so that neighbours
    in the data, which are often similar, go to different bins.

    Args:
        lengths: integers from 1 to `capacity`, one for each item.
    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms".
    """
    lengths = np.asarray(lengths)
    assert lengths.ndim == 1 and (not lengths.size or 1 <= lengths.min() and lengths.max() <= capacity)
    placements = list(_best_fit(np.bincount(lengths, minlength=capacity + 1), capacity))
    # How many items each bin gets.
    bins = max((first + count for first, count, _ in placements), default=0)
    offsets = np.zeros(bins + 1, np.int64)
    for first, count, each in placements:
        offsets[first + 1:first + count + 1] += each
    np.cumsum(offsets, out=offsets)
    # The items by falling length. NumPy sorts 16-bit integers in a few passes, and stably.
    by_length = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    items = np.empty(len(lengths), np.int32 if len(lengths) < 1 << 31 else np.int64)
    # Fill the bins placement by placement: `free` is each bin's next slot.
    free, placed = offsets[:-1].copy(), 0
    for first, count, each in placements:
        slots = free[first:first + count]
        items[slots + np.arange(each)[:, None]] = by_length[placed:placed + count * each].reshape(each, count)
        slots += each
        placed += count * each
    return Packing(items, offsets)


def _best_fit(counts: np.ndarray, capacity: int) -> Iterator[_Placement]:
    """Yield the placements by falling length, given the number of items of each length.

    Bins with equal room left are interchangeable. The fullest bin that fits an item is still the fullest
    afterwards and takes as many as it can, so whole ranges of bins are filled at once.
    """
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]  # by room left: (first bin, bins)
    roomy: list[int] = []  # a heap of the rooms in which the current length fits and that have bins
    opened, longer = 0, capacity + 1

    def add_range(room: int, first: int, bins: int) -> None:
        if bins:
            if room >= length and not ranges[room]:
                heappush(roomy, room)
            ranges[room].append((first, bins))

    for length in np.flatnonzero(counts)[::-1].tolist():
        # Rooms that were too small for the longer items before.
        for room in range(length, longer):
            if ranges[room]:
                heappush(roomy, room)
        longer, items = length, int(counts[length])
        while items:
            if not roomy:
                bins = -(-items // (capacity // length))
                add_range(capacity, opened, bins)
                opened += bins
            room = roomy[0]
            first, bins = ranges[room].pop()
            if not ranges[room]:
                heappop(roomy)
            # Fill the bins of one range, the last of them perhaps not to the brim.
            per_bin = room // length
            full = min(bins, items // per_bin)
            rest = items - full * per_bin if full < bins else 0  # fewer than `per_bin`, all for one more bin
            for start, count, taken in ((first, full, per_bin), (first + full, int(rest > 0), rest)):
                if count:
                    yield _Placement(start, count, taken)
                    add_range(room - taken * length, start, count)
            begun = full + (rest > 0)
            add_range(room, first + begun, bins - begun)
            items -= full * per_bin + rest


# A segment is one uint32: its length, whether it ends its example, whether its tokens are targets.
LENGTH_SHIFT, LAST, TARGET = 2, 2, 1


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """One split of prepared chats or pairs: tokens, their segments, and where each example begins."""

    path: Path
    kind: str  # "chats" or "pairs"
    tokens: TokenSet
    segments: TokenSet
    starts: np.ndarray  # int64, in tokens; one more than there are examples
    segment_starts: np.ndarray  # int64, in segments; one more than there are examples
    first_targets: np.ndarray  # int32; for pairs the length of the prompt

    def __len__(self) -> int:
        return len(self.first_targets)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens and segments, the same on every rank."""
        return hashlib.sha256((self.tokens.fingerprint + self.segments.fingerprint).encode()).hexdigest()

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and the segments of one example. Raises DataError if a file has changed."""
        start, end = self.starts[example:example + 2].tolist()
        first, last = self.segment_starts[example:example + 2].tolist()
        ids, segments = self.tokens.read(start, end - start), self.segments.read(first, last - first)
        if int((segments >> LENGTH_SHIFT).sum()) != len(ids):
            raise DataError(f"{self.path}: the segments of example {example:,} were changed while they were "
                            "read; restore them, or prepare the data again")
        return ids, segments


def open_example_set(path: str | Path, split: str, kind: str, tokenizer: TokenizerFacts,
                     verification: Verification = Verification()) -> ExampleSet:
    """Open one split of prepared chats or pairs, as `open_token_set` opens documents.

    Args:
        kind: "chats" or "pairs", what the data must hold.
    """
    assert kind in ("chats", "pairs")
    tokens = open_token_set(path, split, tokenizer, kind=kind, verification=verification)
    segments = open_segments(path, split, verification)
    columns = zip(*_examples(segments, kind, f"{path}: {split}"))
    lengths, segment_counts, first_targets = map(np.concatenate, columns)
    if (total := int(lengths.sum(dtype=np.int64))) != tokens.tokens:
        raise DataError(f"{path}: the {split} segments are {total:,} tokens long in all, but there are "
                        f"{tokens.tokens:,}; prepare the data again")
    starts, segment_starts = (np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
                              for counts in (lengths, segment_counts))
    return ExampleSet(Path(path), kind, tokens, segments, starts, segment_starts, first_targets)


def _examples(segments: TokenSet, kind: str, name: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield int32 arrays over all examples in order, a block of the file at a time: the numbers of tokens, of
    segments, and of tokens before the first target.
    """
    examples, unfinished = 0, np.empty(0, np.uint32)  # the segments of an example that crosses a block's end
    for block in segments.blocks():
        block = np.concatenate([unfinished, block])
        ends = np.flatnonzero(block & LAST) + 1
        complete = int(ends[-1]) if len(ends) else 0
        block, unfinished = block[:complete], block[complete:]
        if not complete:
            continue
        lengths, is_target = (block >> LENGTH_SHIFT).astype(np.int64), (block & TARGET).astype(bool)
        counts = np.diff(ends, prepend=0)
        firsts = ends - counts
        # A pair is prompt, chosen and rejected answer; a chat has a target; both begin without one.
        targets = np.add.reduceat(is_target, firsts, dtype=np.int64)
        valid = (counts == 3) & (targets == 2) if kind == "pairs" else targets > 0
        valid &= ~is_target[firsts] & (np.minimum.reduceat(lengths, firsts) > 0)
        if not valid.all():
            raise DataError(f"{name} example {examples + int(valid.argmin()):,} is not cut into segments as "
                            f"{kind} are; prepare the data again")
        examples += len(valid)
        # Token positions, from the block's begin on and then from the example's.
        borders = np.cumsum(lengths)
        tokens = np.diff(borders[ends - 1], prepend=0)
        first_target = np.minimum.reduceat(np.where(is_target, borders - lengths, borders[-1]), firsts)
        first_target -= borders[ends - 1] - tokens
        yield tokens.astype(np.int32), counts.astype(np.int32), first_target.astype(np.int32)
    if len(unfinished):
        raise DataError(f"{name} example {examples:,} has no end; prepare the data again")


class ExampleRows:
    """The rows of an example set; calling it with row indices returns a `Batch`, as of `TokenRows`.

    An example of n tokens takes n - 1 slots and is one document. A pair is two documents: the prompt with the
    chosen answer, numbered 2j - 1, and the prompt with the rejected one, numbered 2j. The rest of a row is
    padding: ids 0 without targets, under the next number. A seeded permutation orders the rows, so that the
    first rows, which validation reads, are a fair sample.

    Args:
        row_tokens: a longer chat is truncated, and left out if no target remains; a longer pair is left out.
        document_mask: without it, chats have no document ids and attend to the chats before them in the row;
            pairs are always separate.
    """

    def __init__(self, example_set: ExampleSet, row_tokens: int, document_mask: bool = True):
        self.example_set, self.row_tokens = example_set, row_tokens
        self.numbered = document_mask or example_set.kind == "pairs"
        # The slots of each example, and which of them fit.
        lengths, first_targets = np.diff(example_set.starts), example_set.first_targets
        if example_set.kind == "pairs":
            slots = lengths + first_targets - 2
            usable, shortest = slots <= row_tokens, slots.min()
        else:
            slots = np.minimum(lengths - 1, row_tokens)
            usable, shortest = first_targets <= row_tokens, first_targets.min()
        kept = np.flatnonzero(usable)
        if not len(kept):
            raise DataError(f"{example_set.path}: none of the {len(lengths):,} {example_set.kind} keeps a "
                            f"target in a row of MAX_SEQ_LEN={row_tokens} tokens; set it to {shortest:,} or "
                            "more")
        packing = pack(slots[kept], row_tokens)
        self._packing = Packing(kept.astype(packing.items.dtype)[packing.items], packing.offsets)
        self._bins = permutation(len(packing), 0, 0)(np.arange(len(packing)))
        self.examples, self.left_out = len(kept), len(lengths) - len(kept)
        self.tokens = int(slots[kept].sum())
        self.truncated = int((lengths[kept] - 1 > row_tokens).sum()) if example_set.kind == "chats" else 0

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def token_set(self) -> TokenSet:
        """The tokens of all examples."""
        return self.example_set.tokens

    @property
    def fill(self) -> float:
        """The share of slots that are not padding."""
        return self.tokens / (len(self) * self.row_tokens)

    @property
    def fingerprint(self) -> str:
        """A hash of the data, the same on every rank."""
        return self.example_set.fingerprint

    def describe(self) -> str:
        """Return a description of the rows for the user."""
        what = f"{self.examples:,} {self.example_set.kind} in {len(self):,} rows, {self.fill:.1%} full"
        truncated = f", {self.truncated:,} truncated to a row" if self.truncated else ""
        left_out = f", {self.left_out:,} too long and left out" if self.left_out else ""
        return what + truncated + left_out

    def examples_in(self, row: int) -> np.ndarray:
        """Return the indices of the examples in a row, in the order of their documents."""
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
        target_index_M = np.flatnonzero(targets_BT != IGNORE_INDEX)
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT),
                     torch.from_numpy(document_ids_BT) if self.numbered else None,
                     torch.from_numpy(target_index_M), padding=padding)

    def _documents(self, row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the token ids of each document of a row, and which of them are targets."""
        for example in self.examples_in(row).tolist():
            ids, segments = self.example_set.read(example)
            lengths = segments >> LENGTH_SHIFT
            is_target = np.repeat((segments & TARGET).astype(bool), lengths)
            if self.example_set.kind == "chats":
                yield ids[:self.row_tokens + 1], is_target[:self.row_tokens + 1]
                continue
            prompt, chosen = lengths[:2].tolist()
            yield ids[:prompt + chosen], is_target[:prompt + chosen]
            chosen_part = slice(prompt, prompt + chosen)
            yield np.delete(ids, chosen_part), np.delete(is_target, chosen_part)


@dataclass(frozen=True)
class MixedRows:
    """The rows of a mixture: those of its sources, numbered one source after the other.

    Called with indices, it gives a batch.

    Args:
        parts: the rows of each source; None: it is not read.
        chosen: the only rows to read, in this order; None: all of them.
    """

    folder: Path
    mixture: Mixture
    parts: tuple[Any, ...]  # TokenRows or ExampleRows, also with stored outputs
    mixing: Mixing
    fingerprint: str
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return sum(self.mixing.sizes) if self.chosen is None else len(self.chosen)

    def describe(self) -> str:
        """Return a description of the rows for the user."""
        if self.chosen is None:
            tokens = sum(part.token_set.tokens for part in self.parts)
            return f"{tokens:,} tokens in a mixture of {len(self.parts)} sources"
        last = self.mixture.weights[-1]
        missing = [source.label for source, part, weight in zip(self.mixture.sources, self.parts, last)
                   if weight and part is None]
        return f"{len(self):,} rows" + (f" (none of {', '.join(missing)})" if missing else "")

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row, and its index within that source's rows."""
        indices = indices if self.chosen is None else self.chosen[indices]
        ends = np.cumsum(self.mixing.sizes)
        sources = np.searchsorted(ends, indices, side="right")
        return sources, indices - (ends - self.mixing.sizes)[sources]

    def facts(self, rows: int) -> list[dict[str, Any]]:
        """Return `source_facts` with the exact shares of a run of so many rows, and its passes over each."""
        taken = self.mixing.taken(np.array([rows]))[:, 0].tolist()
        return [fact | {"share": own / max(1, rows), "passes": own / size} for fact, own, size in
                zip(source_facts(self.folder, self.mixture), taken, self.mixing.sizes)]

    def __call__(self, indices: np.ndarray) -> Batch:
        sources, within = self.locate(indices)
        places = [np.flatnonzero(sources == source) for source in np.unique(sources)]
        batches = [self.parts[sources[own[0]]](within[own]) for own in places]
        return batches[0] if len(batches) == 1 else join(batches, np.argsort(np.concatenate(places)))


def parts_of(rows) -> tuple:
    """Return the rows of each source of a mixture; of other data the rows themselves."""
    return rows.parts if isinstance(rows, MixedRows) else (rows,)


def map_parts(rows, change: Callable[[Any, int], Any]):
    """Return the rows with those of each source changed, given them and the source's number."""
    if isinstance(rows, MixedRows):
        parts = (part and change(part, number) for number, part in enumerate(rows.parts))
        return replace(rows, parts=tuple(parts))
    return change(rows, 0)


class HeldOut(NamedTuple):
    """A prompt and its answer, in tokens: the last answer of a chat, or the chosen one of a pair."""

    prompt: list[int]  # with the answer's header
    answer: list[int]  # without the end of turn


def read_held_out(rows: ExampleRows | MixedRows, count: int) -> list[HeldOut]:
    """Return so many examples at most, from the first row on; without chats that are longer than a row."""
    found: list[HeldOut] = []
    for row in range(len(rows)):
        part, within = rows, row
        if isinstance(rows, MixedRows):
            source, within = (int(place[0]) for place in rows.locate(np.array([row])))
            part = rows.parts[source]
        for example in part.examples_in(within).tolist():
            ids, segments = part.example_set.read(example)
            ends, targets = np.cumsum(segments >> LENGTH_SHIFT), np.flatnonzero(segments & TARGET)
            answer = targets[0 if part.example_set.kind == "pairs" else -1]
            start, end = ends[answer - 1:answer + 1].tolist()
            if end <= part.row_tokens + 1:
                found.append(HeldOut(ids[:start].tolist(), ids[start:end - 1].tolist()))
            if len(found) == count:
                return found
    if not found:
        raise DataError("no held-out chat fits into a row; raise MAX_SEQ_LEN, or set GENERATION_EVAL_EVERY=0")
    return found


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
