"""Where a run starts: spellings of its start, a base that was moved, and what is counted from there."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from factories import (
    UNMEASURED,
    Stages,
    TinyRun,
    cached_on_the_hub,
    contents,
    prepare,
    prepare_stages,
    prepared_set,
    settings_of,
    ways_out,
)
from safetensors.torch import load_file, save_file

import train
from checkpoint import store
from checkpoint.model_json import read_model_json
from checkpoint.tensors import write_tensors
from extensions.debug.replay import replay
from extensions.inference.engine import SUPPRESSED_IDS
from extensions.inference.weights import base_of_adapters, load_for_use, merge, merged_state_dict
from plan.layers import Layer
from tokenizer import load_tokenizer


def test_a_run_resumes_from_its_start_in_any_spelling(stages, tmp_path, monkeypatch, capsys):
    """One more step for each spelling: first names are compared, then real paths, then the hash of the weights."""
    shutil.copytree(stages.base.parent.parent, tmp_path / "base")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = stages.run("sft", tmp_path / "runs", **UNMEASURED, MAX_STEPS=1, PRETRAIN_CHECKPOINT="base").trained()
    for step, spelt in enumerate(["./base", tmp_path / "base", "link", "base/checkpoints/step-00000002", "../base"], 2):
        if spelt == "../base":
            monkeypatch.chdir(tmp_path / "elsewhere")
        capsys.readouterr()
        assert run.train(PRETRAIN_CHECKPOINT=spelt, MAX_STEPS=step) == 0
        printed = capsys.readouterr()
        assert f"resuming after step {step - 1}" in printed.out and "is not used" not in printed.err, spelt
        assert list(run.column("train_loss")) == list(range(1, step + 1))
    shutil.copytree(stages.base, "copy")
    fresh = stages.run("sft", tmp_path / "fresh", **UNMEASURED, MAX_STEPS=1, PRETRAIN_CHECKPOINT="../base")
    assert fresh.train() == 0 and fresh.train(PRETRAIN_CHECKPOINT="copy", MAX_STEPS=2) == 0
    assert list(fresh.column("train_loss")) == [1, 2]
    assert store.read_state(fresh.checkpoint(2))["progress"]["begun_from"] == "copy", "and it is not hashed again"


@pytest.mark.parametrize(("mode", "named"), [("lora-sft", "PRETRAIN_CHECKPOINT"), ("sft", "RESUME")])
def test_a_run_with_steps_is_not_restarted_from_another_start_and_every_remedy_works(mode, named, stages, tmp_path, capsys):
    run = stages.run(mode, tmp_path / "runs", **UNMEASURED, MAX_STEPS=1).trained()
    before = contents(run.folder)
    assert run.train(**{named: stages.teacher}, MAX_STEPS=2) == 5
    error = capsys.readouterr().err
    assert "started from" in error and contents(run.folder) == before
    assert train.main([*run.argv(**{named: stages.teacher}), "--check"]) == 5
    offered = ways_out(error)
    assert len(offered) == (3 if named == "PRETRAIN_CHECKPOINT" else 2)
    for number, way in enumerate(offered):
        copy = stages.run(mode, shutil.copytree(run.output_dir, tmp_path / f"way-{number}"), **UNMEASURED, MAX_STEPS=2)
        changes = {} if f"remove {named}" in way else {named: stages.teacher}
        assert copy.train(**changes | settings_of(way)) == 0, way
        assert list(copy.column("train_loss")) == [1, 2] or "another" in settings_of(way).values()


class Tree:
    """A folder with a base and runs that start from it; the folder, or the base alone, is moved."""

    def __init__(self, stages: Stages, folder: Path):
        self.stages, self.folder = stages, folder
        shutil.copytree(stages.base.parent.parent, folder / "base")

    def run(self, mode: str, **changes) -> TinyRun:
        settings = {**UNMEASURED, "PRETRAIN_CHECKPOINT": self.folder / "base", "MAX_STEPS": 2, "RUN_NAME": mode, **changes}
        return self.stages.run(mode, self.folder / "runs", **settings)

    def moved(self, folder: Path) -> "Tree":
        tree = Tree.__new__(Tree)
        tree.stages, tree.folder = self.stages, Path(shutil.move(self.folder, folder))
        return tree


NEED_THEIR_BASE = ("lora-sft", "dpo-live")


def test_runs_go_on_wherever_their_base_is(stages, tmp_path, capsys):
    """After the whole folder was moved, named by the new or the old path; and from a copy of a base that is gone."""
    here = Tree(stages, tmp_path / "here")
    for mode in NEED_THEIR_BASE:
        assert here.run(mode).train() == 0
    assert here.run("dpo-stored").train(MAX_STEPS=5, STOP_STEP=2) == 0
    there = here.moved(tmp_path / "there")
    for mode in NEED_THEIR_BASE:
        assert there.run(mode).train(MAX_STEPS=3) == 0, mode
        assert there.run(mode).train(MAX_STEPS=4, PRETRAIN_CHECKPOINT=tmp_path / "here" / "base") == 0, mode
        assert train.main([*there.run(mode).argv(MAX_STEPS=5), "--check"]) == 0
    adapted = there.run("lora-sft")
    described = read_model_json(adapted.checkpoint(4) / "adapter_config.json")
    assert described["base_model_name_or_path"].startswith(str(tmp_path / "there"))
    messages = []
    replay(adapted.folder, 1, Layer(), info=messages.append)
    assert " ".join(messages).count("the same") == 2
    merge(adapted.checkpoint(2), tmp_path / "merged")  # its config names the old path of the base

    shutil.move(there.folder / "base", tmp_path / "copy")
    for mode in NEED_THEIR_BASE:
        capsys.readouterr()
        assert there.run(mode).train(MAX_STEPS=5) == 5, mode
        error = capsys.readouterr().err
        assert "was not found" in error and "set PRETRAIN_CHECKPOINT to the folder where it is now" in error
        assert there.run(mode).train(MAX_STEPS=5, PRETRAIN_CHECKPOINT=tmp_path / "copy") == 0, mode
    # The log-probabilities of the reference are stored for all pairs that the run reads, so it is not needed again.
    assert there.run("dpo-stored").train(MAX_STEPS=5) == 0
    for mode in (*NEED_THEIR_BASE, "dpo-stored"):
        assert list(there.run(mode).column("train_loss")) == [1, 2, 3, 4, 5][:5] if mode != "dpo-stored" else [1, 2, 5]


SHAPE = ("DIM", "N_LAYERS", "N_HEADS", "N_KV_HEADS", "MULTIPLE_OF")


def without_shape(run: TinyRun) -> TinyRun:
    for name in SHAPE:
        del run.settings[name]
    return run


def test_a_start_brings_its_shape_and_so_does_a_run_of_its_own(stages, tmp_path, capsys):
    """The same bits as with the shape in the settings; resuming needs the start no more, and adapters' own state says it."""
    base = shutil.copytree(stages.base.parent.parent, tmp_path / "named" / "base")
    tuned = stages.run("sft", tmp_path / "given", **UNMEASURED, MAX_STEPS=2)
    taken = without_shape(stages.run("sft", tmp_path / "named", **UNMEASURED, MAX_STEPS=1, PRETRAIN_CHECKPOINT="base"))
    adapted = without_shape(stages.run("lora-sft", tmp_path / "named", **UNMEASURED, MAX_STEPS=1, RUN_NAME="adapted"))
    assert tuned.train() == 0
    capsys.readouterr()
    assert train.main([*taken.argv(), "--check"]) == taken.train() == adapted.train() == 0
    message = capsys.readouterr().out
    shape_line = "base/checkpoints/step-00000002: DIM=32 N_LAYERS=2 N_HEADS=4 N_KV_HEADS=2 FFN_DIM=96"
    assert message.count(shape_line) == 3 and "2 layers, dim 32, heads 4/2, feed-forward 96" in message
    written = read_model_json(taken.folder / "config.json")
    assert [written[name] for name in (*SHAPE[:4], "FFN_DIM")] == [32, 2, 4, 2, 96]
    shutil.rmtree(base)
    assert train.main([*taken.argv(MAX_STEPS=2), "--check"]) == taken.train(MAX_STEPS=2) == adapted.train(MAX_STEPS=2) == 0
    assert taken.hashes(2) == tuned.hashes(2)
    assert len(re.findall("step-00000001:.* DIM=32, N_LAYERS=2", capsys.readouterr().out)) == 3


