"""Packing examples into rows: best fit decreasing by their lengths alone, at a cost that goes with the distinct lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Packing:
    """Which items each bin holds: bin b holds `items[offsets[b]:offsets[b + 1]]`, the longest first."""

    items: np.ndarray  # every item's number once
    offsets: np.ndarray  # int64, one more than there are bins

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def items_in(self, bin: int) -> np.ndarray:
        """The numbers of the items in one bin."""
        return self.items[self.offsets[bin]:self.offsets[bin + 1]]


class _Placement(NamedTuple):
    """Bins that follow each other in number and get equally many items of one length."""

    first_bin: int
    bins: int
    each: int


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Put every item into a bin, the longest first and each into the fullest bin that it fits in.

    The bins' contents follow from the lengths and nothing else. Items of one length are dealt out like cards, so neighbours
    in the data, which are often alike, come into different bins where there are several to fill.

    Args:
        lengths: integers from 1 to `capacity`, one for each item.
    Source: best fit decreasing; Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms".
    """
    lengths = np.asarray(lengths)
    assert lengths.ndim == 1 and (not lengths.size or 1 <= lengths.min() and lengths.max() <= capacity)
    placements = list(_best_fit(np.bincount(lengths, minlength=capacity + 1), capacity))
    bins = max((first + count for first, count, _ in placements), default=0)
    offsets = np.zeros(bins + 1, np.int64)
    for first, count, each in placements:
        offsets[first + 1:first + count + 1] += each
    np.cumsum(offsets, out=offsets)
    # Sorting 16-bit numbers takes numpy a few passes over them, and keeps equal ones in their order.
    by_length = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    items = np.empty(len(lengths), np.int32 if len(lengths) < 1 << 31 else np.int64)
    free, placed = offsets[:-1].copy(), 0
    for first, count, each in placements:
        slots = free[first:first + count]
        items[slots + np.arange(each)[:, None]] = by_length[placed:placed + count * each].reshape(each, count)
        slots += each
        placed += count * each
    return Packing(items, offsets)


def _best_fit(counts: np.ndarray, capacity: int) -> Iterator[_Placement]:
    """Yield where the items go, given how many there are of each length, in the order of falling lengths.

    Bins with equal room left are interchangeable. The tightest of them that takes an item is still the tightest afterwards
    and takes as many as it can, so whole ranges of bins are filled in one move.
    """
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]  # by the room left: (first bin, bins)
    roomy: list[int] = []  # a heap of the rooms with bins in which the present length fits
    opened, longer = 0, capacity + 1

    def leave(room: int, first: int, bins: int) -> None:
        if bins:
            if room >= length and not ranges[room]:
                heappush(roomy, room)
            ranges[room].append((first, bins))

    for length in np.flatnonzero(counts)[::-1].tolist():
        for room in range(length, longer):
            if ranges[room]:
                heappush(roomy, room)
        longer, items = length, int(counts[length])
        while items:
            if not roomy:
                bins = -(-items // (capacity // length))
                leave(capacity, opened, bins)
                opened += bins
            room = roomy[0]
            first, bins = ranges[room].pop()
            if not ranges[room]:
                heappop(roomy)
            each = room // length
            full = min(bins, items // each)
            rest = items - full * each if full < bins else 0  # of these, less than `each`, one more bin takes all
            for start, count, taken in ((first, full, each), (first + full, int(rest > 0), rest)):
                if count:
                    yield _Placement(start, count, taken)
                    leave(room - taken * length, start, count)
            begun = full + (rest > 0)
            leave(room, first + begun, bins - begun)
            items -= full * each + rest
