"""Is A different from B? Of two recipes, the unit is a seed; of two models, an item that both were given.

Runs of two recipes with the same seed are a pair. If the recipes are equal, it is chance which result is
whose, so the sign of each difference is a fair coin, whatever its size. `evidence` bets on these signs. It
stays below 1 / error for ever with a probability of at least 1 - error (Ville's inequality), so it may be
read after every pair. As a pair at most doubles it, a decision at an error of 5 % takes at least six pairs.

`compare_items` tests the differences of two models on the same items, at a single look. It says nothing of
their recipes: with other seeds, the other model may be the better one.

Sources: Ramdas et al. 2020, arXiv:2009.03167, for bets on symmetry; Wang and Ramdas 2023, arXiv:2310.03722,
for the sequential t interval; McNemar 1947; Miller 2024, arXiv:2411.00640, 4.2, for errors of differences.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Optional

import numpy as np

from checkpoint.schema import ratio_error

ERROR = 0.05  # of decisions, unless the user names another
FEWEST = 10  # items for a verdict
BETS = (1.0, 2.0, 4.0)  # large ones win sooner if all signs agree, small ones survive a sign that does not
MOST = 2.0  # root mean squares that a difference counts at most, so that no pair ends all bets
PRIOR = 0.5  # 1 / variance of effect / deviation, which makes the t interval narrow from 6 to 30 pairs


class Verdict(NamedTuple):
    """What the pairs so far say of B against A."""

    outcome: str  # "decided", "margin" (no difference that matters) or "undecided"
    pairs: int
    difference: float  # B's mean result minus A's; infinite if runs failed
    half: float  # the interval is difference ± half; infinite if there are too few pairs, or runs failed
    favoured: int  # sign of the difference; where runs failed, the sign of most pairs


def differences_of(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """Return B's results minus A's with the same seeds: 0 if they are equal, as where both runs failed."""
    return np.array([0.0 if one == other else other - one for one, other in zip(a, b)])


def evidence(differences: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the evidence (..., n) after each pair that the differences (..., n) do not scatter around 0.

    It is the mean capital of six gamblers, who start with 1. Each stakes a share of the capital on the sign
    of the next difference: tanh(bet x size), where sizes are in units of the root mean square so far.
    """
    differences = np.asarray(differences)
    is_finite = np.isfinite(differences)
    squares = np.cumsum(np.where(is_finite, differences, 0.0) ** 2, -1)
    scale = np.sqrt(squares / np.maximum(1, np.cumsum(is_finite, -1)))
    with np.errstate(invalid="ignore"):
        sizes = np.where(differences == 0, 0.0, differences / np.where(scale > 0, scale, 1e-300))
    stakes = [np.tanh(bet * np.clip(sizes, -MOST, MOST)) for bet in BETS]
    return np.mean([np.cumprod(1 + sign * stake, -1) for stake in stakes for sign in (1, -1)], axis=0)


def t_halves(differences: np.ndarray, error: float) -> np.ndarray:
    """Return half the width (..., n) of the sequential t interval after each pair; infinite for too few.

    It is where the Bayes factor of a normal prior on effect / deviation, with the right Haar prior on the
    deviation, equals 1 / error. Source: Wang and Ramdas 2023; Gönen et al. 2005 for the form.
    """
    n = np.arange(1, differences.shape[-1] + 1)
    means = np.cumsum(differences, -1) / n
    squares = np.maximum(0.0, np.cumsum(differences ** 2, -1) - n * means ** 2)
    shrinkage = PRIOR / (n + PRIOR)
    factor = (shrinkage ** -0.5 / error) ** (2 / n)
    known = shrinkage * factor < 1  # else, no t is large enough
    per_degree = (factor - 1) / np.where(known, 1 - shrinkage * factor, 1.0)  # t^2 / (n - 1)
    return np.where(known, np.sqrt(per_degree * squares / n), np.inf)


def sign_half(differences: np.ndarray, error: float) -> float:
    """Return the largest distance from the mean at which the signs do not exclude a difference."""
    mean = differences.mean()
    spread = max(np.abs(differences - mean).max(), 1e-12 * abs(mean), 1e-150)
    distances = spread * np.geomspace(0.01, 100, 400)
    shifts = mean + np.stack([distances, -distances])[..., None]
    inside = (evidence(differences - shifts)[..., -1] < 1 / error).any(0)
    return np.inf if inside[-1] else float(distances[np.flatnonzero(inside).max(initial=-1) + 1])


def compare(differences: Sequence[float], error: float = ERROR, margin: float = 0.0) -> Verdict:
    """Return the verdict on B after these differences B - A, which may be infinite where a run failed.

    The interval contains every difference that the signs or the t interval do not exclude, so it is valid for
    normal and for symmetric differences. The recipes differ if it does not contain 0. Failed runs leave no
    mean, and then only the signs decide.
    """
    values = np.asarray(differences, float)
    is_proven = len(values) > 0 and evidence(values)[-1] >= 1 / error
    if len(values) and np.isfinite(values).all():
        mean, half = float(values.mean()), float(max(t_halves(values, error)[-1], sign_half(values, error)))
        favoured, is_decided = int(np.sign(mean)), is_proven and abs(mean) > half
    else:
        favoured, half = int(np.sign(np.sign(values).sum())), math.inf
        mean, is_decided = favoured * math.inf if favoured else 0.0, is_proven and favoured != 0
    outcome = "decided" if is_decided else "margin" if abs(mean) + half <= margin else "undecided"
    return Verdict(outcome, len(values), mean, half, favoured)


