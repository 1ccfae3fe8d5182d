"""Sweeps: every combination is trained, an interrupted sweep continues, and a run that fails does not end it."""

import os
import re
import signal
from argparse import Namespace
from pathlib import Path

from commands import Command, python
from factories import TinyRun

import train
from checkpoint.store import locate
from scripts.sweep import list_trials
from settings.load import load_config


def test_a_sweep_is_stopped_continued_and_compared(prepared, whole, tmp_path):
    run = TinyRun(prepared, tmp_path / "runs")
    sweep = ("scripts/sweep.py", "--vary", "learning_rate=0.01,1e15", "--name", "rates", *run.argv())
    best = tmp_path / "runs" / "rates" / "learning_rate-0.01.seed-1337"
    with Command(run, *sweep) as first:
        first.wait_for((best / "metrics.jsonl").exists)
        os.kill(first.pid, signal.SIGINT)
        assert first.wait() == 143 and "Run the same command again" in first.text()
    second = python(*sweep)
    failed = second.stderr.splitlines()[-1]
    assert second.returncode == 1 and "1 of 2 runs failed" in failed and "(exit code 4)" in failed
    assert (best / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes(), "the seed and rate of `whole`"
    assert re.search(rf"^{best.name} +{whole.metrics()[-1]['val_loss']:.4f}$", second.stdout, re.MULTILINE)
    assert (best.parent / "report.html").is_file()


def test_mistakes_are_found_before_the_first_run(prepared, tmp_path):
    run = TinyRun(prepared, tmp_path / "runs")
    for flags, reason in ((["--vary", "learning_rate=x,0.1"], "LEARNING_RATE=x"), (["--vary", "lerning_rate=1"], "--learning-rate"),
                          (["--vary", "learning_rate"], "--vary LEARNING_RATE"), ([], "nothing varies")):
        done = python("scripts/sweep.py", *flags, *run.argv())
        assert done.returncode == 2 and reason in done.stderr
    assert not run.output_dir.exists()


def test_a_start_is_named_as_in_a_single_run_and_a_missing_one_is_reported(prepared, whole, tmp_path):
    run = whole.copy(tmp_path / "runs")
    _, trials = list_trials(Namespace(vary=[("max_steps", ["1"])], seeds=2, name="seeds"),
                            run.argv(PRETRAIN_CHECKPOINT=run.folder.name))
    for trial in trials:
        config = load_config(trial.flags).config
        assert locate(config.pretrain_checkpoint, Path(config.output_dir) / config.run_name) == run.checkpoint(whole.steps_saved()[-1])
    _, trials = list_trials(Namespace(vary=[], seeds=2, name="missing"), run.argv(PRETRAIN_CHECKPOINT="missing"))
    assert [train.main(trial.flags) for trial in trials] == [5, 5]
