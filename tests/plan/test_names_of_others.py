"""Exact names of other trainers are used where their value carries over, and refused with a sentence where not."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from factories import checkpoint_without_weights

from extensions.other_trainers import COMPUTED, CONVERTED, HARMLESS, defaults_of, translate
from learn.optim import learning_rate
from plan.make import peek
from plan.names import ALIASES, OTHER_WAYS, validate
from tests.plan.test_load import load, own_folder, problems  # noqa: F401


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
    ("max_iters", 500, {"max_steps": 500}), ("model_size", "7B", {"preset": "7b", "dim": 4096}), ("bf16", True, {"precision": "bf16"}),
    ("resume_from_checkpoint", True, {"resume": "auto"}), ("warmdown_ratio", 0.4, {"decay_fraction": 0.4, "lr_schedule": "wsd"}),
    ("global_batch_size", 16, {"total_batch_size": 16 * 1024}), ("eval_dataset", "own.jsonl", {"validation_data_path": "own.jsonl"})])
def test_a_name_is_used_from_each_source_and_printed_once(source, name, value, expected):
    loaded = read(source, name, value)
    assert {key: getattr(loaded.config, key) for key in expected} == expected
    note, *implied = [note for note in loaded.notes if f"{name} is our" in note.lower() or f"{name}: " in note.lower()]
    assert next(iter(expected)).upper() in note and len(implied) < len(expected)


TUNED = {"sft_data_path": "x", "pretrain_checkpoint": "base", "training_stage": "sft"}
PREFERRED = {"training_stage": "dpo", "dpo_data_path": "x", "instruct_checkpoint": "base", "pref_beta": 0.3}
FOUR_RANKS = {"WORLD_SIZE": "4", "RANK": "0"}
HF, RATE = {"max_steps": 40, "warmup_steps": 8, "learning_rate": 1e-3}, {"learning_rate": 1e-3}
NANOGPT = {**RATE, "max_iters": 40, "block_size": 64, "batch_size": 4}
LITGPT = {"max_steps": 40, "lr_warmup_steps": 8, "micro_batch_size": 4, "global_batch_size": 8, "max_seq_length": 64,
          "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}}
MEGATRON = {"lr": 1e-3, "train_iters": 40, "seq_length": 64, "max_position_embeddings": 64, "lr_warmup_fraction": 0.1, "micro_batch_size": 4,
            "num_attention_heads": 8, "hidden_size": 64}
SIMPO = {"stage": "dpo", "pref_loss": "simpo", "model_name_or_path": "base", "cutoff_len": 64, "max_steps": 9}
USED = [  # a file's content, and the settings that it sets
    ({"num_train_epochs": 2}, {"epochs": 2}), ({"use_amp": False}, {"precision": "fp32"}),
    *((PREFERRED | {"pref_loss": loss}, {name: 0.3})
      for loss, name in (("sigmoid", "dpo_beta"), ("orpo", "orpo_lambda"), ("simpo", "simpo_beta"))),
    ({"rl": "grpo", "grpo_data_path": "x", "instruct_checkpoint": "base", "rl_beta": 0.3}, {"grpo_beta": 0.3}),
    ({"model_type": "LlamaForCausalLM", "optimizer": "adamw_torch_fused", "precision": "bfloat16"},
     {"model_type": "llama", "optimizer": "adamw", "precision": "bf16"}),
    ({"test_datasets": [{"path": "own.jsonl", "split": "train", "type": "chat_template"}]}, {"validation_data_path": "own.jsonl"}),
    # In sections, and of earlier custom trainers.
    ({"training": {"local_batch_size": 4, "steps": 7}, "optimizer": {"init_args": {"lr": 1e-3}}, "eval": {"interval": 9},
      "compile": {"enable": False}, "metrics": {"enable_wandb": True}},
     {"micro_batch_size": 4, "max_steps": 7, "learning_rate": 1e-3, "validate_every": 9, "compile": False, "wandb_enabled": True}),
    ({"data": {"init_args": {"seed": 5}}, "seed": 3, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"betas": [0.8, 0.9]}}},
     {"seed": 3, "data_seed": 5, "adam_beta1": 0.8, "adam_beta2": 0.9, "optimizer": "adamw"}),
    # Values that are valid there, and what is set beside them.
    ({"max_steps": 50, "save_steps": 0.25, "eval_steps": 0.3, "logging_steps": 0.01}, {"save_every": 13, "validate_every": 15, "log_every": 1}),
    # The defaults of the trainer whose file it is.
    ({**HF, "per_device_train_batch_size": 4}, {"weight_decay": 0, "adam_beta2": 0.999, "max_grad_norm": 1}),
    (TUNED | RATE | {"max_steps": 9, "sequence_len": 64}, {"adam_beta2": 0.95}),  # the name of a stage is ours: no file of axolotl
    (LITGPT, {"weight_decay": 0.01, "adam_beta2": 0.999, "tie_embeddings": False}),
    ({**NANOGPT, "gradient_accumulation_steps": 8}, {"total_batch_size": 8 * 4 * 64, "weight_decay": 0.1}),
    ({"max_steps": 9, "cutoff_len": 64, "model_name_or_path": "base"},
     {"lora_enabled": True, "lora_rank": 8, "lora_alpha": 16, "learning_rate": 5e-5}),
    (NANOGPT | {"n_head": 12, "n_embd": 96}, {"n_kv_heads": 12}),  # as many key/value heads
    (MEGATRON, {"total_batch_size": 4 * 64, "warmup_steps": 0.1, "n_kv_heads": 8}),
    (SIMPO, {"simpo_beta": 0.1, "simpo_gamma": 0.5}), (SIMPO | {"pref_beta": 2}, {"simpo_beta": 2, "simpo_gamma": 0.5}),
    ({"torch_dtype": "bfloat16", "bf16": True}, {"precision": "bf16"}), ({"fp16": True, "bf16": False}, {"precision": "fp16"}),
    (NANOGPT, {"total_batch_size": 40 * 4 * 64}), ({**RATE, "max_steps": 9, "sequence_len": 64}, {"total_batch_size": 64, "micro_batch_size": 1})]


@pytest.mark.parametrize("content, settings", USED, ids=str)
def test_names_and_values_have_the_meaning_that_they_have_there(content, settings):
    checkpoint_without_weights(Path("a/b"), 3)
    config = load("--tokenizer-path", "x", config=content, environ={"DPO_DATA_PATH": "x"}).config
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize("flags, tokens", [
    (("--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "8", "--block_size", "1024"), 4 * 8 * 4 * 1024),
    (("--global_batch_size", "8", "--batch_size", "2", "--max-seq-len", "512"), 8 * 512)])
def test_rows_become_tokens_with_the_row_length_and_the_ranks(flags, tokens):
    assert load(*flags, environ=FOUR_RANKS).config.total_batch_size == tokens
    # Accumulated steps of nanoGPT are those of all ranks.
    assert load(config={**NANOGPT, "gradient_accumulation_steps": 8}, environ=FOUR_RANKS).config.total_batch_size == 8 * 4 * 64


def test_what_a_higher_layer_or_another_file_sets_is_kept():
    loaded = load("--max-steps", "9", "--pretrain-data-path", "data/book", config={"max_iters": 12, "train_file": "book.txt"})
    assert loaded.config.max_steps == 9 and loaded.config.pretrain_data_path == "data/book"
    assert "max_iters is our MAX_STEPS: 12, replaced by 9 (command line)" in loaded.notes
    loaded = load(config={"lr_scheduler_type": "cosine"}, env="MIN_LEARNING_RATE=2e-5\nWEIGHT_DECAY=0.3\n").config
    assert (loaded.min_learning_rate, loaded.weight_decay) == (2e-5, 0.3), "whatever a name implies"
    loaded = load(environ={"MAX_ITERS": "5", "BATCH_SIZE": "3", "GRADIENT_ACCUMULATION_STEPS": "2", "BF16": "true"})
    assert loaded.config == load().config and not [note for note in loaded.notes if " is our " in note], "names in the environment"
    # As ./paddock train adds what it has prepared.
    assert load("--eval-dataset", "own.jsonl", "--validation-data-path", "prepared").config.validation_data_path == "prepared"
    values, _ = peek(["--debug", "--dataset_name", "a/b"])
    assert values["pretrain_data_path"] == "a/b" and values["preset"] == "debug", "data under another name needs no sample"


@pytest.mark.parametrize("flags, config, stage, name", [
    (("--training-stage", "sft", "--dataset_name", "a/b"), {}, "sft", "dataset_name"), (("--train_file", "a/b"), {}, "pretrain", "train_file"),
    ((), {"datasets": [{"path": "a/b", "type": "alpaca"}]}, "sft", "datasets"),
    ((), {"datasets": [{"path": "a/b", "type": "chat_template", "field_messages": "messages"}]}, "sft", "datasets"),
    ((), {"rl": "dpo", "datasets": [{"path": "a/b", "split": "train"}]}, "dpo", "datasets"),
    (("--training-stage", "grpo", "--reward", "exact"), {"dataset_name": "a/b"}, "grpo", "dataset_name")])
def test_names_of_data_are_those_of_the_stage(flags, config, stage, name):
    start = ("--instruct-checkpoint", "base") if stage in ("dpo", "grpo") else ("--pretrain-checkpoint", "base")
    loaded = load("--tokenizer-path", "x", *start, *flags, config=config)
    assert loaded.config.training_stage == stage and loaded.config.data_path == "a/b"
    assert f"{name} is our {stage.upper()}_DATA_PATH: a/b" in loaded.notes
    prepared = load("--tokenizer-path", "x", *start, *flags, f"--{stage}-data-path", "prepared", config=config)
    assert prepared.config.data_path == "prepared", "as ./paddock train adds it"


def test_variables_of_libraries_are_exported_under_other_names():
    assert load("--device_id", "1", config={"wandb_project": "x"}).exports == {"CUDA_VISIBLE_DEVICES": "1", "WANDB_PROJECT": "x"}
    assert load(config={"gpu_ids": [1]}).exports == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("flags, env, config, second", [
    (("--max_iters", "5", "--max-steps", "5"), "", {}, "--max-steps"), (("--steps", "5", "--max_iters", "5"), "", {}, "max_iters"),
    ((), "LR=1\nLEARNING_RATE=1\n", {}, ".env:2"), ((), "", {"a": {"max_steps": 5}, "train": {"max_iters": 5}}, "train.max_iters"),
    (("--global_batch_size", "8", "--max-seq-len", "1024", "--total-batch-size", "8192"), "", {}, "--total-batch-size"),
    (("--load_in_4bit", "--lora-enabled", "false"), "", {}, "--lora-enabled")])
def test_two_names_of_a_setting_in_a_layer_are_a_duplicate(flags, env, config, second):
    assert any(second in problem and "second time" in problem for problem in problems(*flags, env=env, config=config))


@pytest.mark.parametrize("config, words", [
    ({"bf16": False}, "PRECISION=fp32 without it"),
    ({"optim": "adamw_8bit"}, "OPTIMIZER=adamw_8bit: expected 'adamw' or 'muon'"), ({"deepspeed": "ds.json"}, "SHARDING=full"),
    ({"datasets": [{"path": "x"}, {"path": "y"}]}, "SFT_DATA_PATH"), ({"datasets": [{"path": "x", "field_messages": "turns"}]}, "SFT_DATA_PATH"),
    ({"packing": False}, "rows are always packed"), ({"train_on_inputs": True}, "only the answers"), ({"bananas": 1}, "docs/coming-from.md"),
    ({"min_lr_ratio": 0.1}, "needs LEARNING_RATE; MIN_LEARNING_RATE is the final rate"),
    ({"lr_scheduler_type": "polynomial"}, "see LR_SCHEDULE"), ({"max_iters": 9, "lr_decay_iters": 5}, "lr_decay_iters, our MAX_STEPS, is set a second time"),
    ({"num_train_epochs": 2, "save_steps": 0.5}, "save_steps=0.5 is a share of the steps"), ({"warmup_steps": 1.5}, "WARMUP_STEPS=1.5 must be a whole number"),
    ({"warmup_ratio": 1.0}, "is not a share below 1; for steps, use WARMUP"), ({"warmup_steps": 10, "warmup_ratio": 0.1}, "set a second time"),
    ({"gradient_accumulation_steps": 4}, "needs MICRO_BATCH_SIZE and MAX_SEQ_LEN; TOTAL_BATCH_SIZE, in tokens"),
    *(({"micro_batch_size": 2, "max_seq_len": 64, "gradient_accumulation_steps": wrong}, "is not a valid number") for wrong in ("auto", 0, 2.5)),
    ({"n_head": 6, "n_embd": 96, "n_kv_heads": 4}, "N_KV_HEADS=4 must divide")])
def test_a_value_that_does_not_carry_over_is_refused(config, words):
    (problem,) = problems(config=config)
    assert words in problem and ("run.json" in problem or problem[:2].isupper()), "its place, or the setting of a rule"


def test_every_conversion_is_to_valid_settings():
    assert {*CONVERTED, *COMPUTED, *HARMLESS} <= {*ALIASES, *OTHER_WAYS}
    for name, table in CONVERTED.items():
        for value in table if isinstance(table, dict) else ():
            settings = translate(name, "1" if value == "*" else value)
            assert not validate({key: (each, "") for key, each in settings.items()})[1], (name, value)


def test_debug_alone_is_the_preset_on_the_sample_if_there_is_no_data():
    for loaded in (load("--debug"), load(env="DEBUG=true\nSEED=3\n")):
        config = loaded.config
        assert (config.n_layers, config.max_steps, config.max_seq_len, config.learning_rate, config.debug) == (2, 10, 512, 1e-7, True)
        assert (config.preset, config.pretrain_data_path) == ("debug", "shards")
    config = load("--debug", environ=dict.fromkeys(("PRETRAIN_DATA_PATH", "TOKENIZER_PATH"), "")).config
    assert (config.preset, config.n_layers, config.pretrain_data_path) == ("sample,debug", 2, "data/sample/pretrain")
    # What does less than it seems says so.
    assert any("RUN_NAME=none means no name" in note for note in load("--run-name", "none").notes)
    assert any("a small run is --preset debug" in note for note in load("--debug", "--depth", "2").notes)


# Learning rates of other trainers, by their own formulas: the rate of each step, from 0.


def by_transformers(name: str, steps: int, warmup: int, peak: float, **kwargs) -> list[float]:
    transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler, rates = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=kwargs), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def by_torchtitan(steps: int, warmup: int, peak: float, decay_ratio: float | None = None) -> list[float]:
    """Warm-up, plateau, and a linear decay to min_lr_factor, 0, whose last step is not 0."""
    decay = steps - warmup if decay_ratio is None else round(steps * decay_ratio)
    stable = steps + 1 - warmup - decay
    return [peak * ((step + 1) / warmup if step < warmup else 1.0 if step < warmup + stable else
                    1 - (step + 1 - warmup - stable) / decay) for step in range(steps)]


def by_nanochat(steps: int, warmup: int, peak: float, warmdown_ratio: float, final: float) -> list[float]:
    """final_lr_frac is 0.05 in pretraining, and 0 in SFT."""
    down = round(warmdown_ratio * steps)
    return [peak * ((step + 1) / warmup if step < warmup else 1.0 if step <= steps - down else
                    (steps - step) / down * (1 - final) + final) for step in range(steps)]


def by_cosine(steps: int, warmup: int, peak: float, final: float) -> list[float]:
    """nanoGPT (final: min_lr, 6e-5), litgpt's pretraining (4e-5) and Megatron-LM with lr_decay_style=cosine (0)."""
    return [peak * step / warmup if step < warmup else
            final + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) * (peak - final) for step in range(steps)]


