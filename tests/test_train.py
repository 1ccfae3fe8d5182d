"""The training loop: one exact step; stopping, resuming, refusing and evaluating a run."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import (
    UNMEASURED,
    TinyRun,
    a_step,
    assert_same_run,
    at_step,
    flip_bit,
    furthest,
    new_model,
    prepare,
    settings_of,
    stop_at,
    uneven_batches,
    ways_out,
    without_clocks,
)

import train
from checkpoint import store
from config import Config
from evaluation import during_run
from run import run as run_module
from scripts import runs

CURVE = Path(__file__).parent / "curves" / "pretrain.json"


@pytest.mark.parametrize("rows, dropout", [(1, 0), (2, 0), (4, 0), (2, 0.2)])
def test_micro_batches_of_any_size_give_the_gradient_of_one_large_batch(rows, dropout):
    large, gradients, _ = a_step(uneven_batches(8), MAX_GRAD_NORM=0, DROPOUT=dropout)
    small, others, _ = a_step(uneven_batches(rows), MAX_GRAD_NORM=0, DROPOUT=dropout)
    assert furthest(gradients, others) < 1e-6
    assert small.loss == pytest.approx(large.loss, rel=1e-6) and small.grad_norm == pytest.approx(large.grad_norm, rel=1e-5)


def test_a_loss_scaler_changes_nothing_but_skips_what_overflows():
    plain, _, model = a_step(uneven_batches(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaled, _, same = a_step(uneven_batches(2), scaler)
    assert scaled.updated and scaled.loss == plain.loss and scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    for actual, other in zip(model.parameters(), same.parameters()):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)
    overflowing = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    result, _, untouched = a_step(uneven_batches(2), overflowing, lambda model: model.norm.weight.register_hook(lambda grad: grad * 1e3))
    fresh = new_model(untouched.config, 512, seed=1)
    assert result.finite and not result.updated and overflowing.get_scale() == 2.0**126
    assert all(torch.equal(actual, other) for actual, other in zip(untouched.parameters(), fresh.parameters()))


def test_a_skipped_step_advances_no_schedule():
    config = Config(total_batch_size=256)
    run = run_module.Run(config, SimpleNamespace(ranks=None, log=None), *[None] * 5, run_module.Progress(0), None, None)
    for updated in (True, False, True):
        run.advance(run_module.StepResult(3.0, {}, 256, 1.0, True, updated, 0.0, False))
    assert (run.progress.step, run.progress.updates, run.progress.tokens_seen) == (3, 2, 768)


def test_a_run_logs_each_step_once_with_all_promised_metrics(whole):
    metrics = whole.metrics()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5, 6]
    for line in metrics[1:]:
        assert line.keys() >= {"train_loss", "learning_rate", "grad_norm", "tokens_seen", "tokens_per_second", "peak_memory_bytes"}
        assert line["tokens_seen"] == 256 * line["step"]
    assert list(whole.column("val_loss")) == [0, 2, 4, 6] and whole.steps_saved() == [2, 4, 6]
    assert list(whole.column("hellaswag_acc")) == list(whole.column("hellaswag_n")) == [0, 3, 6]
    assert whole.column("hellaswag_n")[6] == 10 and {"hellaswag_acc_norm", "hellaswag_stderr"} <= metrics[0].keys()
    assert [line["step"] for line in whole.lines("samples")] == [6]
    assert json.loads((whole.folder / "config.json").read_text())["MAX_STEPS"] == 6


def starts_and_ends(run) -> list[tuple]:
    return [(event["event"], event["step"], event.get("previous_step", event.get("reason"))) for event in run.lines("events")
            if event["event"] in ("start", "end")]


def die():
    raise KeyError("as if killed")


@pytest.mark.parametrize("step, saved, is_killed", [(3, 3, False), (6, 6, False), (6, 4, True), (2, 0, True)])
def test_a_run_that_was_stopped_and_resumed_is_identical(step, saved, is_killed, whole, tiny_run, capsys):
    """By a signal after a step, or killed in it: each step after the last checkpoint is logged once."""
    run, last = tiny_run(), step - is_killed
    with at_step(step, die) if is_killed else stop_at(step):
        if is_killed:
            pytest.raises(KeyError, run.train)
        else:
            assert run.train() == train.EXIT_PREEMPTED
    assert (run.steps_saved() or [0])[-1] == saved
    assert [line["step"] for line in run.metrics()] == [*range(last + 1)]
    capsys.readouterr()
    assert run.train() == 0
    assert_same_run(run, whole, 6)
    why = "KeyError: 'as if killed'" if is_killed else "stopped by a signal"
    assert starts_and_ends(run) == [
        ("start", 0, None), ("end", last, why), ("start", saved, last), ("end", 6, "finished")]
    printed, (first, *_, end) = capsys.readouterr().out, run.metrics()
    took = f"; this start took {6 - saved} of them" * bool(saved)
    assert f"Finished 6 steps (1,536 tokens){took} in " in printed
    assert re.search(f"result   loss {first['val_loss']:.3f} to {end['val_loss']:.3f} \\(n = \\d\\)", printed)


def test_a_run_resumes_by_its_name_alone_and_keeps_its_settings(whole, tiny_run, tmp_path):
    run = tiny_run()
    with stop_at(3):
        assert run.train() == 143
    assert train.main(["--output-dir", str(run.output_dir), "--run-name", run.folder.name, "--device", "cpu"]) == 0
    assert run.lines("ledger") == whole.lines("ledger") and run.hashes(6) == whole.hashes(6)


def test_a_finished_run_takes_no_step(whole, tmp_path, capsys, monkeypatch):
    run = whole.copy(tmp_path / "runs")
    monkeypatch.setenv("VERIFY_DATA", "auto")
    assert run.train() == 0
    message = capsys.readouterr().out
    assert "Nothing to do" in message and "[CPU0] From the environment: VERIFY_DATA=auto" in message
    assert_same_run(run, whole, 6)
    assert run.steps_saved() == [2, 4, 6]
    # With a larger MAX_STEPS it continues. Another device may round differently.
    events = run.folder / "events.jsonl"
    events.write_text(re.sub('"device": "[^"]*"', '"device": "CPU, 99 threads"', events.read_text()))
    assert run.train(MAX_STEPS=7) == 0
    assert "warning: the device was CPU, 99 threads, is CPU, " in capsys.readouterr().err
    assert [line["step"] for line in run.metrics()] == list(range(8)) and run.steps_saved() == [2, 4, 6, 7]


def test_a_run_that_stop_step_ends_is_stopped_and_not_finished(whole, tiny_run, capsys, monkeypatch):
    """In the list of runs too, also after a start with a smaller MAX_STEPS; each start says what continues it."""
    run = tiny_run()
    assert run.train(STOP_STEP=3) == 0
    printed = capsys.readouterr().out
    assert "STOP_STEP=3: to continue, remove it or set it above 3." in printed and "Stopped after 3 steps (" in printed
    monkeypatch.setattr(sys, "argv", ["runs.py", "--output-dir", str(run.output_dir)])

    def state() -> list[str]:
        capsys.readouterr()
        runs.main()
        return capsys.readouterr().out.splitlines()[1].split()[2:4]

    assert state() == ["3/6", "stopped"]
    assert run.train(MAX_STEPS=2) == 0 and state() == ["3/6", "stopped"]
    assert run.train() == 0 and state() == ["6/6", "finished"]
    assert_same_run(run, whole, 6)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict:
    data = prepare(tmp_path_factory.mktemp("other-data"), seed=1)
    folder = tmp_path_factory.mktemp("other-tokenizer")
    other = prepare(folder, vocab_size=260)
    return {"data": {"PRETRAIN_DATA_PATH": data.shards},
            "tokenizer": {"PRETRAIN_DATA_PATH": other.shards, "TOKENIZER_PATH": other.tokenizer}}


@pytest.fixture
def finished(whole, tmp_path) -> TinyRun:
    return whole.copy(tmp_path / "runs", MAX_STEPS=8)


@pytest.mark.parametrize(("names", "changes", "ways"), [
    (("SEED",), {"SEED": 7}, 4), (("DIM", "FFN_DIM"), {"DIM": 64}, 2), (("OPTIMIZER",), {"OPTIMIZER": "muon"}, 3),
    (("PRETRAIN_DATA_PATH",), "data", 4), (("PRETRAIN_DATA_PATH", "TOKENIZER_PATH"), "tokenizer", 2)])
def test_a_change_that_makes_it_another_run_is_refused_by_name(names, changes, ways, finished, others, capsys):
    changes = others[changes] if isinstance(changes, str) else changes
    assert finished.train(**changes) == 5
    error = capsys.readouterr().err
    assert all(f"{name} was" in error for name in names) and finished.steps_saved() == [2, 4, 6]
    offered = ways_out(error)
    assert len(offered) == ways
    for number, way in enumerate(offered):
        copy = finished.copy(finished.output_dir.with_name(f"way-{number}"), **UNMEASURED)
        assert copy.train(**({} if "restore what" in way.lower() else changes) | settings_of(way)) == 0, way


@pytest.mark.parametrize("by", ["name", "run"])
def test_a_named_checkpoint_brings_optimizer_schedule_and_step(by, finished, whole, prepared, tmp_path):
    run, named = finished, "step-00000004"
    if by == "run":
        run, named = TinyRun(prepared, tmp_path / "elsewhere"), finished.folder
        shutil.rmtree(finished.checkpoint(6))
    assert run.train(PRETRAIN_CHECKPOINT=named, MAX_STEPS=6) == 0
    assert_same_run(run, whole, 6, logs=())
    assert run.column("train_loss")[6] == whole.column("train_loss")[6]


def test_reset_optimizer_takes_only_the_weights(finished, whole, prepared, tmp_path, capsys):
    run = TinyRun(prepared, tmp_path / "elsewhere")
    settings = {"PRETRAIN_CHECKPOINT": finished.checkpoint(6), "RESET_OPTIMIZER": "true"}
    with stop_at(2):
        assert run.train(**settings, SEED=3) == train.EXIT_PREEMPTED
    printed = capsys.readouterr()
    assert "schedule and step restart" in printed.out and not printed.err, "it is what was asked for, and nothing to warn of"
    assert run.column("val_loss")[0] == pytest.approx(whole.column("val_loss")[6], rel=1e-6)
    assert list(run.column("train_loss")) == [1, 2] and run.column("learning_rate")[1] == 0.005
    # After a pre-emption the same command continues the run and resets nothing.
    assert run.train(**settings, SEED=3) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    assert list(run.column("train_loss")) == [1, 2, 3, 4, 5, 6]


def test_start_step_counts_the_tokens_of_so_many_steps(finished, prepared, tmp_path):
    run = TinyRun(prepared, tmp_path / "elsewhere", **UNMEASURED)
    assert run.train(PRETRAIN_CHECKPOINT=finished.checkpoint(6), START_STEP=3, MAX_STEPS=5) == 0
    assert run.column("tokens_seen") == {4: 4 * 256, 5: 5 * 256}


def with_validation_losses(monkeypatch, losses: dict[int, float], items: int = 12) -> list[list]:
    """Give the n-th validation the n-th loss; returns a list that grows by the rows of each validation."""
    seen: list[list] = []

    def validation_loss(model, objective, batches, *_):
        seen.append([batch.tokens_BT.tolist() for batch in batches])
        loss = losses[len(seen) - 1]
        return loss, {}, {"count": np.ones(items), "loss": loss + np.tile([-1.0, -0.01, 0.01, 1.0], items // 4)}

    monkeypatch.setattr(during_run, "validation_loss", validation_loss)
    return seen


def test_a_validation_loss_that_is_only_as_good_is_no_new_best():
    progress, best = run_module.Progress(0), []
    for step, loss in enumerate((2.0, 1.5, 1.5, math.nan, 1.6, 1.4), 1):
        progress.step = step
        best.append(progress.note_validation(loss, skip_steps=3))
    assert best == [True, True, False, False, False, True]
    assert (progress.best_step, progress.best_val_loss, progress.validations_without_best) == (6, 1.4, 0)
    # Nor one above the first.
    progress = run_module.Progress(step=0)
    assert not progress.note_validation(10.0, 0, "a") and progress.val_loss is None
    progress.step = 1
    assert not progress.note_validation(40.123456789012345, 0, "a") and progress.best_val_loss is None
    assert progress.note_validation(9.0, 0, "a") and progress.best_val_loss == 9.0
    # On other items, it starts again.
    assert progress.note_validation(50.0, 0, "b") and (progress.best_val_loss, progress.first_val_loss) == (50.0, 50.0)


def test_best_and_result_of_other_validation_items_start_again(tiny_run, monkeypatch, capsys):
    """Also for RUN:best and what is kept: step 2's loss is lower, but of other rows."""
    with_validation_losses(monkeypatch, dict(enumerate([9.0, 4.0, 3.0, 7.0, 5.0, 6.0])))
    run = tiny_run(VALIDATE_EVERY=1, SAVE_EVERY=10, KEEP_LAST=1, HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    assert run.train(MAX_STEPS=4, STOP_STEP=2) == 0
    capsys.readouterr()
    assert run.train(MAX_STEPS=5, VALIDATION_ROWS=run.settings["VALIDATION_ROWS"] - 1) == 0
    printed = capsys.readouterr()
    assert "on other items" in printed.err and "loss 7.000 to 6.000" in printed.out and "best 5.000 at step 4" in printed.out
    assert 4 in run.steps_saved() and store.locate(f"{run.folder}:best", run.folder).name == "step-00000004"


def test_early_stopping_counts_validations_without_a_best_after_the_skipped_steps(tiny_run, monkeypatch, capsys):
    with_validation_losses(monkeypatch, dict(enumerate([9.0, 4.0, 5.0, 5.0, 3.9, 4.0, 4.1, 4.2, 4.3])))
    run = tiny_run(MAX_STEPS=20, VALIDATE_EVERY=1, EARLY_STOPPING_PATIENCE=2, EARLY_STOPPING_SKIP_STEPS=2, HELLASWAG_EVERY=7).trained()
    # Step 2 is skipped, step 3 counts, step 4 is a new best, steps 5 and 6 are two without one.
    assert list(run.column("train_loss"))[-1] == 6 and run.steps_saved()[-1] == 6
    assert "Early stopping" in capsys.readouterr().out
    assert list(run.column("hellaswag_acc")) == [0, 6], "the last evaluation is made however the run ends"
    assert run.train() == 0
    message = capsys.readouterr().out
    assert "Nothing to do" in message and "Early stopping: 2 validations without a loss below 3.900 (step 4)" in message
    assert "raise EARLY_STOPPING_PATIENCE" in message and run.train(EARLY_STOPPING_PATIENCE=3) == 0
    assert run.steps_saved()[-1] == 7
    assert [why for event, _, why in starts_and_ends(run) if event == "end"] == ["early stopping"] * 3


def test_a_rise_above_the_best_is_warned_of_once_and_the_end_offers_the_best_checkpoint(tiny_run, monkeypatch, capsys):
    """The last validations are worse on each of the same rows. Later commands use RUN:best, and none asks for more steps."""
    with_validation_losses(monkeypatch, dict(enumerate([9.0, 4.0, 3.0, 3.5, 3.6, 2.9, 2.92])))
    run = tiny_run(VALIDATE_EVERY=1, SAVE_EVERY=3, HELLASWAG_EVERY=0)
    assert run.train(MAX_STEPS=6) == 0
    printed = capsys.readouterr()
    warnings = re.findall(r"the validation loss is above its best, (\S+) at step (\d+) \((\S+), paired over 12 rows\)", " ".join(printed.err.split()))
    assert warnings == [("3.000", "2", "+0.5000")], "of the rise from step 3 on, once; 2.92 is no clear rise"
    assert "has risen since" not in printed.err
    assert "resume" in printed.out and f"{run.folder}:best" not in printed.out.split("Finished")[-1]
    with_validation_losses(monkeypatch, dict.fromkeys(range(6), 3.3))
    assert run.train(MAX_STEPS=12) == 0
    printed, warned = capsys.readouterr()
    assert "The learning rate has risen since, as MAX_STEPS or LEARNING_RATE was raised" in " ".join(warned.split()), "not: is too high"
    assert "best 2.900 at step 5" in printed and re.search(r"use it .*run:best", printed) and "resume  " not in printed
    assert store.locate(f"{run.folder}:best", run.folder).name == "step-00000005"


def test_with_few_items_a_loss_above_the_first_one_offers_the_best_checkpoint(tiny_run, monkeypatch, capsys):
    with_validation_losses(monkeypatch, dict(enumerate([3.0, 2.9, 2.8, 3.5])), items=4)
    tiny_run(VALIDATE_EVERY=1, SAVE_EVERY=2, MAX_STEPS=3, HELLASWAG_EVERY=0).trained()
    printed = capsys.readouterr().out
    assert re.search(r"use it .*run:best", printed) and "resume  " not in printed


def test_nan_is_never_the_best(tiny_run, monkeypatch, capsys):
    with_validation_losses(monkeypatch, dict(enumerate([9.0, math.nan, 4.0, math.nan])))
    run = tiny_run(KEEP_LAST=1, SAVE_EVERY=6).trained()
    assert capsys.readouterr().err.count("is not finite") == 2
    assert run.steps_saved() == [4, 6]
    progress = store.read_state(run.checkpoint(6))["progress"]
    assert (progress["best_val_loss"], progress["best_step"]) == (4.0, 4)
    json.loads((run.checkpoint(6) / store.STATE).read_text(), parse_constant=pytest.fail)


def test_no_step_to_take_is_a_measurement(tiny_run, whole):
    run = tiny_run(MAX_STEPS=0).trained()
    assert without_clocks(run.metrics()) == without_clocks(whole.metrics())[:1] and run.steps_saved() == [0]


def test_losses_are_those_of_the_committed_curve(tiny_run):
    """Ten steps on any CPU. To change the curve on purpose, run with PADDOCK_WRITE_CURVES=1, and say why in the commit."""
    run = tiny_run(MAX_STEPS=10, WARMUP_STEPS=3, VALIDATE_EVERY=5, HELLASWAG_EVERY=0, SAMPLE_EVERY=0).trained()
    curve = {name: {str(step): value for step, value in run.column(name).items()}
             for name in ("train_loss", "grad_norm", "val_loss")}
    if os.environ.get("PADDOCK_WRITE_CURVES"):
        CURVE.write_text(json.dumps(curve, indent=1) + "\n")
    assert curve == {name: pytest.approx(values, rel=1e-4) for name, values in json.loads(CURVE.read_text()).items()}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [{}, {"MODEL_TYPE": "qwen3", "SLIDING_WINDOW": 6, "SLIDING_EVERY": 2}, {"MODEL_TYPE": "smollm3", "NO_ROPE_EVERY": 2}])
def test_compiled_losses_are_the_eager_ones(tiny_run, shape):
    eager, compiled = tiny_run(RUN_NAME="eager", **shape), tiny_run(RUN_NAME="compiled", **shape)
    assert eager.train() == compiled.train(COMPILE="true") == 0
    for name in ("train_loss", "val_loss"):
        assert compiled.column(name) == pytest.approx(eager.column(name), rel=1e-4)
    assert compiled.column("hellaswag_acc") == eager.column("hellaswag_acc")


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(finished, whole, capsys):
    flip_bit(finished.checkpoint(6) / "optimizer.safetensors")
    assert finished.train(MAX_STEPS=6) == 0
    error = capsys.readouterr().err
    assert "warning" in error and str(finished.checkpoint(6) / "optimizer.safetensors") in error
    assert_same_run(finished, whole, 6)
