"""The folder is what docs/deploy.md says that vLLM, llama.cpp and Ollama expect."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from scripts.convert_to_gguf import OLLAMA
from tokenizer import PATTERN

DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def content(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


def test_config_and_generation_config_agree_with_tokenizer_and_weights(whole):
    folder = whole.checkpoint(6)
    config, generation, tokenizer = (content(folder, f"{name}.json") for name in ("config", "generation_config", "tokenizer"))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == config["torch_dtype"] == "float32"
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] and config["head_dim"] == 8
    assert config["max_position_embeddings"] == whole.settings["MAX_SEQ_LEN"]
    weights = header(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in weights)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert generation["eos_token_id"] == [ids["<|end_of_text|>"], ids["<|eot_id|>"]]
    assert config["eos_token_id"] == ids["<|end_of_text|>"] and generation["bos_token_id"] == ids["<|begin_of_text|>"]
    assert config["vocab_size"] == 1 + max(*ids.values(), *tokenizer["model"]["vocab"].values())
    assert content(folder, "tokenizer_config.json")["eos_token"] == "<|end_of_text|>"
    assert (folder / "chat_template.jinja").is_file()


def test_ollama_knows_how_our_tokenizers_split_text():
    # Source: parseTokenizer in convert/tokenizer.go of github.com/ollama/ollama, for llama-bpe.
    assert hashlib.sha256(PATTERN.encode()).hexdigest() == "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f"


def test_the_template_for_ollama_renders_chats_as_the_chat_template_does(whole):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."},
                {"role": "user", "content": "Why?"}]
    template = OLLAMA["<|start_header_id|>"]
    before, turn, after = re.fullmatch(r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    turns = [turn.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"]) for message in messages]
    ours = jinja2.Template((whole.checkpoint(6) / "chat_template.jinja").read_text()).render(
        messages=messages, bos_token="", add_generation_prompt=True)
    assert before + "".join(turns) + after == ours and "{{" not in ours


def test_the_files_and_scripts_that_the_recipes_name_exist(whole):
    found = {path.name for path in whole.checkpoint(6).iterdir()}
    named = {name for name in re.findall(r"`([\w.]+\.(?:json|safetensors|jinja|md))`", DEPLOY)} - {"paddock_adapter.json"}
    assert named <= found
    scripts = {path.name for path in (ROOT / "scripts").iterdir()} | {"chat.py"}
    assert {*re.findall(r"python scripts/(\w+\.py)", DEPLOY)} <= scripts