@pytest.mark.parametrize("file, theirs", [
    ({**HF, "lr_scheduler_type": "cosine"}, by_transformers("cosine", 40, 8, 1e-3)),
    ({**HF, "lr_scheduler_type": "linear"}, by_transformers("linear", 40, 8, 1e-3)),
    ({**HF, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, by_transformers("cosine_with_min_lr", 40, 8, 1e-3, min_lr_rate=0.2)),
    ({**HF, "lr_scheduler_type": "constant_with_warmup"}, by_transformers("constant_with_warmup", 40, 8, 1e-3)),
    ({**HF, "per_device_train_batch_size": 4}, by_transformers("linear", 40, 8, 1e-3)),
    ({"max_steps": 40, "logging_steps": 5, "cutoff_len": 64}, by_transformers("linear", 40, 0, 5e-5)),
    ({**RATE, "max_steps": 40, "sequence_len": 64, "micro_batch_size": 2}, by_transformers("cosine", 40, 1, 1e-3)),
    ({**RATE, "max_steps": 40, "sequence_len": 64, "cosine_min_lr_ratio": 0.1, "warmup_steps": 4}, by_transformers("cosine_with_min_lr", 40, 4, 1e-3, min_lr_rate=0.1)),
    ({**RATE, "training": {"steps": 40}, "lr_scheduler": {"warmup_steps": 8, "decay_ratio": 0.5}}, by_torchtitan(40, 8, 1e-3, 0.5)),
    ({"training": {"steps": 40, "local_batch_size": 4, "seq_len": 64}, "optimizer": {"lr": 1e-3}, "lr_scheduler": {"warmup_steps": 8}}, by_torchtitan(40, 8, 1e-3)),
    ({**HF, "warmdown_ratio": 0.3}, by_nanochat(40, 8, 1e-3, 0.3, 0.05)),
    ({**RATE, "max_steps": 40, "warmdown_ratio": 0.5, "training_stage": "sft", "sft_data_path": "x", "pretrain_checkpoint": "base"}, by_nanochat(40, 0, 1e-3, 0.5, 0)),
    ({**NANOGPT, "warmup_iters": 8, "lr_decay_iters": 40}, by_cosine(40, 8, 1e-3, 6e-5)),
    ({**NANOGPT, "decay_lr": False}, [1e-3] * 40),
    (LITGPT, by_cosine(40, 8, 1e-3, 4e-5)),
    ({"train_iters": 40, "lr_warmup_iters": 8, "lr_decay_style": "cosine", "lr": 1e-3}, by_cosine(40, 8, 1e-3, 0)),
])
def test_a_curve_is_the_other_trainers(file, theirs):
    """Warm-ups begin with 0 there, or end a step later: less than a step of them differs, and nothing after them."""
    config = load("--tokenizer-path", "x", config=file).config
    ours, warmup = [learning_rate(step, config) for step in range(config.max_steps)], round(
        config.warmup_steps * (config.max_steps if config.warmup_steps < 1 else 1))
    assert len(ours) == len(theirs)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-9, abs=1e-12)
    assert ours[:warmup] == pytest.approx(theirs[:warmup], abs=1.0001e-3 / max(1, warmup))


