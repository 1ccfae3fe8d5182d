"""convert_to_gguf.py: what a GGUF file contains is the model, as transformers and, if it is installed, llama.cpp read it."""

import json

import pytest
import torch
from factories import new_model

from checkpoint import huggingface
from common.errors import CheckpointError
from config import ModelConfig
from scripts import convert_to_gguf as script
from tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="GGUF files need the package: pip install -r requirements-extras.txt")
transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")

MODELS = {"llama": {"tie_embeddings": False}, "llama3 scaling": {"rope_scaling_factor": 8.0, "rope_original_max_len": 64, "rope_theta": 10_000.0},
          "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, "narrow": {"dim": 48, "head_width": 12},
          "qwen2": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3", "head_width": 24},
          "yarn": {"model_type": "qwen2", "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_high_freq_factor": 32.0,
                   "rope_original_max_len": 64}, "mistral": {"model_type": "mistral", "sliding_window": 100},
          "smollm3": {"model_type": "smollm3", "n_layers": 4, "no_rope_every": 4}}
TEXT = "The cat saw the dog, and I'll say 12345 times: Straße 你好 🚀.\n" * 20


def save(folder, **settings):
    """A folder of a random model with large weights, whose tokenizer has merges."""
    folder.mkdir()
    pairs = [bytes([a, b]) for a in b"etaoinsh" for b in b"etaoinsh"][:44]
    tokenizer = Tokenizer({token: rank for rank, token in enumerate([bytes([i]) for i in range(256)] + pairs)})
    config = ModelConfig(**{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "init_std": 0.1, **settings})
    model = new_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that do something
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    huggingface.save_model_folder(folder, model.state_dict(), config, tokenizer, 256)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_type_is_the_model(name, tmp_path):
    """transformers reads the architecture and the settings from the file; it ignores scaling, and Qwen 3's head width."""
    folder = save(tmp_path / "model", **MODELS[name])
    for kind in ("f32", "bf16", "q8_0"):
        results = script.convert(folder, tmp_path / f"{kind}.gguf", kind, TEXT, script.MAX_KL[kind])
        assert results["tensors"] == ("within the error of q8_0" if kind == "q8_0" else "equal")
        assert float(results["KL divergence"].split()[0]) <= (1e-6 if kind == "f32" else 1e-3)
    reader = gguf.GGUFReader(tmp_path / "f32.gguf")
    if name == "narrow":
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors}
        assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert reader.fields["tokenizer.ggml.pre"].contents() == "llama-bpe" and reader.fields["tokenizer.ggml.add_bos_token"].contents() is True
    context = reader.fields[f"{reader.fields['general.architecture'].contents()}.context_length"].contents()
    assert context == (100 if name == "mistral" else 512 if name == "llama3 scaling" else 256)
    assert f"| KL divergence | {results['KL divergence']} |" in (tmp_path / "q8_0.md").read_text()
    assert "FROM ./q8_0.gguf" in (modelfile := (tmp_path / "q8_0.Modelfile").read_text()) and 'PARAMETER stop "<|eot_id|>"' in modelfile
    if name in ("llama", "narrow", "qwen2"):
        ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(folder, **file) for file in ({}, {"gguf_file": str(tmp_path / "f32.gguf")}))
        tokens = torch.arange(0, 400, 7)[None]
        assert (ours(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize("damage", ("a tensor", "a type"))
def test_a_file_that_differs_is_not_exported(damage, tmp_path, monkeypatch):
    folder, output = save(tmp_path / "model"), tmp_path / "out.gguf"
    if damage == "a tensor":
        quantize = gguf.quants.quantize
        monkeypatch.setattr(gguf.quants, "quantize", lambda data, kind: quantize(data * (1 + 1e-3 * (data.ndim == 2)), kind))
    with pytest.raises(CheckpointError, match="not exported: (tensor .*|the KL divergence of q8_0 is .*above 1e-09)"):
        script.convert(folder, output, "f32" if damage == "a tensor" else "q8_0", TEXT, 1e-9)
    assert [*tmp_path.iterdir()] == [folder]


def test_what_llama_cpp_cannot_run_is_refused(tmp_path):
    for number, (settings, message) in enumerate((({"model_type": "smollm3", "no_rope_every": 2}, "NO_ROPE_EVERY=4, and this model has 2"),
                                                  ({}, "splits text like"), ({}, "has no merges"))):
        folder = save(tmp_path / str(number), **settings)
        content = json.loads((folder / "tokenizer.json").read_text())
        if message == "splits text like":
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
        elif message == "has no merges":
            content["model"]["merges"] = []
        (folder / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            script.convert(folder, tmp_path / "out.gguf", "f32", TEXT, 1.0)
    (tmp_path / "out.gguf").touch()
    with pytest.raises(CheckpointError, match="already exists; choose a new file"):
        script.convert(folder, tmp_path / "out.gguf", "f32", TEXT, 1.0)
