"""Text for people."""

import pytest

from common.text import duration


@pytest.mark.parametrize("seconds, shown", [(0, "0:00"), (59.9, "0:59"), (330, "5:30"), (3600, "1:00:00"), (7530, "2:05:30"),
                                            (360_000, "100:00:00")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown
