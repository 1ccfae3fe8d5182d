"""What a run is, compared as a whole: continued in any spelling, with the same base, reference, teacher, data and template."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from factories import UNMEASURED, TinyRun, assert_same_run, is_rank
from safetensors.torch import load_file

from checkpoint import store
from data_preparation_utils import PreparationOptions, prepare_set
from tokenizer import load_tokenizer

QUIET = {**UNMEASURED, "SAVE_EVERY": 2, "MAX_STEPS": 4}


@pytest.mark.parametrize("mode, setting", [
    ("dpo-stored", "DPO_CHECKPOINT"), ("dpo-live", "DPO_CHECKPOINT"), ("kto", "DPO_CHECKPOINT"), ("kto", "INSTRUCT_CHECKPOINT"),
    ("lora-dpo", "DPO_CHECKPOINT"), ("sft", "INSTRUCT_CHECKPOINT"), ("lora-sft", "INSTRUCT_CHECKPOINT")])
def test_a_checkpoint_of_the_stage_is_continued_in_any_spelling(mode, setting, stages, tmp_path):
    """In its own run, and in a new one; with RESUME or with the stage's setting: the same bits as without interruption."""
    whole = stages.run(mode, tmp_path / "whole", **QUIET).trained()
    half = whole.copy(tmp_path / "half")
    shutil.rmtree(half.checkpoint(4))
    for name, where, changes in (("own", setting, {}), ("own by RESUME", "RESUME", {}),
                                 ("new", setting, {"RUN_NAME": "new"}), ("new by RESUME", "RESUME", {"RUN_NAME": "other"})):
        run = half.copy(tmp_path / name.replace(" ", "-"), **({"PRETRAIN_CHECKPOINT": "none"} if changes else {}))
        assert run.train(**changes | {where: (half if changes else run).checkpoint(2)}) == 0, name
        run.settings |= changes
        assert run.hashes(4) == whole.hashes(4), name
        lines = {each["step"]: each for each in run.lines("ledger")}
        assert [lines[step]["loss"] for step in (3, 4)] == [each["loss"] for each in whole.lines("ledger")[2:]], name


def adapters_of_peft(run: TinyRun, folder: Path) -> Path:
    """A checkpoint's adapters as PEFT has them, without what Paddock adds."""
    shutil.copytree(run.checkpoint(4), folder)
    for name in ("MANIFEST.json", "trainer_state.json", "optimizer.safetensors", "paddock_adapter.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def test_adapters_are_a_start_of_lora_on_other_data(stages, tmp_path, capsys):
    """Of PEFT, or of another stage: the first step begins with their weights, and PEFT computes the same loss."""
    first = stages.run("lora-sft", tmp_path / "first", **QUIET, LORA_DROPOUT=0, LORA_TARGET_MODULES="wq,wv").trained()
    folder = adapters_of_peft(first, tmp_path / "adapters")
    start = {"PRETRAIN_CHECKPOINT": "none", "INSTRUCT_CHECKPOINT": folder, "LEARNING_RATE": 1e-9, "LORA_DROPOUT": 0}
    again = stages.run("lora-sft", tmp_path / "again", **QUIET | {"MAX_STEPS": 1, "SEED": 5, "VALIDATE_EVERY": 1}, **start).trained()
    weights = [load_file(place / "adapter_model.safetensors") for place in (folder, again.checkpoint(1))]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])
    assert any(tensor.abs().max() > 0 for name, tensor in weights[0].items() if "lora_B" in name)
    assert store.read_state(again.checkpoint(1))["progress"]["step"] == 1

    # The reference of preferences is the model that the run starts from, adapters included.
    dpo = stages.run("lora-dpo", tmp_path / "dpo", **QUIET | {"MAX_STEPS": 2, "SAVE_EVERY": 1}, PRETRAIN_CHECKPOINT="none", INSTRUCT_CHECKPOINT=folder).trained()
    assert dpo.column("reward_margin")[1] == pytest.approx(0, abs=1e-6)
    capsys.readouterr()
    assert stages.run("lora-sft", tmp_path / "rank", **QUIET, **start | {"LORA_RANK": 8}).train() == 2
    assert "LORA_RANK" in capsys.readouterr().err


