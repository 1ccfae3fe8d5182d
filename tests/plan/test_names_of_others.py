"""Exact names of other trainers are used where their value carries over, and refused with a sentence where not."""

import json
import math
from pathlib import Path

import pytest
import torch
from factories import checkpoint_without_weights

from config import MODEL_SETTINGS, Config, on_resume
from extensions.other_trainers import COMPUTED, CONVERTED, HARMLESS, NAMES, translate
from learn.optim import learning_rate
from plan.layers import PRESETS_DIR, read_env_file
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
    ("max_iters", 500, {"max_steps": 500}), ("num_train_epochs", 2, {"epochs": 2}), ("lr_scheduler_type", "constant_with_warmup", {"lr_schedule": "constant"}),
    ("model_size", "7B", {"preset": "7b", "dim": 4096}), ("bf16", True, {"precision": "bf16"}), ("use_amp", False, {"precision": "fp32"}),
    ("gradient_checkpointing", True, {"activation_checkpointing": "block"}), ("enable_fsdp", True, {"sharding": "full"}),
    ("resume_from_checkpoint", "a/b", {"resume": "a/b"}), ("resume_from_checkpoint", True, {"resume": "auto"}),
    ("warmdown_ratio", 0.4, {"decay_fraction": 0.4, "lr_schedule": "wsd"}),
    ("stage", "pt", {"training_stage": "pretrain"}), ("global_batch_size", 16, {"total_batch_size": 16 * 1024}), ("optim", "adamw_torch", {"optimizer": "adamw"})])
def test_a_name_is_used_from_each_source_and_printed_once(source, name, value, expected):
    checkpoint_without_weights(Path("a/b"), 3)
    loaded = read(source, name, value)
    assert {key: getattr(loaded.config, key) for key in expected} == expected
    note, *implied = [note for note in loaded.notes if f"{name} is our" in note.lower() or f"{name}: " in note.lower()]
    assert next(iter(expected)).upper() in note and len(implied) < len(expected)


@pytest.mark.parametrize("source", ["flag", "env", "yaml", "json"])
@pytest.mark.parametrize("name", ["eval_dataset", "val_file", "test_datasets", "validation_file", "val_files", "eval_dataset_path"])
def test_a_validation_set_under_another_trainer_s_name_is_that_of_the_stage(source, name):
    value = [{"path": "own.jsonl", "split": "train", "type": "chat_template"}] if source in ("yaml", "json") and name == "test_datasets" else "own.jsonl"
    loaded = read(source, name, value)
    assert loaded.config.validation_data_path == "own.jsonl" and f"{name} is our VALIDATION_DATA_PATH: own.jsonl" in "\n".join(loaded.notes).lower().replace(
        "validation_data_path", "VALIDATION_DATA_PATH")
    # As ./paddock train adds what it has prepared.
    assert load("--eval-dataset", "own.jsonl", "--validation-data-path", "prepared").config.validation_data_path == "prepared"


