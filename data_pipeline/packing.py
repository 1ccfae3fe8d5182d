"""Packing examples into rows by their lengths: best fit decreasing, at a cost per distinct length."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np


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
