"""Verdicts over seeds: how often equal recipes are called different, and whether the intervals hold what they say."""

import numpy as np
import pytest

from extensions.decide import compare, evidence, sign_half, t_halves

LOOKS, SEQUENCES = 40, 10_000


def normal(rng, shape):
    return rng.normal(size=shape)


def heavy(rng, shape):
    return rng.standard_t(3, size=shape)


def skewed(rng, shape):
    """Differences of skewed results: one run in five is much worse."""
    return np.subtract(*rng.exponential(size=(2, *shape)) ** 2)


def bimodal(rng, shape):
    return rng.choice([-1.0, 1.0], shape) + 0.2 * rng.normal(size=shape)


SHAPES = pytest.mark.parametrize("shape", [normal, heavy, skewed, bimodal])


@SHAPES
def test_of_equal_recipes_at_most_one_pair_in_twenty_is_ever_decided(shape):
    """At 40 looks. A fixed t-test, looked at as often, would call more than a third of them different."""
    differences = shape(np.random.default_rng(0), (SEQUENCES, LOOKS))
    by_signs = evidence(differences) >= 20
    means = np.cumsum(differences, -1) / np.arange(1, LOOKS + 1)
    both = by_signs & (np.abs(means) > t_halves(differences, 0.05))
    assert 0.01 < by_signs.any(-1).mean() < 0.05 and both.any(-1).mean() < 0.05
    assert evidence(differences)[:, 5].mean() == pytest.approx(1, abs=0.1), "the capital of a fair game stays 1 on average"
    for row in differences[both.any(-1)][:20]:
        first = int(np.argmax((evidence(row) >= 20) & (np.abs(np.cumsum(row) / np.arange(1, LOOKS + 1)) > t_halves(row, 0.05)))) + 1
        assert abs(compare(row[:first]).difference) > t_halves(row[:first], 0.05)[-1]


@SHAPES
def test_intervals_hold_at_all_looks_at_once(shape):
    """The printed interval contains the t interval and all shifts that the signs leave, also where the t interval fails alone."""
    differences = shape(np.random.default_rng(1), (SEQUENCES, LOOKS))
    shifted = differences + 3.0  # the interval moves with the differences
    means = np.cumsum(differences, -1) / np.arange(1, LOOKS + 1)
    outside_t = np.abs(means) > t_halves(differences, 0.05)
    outside = outside_t & (evidence(differences) >= 20)
    assert outside.any(-1).mean() < 0.05
    assert outside_t.any(-1).mean() < (0.2 if shape is bimodal else 0.05), "two values, of which five are equal, look like no noise"
    row = shifted[0, :12]
    verdict = compare(row)
    assert verdict.half == pytest.approx(max(t_halves(row, 0.05)[-1], sign_half(row, 0.05)))
    assert verdict.half == pytest.approx(compare(row - 3).half, rel=0.03)
    for side in (-1, 1):  # inside, no test says otherwise; outside, both have excluded it
        beyond = compare(row - verdict.difference - side * 1.05 * verdict.half)
        assert beyond.outcome == "decided" or verdict.half > t_halves(row, 0.05)[-1]


def test_the_t_interval_ends_where_the_mixture_over_effects_has_the_evidence():
    """Wang and Ramdas 2023: the ratio of noncentral t densities, averaged over effects ~ N(0, 1 / c^2), is 1 / error at its ends."""
    stats, integrate = pytest.importorskip("scipy.stats"), pytest.importorskip("scipy.integrate")
    rng = np.random.default_rng(2)
    for n, error in ((6, 0.05), (7, 0.01), (20, 0.05), (40, 0.2)):
        values = rng.normal(size=n)
        half, stderr = t_halves(values, error)[-1], values.std(ddof=1) / np.sqrt(n)
        t = half / stderr

        def ratio(effect, t=t, n=n):
            weight = stats.norm.pdf(effect, scale=0.5 ** -0.5)
            return weight * stats.nct.pdf(t, n - 1, effect * np.sqrt(n)) / stats.t.pdf(t, n - 1)

        assert integrate.quad(ratio, -8, 8, limit=200)[0] == pytest.approx(1 / error, rel=1e-4)


def test_a_decision_takes_six_pairs_and_one_extreme_pair_does_not_decide():
    for n in range(1, 13):
        outcome = compare([1.0] * n).outcome
        assert outcome == ("decided" if n >= 6 else "undecided")
        assert evidence(np.ones(n))[-1] <= 2.0 ** (n - 1)
    assert compare([1.0] * 5, error=0.1).outcome == "decided", "with a larger error, five are enough"
    assert compare([0.1, -0.2, 0.1, -0.1, 0.2, 1e9]).outcome == "undecided"
    assert compare([1e9]).outcome == compare([np.inf]).outcome == compare([]).outcome == "undecided"
    assert compare([-1.0, -1.1, -0.9, -1.0, -1.1, -1.0]).favoured == -1


def test_a_failed_run_counts_once_against_its_arm():
    """An infinite difference has a sign, and no mean."""
    failures = compare([np.inf] * 6)
    assert (failures.outcome, failures.favoured, failures.difference, failures.half) == ("decided", 1, np.inf, np.inf)
    assert compare([np.inf, -np.inf] * 6).outcome == "undecided"
    assert compare([np.inf] + [-1.0] * 20).favoured == -1 and compare([np.inf] + [-1.0] * 20).outcome == "decided", \
        "a single failure does not end the bets on the other side"


def test_no_difference_that_matters_is_an_interval_within_the_margin():
    rng = np.random.default_rng(3)
    values = 0.001 * rng.normal(size=12)
    verdict = compare(values, margin=0.01)
    assert verdict.outcome == "margin" and abs(verdict.difference) + verdict.half <= 0.01
    assert compare(values, margin=0.5 * verdict.half).outcome == "undecided"
    assert compare([0.0] * 6, margin=0.01).outcome == "margin"
