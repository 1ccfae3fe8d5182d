"""Which settings may differ between a checkpoint and the run that resumes, and what counts as the same model."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import CheckpointError
from common.text import setting_text
from config import Config, on_resume
from extensions.settings import OnlineConfig
from plan.identity import weights_sha256
from plan.make import Plan
from plan.resume_rules import check_changes
from plan.starts import Start
from run.run import Inputs

CHECKPOINT = Path("runs/run/checkpoints/step-00000004")
EVERYTHING = {"training_stage": "dpo", "lora_enabled": True, "distillation_enabled": True}  # every section plays a part


def identity(config: Config, data: str, tokenizer: str, content: str = "", **saved: str) -> dict:
    tokenizer = SimpleNamespace(sha256=tokenizer, is_same=lambda other: other == tokenizer)
    rows = SimpleNamespace(fingerprint=data, sources=[SimpleNamespace(token_set=SimpleNamespace(content=content))])
    return Inputs.identity(SimpleNamespace(rows=rows, tokenizer=tokenizer), config, saved={f"{config.training_stage.upper()}_DATA_PATH": "", **saved})


def test_token_files_of_other_programs_are_compared_whole_if_both_were_read():
    """An older version, or a start without verification, knows only samples of them."""
    sampled, whole, other = "a" * 64, "b" * 64, "c" * 64
    for data, content, saved, is_same in ((sampled, whole, whole + sampled, True), (sampled, other, whole + sampled, False), (sampled, whole, sampled, True),
                                          (sampled, "", whole + sampled, True), (other, "", whole + sampled, False), (other, whole, sampled, False)):
        assert (identity(Config(), data, "t", content, PRETRAIN_DATA_PATH=saved)["PRETRAIN_DATA_PATH"] == saved) == is_same


def compared(state: dict, now: Config, now_identity: dict, sources: Mapping | None = None, **start) -> tuple[list[str], list[str]]:
    plan = Plan(now, sources or {}, Start("continue", str(CHECKPOINT), **{"is_own": True, "step": 4} | start))
    return check_changes(state, plan, now_identity)


def changes(before: Config, now: Config, data: tuple[str, str] = ("data", "data"), **start) -> tuple[list[str], list[str]]:
    state = {"settings": before.public(), "identity": identity(before, data[0], "tokenizer"), "world_size": 1}
    return compared(state, now, identity(now, data[1], "tokenizer"), **start)


def another(name: str):
    field = Config.model_fields[name]
    default = EVERYTHING.get(name, field.default)
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default * 0.9 or 0.25 if isinstance(default, float) else default + 1
    if name in ("validation_fraction", "allow_resume_mismatch"):
        return {"validation_fraction": 0.5, "allow_resume_mismatch": "SEED"}[name]
    if name.startswith("grow_"):
        return "1:2"
    return "other" if "str" in str(field.annotation) else 7


@pytest.mark.parametrize("name", Config.model_fields)
def test_every_setting_is_compared_as_the_table_specifies(name):
    everything = EVERYTHING | ({"training_stage": "grpo"} if name in OnlineConfig.model_fields else {})
    before = Config(**everything)
    now = Config(**everything | {name: another(name)})
    kind, upper = on_resume(name), name.upper()
    if before.hidden_dim != now.hidden_dim:
        kind, upper = "fixed", "FFN_DIM"  # in which several settings show
    if kind == "fixed":
        with pytest.raises(CheckpointError, match=f"{upper} was ") as caught:
            changes(before, now)
        assert str(CHECKPOINT) in str(caught.value)
        return
    result = changes(before, now)
    kind = "safe" if kind == "content" or name == "max_steps" else kind  # by its path, since the content is the same; a longer run is noted
    lines = dict(zip(("safe", "curve"), result))
    silent = name in ("preset", "resume", "run_name", "allow_resume_mismatch", "world_size", "epochs") or name.endswith("dpo_data_path")
    assert bool(lines[kind]) == (not silent) or name == "tokenizer_path"
    if lines[kind]:
        was, now_is = ("none" if value is None else setting_text(value) for value in (getattr(before, name), getattr(now, name)))
        assert f"{upper} was {was}, is {now_is}" in lines[kind][0]
    assert not lines["curve" if kind == "safe" else "safe"] or name == "world_size"


@pytest.mark.parametrize("recorded, words", [
    ({"LOSS_SPIKE_WINDOW": 128, "PREFETCH_STEPS": 2}, None), ({"LOSS_SPIKE_WINDOW": 16}, "LOSS_SPIKE_WINDOW=16 of the checkpoint's run is not"),
    ({"MY_EVERY": 3, "MY_NAME": "x"}, "Without extensions/, these settings of the checkpoint's run have no effect: MY_EVERY, MY_NAME")])
def test_recorded_settings_that_no_longer_exist_are_reported_in_one_line(recorded, words, monkeypatch):
    monkeypatch.setattr("plan.resume_rules.EXTENSION_SECTIONS", {})
    state = {"settings": Config().public() | recorded, "identity": identity(Config(), "data", "tokenizer"), "world_size": 1}
    warnings = compared(state, Config(), identity(Config(), "data", "tokenizer"))[1]
    assert len(warnings) == (words is not None) and (not words or warnings[0].startswith(words))


def test_what_is_refused_can_be_allowed_by_name_and_only_so():
    now = {"seed": 1, "document_mask": False}
    with pytest.raises(CheckpointError, match="ALLOW_RESUME_MISMATCH=DOCUMENT_MASK,SEED"):
        changes(Config(), Config(**now))
    with pytest.raises(CheckpointError, match="DOCUMENT_MASK was true, is false. .*ALLOW_RESUME_MISMATCH=DOCUMENT_MASK,SEED"):
        changes(Config(), Config(**now, allow_resume_mismatch="SEED"))
    assert changes(Config(), Config(allow_resume_mismatch="sede"))[1] == ["ALLOW_RESUME_MISMATCH names SEDE, which is not a setting"]
    (warning,) = changes(Config(), Config(**now, allow_resume_mismatch="seed, DOCUMENT_MASK"))[1]
    assert "DOCUMENT_MASK was true, is false" in warning and "SEED was 1337, is 1" in warning


@pytest.mark.parametrize("now", [{"n_layers": 3}, {"ffn_dim": 64}, {"optimizer": "muon"}, {"lora_rank": 4}])
def test_what_has_another_shape_cannot_be_allowed(now):
    allowed = {"lora_enabled": True, "allow_resume_mismatch": "n_layers,ffn_dim,hidden_dim,optimizer,lora_rank"}
    with pytest.raises(CheckpointError) as caught:
        changes(Config(lora_enabled=True), Config(**allowed, **now))
    assert "ALLOW_RESUME_MISMATCH" not in str(caught.value) and "HIDDEN_DIM" not in str(caught.value)


def test_another_number_of_ranks_is_a_warning_and_of_a_reproducible_run_none():
    (warning,) = changes(Config(), Config(world_size=2))[1]
    assert "the number of ranks was 1, is 2" in warning
    assert changes(Config(reproducible=True), Config(reproducible=True, world_size=3, sharding="full"))[1] == []
    with pytest.raises(CheckpointError, match="MICRO_BATCH_SIZE was 8, is 4"):
        changes(Config(reproducible=True), Config(reproducible=True, micro_batch_size=4))


EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
WEIGHTS = {EMBEDDING: np.arange(12, dtype=np.float32).reshape(4, 3), NORM: np.ones(3, np.float32),
           **{f"model.layers.{layer}.mlp.up_proj.weight": np.full((2, 3), layer, np.float32) for layer in (0, 1, 2, 10)}}


def sha256(folder: Path, tensors: dict, layers=None, files: int = 1) -> str:
    folder.mkdir()
    parts = [dict([*tensors.items()][place::files]) for place in range(files)]
    names = ["model.safetensors"] if files == 1 else [f"model-0000{place + 1}-of-0000{files}.safetensors" for place in range(files)]
    for name, part in zip(names, parts):
        save_file({each: np.ascontiguousarray(tensor) for each, tensor in part.items()}, folder / name)
    if files > 1:
        place_of = {each: name for name, part in zip(names, parts) for each in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place_of}))
    return weights_sha256(folder, layers)


def test_a_model_that_is_cut_is_the_model_of_its_first_layers(tmp_path):
    for layers, kept in ((1, "0"), (2, "01"), (3, "012"), (11, ["0", "1", "2", "10"])):
        cut = {name: tensor for name, tensor in WEIGHTS.items() if ".layers." not in name or name.split(".")[2] in kept}
        assert sha256(tmp_path / f"whole-{layers}", WEIGHTS, layers) == sha256(tmp_path / f"cut-{layers}", cut), layers


def test_neither_files_nor_a_copy_of_a_tied_head_nor_old_buffers_count(tmp_path):
    same = [sha256(tmp_path / "one", WEIGHTS), sha256(tmp_path / "three", WEIGHTS, files=3), sha256(tmp_path / "reversed", dict(reversed(WEIGHTS.items()))),
            sha256(tmp_path / "tied", {**WEIGHTS, HEAD: WEIGHTS[EMBEDDING]}), sha256(tmp_path / "old", {**WEIGHTS, "model.rotary_emb.inv_freq": np.ones(2)})]
    assert len({*same}) == 1


@pytest.mark.parametrize("change", [
    {HEAD: WEIGHTS[EMBEDDING] + 1}, {EMBEDDING: WEIGHTS[EMBEDDING].reshape(3, 4)}, {EMBEDDING: WEIGHTS[EMBEDDING].view(np.int32)},
    {NORM: np.array([1, 1, np.nextafter(1, 2, dtype=np.float32)], np.float32)}, {"model.norm2.weight": WEIGHTS[NORM]},
    {"model.layers.0.mlp.up_proj.weight": WEIGHTS["model.layers.1.mlp.up_proj.weight"], "model.layers.1.mlp.up_proj.weight": WEIGHTS["model.layers.0.mlp.up_proj.weight"]}],
    ids=["head", "shape", "type", "last bit", "name", "exchanged"])
def test_every_name_type_shape_and_number_counts(change, tmp_path):
    assert sha256(tmp_path / "one", WEIGHTS) != sha256(tmp_path / "other", WEIGHTS | change)


def test_of_a_start_that_is_named_for_another_run_the_name_can_be_removed():
    before, now = (Config(pretrain_checkpoint="book", optimizer=name) for name in ("muon", "adamw"))
    with pytest.raises(CheckpointError, match="Set OPTIMIZER=muon; or remove PRETRAIN_CHECKPOINT=book, to start from random weights; or load only"):
        changes(before, now, is_own=False, named="book", setting="pretrain_checkpoint")


@pytest.mark.parametrize(("sources", "added"), [({}, " --training-stage sft --sft-data-path set"), (dict.fromkeys(("training_stage", "sft_data_path", "pretrain_checkpoint"), ".env:1"), "")])
def test_another_run_is_offered_with_what_only_the_record_says(sources, added):
    """Else `.env` of another stage, or the default stage, would decide."""
    now = Config(training_stage="sft", sft_data_path="set", pretrain_checkpoint="base")
    state = {"settings": now.public(), "identity": identity(now, "before", "tokenizer"), "world_size": 1}
    with pytest.raises(CheckpointError) as error:
        compared(state, now, identity(now, "after", "tokenizer"), sources)
    base = " --pretrain-checkpoint base" * bool(added)
    assert f"with another RUN_NAME, with --reset-optimizer{added}{base}; or load only" in str(error.value)
    assert f"--run-name NAME --resume auto{added} --pretrain-checkpoint {CHECKPOINT} --reset-optimizer" in str(error.value)