def model_from_elsewhere(stages: Stages, folder: Path, layers: int = 2, unused_rows: int = 0) -> Path:
    """A Hugging Face folder, with the first layers of the base, and rows of the vocabulary that no token has."""
    tensors = load_file(stages.base / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if f"layers.{layers}" not in name}
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, torch.ones(unused_rows, embedding.shape[1])])
    folder.mkdir(parents=True)
    for file in stages.base.glob("*token*"):
        shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = read_model_json(stages.base / "config.json")
    changes = {"num_hidden_layers": layers, "vocab_size": described["vocab_size"] + unused_rows}
    (folder / "config.json").write_text(json.dumps(described | changes))
    return folder


def test_a_model_of_the_hub_is_a_start_and_a_base(stages, tmp_path, monkeypatch, capsys):
    """With more rows than tokens, which are left out. Its adapters name it as PEFT does, and are merged into it."""
    source = model_from_elsewhere(stages, tmp_path / "source", unused_rows=9)
    place = cached_on_the_hub(source, "acme/tiny", tmp_path / "cache", monkeypatch)
    usual, run, adapted = (without_shape(stages.run(mode, tmp_path / "runs", **UNMEASURED, MAX_STEPS=1, RUN_NAME=name,
                                                    **({"PRETRAIN_CHECKPOINT": "acme/tiny"} if name != "usual" else {})))
                           for mode, name in (("sft", "usual"), ("sft", "run"), ("lora-sft", "adapted")))
    assert usual.train() == run.train() == adapted.train() == adapted.train(MAX_STEPS=2) == 0
    assert "dropping 9 rows of the model's vocabulary, without a token" in capsys.readouterr().out
    assert usual.hashes(1) == run.hashes(1)
    described = read_model_json(adapted.checkpoint(2) / "adapter_config.json")
    assert (described["base_model_name_or_path"], described["revision"]) == ("acme/tiny", place.name)
    assert base_of_adapters(adapted.checkpoint(2)) == place
    for name in (store.STATE, store.MANIFEST):  # which PEFT's own folders lack
        (adapted.checkpoint(2) / name).unlink()
    assert base_of_adapters(adapted.checkpoint(2)) == place


