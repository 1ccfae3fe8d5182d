"""scripts/verify_resume.py: it reports that everything is the same if it is, and finds what differs."""

import contextlib
import random
import signal
import sys
from pathlib import Path
from typing import Optional

import pytest
from factories import PATIENCE, Job, TinyRun, main_with, start

import train
from checkpoint import store
from learn import optim
from run import build as run_build
from run import run as run_module
from scripts import verify_resume as script


class Ranks(Job):
    """Ranks that are forked in milliseconds, with the interface of the process that the script starts."""

    @property
    def returncode(self) -> Optional[int]:
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def poll(self) -> Optional[int]:
        if any(process.exitcode for process in self.processes):
            self.kill()  # as a launcher would
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        return next((code for code in super().wait(timeout) if code), 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    terminate = kill


@pytest.fixture
def plants(monkeypatch) -> list:
    """The script starts ranks of ours; each rank calls the last of these first."""
    plants = [None]

    @contextlib.contextmanager
    def started(run):
        run.output.touch()
        job = start(main_with, run.flags, plants[-1], world_size=run.ranks, folder=run.folder.parent / "outputs")
        ranks = Ranks(job.processes, job.outputs)
        try:
            yield ranks
        finally:
            ranks.kill()
            with open(run.output, "a") as output:
                output.write(job.text())

    monkeypatch.setattr(script, "started", started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return plants


@pytest.fixture
def verify(plants, prepared, tmp_path, monkeypatch, capsys):
    """Run the script on a tiny run; returns its exit code, its errors and output, and what is left in OUTPUT_DIR."""
    def run(*flags: str, plant=None, **settings) -> tuple[int, str, list[Path]]:
        tiny = TinyRun(prepared, tmp_path / "runs", **settings)
        monkeypatch.setattr(sys, "argv", ["verify_resume.py", *flags, *tiny.argv()])
        plants.append(plant)
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


def forget_optimizer() -> None:
    optim.Optimizer.load_state_tensors = lambda self, tensors: None


def shift_rows() -> None:
    original = run_module.load_steps
    run_module.load_steps = lambda rows, order, device, count, first, ahead: original(rows, order, device, count, first + (first > 0), ahead)


def begin_anew() -> None:
    store.newest_verified = lambda *_, **__: (None, [])


def forget_progress() -> None:
    original = run_build.restore

    def restore(*arguments):
        progress = original(*arguments)
        progress.tokens_seen = 0
        return progress

    run_build.restore = restore


def draw_random_numbers() -> None:
    train.learning_rate = lambda *_: 0.01 * (1 + random.SystemRandom().random() * 1e-4)


@pytest.mark.parametrize(("plant", "differing", "words"), [
    pytest.param(forget_optimizer, {"weights", "optimizer state", "losses and norms"}, "two uninterrupted runs are the same",
                 marks=pytest.mark.slow),
    pytest.param(shift_rows, {"weights", "optimizer state", "losses and norms"}, "two uninterrupted runs are the same",
                 marks=pytest.mark.slow),
    pytest.param(begin_anew, {"resumed"}, "two uninterrupted runs are the same", marks=pytest.mark.slow),
    pytest.param(forget_progress, {"metrics", "progress"}, "two uninterrupted runs are the same", marks=pytest.mark.slow),
    pytest.param(draw_random_numbers, {"weights", "straight again"}, "two uninterrupted runs differ too", marks=pytest.mark.slow)])
def test_state_that_is_not_restored_is_found(plant, differing, words, verify):
    code, text, left = verify("--steps", "12", plant=plant)
    lines = table(text)
    assert code == 1 and differing <= {name for name, line in lines.items() if line.startswith("DIFFERS")}, text
    assert words in lines["straight again"] and "All runs are the same" not in text
    assert len(left) == 1 and str(left[0]) in text and (left[0] / "killed" / "checkpoints").is_dir()
