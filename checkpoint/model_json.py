"""config.json in Hugging Face's format, and models in the hub's local cache. Needs no torch."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from pydantic import ValidationError

from checkpoint.manifest import GONE
from common import files
from common.errors import CheckpointError, unreadable
from common.remote import hub_folder, why_not
from common.section import MAX_NUMBER, Section
from common.text import command
from config import ModelConfig, extension_module

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTERS = "adapter_config.json"  # of PEFT, in a folder with adapters
# The settings of adapters, and their fields in this file.
LORA_FIELDS = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
               "lora_rslora": "use_rslora"}
HUB_FILES = {"allow_patterns": ["*.safetensors", "*.json", "*.jinja", "README.md"],
             "ignore_patterns": ["*/*.safetensors", "*/*.json", "*/*.md"]}
# The families that are read and written, by their model_type and their class in transformers.
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "mistral": "MistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
# Fields of config.json that are read, with transformers' defaults. A family has more, or other defaults.
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS = {"num_key_value_heads": 32, "head_dim": None, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
            "tie_word_embeddings": False, "max_position_embeddings": 32_768, "rope_theta": 10_000.0,
            "original_max_position_embeddings": None, "rope_parameters": None, "rope_scaling": None,
            "vocab_size": None, "sliding_window": 4096}
WINDOWS = {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048, "sliding_window": None},
    "qwen2": WINDOWS, "qwen3": {**WINDOWS, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "smollm3": {**WINDOWS, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0,
                "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4}}
# Fields that must have these values or none, since others change what the model computes.
FIXED = {"hidden_act": "silu", "mlp_bias": False, "is_causal": True, "partial_rotary_factor": 1.0,
         "quantization_config": None, "per_layer_config": None}
FIXED_YARN = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}
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


def huggingface_config(model_config: ModelConfig, vocab_size: int, max_seq_len: int, bos: Optional[int],
                       eos: int | list[int], dtype: Any) -> dict[str, Any]:
    """Return the content of config.json, for transformers 4.57 and 5.

    Version 5 reads `rope_parameters` and `dtype`; version 4 `rope_theta`, `rope_scaling` and `torch_dtype`.
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
                    "layer_types": ["sliding_attention" if slides else "full_attention"
                                    for slides, _ in c.layer_kinds]}
    if c.model_type == "smollm3":
        windows |= {"no_rope_layers": [int(rotates) for _, rotates in c.layer_kinds],
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
    top = ("rope_theta", LENGTH["rope_original_max_len"], "partial_rotary_factor")
    places = {"": {name: config.get(name) for name in top}}
    for name in ("rope_parameters", "rope_scaling"):
        place = {} if config.get(name) is None else config[name]
        if not isinstance(place, Mapping):
            raise CheckpointError(f"config.json gives {name}={place!r:.40}, expected an object; download it "
                                  "again")
        places[f"{name}."] = {"rope_type": place.get("type"), **place, "type": None}
    given = {name: {key: value for key, value in place.items() if value is not None}
             for name, place in places.items()}
    rope = {"rope_theta": defaults_of(config)["rope_theta"], "rope_type": "default", **given[""],
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


def defaults_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return DEFAULTS | FAMILY_DEFAULTS.get(str(config.get("model_type")), {})


def context_length(config: Mapping[str, Any]) -> int:
    default = defaults_of(config)["max_position_embeddings"]
    return count_in(config, "max_position_embeddings") or default


def context_of(folder: Path, config: ModelConfig) -> int:
    """Return how many tokens the model in a folder reads with the RoPE scaling of these settings."""
    content = read_model_json(folder / "config.json")
    before = model_settings_from_huggingface(content)["rope_scaling_factor"] or 1
    return int(context_length(content) * (config.rope_scaling_factor or 1) / before)


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
        every = count_in(config, "no_rope_layer_interval")
        listed = config["no_rope_layers"] is not None
        settings["no_rope_every"] = every_nth("no_rope_layers", 0, 1) if listed else every
    window = count_in(config, "sliding_window")
    if kind == "mistral":
        settings["sliding_window"] = window
    elif kind != "llama" and window and config.get("use_sliding_window"):
        full = config["max_window_layers"]
        if config["layer_types"] is None and kind != "smollm3" and type(full) is int:
            config = {**config, "layer_types": [
                "full_attention" if layer < full else "sliding_attention" for layer in range(layers)]}
        every = every_nth("layer_types", "sliding_attention", "full_attention")
        settings |= {"sliding_window": window, "sliding_every": every} if every else {}
    return settings


def fixed_fields(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of this family that must have one value, or none."""
    fixed = FIXED | (FIXED_YARN if rope["rope_type"] == "yarn" else {})
    if kind not in ("qwen2", "mistral"):  # which do not read it
        fixed["attention_bias"] = False
    return fixed | ({"pretraining_tp": 1, "sliding_window": None} if kind == "llama" else {})


def model_settings_from_huggingface(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that a config.json gives."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json describes a {kind!r} model; the supported types are "
                              f"{', '.join(FAMILIES)}")
    rope = rope_parameters_of(config)
    scaling = SCALING_FIELDS.get(rope["rope_type"], {})
    if rope["rope_type"] == "yarn":  # with transformers' defaults
        rope = {"beta_slow": 1.0, "beta_fast": 32.0, LENGTH["rope_original_max_len"]: context_length(config),
                **rope}
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing := missing + [f"{key} for RoPE" for key in scaling.values() if key not in rope]:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}; download it again")
    config = {**defaults_of(config), **config}
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    settings = {name: config[field] for name, field in CONFIG_FIELDS.items()}
    settings |= {"model_type": kind, "rope_theta": rope["rope_theta"], "rope_scaling_factor": None,
                 "head_width": count_in(config, "head_dim")}
    if scaling:
        settings |= {name: rope[field] for name, field in scaling.items()}
        settings["rope_scaling_type"] = rope["rope_type"]
    fields = {**CONFIG_FIELDS, **scaling, "rope_theta": "rope_theta"}
    model = checked_settings(settings, "config.json", fields)
    for field in ("vocab_size", "max_position_embeddings"):
        count_in(config, field)

    if settings["head_width"] == model.dim // model.n_heads:  # the default
        settings["head_width"] = None
    settings |= layer_settings(config, kind, model.n_layers)

    # Check features that our model does not vary.
    given = {**rope, **config}
    unlike = [f"{key}={given[key]!r}" for key, value in fixed_fields(kind, rope).items()
              if given.get(key) not in (value, None)]
    unlike += [f"{key}={value!r:.40} for RoPE" for key, value in rope.items() if isinstance(value, Mapping)]
    if "sliding_every" not in settings and config.get("layer_types") not in (
            None, ["full_attention"] * model.n_layers):
        unlike.append(f"layer_types={config['layer_types']!r:.80} without use_sliding_window")
    if rope["rope_type"] not in ("default", *SCALING_FIELDS):
        unlike.append(f"rope_type={rope['rope_type']!r}")
    if model.n_heads % model.n_kv_heads or model.head_dim % 2 or (
            not model.head_width and model.dim % model.n_heads):
        unlike.append(f"{model.n_heads} heads and {model.n_kv_heads} key/value heads at width {model.dim}")
    if unlike:
        raise CheckpointError(f"config.json has {', '.join(unlike)}, which is not supported; use another "
                              "model")
    return settings


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


def read_model_config(folder: Path) -> ModelConfig:
    """Return the settings of the model in a folder."""
    content = read_model_json(folder / "config.json")
    try:
        return ModelConfig(**model_settings_from_huggingface(content))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def other_format(folder: Path) -> str:
    """Return the end of a message: what a folder of another tool contains, and what to do."""
    other_trainers = extension_module("other_trainers")
    return other_trainers.advice_on_folder(folder) if other_trainers else "; name another folder"


def refuse_adapters(folder: Path, remedy: str = "merge them first") -> None:
    if os.path.exists(folder / ADAPTERS):
        raise CheckpointError(f"{folder} contains adapters, not a full model; {remedy}: "
                              f"{command('scripts/merge_lora.py', Path(folder))} --output FOLDER")


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model folder, which are safetensors."""
    if os.path.exists(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} {GONE}")
    if not os.path.exists(index := folder / INDEX_FILE):
        refuse_adapters(folder)
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}{other_format(folder)}")
    weight_map = read_model_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} does not map tensors to files; download it again")
    for name in weight_map.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} points outside its folder: {name!r}; download it again")
    return [folder / name for name in sorted({*weight_map.values()})]