def test_rows_become_tokens_with_the_row_length_and_the_ranks():
    ranks = {"WORLD_SIZE": "2", "RANK": "0"}
    loaded = load("--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "8", "--block_size", "1024", environ=ranks)
    assert loaded.config.total_batch_size == 65_536
    assert "gradient_accumulation_steps: 4 x 8 rows x 2 ranks x 1,024 tokens = TOTAL_BATCH_SIZE=65536" in loaded.notes
    loaded = load("--max-seq-len", "512", env="GLOBAL_BATCH_SIZE=6\nBATCH_SIZE=3\n", environ=ranks)
    assert (loaded.config.total_batch_size, loaded.config.micro_batch_size) == (3072, 3)
    (problem,) = problems("--gradient_accumulation_steps", "4", env="")
    assert "gradient_accumulation_steps=4 needs MICRO_BATCH_SIZE and MAX_SEQ_LEN; TOTAL_BATCH_SIZE, in tokens" in problem
    values = ["--micro-batch-size", "2", "--max-seq-len", "1024", "--gradient_accumulation_steps"]
    for wrong in ("auto", "0", "-1", "2.5"):
        assert "is not a valid number" in problems(*values, wrong)[0]
    assert peek([*values, "4"])[0]["total_batch_size"] == "8192"


def test_a_name_whose_value_a_higher_layer_replaces_says_so():
    loaded = load("--max-steps", "9", "--pretrain-data-path", "data/book", config='{"max_iters": 12, "train_file": "book.txt"}')
    assert loaded.config.max_steps == 9 and loaded.config.pretrain_data_path == "data/book"
    assert "max_iters is our MAX_STEPS: 12, replaced by 9 (command line)" in loaded.notes
    assert "train_file is our PRETRAIN_DATA_PATH: book.txt, replaced by data/book (command line)" in loaded.notes


def test_a_share_of_the_steps_is_one_however_the_steps_are_given():
    config = load("--max-steps", "200", config={"warmup_ratio": 0.1}).config
    assert config.warmup_steps == 0.1 and learning_rate(19, config) == config.learning_rate > learning_rate(18, config)
    for values, steps in (("0.03", 3), ("0", 0), ("7", 7), ("1", 1)):
        config = load("--epochs", "1", env=f"WARMUP_{'RATIO' if float(values) < 1 else 'STEPS'}={values}\n").config.model_copy(update={"max_steps": 100})
        assert max(range(100), key=lambda step: learning_rate(step, config)) == max(0, steps - 1)
    assert "WARMUP_STEPS=1.5 must be a whole number" in problems("--warmup_steps", "1.5")[0]
    for value in ("1", "1.0", "10"):
        assert f"warmup_ratio={value} is not a share below 1; for steps, use WARMUP" in problems("--warmup_ratio", value)[0]


@pytest.mark.parametrize("flags, config, stage, name", [
    (("--training-stage", "sft", "--dataset_name", "a/b"), {}, "sft", "dataset_name"), (("--train_file", "a/b"), {}, "pretrain", "train_file"),
    ((), {"datasets": [{"path": "a/b", "type": "alpaca"}]}, "sft", "datasets"), ((), {"rl": "dpo", "datasets": [{"path": "a/b", "split": "train"}]}, "dpo", "datasets"),
    (("--training-stage", "grpo", "--reward", "exact"), {"dataset_name": "a/b"}, "grpo", "dataset_name")])
def test_names_of_data_are_those_of_the_stage(flags, config, stage, name):
    start = ("--instruct-checkpoint", "base") if stage in ("dpo", "grpo") else ("--pretrain-checkpoint", "base")
    loaded = load("--tokenizer-path", "x", *start, *flags, config=config)
    assert loaded.config.training_stage == stage and loaded.config.data_path == "a/b"
    assert f"{name} is our {stage.upper()}_DATA_PATH: a/b" in loaded.notes
    assert ("datasets without a stage is TRAINING_STAGE=sft" in loaded.notes) == (name == "datasets" and stage == "sft")
    prepared = load("--tokenizer-path", "x", *start, *flags, f"--{stage}-data-path", "prepared", config=config)
    assert prepared.config.data_path == "prepared", "as ./paddock train adds it"


def test_data_under_another_name_needs_no_sample():
    values, _ = peek(["--debug", "--dataset_name", "a/b"])
    assert values["pretrain_data_path"] == "a/b" and values["preset"] == "debug"


@pytest.mark.parametrize("config, name, value", [
    ({"report_to": "mlflow"}, "mlflow_enabled", True), ({"report_to": []}, "mlflow_enabled", False), ({"resume_from_checkpoint": "latest"}, "resume", "auto"),
    *(({"training_stage": "dpo", "dpo_data_path": "x", "instruct_checkpoint": "base", "pref_loss": loss, "pref_beta": 0.3}, name, 0.3)
      for loss, name in (("sigmoid", "dpo_beta"), ("orpo", "orpo_lambda"), ("simpo", "simpo_beta"))),
    ({"rl": "grpo", "grpo_data_path": "x", "instruct_checkpoint": "base", "rl_beta": 0.3}, "grpo_beta", 0.3),
    ({"training": {"dtype": "float32"}}, "precision", "auto"), ({"training": {"dtype": "bfloat16"}}, "optimizer_dtype", "bf16"),
    ({"init_from": "scratch"}, "pretrain_checkpoint", None), ({"init_from": "resume"}, "pretrain_checkpoint", None), ({"init_from": "base"}, "pretrain_checkpoint", "base"),
    ({"mixed_precision": "no"}, "precision", "fp32"), ({"torch_dtype": "torch.bfloat16"}, "precision", "bf16")])
def test_values_of_others_have_their_meaning(config, name, value):
    assert getattr(load(config=config).config, name) == value


def test_values_of_others_are_used_under_our_names_too():
    loaded = load("--optimizer", "adamw_torch_fused", env="PRECISION=bfloat16\n", config={"model_type": "LlamaForCausalLM"})
    assert (loaded.config.optimizer, loaded.config.precision, loaded.config.model_type) == ("adamw", "bf16", "llama")
    assert "OPTIMIZER=adamw_torch_fused is our adamw" in loaded.notes
    assert load("--optimizer", "adamw_torch", "--optimizer", "muon").config.optimizer == "muon"


def test_variables_of_libraries_are_exported_under_other_names():
    loaded = load("--device_id", "1", config={"wandb_project": "x"})
    assert load(config={"device_id": 1}).exports == {"CUDA_VISIBLE_DEVICES": "1"} == load(config={"gpu_ids": [1]}).exports
    assert loaded.exports == {"CUDA_VISIBLE_DEVICES": "1", "WANDB_PROJECT": "x"}
    assert {"device_id is CUDA_VISIBLE_DEVICES: 1", "wandb_project is WANDB_PROJECT: x"} <= {*loaded.notes}


@pytest.mark.parametrize("flags, env, config, second", [
    (("--max_iters", "5", "--max-steps", "5"), "", {}, "--max-steps"), (("--max-steps", "5", "--max_iters", "5"), "", {}, "max_iters"),
    (("--steps", "5", "--max_iters", "5"), "", {}, "max_iters"), ((), "LR=1\nLEARNING_RATE=1\n", {}, ".env:2"), ((), "LEARNING_RATE=1\nlr=1\n", {}, ".env:2"),
    ((), "", {"a": {"max_steps": 5}, "train": {"max_iters": 5}}, "train.max_iters"), ((), "", {"max_iters": 5, "max_steps": 5}, "max_steps"),
    (("--global_batch_size", "8", "--max-seq-len", "1024", "--total-batch-size", "8192"), "", {}, "--total-batch-size"), (("--load_in_4bit", "--lora-enabled", "false"), "", {}, "--lora-enabled")])
def test_two_names_of_a_setting_in_a_layer_are_a_duplicate(flags, env, config, second):
    assert any(second in problem and "second time" in problem for problem in problems(*flags, env=env, config=config))


def test_implied_settings_may_also_be_given():
    base = ("--training-stage", "sft", "--sft-data-path", "x", "--pretrain-checkpoint", "base")
    for flags in (("--adapter", "qlora", "--load_in_4bit", "true"), ("--load_in_4bit", "--adapter", "lora"), ("--load_in_4bit", "--use_peft")):
        config = load(*base, *flags).config
        assert config.lora_enabled and config.lora_base_quantization == "nf4"
    ranks = {"WORLD_SIZE": "4", "RANK": "0"}
    for flags in (("--use_fsdp", "--sharding_group_size", "2"), ("--sharding_group_size", "2", "--enable_fsdp", "true")):
        config = load(*flags, "--micro-batch-size", "1", environ=ranks).config
        assert (config.sharding, config.shard_degree) == ("hybrid", 2)


@pytest.mark.parametrize("config, words", [
    ({"bf16": False}, "does not carry over"),
    ({"optim": "adamw_8bit"}, "OPTIMIZER=adamw_8bit: expected 'adamw' or 'muon'"), ({"deepspeed": "ds.json"}, "SHARDING=full"),
    ({"datasets": [{"path": "x"}, {"path": "y"}]}, "SFT_DATA_PATH"), ({"packing": False}, "rows are always packed"),
    ({"train_on_inputs": True}, "only the answers"), ({"tensor_parallel_degree": 2}, "only by SHARDING"), ({"datasets": [{"path": "x", "field": "y"}]}, "SFT_DATA_PATH"),
    ({"model_size": "13B"}, "unknown preset 13b"), ({"bananas": 1}, "docs/coming-from.md"), ({"report_to": "clearml"}, "WANDB_ENABLED"),
    ({"betas": [0.9, 0.95, 0.999]}, "ADAM_BETA1 and ADAM_BETA2 set it"), ({"betas": [0.9]}, "ADAM_BETA1 and ADAM_BETA2"),
    ({"bf16": False}, "PRECISION=fp32 without it"), ({"min_lr_ratio": 0.1}, "needs LEARNING_RATE; MIN_LEARNING_RATE is the final rate"),
    ({"lr_scheduler_type": "polynomial"}, "see LR_SCHEDULE"), ({"max_iters": 9, "lr_decay_iters": 5}, "lr_decay_iters, our MAX_STEPS, is set a second time")])
def test_a_value_that_does_not_carry_over_is_refused(config, words):
    (problem,) = problems(config=config)
    assert words in problem and "run.json" in problem


def test_names_that_need_no_setting_are_reported_and_empty_values_are_unset():
    notes = load("--num_workers", "4", "--fp16", "false", config={"monitor_memory": True, "tensor_parallel_degree": 1, "wandb_entity": None}).notes
    assert [note.split()[0] for note in notes if "needs no setting here" in note] == ["monitor_memory=true", "tensor_parallel_degree=1", "num_workers=4", "fp16=false"]
    Path("run.yaml").write_text("wandb_entity:\nwandb_watch:\nlora_target_modules:\nresume_from_checkpoint:\nmax_iters: 3\n")
    assert load("--config", "run.yaml", env="LR=\n").config.max_steps == 3


@pytest.mark.parametrize("config, name, value", [
    ({"micro_batch_size": 2, "max_seq_len": 64, "grad_accum_nums": 3}, "total_batch_size", 384), ({"tokenizer_num_workers": 3}, "preparation_workers", 3),
    ({"run_validation": False}, "validate_every", 0), ({"micro_batch_size": 2, "max_eval_step": 5}, "validation_rows", 10), ({"resume_from_latest": True}, "resume", "auto"),
    ({"training_stage": "distillation", "teacher_model": "x"}, "distillation_enabled", True)])
def test_names_of_earlier_custom_trainers_are_settings(config, name, value):
    assert getattr(load(config=config).config, name) == value


def test_names_of_earlier_custom_trainers_are_answered():
    harmless = {"log_timing": True, "prefetch_factor": 2, "flop_counter": True, "profiler_dir": "x", "replica_group_size": 2, "run_validation": True}
    notes = load(config=harmless).notes
    assert [note.split("=")[0] for note in notes if "needs no setting here" in note] == [*harmless]
    assert "PROFILE_STEPS" in problems(config={"wait_step": 3})[0]
    base = {"sft_data_path": "x", "pretrain_checkpoint": "base", "training_stage": "lora"}
    config = load("--tokenizer-path", "x", config=base).config
    assert (config.training_stage, config.lora_enabled) == ("sft", True)
    assert load("--tokenizer-path", "x", config=base | {"training_stage": "instruct"}).config.training_stage == "sft"
    ranks = {"WORLD_SIZE": "4", "RANK": "0"}
    config = load(config={"hsdp": True, "enable_fsdp": True, "sharding_group_size": 2, "micro_batch_size": 1}, environ=ranks).config
    assert (config.sharding, config.shard_degree) == ("hybrid", 2)


def test_flags_that_do_less_than_they_seem_to_say_so():
    assert any("RUN_NAME=none means no name" in note for note in load("--run-name", "none").notes)
    assert any("a small run is --preset debug" in note for note in load("--debug", "--depth", "2").notes)
    assert not any("debug" in note.lower() for note in load("--run-name", "first", "--depth", "2").notes)


def test_heads_without_a_number_of_kv_heads_have_their_own_unless_the_default_divides_them():
    loaded = load("--n_head", "6", "--n_embd", "96")
    assert loaded.config.n_kv_heads == 6 and "N_HEADS=6 sets N_KV_HEADS=6" in loaded.notes
    assert load("--n_head", "8", "--n_embd", "128").config.n_kv_heads == Config().n_kv_heads
    assert "N_KV_HEADS=4 must divide" in problems("--n_head", "6", "--n_embd", "96", "--n-kv-heads", "4")[0]


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
    config = load(config={"data": {"init_args": {"seed": 5}}, "seed": 3, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"betas": [0.8, 0.9]}}}).config
    assert (config.seed, config.data_seed, config.adam_beta1, config.adam_beta2, config.optimizer) == (3, 5, 0.8, 0.9, "adamw")


def test_every_conversion_is_to_valid_settings():
    assert {*CONVERTED, *COMPUTED, *HARMLESS} <= {*ALIASES, *OTHER_WAYS}
    for name, table in CONVERTED.items():
        for value in table if isinstance(table, dict) else ():
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


HF, RATE = {"max_steps": 40, "warmup_steps": 8, "learning_rate": 1e-3}, {"learning_rate": 1e-3}
NANOGPT = {**RATE, "max_iters": 40, "block_size": 64, "batch_size": 4}
LITGPT = {"max_steps": 40, "lr_warmup_steps": 8, "micro_batch_size": 4, "global_batch_size": 8, "max_seq_length": 64, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}}


@pytest.mark.parametrize("file, theirs", [
    ({**HF, "lr_scheduler_type": "cosine"}, by_transformers("cosine", 40, 8, 1e-3)),
    ({**HF, "lr_scheduler_type": "linear"}, by_transformers("linear", 40, 8, 1e-3)),
    ({**HF, "lr_scheduler": "linear", "warmup_steps": 0, "warmup_ratio": 0.2}, by_transformers("linear", 40, 8, 1e-3)),
    ({**HF, "warmup_ratio": 0.25, "warmup_steps": 0, "lr_scheduler_type": "cosine"}, by_transformers("cosine", 40, 10, 1e-3)),
    ({**RATE, "max_steps": 40, "lr_scheduler_type": "cosine"}, by_transformers("cosine", 40, 0, 1e-3)),
    ({**HF, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, by_transformers("cosine_with_min_lr", 40, 8, 1e-3, min_lr_rate=0.2)),
    ({**HF, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}, by_transformers("cosine_with_min_lr", 40, 8, 1e-3, min_lr=1e-5)),
    ({**HF, "lr_scheduler_type": "constant_with_warmup"}, by_transformers("constant_with_warmup", 40, 8, 1e-3)),
    ({**HF, "lr_scheduler_type": "constant"}, by_transformers("constant", 40, 8, 1e-3)),
    ({**HF, "per_device_train_batch_size": 4}, by_transformers("linear", 40, 8, 1e-3)),
    ({**RATE, "max_steps": 40, "num_train_epochs": 3}, by_transformers("linear", 40, 0, 1e-3)),
    ({"max_steps": 40, "logging_steps": 5, "cutoff_len": 64}, by_transformers("linear", 40, 0, 5e-5)),
    ({**RATE, "max_steps": 40, "sequence_len": 64, "micro_batch_size": 2}, by_transformers("cosine", 40, 1, 1e-3)),
    ({**RATE, "max_steps": 40, "sequence_len": 64, "cosine_min_lr_ratio": 0.1, "warmup_steps": 4}, by_transformers("cosine_with_min_lr", 40, 4, 1e-3, min_lr_rate=0.1)),
    ({**RATE, "training": {"steps": 40}, "lr_scheduler": {"warmup_steps": 8, "decay_ratio": 0.5}}, by_torchtitan(40, 8, 1e-3, 0.5)),
    ({"training": {"steps": 40, "local_batch_size": 4, "seq_len": 64}, "optimizer": {"lr": 1e-3}, "lr_scheduler": {"warmup_steps": 8}}, by_torchtitan(40, 8, 1e-3)),
    ({**HF, "warmdown_ratio": 0.3}, by_nanochat(40, 8, 1e-3, 0.3, 0.05)),
    ({**HF, "warmdown_ratio": 0.5, "final_lr_frac": 0.2}, by_nanochat(40, 8, 1e-3, 0.5, 0.2)),
    ({**RATE, "max_steps": 40, "warmdown_ratio": 0.5, "training_stage": "sft", "sft_data_path": "x", "pretrain_checkpoint": "base"}, by_nanochat(40, 0, 1e-3, 0.5, 0)),
    ({**NANOGPT, "warmup_iters": 8, "decay_lr": True}, by_cosine(40, 8, 1e-3, 6e-5)),
    ({**NANOGPT, "warmup_iters": 8, "lr_decay_iters": 40}, by_cosine(40, 8, 1e-3, 6e-5)),
    ({**NANOGPT, "decay_lr": False}, [1e-3] * 40),
    (LITGPT, by_cosine(40, 8, 1e-3, 4e-5)),
    ({"train_iters": 40, "lr_warmup_iters": 8, "lr_decay_style": "cosine", "lr": 1e-3}, by_cosine(40, 8, 1e-3, 0)),
    ({"train_iters": 40, "lr_warmup_iters": 8, "lr": 1e-3}, by_transformers("linear", 40, 8, 1e-3)),
])
def test_a_curve_is_the_other_trainers(file, theirs):
    """Warm-ups begin with 0 there, or end a step later: less than a step of them differs, and nothing after them."""
    config = load("--tokenizer-path", "x", config=file).config
    ours, warmup = [learning_rate(step, config) for step in range(config.max_steps)], round(
        config.warmup_steps * (config.max_steps if config.warmup_steps < 1 else 1))
    assert len(ours) == len(theirs)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-9, abs=1e-12)
    assert ours[:warmup] == pytest.approx(theirs[:warmup], abs=1.0001e-3 / max(1, warmup))


