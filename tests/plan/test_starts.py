"""Where a run starts (new, continue or from), by which settings, and what of them is refused; and a plan as JSON."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from factories import checkpoint_without_weights, model_without_weights
from hypothesis import HealthCheck
from hypothesis import given as vary
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.errors import CheckpointError, PaddockError, SettingsError
from parallel.process import RESTART
from plan.make import Plan, complete, make_plan
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


KINDS = {  # name -> (flags, kind, folder, step, is_own), besides those of test_start_table.py
    "its own newest": (["--run-name", "tuned"], "continue", STEP_5, 5, True),
    "back to a step": (["--run-name", "tuned", "--pretrain-checkpoint", "step-00000003"], "continue", STEP_3, 3, True),
    "back by RESUME": (["--run-name", "tuned", "--resume", STEP_3], "continue", STEP_3, 3, True),
    "another stage": ([*DPO, "--instruct-checkpoint", "tuned"], "from", STEP_5, 0, False),
    "adapters of PEFT": ([*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters"], "from", "adapters", 0, False),
    "new adapters": ([*SFT, "--lora-enabled", "--run-name", "new", "--instruct-checkpoint", "tuned"], "from", STEP_5, 0, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_there_are_three_kinds_of_start(name):
    flags, *expected = KINDS[name]
    start = plan(*flags).start
    assert [start.kind, start.folder, start.step, start.is_own] == expected
    assert start.base == {"adapters of PEFT": "base", "new adapters": STEP_5}.get(name)


def test_a_started_run_keeps_its_start_unless_a_flag_names_another():
    loaded = plan("--run-name", "tuned", env="INSTRUCT_CHECKPOINT=chat\n")
    assert loaded.start.folder == STEP_5 and not_used(loaded) == ["INSTRUCT_CHECKPOINT=chat"]
    assert loaded.config.start_settings == ["pretrain_checkpoint"]
    for given in ({"env": "INSTRUCT_CHECKPOINT=chat\n", "PRETRAIN_CHECKPOINT": "chat"}, {"INSTRUCT_CHECKPOINT": "chat"}):
        error = refused("--run-name", "tuned", error=CheckpointError, **given)
        assert error.startswith("runs/tuned has a run at step-00000005 that started from base, but the settings would restart it from chat")
    assert plan("--run-name", "tuned", PRETRAIN_CHECKPOINT="base", env="INSTRUCT_CHECKPOINT=chat\n").start.folder == STEP_5


@pytest.mark.parametrize("setting", ["PRETRAIN_CHECKPOINT", "INSTRUCT_CHECKPOINT"])
def test_a_line_of_env_never_takes_a_run_back_to_an_earlier_step(setting):
    """It is there for the next stage, and stays for later starts, which would go back again."""
    line = f"{setting}={STEP_3}"
    loaded = plan("--run-name", "tuned", "--max-steps", 9, env=line + "\n")
    assert (loaded.start.folder, loaded.start.step) == (STEP_5, 5) and not_used(loaded) == [line]
    assert plan("--run-name", "tuned", "--max-steps", 9, **{setting: STEP_3}).start.folder == STEP_3


@pytest.mark.parametrize("flags, words", [
    ([*SFT, "--pretrain-checkpoint", "gone"], "PRETRAIN_CHECKPOINT=gone (command line): there is no checkpoint 'gone' in runs or at that path"),
    ([*SFT, "--pretrain-checkpoint", "text"], "PRETRAIN_CHECKPOINT=text (command line): text is a file; name the folder"),
    ([*SFT, "--pretrain-checkpoint", "adapters", "--lora-enabled", "false"], "adapters contains adapters, not a full model; train them with LORA_ENABLED=true, or merge them first"),
    ([*SFT, "--run-name", "new", "--instruct-checkpoint", "adapted", "--lora-enabled", "false"], "merge them first"),
    *(([*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters", f"--{name}", value], f"does not fit the adapters in adapters, with {theirs}; set that, or nothing")
      for name, value, theirs in (("lora-alpha", 6, "LORA_ALPHA=5"), ("lora-rank", 5, "LORA_RANK=3"), ("lora-rslora", "true", "LORA_RSLORA=false"))),
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


def test_adapters_bring_their_scale_and_the_rope_that_they_were_trained_with():
    checkpoint_without_weights(Path("runs/other"), 2, {"begun_from": "base"}, **TUNED, LORA_ENABLED=True, ROPE_THETA=7)
    loaded = plan(*DPO, "--lora-enabled", "--instruct-checkpoint", "other", "--lora-dropout", 0.5)
    assert (loaded.start.base, loaded.config.rope_theta, loaded.config.lora_dropout) == ("base", 7, 0.5)
    config = plan(*SFT, "--lora-enabled", "--pretrain-checkpoint", "adapters", "--lora-alpha", 5).config
    assert (config.lora_alpha, config.lora_rank, config.rope_theta) == (5, 3, 500_000)


def test_a_run_whose_checkpoints_are_gone_is_not_started_again_over_its_records():
    Path("runs/lost").mkdir()
    event = {"time": 1, "step": 5, "event": "saved", "seconds": 1, "checkpoint": "step-00000005"}
    Path("runs/lost/events.jsonl").write_text(json.dumps(event) + "\n")
    flags = [*SFT, "--run-name", "lost", "--pretrain-checkpoint", "base"]
    assert refused(*flags).startswith("runs/lost saved step-00000005, but has no checkpoint any more. Restore it, or start again")
    assert plan(*flags, "--resume", "never").start.kind == "from"
    Path("runs/lost/events.jsonl").write_text(json.dumps(event | {"event": "save"}) + "\n")  # killed in its first save
    assert plan(*flags).start.kind == "from"


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
        assert f"{name}={value} would restart the run in runs/tuned" in refused("--run-name", "tuned", error=SettingsError, **given)
    assert f"{name} conflicts with RESUME={STEP_3}, " in refused("--run-name", "new", "--resume", STEP_3, *flag, error=SettingsError)


SCALED = {"rope_scaling_factor": 8.0, "rope_original_max_len": 32}


@pytest.mark.parametrize("shape, flags, context", [({}, [], 64), ({}, ["--rope-scaling-factor", 4], 256), (SCALED, [], 256), (SCALED, ["--rope-scaling-factor", 16], 512)])
def test_scaling_lengthens_what_a_model_has_learned_by_its_ratio_to_the_model_s_own(shape, flags, context):
    model_without_weights(Path("model"), context=64, **shape)
    for length, is_told in ((context, False), (2 * context, True)):
        loaded = plan(*SFT, "--pretrain-checkpoint", "model", *flags, "--max-seq-len", length)
        assert any(f"is longer than the {context} positions of the model" in each for each in loaded.warnings) == is_told


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
    again = Plan.from_json(json.loads(json.dumps(loaded.to_json())))
    assert again.to_json() == loaded.to_json() and again.config.model_fields_set == loaded.config.model_fields_set
    if loaded.start.kind == "continue":
        assert not {*not_used(loaded)} & {f"{name.upper()}={value}" for name, value in by_flag}
        assert loaded.start.state["settings"]["TRAINING_STAGE"] == loaded.config.training_stage or not loaded.start.is_own


def test_other_ranks_get_all_of_a_plan_but_its_secrets():
    loaded = plan(*SFT, "--pretrain-checkpoint", "base", env="HF_TOKEN=canary-token\nSEED=3\n", WANDB_API_KEY="canary-key")
    assert loaded.exports["HF_TOKEN"] == "canary-token"
    assert complete(Plan.from_json(loaded.to_json()), "cpu", 100).to_json() == complete(loaded, "cpu", 100).to_json()
    decided = replace(loaded, identities={"data": {"tokens": "a"}}, generation={"suppress_tokens": [3]}, token_ids={"output": [7]},
                      untrained_ids=(4, 5), notes=("a note",), warnings=("a warning",), deferred=("compile",))
    text = json.dumps(decided.to_json())
    again = Plan.from_json(json.loads(text))
    assert "canary" not in text + repr(loaded) and again.exports == {}
    assert {each.name: getattr(again, each.name) for each in fields(Plan)} == {
        each.name: getattr(replace(decided, exports={}), each.name) for each in fields(Plan)}


def test_a_restart_has_the_plan_and_the_notes_of_the_first_start():
    first = plan("--preset", "sample")
    again = plan("--preset", "sample", **{RESTART: json.dumps({"restart": 1, "settings": first.of_files()})})
    assert (again.config, again.notes) == (first.config, first.notes)
