"""A long curve keeps the mean and the range of its buckets, and its first and last value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extensions.report.curves import Curve, as_json, points_per_curve

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=300)


def curve_of(x, y) -> Curve:
    curve = Curve()
    for step, value in zip(x, y):
        curve.add(step, value)
    return curve


@given(VALUES, st.integers(6, 50), st.integers(1, 40))
def test_a_point_is_the_mean_and_the_range_of_the_values_it_stands_for(values, most, stride):
    x, y = np.arange(len(values)) * stride, np.array(values)
    points = curve_of(x, y).points(most)
    assert len(points.x) <= most and (np.diff(points.x) > 0).all() and points.count.sum() == np.isfinite(y).sum()
    assert (points.x[0], points.x[-1]) == (x[0], x[-1]) and points.y[[0, -1]].tolist() == pytest.approx(y[[0, -1]].tolist(), nan_ok=True)
    edges = np.concatenate(([0], np.cumsum(np.maximum(points.count, 1)).astype(int))) if np.isfinite(y).all() else ()
    for start, end, mean, low, high in zip(edges, edges[1:], points.y, points.low, points.high):
        assert mean == pytest.approx(y[start:end].mean(), rel=1e-9, abs=1e-6)
        assert (low, high) == (y[start:end].min(), y[start:end].max())


def test_what_is_not_finite_is_a_gap_and_json_has_no_nan():
    curve = curve_of([1, 2, 3, 4], [1.0, np.inf, None, 2 / 3])
    assert as_json(curve.points(100)) == {"x": [1, 2, 3, 4], "y": [1, None, None, 0.666667]} and curve.newest == (2 / 3, 4)
    assert curve.known()[0].tolist() == [1, 4] and (curve.at(4), curve.at(3), curve.at(5)) == (2 / 3, None, None)


@pytest.mark.parametrize("lengths, budget, most", [([10, 10], 1000, 10), ([10, 5000], 1010, 1000),
                                                   ([10, 900, 5000, 5000], 3010, 1050), ([5000] * 100, 1000, 50)])
def test_short_curves_are_whole_and_long_ones_share_what_is_left(lengths, budget, most):
    assert points_per_curve(lengths, budget) == most
