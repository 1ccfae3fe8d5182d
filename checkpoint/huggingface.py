"""Weights in the formats of Hugging Face and Meta, and model folders.

Paddock uses Meta's parameter names. Hugging Face has other names, rotates the two halves of a head instead of
neighbouring pairs (so the rows of wq and wk are permuted), and stores no vocabulary padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import model_json
from checkpoint.model_json import INDEX_FILE, WEIGHTS_FILE, write_json
from checkpoint.tensors import LazyTensor, TensorFile, lazy, open_tensors, write_files
from common.errors import CheckpointError
from config import LINEAR_LAYERS, ModelConfig

MAX_SHARD_BYTES = 5_000_000_000  # as in transformers
VOCABULARY = ("tok_embeddings.weight", "output.weight")  # one row per token id
# Ascending ids of trained rows of "tok_embeddings" and "output"; if tied, the first means both.
TokenIds = Mapping[str, Sequence[int]]

# Internal and Hugging Face names of parameters, whose shapes are in `ModelConfig.block_shapes`.
HUGGINGFACE_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", **LINEAR_LAYERS,
    "attention.bq": "self_attn.q_proj.bias", "attention.bk": "self_attn.k_proj.bias",
    "attention.bv": "self_attn.v_proj.bias", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ROTATED = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")  # rows are permuted within each head


def huggingface_name(name: str) -> str:
    """Return Hugging Face's name of a parameter."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{HUGGINGFACE_NAMES[stem]}.weight"
    _, layer, module = stem.split(".", 2)
    external = HUGGINGFACE_NAMES[module]
    return f"model.layers.{layer}.{external}{'' if external.endswith('.bias') else '.weight'}"


def is_vocabulary(name: str) -> bool:
    """Return whether a parameter, or its optimizer state, has one row per token id."""
    return f"{name}.".startswith(tuple(f"{matrix}." for matrix in VOCABULARY))


def permuted(name: str, weight: LazyTensor, model_config: ModelConfig, to_huggingface: bool) -> LazyTensor:
    """Return the weight with the rows of each rotated head in the order of the other layout."""
    if name.rsplit(".", 2)[-2] not in ROTATED or name.endswith(".lora_A"):
        return weight
    half = model_config.head_dim // 2
    pairs_or_halves = (-1, half, 2) if to_huggingface else (-1, 2, half)
    order = torch.arange(weight.rows).unflatten(0, pairs_or_halves).transpose(1, 2).flatten()

    def read(start: int, stop: int) -> Tensor:
        if start == stop:
            return weight.read(0, 0)
        wanted = order[start:stop]
        first = int(wanted.min())
        return weight.read(first, int(wanted.max()) + 1)[wanted - first]

    return replace(weight, read=read)


def checked(name: str, tensor: LazyTensor) -> LazyTensor:
    """Return a float tensor that raises CheckpointError when it reads a non-finite number."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:  # fp8 needs its scales
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, expected floats; use another checkpoint")

    def read(start: int, stop: int) -> Tensor:
        rows = tensor.read(start, stop)
        # A sum needs one pass and no mask, but may overflow although all numbers are finite.
        if not rows.sum(dtype=torch.float32).isfinite() and not rows.float().isfinite().all():
            raise CheckpointError(f"{name} contains non-finite numbers; use another checkpoint")
        return rows

    return replace(tensor, read=read)


def to_huggingface_layout(name: str, tensor: Tensor | LazyTensor, model_config: ModelConfig,
                          vocab_size: int) -> LazyTensor:
    """Return a parameter in Hugging Face's layout, without vocabulary padding."""
    tensor = permuted(name, lazy(tensor), model_config, to_huggingface=True)
    return tensor.first_rows(vocab_size) if name in VOCABULARY else tensor


def to_internal_layout(name: str, tensor: LazyTensor, shape: tuple[int, ...], model_config: ModelConfig,
                       mismatch: str) -> LazyTensor:
    """Invert `to_huggingface_layout`. Raises CheckpointError(mismatch) unless the tensor has this shape."""
    tensor = tensor.padded(shape[0]) if name in VOCABULARY else tensor
    if tensor.shape != shape:
        raise CheckpointError(mismatch.format(tensor.shape, shape))
    return permuted(name, tensor, model_config, to_huggingface=False)


def to_huggingface(state_dict: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig,
                   vocab_size: int) -> dict[str, LazyTensor]:
    """Return parameters under Hugging Face's names. A tied head is left out."""
    tensors, shapes = {}, model_config.parameter_shapes(vocab_size)
    assert state_dict.keys() - shapes.keys() <= {"output.weight"}, "not the parameters of this model"
    for name, shape in shapes.items():
        weight = to_huggingface_layout(name, state_dict[name], model_config, vocab_size)
        assert weight.shape == shape, f"{name} is {weight.shape}, expected {shape}"
        tensors[huggingface_name(name)] = weight
    return tensors


def vocabulary_rows(tensors: Mapping[str, LazyTensor]) -> int:
    """Return the number of ids in a model's embedding."""
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2 or not embedding.rows:
        others = "".join(f", but have {name}" for name in tensors if name.endswith("embed_tokens.weight"))
        raise CheckpointError(f"the weights lack model.embed_tokens.weight{others}; use another checkpoint, "
                              "or rename all tensors as transformers does")
    return embedding.rows


