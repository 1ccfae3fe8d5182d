"""Decimation keeps what the eye looks for: extremes, gaps, ends; and its memory is bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.curves import MOST_POINTS, Curve, Points, as_json, decimated, points_per_curve

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 50), st.integers(1, 40))
def test_extremes_ends_and_gaps_survive(values, most, stride):
    x, y = np.arange(len(values)) * stride, np.array(values)
    width, points = decimated(Points(x, y), most)
    assert set(zip(points.x, map(repr, points.y))) <= set(zip(x, map(repr, y))) and (np.diff(points.x) > 0).all()
    assert points.x[0] == x[0] and points.x[-1] == x[-1]
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmin(points.y) == finite.min() and np.nanmax(points.y) == finite.max()
    assert np.isnan(points.y).any() == np.isnan(y).any()
    assert len(points.x) <= max(most, 5)
    for bucket in range(int(x[-1] // width) + 1):  # each one keeps its own extremes, however often it was merged
        inside, kept = (pair.y[pair.x // width == bucket] for pair in (Points(x, y), points))
        if np.isfinite(inside).any():
            assert np.nanmin(kept) == np.nanmin(inside) and np.nanmax(kept) == np.nanmax(inside)


def test_a_curve_that_grows_has_the_extremes_of_all_its_points():
    values, curve = np.random.default_rng(0).normal(size=200_000), Curve()
    values[123_456], values[77_777] = 50, -50
    for start in range(0, len(values), 1000):
        curve.add(range(start, start + 1000), values[start:start + 1000])
    assert len(curve) <= 2 * MOST_POINTS and curve.last() == values[-1]
    for most in (100, 1000):
        points = curve.points(most)
        found = dict(zip(points.x.tolist(), points.y.tolist()))
        assert len(found) <= most and found[123_456] == 50 and found[77_777] == -50
        assert {0, 199_999} <= found.keys() and all(values[x] == y for x, y in found.items())


def test_what_is_not_finite_is_a_gap_and_json_has_no_nan():
    curve = Curve()
    curve.add([1, 2, 3, 4], np.array([1.0, np.inf, np.nan, 2 / 3]))
    assert as_json(curve.points(100)) == {"x": [1, 2, 3, 4], "y": [1, None, None, 0.666667]} and curve.last() == 2 / 3


@pytest.mark.parametrize("lengths, budget, most", [([10, 10], 1000, 2 * MOST_POINTS), ([10, 5000], 1010, 1000),
                                                   ([10, 900, 5000, 5000], 3010, 1050), ([5000] * 100, 1000, 50)])
def test_short_curves_are_whole_and_long_ones_share_what_is_left(lengths, budget, most):
    assert points_per_curve(lengths, budget) == most
