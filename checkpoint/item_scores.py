"""evaluations.jsonl: evaluation results per item, for paired comparisons of runs."""

import base64
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from checkpoint.schema import read_entries

BITS = ("correct", "correct_norm", "exact", "preferred")  # booleans in the order of the items
NUMBERS = ("loss", "count", "rouge_l", "reward")
LARGEST = 1e30  # larger numbers have infinite sums of squares
# Other names are multiple-choice sets.
VALIDATION, GENERATION, REWARD = "validation", "generation", "val_reward"


class ItemScores(NamedTuple):
    """One evaluation after one step."""

    step: int
    name: str
    items: str  # hash of the items; only scores of the same items can be compared in pairs
    scores: dict[str, np.ndarray]  # by metric, a value per item: bool for BITS, float64 for NUMBERS
    kind: str  # plural noun for the items


def packed_bits(values: Sequence[bool] | np.ndarray) -> str:
    """Return booleans as base64 text, eight per byte, most significant bit first."""
    return base64.b64encode(np.packbits(np.asarray(values, bool)).tobytes()).decode()


def unpacked_bits(text: str, count: int) -> np.ndarray:
    """Invert `packed_bits`. Raises ValueError if the text does not contain `count` values."""
    data = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(data) != -(-count // 8):
        raise ValueError(f"{len(data)} bytes for {count} items")
    return np.unpackbits(data, count=count).astype(bool)


def read_item_scores(path: Path) -> Iterator[ItemScores]:
    """Yield the valid evaluations in a run's log."""
    for entry in read_entries(path):
        if scores := item_scores(entry):
            yield scores


def item_scores(entry: dict[str, Any]) -> Optional[ItemScores]:
    """Return the scores of a line; None if they do not fit the items, or are not finite."""
    try:
        n = entry["n"]
        scores = {name: unpacked_bits(entry[name], n) for name in BITS if name in entry}
        scores |= {name: np.array(entry[name], np.float64) for name in NUMBERS if name in entry}
        count = scores.get("count", np.ones(n))
        fits = n > 0 and all(values.shape == (n,) and (np.abs(values) < LARGEST).all()
                             for values in scores.values()) and count.min() >= 0 and count.any()
        kind = str(entry.get("kind", "items"))
        return ItemScores(entry["step"], entry["name"], entry["items"], scores, kind) if fits else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def measured_as(name: str) -> str:
    """Return the metric in metrics.jsonl with the result of this evaluation."""
    return {VALIDATION: "val_loss", GENERATION: "generation_n", REWARD: "val_reward"}.get(
        name, f"{name}_acc")


def error_of_share(share: float, n: int) -> float:
    """Return the standard error of a share: sample standard deviation / sqrt(n)."""
    return math.sqrt(share * (1 - share) / max(1, n - 1))


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; 0 for a single value, where it is unknown."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def ratio_error(losses: np.ndarray, counts: np.ndarray) -> Optional[float]:
    """Return the standard error of the mean loss over all units, from blocks; None for fewer than two blocks.

    Units of a block are correlated, and blocks differ in size. The mean R is the ratio of the sums of loss
    sums L and counts C over B blocks; its variance is B / (B - 1) * sum((L - R C)^2) / sum(C)^2.
    Source: Cochran 1977, Sampling Techniques, chapter 6, ratio estimate without finite correction.

    Args:
        losses: mean loss of each block.
        counts: number of units in each block.
    """
    blocks, total = len(losses), counts.sum()
    if blocks < 2 or not total:
        return None
    deviations = counts * (losses - (losses * counts).sum() / total)
    return math.sqrt(blocks / (blocks - 1) * float((deviations**2).sum())) / float(total)
