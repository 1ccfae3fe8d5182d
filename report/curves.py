"""Curves of any length in bounded memory: a long one keeps mean, minimum and maximum of buckets of steps."""

from collections.abc import Iterable
from typing import NamedTuple, Optional

import numpy as np

MOST_POINTS = 4096  # that a curve keeps; a page shows fewer
FEWEST_POINTS = 50  # that a page shows of a long one
RECENT_LINES = 21  # whose median is the recent value


class Points(NamedTuple):
    """The points of a curve; each one stands for one or more logged values."""

    x: np.ndarray  # (n,) float64, ascending: the mean step
    y: np.ndarray  # (n,) float64, the mean value; NaN for a gap
    low: np.ndarray  # (n,) float64, the lowest value
    high: np.ndarray  # (n,) float64, the highest value
    count: np.ndarray  # (n,) float64, the number of values; 0 for a gap


class Curve:
    """The points of a metric, given in order. Beyond twice MOST_POINTS they are merged into buckets of steps.

    Buckets hold 1, 2, 4, ... steps, so that a wider one holds whole buckets of a narrower one, and mean and
    range are exact however often they are merged. The first and the last point are never in a bucket.
    """

    def __init__(self):
        self.kept, self.width = Points(*np.empty((5, 0))), 1
        self.recent = np.empty(0)  # the newest values, at most RECENT_LINES
        self.lowest: Optional[tuple[float, int]] = None  # the lowest value, and its step
        self.newest: Optional[tuple[float, int]] = None  # the newest value, and its step

    def add(self, x: Iterable[int], y: np.ndarray) -> None:
        """Add points that lie behind the last one, in their order; a value that is not finite is a gap."""
        x, y = np.array(x, np.float64), np.where(np.isfinite(y), y, np.nan)
        is_known = ~np.isnan(y)
        if is_known.any():
            place = np.nanargmin(y)
            self.lowest = min(filter(None, (self.lowest, (y[place].item(), int(x[place])))))
            self.newest = y[is_known][-1].item(), int(x[is_known][-1])
        self.recent = np.concatenate((self.recent, y[is_known]))[-RECENT_LINES:]
        added = Points(x, y, y, y, is_known.astype(np.float64))
        self.kept = Points(*map(np.concatenate, zip(self.kept, added)))
        if len(self) > 2 * MOST_POINTS:
            self.width, self.kept = merged(self.kept, MOST_POINTS, self.width)

    def __len__(self) -> int:
        return len(self.kept.x)

    def steps(self) -> np.ndarray:
        """The steps whose own value is kept, ascending."""
        return self.kept.x[self.kept.count == 1].astype(np.int64)

    def at(self, step: int) -> Optional[float]:
        """The value of a step; None if it has none, or shares a bucket with others."""
        values = self.kept.y[(self.kept.x == step) & (self.kept.count == 1)]
        return values[0].item() if len(values) else None

    def points(self, most: int) -> Points:
        """At most so many points; the first and the last are single values."""
        kept = bucketed(self.kept, self.width) if self.width > 1 else self.kept
        return merged(kept, most, self.width)[1]


def merged(points: Points, most: int, width: int = 1) -> tuple[int, Points]:
    """Merge points in ever wider buckets; returns the width, and at most `most` points or very few buckets.

    Args:
        width: of the buckets that the points come from, a power of two.
    """
    while len(points.x) > most:
        points = bucketed(points, width)
        if len(points.x) <= most or width > np.ptp(points.x):
            break
        width *= 2
    return width, points


def bucketed(points: Points, width: int) -> Points:
    """Merge the points of each bucket of so many steps, but not the first and the last point of all."""
    if len(points.x) <= 2:
        return points
    bucket = points.x // width
    is_start = np.diff(bucket, prepend=bucket[0] - 1) != 0
    is_start[[1, -1]] = True
    starts = np.flatnonzero(is_start)
    sizes = np.diff(starts, append=len(bucket))
    count = np.add.reduceat(points.count, starts)
    # The weight of each point in its bucket; equal weights in a bucket of gaps alone.
    weight = np.where(np.repeat(count, sizes) > 0, points.count, 1)
    share = weight / np.repeat(np.where(count > 0, count, sizes), sizes)
    y = np.add.reduceat(np.nan_to_num(points.y) * share, starts)
    return Points(np.add.reduceat(points.x * share, starts), np.where(count > 0, y, np.nan),
                  np.fmin.reduceat(points.low, starts), np.fmax.reduceat(points.high, starts), count)


def rounded(value: Optional[float], digits: int = 6) -> Optional[float]:
    """The value with so many digits, as an int where it is one; None if it is not finite."""
    if value is None or not np.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def as_json(points: Points) -> dict[str, list]:
    """A curve's points as JSON: steps, and values with six digits, null for a gap.

    `low` and `high`, with four digits, are there if some points stand for several values.
    """
    curve = {"x": np.rint(points.x).astype(int).tolist(),
             "y": [rounded(value) for value in points.y.tolist()]}
    if (points.count > 1).any():
        curve |= {"low": [rounded(value, 4) for value in points.low.tolist()],
                  "high": [rounded(value, 4) for value in points.high.tolist()]}
    return curve


def points_per_curve(lengths: list[int], budget: int) -> int:
    """How many points a curve may have so that all together have at most `budget`, short ones being whole."""
    waiting = sorted(lengths)
    while waiting and waiting[0] <= budget // len(waiting):
        budget -= waiting.pop(0)
    return max(FEWEST_POINTS, budget // len(waiting)) if waiting else MOST_POINTS * 2
