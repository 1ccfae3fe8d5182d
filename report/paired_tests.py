"""Is B better than A? Paired tests on the same evaluation items, which need no library of statistics."""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np

from checkpoint.item_scores import ratio_error

SIGNIFICANT = 0.05


class Paired(NamedTuple):
    """The result of a paired test of B against A."""

    n: int
    a: float
    b: float
    difference: float  # b - a
    stderr: float  # of the difference
    p: float  # two-sided, that the difference is chance


def mcnemar(a: np.ndarray, b: np.ndarray) -> Paired:
    """Compare two models that were right or wrong on the same items: the exact McNemar test.

    Args:
        a, b: (n,) bool, whether each item was answered correctly.
    Source: McNemar 1947; the standard error of paired differences as in Miller 2024 (arXiv:2411.00640),
        section 4.2.
    """
    only_a, only_b, n = int((a & ~b).sum()), int((b & ~a).sum()), len(a)
    difference = (only_b - only_a) / n
    variance = ((only_a + only_b) / n - difference ** 2) / max(1, n - 1)
    return Paired(n, a.mean().item(), b.mean().item(), difference, math.sqrt(max(0.0, variance)),
                  sign_test(only_a, only_b))


def sign_test(a: int, b: int) -> float:
    """The two-sided p-value of so many heads and tails of a fair coin, exactly."""
    n, fewer = a + b, min(a, b)
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
            for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def paired_t(a: np.ndarray, b: np.ndarray, weights: Optional[np.ndarray] = None) -> Paired:
    """Compare two means of values on the same items: the paired t-test.

    Args:
        a, b: (n,) values of the items.
        weights: (n,) of the items, such as the targets of each block; the means are weighted by them.
    """
    n = len(a)
    weights = np.ones(n) if weights is None else weights
    mean_a, mean_b = (float(np.average(values, weights=weights)) for values in (a, b))
    difference, stderr = mean_b - mean_a, ratio_error(b - a, weights) or 0.0
    if stderr > 1e-12 * abs(difference):
        p = 1 - t_probability(difference / stderr, n - 1)
    else:  # the same difference on all items, as between a model and itself; of one item nothing is known
        p = 1.0 if n < 2 or difference == 0 else 0.0
    return Paired(n, mean_a, mean_b, difference, stderr, p)


def t_probability(t: float, degrees: int) -> float:
    """The probability that |T| < |t| under Student's t with a whole number of degrees of freedom.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cosine_squared = math.cos(theta) ** 2
    is_odd = degrees % 2
    term = math.cos(theta) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine_squared * (k - 1) / k
        total += term
    return (2 / math.pi * (theta + math.sin(theta) * total)) if is_odd else math.sin(theta) * total


class Kind(NamedTuple):
    """How the scores of a metric are compared, and told."""

    label: str  # after the name of the evaluation
    test: Callable[..., Paired]
    items: str  # what is scored, in the plural
    percent: bool = True  # the values are shares, told in points
    lower: bool = False  # lower values are better


def describe(test: Paired, names: tuple[str, str], kind: Kind) -> tuple[Optional[str], str]:
    """Which of the two is better ("a", "b" or None), and the sentence that says so."""
    def number(value: float) -> str:
        return f"{100 * value:.1f}" if kind.percent else f"{value:.4f}"

    unit = " points" if kind.percent else ""
    p = f"p = {test.p:.2g}" if test.p >= 1e-4 else "p < 0.0001"
    facts = f"({p}, {test.n:,} {kind.items})"
    size = f"{number(abs(test.difference))} +- {number(test.stderr)}{unit}"
    if test.p >= SIGNIFICANT:
        return None, f"{names[0]} and {names[1]} are not shown to differ: {size} {facts}"
    b_is_better = (test.difference < 0) == kind.lower
    better, other = names if not b_is_better else names[::-1]
    return "b" if b_is_better else "a", f"{better} is better than {other} by {size} {facts}"
