import json
import os
import socket
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import yaml
from factories import model_without_weights
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.errors import CheckpointError, PaddockError, SettingsError, run_script
from config import MODEL_SETTINGS, SECRETS, Config, ModelConfig
from parallel import process
from plan import layers
from plan.command_line import export, find_run, plan_on_rank0
from plan.layers import PRESETS_DIR, SEPARATORS, read_env_file
from plan.make import complete, make_plan
from plan.names import ALIASES, misspelled

ROOT = Path(__file__).resolve().parents[2]
WAITING = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
ON_A_CPU = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
DATA = {"PRETRAIN_DATA_PATH": "shards", "TOKENIZER_PATH": "tokenizer.model"}
PRESETS = sorted(path.stem for path in PRESETS_DIR.glob("*.env"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_without_weights(Path("base"))
    return tmp_path


def load(*flags, environ=None, env=None, config=None, **options):
    if env is not None:
        Path(".env").write_text(textwrap.dedent(env))
    if config is not None:
        Path("run.json").write_text(config if isinstance(config, str) else json.dumps(config))
        flags = ("--config", "run.json", *flags)
    return make_plan(flags, {**DATA, **(environ or {})}, **options)


def problems(*flags, **layers) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(*flags, **layers)
    return str(caught.value).splitlines()


def test_each_layer_wins_over_the_ones_below():
    layers = {"flags": ("--max-steps", "5"), "environ": {"MAX_STEPS": "4"}, "config": {"max_steps": 3},
              "preset": ("--preset", "debug"), "env": "MAX_STEPS=2\n"}
    expected = {"flags": 5, "environ": 4, "config": 3, "preset": 10, "env": 2}
    while layers:
        highest = next(iter(layers))
        given = dict(layers)
        flags = (*given.pop("preset", ()), *given.pop("flags", ()))
        loaded = load(*flags, **given)
        assert loaded.config.max_steps == expected[highest]
        del layers[highest]
        Path(".env").unlink(missing_ok=True)
    assert load().config.max_steps == Config().max_steps


OF_ANOTHER_RUN = """
    TRAINING_STAGE=dpo DPO_DATA_PATH=pairs RUN_NAME=mine RESUME=mine/step-00000004 INSTRUCT_CHECKPOINT=mine RESET_OPTIMIZER=true
    START_STEP=7 LORA_ENABLED=true DISTILLATION_ENABLED=true TEACHER_MODEL=mine PRETRAIN_DATA_PATH=mine HELLASWAG_PATH=mine
    HELLASWAG_EXAMPLES=7 EVAL_TASKS=mine:mine TOKENIZER_PATH=mine TOKENIZER_BACKEND=huggingface DOCUMENT_MASK=false
    ROPE_SCALING_FACTOR=8 ROPE_THETA=7 NORM_EPS=0.1 TIE_EMBEDDINGS=false COMPILE=true MIN_LEARNING_RATE=1 ADAM_BETA1=0.1
    LOSS_SPIKE_POLICY=stop EARLY_STOPPING_PATIENCE=7 DEPTH=2 DIM=64 N_LAYERS=3 N_HEADS=2 N_KV_HEADS=2 FFN_DIM=352 MODEL_TYPE=qwen2
    HEAD_WIDTH=6 SLIDING_WINDOW=7 NO_ROPE_EVERY=2 MAX_SEQ_LEN=64 MICRO_BATCH_SIZE=2 TOTAL_BATCH_SIZE=8192 MAX_STEPS=7
""".split()


def test_a_preset_that_a_flag_names_is_the_same_beside_any_env():
    alone, beside = (load("--preset", "sample", environ=dict.fromkeys(DATA, ""), env=env).config for env in ("", "\n".join(OF_ANOTHER_RUN)))
    assert beside == alone.model_copy(update={"dpo_data_path": "pairs", "teacher_model": "mine"})
    sizes = [name for name in PRESETS if name.endswith("b") and not name.startswith("sft")]  # which starts from a model
    assert len(sizes) > 5
    fields = {*ModelConfig.model_fields, "ffn_dim", "max_seq_len", "total_batch_size", "micro_batch_size", "learning_rate"}
    hostile = [line for line in OF_ANOTHER_RUN if line.partition("=")[0].lower() in fields] + ["LEARNING_RATE=1"]
    for name in sizes:
        alone, beside = (load("--preset", f"{name},production", env=env).config for env in ("", "\n".join(hostile)))
        assert alone.model_dump(include=fields) == beside.model_dump(include=fields), name


def test_where_each_setting_came_from_is_known():
    sources = load("--seed", "1", environ={"DIM": "768"}, env="\n# a comment\nMAX_STEPS=2\n",
                   config={"training": {"weight_decay": 0}}).sources
    assert sources == {"seed": "command line", "dim": "environment", "max_steps": ".env:3",
                       "weight_decay": "run.json: training.weight_decay", "pretrain_data_path": "environment",
                       "tokenizer_path": "environment"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_once_the_data_is_named(name):
    presets = f"sample,{name}" if name.startswith("sample-") else name  # these stand on top of it
    shape = load("--preset", presets, complete=False).config.model_dump(include={*MODEL_SETTINGS})
    model_without_weights(Path("same"), **shape)
    config = load("--preset", presets, "--pretrain-checkpoint", "same").config
    assert config.preset == presets and config.accumulation_steps >= 1
    assert "preset" not in read_env_file(PRESETS_DIR / f"{name}.env").values


def test_lists_in_json_stand_for_several_values_where_there_can_be_several():
    lists = {name: ["seed", "dim"] for name, separator in SEPARATORS.items() if separator and name != "preset"}
    config = load(config=lists | {"extensions": ["guards", "evaluate"], "eval_tasks": ["arc:a.jsonl", "piqa:~/b.jsonl"],
                                  "learning_rate_factors": ["*norm*:2", "output*:0.5"]}).config
    assert config.rate_factors == [("*norm*", 2.0), ("output*", 0.5)]
    assert [task.name for task in config.choice_sets] == ["arc", "piqa"]
    assert config.choice_sets[1].path == str(Path("~/b.jsonl").expanduser())
    assert config.allow_resume_mismatch == "seed,dim"
    assert config.sample_prompts == "seed|dim"
    assert load(config={"preset": ["debug", "stable"]}).config.precision == "fp32"


def load_yaml(content: str, name: str = "run.yaml"):
    Path(name).write_text(content)
    return load("--config", name).config


def test_yaml_has_the_names_and_values_of_env():
    config = load_yaml("# a comment\nmax_steps: 3\nMAX-SEQ-LEN: 512\ncompile: no\nlearning_rate: 1e-3\nrun_name: 2026\nffn_dim: none\n"
                       "hellaswag_path:\nsample_prompts: [one, 'two: 2']\nmodel:\n  dim: 1536\nrope_theta: 1_000_000\n"
                       "hellaswag_name: \"\\U0001F44D\"\n")
    assert (config.max_steps, config.max_seq_len, config.compile, config.learning_rate) == (3, 512, False, 1e-3)
    assert (config.run_name, config.ffn_dim, config.hellaswag_path, config.dim) == ("2026", None, None, 1536)
    assert (config.sample_prompts, config.rope_theta, config.hellaswag_name) == ("one|two: 2", 1e6, "\U0001F44D")
    assert load_yaml("preset: [debug, stable]", "run.yml").precision == "fp32"


JSON = [("{", "not valid JSON"), ("[1]", "expected an object of settings"), ("[" * 100_000, "not valid JSON"),
        ('{"max_steps": true}', "expected a number or text"), ('{"max_steps": [1]}', "expected one value, not a list"),
        ('{"learning_rate": NaN}', "finite number")]
YAML = [("a:\n  max_stesp: 1", "run.yaml:2: unknown setting max_stesp; did you mean MAX_STEPS?"),
        ("seed: 1\nSEED: 2", "run.yaml:2: SEED is set a second time (first at run.yaml:1); keep one"),
        ("seed: 1\ndim: wide", "run.yaml:2: DIM=wide: expected a whole number"), ("seed: 1\n  dim: 2", "run.yaml:2: not valid YAML: "),
        ("- seed", "expected an object of settings, such as max_steps: 1000"), ("seed: 1\n---\nseed: 2", "not valid YAML"),
        ("[" * 9999, "not valid YAML"), ("? [a]\n: 1", "unknown setting"), ("a: &a [*a]\nseed: *a", "not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []", "expected one value")]


@pytest.mark.parametrize("content, words, name", [
    *((*case, "run.json") for case in JSON), *((*case, "run.yaml") for case in YAML)])
def test_invalid_yaml_or_json_is_an_error_with_its_line(content, words, name):
    Path(name).write_text(content)
    assert len(found := problems("--config", name)) == 1 and words in found[0] and name in found[0]


def test_env_file_as_editors_and_shells_write_it():
    Path(".env").write_bytes("\ufeffexport MAX_STEPS=3\r\n# a comment\r\n\r\nRUN_NAME='a b'  \r\nOUTPUT_DIR=\"x y\" # why\r\n"
                             "SEED = 5 # a seed\r\nHELLASWAG_PATH=\r\nhellaswag_name=a#b\r\n"
                             "SFT_DATA_PATH=   # none yet\r\n".encode())
    config = make_plan([], {**DATA, "RUN_NAME": "run"}).config
    assert (config.max_steps, config.run_name, config.output_dir, config.seed) == (3, "run", "x y", 5)
    assert (config.hellaswag_path, config.hellaswag_name, config.sft_data_path) == (None, "a#b", None)


def test_an_empty_value_leaves_the_layer_below_and_none_takes_it_away():
    assert load("--preset", "llama3-8b", env="FFN_DIM=\n", environ={"DIM": ""}).config.model_dump(include={"ffn_dim", "dim"}) == {
        "ffn_dim": 14336, "dim": 4096}
    for nothing in ("none", "Null"):
        assert load(env=f"PRESET=llama3-8b\nFFN_DIM={nothing}\n").config.ffn_dim is None
    assert load("--hellaswag-path=", env="HELLASWAG_PATH=items.jsonl\n").config.hellaswag_path is None
    assert load("--preset", "llama3-8b", "--activation-checkpointing", "none").config.activation_checkpointing == "none"


def test_a_name_that_is_there_twice_is_an_error_that_names_both_places():
    assert problems(env="SEED=1\n\nseed=2\n") == [".env:3: seed is set a second time (first at .env:1); keep one"]
    assert problems(config='{"seed": 1, "a": {"seed": 1}}', env="") == [
        "run.json: a.seed is set a second time (first at run.json: seed); keep one"]
    assert "second time" in problems(config='{"seed": 1, "seed": 1}')[0]
    assert ["a is already the name of another metric" in line for line in problems("--eval-tasks", "a:x,b:y,a:z", env="")] == [True, True]


@pytest.mark.parametrize("flag", ["--env-file", "--config"])
def test_unreadable_settings_are_errors_and_a_pipe_or_device_is_not_awaited(flag):
    Path("binary").write_bytes(b"\xff\xfeS\0")
    os.mkfifo("pipe")
    for path, why in (("binary", ""), ("missing", "No such file"), ("pipe", "not a plain file"), ("/dev/zero", "not a plain file")):
        assert problems(flag, path)[0].startswith(f"{path}: ") and why in problems(flag, path)[0]


# Libraries' keys and variables in `.env`

LIBRARY_KEYS = ("HF_HOME", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE", "WANDB_MODE", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG",
                "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MASTER_PORT", "HTTPS_PROXY")


def test_keys_of_libraries_are_handed_on_and_the_environment_wins(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1", **WAITING})
    Path(".env").write_text("".join(f"{name}=canary-{name}\n" for name in LIBRARY_KEYS) + "HF_ASSETS_CACHE=\n")
    loaded = make_plan([], {**os.environ, **DATA})
    assert {*loaded.sources} == {"pretrain_data_path", "tokenizer_path"} and "HF_ASSETS_CACHE" not in loaded.exports
    actual, reference = (note for note in loaded.notes if note.startswith("For the libraries"))
    assert "HF_HOME" in actual and "OMP_NUM_THREADS" not in actual and reference.endswith("overrides .env: OMP_NUM_THREADS")
    assert "canary" not in actual + repr(loaded), "some are secrets"
    export(loaded)
    assert os.environ == {name: f"canary-{name}" for name in LIBRARY_KEYS} | {"OMP_NUM_THREADS": "1"} | WAITING | ON_A_CPU


def test_a_large_model_keeps_the_code_of_fewer_matmuls(monkeypatch):
    """Its memory would double within 40 steps, because what is kept lies between freed blocks."""
    for depth, kept in (("2", "256"), ("12", "64")):
        monkeypatch.setattr("os.environ", {})
        export(load("--depth", depth))
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == os.environ["LRU_CACHE_CAPACITY"] == kept


def test_variables_in_env_are_expanded():
    env = ("RUN_NAME=a\nOUTPUT_DIR=${HOME}/${RUN_NAME}${EMPTY:-/b}\nHELLASWAG_NAME='${X:-}$HOME ${'\n"
           "HF_HOME=\"${OUTPUT_DIR}/hub\"\n")
    loaded = load(env=env, environ={"HOME": "/somewhere"})
    assert (loaded.config.output_dir, loaded.config.hellaswag_name) == ("/somewhere/a/b", "$HOME ${")
    assert loaded.exports == {"HF_HOME": "/somewhere/a/b/hub"}
    assert load(env=env, environ={"HOME": "/x", "RUN_NAME": "c"}).config.output_dir == "/x/c/b"
    assert problems(env="\nHF_TOKEN=canary${canary}\n") == [
        ".env:2: HF_TOKEN uses a variable that is set neither in the environment nor in an earlier line; "
        "set it, or write ${NAME:-default}"]


@pytest.mark.parametrize("wrong, right", [("LEARNING_RTE", "LEARNING_RATE"), ("DIMM", "DIM"), ("MAX-STEPS", "MAX_STEPS"),
                                          ("TOKENIZERS_PATH", "TOKENIZER_PATH")])  # which begins as a library's key does
def test_an_unknown_name_gets_its_nearest_neighbour_in_every_layer(wrong, right):
    assert problems(env=f"SEED=1\n{wrong}=1\n") == [f".env:2: unknown setting {wrong}; did you mean {right}?"]
    if "-" not in wrong:
        assert problems(env="", config={"training": {wrong: 1}}) == [
            f"run.json in training: unknown setting {wrong}; did you mean {right}?"]
        flag = "--" + wrong.lower().replace("_", "-")
        assert problems(flag, "1", env="") == [
            f"command line: unknown flag {flag}; did you mean --{right.lower().replace('_', '-')}?"]
    for preset, shown in (("debgu", "debgu; did you mean debug? known: 1.3b, 3b"), ("../presets/debug", "../presets/debug; "), ("\0", "\\x00; known")):
        assert problems(env=f"PRESET={preset}\n")[0].startswith(f".env:1: unknown preset {shown}")


IN_SFT = ("--training-stage", "sft", "--sft-data-path", "data", "--instruct-checkpoint", "base")
IN_DPO = ("--training-stage", "dpo", "--dpo-data-path", "data", "--instruct-checkpoint", "base")


@pytest.mark.parametrize("flags, environ, warning", [
    ((), {"LEARNIGN_RATE": "1"}, "environment: LEARNIGN_RATE is not a setting; did you mean LEARNING_RATE?"),
    *((("--max-steps", "50", "--warmup-steps", steps), {}, f"WARMUP_STEPS={steps} exceeds MAX_STEPS=50" * (steps == "51")) for steps in ("51", "50", "0.9")),
    (("--lora-rank", "8"), {}, "command line: LORA_RANK=8 has no effect without LORA_ENABLED=true"),
    (("--lora-rank", "8", "--lora-enabled", "true", "--pretrain-checkpoint", "base"), {}, ""),
    ((*IN_SFT, "--grpo-group", "8"), {}, "command line: TRAINING_STAGE=sft ignores settings of grpo: GRPO_GROUP; remove these flags"),
    ((*IN_DPO, "--simpo-beta", "2", "--kto-desirable-weight", "1"), {}, ""),
    ((*IN_DPO, "--grpo-data-path", "x"), {}, "command line: TRAINING_STAGE=dpo ignores settings of grpo: GRPO_DATA_PATH; remove these flags")])
def test_what_has_no_effect_is_warned_of(flags, environ, warning):
    loaded = load(*flags, environ=environ)
    assert len(loaded.warnings) == bool(warning) and all(each.startswith(warning) for each in loaded.warnings)
    if "--grpo-group" in flags:  # lines of `.env` may be for another stage
        loaded = load(*IN_SFT, env="GRPO_GROUP=8\nTOTAL_BATCH_SIZE=8192\nLOG_EVERY=2\nEPOCHS=2\nOPTIMIZER=muon\n")
        assert loaded.warnings == ()
        assert any("From .env: GRPO_GROUP=8, TOTAL_BATCH_SIZE=8192, LOG_EVERY=2, EPOCHS=2, OPTIMIZER=muon" in note for note in loaded.notes)
        made = complete(loaded, "cpu", 20)
        assert "With TOTAL_BATCH_SIZE=8192 (.env:2), the run takes only 5 steps; a smaller batch takes more" in made.notes


def test_flags_in_every_spelling():
    config = load("--max_steps=5", "--MIN-LEARNING-RATE", "0", "--debug", "--compile", "off", "--tf32=false",
                  "--sample-prompts=--a=b|c", "--seed", "0").config
    assert (config.max_steps, config.min_learning_rate, config.debug, config.compile, config.tf32) == (5, 0, True, False, False)
    assert (config.sample_prompts, config.seed) == ("--a=b|c", 0)
    assert [load(*flags).check for flags in (["--check"], ["--check=true"], [], ["--check=false"])] == [True, True, False, False]


@pytest.mark.parametrize("flags, expected", [
    (("--max-steps",), "--max-steps needs a value"), (("--max-steps", "--debug"), "--max-steps needs a value"),
    (("--config=",), "--config needs a value"), (("stray",), "stray has no name"),
    (("--depth 2 --epochs 4",), "unknown flag --depth 2 --epochs 4; the shell passed these words as one; in zsh, first type"),
    (("-max-steps", "5"), "unknown flag -max-steps; did you mean --max-steps?"),
    (("--no-compile",), "unknown flag --no-compile; did you mean --compile false?"), (("--debug", "maybe"), "DEBUG=maybe: expected true or false"),
    (("--learning-rate", "-1"), "LEARNING_RATE=-1: must be greater than 0"), (("--max-steps", "2.5"), "MAX_STEPS=2.5: expected a whole number"),
    (("--dpo-beta", "1e30"), "DPO_BETA=1e30: must be at most 9,007,199,254,740,992"),
    (("--lr-schedule", "linear"), "LR_SCHEDULE=linear: expected 'cosine', 'wsd' or 'constant'")])
def test_flags_that_cannot_be_used(flags, expected):
    line, = problems(*flags)
    assert line.startswith(f"command line: {expected}")


def test_a_setting_whose_extension_is_left_out_is_an_error_unless_it_is_off_or_of_a_preset():
    few = ("--extensions", "guards, evaluate")
    (problem,) = problems(*few, "--wandb-enabled", "true", env="TENSORBOARD_ENABLED=true\nTRACKIO_ENABLED=false\n")
    assert problem == ("WANDB_ENABLED=true (command line), TENSORBOARD_ENABLED=true (.env:1) need trackers in EXTENSIONS; add it "
                       "(EXTENSIONS=guards,evaluate,trackers), or remove them")
    (problem,) = problems(*few, "--weight-dtype", "bf16", env="")
    assert "needs rounding in EXTENSIONS" in problem
    load(*few, "--report", "false", "--weight-dtype", "fp32", "--reward", "math")  # the last has no effect in pretraining
    load("--extensions", "guards", "--preset", "sample,debug")
    assert load("--extensions", "default", "--wandb-enabled", "true").config.wandb_enabled


DPO = "--training-stage dpo --dpo-data-path x --instruct-checkpoint base"
IMPOSSIBLE = [  # flags, and words of the error
    ("--depth 2 --total-batch-size 4000", "must be a multiple of MICRO_BATCH_SIZE * MAX_SEQ_LEN * WORLD_SIZE = 1 * 256 * 1 = 256; try 3840 or 4096"),
    ("--total-batch-size 500000", "must be a multiple of MICRO_BATCH_SIZE * MAX_SEQ_LEN * WORLD_SIZE = 8 * 1024 * 1 = 8192; try 499712 or 507904"),
    ("--total-batch-size 4096", "try 8192, or keep it and use MICRO_BATCH_SIZE=0, which"),
    ("--world-size 3 --check", "= 24576; try 516096 or 540672, or keep it and use 2 ranks"),
    ("--dim 100", "DIM=100 must be an even multiple of N_HEADS=12; try DIM=96"),
    ("--n-kv-heads 5", "N_KV_HEADS=5 must divide N_HEADS=12; try one of 1, 2, 3, 4, 6, 12"), ("--rope-low-freq-factor 4", "must exceed"),
    ("--min-learning-rate 1", "MIN_LEARNING_RATE=1.0 exceeds LEARNING_RATE=0.0006"), ("--precision fp16 --device cpu", "PRECISION=fp16"),
    ("--early-stopping-patience 3 --validate-every 0", "VALIDATE_EVERY"), ("--distributed-timeout 0", "DISTRIBUTED_TIMEOUT=0"),
    ("--run-name ../x", "OUTPUT_DIR"), ("--run-name -rf", "RUN_NAME='-rf' must be a folder name of letters"),
    (f"--run-name {'ä' * 101}", "at most 200 bytes (it has 202)"), (f"--max-steps {'9' * 5000}", f"MAX_STEPS={'9' * 77}..."),
    ("--output-dir=", "OUTPUT_DIR=: must not be empty"), ("--output-dir $(pwd)/runs", "contains a variable or a command, which is not expanded"),
    ("--training-stage sft --random-init", "scripts/load_instruct_dataset.py"), ("--training-stage dpo --dpo-data-path x", "set INSTRUCT_CHECKPOINT"),
    (f"{DPO} --dpo-loss ipo --dpo-label-smoothing 0.1", "DPO_LABEL_SMOOTHING works with DPO_LOSS=sigmoid"),
    (f"{DPO} --distillation-enabled --teacher-model b", "DISTILLATION_ENABLED works in the stages pretrain, sft and grpo"),
    ("--distillation-enabled", "DISTILLATION_ENABLED=true needs TEACHER_MODEL"), ("--epochs 2 --max-steps 9", "both set"),
    ("--prepare-ahead true --epochs 2", "needs MAX_STEPS, the length of the run"),
    (f"--prepare-ahead true --max-steps 9 {DPO}", "works with TRAINING_STAGE=pretrain and sft, not with dpo"),
    ("--pretrain-data-path=", "PRETRAIN_DATA_PATH is not set"), ("--world-size 2", "--nproc-per-node 2 (or torchrun)"),
    ("--training-stage sft --random-init --sft-data-path x --tokenizer-path=", "start from a model that has one (PRETRAIN_CHECKPOINT), or set it to"),
    ("--dim wide --n-heads 10 --n-kv-heads 5", "DIM=wide"),  # whose rules are silent then
    ("--generation-eval-every 1", "compares with good answers, which the data of TRAINING_STAGE=pretrain may not have"),
    ("--eval-tasks arc.jsonl", "EVAL_TASKS=arc.jsonl does not have the form name:file"), ("--eval-tasks ARC:a", "a name starts with a lower-case letter"),
    *((f"--eval-tasks {name}:x", f"{name} is already the name of another metric") for name in ("hellaswag", "val_loss", "generation")),
    *((f"--{name.replace('_', '-')} s3://x/y", f"{name.upper()}=s3://x/y is a URL, but must be a local path")
      for name in ("output_dir", "pretrain_data_path", "hellaswag_path", "tokenizer_path", "resume", "pretrain_checkpoint"))]


@pytest.mark.parametrize("flags, words", IMPOSSIBLE)
def test_impossible_combinations_name_the_settings(flags, words):
    assert len(found := problems(*flags.split())) == 1 and words in found[0]


def test_world_size_comes_from_the_launcher():
    started = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert load(environ=started, env="WORLD_SIZE=4\n").config.world_size == 2
    assert load("--check", env="WORLD_SIZE=4\n").config.world_size == 4
    assert problems("--world-size", "4", environ=started, env="") == [
        "WORLD_SIZE=4, but the launcher started 2 processes; remove it"]
    assert "whole numbers" in problems(environ={**started, "RANK": "one"})[0]
    assert len(problems(environ={**started, "WORLD_SIZE": "two"})) == 1


def test_all_errors_in_the_settings_are_reported_together():
    found = problems("--typo", "1", "--max-steps", "x", environ={"SEED": "-1"}, env="MAX_LRR=1\nDIM=100\nN_HEADS=16\nPRESET=debgu\n",
                     config={"sft": {"epoch": 3}, "compile": "perhaps"})
    expected = ["debgu", ".env:1: unknown setting MAX_LRR", "sft: unknown setting epoch", "--typo", "MAX_STEPS=x", "environment: SEED=-1",
                "run.json: compile: COMPILE=perhaps", "DIM=100"]
    assert len(found) == len(expected)
    assert all(any(words in line for line in found) for words in expected)


def test_beside_an_unknown_name_no_conflict_is_named_that_it_may_cause():
    """DEPTH=2 would make rows of 256 tokens, of which 4,096 are a multiple."""
    assert problems(env="DEPHT=2\nTOTAL_BATCH_SIZE=4096\n") == [".env:1: unknown setting DEPHT; did you mean DEPTH?"]
    assert len(problems(env="TOTAL_BATCH_SIZE=4096\n")) == 1 and len(problems("--pretrain-data-paht", "x")) == 1


STALE = [{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1"},
         {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}]


@pytest.mark.parametrize("flags", [[], ["--check"]])
@pytest.mark.parametrize("left", STALE)
def test_what_an_earlier_job_left_in_the_environment_is_named_with_the_remedy(left, flags, own_folder, capsys, monkeypatch):
    """Also if this is not rank 0, which does not exist."""
    monkeypatch.setattr(process, "MARKERS", set())
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name, value in {**DATA, **left}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        plan_on_rank0(flags, "")
    error, names = capsys.readouterr().err, [name for name in left if not name.startswith("MASTER")]
    assert caught.value.code == 2 and error.endswith(f"unset {' '.join(names)}\n") and error.count("\n") == 2
    assert ", ".join(f"{name}={left[name]}" for name in names) in error


def test_train_ends_with_code_2_before_anything_else_in_whole_lines(own_folder):
    """Each write is a packet. With -u, as torchrun starts ranks, print writes its arguments one by one."""
    (own_folder / ".env").write_text("MAX_STEP=3\n")
    (own_folder / "sitecustomize.py").write_text("import atexit\natexit.register(lambda: print('the', 'end'))")
    actual, reference = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with actual:
        with reference:
            process = subprocess.Popen([sys.executable, "-u", ROOT / "train.py", "--typo", "1"], stdout=reference, stderr=reference,
                                       env={**os.environ, **DATA, "PYTHONPATH": str(own_folder)})
        packets = [packet.decode() for packet in iter(lambda: actual.recv(65536), b"")]
    text = "".join(packets)
    assert process.wait() == 2 and "Traceback" not in text
    assert ".env:1: unknown setting MAX_STEP; did you mean MAX_STEPS?" in text and "unknown flag --typo" in text
    assert packets[-1] == "the end\n" and all(packet.endswith("\n") for packet in packets)
    assert not (own_folder / "runs").exists()


def test_a_script_with_a_closed_pipe_keeps_its_exit_code(monkeypatch):
    def info(*then):
        print("x")
        for error in then:
            raise error

    for then, expected in (((), 141), ((SystemExit(0),), 141), ((SettingsError("x"),), 2), ((SystemExit(3),), 3)):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as pipe, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            with pytest.raises(SystemExit) as ended:
                run_script(partial(info, *then))
        assert ended.value.code == expected
    with pytest.raises(BrokenPipeError):  # of a socket
        run_script(partial(info, BrokenPipeError()))


# Secrets

CANARY = "canary-0123456789"


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_shown_nowhere(name):
    loaded = load(env=f"{name}={CANARY}\n", environ={})
    assert loaded.exports == {name: CANARY} and CANARY not in repr(loaded) + "".join(loaded.notes)
    for content in ({"x": CANARY}, [CANARY], 5):
        assert CANARY not in "\n".join(problems(config={name: content}))
    assert misspelled(f"{name}S") == name.lower() and problems(env=f"{name}S={CANARY}\n")[0].count(f"{name} in .env")


# Any input loads or raises a PaddockError

names = st.one_of(st.sampled_from(sorted(name.upper() for name in Config.model_fields)), st.sampled_from(sorted(ALIASES)),
                  st.text(max_size=12))
values = st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str), st.just("9" * 400),
                   st.sampled_from(["true", "none", "", "1e400", "auto", "debug", "-0", "0x10", "1_000", " 7 "]))


json_values = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), values),
                           lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
                           max_leaves=6)
