"""Exact names of other trainers are used where their value carries over, and refused with a sentence where not."""

import json
from pathlib import Path

import pytest

from config import Config
from settings.aliases import ALIASES, COMPUTED, CONVERTED, HARMLESS, OTHER_WAYS, translate, validate
from settings.load import PRESETS_DIR, peek, read_env_file
from tests.settings.test_load import empty_folder, load, problems  # noqa: F401


def read(source: str, name: str, value):
    """The settings with a name in a layer: a flag, `.env`, a section of YAML, or JSON with comments."""
    rows = "MAX_SEQ_LEN=1024\n" * (name == "global_batch_size")
    if source == "flag":
        return load(f"--{name}", str(value), env=rows)
    Path(".env").write_text(rows)
    if source == "env":
        return load(env=f"{name.upper()}={value}\n{rows}")
    if source == "yaml":
        Path("run.yaml").write_text(f"training:\n  {name}: {json.dumps(value)}\n")
        return load("--config", "run.yaml")
    return load(config=f'{{"seed": 1, // a comment\n "train": {{"{name}": {json.dumps(value)}}} // "y"\n}}')


@pytest.mark.parametrize("source", ["flag", "env", "yaml", "json"])
@pytest.mark.parametrize("name, value, expected", [
    ("max_iters", 500, {"max_steps": 500}), ("num_train_epochs", 2, {"epochs": 2}), ("lr_scheduler_type", "constant_with_warmup", {"lr_schedule": "constant"}),
    ("model_size", "7B", {"preset": "7b", "dim": 4096}), ("bf16", True, {"precision": "bf16"}), ("use_amp", False, {"precision": "fp32"}),
    ("gradient_checkpointing", True, {"activation_checkpointing": "block"}), ("enable_fsdp", True, {"sharding": "full"}),
    ("resume_from_checkpoint", "a/b", {"resume": "a/b"}), ("resume_from_checkpoint", True, {"resume": "auto"}),
    ("warmdown_ratio", 0.4, {"decay_fraction": 0.4, "lr_schedule": "wsd"}),
    ("stage", "pt", {"training_stage": "pretrain"}), ("global_batch_size", 16, {"total_batch_size": 16 * 1024}), ("optim", "adamw_torch", {"optimizer": "adamw"})])
def test_a_name_is_used_from_each_source_and_printed_once(source, name, value, expected):
    loaded = read(source, name, value)
    assert {key: getattr(loaded.config, key) for key in expected} == expected
    note, *implied = [note for note in loaded.notes if f"{name} is our" in note.lower() or f"{name}: " in note.lower()]
    assert next(iter(expected)).upper() in note and len(implied) < len(expected)


