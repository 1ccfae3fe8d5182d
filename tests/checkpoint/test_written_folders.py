"""What is written for other programs, from a bf16 base with rows that no token has, judged by transformers, PEFT and gguf's reader."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import python
from factories import UNMEASURED, Prepared, TinyRun, prepare

from checkpoint import huggingface, store
from checkpoint.tensors import read_all
from tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")
UNUSED, CONTEXT = 27, 512


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("data"), vocab_size=280)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, prepared: Prepared, tmp_path) -> Path:
    tokenizer, folder = load_tokenizer(str(prepared.tokenizer)), tmp_path / "base"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size + UNUSED, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2, tie_word_embeddings=request.param,
        attention_dropout=0.1, bos_token_id=None, eos_token_id=tokenizer.eos_id)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_huggingface(folder)
    return folder


def test_merged_adapters_have_the_rope_that_they_were_trained_with(base, prepared, tmp_path):
    """PEFT opens adapters with the base's config.json, so only a merged model can have another ROPE_THETA."""
    peft = pytest.importorskip("peft")
    run = run_from(base, prepared, tmp_path / "run", LORA_ENABLED="true", ROPE_THETA=9, ROPE_SCALING_TYPE="linear", ROPE_SCALING_FACTOR=2,
                   LEARNING_RATE=0.05).trained()
    done = python("scripts/export.py", run.folder, "--to", "merged", "--dtype", "fp32", "--output", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert "ROPE_THETA=9" in python("scripts/export.py", run.folder, "--to", "hf", "--output", tmp_path / "hf").stderr
    corrected, merged = tmp_path / "corrected", opened(tmp_path / "merged")
    shutil.copytree(base, corrected)
    content, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "merged", base))
    (corrected / "config.json").write_text(json.dumps(content | {"vocab_size": before["vocab_size"]}))
    theirs = peft.PeftModel.from_pretrained(opened(corrected, dtype=torch.float32), run.checkpoint(4))
    assert (merged.config.rope_parameters["rope_theta"], merged.config.max_position_embeddings) == (9, 2 * CONTEXT)
    tokens_BT = torch.randint(200, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens_BT).logits[..., :merged.config.vocab_size], merged(tokens_BT).logits, atol=1e-4)


def run_from(base: Path, prepared: Prepared, folder: Path, **settings) -> TinyRun:
    shape = ("DIM", "N_LAYERS", "N_HEADS", "N_KV_HEADS", "MULTIPLE_OF")
    run = TinyRun(prepared, folder, PRETRAIN_CHECKPOINT=base, **{"MAX_STEPS": 4, **UNMEASURED, **settings})
    run.settings = {name: value for name, value in run.settings.items() if name not in shape}
    return run


def opened(folder: Path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_an_export_has_the_dtype_and_the_context_of_the_base(base, prepared, tmp_path, capsys):
    """Checkpoints are float32. The fields that are not used are named once and not saved."""
    whole = run_from(base, prepared, tmp_path / "whole").trained()
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "attention_dropout=0.1, which Paddock neither uses nor saves" in printed
    assert "(bfloat16, as the base; checkpoints are float32, to resume exactly)" in printed
    source = whole.checkpoint(4)
    assert store.read_state(source)["base_dtype"] == "bfloat16"
    trained = read_all(huggingface.load_model_weights(source))
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}

    assert python("scripts/export.py", whole.folder, "--to", "hf", "--output", tmp_path / "hf").returncode == 0
    exported, reference = opened(tmp_path / "hf"), opened(source, dtype=torch.bfloat16)
    assert exported.dtype == torch.bfloat16 and exported.config.attention_dropout == 0 and store.verify(tmp_path / "hf")
    assert exported.config.max_position_embeddings == CONTEXT
    assert all(torch.equal(*pair) for pair in zip(exported.parameters(), reference.parameters(), strict=True))
    size = {folder: (folder / "model.safetensors").stat().st_size for folder in (source, tmp_path / "hf")}
    assert size[tmp_path / "hf"] < 0.6 * size[source]
    assert python("scripts/export.py", whole.folder, "--to", "hf", "--dtype", "fp32", "--output", tmp_path / "fp32").returncode == 0
    assert (tmp_path / "fp32" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    # A next stage begins with float32, and still remembers.
    chained = run_from(source, prepared, tmp_path / "chained", MAX_STEPS=1, RESET_OPTIMIZER="true").trained()
    assert store.read_state(chained.checkpoint(1))["base_dtype"] == "bfloat16"
