"""Without the optional packages everything else works, and the features that need them say what to install."""

import json
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from factories import TINY, UNMEASURED, TinyRun, argv_of
from safetensors.torch import save_file

BLOCKED = ("wandb", "datasets", "trl", "transformers", "peft", "bitsandbytes", "matplotlib", "tensorboard", "accelerate",
           "pandas", "pyarrow", "huggingface_hub", "starlette", "uvicorn", "rouge_score", "sacrebleu", "lm_eval")


def block() -> None:
    assert not {*BLOCKED} & {*sys.modules}, "a module that was imported before uses it"
    find = PathFinder.find_spec
    PathFinder.find_spec = staticmethod(lambda name, *rest: None if name.partition(".")[0] in BLOCKED else find(name, *rest))


@pytest.fixture(scope="module")
def machine() -> Callable[..., str]:
    """A function that runs a command without these packages, and returns its output."""
    def run(*command, code: int = 0) -> str:
        done = python(*command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, prepare=block)
        output = done.stderr + done.stdout
        assert done.returncode == code and "Traceback" not in output, output
        return output

    return run


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder with a text, chats and pairs."""
    folder, chat = tmp_path_factory.mktemp("sources"), {"role": "user", "content": "cat?"}
    answers = [[chat, {"role": "assistant", "content": word}] for word in ("hen", "ox")]
    (folder / "text.txt").write_text("The cat saw the dog.\n\nThe hen fed the fox.\n\n" * 100)
    (folder / "chats.jsonl").write_text((json.dumps({"messages": answers[0]}) + "\n") * 200)
    (folder / "pairs.jsonl").write_text((json.dumps({"chosen": answers[0], "rejected": answers[1]}) + "\n") * 200)
    return folder


class Project:
    """A user's project on that machine: a tokenizer, prepared data and a first run."""

    def __init__(self, machine, sources: Path, folder: Path):
        self.machine, self.sources, self.folder = machine, sources, folder
        machine("scripts/train_tokenizer.py", sources / "text.txt", "--vocab-size", 256, "--output", folder / "tokenizer.model")
        self.settings = {**TINY, **UNMEASURED, "TOKENIZER_PATH": folder / "tokenizer.model", "OUTPUT_DIR": folder, "MAX_STEPS": 2,
                         "MAX_SEQ_LEN": 64, "TOTAL_BATCH_SIZE": 512, "SAMPLE_EVERY": 2}
        self.prepare("pretrain", "text.txt", "--documents", "blank")
        self.train("first")

    def prepare(self, script: str, file: str, *flags: str) -> None:
        output = self.machine(f"scripts/load_{script}_dataset.py", "--source", self.sources / file, *flags,
                            "--output", self.folder / script, "--tokenizer-path", self.settings["TOKENIZER_PATH"],
                            "--validation-fraction", 0.1)
        self.settings |= [re.search(r"^(\w+_PATH)=(.+)$", output, re.MULTILINE).groups()]

    def train(self, name: str, **changes) -> str:
        return self.machine("train.py", *argv_of({**self.settings, "RUN_NAME": name, **changes}))

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"step-{step:08d}"


@pytest.fixture
def project(machine, sources, tmp_path) -> Project:
    return Project(machine, sources, tmp_path)


def test_text_is_prepared_and_a_model_is_trained_resumed_and_asked(project):
    assert "resuming after step 2" in project.train("first", MAX_STEPS=3)
    assert "The cat" in project.machine("scripts/generate.py", project.checkpoint("first", 3), "--prompt", "The cat",
                                        "--max-new-tokens", 4)


def test_a_feature_that_lacks_a_package_prints_what_to_install(machine, sources, prepared, tmp_path):
    prepare = ("scripts/load_pretrain_dataset.py", "--tokenizer-path", prepared.tokenizer, "--output", tmp_path, "--source")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert re.search("pip install .*datasets", machine(*prepare, tmp_path / "rows.parquet", code=2))
    assert re.search("pip install .*huggingface_hub", machine(*prepare, "wikitext", code=2))
    run = TinyRun(prepared, tmp_path / "runs", MAX_STEPS=1, **UNMEASURED)
    output = machine("train.py", *run.argv(WANDB_ENABLED="true", TENSORBOARD_ENABLED="true"))
    assert all(len(re.findall(f"pip install .*{name}", output)) == 1 for name in ("wandb", "tensorboard"))
    assert re.search("pip install .*starlette", machine("scripts/report.py", run.folder, "--serve", code=2))
    assert re.search("pip install .*lm_eval", machine("scripts/evaluate.py", run.checkpoint(1), "--tasks", "piqa", code=2))
    assert re.search("pip install .*matplotlib", machine("scripts/report.py", run.folder, "--plot", "curves.png", code=2))
    lora = {"LORA_ENABLED": "true", "LORA_BASE_QUANTIZATION": "int8", "PRETRAIN_CHECKPOINT": run.checkpoint(1)}
    assert re.search("pip install .*bitsandbytes", machine("train.py", *run.argv(**lora, RUN_NAME="lora"), code=2))
    teacher = tmp_path / "gpt2"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 512}))
    save_file({"wte.weight": torch.zeros(512, 1)}, teacher / "model.safetensors")
    distilled = {"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": teacher, "RUN_NAME": "distilled"}
    assert re.search("pip install .*transformers", machine("train.py", *run.argv(**distilled), code=2))