def test_stored_references_belong_to_a_model_and_its_configuration(stages, tmp_path):
    """With another ROPE_THETA, the same weights are another reference; the margin before the first update is 0."""
    pairs = shutil.copytree(stages.pairs, tmp_path / "pairs")
    for number, changes in enumerate(({}, {"ROPE_THETA": 1000.0}, {"NORM_EPS": 0.1})):
        run = stages.run("dpo-stored", tmp_path / "runs", **QUIET | {"MAX_STEPS": 1}, DPO_DATA_PATH=pairs, RUN_NAME=f"run-{number}", **changes).trained()
        assert run.column("reward_margin")[1] == pytest.approx(0, abs=1e-5), changes


def test_data_of_another_template_is_refused(stages, tmp_path, capsys):
    """Prepared with template A, trained with a tokenizer folder that has template B."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    load_tokenizer(str(stages.prepared.tokenizer)).save_huggingface(folder)
    template = "{% for m in messages %}<|start_header_id|>{{ m.role }}:{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant:{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    options = PreparationOptions(str(folder), "auto", 100_000, 0.1, workers=1)
    chats = prepare_set("chats", str(stages.chats.parents[1] / "chats.jsonl"), tmp_path / "chats", options)
    run = stages.run("sft", tmp_path / "runs", **QUIET | {"MAX_STEPS": 1}, SFT_DATA_PATH=chats, TOKENIZER_PATH=folder).trained()
    (folder / "chat_template.jinja").write_text(template.replace("role }}:", "role }}> "))
    capsys.readouterr()
    other = stages.run("sft", tmp_path / "runs", **QUIET | {"MAX_STEPS": 1}, SFT_DATA_PATH=chats, TOKENIZER_PATH=folder, RUN_NAME="other")
    assert other.train() == 3 and other.train(CHECK="true") == 3
    printed = capsys.readouterr()
    assert "was prepared with another chat template" in printed.err and "Ready to train" not in printed.out
    assert run.train(MAX_STEPS=2) == 0 and "another chat template" in capsys.readouterr().err, "a started run is told"
    told = stages.run("sft", tmp_path / "runs", **QUIET | {"MAX_STEPS": 1}, RUN_NAME="told", SYSTEM_PROMPT="Be brief.")
    assert told.train() == 0 and "SYSTEM_PROMPT='Be brief.' has no effect" in capsys.readouterr().err


def test_a_tokenizer_of_equal_size_with_other_tokens_is_refused(stages, tmp_path, capsys):
    model = shutil.copytree(stages.base, tmp_path / "model")
    for name in ("MANIFEST.json", "trainer_state.json", "optimizer.safetensors"):
        (model / name).unlink()
    document = json.loads((model / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (model / "tokenizer.json").write_text(json.dumps(document))
    assert stages.run("sft", tmp_path / "runs", **QUIET, PRETRAIN_CHECKPOINT=model).train() == 5
    assert "there and" in (error := capsys.readouterr().err) and "TOKENIZER_PATH" in error


def test_a_distilled_run_goes_on_with_the_teacher_that_it_had(stages, tmp_path, capsys):
    teacher = TinyRun(stages.prepared, tmp_path, **UNMEASURED, RUN_NAME="teacher", MAX_STEPS=2, SAVE_EVERY=2).trained()
    settings = {**QUIET, "TEACHER_MODEL": "teacher"}
    whole = stages.run("distilled", tmp_path, **settings, RUN_NAME="whole").trained()
    run = stages.run("distilled", tmp_path, **settings | {"MAX_STEPS": 4, "STOP_STEP": 2})
    assert run.train() == 0
    assert teacher.train(MAX_STEPS=6, KEEP_LAST=1, KEEP_BEST=0) == 0 and teacher.steps_saved() == [2, 6], "the teacher is kept"
    del run.settings["STOP_STEP"]
    assert run.train() == 0 and run.hashes(4) == whole.hashes(4)
    capsys.readouterr()
    other = shutil.copytree(teacher.checkpoint(2), tmp_path / "other")  # the same weights, used in another way
    for name in ("MANIFEST.json", "trainer_state.json"):
        (other / name).unlink()
    (other / "config.json").write_text((other / "config.json").read_text().replace('"rope_theta": 500000.0', '"rope_theta": 1000.0'))
    for another in (stages.base, other):
        assert run.train(TEACHER_MODEL=another, MAX_STEPS=6) == 5 and "TEACHER_MODEL was" in capsys.readouterr().err, another


def test_the_first_layers_of_a_model_are_a_model(stages, tmp_path, capsys):
    """As if they were a folder of their own; elsewhere than in pretraining only by a flag."""
    pretrain = {"TRAINING_STAGE": "pretrain", "N_LAYERS": 1, **QUIET | {"MAX_STEPS": 1, "LEARNING_RATE": 1e-12}}
    run = stages.run("sft", tmp_path, **pretrain, PRETRAIN_CHECKPOINT=stages.base, RESET_OPTIMIZER="true").trained()
    assert "N_LAYERS=1 keeps the first 1 of the 2 layers" in capsys.readouterr().out
    cut, base = load_file(run.checkpoint(1) / "model.safetensors"), load_file(stages.base / "model.safetensors")
    assert cut.keys() == {name for name in base if "layers.1." not in name}
    assert all(torch.allclose(cut[name], base[name], atol=1e-6) for name in cut)
    (tmp_path / "env").write_text("N_LAYERS=1\n")
    sft = stages.run("sft", tmp_path, **QUIET | {"MAX_STEPS": 1}, RUN_NAME="sft", ENV_FILE=tmp_path / "env")
    del sft.settings["N_LAYERS"]
    assert sft.train() == 5 and "--n-layers 1" in capsys.readouterr().err
    assert sft.train(N_LAYERS=1) == 0
    dpo = stages.run("dpo-stored", tmp_path, **QUIET | {"MAX_STEPS": 1}, RUN_NAME="dpo", N_LAYERS=1, RANDOM_INIT="false").trained()
    assert dpo.column("reward_margin")[1] == pytest.approx(0, abs=1e-5), "the cut model is the reference"


def other_data() -> None:
    """On another machine, the path of the data leads to other data."""
    if is_rank(1):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.chdir(os.environ["OTHER_PLACE"])


@pytest.mark.parametrize("differs, part", [("data", "tokens"), ("held", "held_out")])
def test_a_machine_with_other_data_is_named(differs, part, prepared, tmp_path, monkeypatch):
    from factories import prepare

    here, there = tmp_path / "here", tmp_path / "there"
    made = prepare(tmp_path / "made", seed=3).shards
    for name in ("data", "held"):
        shutil.copytree(prepared.shards, here / name)
        shutil.copytree(made if name == differs else prepared.shards, there / name)
    monkeypatch.chdir(here)
    run = TinyRun(prepared, tmp_path / "runs", **UNMEASURED | {"VALIDATE_EVERY": 2}, PRETRAIN_DATA_PATH="data", VALIDATION_DATA_PATH="held", MAX_STEPS=2)
    text = run.ends([3, 3], other_data, env={"OTHER_PLACE": str(there), "LOCAL_WORLD_SIZE": "1"})
    assert f"data is not the data of the first machine (other {part})" in text


def test_a_restart_keeps_the_settings_of_the_files_that_were_edited_meanwhile(prepared, tmp_path, monkeypatch):
    """PADDOCK_RESTART has what rank 0 wrote for the launcher."""
    env = tmp_path / "env"
    env.write_text("MAX_STEPS=4\nLEARNING_RATE=0.01\n")
    run = TinyRun(prepared, tmp_path / "runs", **UNMEASURED, ENV_FILE=env, SAVE_EVERY=2)
    whole = TinyRun(prepared, tmp_path / "whole", **UNMEASURED, ENV_FILE=env, SAVE_EVERY=2)
    for each in (run, whole):
        for name in ("MAX_STEPS", "LEARNING_RATE"):
            del each.settings[name]
    assert whole.train() == 0
    error_file = tmp_path / "rank" / "error.json"
    error_file.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    from factories import at_step
    with pytest.raises(RuntimeError), at_step(4, lambda: (_ for _ in ()).throw(RuntimeError("a crash"))):
        run.train()
    settings = json.loads((error_file.parent / "settings").read_text())
    env.write_text("MAX_STEPS=9\nLEARNING_RATE=0.5\n")
    monkeypatch.setenv("PADDOCK_RESTART", json.dumps({"restart": 1, "cause": "a crash", "settings": settings}))
    assert run.train() == 0
    assert run.hashes(4) == whole.hashes(4) and run.steps_saved()[-1] == 4


def other_settings() -> None:
    """Rank 1 finds other settings in its environment than rank 0."""
    if is_rank(1):
        os.environ |= {"SEED": "7", "MAX_STEPS": "1", "LEARNING_RATE": "1", "SAVE_EVERY": "1", "VALIDATE_EVERY": "1", "PRECISION": "bf16"}


def test_ranks_get_the_plan_of_rank_0_and_read_no_settings(prepared, tmp_path):
    settings = {**UNMEASURED, "MAX_STEPS": 3}
    run, other = (TinyRun(prepared, tmp_path / name, **settings) for name in ("same", "other"))
    run.ends([0, 0])
    other.ends([0, 0], other_settings)
    assert_same_run(run, other, 3)
