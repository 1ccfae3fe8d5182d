"""Prepared chats and preference pairs, and the rows that they are packed into.

The rows are made from the lengths whenever the data is opened, so that another MAX_SEQ_LEN needs no new preparation.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.cache import Cache
from common.errors import DataError
from data_pipeline.batch import Batch
from data_pipeline.packing import Packing, pack
from data_pipeline.row_order import permutation
from data_pipeline.shard_reader import TokenSet, open_segments, open_token_set
from fused.chunked_head import IGNORE_INDEX

# A segment is one uint32: its length, whether it ends its example, whether its tokens are learned from.
LENGTH_SHIFT, LAST, TARGET = 2, 2, 1


class _Lengths(NamedTuple):
    """What a block of segments says of the whole examples in it, an array entry for each."""

    segments: np.ndarray
    tokens: np.ndarray
    first_target: np.ndarray  # tokens before the first that is learned from


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """One split of prepared chats or pairs: tokens, the segments that they are cut into, and where each example begins."""

    path: Path
    kind: str  # "chats" or "pairs"
    tokens: TokenSet
    segments: TokenSet
    starts: np.ndarray  # int64, in tokens; one more than there are examples
    segment_starts: np.ndarray  # int64, likewise in segments
    first_targets: np.ndarray  # int32; for pairs the length of the prompt

    def __len__(self) -> int:
        return len(self.first_targets)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of both streams, the same on every rank."""
        return hashlib.sha256((self.tokens.fingerprint + self.segments.fingerprint).encode()).hexdigest()

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """One example's token ids and its segments. Raises DataError where a file was changed since it was opened."""
        start, end = self.starts[example:example + 2].tolist()
        first, last = self.segment_starts[example:example + 2].tolist()
        ids, segments = self.tokens.read(start, end - start), self.segments.read(first, last - first)
        if int((segments >> LENGTH_SHIFT).sum()) != len(ids):
            raise DataError(f"{self.path}: the segments of example {example:,} were changed while they were read; prepare the "
                            "data again, or bring back what they were")
        return ids, segments


def open_example_set(path: str | Path, split: str, kind: str, *, vocab_size: int, tokenizer_sha256: str | None = None,
                     verify: str = "auto", cache: Cache = Cache()) -> ExampleSet:
    """Open one split of prepared chats or pairs, and refuse what cannot be trained on.

    Args:
        kind: "chats" or "pairs", what the data must hold.
        verify, cache: as for `open_token_set`; the segments are held against the tokens in any case.
    Raises:
        DataError: the data is missing, damaged, of another kind or made with another tokenizer.
    """
    assert kind in ("chats", "pairs")
    tokens = open_token_set(path, split, kind=kind, vocab_size=vocab_size, tokenizer_sha256=tokenizer_sha256, verify=verify,
                            cache=cache)
    segments = open_segments(path, split, verify=verify, cache=cache)
    parts = list(_read_lengths(segments, kind, f"{path}: {split}"))
    total = sum(int(part.tokens.sum()) for part in parts)
    if total != tokens.tokens:
        raise DataError(f"{path}: the {split} segments are {total:,} tokens long in all, but there are {tokens.tokens:,} "
                        "tokens; prepare the data again")
    return ExampleSet(Path(path), kind, tokens, segments, _starts([part.tokens for part in parts]),
                      _starts([part.segments for part in parts]),
                      np.concatenate([part.first_target for part in parts], dtype=np.int32))


def _starts(lengths: list[np.ndarray]) -> np.ndarray:
    starts = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    return starts


def _read_lengths(segments: TokenSet, kind: str, name: str) -> Iterator[_Lengths]:
    """Yield the lengths of all examples in their order, a block of the file at a time.

    Raises:
        DataError: the segments are not cut into examples of this kind.
    """
    begun = np.empty(0, np.uint32)  # of the example that the block's end cuts
    examples = 0
    for block in segments.blocks():
        block = np.concatenate([begun, block])
        ends = np.flatnonzero(block & LAST) + 1
        complete = int(ends[-1]) if len(ends) else 0
        block, begun = block[:complete], block[complete:]
        if not complete:
            continue
        lengths, is_target = (block >> LENGTH_SHIFT).astype(np.int64), (block & TARGET).astype(bool)
        counts = np.diff(ends, prepend=0)
        firsts = ends - counts
        targets = np.add.reduceat(is_target, firsts, dtype=np.int64)
        right = (counts == 3) & (targets == 2) if kind == "pairs" else targets > 0
        right &= ~is_target[firsts] & (np.minimum.reduceat(lengths, firsts) > 0)
        if not right.all():
            raise DataError(f"{name} example {examples + int(right.argmin()):,} is not cut into segments as {kind} are; prepare "
                            "the data again")
        examples += len(right)
        borders = np.cumsum(lengths)
        tokens = np.diff(borders[ends - 1], prepend=0)
        first_target = np.minimum.reduceat(np.where(is_target, borders - lengths, borders[-1]), firsts)
        first_target -= borders[ends - 1] - tokens
        yield _Lengths(counts.astype(np.int32), tokens.astype(np.int32), first_target.astype(np.int32))
    if len(begun):
        raise DataError(f"{name} example {examples:,} has no end; prepare the data again")


