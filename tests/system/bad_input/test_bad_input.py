"""Any bad input ends in a documented exit code and one line that says what is wrong and where, and leaves nothing behind.

Each case of bad_input_cases.py spoils a copy of one small folder in which every command works, and runs one command there.
Commands run in this process, so that an unexpected exception fails the test.
"""

import contextlib
import ctypes
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from bad_input_cases import CASES, IMPORT, MERGE, META, PREPARE, Case, env, make_farm

ROOT = Path(__file__).resolve().parents[3]
# What a refused command may leave behind: empty folders, stored hashes, locks, and a run folder without a checkpoint.
HARMLESS = re.compile(r"out(/\.known-files\.json|/\.\w+\.lock)?|\w+/\.verified\.json|"
                      r"runs(/run(/(config\.json|run\.lock|log.*|\w+\.jsonl|checkpoints))?)?")
# Somewhere a last line says what is expected, or what to do.
ADVICE = re.compile(r"; |[Ss]et |must|expected|should|needs|requires|try |did you mean|--help|invalid|required|not set|both|goes with|works with|"
                    r"not of the form|a second time|exceed|unable|valid|cannot be read|is no ")


@pytest.fixture(scope="module")
def farm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("farm")
    make_farm(folder)
    return folder


@pytest.fixture
def place(farm, tmp_path, monkeypatch, no_hang) -> Path:
    """A copy of the farm as the working folder, without access to the hub."""
    shutil.copytree(farm, tmp_path / "farm")
    monkeypatch.chdir(tmp_path / "farm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "farm"


class Outcome(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        return (self.errors.strip().splitlines() or [""])[-1]


def run_here(command: str, capsys) -> Outcome:
    """Run `scripts/NAME.py ARGUMENTS`, also as a message advises it: with a Python and the whole path."""
    script, *argv = words[1:] if Path((words := shlex.split(command))[0]).name.startswith("python") else words
    before, sys.argv = sys.argv, [script, *argv]
    capsys.readouterr()
    code = 0
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    return Outcome(code, *capsys.readouterr())


def entries() -> set[str]:
    return {str(path) for path in Path(".").rglob("*")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_ends_in_one_line_that_names_what_and_where(case: Case, place, capsys):
    case.spoil()
    before = entries()
    outcome = run_here(case.command, capsys)
    assert outcome.code == case.code, outcome
    assert re.search(case.words, outcome.last_line) and ADVICE.search(outcome.last_line), outcome.last_line
    assert "Traceback" not in outcome.errors and len(outcome.last_line) < 2000
    assert sorted(path for path in entries() - before if not HARMLESS.fullmatch(path)) == []


@pytest.mark.parametrize("command", [
    "train.py", "train.py --check", "train.py --training-stage sft --pretrain-checkpoint model", IMPORT, META, MERGE,
    "scripts/generate.py model --max-new-tokens 2", f"scripts/load_instruct_dataset.py --source x.jsonl {PREPARE}",
    f"scripts/load_dpo_dataset.py --source y.jsonl {PREPARE}",
    f"scripts/load_pretrain_dataset.py --source y.jsonl --column prompt {PREPARE}",
    "scripts/load_hellaswag_dataset.py --source items.jsonl --output h.jsonl",
    "scripts/train_tokenizer.py y.jsonl --column prompt --vocab-size 257 --output t.model"])
def test_the_folder_was_valid_before_it_was_damaged(command, place, capsys):
    """Otherwise the other tests would prove nothing."""
    assert run_here(command, capsys).code == 0


@contextlib.contextmanager
def no_right_to_read_everything() -> Iterator[None]:
    """Apply the permissions of files to root too. Its own folders stay readable, so a clone may be anywhere."""
    if os.geteuid():
        yield
        return
    libc, held = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3; applies to this thread, and those that it starts
    assert libc.capget(header, held) == 0
    fewer = type(held)(*held)
    fewer[0] &= ~0b110  # without the effective CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


@pytest.mark.parametrize("command, code, secret", [
    ("train.py", 3, "set/train-00001.bin"), ("train.py", 3, "set"), ("train.py", 3, "tokenizer.model"), ("train.py", 2, ".env"),
    ("train.py --pretrain-checkpoint model", 5, "model/config.json"), ("scripts/generate.py model --max-new-tokens 1", 5, "model"),
    (f"scripts/load_instruct_dataset.py --source x.jsonl {PREPARE}", 3, "x.jsonl")])
def test_a_file_without_read_permission_is_an_error_that_names_it(command, code, secret, place, capsys):
    mode = os.stat(secret).st_mode
    os.chmod(secret, 0)
    with no_right_to_read_everything():
        outcome = run_here(command, capsys)
    os.chmod(secret, mode)
    assert outcome.code == code and secret in outcome.errors and "ermission" in outcome.errors, outcome


@pytest.mark.parametrize("command", [["-X", "importtime", "train.py"], ["scripts/launch.py", "--nproc-per-node", "2", "--"]])
def test_all_errors_in_the_settings_are_printed_together_and_once(command, place):
    """Also by the launcher, and before torch is imported, which takes seconds."""
    env(MAX_STEPS="five", LERNING_RATE=1, N_HEADS=5, RUN_NAME="../x")()
    done = subprocess.run([sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in command),
                           "--env-file", str(place / ".env"), "--fsdp", "full_shard", "--chekc"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    messages = ["6 errors in the settings:", "MAX_STEPS=five: expected a whole number", "did you mean LEARNING_RATE?",
            "N_KV_HEADS=2 must divide N_HEADS=5", "RUN_NAME='../x' must be", "unknown flag --chekc; did you mean --check?"]
    assert [done.stderr.count(words) for words in messages] == [1] * len(messages), done.stderr
    if "importtime" in command:
        assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