def fewest_pairs(error: float) -> int:
    """Return the number of pairs below which nothing can be decided: with equal differences."""
    return next(n for n in range(1, 100) if evidence(np.ones(n))[-1] >= 1 / error)


class Look(NamedTuple):
    """Several arms after a number of seeds."""

    seeds: int
    left: list[str]
    verdicts: dict[tuple[str, str], Verdict]  # the newest of each two arms
    is_over: bool  # one is left, or those left have no difference that matters


def look(results: Mapping[str, Sequence[float]], lower: bool, error: float, margin: float) -> Look:
    """Look at all arms' results after every seed, and drop arms that are worse, until it is over.

    Each two arms have an equal share of the error. Results are infinite where runs failed; an arm that is
    out has no results of later seeds.
    """
    left, verdicts, seeds = list(results), {}, 0
    share = error / max(1, math.comb(len(results), 2))
    is_over = len(left) < 2
    while not is_over and seeds < min(len(results[arm]) for arm in left):
        seeds, out = seeds + 1, set()
        for a, b in combinations(left, 2):
            verdict = compare(differences_of(results[a][:seeds], results[b][:seeds]), share, margin)
            verdicts[a, b] = verdict
            if verdict.outcome == "decided":
                out.add(a if (verdict.favoured < 0) == lower else b)
        left = [arm for arm in left if arm not in out]
        is_over = len(left) < 2 or all(verdicts[pair].outcome == "margin" for pair in combinations(left, 2))
    return Look(seeds, left, verdicts, is_over)


def size_text(difference: float, error: float, percent: bool) -> str:
    """Return the size of a difference with its error: 0.0123 ± 0.0045, or 1.2 ± 0.3 points."""
    factor, places, unit = (100, 1, " points") if percent else (1, 4, "")
    spread = f" ± {factor * error:.{places}f}" * (factor * error >= 0.5 * 10 ** -places)  # else, zeros
    return f"{factor * abs(difference):.{places}f}{spread}{unit}"


def sentence(a: str, b: str, verdict: Verdict, lower: bool, percent: bool = False) -> str:
    """Return which of two recipes is better, or what is known of their difference."""
    has_mean, factor = math.isfinite(verdict.half), 100 if percent else 1
    if verdict.outcome == "decided":
        better, worse = (b, a) if (verdict.favoured < 0) == lower else (a, b)
        size = size_text(verdict.difference, verdict.half, percent)
        return f"{better} is better than {worse}" + f" by {size}" * has_mean
    said = f"undecided between {a} and {b}"
    if verdict.outcome == "margin":
        said = f"{a} and {b} have no difference that matters"
    low, high = (f"{factor * (verdict.difference + end):+.{1 if percent else 4}f}"
                 for end in (-verdict.half, verdict.half))
    return said + f": {b} minus {a} is between {low} and {high}{' points' * percent}" * has_mean


class Paired(NamedTuple):
    """The result of a paired test of model B against model A."""

    n: int
    a: float
    b: float
    difference: float  # b - a
    stderr: float  # of the difference
    p: float  # two-sided p-value


def compare_items(a: np.ndarray, b: np.ndarray, counts: Optional[np.ndarray] = None) -> Paired:
    """Compare two models by their scores of the same items (n,), whose means `counts` weights.

    Items that are right or wrong (bool) are tested by McNemar's exact test, others by the paired t-test.
    """
    n = len(a)
    weights = np.ones(n) if counts is None or a.dtype == bool else counts
    mean_a, mean_b = (float(np.average(values, weights=weights)) for values in (a, b))
    difference, stderr = mean_b - mean_a, ratio_error(b.astype(float) - a, weights) or 0.0
    if a.dtype == bool:
        p = sign_test(int((a & ~b).sum()), int((b & ~a).sum()))
    elif stderr > 1e-12 * abs(difference):
        p = 1 - t_probability(difference / stderr, n - 1)
    else:  # the same difference on all items, or a single item
        p = 1.0 if n < 2 or difference == 0 else 0.0
    return Paired(n, mean_a, mean_b, difference, stderr, p)


def sign_test(a: int, b: int) -> float:
    """Return the exact two-sided p-value for `a` heads and `b` tails of a fair coin."""
    n, fewer = a + b, min(a, b)
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
            for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family of tests with Holm's correction (1979)."""
    order = np.argsort(p_values)
    rising = np.maximum.accumulate(np.take(p_values, order) * np.arange(len(order), 0, -1))
    return np.minimum(1.0, rising)[np.argsort(order)].tolist()


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; 0 for a single value, where it is unknown."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def difference_text(test: Paired, kind: str, percent: bool = False) -> str:
    """Return a difference with its sign and error, and the items that were compared."""
    size = size_text(test.difference, test.stderr, percent)
    return f" ({'-' if test.difference < 0 else '+'}{size}, paired over {test.n:,} {kind})"
