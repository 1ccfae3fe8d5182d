"""scripts/verify_resume.py: it reports that everything is the same if it is, and finds what differs."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from factories import TinyRun

import dataloaders
from learn import optim
from run import build as run_build
from scripts import verify_resume as script


@pytest.fixture
def verify(prepared, tmp_path, monkeypatch, capsys):
    """Run the script on a tiny run; returns its exit code, its errors and output, and what is left in OUTPUT_DIR. Each run calls `plant` first."""
    def run(*flags: str, plant=None, **settings) -> tuple[int, str, list[Path]]:
        tiny = TinyRun(prepared, tmp_path / "runs", **settings)
        monkeypatch.setattr(sys, "argv", ["verify_resume.py", *flags, *tiny.argv()])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        if plant:
            (tmp_path / "sitecustomize.py").write_text(f"import test_verify_resume\ntest_verify_resume.{plant.__name__}()\n")
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
        code = 0
        try:
            script.main()
        except SystemExit as exit:
            code = exit.code
        return code, "".join(reversed(capsys.readouterr())), [*tiny.output_dir.iterdir()] if tiny.output_dir.exists() else []

    return run


def table(text: str) -> dict[str, str]:
    """The text of each line of the table, by its name."""
    return {line[:20].strip(): line[20:] for line in text.splitlines() if line.startswith("  ")}


ALL = ("resumed", "weights", "optimizer state", "rows", "losses and norms", "metrics", "progress")


@pytest.mark.parametrize(("ranks", "settings"), [(1, {"HELLASWAG_EVERY": 0, "SAMPLE_EVERY": 0}), pytest.param(2, {"OPTIMIZER": "muon"}, marks=pytest.mark.slow)])
def test_an_exact_resume_is_reported_and_nothing_is_left(ranks, settings, verify):
    code, text, left = verify("--nproc-per-node", str(ranks), "--steps", "8", **settings)
    lines = table(text)
    assert code == 0 and all(lines[name].startswith("ok: ") for name in ALL), text
    assert lines["hardware"].startswith("CPU, ") and lines["hardware"].endswith("; DETERMINISTIC=false")
    assert "bit-identical" in lines["weights"] and "8 lines" in lines["rows"] and "9 lines" in lines["metrics"]
    assert "kill -9 of rank 0 after step" in lines["killed"] and lines["straight"].startswith("8 steps")
    assert text.splitlines()[-1] == "All runs are the same." and left == []


def shift_rows() -> None:
    original = dataloaders.load_steps
    dataloaders.load_steps = lambda rows, order, device, count, first, **ahead: original(rows, order, device, count, first + (first > 0), **ahead)


def forget_progress() -> None:
    original = run_build.restore

    def restore(*arguments):
        progress = original(*arguments)
        progress.tokens_seen = 0
        return progress

    run_build.restore = restore


def draw_random_numbers() -> None:
    optim.learning_rate = lambda *_: 0.01 * (1 + random.SystemRandom().random() * 1e-4)


SAME = "two uninterrupted runs are the same"


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "differing", "words"), [
    (shift_rows, {"weights", "optimizer state", "losses and norms"}, SAME), (forget_progress, {"metrics", "progress"}, SAME),
    (draw_random_numbers, {"weights", "straight again"}, "two uninterrupted runs differ too")])
def test_state_that_is_not_restored_is_found(plant, differing, words, verify):
    code, text, left = verify("--steps", "12", plant=plant)
    lines = table(text)
    assert code == 1 and differing <= {name for name, line in lines.items() if line.startswith("DIFFERS")}, text
    assert words in lines["straight again"] and "All runs are the same" not in text
    assert len(left) == 1 and str(left[0]) in text and (left[0] / "killed" / "checkpoints").is_dir()
