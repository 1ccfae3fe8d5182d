"""Results of evaluations per item, and paired tests of two evaluations of the same items. Without torch."""

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from checkpoint.schema import REWARD, VALIDATION, ratio_error, read_entries

BITS = ("correct", "correct_norm", "exact", "preferred")  # booleans in the order of the items
NUMBERS = ("loss", "count", "rouge_l", "reward")
LARGEST = 1e30  # larger numbers have infinite sums of squares
SIGNIFICANT = 0.05
FEWEST = 10  # items for a verdict
NOT_TRIVIAL = 0.01  # rise of a loss, as a share of its best, from which it counts


class ItemScores(NamedTuple):
    """One evaluation after one step."""

    step: int
    name: str
    items: str  # hash of the items; only scores of the same items can be compared in pairs
    scores: dict[str, np.ndarray]  # by metric, a value per item: bool for BITS, float64 for NUMBERS
    kind: str  # plural noun for the items

    @property
    def not_finite(self) -> int:
        """The number of items with a score that is NaN or infinite, which no test can compare."""
        return int(np.any([~np.isfinite(values) for values in self.scores.values()], axis=0).sum())


def unpacked_bits(text: str, count: int) -> np.ndarray:
    """Invert `schema.packed_bits`. Raises ValueError if the text does not contain `count` values."""
    data = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(data) != -(-count // 8):
        raise ValueError(f"{len(data)} bytes for {count} items")
    return np.unpackbits(data, count=count).astype(bool)


def read_item_scores(path: Path) -> Iterator[ItemScores]:
    """Return the valid evaluations in a run's log."""
    return filter(None, map(item_scores, read_entries(path)))


def item_scores(entry: dict[str, Any]) -> Optional[ItemScores]:
    """Return the scores of a line, with NaN for null; None if they do not fit the items."""
    try:
        n = entry["n"]
        scores = {name: unpacked_bits(entry[name], n) for name in BITS if name in entry}
        scores |= {name: np.array(entry[name], np.float64) for name in NUMBERS if name in entry}
        count = scores.get("count", np.ones(n))
        fits = n > 0 and all(values.shape == (n,) and not (np.abs(values) >= LARGEST).any()
                             for values in scores.values()) and count.min() >= 0 and count.any()
        kind = str(entry.get("kind", "items"))
        return ItemScores(entry["step"], entry["name"], entry["items"], scores, kind) if fits else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; 0 for a single value, where it is unknown."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


class Paired(NamedTuple):
    """The result of a paired test of B against A."""

    n: int
    a: float
    b: float
    difference: float  # b - a
    stderr: float  # of the difference
    p: float  # two-sided p-value


def mcnemar(a: np.ndarray, b: np.ndarray) -> Paired:
    """Compare two models by whether each item was answered correctly, (n,) bool: the exact McNemar test.

    Source: McNemar 1947; the standard error of paired differences from Miller 2024, arXiv:2411.00640, 4.2.
    """
    only_a, only_b, n = int((a & ~b).sum()), int((b & ~a).sum()), len(a)
    difference = (only_b - only_a) / n
    variance = ((only_a + only_b) / n - difference ** 2) / max(1, n - 1)
    return Paired(n, a.mean().item(), b.mean().item(), difference, math.sqrt(max(0.0, variance)),
                  sign_test(only_a, only_b))


def sign_test(a: int, b: int) -> float:
    """Return the exact two-sided p-value for `a` heads and `b` tails of a fair coin."""
    n, fewer = a + b, min(a, b)
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
            for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def paired_t(a: np.ndarray, b: np.ndarray, weights: Optional[np.ndarray] = None) -> Paired:
    """Compare two (weighted) means of values on the same items: the paired t-test."""
    n = len(a)
    weights = np.ones(n) if weights is None else weights
    mean_a, mean_b = (float(np.average(values, weights=weights)) for values in (a, b))
    difference, stderr = mean_b - mean_a, ratio_error(b - a, weights) or 0.0
    if stderr > 1e-12 * abs(difference):
        p = 1 - t_probability(difference / stderr, n - 1)
    else:  # the same difference on all items, or a single item
        p = 1.0 if n < 2 or difference == 0 else 0.0
    return Paired(n, mean_a, mean_b, difference, stderr, p)


def t_probability(t: float, degrees: int) -> float:
    """Return the probability that |T| < |t|. Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cosine_squared = math.cos(theta) ** 2
    is_odd = degrees % 2
    term = math.cos(theta) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine_squared * (k - 1) / k
        total += term
    return (2 / math.pi * (theta + math.sin(theta) * total)) if is_odd else math.sin(theta) * total


def difference_text(test: Paired, kind: str, percent: bool = False) -> str:
    """Return a difference with two digits of its error, and the items that were compared."""
    factor, unit = (100, " points") if percent else (1, "")
    difference, error = factor * test.difference, factor * test.stderr
    places = min(6, max(0, 1 - math.floor(math.log10(error)))) if error else 2
    return f" ({difference:+.{places}f} ± {error:.{places}f}{unit}, paired over {test.n:,} {kind})"


def trends() -> dict[str, "Trend"]:
    """Return empty trends, by curve."""
    return {"val_loss": Trend(VALIDATION, "loss"), "val_reward": Trend(REWARD, "reward", higher=True),
            "val_reward_accuracy": Trend(VALIDATION, "preferred", higher=True)}


class Trend:
    """The first, the best and the last evaluation of the same items."""

    first: Optional[ItemScores] = None
    best: Optional[ItemScores] = None
    last: Optional[ItemScores] = None

    def __init__(self, evaluation: str, metric: str, higher: bool = False):
        self.evaluation, self.metric = evaluation, metric
        self.sign = -1 if higher else 1  # of a value that should fall

    def add(self, scores: ItemScores) -> None:
        """Add an evaluation, if it is finite; other items start again."""
        if scores.name != self.evaluation or self.metric not in scores.scores or scores.not_finite:
            return
        if self.last is None or scores.items != self.last.items:
            self.first = self.best = scores
        self.last = scores
        if self.sign * self.compare(self.best, scores).difference < 0:
            self.best = scores

    @property
    def number(self) -> int:
        """The number of items of the last evaluation."""
        return len(self.last.scores[self.metric])

    def compare(self, a: Optional[ItemScores], b: Optional[ItemScores]) -> Paired:
        """Test the values of b against those of a."""
        values = [each.scores[self.metric] for each in (a, b)]
        if self.metric == "preferred":
            return mcnemar(*values)
        return paired_t(*values, b.scores.get("count"))

    def change(self) -> Optional[Paired]:
        """Return the test of the last evaluation against the first; None without two, or a single item."""
        if self.first is self.last or self.number < 2:
            return None
        return self.compare(self.first, self.last)

    def rise(self) -> Optional[Paired]:
        """Return the test against the best, if the last is significantly and by 1 % worse; else None."""
        if self.best is self.last:
            return None
        test = self.compare(self.best, self.last)
        is_clear = self.sign * test.difference > NOT_TRIVIAL * abs(test.a)
        return test if is_clear and test.p < SIGNIFICANT else None
