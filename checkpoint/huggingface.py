"""Weights and configurations in the formats of Hugging Face and Meta, and models in the hub's local cache.

Paddock uses Meta's parameter names. Hugging Face has other names, rotates the two halves of a head instead of
neighbouring pairs (so the rows of wq and wk are permuted), and stores no vocabulary padding.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from pydantic import ValidationError
from torch import Tensor

from checkpoint.manifest import GONE
from checkpoint.tensors import LazyTensor, TensorFile, lazy, open_tensors, write_files
from common import files
from common.errors import CheckpointError, unreadable
from common.remote import hub_folder, why_not
from common.section import MAX_NUMBER, Section
from config import LINEAR_LAYERS, SCALING_SETTINGS, ModelConfig, extension_module

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_FILES = {"allow_patterns": ["*.safetensors", "*.json", "*.jinja", "README.md"],
             "ignore_patterns": ["*/*.safetensors", "*/*.json", "*/*.md"]}
MAX_SHARD_BYTES = 5_000_000_000  # as in transformers
DEFAULT_CONTEXT = 2048  # as in transformers, if config.json has no length
VOCABULARY = ("tok_embeddings.weight", "output.weight")  # one row per token id
# Ascending ids of trained rows of "tok_embeddings" and "output"; if tied, the first means both.
TokenIds = Mapping[str, Sequence[int]]

# The families that are read and written, by their model_type and their class in transformers.
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "mistral": "MistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
# Internal and Hugging Face names of parameters, whose shapes are in `ModelConfig.block_shapes`.
HUGGINGFACE_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", **LINEAR_LAYERS,
    "attention.bq": "self_attn.q_proj.bias", "attention.bk": "self_attn.k_proj.bias",
    "attention.bv": "self_attn.v_proj.bias", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ROTATED = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")  # rows are permuted within each head
# Settings, and the corresponding fields of config.json and of its rope_parameters.
CONFIG_FIELDS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
                 "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size",
                 "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
                 "tie_embeddings": "tie_word_embeddings"}
LENGTH = {"rope_original_max_len": "original_max_position_embeddings"}
SCALING_FIELDS = {  # by ROPE_SCALING_TYPE
    "llama3": {"rope_scaling_factor": "factor", "rope_low_freq_factor": "low_freq_factor",
               "rope_high_freq_factor": "high_freq_factor", **LENGTH},
    "linear": {"rope_scaling_factor": "factor"},
    "yarn": {"rope_scaling_factor": "factor", "rope_low_freq_factor": "beta_slow",
             "rope_high_freq_factor": "beta_fast", **LENGTH}}

# ------------------------------------------------------------------------------- names and layouts


def huggingface_name(name: str) -> str:
    """Return Hugging Face's name of a parameter."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{HUGGINGFACE_NAMES[stem]}.weight"
    _, layer, module = stem.split(".", 2)
    external = HUGGINGFACE_NAMES[module]
    return f"model.layers.{layer}.{external}{'' if external.endswith('.bias') else '.weight'}"


def parameter_shapes(model_config: ModelConfig, vocab_rows: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter, in the model's order."""
    matrix, block = (vocab_rows, model_config.dim), model_config.block_shapes
    shapes = {"tok_embeddings.weight": matrix}
    for layer in range(model_config.n_layers):
        shapes |= {f"layers.{layer}.{module}.weight": shape for module, shape in block.items()}
    shapes["norm.weight"] = (model_config.dim,)
    return shapes if model_config.tie_embeddings else shapes | {"output.weight": matrix}


def check_parameters(parameters: Mapping[str, Sequence[int]], model_config: ModelConfig,
                     vocab_rows: int) -> None:
    """Raise CheckpointError unless checkpoints and adapters can store parameters of these shapes."""
    stored = {name: shape for name, shape in parameter_shapes(model_config, vocab_rows).items()
              if re.sub(r"layers\.\d+\.|\.weight$", "", name) in HUGGINGFACE_NAMES}
    shapes = {name: tuple(shape) for name, shape in parameters.items()}
    if names := [name for name in (*shapes, *stored) if shapes.get(name) != stored.get(name)]:
        raise CheckpointError(
            f"checkpoints cannot store this model ({len(names)} such parameters): {names[0]} is "
            f"{shapes.get(names[0], 'missing')} in model.py and {stored.get(names[0], 'missing')} in the "
            "tables; add it to block_shapes in config.py, and its name to HUGGINGFACE_NAMES in "
            "checkpoint/huggingface.py, or to LINEAR_LAYERS in config.py if it is a linear layer")
    written = huggingface_config(model_config, vocab_rows, 1, None, 0, torch.float32)
    try:
        read = describing(ModelConfig(**model_settings_from_huggingface(written)))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoints cannot describe this model: {error}") from error
    for name, value in describing(model_config).items():
        if (there := read.get(name)) != value:
            raise CheckpointError(
                f"checkpoints cannot describe this model: config.json gives {name}={there!s:.200} instead "
                f"of {value!s:.200}; add it to huggingface_config and model_settings_from_huggingface")


def describing(c: ModelConfig) -> dict[str, Any]:
    """Return the settings that decide what a model computes, in a normal form, and the shapes of a block."""
    layers, scaling = range(c.n_layers), {"rope_scaling_type", *SCALING_FIELDS[c.rope_scaling_type]}
    varying = {"head_width", *SCALING_SETTINGS}
    varying -= scaling if c.rope_scaling_factor else {"rope_scaling_factor"}
    fixed = [name for name, field in ModelConfig.model_fields.items()
             if field.json_schema_extra["on_resume"] == "fixed" and name not in varying]
    return {name.upper(): getattr(c, name) for name in fixed} | c.block_shapes | {
        "HEAD_WIDTH": c.head_dim, "FFN_DIM": c.hidden_dim, "SLIDING_EVERY": None,
        "SLIDING_WINDOW": [c.sliding_window if c.slides(layer) else None for layer in layers],
        "NO_ROPE_EVERY": [c.rotates(layer) for layer in layers]}


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
    tensors, shapes = {}, parameter_shapes(model_config, vocab_size)
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
        raise CheckpointError("the weights lack model.embed_tokens.weight; use another checkpoint")
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
    shapes = parameter_shapes(model_config, padded_vocab)
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
    """Return a Hugging Face model's tensors with `vocab_size` ids in the embedding and in a separate head.

    New ids get the mean of all rows.
    """
    by_id = {huggingface_name(name) for name in VOCABULARY}
    return {name: tensor.resized(vocab_size) if name in by_id else tensor for name, tensor in tensors.items()}


def weights_sha256(tensors: Mapping[str, LazyTensor]) -> str:
    """Return a hash of weights under Hugging Face's names, independent of their division into files.

    It ignores a stored copy of a tied head, and buffers in old files.
    """
    digest, embedding = hashlib.sha256(), tensors.get("model.embed_tokens.weight")
    for name, tensor in sorted(tensors.items()):
        is_tied_head = name == "lm_head.weight" and embedding is not None and tensor.equals(embedding)
        if is_tied_head or name.endswith(".inv_freq"):
            continue
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        for span in tensor.spans():
            digest.update(tensor.read(*span).flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- config.json


def huggingface_config(model_config: ModelConfig, vocab_size: int, max_seq_len: int, bos: Optional[int],
                       eos: int | list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json, for transformers 4.57 and 5.

    Version 5 reads `rope_parameters` and `dtype`, version 4 reads `rope_theta`, `rope_scaling` and
    `torch_dtype`; each ignores the other's.
    """
    c = model_config
    scaling = None
    if c.rope_scaling_factor is not None:
        fields = SCALING_FIELDS[c.rope_scaling_type]
        scaling = {"rope_type": c.rope_scaling_type, **{fields[name]: getattr(c, name) for name in fields}}
        # The length that the scaling was made for, even if this run has shorter rows.
        if c.rope_scaling_type != "linear":
            max_seq_len = max(max_seq_len, int(c.rope_original_max_len * c.rope_scaling_factor))
    windows = {"sliding_window": c.sliding_window}
    if c.model_type in ("qwen2", "qwen3", "smollm3"):
        windows |= {"use_sliding_window": c.sliding_window is not None,
                    "max_window_layers": c.n_layers if c.sliding_window is None else 0,
                    "layer_types": ["sliding_attention" if c.slides(layer) else "full_attention"
                                    for layer in range(c.n_layers)]}
    if c.model_type == "smollm3":
        windows |= {"no_rope_layers": [int(c.rotates(layer)) for layer in range(c.n_layers)],
                    "no_rope_layer_interval": c.no_rope_every or c.n_layers + 1, "pad_token_id": None}
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[c.model_type]], "model_type": c.model_type, "vocab_size": vocab_size,
        "hidden_size": c.dim, "intermediate_size": c.hidden_dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "hidden_act": "silu", "attention_bias": c.model_type == "qwen2", "attention_dropout": 0.0,
        "mlp_bias": False, "rms_norm_eps": c.norm_eps, "initializer_range": c.init_std,
        "tie_word_embeddings": c.tie_embeddings, "max_position_embeddings": max_seq_len,
        "rope_theta": c.rope_theta, "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope_theta, **(scaling or {"rope_type": "default"})},
        "bos_token_id": bos, "eos_token_id": eos, "use_cache": True, "dtype": dtype_name,
        "torch_dtype": dtype_name, **({} if c.model_type == "llama" else windows),
    }


def checked_settings(settings: Mapping[str, Any], file_name: str, fields: Mapping[str, str] = {},
                     section: type[Section] = ModelConfig) -> Any:
    """Return settings from a file as a section; `fields` are their names in the file."""
    try:
        return section.model_validate(settings, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        raise CheckpointError(
            f"{file_name} gives {fields.get(name, name.upper())}={fault['input']!r:.40}: "
            f"{fault['msg'][0].lower() + fault['msg'][1:]}; correct it, or download it again") from error


def rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters in a config.json, as transformers 5 reads them.

    Version 4 reads the top level and `rope_scaling`; in version 5 `rope_scaling` replaces `rope_parameters`.
    """
    places = {"": {"rope_theta": config.get("rope_theta")}}
    for name in ("rope_parameters", "rope_scaling"):
        place = {} if config.get(name) is None else config[name]
        if not isinstance(place, Mapping):
            raise CheckpointError(f"config.json gives {name}={place!r:.40}, expected an object; download it "
                                  "again")
        places[f"{name}."] = {"rope_type": place.get("type"), **place, "type": None}
    given = {name: {key: value for key, value in place.items() if value is not None}
             for name, place in places.items()}
    theta = 2_000_000.0 if config.get("model_type") == "smollm3" else 10_000.0
    rope = {"rope_theta": theta, "rope_type": "default", **given[""],
            **(given["rope_scaling."] or given["rope_parameters."])}
    for name, place in given.items():
        for key, value in place.items():
            if rope.get(key) not in (value,):  # NaN is rejected later
                raise CheckpointError(f"config.json contradicts itself: {name}{key} is {value!r:.40}, and "
                                      f"{rope.get(key)!r:.40} elsewhere; keep the value that the model was "
                                      "trained with")
    return rope


def count_in(config: Mapping[str, Any], field: str) -> Optional[int]:
    """Return a positive integer field of a config.json; None if it is missing."""
    count = config.get(field)
    if count is not None and (type(count) is not int or not 0 < count <= MAX_NUMBER):
        raise CheckpointError(f"config.json gives {field}={count!r:.40}, expected a whole number above 0; "
                              "correct it, or download it again")
    return count


def context_length(config: Mapping[str, Any]) -> int:
    return count_in(config, "max_position_embeddings") or DEFAULT_CONTEXT


def layer_settings(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, Optional[int]]:
    """Return the settings of sliding windows, and of layers without a rotary embedding."""
    def every_nth(field: str, value: Any, other: Any) -> Optional[int]:
        listed = config.get(field)
        n = listed.index(value) + 1 if isinstance(listed, list) and value in listed else layers + 1
        if listed != [other if (layer + 1) % n else value for layer in range(layers)]:
            raise CheckpointError(f"config.json gives {field}={listed!r:.80}, which is not supported: only "
                                  f"every n-th layer can be {value!r}; use another model")
        return n if n <= layers else None

    settings: dict[str, Optional[int]] = {}
    if kind == "smollm3":
        every = count_in({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
        listed = config.get("no_rope_layers") is not None
        settings["no_rope_every"] = every_nth("no_rope_layers", 0, 1) if listed else every
    window = count_in({"sliding_window": 4096, **config}, "sliding_window")
    if kind == "mistral":
        settings["sliding_window"] = window
    elif kind != "llama" and window and config.get("use_sliding_window"):
        every = every_nth("layer_types", "sliding_attention", "full_attention")
        settings |= {"sliding_window": window, "sliding_every": every} if every else {}
    return settings


def model_settings_from_huggingface(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that a config.json gives."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json describes a {kind!r} model; the supported types are "
                              f"{', '.join(FAMILIES)}")
    missing = [key for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
               if config.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}; download it again")
    rope = rope_parameters_of(config)
    given = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": kind == "smollm3",
             **config}
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = config["num_attention_heads"]
    settings = {name: given[field] for name, field in CONFIG_FIELDS.items()}
    settings |= {"model_type": kind, "rope_theta": rope["rope_theta"], "rope_scaling_factor": None,
                 "head_width": count_in({"head_dim": 128 if kind == "qwen3" else None, **config}, "head_dim")}
    scaling = SCALING_FIELDS.get(rope["rope_type"], {})
    if rope["rope_type"] == "yarn":  # with transformers' defaults
        rope = {"beta_slow": 1.0, "beta_fast": 32.0, LENGTH["rope_original_max_len"]: context_length(config),
                **rope}
    if scaling:
        settings |= {name: rope.get(field, "missing") for name, field in scaling.items()}
        settings["rope_scaling_type"] = rope["rope_type"]
    fields = {**CONFIG_FIELDS, **scaling, "rope_theta": "rope_theta"}
    model = checked_settings(settings, "config.json", fields)
    for field in ("vocab_size", "max_position_embeddings"):
        count_in(config, field)

    if settings["head_width"] == model.dim // model.n_heads:  # the default
        settings["head_width"] = None
    settings |= layer_settings(config, kind, model.n_layers)

    # Check features that our model does not vary.
    fixed = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None,
             "partial_rotary_factor": 1.0}
    if rope["rope_type"] == "yarn":
        fixed |= {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}
    config = {**rope, **config}
    if kind not in ("qwen2", "mistral"):  # which do not read it
        fixed["attention_bias"] = False
    if kind == "llama":
        fixed |= {"pretraining_tp": 1, "sliding_window": None}
    unlike = [f"{key}={config[key]!r}" for key, value in fixed.items()
              if config.get(key) not in (value, None)]
    if rope["rope_type"] not in ("default", *SCALING_FIELDS):
        unlike.append(f"rope_type={rope['rope_type']!r}")
    if model.n_heads % model.n_kv_heads or model.head_dim % 2 or (
            not model.head_width and model.dim % model.n_heads):
        unlike.append(f"{model.n_heads} heads and {model.n_kv_heads} key/value heads at width {model.dim}")
    if unlike:
        raise CheckpointError(f"config.json has {', '.join(unlike)}, which is not supported; use another "
                              "model")
    return settings


# ----------------------------------------------------------------------------------------- folders


def save_model_folder(folder: Path, state_dict: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig,
                      tokenizer, max_seq_len: int) -> dict[str, dict[str, Any]]:
    """Write a model folder in Hugging Face's format; return the weight files' fields in a manifest."""
    files = model_files(state_dict, model_config, tokenizer.vocab_size)
    save_settings(folder, files, model_config, tokenizer, max_seq_len)
    return write_files(folder, files)


def model_files(state_dict: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig,
                vocab_size: int) -> dict[str, TensorFile]:
    """Return the files of a model's weights. Blocks of rows that are hashed contain whole heads."""
    return weight_files(to_huggingface(state_dict, model_config, vocab_size), model_config.head_dim)


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
    tensors = {name: tensor for file in files.values() for name, tensor in file.tensors.items()}
    # Keep what the model's own file says, and add the ends of texts and turns.
    named = tokenizer.generation.get("eos_token_id", ())
    ends = [*dict.fromkeys((*named, tokenizer.eos_id, tokenizer.eot_id))]
    ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id, "eos_token_id": ends}
    ids |= {**tokenizer.generation, "eos_token_id": ends}  # in the same order when a run resumes
    config = huggingface_config(model_config, tokenizer.vocab_size, max_seq_len, tokenizer.bos_id,
                                ends if {*named} - {tokenizer.eos_id, tokenizer.eot_id} else tokenizer.eos_id,
                                tensors["model.embed_tokens.weight"].dtype)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        key: value for key, value in ids.items() if value not in (None, [])})
    # Even for a single file: without an index, vLLM also loads the optimizer's file as weights.
    shapes = parameter_shapes(model_config, tokenizer.vocab_size)
    weight_map = {name: file_name for file_name, file in files.items() for name in file.tensors}
    write_json(folder / INDEX_FILE, {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: weight_map[name] for name in map(huggingface_name, shapes)}})
    tokenizer.save_huggingface(folder)


def other_format(folder: Path) -> str:
    """Return the end of a message: what a folder of another tool contains, and what to do."""
    other_trainers = extension_module("other_trainers")
    return other_trainers.advice_on_folder(folder) if other_trainers else "; name another folder"


def load_model_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a model folder under Hugging Face's names; reads safetensors only."""
    folder, index = Path(folder), Path(folder) / INDEX_FILE
    if os.path.exists(folder / WEIGHTS_FILE):
        return open_tensors(folder / WEIGHTS_FILE)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} {GONE}")
    if not os.path.exists(index):
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}{other_format(folder)}")
    weight_map = read_model_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} does not map tensors to files; download it again")
    tensors = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} points outside its folder: {name!r}; download it again")
        tensors |= open_tensors(folder / name)
    return tensors


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder; a fault is a CheckpointError."""
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} {unreadable(error, 'copy or download it again')}") from error


def hub_model(name: str, only_config: bool = False) -> Path:
    """Return the local folder of a hub model, or of its config.json, downloading it unless it is cached."""
    repository, _, revision = name.partition("@")
    try:
        if only_config:
            return hub_folder(repository, "config.json", lambda folder: (folder / "config.json").exists(),
                              revision or None, allow_patterns=["config.json"])
        return hub_folder(repository, "config.json", is_complete, revision or None, **HUB_FILES)
    except Exception as error:  # its class depends on the version of the hub's HTTP library
        raise CheckpointError(f"{name} is not a local folder, and the request to the hub failed: "
                              f"{why_not(error)} a path") from error


def is_complete(folder: Path) -> bool:
    index = folder / INDEX_FILE
    files = set(read_model_json(index).get("weight_map", {}).values()) if index.exists() else {WEIGHTS_FILE}
    return all((folder / file).exists() for file in ("config.json", *files))


def name_of_download(folder: Path) -> Optional[str]:
    """Return `owner/name@commit` of a folder in the hub's cache; None for any other folder."""
    parts = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", str(folder))
    return f"{parts[1].replace('--', '/')}@{parts[2]}" if parts else None