class MoreTokens(NamedTuple):
    """A tokenizer with three control tokens more than the base, and chats in which one of them occurs."""

    tokenizer: Path
    chats: Path
    ids: int  # of the base


def with_tokens(tokenizer: Path, folder: Path, *names: str) -> int:
    """Save a tokenizer with more control tokens; return how many ids it had."""
    folder.mkdir(parents=True)
    (old := load_tokenizer(str(tokenizer))).save_huggingface(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"] += [document["added_tokens"][0] | {"id": old.vocab_size + number, "content": name}
                                 for number, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return old.vocab_size


@pytest.fixture(scope="module")
def more_tokens(stages, tmp_path_factory) -> MoreTokens:
    folder = tmp_path_factory.mktemp("more tokens")
    ids = with_tokens(stages.prepared.tokenizer, folder / "tokenizer", "<|plan|>", "<|act|>", "<|see|>")
    template = "{% for m in messages %}<|plan|>{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|plan|>assistant: {% endif %}"
    (folder / "tokenizer" / "chat_template.jinja").write_text(template)
    chats = prepared_set("chats", stages.chats.parents[1] / "chats.jsonl", folder / "tokenizer", folder / "chats")
    return MoreTokens(folder / "tokenizer", chats, ids)


def of_more_tokens(stages: Stages, more: MoreTokens, mode: str, folder: Path, **changes) -> TinyRun:
    return without_shape(stages.run(mode, folder, **UNMEASURED, MAX_STEPS=2, SAVE_EVERY=1, SFT_DATA_PATH=more.chats,
                                    TOKENIZER_PATH=more.tokenizer, **changes))


@pytest.mark.parametrize("mode, changes", [("sft", {}), ("lora-sft", {"LORA_TRAIN_TOKENS": "<|plan|>"}), ("lora-sft", {})])
def test_new_tokens_are_new_rows_which_are_trained_saved_resumed_merged_and_used(mode, changes, stages, more_tokens, tmp_path, capsys):
    run = of_more_tokens(stages, more_tokens, mode, tmp_path, **changes)
    ids = more_tokens.ids
    assert run.train() == 0
    frozen = "; LORA_TRAIN_TOKENS=<|plan|> decides which of them are trained" if changes else ""
    assert f"3 new tokens: rows {ids} to {ids + 2} of the embedding start as the mean of the others{frozen}\n" in capsys.readouterr().out
    shutil.rmtree(run.checkpoint(2))
    first = run.copy(tmp_path / "again")
    assert first.train() == 0 == of_more_tokens(stages, more_tokens, mode, tmp_path / "whole", **changes).train()
    whole = TinyRun(stages.prepared, tmp_path / "whole", **first.settings)
    assert first.hashes(2) == whole.hashes(2), "the resumed run equals an uninterrupted one"

    model, tokenizer = load_for_use(first.checkpoint(2), dtype=torch.float32)
    base = load_file(stages.base / "model.safetensors")["model.embed_tokens.weight"]
    assert model.vocab_size == tokenizer.vocab_size == ids + 3 and len(base) == ids
    embedding = merged_state_dict(model)["tok_embeddings.weight"]
    mean = base.double().mean(dim=0).float()
    assert not torch.equal(embedding[ids], mean), "the new token's row is trained"
    if mode == "sft":
        return
    trained = read_model_json(first.checkpoint(2) / "adapter_config.json")["trainable_token_indices"]
    assert torch.equal(embedding[ids + 1], mean) if changes else {ids, ids + 1, ids + 2} <= {*trained}, "all rows that the base lacks"
    kept = [token for token in range(ids) if token not in trained]
    assert len(kept) > 100 and torch.equal(embedding[kept], base[kept])
    merge(first.checkpoint(2), tmp_path / "merged")
    assert len(load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"]) == ids + 3
    reference = pytest.importorskip("peft").AutoPeftModelForCausalLM.from_pretrained(first.checkpoint(2)).eval()
    tokens_BT = torch.tensor([[1, ids, 5, 9, ids]])
    with torch.no_grad():
        assert (reference(tokens_BT).logits - model(tokens_BT, mode="logits")[..., :ids + 3])[..., :ids + 1].abs().max() < 1e-4


def test_every_file_has_the_permissions_that_the_user_asks_for(tmp_path):
    """Data, checkpoints, adapters, stored references, and the dump of a non-finite step."""
    mask = 0o027
    before = os.umask(mask)
    try:
        made = prepare_stages(prepare(tmp_path / "data"), tmp_path)
        for mode, changes in (("lora-dpo", {"DPO_REFERENCE": "stored"}), ("distilled", {})):
            assert made.run(mode, tmp_path, **UNMEASURED, MAX_STEPS=1, RUN_NAME=mode, **changes).train() == 0
        write_tensors(tmp_path / "rank-0.safetensors", {"tokens_BT": torch.zeros(1)})  # as the dump does
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"optimizer.safetensors", "adapter_model.safetensors", "rank-0.safetensors"} <= {
        path.name for path in files}
    assert [str(path) for path in files if path.stat().st_mode & 0o777 != 0o666 & ~mask] == []


def test_a_saved_model_stops_at_the_end_of_turn_that_its_template_writes(stages, tmp_path):
    """It is neither the end of texts nor a token of a known name."""
    (tmp_path / "tokenizer").mkdir()
    load_tokenizer(str(stages.prepared.tokenizer)).save_huggingface(tmp_path / "tokenizer")
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|eot_id|>", "<|reserved_special_token_9|>"))
    chats = prepared_set("chats", stages.chats.parents[1] / "chats.jsonl", tmp_path / "tokenizer", tmp_path / "chats")
    run = stages.run("sft", tmp_path, **UNMEASURED, MAX_STEPS=1, TOKENIZER_PATH=tmp_path / "tokenizer", SFT_DATA_PATH=chats).trained()
    saved = load_tokenizer(str(run.checkpoint(1)))
    base, end = json.loads((stages.base / "generation_config.json").read_text())["eos_token_id"], saved.special_ids["<|reserved_special_token_9|>"]
    assert json.loads((run.checkpoint(1) / "generation_config.json").read_text())["eos_token_id"] == [*base, end]
    assert saved.stop_ids == {*base, end} and end not in base


def suppressed_by(folder: Path) -> list[int]:
    return json.loads((folder / "generation_config.json").read_text()).get("suppress_tokens", [])


def test_control_tokens_that_no_training_has_seen_are_never_sampled(stages, tmp_path):
    special = load_tokenizer(str(stages.prepared.tokenizer)).special_ids
    unseen = {number for name, number in special.items() if name not in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")}
    assert {*suppressed_by(stages.base)} == unseen, "the base has seen texts"
    run = stages.run("lora-sft", tmp_path, **UNMEASURED, MAX_STEPS=2)
    unseen -= {special["<|start_header_id|>"], special["<|end_header_id|>"]}
    for step in (1, 2):
        assert run.train(STOP_STEP=step) == 0
        assert {*suppressed_by(run.checkpoint(step))} == unseen
    assert {*SUPPRESSED_IDS[load_for_use(run.checkpoint(2))[0]].tolist()} == unseen