@pytest.mark.parametrize("file, settings", [
    ({**HF, "per_device_train_batch_size": 4}, {"weight_decay": 0, "adam_beta2": 0.999, "max_grad_norm": 1}),
    ({**HF, "per_device_train_batch_size": 4, "max_length": 64}, {"total_batch_size": 256}),  # gradient_accumulation_steps=1
    ({**RATE, "training_stage": "sft", "max_steps": 9, "sequence_len": 64}, {"adam_beta2": 0.95}),  # the name of a stage is ours: no file of axolotl
    (LITGPT, {"weight_decay": 0.01, "adam_beta2": 0.999, "tie_embeddings": False}),
    ({**NANOGPT, "gradient_accumulation_steps": 8}, {"total_batch_size": 8 * 4 * 64, "weight_decay": 0.1}),
    ({"max_steps": 9, "cutoff_len": 64, "model_name_or_path": "base"}, {"lora_enabled": True, "lora_rank": 8, "lora_alpha": 16, "learning_rate": 5e-5}),
    ({"max_steps": 9, "cutoff_len": 64, "model_name_or_path": "base", "finetuning_type": "full"}, {"lora_enabled": False, "learning_rate": 5e-5}),
    (NANOGPT, {"total_batch_size": 40 * 4 * 64}), ({**RATE, "max_steps": 9, "sequence_len": 64}, {"total_batch_size": 64, "micro_batch_size": 1})])