def test_rows_become_tokens_with_the_row_length_and_the_ranks():
    ranks = {"WORLD_SIZE": "2", "RANK": "0"}
    loaded = load("--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "8", "--block_size", "1024", environ=ranks)
    assert loaded.config.total_batch_size == 65_536
    assert "gradient_accumulation_steps: 4 x 8 rows x 2 ranks x 1,024 tokens = TOTAL_BATCH_SIZE=65536" in loaded.notes
    loaded = load("--max-seq-len", "512", env="GLOBAL_BATCH_SIZE=6\nBATCH_SIZE=3\n", environ=ranks)
    assert (loaded.config.total_batch_size, loaded.config.micro_batch_size) == (3072, 3)
    (problem,) = problems("--gradient_accumulation_steps", "4", env="")
    assert "gradient_accumulation_steps=4 needs MICRO_BATCH_SIZE and MAX_SEQ_LEN; TOTAL_BATCH_SIZE, in tokens" in problem
    given = ["--micro-batch-size", "2", "--max-seq-len", "1024", "--gradient_accumulation_steps"]
    for wrong in ("auto", "0", "-1", "2.5"):
        assert "is not a valid number" in problems(*given, wrong)[0]
    assert peek([*given, "4"])[0]["total_batch_size"] == "8192"


def test_a_share_of_the_steps_becomes_steps_where_they_are_known():
    loaded = load("--max-steps", "200", config={"warmup_ratio": 0.1})
    assert loaded.config.warmup_steps == 20 and "warmup_ratio: 0.1 x 200 steps = WARMUP_STEPS=20" in loaded.notes
    assert "warmup_ratio=0.1 needs MAX_STEPS; WARMUP_STEPS is" in problems("--epochs", "1", config={"warmup_ratio": 0.1})[0]
    assert "is not a valid number" in problems("--max-steps", "9", "--warmup_ratio", "5")[0]


@pytest.mark.parametrize("flags, env, config, second", [
    (("--max_iters", "5", "--max-steps", "5"), "", {}, "--max-steps"), (("--max-steps", "5", "--max_iters", "5"), "", {}, "max_iters"),
    (("--steps", "5", "--max_iters", "5"), "", {}, "max_iters"), ((), "LR=1\nLEARNING_RATE=1\n", {}, ".env:2"), ((), "LEARNING_RATE=1\nlr=1\n", {}, ".env:2"),
    ((), "", {"a": {"max_steps": 5}, "train": {"max_iters": 5}}, "train.max_iters"), ((), "", {"max_iters": 5, "max_steps": 5}, "max_steps"),
    (("--global_batch_size", "8", "--max-seq-len", "1024", "--total-batch-size", "8192"), "", {}, "--total-batch-size"), (("--load_in_4bit", "--lora-enabled", "false"), "", {}, "--lora-enabled")])
def test_two_names_of_a_setting_in_a_layer_are_a_duplicate(flags, env, config, second):
    assert any(second in problem and "second time" in problem for problem in problems(*flags, env=env, config=config))


def test_implied_settings_may_also_be_given():
    base = ("--training-stage", "sft", "--sft-data-path", "x", "--pretrain-checkpoint", "x")
    for flags in (("--adapter", "qlora", "--load_in_4bit", "true"), ("--load_in_4bit", "--adapter", "lora"), ("--load_in_4bit", "--use_peft")):
        config = load(*base, *flags).config
        assert config.lora_enabled and config.lora_base_quantization == "nf4"
    ranks = {"WORLD_SIZE": "4", "RANK": "0"}
    for flags in (("--use_fsdp", "--sharding_group_size", "2"), ("--sharding_group_size", "2", "--enable_fsdp", "true")):
        config = load(*flags, "--micro-batch-size", "1", environ=ranks).config
        assert (config.sharding, config.shard_degree) == ("hybrid", 2)


@pytest.mark.parametrize("config, words", [
    ({"bf16": "auto"}, "bf16=auto does not carry over; PRECISION=bf16 does it here"), ({"bf16": False}, "does not carry over"),
    ({"optim": "adamw_8bit"}, "OPTIMIZER=adamw_8bit: expected 'adamw' or 'muon'"), ({"deepspeed": "ds.json"}, "SHARDING=full"),
    ({"datasets": [{"path": "x", "type": "alpaca"}]}, "SFT_DATA_PATH"), ({"packing": False}, "rows are always packed"),
    ({"train_on_inputs": True}, "only the answers"), ({"tensor_parallel_degree": 2}, "only by SHARDING"), ({"device_id": 1}, "--gpus N"),
    ({"model_size": "13B"}, "unknown preset 13b"), ({"bananas": 1}, "docs/coming-from.md"), ({"report_to": "clearml"}, "WANDB_ENABLED")])
def test_a_value_that_does_not_carry_over_is_refused(config, words):
    (problem,) = problems(config=config)
    assert words in problem and "run.json" in problem


def test_names_that_need_no_setting_are_reported_and_empty_values_are_unset():
    notes = load("--num_workers", "4", "--fp16", "false", config={"monitor_memory": True, "tensor_parallel_degree": 1, "wandb_entity": None}).notes
    assert [note.split()[0] for note in notes if "needs no setting here" in note] == ["monitor_memory=true", "tensor_parallel_degree=1", "num_workers=4", "fp16=false"]
    Path("run.yaml").write_text("wandb_entity:\nwandb_watch:\nlora_target_modules:\nresume_from_checkpoint:\nmax_iters: 3\n")
    assert load("--config", "run.yaml", env="LR=\n").config.max_steps == 3


def test_the_process_environment_is_not_read():
    loaded = load(environ={"MAX_ITERS": "5", "BATCH_SIZE": "3", "GRADIENT_ACCUMULATION_STEPS": "2", "BF16": "true"})
    assert loaded.config == load().config and not [note for note in loaded.notes if " is our " in note]


def test_names_in_sections_mean_what_they_mean_there():
    config = load(config={"training": {"local_batch_size": 4, "steps": 7}, "optimizer": {"init_args": {"lr": 1e-3}}, "eval": {"interval": 9},
                          "compile": {"enable": False}, "metrics": {"enable_wandb": True}}).config
    assert (config.micro_batch_size, config.max_steps, config.learning_rate, config.validate_every) == (4, 7, 1e-3, 9)
    assert not config.compile and config.wandb_enabled
    assert "eval" in problems(config={"eval": {"lr": 5}})[0]
    assert load(config={"resume": False}).config.resume == "never"


def test_every_conversion_is_to_valid_settings():
    assert {*CONVERTED, *COMPUTED, *HARMLESS} <= {*ALIASES, *OTHER_WAYS}
    for name, table in CONVERTED.items():
        for value in table:
            settings = translate(name, "1" if value == "*" else value)
            assert not validate({key: (each, "") for key, each in settings.items()})[1], (name, value)


# DEBUG alone, and a size for production


def test_debug_alone_is_the_preset_on_the_sample_if_there_is_no_data():
    for loaded in (load("--debug"), load(env="DEBUG=true\nSEED=3\n")):
        config = loaded.config
        assert (config.n_layers, config.max_steps, config.max_seq_len, config.learning_rate, config.debug) == (2, 10, 512, 1e-7, True)
        assert (config.preset, config.pretrain_data_path) == ("debug", "shards")
        assert "DEBUG=true alone, for a new run, is --preset debug" in loaded.notes
    config = load("--debug", environ=dict.fromkeys(("PRETRAIN_DATA_PATH", "TOKENIZER_PATH"), "")).config
    assert (config.preset, config.n_layers, config.pretrain_data_path) == ("sample,debug", 2, "data/sample/pretrain")


def test_production_alone_has_a_size_and_steps_and_beside_a_size_it_has_that():
    config = load("--preset", "production").config
    assert (config.depth, config.n_layers, config.compile, config.keep_best) == (24, 24, True, 1) and config.max_steps > 5000
    assert load("--preset", "llama3.2-1b,production").config.depth is None and load("--preset", "production", "--dim", "96").config.dim == 96
    assert load("--preset", "production", "--depth", "4").config.n_layers == 4
    assert float(read_env_file(PRESETS_DIR / "debug.env").values["learning_rate"][0]) == 1e-7 and Config().depth is None
