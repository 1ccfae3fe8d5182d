"""docs/starts.md: what each combination of the settings of a start does, found by starting toy runs.

    python tests/system/resume/test_start_table.py --write     run all combinations, and write the table

The stage is sft. Each start trains a toy run in this process, which notes where its first step begins and with which weights.
"""

import argparse
import contextlib
import io
import itertools
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = map(str, (ROOT, ROOT / "tests"))

# ruff: noqa: E402
import pytest
from factories import LORA, UNMEASURED, Stages, TinyRun, prepare, prepare_stages
from safetensors.torch import load_file
from tqdm import tqdm

import train

PAGE = ROOT / "docs" / "starts.md"
OWN_STEP, OTHER_STEP, MAX_STEPS, START_STEP = 2, 3, 5, 1
SETTINGS = ("PRETRAIN_CHECKPOINT", "INSTRUCT_CHECKPOINT", "DPO_CHECKPOINT")
NAMED = ("this run", "another sft run", "its pretrained start", "a model folder", "adapters", "adapters, with LoRA")
RESUME = ("auto", "never", "its own checkpoint", "another run's checkpoint")
FLAGS = {"no other": {}, "`RESET_OPTIMIZER`": {"RESET_OPTIMIZER": "true"}, f"`START_STEP={START_STEP}`": {"START_STEP": START_STEP},
         "both": {"RESET_OPTIMIZER": "true", "START_STEP": START_STEP}}
IN_ERRORS = ("RUN_NAME", "RESUME", "RESET_OPTIMIZER", "START_STEP", "MAX_STEPS", "LORA_ENABLED", *SETTINGS)
REMEDY = "if it is meant so: python tests/system/resume/test_start_table.py --write"
INTRODUCTION = f"""# How a run starts

This page is for those who combine `RUN_NAME`, `RESUME`, `*_CHECKPOINT` and `RESET_OPTIMIZER`, and ask what a start will do.

All combinations of the settings of a start, with `TRAINING_STAGE=sft` and `MAX_STEPS={MAX_STEPS}`. The existing run has a checkpoint of step {OWN_STEP}, the other sft run
one of step {OTHER_STEP}. Both started from the same pretrained model, "its start". An empty cell equals the first cell of outcomes. A number is the exit code of a
refused start, followed by the settings that the error names.
"""


class Start(NamedTuple):
    """A combination, apart from RESET_OPTIMIZER and START_STEP."""

    run_name: str  # new | existing
    resume: str  # of RESUME
    named: str  # of NAMED; empty: no checkpoint is named
    setting: str  # of SETTINGS, that names it


def starts() -> Iterator[Start]:
    for run_name, resume in itertools.product(("new", "existing"), RESUME):
        if run_name == "existing" or resume != "its own checkpoint":
            yield Start(run_name, resume, "", "")
            for named, setting in itertools.product(NAMED, SETTINGS):
                yield Start(run_name, resume, named, setting)