def test_defaults_are_set_in_a_file_of_one_trainer(file, settings):
    files = {"sft_data_path": "x", "pretrain_checkpoint": "base"} if "training_stage" in file else {}
    config = load("--tokenizer-path", "x", config=file | files).config
    assert {name: getattr(config, name) for name in settings} == settings


def test_accumulated_steps_of_nanogpt_are_those_of_all_ranks():
    ranks = {"WORLD_SIZE": "2", "RANK": "0"}
    assert load(config={**NANOGPT, "gradient_accumulation_steps": 8}, environ=ranks).config.total_batch_size == 8 * 4 * 64
    assert load(config={**HF, "per_device_train_batch_size": 4, "max_length": 64, "gradient_accumulation_steps": 8}, environ=ranks).config.total_batch_size == 2 * 8 * 4 * 64


@pytest.mark.parametrize("file, words", [
    ({"num_train_epochs": 2}, "LR_SCHEDULE=linear, MIN_LEARNING_RATE=0, WARMUP_STEPS=0, WEIGHT_DECAY=0, ADAM_BETA2=0.999"),
    ({"local_batch_size": 8}, "WARMUP_STEPS=200"),
    ({"max_iters": 40}, "MIN_LEARNING_RATE=6e-5"), ({"lr_scheduler_type": "warmup_stable_decay"}, "decays along a cosine in transformers, and in a line here"),
    ({"lr_scheduler_type": "cosine"}, "that apply: MIN_LEARNING_RATE=0"), ({"cooldown_fraction": 0.2}, "MIN_LEARNING_RATE=0"), ({"peak_lr": 1e-3}, "MIN_LEARNING_RATE=0"),
    ({"use_flash_attn": True}, "ATTENTION_BACKEND: auto"), ({"train_iters": 5}, "ADAM_BETA2=0.999"), ({"save_steps": 5, "num_train_epochs": 1}, "KEEP_LAST=0"),
    ({"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs sets nothing beside max_steps"), ({"save_steps": 5, "save_strategy": "no"}, "save_strategy=no sets SAVE_EVERY=0")])
def test_defaults_that_a_name_implies_are_set_or_printed(file, words):
    assert any(words in note for note in load(config=file).notes), load(config=file).notes


def test_names_that_imply_nothing_print_nothing():
    for name, value in (("save_total_limit", 2), ("logging_steps", 3), ("device_id", 1), ("wandb_project", "x"), ("trust_remote_code", True)):
        assert not [note for note in load(config={name: value}).notes if "Defaults of" in note]


def test_every_name_of_what_changes_training_is_that_of_a_trainer():
    safe = {name for name in Config.model_fields if on_resume(name) == "safe"} | {*MODEL_SETTINGS, "lora_enabled", "tokenizer_path"} - {"epochs", "micro_batch_size"}
    assert {name for name, setting in ALIASES.items() if setting not in safe} - NAMES <= {
        "pretrained_model", "model_path", "model_id", "pretrained_model_name_or_path", "random_seed", "teacher", "lora", "target_modules", "patience"}


def test_a_setting_of_ours_or_of_theirs_is_kept_whatever_a_name_implies():
    loaded = load(config={"lr_scheduler_type": "cosine", "min_lr": 1e-5, "warmup_steps": 5}, env="WEIGHT_DECAY=0.3\n")
    assert (loaded.config.min_learning_rate, loaded.config.warmup_steps, loaded.config.weight_decay) == (1e-5, 5, 0.3)
    assert load(config={"lr_scheduler_type": "cosine"}, env="MIN_LEARNING_RATE=2e-5\n").config.min_learning_rate == 2e-5


def test_values_that_are_valid_there():
    loaded = load(config={"max_steps": -1, "num_train_epochs": 2, "save_total_limit": 2})
    assert loaded.config.epochs == 2 and any("max_steps=-1" in note for note in loaded.notes)
    config = load(config={"max_steps": 50, "save_steps": 0.25, "eval_steps": 0.3, "logging_steps": 0.01}).config
    assert (config.save_every, config.validate_every, config.log_every) == (13, 15, 1)  # rounded up, as in transformers
    (problem,) = problems(config={"num_train_epochs": 2, "save_steps": 0.5})
    assert "save_steps=0.5 is a share of the steps" in problem and "SAVE_EVERY" in problem
    for flash in ({"use_flash_attn": True}, {"flash_attention": True}, {"flash_attn": "fa2"}):
        assert load(config=flash).config.attention_backend == "auto"
    assert load(config={"warmup_steps": 10, "warmup_ratio": 0}).config.warmup_steps == 10
    assert "set a second time" in problems(config={"warmup_steps": 10, "warmup_ratio": 0.1})[0]