some = st.dictionaries(names, values, max_size=5)


@hypothesis_settings(max_examples=150)
@given(some, st.lists(st.one_of(names.map("--{}".format), values, st.tuples(names, values).map(lambda pair: f"--{pair[0]}={pair[1]}")), max_size=6),
       st.one_of(some.map(lambda pairs: "\n".join(f"{k}={v}" for k, v in pairs.items())), st.text(max_size=40)), json_values)
def test_any_settings_load_or_are_an_error_for_the_user(environ, argv, text, content):
    """In the environment, as flags, and in any .env or JSON file."""
    Path("any.env").write_text(text, encoding="utf-8", errors="surrogateescape" if text.isascii() else "ignore")
    Path("any.json").write_text(json.dumps(content))
    for flags, variables in (([], environ), (argv, {}), (["--env-file", "any.env"], {}), (["--config", "any.json"], {})):
        try:
            config = make_plan(flags, {**DATA, **variables}).config
        except PaddockError as error:
            assert str(error)
        else:
            assert config.accumulation_steps >= 1 and config.hidden_dim >= 1


MERGED = ("""
base: &base {seed: 1, max-steps: 3, more: [1, 2]}
other: &other
  seed: 2
  ? ffn_dim
  : 5
  <<: *base
last: {seed: 4, <<: *other}
alias: *other
text: {"<<": 7}
""", """
- &CENTER { x: 1, y: 2 }
- &LEFT { x: 0, y: 2 }
- &BIG { r: 10 }
- { << : [ *BIG, *LEFT ], x: 1, label: center/big }
""")


