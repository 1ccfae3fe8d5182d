"""A model and its tokenizer from a folder, ready to be asked: a checkpoint of a run, or a Llama of Hugging Face's."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import checkpoints
from adapter_files import refuse_adapters
from config import ModelConfig
from convert import from_huggingface, load_model_weights, model_settings_from_huggingface, read_json, vocabulary_rows
from errors import CheckpointError
from model import Transformer, padded
from resume_rules import AS_SET, MODEL_SHAPE, assignments
from tokenizer import load_tokenizer


def transformer_of(tensors: dict[str, Tensor], config: ModelConfig, vocab_size: int,
                   dtype: torch.dtype = torch.float32) -> Transformer:
    """A model around the tensors of a Hugging Face Llama, which keep their own dtype, that computes in the given one."""
    state = from_huggingface(tensors, config, padded(vocab_size))
    with torch.device("meta"):
        model = Transformer(config, vocab_size, dtype)
    model.load_state_dict(state, assign=True)
    return model


def model_config_of(folder: Path) -> ModelConfig:
    """The settings of the Llama in a folder.

    Raises:
        CheckpointError: it has no config.json that describes one.
    """
    content = read_json(folder / "config.json")
    try:
        return ModelConfig(**model_settings_from_huggingface(content))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_model_folder(folder: Path) -> tuple[Transformer, Any]:
    """The folder's model, on the GPU in bf16 where there is one and otherwise in fp32, and its tokenizer.

    Raises:
        CheckpointError: it holds no Llama that can be read, only adapters, or a damaged one.
        DataError: its tokenizer cannot be used.
    """
    refuse_adapters(folder)
    if os.path.exists(folder / checkpoints.MANIFEST):
        checkpoints.verify(folder)
    config = model_config_of(folder)
    tensors = load_model_weights(folder)
    vocab_size = vocabulary_rows(tensors)
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(f"{folder}: its tokenizer has {tokenizer.vocab_size:,} ids and its model {vocab_size:,}; put the "
                              "model's own tokenizer there")
    on_gpu = torch.cuda.is_available()
    model = transformer_of(tensors, config, vocab_size, torch.bfloat16 if on_gpu else torch.float32)
    return model.float().to("cuda" if on_gpu else "cpu"), tokenizer


def check_model(folder: Path, config: ModelConfig) -> list[str]:
    """Hold the settings against the model in a folder; returns what to warn of.

    Raises:
        CheckpointError: it holds a model of another shape, only adapters, or none.
    """
    refuse_adapters(folder)
    theirs = model_config_of(folder)

    def differing(*names: str) -> dict[str, Any]:
        return {name.upper(): getattr(theirs, name) for name in names if getattr(theirs, name) != getattr(config, name)}

    def shown(others: dict[str, Any]) -> str:
        return "; ".join(f"{AS_SET.get(name, name)} is {value} there and {getattr(config, name.lower())} here"
                         for name, value in others.items())

    if others := differing(*map(str.lower, MODEL_SHAPE)):
        raise CheckpointError(f"{folder} holds another model: {shown(others)}. To start from it, {assignments(others)}")
    # The same weights compute something else with these, which is done on purpose to learn longer contexts.
    scaling = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_len") if theirs.rope_scaling_factor else ()
    others = differing("norm_eps", "rope_theta", "rope_scaling_factor", *scaling)
    return [f"the model in {folder} was made with other settings: {shown(others)}"] if others else []
