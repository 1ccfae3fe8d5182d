"""Results of evaluations per item, and their trend during a run. Without torch."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from checkpoint.schema import REWARD, VALIDATION, read_entries
from extensions.decide import ERROR, FEWEST, Paired, compare_items

BITS = ("correct", "correct_norm", "exact", "preferred")  # booleans in the order of the items
NUMBERS = ("loss", "count", "rouge_l", "reward", "own")  # `own` are the scores by METRIC
LARGEST = 1e30  # larger numbers have infinite sums of squares
NOT_TRIVIAL = 0.01  # rise of a loss, as a share of its best, from which it counts


class ItemScores(NamedTuple):
    """One evaluation after one step."""

    step: int
    name: str
    items: str  # hash of the items; only scores of the same items can be compared in pairs
    scores: dict[str, np.ndarray]  # by metric, a value per item: bool for BITS, float64 for NUMBERS
    kind: str  # plural noun for the items

    @property
    def number(self) -> int:
        return len(next(iter(self.scores.values())))

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


def trends() -> dict[str, "Trend"]:
    """Return empty trends, by curve."""
    return {"val_loss": Trend(VALIDATION, "loss"), "val_reward": Trend(REWARD, "reward", higher=True),
            "val_reward_accuracy": Trend(VALIDATION, "preferred", higher=True)}


class Trend:
    """The first, the best and the last evaluation of the same items."""

    def __init__(self, evaluation: str, metric: str, higher: bool = False):
        self.first: Optional[ItemScores] = None
        self.best = self.last = self.first
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

    def compare(self, a: Optional[ItemScores], b: Optional[ItemScores]) -> Paired:
        """Test the values of b against those of a."""
        return compare_items(*(each.scores[self.metric] for each in (a, b)), b.scores.get("count"))

    def against(self, earlier: Optional[ItemScores]) -> Optional[Paired]:
        """Return the test of the last evaluation; None against itself, or for too few items."""
        few = earlier is self.last or self.last.number < FEWEST
        return None if few else self.compare(earlier, self.last)

    def rise(self) -> Optional[Paired]:
        """Return the test against the best, if the last is significantly and by 1 % worse; else None."""
        test = self.against(self.best)
        is_clear = test and self.sign * test.difference > NOT_TRIVIAL * abs(test.a) and test.p < ERROR
        return test if is_clear else None
