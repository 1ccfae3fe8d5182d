"""evaluations.jsonl: how results per item are written, and their standard errors. Without torch."""

import base64
import math
from collections.abc import Sequence
from typing import Optional

import numpy as np

# Other names are multiple-choice sets.
VALIDATION, GENERATION, REWARD = "validation", "generation", "val_reward"


def packed_bits(values: Sequence[bool] | np.ndarray) -> str:
    """Return booleans as base64 text, eight per byte, most significant bit first."""
    return base64.b64encode(np.packbits(np.asarray(values, bool)).tobytes()).decode()


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
