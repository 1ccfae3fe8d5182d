"""Where a run starts (new, continue or from), by which settings, and what of them is refused; and a plan as JSON."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from commands import ROOT
from factories import checkpoint_without_weights, model_without_weights
from hypothesis import HealthCheck
from hypothesis import given as vary
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.errors import CheckpointError, PaddockError, SettingsError
from parallel.process import RESTART
from plan.make import Plan, complete, make_plan
from plan.starts import Known, Start
from tests.plan.test_inherited import not_used

SHAPE = {"DIM": 64, "N_HEADS": 4, "N_LAYERS": 2}
PRETRAINED = {"PRETRAIN_DATA_PATH": "text", "TOKENIZER_PATH": "t", "LEARNING_RATE": 0.25, "MAX_STEPS": 7, **SHAPE}
TUNED = {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "chats", "TOKENIZER_PATH": "t", "PRETRAIN_CHECKPOINT": "base", "LEARNING_RATE": 0.25,
         "MAX_STEPS": 7, **SHAPE}
PRETRAIN = ["--pretrain-data-path", "text", "--tokenizer-path", "t"]
SFT = ["--training-stage", "sft", "--sft-data-path", "chats", "--tokenizer-path", "t"]
DPO = ["--training-stage", "dpo", "--dpo-data-path", "pairs", "--tokenizer-path", "t"]
STEP_3, STEP_5 = (f"runs/tuned/checkpoints/step-0000000{step}" for step in (3, 5))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RESTART, raising=False)
    for model in ("base", "chat"):
        model_without_weights(Path(model))
    for place in ("text", "chats", "t"):
        Path(place).touch()
    checkpoint_without_weights(Path("runs/pretrained"), 4, **PRETRAINED)
    for step in (3, 5):
        checkpoint_without_weights(Path("runs/tuned"), step, {"begun_from": "base"}, **TUNED)
    checkpoint_without_weights(Path("runs/adapted"), 2, {"begun_from": "base"}, **TUNED, LORA_ENABLED=True)
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 5, "base_model_name_or_path": "base"}))
    return tmp_path


def plan(*flags, env="", **environ) -> Plan:
    Path(".env").write_text(env)
    return make_plan([*map(str, flags)], environ)


def refused(*flags, env="", error=PaddockError, **environ) -> str:
    with pytest.raises(error) as caught:
        plan(*flags, env=env, **environ)
    return str(caught.value)


KINDS = {  # name -> (flags, kind, folder, step, is_own)
    "a new run": ([*PRETRAIN, "--run-name", "new"], "new", None, 0, False),
    "its own newest": (["--run-name", "tuned"], "continue", STEP_5, 5, True),
    "its own, with the same command": ([*SFT, "--run-name", "tuned", "--pretrain-checkpoint", "base"], "continue", STEP_5, 5, True),
    "its own, by another path": ([*SFT, "--run-name", "tuned", "--pretrain-checkpoint", "./base"], "continue", STEP_5, 5, True),
    "back to a step": (["--run-name", "tuned", "--pretrain-checkpoint", "step-00000003"], "continue", STEP_3, 3, True),
    "back by RESUME": (["--run-name", "tuned", "--resume", STEP_3], "continue", STEP_3, 3, True),
    "RESUME of another run": (["--run-name", "new", "--resume", "tuned"], "continue", STEP_5, 5, False),
    "its start again": ([*SFT, "--run-name", "tuned", "--resume", "never", "--pretrain-checkpoint", "base"], "from", "base", 0, False),
    "the same stage": ([*SFT, "--run-name", "new", "--instruct-checkpoint", STEP_3], "continue", STEP_3, 3, False),
    "the same stage, reset": ([*SFT, "--run-name", "new", "--instruct-checkpoint", STEP_3, "--reset-optimizer"], "from", STEP_3, 0, False),
    "another stage": ([*DPO, "--instruct-checkpoint", "tuned"], "from", STEP_5, 0, False),
    "a model": ([*SFT, "--pretrain-checkpoint", "base"], "from", "base", 0, False),
    "a model, for pretraining": ([*PRETRAIN, "--pretrain-checkpoint", "base"], "from", "base", 0, False),
    "adapters of the stage": ([*SFT, "--run-name", "new", "--instruct-checkpoint", "adapted"], "continue",
                              "runs/adapted/checkpoints/step-00000002", 2, False),
    "adapters of PEFT": ([*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters"], "from", "adapters", 0, False),
    "new adapters": ([*SFT, "--lora-enabled", "--run-name", "new", "--instruct-checkpoint", "tuned"], "from", STEP_5, 0, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_there_are_three_kinds_of_start(name):
    flags, *expected = KINDS[name]
    start = plan(*flags).start
    assert [start.kind, start.folder, start.step, start.is_own] == expected
    assert start.base == {"adapters of PEFT": "base", "new adapters": STEP_5}.get(name)


def test_adapters_of_peft_bring_their_rank():
    config = plan(*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters").config
    assert (config.lora_rank, config.lora_alpha, config.dim) == (3, 5, 2048)


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_a_start_in_a_higher_layer_replaces_the_one_in_env(place):
    Path("run.json").write_text('{"instruct_checkpoint": "chat"}')
    env, flags = "PRETRAIN_CHECKPOINT=base\nDPO_CHECKPOINT=tuned\n", {"flag": ["--instruct-checkpoint", "chat"], "file": ["--config", "run.json"]}
    loaded = plan(*SFT, *flags.get(place, ()), env=env, **{"INSTRUCT_CHECKPOINT": "chat"} if place == "environment" else {})
    assert loaded.start == Start("from", "chat", named="chat", setting="instruct_checkpoint")
    assert loaded.config.start_settings == ["instruct_checkpoint"] and not {"pretrain_checkpoint", "dpo_checkpoint"} & loaded.sources.keys()
    assert any(re.search(r"INSTRUCT_CHECKPOINT.*, not .*PRETRAIN_CHECKPOINT.* or DPO_CHECKPOINT", note) for note in loaded.notes)


def test_within_a_layer_the_usual_start_of_the_stage_counts():
    env = "PRETRAIN_CHECKPOINT=base\nINSTRUCT_CHECKPOINT=chat\n"
    assert plan(*SFT, env=env).start.folder == "base"
    assert plan(*DPO, env=env).start.folder == "chat"
    assert plan(*DPO, "--pretrain-checkpoint", "base", env=env).start.folder == "base"


def test_a_started_run_keeps_its_start_unless_a_flag_names_another():
    loaded = plan("--run-name", "tuned", env="INSTRUCT_CHECKPOINT=chat\n")
    assert loaded.start.folder == STEP_5 and not_used(loaded) == ["INSTRUCT_CHECKPOINT=chat"]
    assert loaded.config.start_settings == ["pretrain_checkpoint"]
    for given in ({"env": "INSTRUCT_CHECKPOINT=chat\n", "PRETRAIN_CHECKPOINT": "chat"}, {"INSTRUCT_CHECKPOINT": "chat"}):
        error = refused("--run-name", "tuned", error=CheckpointError, **given)
        assert error.startswith("runs/tuned has a run at step-00000005 that started from base, but the settings would restart it from chat")
    assert plan("--run-name", "tuned", PRETRAIN_CHECKPOINT="base", env="INSTRUCT_CHECKPOINT=chat\n").start.folder == STEP_5


def test_a_start_in_env_that_is_gone_does_not_stop_a_started_run():
    loaded = plan("--run-name", "tuned", env="INSTRUCT_CHECKPOINT=gone\n")
    assert loaded.start.folder == STEP_5 and not_used(loaded) == ["INSTRUCT_CHECKPOINT=gone"]


def test_going_back_to_a_step_is_warned_of():
    for given in ({"env": f"PRETRAIN_CHECKPOINT={STEP_3}\n"}, {"PRETRAIN_CHECKPOINT": STEP_3}, {"RESUME": STEP_3}):
        loaded = plan("--run-name", "tuned", **given)
        assert loaded.start.step == 3 and loaded.warnings[0] == f"{STEP_5} is not used, because the settings name {STEP_3}"
        assert not_used(loaded) == []


@pytest.mark.parametrize("flags, words", [
    ([*SFT, "--pretrain-checkpoint", "gone"], "PRETRAIN_CHECKPOINT=gone (command line): there is no checkpoint 'gone' in runs or at that path"),
    ([*SFT, "--pretrain-checkpoint", "text"], "PRETRAIN_CHECKPOINT=text (command line): text is a file; name the folder"),
    ([*SFT, "--pretrain-checkpoint", "adapters", "--lora-enabled", "false"], "adapters contains adapters, not a full model; train them with LORA_ENABLED=true, or merge them first"),
    ([*SFT, "--run-name", "new", "--instruct-checkpoint", "adapted", "--lora-enabled", "false"], "merge them first"),
    ([*SFT, "--run-name", "tuned", "--resume", "never", "--pretrain-checkpoint", "tuned"], "belongs to the run that RESUME=never would move"),
    ([*DPO, "--run-name", "tuned", "--instruct-checkpoint", "tuned"], "runs/tuned has a run of TRAINING_STAGE=sft at step-00000005"),
    (["--run-name", "tuned", "--resume", "pretrained"], "runs/tuned has a run at step-00000005"),
    ([*SFT, "--run-name", "new", "--instruct-checkpoint", STEP_5, "--max-steps", 5], f"{STEP_5} is at step 5, which leaves no step of MAX_STEPS=5"),
    ([*SFT, "--pretrain-checkpoint", "base", "--start-step", 4, "--max-steps", 4], "START_STEP=4 leaves no step of MAX_STEPS=4"),
    (["--run-name", "new", "--resume", STEP_3, "--instruct-checkpoint", "chat"],
     f"INSTRUCT_CHECKPOINT=chat conflicts with RESUME={STEP_3}, a checkpoint of a run that started from base; remove one of them"),
    (["--run-name", "new", "--resume", "pretrained", "--pretrain-checkpoint", "chat"], "that started from initial weights"),
    (["--run-name", "new", "--resume", "pretrained", "--training-stage", "sft"], "a checkpoint of TRAINING_STAGE=pretrain, which TRAINING_STAGE=sft"),
    (["--run-name", "new", "--resume", "base"], "RESUME=base names a model without a trainer state, which"),
    (["--run-name", "new", "--resume", "adapters"], "RESUME=adapters names a model without a trainer state, which"),
    (["--run-name", "new", "--resume", "old/gone"], "RESUME=old/gone (command line): there is no checkpoint 'old/gone'"),
    (["--resume", STEP_3, "--run-name", "adapted"], "runs/adapted has a run at step-00000002")])
def test_an_impossible_start_is_an_error(flags, words):
    assert words in refused(*flags)


def test_a_damaged_checkpoint_is_skipped_with_a_warning():
    """As the facts report it, with which the plan is made again."""
    loaded = make_plan(["--run-name", "tuned"], {}, Known(damaged={STEP_5: f"{STEP_5}/model.safetensors is damaged"}))
    assert loaded.start.folder == STEP_3
    assert loaded.warnings[0] == f"skipping a checkpoint: {STEP_5}/model.safetensors is damaged"
    with pytest.raises(CheckpointError, match="none of 2 checkpoints in runs/tuned/checkpoints can be used, the first because: a"):
        make_plan(["--run-name", "tuned"], {}, Known(damaged={STEP_3: "b", STEP_5: "a"}))


def test_a_model_of_the_hub_is_named_until_it_is_here():
    flags = [*SFT, "--pretrain-checkpoint", "owner/model@main"]
    assert plan(*flags).start == Start("from", named="owner/model@main", setting="pretrain_checkpoint", download="owner/model@main")
    downloaded = make_plan(flags, {}, Known(hub={"owner/model@main": "base"}))
    assert (downloaded.start.folder, downloaded.start.download, downloaded.config.dim) == ("base", None, 2048)


def test_a_model_is_cut_by_a_flag_or_in_pretraining():
    cut = "N_LAYERS=1 keeps the first 1 of the 2 layers of base, with its embedding, norm and head"
    for loaded in (plan(*PRETRAIN, "--pretrain-checkpoint", "base", env="N_LAYERS=1\n"), plan(*SFT, "--pretrain-checkpoint", "base", "--n-layers", 1)):
        assert loaded.start.layers == loaded.config.n_layers == 1 and cut in loaded.notes
    assert "use its first layers alone with the flag --n-layers 1" in refused(*SFT, "--pretrain-checkpoint", "base", env="N_LAYERS=1\n")
    assert "N_LAYERS is 2 there and 3 here" in refused(*PRETRAIN, "--pretrain-checkpoint", "base", "--n-layers", 3)


@pytest.mark.parametrize("name, value", [("RESET_OPTIMIZER", "true"), ("START_STEP", 2), ("START_STEP", 0)])
def test_a_setting_of_a_start_needs_one_and_never_restarts_a_run(name, value):
    flag, needs = [f"--{name.lower().replace('_', '-')}", value], f"{name}={value} needs a start checkpoint"
    assert needs in refused(*PRETRAIN, *flag, error=SettingsError)
    assert needs in refused(*PRETRAIN, "--run-name", "pretrained", "--resume", "never", env=f"{name}={value}\n", error=SettingsError)
    # For a run with steps, one in `.env` is not used, and any other refused.
    loaded = plan("--run-name", "tuned", env=f"{name}={value}\n")
    assert loaded.start.step == 5 and not_used(loaded) == [f"{name}={value}"]
    assert (loaded.config.reset_optimizer, loaded.config.start_step) == (False, None)
    for given in ({name: str(value)}, {name: str(value), "PRETRAIN_CHECKPOINT": "base"}):
        error = refused("--run-name", "tuned", error=SettingsError, **given)
        assert error.startswith(f"{name}={value} would restart the run in runs/tuned, which is at step 5. Choose another RUN_NAME")
    error = refused("--run-name", "new", "--resume", STEP_3, *flag, error=SettingsError)
    assert error.startswith(f"{name} conflicts with RESUME={STEP_3}, ") and f"set PRETRAIN_CHECKPOINT={STEP_3} and RESUME=auto" in error


def test_the_command_with_which_a_run_was_reset_continues_it():
    checkpoint_without_weights(Path("runs/reset"), 12, {"begun_from": STEP_3}, **TUNED | {
        "PRETRAIN_CHECKPOINT": STEP_3, "RESET_OPTIMIZER": True, "START_STEP": 10})
    loaded = plan(*SFT, "--run-name", "reset", "--pretrain-checkpoint", STEP_3, "--reset-optimizer", "--start-step", 10)
    assert (loaded.start.step, loaded.start.is_own) == (12, True)
    assert "START_STEP=11 would restart" in refused(*SFT, "--run-name", "reset", "--start-step", 11)


def test_the_last_possible_starts_are_taken():
    continued = plan(*SFT, "--run-name", "new", "--instruct-checkpoint", STEP_3, "--start-step", 2)
    assert (continued.start.kind, continued.config.start_step) == ("continue", 2)
    assert plan(*SFT, "--pretrain-checkpoint", "base", "--start-step", 3, "--max-steps", 4).config.start_step == 3
    assert plan(*SFT, "--run-name", "new", "--instruct-checkpoint", STEP_5, "--max-steps", 6).start.step == 5
    assert plan("--run-name", "new", "--resume", STEP_3, "--pretrain-checkpoint", "base").start.step == 3


SCALED = {"rope_scaling_factor": 8.0, "rope_original_max_len": 32}


@pytest.mark.parametrize("shape, flags, context", [({}, [], 64), ({}, ["--rope-scaling-factor", 4], 256), (SCALED, [], 256), (SCALED, ["--rope-scaling-factor", 16], 512)])
def test_scaling_lengthens_what_a_model_has_learned_by_its_ratio_to_the_model_s_own(shape, flags, context):
    model_without_weights(Path("model"), context=64, **shape)
    for length, is_told in ((context, False), (2 * context, True)):
        loaded = plan(*SFT, "--pretrain-checkpoint", "model", *flags, "--max-seq-len", length)
        assert any(f"is longer than the {context} positions of the model" in each for each in loaded.warnings) == is_told


@pytest.mark.parametrize("env", ["RESET_OPTIMIZER=true", "START_STEP=2", "PRETRAIN_CHECKPOINT=chat", "TRAINING_STAGE=dpo", "LEARNING_RATE=3"])
def test_resume_of_a_path_does_not_use_what_env_says_of_another_start(env):
    loaded = plan("--run-name", "new", "--resume", STEP_3, env=f"{env}\n")
    assert loaded.start.step == 3 and not_used(loaded) == [env]
    name = env.partition("=")[0]
    assert loaded.config.public()[name] == (TUNED | {"PRETRAIN_CHECKPOINT": None, "RESET_OPTIMIZER": False}).get(name)


PLACES = {".env": 0, "a preset that .env names": 0, "a preset": 0, "--config": 0, "the environment": 1, "a flag": 1}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("flags, own", [(["--run-name", "tuned"], True), (["--run-name", "new", "--resume", "tuned"], False),
                                        ([*SFT, "--run-name", "new", "--instruct-checkpoint", "tuned"], False)])
def test_a_record_is_above_files_and_below_flags(place, flags, own, monkeypatch):
    """Of curve settings; safe ones and MAX_STEPS apply from everywhere."""
    values = {"LEARNING_RATE": 3, "MAX_STEPS": 20, "LOG_EVERY": 2}
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    Path("presets").mkdir()
    Path("presets/mine.env").write_text(text)
    for module in ("layers", "messages"):
        monkeypatch.setattr(f"plan.{module}.PRESETS_DIR", Path("presets").resolve())
    Path("run.json").write_text(json.dumps({name.lower(): value for name, value in values.items()}))
    env = {".env": text, "a preset that .env names": "PRESET=mine\n"}.get(place, "")
    more = {"a preset": ["--preset", "mine"], "--config": ["--config", "run.json"], "a flag": [
        f"--{name.replace('_', '-')}={value}" for name, value in values.items()]}.get(place, [])
    loaded = plan(*flags, *more, env=env, **{name: str(value) for name, value in values.items()} if place == "the environment" else {})
    assert loaded.start.is_own == own and (loaded.config.max_steps, loaded.config.log_every) == (20, 2)
    assert loaded.config.learning_rate == (3 if PLACES[place] else 0.25)
    assert not_used(loaded) == ([] if PLACES[place] else ["LEARNING_RATE=3"])
    assert ("learning_rate" in loaded.sources) == bool(PLACES[place])


@pytest.mark.parametrize("setting, line", [("SEED", "SEED=7"), ("DIM", "DIM=128"), ("INIT_STD", "INIT_STD=0.5"), ("DEPTH", "DEPTH=3"),
                                           ("DOCUMENT_MASK", "DOCUMENT_MASK=false")])
def test_fixed_settings_and_those_by_content_come_from_the_record_too(setting, line):
    loaded = plan("--run-name", "tuned", env=f"{line}\n")
    assert not_used(loaded) == [line] and loaded.config.public()[setting] != line.partition("=")[2]
    assert loaded.config == plan("--run-name", "tuned").config
    explicit = plan("--run-name", "tuned", f"--{line.lower().replace('_', '-')}")
    assert not_used(explicit) == [] and explicit.config != loaded.config, "a flag is compared with the record, and refused or told"


@pytest.mark.parametrize("data", ["./old/chats", "/old/chats", "old/chats"])
def test_a_path_in_env_is_used_if_the_recorded_one_is_gone(data):
    checkpoint_without_weights(Path("runs/moved"), 3, **TUNED | {"SFT_DATA_PATH": data, "TOKENIZER_PATH": "./t"})
    env = "SFT_DATA_PATH=new/chats\nTOKENIZER_PATH=elsewhere\n"
    loaded = plan("--run-name", "moved", env=env)
    assert (loaded.config.sft_data_path, loaded.config.tokenizer_path) == ("new/chats", "./t")
    assert not_used(loaded) == ["TOKENIZER_PATH=elsewhere"]
    Path("t").unlink()
    loaded = plan("--run-name", "moved", env=env)
    assert loaded.config.tokenizer_path == "elsewhere" and not_used(loaded) == []


@pytest.mark.parametrize("env, flags, environ, expected", [
    ("EPOCHS=2", ["--max-steps", 9], {}, (None, 9)), ("MAX_STEPS=9", ["--epochs", 2], {}, (2, None)),
    ("EPOCHS=2", [], {"MAX_STEPS": "9"}, (None, 9)), ("MAX_STEPS=9", [], {"EPOCHS": "2"}, (2, None)), ("EPOCHS=none", ["--max-steps", 9], {}, (None, 9))])
@pytest.mark.parametrize("run", ["new", "tuned"])
def test_of_the_two_lengths_the_one_in_the_higher_layer_counts(run, env, flags, environ, expected):
    loaded = plan(*SFT, "--pretrain-checkpoint", "base", "--run-name", run, *flags, env=f"{env}\n", **environ)
    epochs, steps = expected
    assert loaded.config.epochs == epochs and ("max_steps" in loaded.deferred) == (epochs is not None)
    assert steps is None or loaded.config.max_steps == steps
    assert any(" replaces " in note for note in loaded.notes) == ("none" not in env)


@pytest.mark.parametrize("epochs", ["-1", "0", "many"])
@pytest.mark.parametrize("steps", ["", "MAX_STEPS=9\n"])
def test_a_length_that_is_none_is_an_error_and_not_the_default(epochs, steps):
    error = refused(*SFT, "--pretrain-checkpoint", "base", "--epochs", epochs, env=steps, error=SettingsError)
    assert error.startswith(f"command line: EPOCHS={epochs}: ")


def test_both_lengths_in_a_layer_are_an_error():
    error = refused("--run-name", "tuned", env="MAX_STEPS=9\nEPOCHS=2\n", error=SettingsError)
    assert error == "EPOCHS=2 and MAX_STEPS=9 are both set; keep one"


def test_the_settings_before_a_restart_replace_env_and_files():
    """The user may have edited them for the next run. Flags are those of the job."""
    before = plan(*SFT, "--pretrain-checkpoint", "base", "--seed", 3, env="LEARNING_RATE=0.125\nPRESET=stable\nLOG_EVERY=4\n", DEBUG="true")
    settings = json.loads(json.dumps(before.of_files()))
    assert settings["learning_rate"] == [0.125, ".env:1"] and not {"seed", "training_stage", "debug"} & settings.keys()
    restart = {RESTART: json.dumps({"restart": 1, "cause": "", "settings": settings})}
    Path("run.json").write_text('{"seed": 11, "warmup_steps": 5}')
    flags = [*SFT, "--pretrain-checkpoint", "base", "--seed", 3]
    after = plan(*flags, "--config", "run.json", env="LEARNING_RATE=9\nTYPO=1\nMAX_STEPS=1\n", DEBUG="true", **restart)
    assert after.config == before.config and after.sources == before.sources
    first = plan(*flags, env="LEARNING_RATE=9\n", **{RESTART: json.dumps({"restart": 0, "cause": ""})})
    assert first.config.learning_rate == 9, "there is nothing to keep"


def test_a_restart_of_a_run_with_steps_keeps_the_length_and_the_intervals_too():
    """The record has the rest, whatever `.env` says."""
    flags = [*SFT, "--pretrain-checkpoint", "base", "--run-name", "young"]
    before = plan(*flags, env="LEARNING_RATE=0.125\nMAX_STEPS=20\nLOG_EVERY=4\n")
    settings = {name.upper(): value for name, value in before.config.model_dump().items()}
    checkpoint_without_weights(Path("runs/young"), 6, {"begun_from": "base"}, **settings)
    edited = "LEARNING_RATE=9\nMAX_STEPS=1\nLOG_EVERY=9\nTRAINING_STAGE=dpo\n"
    after = plan(*flags, env=edited, **{RESTART: json.dumps({"restart": 1, "cause": "", "settings": before.of_files()})})
    assert after.start.step == 6 and after.config == before.config and not_used(after) == []
    by_hand = plan(*flags, env=edited).config
    assert (by_hand.learning_rate, by_hand.max_steps, by_hand.log_every) == (0.125, 1, 9)


STARTS = ["base", "chat", "gone", "adapters", "adapted", "tuned", "pretrained", "owner/model", STEP_3, "step-00000005", "new", "text", "", "."]
POOL = {**dict.fromkeys(("pretrain_checkpoint", "instruct_checkpoint", "dpo_checkpoint", "teacher_model"), STARTS), "resume": ["auto", "never", *STARTS],
        "run_name": ["new", "tuned", "pretrained", "adapted"], "training_stage": ["pretrain", "sft", "dpo", "grpo"],
        **dict.fromkeys(("reset_optimizer", "lora_enabled", "random_init", "distillation_enabled", "check"), ["true", "false"]),
        "start_step": [0, 3, 99], "max_steps": [0, 4, 50], "stop_step": [1, 4], "epochs": [1, "none"], "n_layers": [1, 3], "depth": [2], "preset": ["stable", "sample"],
        "world_size": [1, 4], "device_memory": [80], "output_dir": ["runs", "."]}
chosen = st.lists(st.sampled_from(sorted(POOL)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(POOL[name]))),
                  max_size=5, unique_by=lambda pair: pair[0])


@hypothesis_settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@vary(chosen, chosen, st.sampled_from(["pretrain", "sft", "dpo", "grpo"]))
def test_any_settings_of_a_start_give_a_plan_or_an_error_for_the_user(in_env, by_flag, stage):
    data = [f"--{name}-data-path=chats" for name in ("pretrain", "sft", "dpo", "grpo")]
    env = "".join(f"{name.upper()}={value}\n" for name, value in in_env if name != "check") + f"TRAINING_STAGE={stage}\n" * (
        "training_stage" not in dict(in_env))
    try:
        loaded = plan(*data, "--tokenizer-path=t", *(f"--{name.replace('_', '-')}={value}" for name, value in by_flag), env=env)
    except PaddockError as error:
        assert str(error)
        return
    assert Plan.from_json(json.loads(json.dumps(loaded.to_json()))).to_json() == loaded.to_json()
    if loaded.start.kind == "continue":
        assert not {*not_used(loaded)} & {f"{name.upper()}={value}" for name, value in by_flag}
        assert loaded.start.state["settings"]["TRAINING_STAGE"] == loaded.config.training_stage or not loaded.start.is_own


PLANS = {"new": (PRETRAIN, "DEPTH=2\nLOG_EVERY=3\n"), "continue": (["--run-name", "tuned"], "LEARNING_RATE=3\nEPOCHS=2\n"),
         "from": ([*SFT, "--pretrain-checkpoint", "base"], "WANDB_API_KEY=canary\nSEED=3\n"),
         "adapters": ([*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters"], ""),
         "other hardware": ([*SFT, "--pretrain-checkpoint", "base", "--check", "--world-size", 8], "")}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_survives_json_and_holds_no_secret(name):
    flags, env = PLANS[name]
    loaded = plan(*flags, env=f"{env}HF_TOKEN=canary-token\n", WANDB_API_KEY="canary-key")
    text = json.dumps(loaded.to_json())
    again = Plan.from_json(json.loads(text))
    assert "canary" not in text + repr(loaded) and loaded.exports["HF_TOKEN"] == "canary-token"
    assert again.exports == {} and again.start == loaded.start and again.sources == loaded.sources
    assert again.config == loaded.config and again.config.model_fields_set == loaded.config.model_fields_set
    assert again.to_json() == loaded.to_json()
    sent = ("notes", "warnings", "deferred", "check", "for_other_hardware", "identities", "generation", "token_ids")
    assert {field: getattr(again, field) for field in sent} == {field: getattr(loaded, field) for field in sent}
    assert complete(again, "cpu", 100).to_json() == complete(loaded, "cpu", 100).to_json()


def test_other_ranks_get_all_that_the_facts_add():
    complete_plan = replace(plan(*PRETRAIN), identities={"data": {"tokens": "a"}}, generation={"suppress_tokens": [3]}, token_ids={"output": [7]},
                            untrained_ids=(4, 5), notes=("a note",), warnings=("a warning",), deferred=("compile",), exports={})
    again = Plan.from_json(json.loads(json.dumps(complete_plan.to_json())))
    assert {each.name: getattr(again, each.name) for each in fields(Plan)} == {each.name: getattr(complete_plan, each.name) for each in fields(Plan)}


def test_a_plan_is_the_same_twice_and_writes_nothing(folder):
    def contents() -> list:
        return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.name != ".env")

    before = contents()
    for flags, env in PLANS.values():
        assert plan(*flags, env=env).to_json() == plan(*flags, env=env).to_json()
    assert contents() == before


def test_a_plan_needs_no_torch():
    """So a typo is reported before torch is loaded. Also with a start, adapters and a record."""
    script = ("import json, sys\nfrom plan.make import make_plan\n"
              "for flags in json.loads(sys.argv[1]):\n    make_plan(flags, {})\n"
              "print(*sorted({'torch', 'numpy.testing', 'transformers'} & sys.modules.keys()))")
    flags = json.dumps([[*map(str, flags)] for flags, _ in PLANS.values()])
    done = subprocess.run([sys.executable, "-c", script, flags], env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
