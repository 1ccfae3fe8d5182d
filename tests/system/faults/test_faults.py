"""When something goes wrong, no finished step is lost, nothing hangs, and the first cause is reported."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import ROOT, WORLD, during, listening
from factories import PATIENCE, assert_same_run, do_in_step, is_rank
from faults import act, die
from safetensors.torch import load_file

import model_utils
import train
from checkpoint import huggingface
from evaluation import during_run
from extensions import evaluate
from model_utils import build_model
from run import facts as run_facts
from run import log

# When the signal arrives (module, function, number of the call), and the last step that is finished then.
MOMENTS = {"start-up": (run_facts, "load_tokenizer", 1, 0), "baseline": (during_run, "validation_loss", 1, 0),
           "step": (train, "learning_rate", 3, 3), "validation": (during_run, "validation_loss", 3, 4),
           "HellaSwag": (during_run, "evaluate_batches", 2, 3), "samples": (evaluate, "generate", 1, 6),
           "save": (huggingface, "save_settings", 1, 3)}


@pytest.mark.parametrize("moment, number", [
    pytest.param(moment, number, marks=() if number == signal.SIGTERM or moment == "step" else pytest.mark.slow)
    for moment in MOMENTS for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)])
def test_a_signal_at_any_moment_loses_no_step(moment, number, whole, tiny_run):
    module, name, turn, finished = MOMENTS[moment]
    run = tiny_run(ASYNC_SAVE=moment != "save")  # else its thread may be steps behind
    patch = during(module, name, lambda: os.kill(os.getpid(), number), turn)
    code = run.train()
    patch.undo()
    if moment == "samples":
        assert code == 0, "it was finished but for the save"
    else:
        assert code == train.EXIT_PREEMPTED
        assert (run.steps_saved() or [0])[-1] == finished, "before the first step there is nothing to save"
    assert run.train() == 0
    assert_same_run(run, whole, 6)


def test_the_command_exits_with_143_and_prints_how_to_continue(tiny_run):
    run = tiny_run(MAX_STEPS=100_000, SAVE_EVERY=0, VALIDATE_EVERY=0, HELLASWAG_EVERY=0)
    job = run.start()
    job.wait_for("Step [2/")
    assert listening(job.processes[0].pid) == []
    os.kill(job.processes[0].pid, signal.SIGTERM)
    assert job.wait() == [143]
    assert "resume   ./paddock train --run-name run" in job.text() and "Traceback" not in job.text()
    assert run.steps_saved() == [run.metrics()[-1]["step"]]


def hold_in_step_2() -> None:
    do_in_step(2, lambda: (print("holding", flush=True), time.sleep(PATIENCE)))


def when_built(change) -> None:
    def build(*arguments):
        model = build_model(*arguments)
        change(model)
        return model

    model_utils.build_model = build


def bad_gradient_in_step(step: int, value: float, once: bool = False, rank: int = 0):
    """From this step on, put one bad number into one gradient of a rank each time that it is computed."""
    if not is_rank(rank):
        return
    reached = threading.Event()
    do_in_step(step, reached.set)

    def spoil(gradient):
        if reached.is_set():
            gradient = gradient.clone()
            gradient[3, 2] = value
            if once:
                reached.clear()
        return gradient

    when_built(lambda model: model.layers[1].feed_forward.w2.weight.register_hook(spoil))


def test_a_nan_in_one_gradient_of_one_rank_stops_all_before_the_update(tiny_run):
    run = tiny_run(SAVE_EVERY=0)
    text = run.ends([4, 4], partial(bad_gradient_in_step, 4, math.nan, rank=1))
    assert "NON-FINITE in step 4, from rank 1" in text and "layers.1.feed_forward.w2.weight" in text
    assert text.count("error: the gradient became NaN in step 4 on rank 1. Step 3 is saved.") == 1 and "Traceback" not in text
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]

    reports = [json.loads((run.folder / "debug" / "step-00000004" / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]
    assert [report["finite"] for report in reports] == [True, False]
    (tensor,) = reports[1]["tensors"]
    assert (tensor["tensor"], tensor["kind"], tensor["shape"]) == ("layers.1.feed_forward.w2.weight", "gradient", [32, 96])
    assert tensor["non_finite"] == 1
    rows = [row for report in reports for micro_batch in report["rows"] for row in micro_batch]
    assert len(set(rows)) == 8
    dumps = [load_file(run.folder / "debug" / "step-00000004" / f"rank-{rank}.safetensors") for rank in range(WORLD)]
    assert dumps[1]["tokens_BT.0"].shape == (2, 32)
    gradients = [{name: dump[name].isnan().nonzero().tolist() for name in dump if "gradient" in name} for dump in dumps]
    assert gradients == [{"gradient.layers.1.feed_forward.w2.weight": [[3, 2]]}, {"own_gradient.layers.1.feed_forward.w2.weight": [[3, 2]]}]
    # The saved state is the one before the step: without the fault, the run continues as if nothing had happened.
    assert run.steps_saved() == [3]
    healthy = tiny_run(RUN_NAME="healthy")
    for each in (healthy, run):
        each.ends([0, 0], SAVE_EVERY=2)
    assert_same_run(run, healthy, 6, logs=())


def test_a_fault_that_vanishes_when_recomputed_is_reported_as_transient(tiny_run):
    run, world_size = tiny_run(SAVE_EVERY=0), 2
    text = run.ends([4] * world_size, partial(bad_gradient_in_step, 4, math.nan, True, world_size - 1))
    assert "NON-FINITE in step 4, but finite when recomputed" in text and "layers.1.feed_forward.w2.weight" in text
    assert text.count("error: the gradient became NaN in step 4, but not when recomputed: a transient fault") == 1
    dumps = [run.folder / "debug" / "step-00000004" / f"rank-{rank}.json" for rank in range(world_size)]
    reports = [json.loads(dump.read_text()) for dump in dumps]
    assert all(report["finite"] and len(report["tensors"]) == 1 for report in reports)
    # The advice works: the same command continues from the state before.
    assert run.steps_saved() == [3]
    run.ends([0] * world_size)


def test_debug_names_the_first_module_whose_output_went_bad(tiny_run, monkeypatch, capsys):
    """An infinite weight in the second block makes the loss NaN."""
    def spoil(model):
        with torch.no_grad():
            model.layers[1].ffn_norm.weight[5] = math.inf

    monkeypatch.setattr(model_utils, "build_model", model_utils.build_model)
    when_built(spoil)
    run = tiny_run(VALIDATE_EVERY=0, HELLASWAG_EVERY=0)
    assert run.train(DEBUG="true") == 4
    captured = capsys.readouterr()
    assert "error: the loss became NaN in step 1. The weights were NaN or infinite before it, and are not saved." in captured.err
    assert run.steps_saved() == []
    shown = [line.removeprefix("[CPU0] ") for line in captured.out.splitlines()]
    assert any(line.startswith("output layers.1.ffn_norm (2, 32, 32): 0 NaN, 64 infinite, the first at [0, 0, 5]") for line in shown)
    text = (run.folder / "debug" / "step-00000001" / "report.txt").read_text()
    assert "parameter layers.1.ffn_norm.weight (32,): 0 NaN, 1 infinite" in text and "\n".join(shown[-3:]) in text
    loaded = subprocess.run([sys.executable, "-c", "\n".join(shown[-3:])], capture_output=True, text=True, check=True).stdout
    assert "'gradient.layers.0.feed_forward.w2.weight': ((32, 96), 3072)" in loaded and "'tokens_BT.0': ((2, 32), 0)" in loaded


def fail() -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(("plant", "codes"), [
    pytest.param((1, 3, fail), [1, 1], marks=pytest.mark.slow), ((1, 3, die), [1, -9]),
    pytest.param((1, ("evaluation.during_run", "evaluate_batches", 2), die), [1, -9], marks=pytest.mark.slow),
    ((0, ("checkpoint.huggingface", "save_settings", 2), die), [-9, 1])])
def test_when_one_rank_fails_the_other_does_not_wait(plant, codes, tiny_run):
    """And the run can be resumed from its last checkpoint and finished."""
    run = tiny_run(ASYNC_SAVE="false")
    job = run.start(WORLD, partial(act, *plant))
    assert job.wait() == codes, job.text()
    survivor = job.outputs[1 - plant[0]].read_text()
    assert "stops, because another rank has exited" in survivor and "Traceback" not in survivor
    assert ("ZeroDivisionError: planted" in job.text()) == (plant[-1] is fail)
    assert run.steps_saved() == [2]
    run.ends([0, 0])
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4, 5, 6]
    assert not list((run.folder / "checkpoints").glob("tmp-*"))


def test_the_second_of_two_jobs_in_one_folder_leaves_and_the_first_goes_on(tiny_run, capsys):
    run = tiny_run()
    first = run.start(plant=hold_in_step_2)
    first.wait_for("holding")
    before = (run.folder / "metrics.jsonl").read_text()
    assert run.train() == 5
    assert f"in use by process {first.processes[0].pid}" in capsys.readouterr().err
    assert (run.folder / "metrics.jsonl").read_text() == before
    # When it is killed, its lock is released.
    first.processes[0].kill()
    assert first.wait() == [-9]
    assert run.train() == 0


WANDB = {
    "raising in log": """
        class Run:
            def log(self, values, step): raise SystemExit('service is gone')
            def finish(self): raise OSError('service is gone')
        def init(**_): return Run()""",
    "hanging": """
        import time
        def init(**_): time.sleep(600)""",
}


@pytest.mark.parametrize("misbehaviour", WANDB)
def test_training_does_not_notice_wandb(misbehaviour, whole, tiny_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text("def Settings(**_): pass\n" + textwrap.dedent(WANDB[misbehaviour]))
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(log, "FINISH_SECONDS", 0.5)
    run = tiny_run()
    assert run.train(WANDB_ENABLED="true") == 0
    sys.modules.pop("wandb", None)
    captured = capsys.readouterr()
    assert captured.err.count("warning: wandb") == 1, captured.err
    assert_same_run(run, whole, 6)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_two_nodes_train_as_one_process_does():
    result = subprocess.run(["bash", Path(__file__).with_name("two_nodes.sh")], cwd=ROOT, text=True, capture_output=True, timeout=600,
                            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert result.returncode == 0, result.stdout + result.stderr
