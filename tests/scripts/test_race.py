"""The A/B benchmark: a run is stopped at its goal, results are kept, and p is that of the rank-sum test."""

from itertools import combinations
from math import inf

import pytest

from scripts.dev.ab_benchmark import exchange_p, table


@pytest.mark.parametrize("a, b", [([1, 2, 3], [4, 5, 6]), ([25, 25, 50], [50, 75, inf]), ([1, 4, 5, 8], [2, 3, 6, 7]), ([1], [1])])
def test_p_is_the_share_of_arrangements_that_differ_at_least_as_much(a, b):
    values = sorted([*a, *b])
    rank = {value: sum(place for place, each in enumerate(values) if each == value) / values.count(value) for value in values}
    ranks = [rank[value] for value in (*a, *b)]
    middle = sum(ranks) * len(a) / len(ranks)
    sums = [abs(sum(chosen) - middle) for chosen in combinations(ranks, len(a))]
    exact = sum(each >= sums[0] - 1e-9 for each in sums) / len(sums)
    assert exchange_p(a, b) == pytest.approx(exact, abs=0.006)


def test_a_seed_that_misses_the_goal_is_counted_and_not_averaged():
    results = [{"name": name, "steps": steps, "cpu_seconds": 2.0} for name, steps in (("a", 10), ("a", 20), ("b", None), ("b", 30))]
    assert [line.split()[:5] for line in table(results)[1:]] == [["a", "2/2", "15.0", "±", "7.1"], ["b", "1/2", "30", "0.33", "2.0"]]
