"""The core without the folder extensions/ trains as the whole tree does, with the same bits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from factories import MODES, TINY, TinyRun

from config import Config

# Without the kernels of a CPU, whose attention rounds otherwise. Samples and the forms of text are those of extensions.
EXTENSIONS = ",".join(name for name in Config.model_fields["extensions"].default.split(",") if name != "cpu_kernels")
SETTINGS = {"MAX_STEPS": 3, "SAVE_EVERY": 1, "VALIDATE_EVERY": 2, "SAMPLE_EVERY": 0, "HELLASWAG_EVERY": 3, "KEEP_LAST": 3}
CASES = {"pretrain": {}, **{mode: MODES[mode] for mode in ("sft", "dpo-live", "dpo-stored", "lora-sft")}}


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A copy of the tree without extensions/."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    folder = tmp_path_factory.mktemp("core") / "tree"
    for name in names:
        if name and not name.startswith(("extensions/", "tests/", "docs/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def train_in(tree: Path, run: TinyRun, *flags: str) -> subprocess.CompletedProcess:
    """Train in a new process by the program in this tree."""
    argv = [sys.executable, str(tree / "train.py"), *run.argv(), *flags]
    run.output_dir.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PADDOCK_", "PYTHONPATH"))}
    return subprocess.run(argv, cwd=run.output_dir, env=environment | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=600)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode == "lora-sft" else pytest.mark.slow) for mode in CASES])
def test_the_core_alone_computes_the_same(mode, core, stages, tmp_path):
    settings = (stages.settings(mode) if mode != "pretrain" else TINY) | SETTINGS
    whole, alone = (TinyRun(stages.prepared, tmp_path / name, **settings) for name in ("whole", "alone"))
    if mode == "pretrain":  # resumed, too
        assert train_in(core, alone, "--stop-step=2").returncode == 0 and alone.steps_saved() == [1, 2]
    first, second = train_in(ROOT, whole, f"--extensions={EXTENSIONS}"), train_in(core, alone)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr + second.stdout + second.stderr
    assert (second.stdout + second.stderr).count("EXTENSIONS: the run continues without") == 1
    (line,) = [line for line in second.stderr.splitlines() if "Without extensions/, these names are not settings" in line]
    assert "--sample-every" in line
    for name in ("train_loss", "val_loss"):
        assert whole.column(name) == alone.column(name) != {}
    assert whole.hashes(3) == alone.hashes(3)
    assert any("hellaswag_acc" in line for line in alone.lines("metrics"))


def test_what_needs_an_extension_is_an_error_without_it(core, stages, tmp_path):
    for mode, setting, extension in (("distilled", "DISTILLATION_ENABLED=true", "distillation"), ("kto", "PREFERENCE_OBJECTIVE=kto", "preferences"),
                                     ("sft", "LEDGER_CHECKSUM=true", "checksums")):
        settings = stages.settings(mode) | ({"LEDGER_CHECKSUM": "true"} if mode == "sft" else {})
        done = train_in(core, TinyRun(stages.prepared, tmp_path / mode, **settings))
        assert done.returncode == 2 and f"{setting} needs extensions/{extension}.py, which does not exist" in done.stderr