def from_huggingface(tensors: Mapping[str, LazyTensor], model_config: ModelConfig, padded_vocab: int,
                     finite: bool = True) -> dict[str, LazyTensor]:
    """Return a Hugging Face model's tensors under internal names, with zero rows as vocabulary padding.

    If `finite`, reading a NaN or infinity is an error.
    """
    embedding, head = tensors.get("model.embed_tokens.weight"), tensors.get("lm_head.weight")
    if model_config.tie_embeddings:
        if head is not None and (embedding is None or not embedding.equals(head)):
            raise CheckpointError("the weights have a separate lm_head.weight; set tie_word_embeddings to "
                                  "false in config.json")
    elif head is None:
        raise CheckpointError("the weights have no lm_head.weight; if the model was trained without one, set "
                              "tie_word_embeddings to true in config.json")
    shapes = model_config.parameter_shapes(padded_vocab)
    internal_names = {huggingface_name(name): name for name in shapes}
    missing = [name for name in internal_names if name not in tensors]
    unknown = [name for name in tensors if name not in (*internal_names, "lm_head.weight")
               and not name.endswith(".inv_freq")]  # a buffer in old files
    if unknown or missing:
        problem = f"lack {missing[0]}" if missing else f"contain {unknown[0]}, which this model does not have"
        raise CheckpointError(f"the weights {problem} ({len(missing)} missing, {len(unknown)} unknown); they "
                              "are not those that config.json describes: download both again")
    state = {}
    for external, name in internal_names.items():
        tensor = checked(external, tensors[external]) if finite else tensors[external]
        mismatch = f"{external} is {{}}, but config.json and the tokenizer give {{}}; download all again"
        state[name] = to_internal_layout(name, tensor, shapes[name], model_config, mismatch)
    return state


def with_rows(tensors: Mapping[str, LazyTensor], vocab_size: int) -> dict[str, LazyTensor]:
    """Return a model's tensors with rows for `vocab_size` ids: for new ones, the mean of all rows."""
    by_id = {huggingface_name(name) for name in VOCABULARY}
    return {name: tensor.resized(vocab_size) if name in by_id else tensor for name, tensor in tensors.items()}


def save_model_folder(folder: Path, state_dict: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig,
                      tokenizer, max_seq_len: int) -> dict[str, dict[str, Any]]:
    """Write a model folder in Hugging Face's format; return the weight files' fields in a manifest."""
    tensors = to_huggingface(state_dict, model_config, tokenizer.vocab_size)
    files = weight_files(tensors, model_config.head_dim)
    save_settings(folder, files, model_config, tokenizer, max_seq_len)
    return write_files(folder, files)


def weight_files(tensors: Mapping[str, LazyTensor], head_dim: int = 1) -> dict[str, TensorFile]:
    """Return tensors as model.safetensors, or as several files of at most MAX_SHARD_BYTES."""
    shards: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(each.nbytes for each in (*shards[-1].values(), tensor)) > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return {name: TensorFile(shard, {"format": "pt"}, head_dim)
            for name, shard in zip(names if len(shards) > 1 else [WEIGHTS_FILE], shards)}


def save_settings(folder: Path, files: Mapping[str, TensorFile], model_config: ModelConfig, tokenizer,
                  max_seq_len: int) -> None:
    """Write the other files of a model folder: configurations, the tokenizer and an index of the weights."""
    # Not by huggingface_hub, which is optional, and writes a file in one call, without ticks.
    embedding = next(iter(files.values())).tensors["model.embed_tokens.weight"]
    # Keep what the model's own file says, and add the ends of texts and turns.
    named = tokenizer.generation.get("eos_token_id", ())
    ends = [*dict.fromkeys((*named, tokenizer.eos_id, tokenizer.eot_id))]
    ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id, "eos_token_id": ends}
    ids |= {**tokenizer.generation, "eos_token_id": ends}  # in the same order when a run resumes
    eos = ends if {*named} - {tokenizer.eos_id, tokenizer.eot_id} else tokenizer.eos_id
    config = model_json.huggingface_config(model_config, tokenizer.vocab_size, max_seq_len, tokenizer.bos_id,
                                           eos, embedding.dtype)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        key: value for key, value in ids.items() if value not in (None, [])})
    save_index(folder, files, map(huggingface_name, model_config.parameter_shapes(tokenizer.vocab_size)))
    tokenizer.save_huggingface(folder)


def save_index(folder: Path, files: Mapping[str, TensorFile], names: Iterable[str]) -> None:
    """Write the index even of a single file: without it, vLLM also loads the optimizer's file as weights."""
    places = {name: (file_name, tensor.nbytes) for file_name, file in files.items()
              for name, tensor in file.tensors.items()}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(size for _, size in places.values())},
                                     "weight_map": {name: places[name][0] for name in names}})


def load_model_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a model folder under Hugging Face's names; reads safetensors only."""
    tensors = {}
    for file in model_json.weight_files(Path(folder)):
        tensors |= open_tensors(file)
    return tensors
