"""Curves of any length in bounded memory: decimated by the minimum and maximum of each bucket of steps."""

import math
from array import array
from collections.abc import Iterable
from typing import NamedTuple, Optional

import numpy as np

MOST_POINTS = 4096  # that a curve keeps; a page shows fewer
FEWEST_POINTS = 50  # that a page shows of a long one


class Points(NamedTuple):
    """The points of a curve."""

    x: np.ndarray  # (n,) int64, ascending
    y: np.ndarray  # (n,) float64, NaN for a gap


class Curve:
    """The points of a metric, given in order. Of more than twice MOST_POINTS, each bucket keeps its extremes.

    Buckets hold 1, 2, 4, ... steps, so that those of a wider one are whole buckets of a narrower one, and the
    extremes are exact however often they are merged.
    """

    def __init__(self):
        self.x, self.y, self.width = array("q"), array("d"), 1

    def add(self, x: Iterable[int], y: np.ndarray) -> None:
        """Add points that lie behind the last one, in their order; a value that is not finite is a gap."""
        self.x.extend(x)
        self.y.frombytes(np.where(np.isfinite(y), y, np.nan).tobytes())
        if len(self.x) > 2 * MOST_POINTS:
            self.width, points = decimated(self._points(), MOST_POINTS, self.width)
            self.x, self.y = array("q", points.x.tobytes()), array("d", points.y.tobytes())

    def __len__(self) -> int:
        return len(self.x)

    def last(self) -> Optional[float]:
        """The last value that is no gap."""
        return next((y for y in reversed(self.y) if not math.isnan(y)), None)

    def points(self, most: int) -> Points:
        """At most so many points; first, last, minimum and maximum are among them."""
        return decimated(self._points(), most, self.width)[1]

    def _points(self) -> Points:
        return Points(np.array(self.x), np.array(self.y))


def decimated(points: Points, most: int, width: int = 1) -> tuple[int, Points]:
    """Keep the minimum, the maximum and the first gap of each bucket, and the first and the last point.

    Args:
        width: of the buckets that the points come from, a power of two.
    Returns:
        The width of the buckets, and at most `most` points, or those of a single bucket.
    """
    while len(points.x) > most:
        bucket = points.x // width
        starts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
        group = np.cumsum(np.diff(bucket, prepend=bucket[0]) != 0)
        keep = np.zeros(len(bucket), bool)
        for extreme in (np.fmin, np.fmax):  # these ignore NaN
            keep[_first_in_group(points.y == extreme.reduceat(points.y, starts)[group], group)] = True
        keep[_first_in_group(np.isnan(points.y), group)] = True
        keep[[0, -1]] = True
        points = Points(points.x[keep], points.y[keep])
        if len(starts) == 1 or len(points.x) <= most:
            break
        width *= 2
    return width, points


def _first_in_group(chosen: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The index of the first chosen point of each group that has one."""
    places = np.flatnonzero(chosen)
    return places[np.diff(group[places], prepend=-1) != 0]


def rounded(value: Optional[float]) -> Optional[float]:
    """The value with six digits, as an int where it is one; None if it is not finite."""
    if value is None or not np.isfinite(value):
        return None
    value = float(f"{value:.6g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def as_json(points: Points) -> dict[str, list]:
    """A curve's points as JSON: steps, and values with six digits, null for a gap."""
    return {"x": points.x.tolist(), "y": [rounded(value) for value in points.y.tolist()]}


def points_per_curve(lengths: list[int], budget: int) -> int:
    """How many points a curve may have so that all together have at most `budget`, short ones being whole."""
    waiting = sorted(lengths)
    while waiting and waiting[0] <= budget // len(waiting):
        budget -= waiting.pop(0)
    return max(FEWEST_POINTS, budget // len(waiting)) if waiting else MOST_POINTS * 2