def test_yaml_is_merged_as_specified():
    """As PyYAML merges; also the example of "Merge Key Language-Independent Type for YAML 1.1"."""
    def plain(content):
        if isinstance(content, tuple):
            assert len({name for name, *_ in content}) == len(content)
            return {name: plain(value) for name, value, _ in content}
        return [*map(plain, content)] if isinstance(content, list) else content

    def as_text(content):
        if isinstance(content, dict):
            return {str(name): as_text(value) for name, value in content.items()}
        return [*map(as_text, content)] if isinstance(content, list) else str(content)

    for text in MERGED:
        merged = layers.OTHER_TRAINERS.merge_yaml(yaml.compose(text, yaml.SafeLoader))
        assert plain(layers.yaml_content(merged)) == as_text(yaml.safe_load(text))


def test_the_name_of_a_run_is_its_tokenizer_and_a_preparation_takes_that_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/book").mkdir(parents=True)
    Path("elsewhere/book").mkdir(parents=True)

    def tokenizer(*flags: str) -> str | None:
        return make_plan(flags, {}, complete=False).config.tokenizer_path

    assert tokenizer("--tokenizer-path", "book") == tokenizer("--pretrain-checkpoint", "book") == "runs/book"
    assert tokenizer("--tokenizer-path", "book", "--output-dir", "elsewhere") == "elsewhere/book"
    assert tokenizer("--tokenizer-path", "a/b", "--pretrain-checkpoint", "book") == "a/b", "what is set counts"
    assert tokenizer("--instruct-checkpoint", "owner/name@main") == "owner/name"
    assert find_run("book", ["--output-dir", "elsewhere"]) == Path("elsewhere/book") and find_run("book") == Path("runs/book")
    Path("book").touch()
    assert tokenizer("--tokenizer-path", "book") == "book", "a file of this name"
    assert find_run("book") == Path("runs/book"), "a run's name, as the file is no run"


