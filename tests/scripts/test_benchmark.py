"""Contenders of the benchmark get the largest number of rows that fits, and the same tokens a step."""

from argparse import Namespace

import pytest

import model_utils
from scripts.dev import benchmark


def contender(rows: int, name: str = "paddock-eager") -> Namespace:
    return Namespace(run=name, rows=rows, threads=1, device="cpu", eager=True, profile=2)


@pytest.mark.parametrize("name", ["paddock-eager", "hf"])
def test_fewer_rows_at_a_time_train_the_same(name, monkeypatch):
    monkeypatch.setattr(model_utils, "bf16_is_fast", lambda device_type: False)
    work = benchmark.MODELS["tiny"]._replace(rows=4, steps=3)
    whole, halves = (benchmark.run_or_report_memory(work, contender(rows, name)) for rows in (4, 1))
    assert (whole["rows"], whole["accumulation"], halves["rows"], halves["accumulation"]) == (4, 1, 1, 4)
    for loss in ("first_loss", "last_loss"):
        assert halves[loss] == pytest.approx(whole[loss], rel=1e-5)
    assert whole["last_loss"] < whole["first_loss"] and len(whole["profile"]) == 2
