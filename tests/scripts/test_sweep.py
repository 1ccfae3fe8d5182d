"""Sweeps train every combination, and continue after an interruption; the stages of a pipeline follow each other."""

import os
import re
import signal

import pytest
from commands import Command, python
from factories import TinyRun

from extensions.report.numbers import number_text
from scripts import pipeline


@pytest.mark.slow
def test_a_sweep_is_stopped_continued_and_compared(prepared, whole, tmp_path):
    run = TinyRun(prepared, tmp_path / "runs")
    flags = [flag for flag in run.argv() if not flag.startswith("--run-name")]
    sweep = ("scripts/sweep.py", "--vary", "learning_rate=0.01,1e15", "--name", "rates", *flags)
    best = tmp_path / "runs" / "rates" / "learning_rate-0.01.seed-1337"
    with Command(run, *sweep) as first:
        first.wait_for((best / "metrics.jsonl").exists)
        os.kill(first.pid, signal.SIGINT)
        assert first.wait() == 143 and "Run the same command again" in first.text()
    second = python(*sweep)
    failed = second.stderr.splitlines()[-1]
    assert second.returncode == 1 and "1 of 2 runs failed" in failed and "learning_rate-1e15.seed-1337 (exit code 4)" in failed
    assert (best / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes(), "the seed and rate of `whole`"
    last = whole.metrics()[-1]
    assert re.search(rf"^{best.name} +{number_text(last['val_loss'], last['val_loss_stderr'])}$", second.stdout, re.MULTILINE)
    assert (best.parent / "report.html").is_file()


def test_stages_start_from_the_checkpoints_of_others(tmp_path, monkeypatch):
    """Training is replaced by a folder for the checkpoint."""
    flags_of = {}

    def run_python(name, script, *flags, ranks=1):
        flags_of[name] = [*map(str, flags)]
        (tmp_path / name / "checkpoints" / "step-1").mkdir(parents=True)

    monkeypatch.setattr(pipeline, "RUNS", tmp_path)
    monkeypatch.setattr(pipeline, "run_python", run_python)
    monkeypatch.setattr(pipeline, "curve", lambda name, metric: [(0, 1.0)])
    monkeypatch.setattr(pipeline, "exact_answers", lambda folder: pytest.fail("trained"))
    with pytest.raises(pytest.fail.Exception):
        pipeline.run_stages(pipeline.Pipeline(1, []))
    starts = {"dpo": "sft", "lora": "pretrain", "grpo": "short-sft", "on-policy": "sft", "distilled-2": "pretrain"}
    for name, start in starts.items():
        assert str(tmp_path / start / "checkpoints" / "step-1") in flags_of[name], name