def test_the_users_own_folder_is_known_wherever_a_path_is_written(monkeypatch):
    monkeypatch.setenv("HOME", "/of/mine")
    config = make_plan(["--output-dir=~/runs"], {**DATA, "TOKENIZER_PATH": "~"}).config
    assert (config.output_dir, config.tokenizer_path) == ("/of/mine/runs", "/of/mine")
    for setting in ("resume", "pretrain-checkpoint"):
        with pytest.raises(CheckpointError, match="there is no checkpoint '/of/mine/x' in"):
            load(f"--{setting}=~/x")


def test_an_ordinary_environment_raises_no_alarm():
    ordinary = """
        PATH HOME LANG TERM SHLVL DISPLAY TMPDIR HOSTNAME _ PS1 VIRTUAL_ENV CUDA_HOME NVIDIA_VISIBLE_DEVICES NCCL_DEBUG HF_HOME
        TORCH_HOME WANDB_NAME WANDB_RUN_ID RANK LOCAL_RANK GROUP_RANK LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_PORT
        TORCHELASTIC_MAX_RESTARTS SLURM_STEP_ID OMPI_COMM_WORLD_SIZE COMPILER COMPILE_COMMANDS DEVICES DEBUGGER DATA_DIRS OUTPUT
        MODEL_PATH MODEL_NAME MODEL_ID device resume seed compile PRESETS SEEDS NODE_ENV""".split()
    assert [key for key in (*ordinary, *os.environ) if misspelled(key)] == []
