"""A copy of a checkpoint is verified anywhere: each kind of damage is named, and what is intact passes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, python
from factories import flip_bit

SCRIPT = ROOT / "scripts" / "verify_checkpoint.py"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """A checkpoint alone, as on another machine."""
    return Path(shutil.copytree(whole.checkpoint(6), tmp_path / "copy"))


def verify(*arguments, code: int = 0) -> str:
    done = python(SCRIPT, *arguments, code=code)
    return done.stdout + done.stderr


def test_a_run_is_verified_with_all_of_its_checkpoints_and_its_ledger(whole, tmp_path):
    run = whole.copy(tmp_path / "runs")
    text = verify(run.folder)
    assert text.count("is intact.") == 3 == text.count("ledger.jsonl of the run, which matches the model card")
    assert f"step 6, validation loss {run.metrics()[-1]['val_loss']:.3f}" in text
    ledger = run.folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines[:4], lines[4].replace("true", "false"), *lines[5:]]))
    text = verify(run.folder, code=5)
    assert text.count("is intact.") == 2 and text.count("ledger.jsonl of the run, which differs from the model card") == 1
    ledger.write_text("".join(lines[:2]))  # a copy of the run's beginning
    assert "ledger.jsonl of the run, which differs" in verify(run.checkpoint(6), code=5)


def test_a_copy_needs_no_run_and_nothing_but_the_standard_library(copy):
    (copy / "README.md").write_text("edited")
    (copy / ".gitattributes").write_text("of the hub")
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, copy], capture_output=True, text=True)  # without site-packages
    assert done.returncode == 0 and f"{copy} is intact." in done.stdout and "ledger" not in done.stdout, done


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("model.safetensors", flip_bit, "is damaged: its SHA-256 has changed"), ("config.json", Path.unlink, "is missing"),
    ("tokenizer.json", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of")])
def test_damage_is_an_error_that_names_the_file(copy, name, damage, message):
    damage(copy / name)
    text = verify(copy, "--model-only", code=5)
    assert [line for line in text.splitlines() if "BAD  " in line and name in line and message in line]
    assert text.count("BAD  ") == 1 and "The model's files are intact" not in text


def test_files_that_only_resuming_needs_may_be_missing(copy):
    (copy / "optimizer.safetensors").unlink()
    assert "The model's files are intact, but files needed to resume are not" in verify(copy, code=5)
    text = verify(copy, "--model-only")
    assert "optimizer" not in text and f"{copy} is intact." in text