class _Sequence(NamedTuple):
    """Tokens that see each other, and which of them are learned from."""

    ids: np.ndarray
    learned: np.ndarray


class ExampleRows:
    """The rows of an example set, called with the indices that are wanted, as `TokenRows` is.

    An example of n tokens takes n - 1 slots and is a document of its own. A pair takes two documents: the prompt with what was
    chosen, numbered 2j - 1, and the prompt with what was rejected, numbered 2j. What is left of a row is padding: ids 0 without
    targets, under the next number. Row i holds whatever a seeded permutation puts there, so that the first rows, which validation
    reads, are a fair sample.

    Args:
        row_tokens: a longer chat is cut there, and left out where no target remains; a pair that does not fit is left out.
        document_mask: without it chats carry no numbers and see what stands before them; pairs are always apart.
    Raises:
        DataError: no example is left.
    """

    def __init__(self, example_set: ExampleSet, row_tokens: int, document_mask: bool = True):
        self.example_set, self.row_tokens = example_set, row_tokens
        self.numbered = document_mask or example_set.kind == "pairs"
        lengths, first_targets = np.diff(example_set.starts), example_set.first_targets
        if example_set.kind == "pairs":
            slots = lengths + first_targets - 2
            usable, shortest = slots <= row_tokens, slots.min()
        else:
            slots = np.minimum(lengths - 1, row_tokens)
            usable, shortest = first_targets <= row_tokens, first_targets.min()
        kept = np.flatnonzero(usable)
        if not len(kept):
            raise DataError(f"{example_set.path}: none of the {len(lengths):,} {example_set.kind} keeps a target in a row of "
                            f"MAX_SEQ_LEN={row_tokens} tokens; set it to {shortest:,} or more")
        packing = pack(slots[kept], row_tokens)
        self._packing = Packing(kept.astype(packing.items.dtype)[packing.items], packing.offsets)
        self._bins = permutation(len(packing), 0, 0)(np.arange(len(packing)))
        self.examples, self.left_out = len(kept), len(lengths) - len(kept)
        self.tokens = int(slots[kept].sum())
        self.cut = int((lengths[kept] - 1 > row_tokens).sum()) if example_set.kind == "chats" else 0

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def token_set(self) -> TokenSet:
        """All tokens of the examples."""
        return self.example_set.tokens

    @property
    def fill(self) -> float:
        """The share of slots that hold no padding."""
        return self.tokens / (len(self) * self.row_tokens)

    @property
    def fingerprint(self) -> str:
        """A hash of the data, the same on every rank."""
        return self.example_set.fingerprint

    def describe(self) -> str:
        """What there is, in words."""
        what = f"{self.examples:,} {self.example_set.kind} in {len(self):,} rows, {self.fill:.1%} full"
        cut = f", {self.cut:,} cut at the end of their row" if self.cut else ""
        left_out = f", {self.left_out:,} too long and left out" if self.left_out else ""
        return what + cut + left_out

    @property
    def folder(self) -> Path:
        """Where the data lies."""
        return self.example_set.tokens.shards[0].path.parent

    def examples_in(self, row: int) -> np.ndarray:
        """The numbers of the examples in a row, in the order of their documents."""
        return self._packing.items_in(self._bins[row])

    def __call__(self, indices: np.ndarray) -> Batch:
        shape = len(indices), self.row_tokens
        tokens_BT, targets_BT = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        document_ids_BT = np.empty(shape, np.int32)
        for row, index in enumerate(indices.tolist()):
            end = 0
            for document, (ids, learned) in enumerate(self._sequences(index), 1):
                start, end = end, end + len(ids) - 1
                tokens_BT[row, start:end] = ids[:-1]
                np.copyto(targets_BT[row, start:end], ids[1:], where=learned[1:])
                document_ids_BT[row, start:end] = document
            document_ids_BT[row, end:] = document + 1
        target_index_M = np.flatnonzero(targets_BT != IGNORE_INDEX)
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT),
                     torch.from_numpy(document_ids_BT) if self.numbered else None, torch.from_numpy(target_index_M))

    def _sequences(self, row: int) -> Iterator[_Sequence]:
        """Yield what stands in a row, one document after the other."""
        for example in self.examples_in(row).tolist():
            ids, segments = self.example_set.read(example)
            lengths = segments >> LENGTH_SHIFT
            learned = np.repeat((segments & TARGET).astype(bool), lengths)
            if self.example_set.kind == "chats":
                yield _Sequence(ids[:self.row_tokens + 1], learned[:self.row_tokens + 1])
                continue
            prompt, chosen = lengths[:2].tolist()
            yield _Sequence(ids[:prompt + chosen], learned[:prompt + chosen])
            chosen_part = slice(prompt, prompt + chosen)
            yield _Sequence(np.delete(ids, chosen_part), np.delete(learned, chosen_part))
