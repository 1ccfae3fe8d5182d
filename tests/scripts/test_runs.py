"""scripts/runs.py lists what there is, and deletes nothing that was not agreed to or that somebody needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import python
from factories import TinyRun

from scripts import runs as script


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory) -> Path:
    """A run with several checkpoints."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("finished"), RUN_NAME="first", MAX_STEPS=4, SAVE_EVERY=1, KEEP_LAST=0).trained()
    return run.folder


@pytest.fixture
def runs(finished, tmp_path) -> Path:
    """OUTPUT_DIR with the run, one that failed before its first checkpoint, and folders that are no runs."""
    shutil.copytree(finished, tmp_path / "runs" / "first")
    failed = tmp_path / "runs" / "failed"
    shutil.copytree(finished, failed, ignore=shutil.ignore_patterns("step-0*4", "step-0*3", "step-0*2", "step-0*1", "metrics.jsonl"))
    shutil.copytree(finished / "configs", failed / "configs", dirs_exist_ok=True)
    with open(failed / "events.jsonl") as file:
        start = file.readline()
    (failed / "events.jsonl").write_text(start)
    (tmp_path / "runs" / "launch").mkdir()
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name != "run.lock"}


def listed(runs, capsys, monkeypatch, *flags) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["runs.py", "--output-dir", str(runs), *flags])
    script.main()
    return capsys.readouterr().out.splitlines()


def test_a_line_has_stage_step_state_loss_and_age(runs, capsys, monkeypatch):
    header, *lines = listed(runs, capsys, monkeypatch)
    assert header.split() == ["run", "stage", "step", "state", "loss", "age", "size"]
    by_name = {line.split()[0]: line.split() for line in lines}
    assert by_name.keys() == {"first", "failed"}
    last = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()][-1]
    assert by_name["first"][1:5] == ["pretrain", "4/4", "finished", f"{last['val_loss']:.3f}"]
    assert by_name["failed"][1:4] == ["pretrain", "0/4", "failed"]
    shutil.rmtree(runs)
    assert "No runs" in listed(runs, capsys, monkeypatch)[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_name_takes_a_second_line_only_on_a_terminal(terminal, runs, monkeypatch):
    (runs / "first").rename(runs / f"first-{'x' * 60}")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    assert len(script.table(script.read_runs(runs))) == 3 * (1 + terminal)


def test_a_run_that_its_launcher_may_start_again_is_running(runs):
    def state() -> str:
        return next(run.state for run in script.read_runs(runs) if run.name == "failed")

    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "launch.py"])
    path = runs / "failed" / "events.jsonl"
    start = json.loads(path.read_text())
    path.write_text("".join(json.dumps(event) + "\n" for event in (
        {**start, "launcher": launcher.pid}, {"time": start["time"], "step": 0, "event": "end", "reason": "rank 1 was killed"})))
    assert state() == "running" and "failed" not in proposed(runs)
    launcher.kill()
    launcher.wait()
    assert state() == "failed"


def proposed(runs) -> set[str]:
    return {str(item.path.relative_to(runs)) for item in script.candidates(script.read_runs(runs))}


def test_what_is_proposed(runs):
    kept = {json.loads((path / "MANIFEST.json").read_text())["val_loss"]: path.name
            for path in (runs / "first" / "checkpoints").iterdir()}
    best = kept[min(loss for loss in kept if loss is not None)]
    worse = {f"first/checkpoints/step-{step:08d}" for step in (1, 2, 3, 4)} - {"first/checkpoints/step-00000004", f"first/checkpoints/{best}"}
    (runs / "first" / "before-20260101-000000").mkdir()
    (runs / "first" / "checkpoints" / "tmp-5-1").mkdir()
    assert proposed(runs) == worse | {"failed", "first/before-20260101-000000", "first/checkpoints/tmp-5-1"} and worse
    (runs / "first" / "checkpoints" / "step-00000002" / "MANIFEST.json").write_text("damaged")
    assert proposed(runs) == {"failed", "first/before-20260101-000000", "first/checkpoints/tmp-5-1"}, "which is best is not known"


def test_a_run_that_runs_and_one_that_another_starts_from_are_kept_whole(runs):
    settings = json.loads((runs / "failed" / "config.json").read_text())
    (runs / "failed" / "config.json").write_text(json.dumps({**settings, "PRETRAIN_CHECKPOINT": "runs/first"}))
    assert proposed(runs) == {"failed"}
    with script.FileLock(runs / "failed" / "run.lock") as lock:
        assert lock.take() == ""
        assert proposed(runs) == set()


def clean(runs: Path, answer: str) -> str:
    """Run --clean on a terminal and type an answer."""
    return python("scripts/runs.py", "--clean", "--output-dir", runs, stdin=f"{answer}\n", terminal=True, code=0).stdout


@pytest.mark.parametrize("answer", ["y", "\x04"])
def test_nothing_is_deleted_unless_yes_is_typed(answer, runs):
    before = files(runs)
    output = clean(runs, answer)
    assert "Nothing was deleted" in output and str(runs / "failed") in output and files(runs) == before


def test_after_yes_what_was_listed_is_deleted_and_nothing_else(runs):
    gone = {runs / name for name in proposed(runs)}
    expected = {path for path in files(runs) if not any(path == place or path.is_relative_to(place) for place in gone)}
    output = clean(runs, "yes")
    assert f"Deleted {len(gone)} of {len(gone)}." in output and files(runs) == expected
    assert "Nothing to delete." in clean(runs, "")
