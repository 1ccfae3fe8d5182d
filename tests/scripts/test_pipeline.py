"""pipeline.py: stages start from the right checkpoints, and a failure stops those that have not started."""

import pytest

from common.errors import PaddockError
from scripts import pipeline


@pytest.fixture(params=(1, 2), ids=("one at a time", "two at a time"))
def runs(request, tmp_path, monkeypatch):
    """Replace training by a folder for the checkpoint; {name: flags} of the runs so far, and the one that fails."""
    found = {"fails": ""}

    def run_python(name, script, *flags, ranks=1):
        found[name] = [str(flag) for flag in flags]
        if name == found["fails"]:
            raise PaddockError(f"{name} failed")
        (tmp_path / name / "checkpoints" / "step-1").mkdir(parents=True)

    monkeypatch.setattr(pipeline, "RUNS", tmp_path)
    monkeypatch.setattr(pipeline, "run_python", run_python)
    monkeypatch.setattr(pipeline, "curve", lambda name, metric: [(0, 1.0)])
    monkeypatch.setattr(pipeline.os, "cpu_count", lambda: request.param)
    return found


def test_stages_start_from_the_checkpoints_of_others(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "exact_answers", lambda folder: pytest.fail("trained"))
    with pytest.raises(pytest.fail.Exception):
        pipeline.run_stages(pipeline.Pipeline(1, []))
    starts = {"dpo": "sft", "lora": "pretrain", "grpo": "short-sft", "on-policy": "sft", "distilled-2": "pretrain"}
    for name, start in starts.items():
        assert str(tmp_path / start / "checkpoints" / "step-1") in runs[name], name


def test_no_stage_starts_after_one_has_failed(runs):
    runs["fails"] = "sft"
    with pytest.raises(PaddockError, match="^sft failed$"):
        pipeline.run_stages(pipeline.Pipeline(1, []))
    assert "sft" in runs and not runs.keys() & {"dpo", "distilled-3"}
