"""Ledger, loss spikes and replica drift: silent faults are reported, with the facts that help to find the cause."""

import json
import math
import os
import statistics
import sys
import zlib
from functools import partial

import pytest
from factories import UNMEASURED, assert_same_run, drift, spike_in, stop_at
from hypothesis import given
from hypothesis import strategies as st

import train
from checkpoint import store
from common.activity import ACTIVITY
from config import OptimConfig
from data_pipeline.shards import open_token_set
from dataloaders import Mixing, RowOrder
from extensions import guards
from extensions.report.data import RunReader
from learn.objectives import NextToken
from learn.optim import learning_rate
from plan.make import make_plan
from run import step_log
from tokenizer import load_tokenizer

FEW_SAVES = {**UNMEASURED, "SAVE_EVERY": 10}


def test_the_ledger_has_each_step_with_its_rows_loss_and_norm(whole, prepared):
    tokenizer = load_tokenizer(str(prepared.tokenizer), "auto")
    tokens = open_token_set(str(prepared.shards), "train", tokenizer).tokens
    entries = whole.lines("ledger")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    for entry in entries:
        rows = RowOrder(Mixing(((tokens - 1) // 32,)), 8, 1, seed=1337).all_rows(entry["step"] - 1)
        assert entry["rows_crc32"] == f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}"
        assert entry["loss"] == whole.column("train_loss")[entry["step"]] and entry["updated"]
        assert entry["grad_norm"] == whole.column("grad_norm")[entry["step"]]


@given(st.lists(st.floats(1, 10), min_size=8, max_size=64))
def test_a_loss_is_compared_with_the_median_in_robust_standard_deviations(recent):
    middle = statistics.median(recent)
    deviation = max(1.4826 * statistics.median([abs(value - middle) for value in recent]), 0.01 * middle)
    assert step_log.median_and_deviation(recent, 16) == pytest.approx((middle, deviation))
    assert step_log.median_and_deviation(recent, 2 * len(recent) + 1)[1] == math.inf, "too few to judge by"


def poison(monkeypatch, *steps: int) -> None:
    monkeypatch.setattr(NextToken, "loss_sum", NextToken.loss_sum)  # which comes back at the end of the test
    spike_in(*steps)


@pytest.fixture
def long_run(tiny_run, monkeypatch):
    """Make a run that is long enough to fill the window of recent losses."""
    monkeypatch.setattr(OptimConfig, "loss_spike_window", 16)
    return lambda **settings: tiny_run(**{**FEW_SAVES, "MAX_STEPS": 20, **settings})


def test_a_spike_is_reported_with_its_rows_and_changes_nothing(long_run, monkeypatch, capsys):
    calm, run = long_run(RUN_NAME="calm"), long_run()
    assert calm.train() == 0
    poison(monkeypatch, 15)
    assert run.train() == 0
    error = capsys.readouterr().err
    entry = run.lines("ledger")[14]
    assert error.count("warning: loss spike in step 15") == 1 and f"rows {entry['rows']}" in error
    assert f"{run.folder} --step 15" in error
    assert len(entry["rows"]) == 8 and entry["spike"] > 12 and entry["updated"]
    assert [one["step"] for one in run.lines("ledger") if "spike" in one] == [15]
    assert_same_run(run, calm, 20, logs=())


def test_the_update_of_a_spike_can_be_left_out(long_run, monkeypatch, capsys):
    run = long_run(LOSS_SPIKE_POLICY="skip", SAVE_EVERY=1)
    poison(monkeypatch, 15)
    assert run.train() == 0
    printed = capsys.readouterr()
    assert "Its update is skipped" in printed.err and not run.lines("ledger")[14]["updated"]
    rates = run.column("learning_rate")
    assert rates[20] > 1.1 * (planned := learning_rate(19, make_plan(run.argv(LOSS_SPIKE_POLICY="skip"), {}).config))
    assert "Skipped: 1 of 20 steps changed no weights" in printed.out
    assert f"the last learning rate was {rates[20]:.3g}; without them it would be {planned:.3g}." in printed.out
    assert run.hashes(15) == run.hashes(14) != run.hashes(16)
    assert store.read_state(run.checkpoint(20))["progress"]["skipped_steps"] == 1


def test_a_spike_can_stop_the_run_before_its_update(long_run, monkeypatch, capsys):
    run, calm = long_run(LOSS_SPIKE_POLICY="stop", SAVE_EVERY=0), long_run(RUN_NAME="calm", SAVE_EVERY=1)
    assert calm.train() == 0
    poison(monkeypatch, 15)
    assert run.train() == 4
    error = capsys.readouterr().err
    assert "error: loss spike in step 15" in error and "LOSS_SPIKE_POLICY=skip" in error and error.count("spike in step") == 1
    assert run.steps_saved() == [14]
    assert_same_run(run, calm, 14, logs=())
    report = json.loads((run.folder / "debug" / "step-00000015" / "rank-0.json").read_text())
    assert [row for rows in report["rows"] for row in rows] == run.lines("ledger")[14]["rows"]
    # Resumed, the run stops at the same step again; another policy lets it continue.
    assert run.train() == 4
    assert run.train(LOSS_SPIKE_POLICY="skip") == 0


def test_a_replica_that_drifts_by_one_bit_stops_the_run_with_its_rank(tiny_run):
    name = "layers.0.feed_forward.w1.weight.exp_avg_sq"
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1, DRIFT_CHECK_EVERY=3)
    text = run.ends([1, 1], partial(drift, 1, name))
    assert text.count("error: after step 3 the ranks no longer have the same model") == 1 and "Traceback" not in text
    assert f": {name} differs between rank 0 and rank 1." in text
    assert run.steps_saved() == [1, 2], "the drifted state is not saved"


def alarms_of(*steps: tuple[float, float]) -> dict[int, list[str]]:
    """The kinds of alarms by the step at which they are raised."""
    divergence = guards.Divergence()
    found = {number: [*divergence.add(*step)] for number, step in enumerate(steps, 1)}
    return {number: kinds for number, kinds in found.items() if kinds}


def test_a_loss_far_above_the_initial_one_and_a_gradient_of_zero_are_reported_once():
    learns = [(6.0 - number / 10, 1.0) for number in range(20)]
    assert alarms_of(*learns) == {}
    assert alarms_of((6.0, 1.0), *[(1e5, 2.0)] * 20) == {6: ["divergence"]}, "from the first update on"
    assert alarms_of(*learns, *[(9.1, 1.0)] * 4, (8.0, 1.0), *[(9.1, 1.0)] * 9) == {30: ["divergence"]}
    assert alarms_of(*learns, *[(4.0, 0.0)] * 4, (4.0, 1e-9), *[(4.0, 0.0)] * 9) == {30: ["no gradient"]}
    # Noise in small batches: a first loss that is low by chance is not the initial loss.
    assert alarms_of((1.0, 1.0), *[(1.8, 1.0), (2.2, 1.0), (1.9, 1.0)] * 9) == {}
    assert alarms_of(*[(0.693, 1.0)] * 5, *[(math.nan, math.nan)] * 9, *[(1.05, 1.0)] * 5) == {19: ["divergence"]}


def test_a_run_that_diverges_is_reported_in_log_events_and_report_and_has_no_best_loss(long_run, monkeypatch, capsys):
    """Also where it is stopped and resumed in between: the ledger has all that decides."""
    run, by_item = long_run(MAX_STEPS=12, VALIDATE_EVERY=4), NextToken.by_item
    poison(monkeypatch, *range(2, 13))
    monkeypatch.setattr(NextToken, "by_item", lambda *arguments: (summed := by_item(*arguments))._replace(
        total=summed.total * (4 if ACTIVITY.step >= 2 else 1)))
    for step in (3, 7):
        with stop_at(step):
            assert run.train() == train.EXIT_PREEMPTED
    assert run.train() == 0
    printed = capsys.readouterr()
    assert printed.err.count("warning: step 6: the loss has been above 1.5 times the initial") == 1
    assert "RESUME=never and a LEARNING_RATE well below" in printed.err
    assert [(line["step"], line["event"]) for line in run.lines("events") if "text" in line] == [(6, "divergence")]
    assert printed.out.count("Validation [") == 4 and "best so far" not in printed.out
    data = RunReader(run.folder, "run")
    data.read()
    assert [(alarm["step"], alarm["kind"]) for alarm in data.alarms()] == [(6, "divergence")]


def other_flags() -> None:
    """In a rank: as a node of torchrun that was started with other flags."""
    sys.argv = ["train.py", "--seed=1", *(["--learning-rate", "0.5", "--max-stepz=3"] if os.environ["RANK"] == "1" else ["--data-seed=2"])]


def test_flags_of_another_machine_that_are_not_used_are_named(tiny_run):
    text = tiny_run(MAX_STEPS=1, **UNMEASURED).ends([0, 0], other_flags)
    words = "rank 1 was started with other flags than rank 0, which decides; not used: LEARNING_RATE=0.5; command line: unknown flag --max-stepz"
    assert text.count(words) == 1 and "did you mean --max-steps" in text, text
