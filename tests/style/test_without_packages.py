"""Without the optional packages everything else works, and the features that need them say what to install."""

import json
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder

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
        done = python(*command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, prepare=block, code=code)
        return done.stderr + done.stdout

    return run


def test_text_is_prepared_and_a_model_is_trained_resumed_and_asked(machine, tmp_path):
    tokenizer, text = tmp_path / "tokenizer.model", tmp_path / "text.txt"
    text.write_text("The cat saw the dog.\n\nThe hen fed the fox.\n\n" * 100)
    machine("scripts/train_tokenizer.py", text, "--vocab-size", 256, "--output", tokenizer)
    output = machine("scripts/load_pretrain_dataset.py", "--source", text, "--documents", "blank", "--output", tmp_path / "data",
                     "--tokenizer-path", tokenizer, "--validation-fraction", 0.1)
    settings = {**TINY, **UNMEASURED, "TOKENIZER_PATH": tokenizer, "OUTPUT_DIR": tmp_path, "MAX_SEQ_LEN": 64, "TOTAL_BATCH_SIZE": 512,
                "SAMPLE_EVERY": 2} | dict([re.search(r"^(\w+_PATH)=(.+)$", output, re.MULTILINE).groups()])
    machine("train.py", *argv_of({**settings, "MAX_STEPS": 2}))
    assert "resuming after step 2" in machine("train.py", *argv_of({**settings, "MAX_STEPS": 3}))
    checkpoint = tmp_path / settings["RUN_NAME"] / "checkpoints" / "step-00000003"
    assert "The cat" in machine("scripts/generate.py", checkpoint, "--prompt", "The cat", "--max-new-tokens", 4)


def test_a_feature_that_lacks_a_package_prints_what_to_install(machine, prepared, tmp_path):
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