class Table:
    """The runs and models that starts may name, and what each start does."""

    def __init__(self, stages: Stages, folder: Path):
        self.stages, self.folder, self.begun = stages, folder, None
        self.existing = self.run("existing", MAX_STEPS=MAX_STEPS, STOP_STEP=OWN_STEP).trained()
        self.other = self.run("other", MAX_STEPS=MAX_STEPS, STOP_STEP=OTHER_STEP, LEARNING_RATE=0.02).trained()
        self.adapters = self.run("adapters", **LORA, MAX_STEPS=1).trained()
        self.model = folder / "model"
        shutil.copytree(stages.teacher, self.model, ignore=shutil.ignore_patterns("MANIFEST.json", "trainer_state.json", "optimizer.*"))
        self.paths = {"this run": self.existing.checkpoint(OWN_STEP), "another sft run": self.other.checkpoint(OTHER_STEP),
                      "its pretrained start": stages.base, "a model folder": self.model}
        self.embeddings = {name: self.embedding(path) for name, path in self.paths.items()}

    def run(self, name: str, **changes) -> TinyRun:
        settings = {**UNMEASURED, "SAVE_EVERY": 0, "EXTENSIONS": "evaluate", "RUN_NAME": name}
        return self.stages.run("sft", self.folder / "runs", **settings | changes)

    @staticmethod
    def embedding(path: Path):
        return load_file(path / "model.safetensors")["model.embed_tokens.weight"]

    def note(self, run) -> None:
        """Note where the first step begins: which weights, which step, and whether the optimizer has a state."""
        weight = run.model.tok_embeddings.weight.detach()
        same = [name for name, rows in self.embeddings.items() if rows.equal(weight[:len(rows)])]
        weights = same[0] if same else ""
        if any("lora" in name and name.endswith("B") and parameter.any() for name, parameter in run.model.named_parameters()):
            weights = "adapters"
        self.begun = weights, run.progress.step, bool(run.optimizer.state_tensors()), run.finished

    def outcome(self, start: Start, flags: dict) -> str:
        """What a start does, in a few words; the runs stay as they were."""
        output = Path(tempfile.mkdtemp(dir=self.folder))
        if start.run_name == "existing":
            shutil.copytree(self.existing.folder, output / "existing")
        own = output / start.run_name / "checkpoints" / self.existing.checkpoint(OWN_STEP).name
        resume = {"its own checkpoint": own, "another run's checkpoint": self.other.checkpoint(OTHER_STEP)}
        changes = {"RUN_NAME": start.run_name, "OUTPUT_DIR": output, "MAX_STEPS": MAX_STEPS, "RESUME": resume.get(start.resume, start.resume),
                   "PRETRAIN_CHECKPOINT": "none", **flags}
        if start.named:
            adapters = self.adapters.checkpoint(1)
            named = {"this run": start.run_name, "adapters": adapters, "adapters, with LoRA": adapters}
            changes[start.setting] = named.get(start.named) or self.paths[start.named]
        if start.named == "adapters, with LoRA":
            changes |= LORA
        self.begun, original, errors = None, train.train_loop, io.StringIO()

        def train_loop(run, reducer):
            self.note(run)
            return original(run, reducer)

        train.train_loop = train_loop
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                code = self.run("", **changes).train()
        finally:
            train.train_loop = original
            shutil.rmtree(output)
        return self.in_words(code, errors.getvalue(), start.setting)

    def in_words(self, code: int, errors: str, setting: str) -> str:
        """The outcome of a start that ended with this exit code, and named a checkpoint by this setting."""
        if code:
            names = [name for name in IN_ERRORS if re.search(rf"\b{name}\b", errors)]
            names = ["`*_CHECKPOINT`" if name == setting else name for name in names]
            return f"{code}: {', '.join(names) or 'no setting'}"
        weights, step, has_state, is_finished = self.begun
        shown = {"this run": "", "another sft run": " the other", "its pretrained start": " its start", "a model folder": " the model",
                 "adapters": " the adapters", "": ""}[weights]
        saved = {"this run": OWN_STEP, "another sft run": OTHER_STEP}.get(weights, 1)
        if has_state:
            words = f"continues{shown} after {saved}" + f", as step {step}" * (step != saved)
        else:
            words = (f"starts from{shown or ' itself'}" if weights else "new") + f" as step {step}" * (step > 0)
        return words + ", nothing to do" * is_finished

    def outcomes(self, start: Start) -> tuple[str, ...]:
        return tuple(self.outcome(start, flags) for flags in FLAGS.values())


def page(rows: dict[Start, tuple[str, ...]]) -> str:
    """The page; starts with equal outcomes share a row, and a cell that equals the first of its row is empty."""
    settings, named, resumes = defaultdict(list), defaultdict(list), defaultdict(list)
    for start, outcomes in rows.items():
        settings[start.run_name, start.resume, outcomes, start.named].append(start.setting)
    for (*key, name), by in settings.items():
        named[tuple(key)].append((name or "nothing") + (f" ({', '.join(by)})" if 0 < len([*filter(None, by)]) < len(SETTINGS) else ""))
    for (run_name, resume, outcomes), names in named.items():
        resumes[run_name, tuple(names), outcomes].append(resume)
    lines = [INTRODUCTION, f"| `RUN_NAME` | `RESUME` | `*_CHECKPOINT` names | {' | '.join(FLAGS)} |", f"|{'---|' * (3 + len(FLAGS))}"]
    for (run_name, names, (first, *others)), each in resumes.items():
        cells = [run_name, "; ".join(each), "; ".join(names), first, *("" if other == first else other for other in others)]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def table(stages, tmp_path_factory) -> Table:
    return Table(stages, tmp_path_factory.mktemp("starts"))


@pytest.mark.slow
def test_the_page_says_what_each_start_does(table):
    assert page({start: table.outcomes(start) for start in starts()}) == PAGE.read_text(encoding="utf-8"), REMEDY


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).add_argument("--write", action="store_true", required=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stages").mkdir()
        table = Table(prepare_stages(prepare(folder / "prepared"), folder / "stages"), folder)
        PAGE.write_text(page({start: table.outcomes(start) for start in tqdm([*starts()])}), encoding="utf-8")


if __name__ == "__main__":
    main()
