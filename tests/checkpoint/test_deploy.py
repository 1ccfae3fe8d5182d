"""The folder is what docs/deploy.md says that vLLM, llama.cpp and Ollama expect, by their own code where it is installed."""

import ast
import dataclasses
import hashlib
import json
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from commands import ROOT
from factories import prepare_stages
from safetensors import safe_open

from tokenizer import PATTERN

DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def content(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def names_in(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return {*tensors.keys()}


def test_the_index_names_the_weights_and_not_the_optimizer(whole):
    folder = whole.checkpoint(6)
    index = content(folder, "model.safetensors.index.json")
    assert index["weight_map"] == dict.fromkeys(names_in(folder / "model.safetensors"), "model.safetensors")
    assert index["metadata"]["total_size"] == 4 * sum(
        math.prod(tensor["shape"]) for name, tensor in header(folder / "model.safetensors").items() if name != "__metadata__")
    assert (folder / "optimizer.safetensors").exists()


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


def test_the_template_for_ollama_writes_chats_as_ours_does(whole):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."},
                {"role": "user", "content": "Why?"}]
    template = re.search(r'TEMPLATE """(.*?)"""', DEPLOY, re.DOTALL)[1]
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


# ------------------------------------------------------------------------------------------------ vLLM's own code


@pytest.fixture(scope="module")
def vllm():
    """A function that gives a function or class of vLLM's source, without importing vLLM, which needs its own torch."""
    found = find_spec("vllm")
    if found is None:
        pytest.skip("vllm is not installed")

    def take(file: str, name: str, **known) -> Any:
        tree = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())
        (node,) = [node for node in tree.body if getattr(node, "name", "") == name]
        names = {"os": os, "json": json, "math": math, "re": re, "Literal": Literal, "WeightsMapper": Any, "LoRAConfig": Any,
                 "logger": SimpleNamespace(info_once=print), **vars(dataclasses), **known}
        exec(compile(ast.Module([node], []), file, "exec"), names)
        return names[name]

    return take


def test_vllm_takes_the_weights_and_not_the_optimizer(vllm, whole):
    choose = vllm("model_executor/model_loader/weight_utils.py", "filter_duplicate_safetensors_files")
    folder = whole.checkpoint(6)
    files = [str(path) for path in folder.glob("*.safetensors")]
    assert len(files) == 2
    assert choose(files, str(folder), "model.safetensors.index.json") == [str(folder / "model.safetensors")]


@pytest.mark.parametrize(("changes", "refused"), [({"LORA_TRAIN_TOKENS": "none"}, ""), ({"LORA_TRAIN_TOKENS": "auto"}, "tensor"),
                                                  ({"LORA_TRAIN_TOKENS": "none", "LORA_TRAIN_HEAD": "true"}, "config")])
def test_vllm_accepts_plain_adapters_only(changes, refused, vllm, prepared, tmp_path):
    run = prepare_stages(prepared, tmp_path).run("lora-sft", tmp_path / "runs", **changes, MAX_STEPS=1, VALIDATE_EVERY=0,
                                                 HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    assert run.train() == 0
    folder = run.checkpoint(1)
    peft = vllm("lora/peft_helper.py", "PEFTHelper").from_local_dir(str(folder), None)
    parse = vllm("lora/utils.py", "parse_fine_tuned_lora_name")
    try:
        peft.validate_legal(SimpleNamespace(max_lora_rank=16))
    except ValueError:
        assert refused == "config"
        return
    try:
        parsed = {parse(name)[0] for name in names_in(folder / "adapter_model.safetensors")}
    except ValueError:
        assert refused == "tensor"
        return
    assert not refused and {name.rpartition(".")[2] for name in parsed} == {*peft.target_modules}