@pytest.mark.parametrize("file, words", [
    ({"num_train_epochs": 2}, "LR_SCHEDULE=linear, MIN_LEARNING_RATE=0, WARMUP_STEPS=0, WEIGHT_DECAY=0, ADAM_BETA2=0.999"),
    ({"local_batch_size": 8}, "WARMUP_STEPS=200"), ({"max_iters": 40}, "MIN_LEARNING_RATE=6e-5"), (NANOGPT, "ends at lr_decay_iters=600000"),
    ({**RATE, "max_steps": 9000, "sequence_len": 64}, "a warm-up of at most 100 steps"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "decays along a cosine in transformers, and in a line here"),
    ({"cooldown_fraction": 0.2}, "MIN_LEARNING_RATE=0"), ({"peak_lr": 1e-3}, "MIN_LEARNING_RATE=0"), ({"train_iters": 5}, "ADAM_BETA2=0.999"),
    ({"learning_rate": 1e-3, "base_model": "base", "datasets": [{"path": "x.jsonl"}], "sequence_len": 64, "adapter": "lora"}, "that apply: LR_SCHEDULE=cosine"),
    ({"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs sets nothing beside max_steps"), ({"save_steps": 5, "save_strategy": "no"}, "sets SAVE_EVERY=0")])
def test_defaults_that_a_name_implies_are_set_or_printed(file, words):
    """And no note on a name that is given."""
    assert any(words in note for note in load(config=file).notes), load(config=file).notes
    given = file | {"lr_decay_iters": 40} if "lr_decay_iters" in words else file | {"warmup_ratio": 0.1} if "at most 100" in words else None
    assert given is None or not any(words in note for note in load(config=given).notes)


def test_a_typed_abbreviation_brings_no_other_trainer_s_defaults():
    for flags in (["--lr", "3e-3"], ["--learning_rate", "3e-3", "--lr_scheduler_type", "cosine"]):
        assert any("Defaults of" in note for note in load(*flags).notes) == (len(flags) > 2)


def test_defaults_are_those_of_the_installed_libraries():
    trl = pytest.importorskip("trl", reason="the oracle of these tests: pip install -r requirements-dev.txt")
    theirs = {"LEARNING_RATE": "learning_rate", "WEIGHT_DECAY": "weight_decay", "WARMUP_STEPS": "warmup_steps", "ADAM_BETA2": "adam_beta2",
              "EPOCHS": "num_train_epochs", "MICRO_BATCH_SIZE": "per_device_train_batch_size", "MAX_SEQ_LEN": "max_length",
              "GRPO_GROUP": "num_generations", "GRPO_MAX_TOKENS": "max_completion_length", "GRPO_BETA": "beta", "GRPO_LOSS": "loss_type"}
    for stage, kind in {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "grpo": trl.GRPOConfig}.items():
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
        ours = defaults_of("TRL", {"training_stage": (stage, "")})
        names = [name for name in theirs if name.lower() in ours and theirs[name] in fields]
        assert len(names) >= 7
        for name in names:
            default = fields[theirs[name]]
            assert ours[name.lower()] == default if isinstance(default, str) else float(ours[name.lower()]) == default, (stage, name)


def test_null_is_no_limit_where_the_other_trainer_means_that_and_of_a_name_that_is_also_ours_it_is_said():
    config = load(config={"clip_grad_norm": None, "save_total_limit": None, "train_iters": None}).config  # torchtune's and the Trainer's defaults
    assert (config.max_grad_norm, config.keep_last, config.max_steps) == (0, 0, 1000)
    Path("run.yaml").write_text("max_grad_norm: null\nweight_decay:\nmax_length: null\nwandb_entity:\nnum_train_epochs: 1\n")
    loaded = load("--config", "run.yaml")
    assert loaded.config.max_grad_norm == 0 and any("MAX_GRAD_NORM=0" in note for note in loaded.notes), "transformers' null"
    assert any(note.startswith("Without a value, ") and note.endswith(": weight_decay max_length") for note in loaded.notes)
