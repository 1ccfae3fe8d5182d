"""Validate the names and values of settings, and suggest a setting for an unknown name."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Optional

from pydantic import ValidationError

from common.text import printable
from config import SECRETS, Config

SWITCHES = {name for name, field in Config.model_fields.items() if field.annotation is bool}
OPTIONAL = {name for name, field in Config.model_fields.items() if field.default is None}
# Names of these settings in other trainers.
FOREIGN_NAMES = {foreign: name for name, names in {
    "learning_rate": "max_lr lr max_learning_rate peak_lr", "min_learning_rate": "min_lr",
    "micro_batch_size": "batch_size max_batch_size train_batch_size local_batch_size per_device_batch_size "
                        "per_device_train_batch_size per_device_eval_batch_size device_batch_size",
    "total_batch_size": "global_batch_size grad_accum_steps gradient_accumulation_steps",
    "max_seq_len": "block_size context_length context_size seq_len seq_length sequence_length max_length "
                   "max_seq_length max_position_embeddings n_ctx n_positions cutoff_len model_max_length "
                   "max_prompt_length",
    "max_steps": "max_iters num_iterations num_steps train_steps total_steps steps iters iterations",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "warmup_steps": "warmup warmup_iters warmup_ratio",
    "decay_fraction": "lr_decay_iters decay_ratio cooldown_iters",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler decay_lr lr_decay_style",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping gradient_clip_val max_norm", "weight_decay": "wd",
    "adam_beta1": "beta1 betas", "adam_beta2": "beta2", "adam_eps": "eps epsilon adam_epsilon",
    "muon_momentum": "momentum",
    "precision": "dtype torch_dtype bf16 fp16 mixed_precision", "seed": "random_seed",
    "validate_every": "eval_interval eval_every eval_steps eval_freq val_every val_steps val_interval "
                      "validation_every validation_steps", "validation_rows": "eval_iters",
    "validation_fraction": "val_set_size validation_split",
    "save_every": "save_interval save_steps save_freq checkpoint_every checkpoint_interval checkpoint_steps",
    "keep_last": "save_total_limit",
    "log_every": "log_interval log_steps log_freq logging_steps print_every print_freq",
    "sample_every": "sample_interval sample_steps",
    "sample_top_p": "top_p", "sample_temperature": "temperature", "early_stopping_patience": "patience",
    "output_dir": "out_dir save_dir checkpoint_dir", "run_name": "name exp_name experiment_name",
    "pretrain_data_path": "data data_path data_dir data_files dataset dataset_dir dataset_name dataset_path "
                          "datasets input_file train_data train_file train_files training_data",
    "resume": "resume_from resume_from_checkpoint",
    "pretrain_checkpoint": "init_from model_name_or_path pretrained_model base_model checkpoint model_path "
                           "model_name model_id pretrained_model_name_or_path initial_checkpoint_dir "
                           "load_checkpoint load_from",
    "preset": "model_size model model_flavor flavor size",
    "n_layers": "n_layer num_layers num_hidden_layers",
    "n_heads": "n_head num_heads num_attention_heads",
    "n_kv_heads": "num_kv_heads num_key_value_heads n_kv_head",
    "head_width": "head_dim head_size", "model_type": "architecture arch", "sliding_window": "window_size",
    "dim": "n_embd d_model hidden_size model_dim embedding_dim width",
    "ffn_dim": "intermediate_size hidden_dim d_ff", "tokenizer_path": "vocab_size tokenizer tokenizer_name",
    "attention_backend": "attn attn_implementation flash_attn use_flash_attn",
    "rope_theta": "rotary_base", "init_std": "initializer_range",
    "lora_rank": "lora_r", "lora_enabled": "use_lora use_peft peft adapter",
    "lora_base_quantization": "load_in_4bit load_in_8bit", "lora_train_head": "modules_to_save",
    "dpo_beta": "beta", "dpo_loss": "loss_type", "dpo_reference": "ref_model", "dpo_sft_weight": "rpo_alpha",
    "teacher_model": "teacher", "sharding": "fsdp deepspeed zero_stage",
    "world_size": "num_gpus",
    "activation_checkpointing": "gradient_checkpointing", "wandb_enabled": "use_wandb",
}.items() for foreign in names.split()}

# Messages for pydantic's types of errors.
EXPECTATIONS = {
    "int_parsing": "expected a whole number", "int_from_float": "expected a whole number",
    "float_parsing": "expected a number", "bool_parsing": "expected true or false",
    "literal_error": "expected {expected}", "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}", "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}"}


def nearest(name: str, known: Iterable[str] = Config.model_fields) -> Optional[str]:
    """Return the known name most similar to an unknown one, also by its names in other trainers, or None."""
    known = {ours: ours for ours in known}
    known |= {foreign: ours for foreign, ours in FOREIGN_NAMES.items() if ours in known}
    match = difflib.get_close_matches(name.lower().replace("-", "_")[:60], known, 1)
    return known[match[0]] if match else None


def unknown(where: str, name: str) -> str:
    guess = nearest(name)
    advice = f"did you mean {guess.upper()}?" if guess else "--help lists every setting"
    return f"{where}: unknown setting {shortened(name)}; {advice}"


def shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def misspelt(key: str) -> Optional[str]:
    """Return the setting that an environment variable probably misspells, or None.

    Stricter than `nearest`, because the environment contains other programs' variables, such as COMPILER,
    DEVICES and LOCAL_WORLD_SIZE.
    """
    name = key.lower()
    if key != key.upper():
        return name if name in Config.model_fields and "_" in name else None
    if name in Config.model_fields or len(name) < 6:
        return None
    if name in FOREIGN_NAMES and "_" in name and name not in ("model_path", "model_name", "model_id"):
        return FOREIGN_NAMES[name]
    match = next(iter(difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.88)), None)
    return None if match is None or ("_" not in match and name.startswith(match)) else match


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message for an unknown flag."""
    name = flag.lstrip("-").lower().replace("-", "_")
    guess, value = name if name in known else nearest(name, known), ""
    if name.removeprefix("no_") in SWITCHES:
        guess, value = name.removeprefix("no_"), " false"
    advice = f"did you mean --{guess.replace('_', '-')}{value}?" if guess else "--help lists every setting"
    return f"command line: unknown flag {shortened(flag)}; {advice}"


def validate(merged: Mapping[str, tuple[Any, str]]) -> tuple[Config, dict[str, str]]:
    """Return the configuration, with defaults instead of invalid values, and an error for each of them."""
    nothing = ("", "none", "null")
    values = {name: None if name in OPTIONAL and isinstance(value, str) and value.strip().lower() in nothing
              else value for name, (value, _) in merged.items()}
    invalid = {}
    for name, value in values.items():
        if isinstance(value, list):
            invalid[name] = "expected one value, not a list"
        elif isinstance(value, bool) and name not in SWITCHES:  # JSON's true, which equals 1 in Python
            invalid[name] = "expected a number or text"
        elif isinstance(value, str) and re.search(r"[\0\ud800-\udc7f\udd00-\udfff]", value):
            # os.fsencode fails: it accepts only surrogates that stand for undecodable bytes.
            invalid[name] = "contains a NUL or an invalid character; remove it"

    def build() -> Config:
        return Config(**{name: value for name, value in values.items() if name not in invalid})

    try:
        config = build()
    except ValidationError as error:
        for detail in error.errors():
            message = EXPECTATIONS.get(detail["type"], detail["msg"][0].lower() + detail["msg"][1:])
            invalid[str(detail["loc"][0])] = message.format(**detail.get("ctx", {}))
        config = build()
    messages = {}
    for name, message in invalid.items():
        value, where = merged[name]
        shown = "***" if name in SECRETS else shortened(str(value))
        messages[name] = f"{where}: {name.upper()}={shown}: {message}"
    return config, messages
