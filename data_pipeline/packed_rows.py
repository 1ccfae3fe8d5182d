"""Prepared chats and preference pairs, and the rows that they are packed into.

Rows are computed from the lengths when the data is opened: another MAX_SEQ_LEN needs no new preparation.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from common.errors import DataError
from data_pipeline.batch import Batch
from data_pipeline.packing import Packing, pack
from data_pipeline.row_order import permutation
from data_pipeline.shard_reader import TokenizerFacts, TokenSet, Verification, open_segments, open_token_set
from fused.chunked_head import IGNORE_INDEX

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
    Raises:
        DataError: the data is missing, damaged, of another kind or made with another tokenizer.
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

    Raises:
        DataError: the segments do not form examples of this kind.
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
    Raises:
        DataError: no example is left.
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
