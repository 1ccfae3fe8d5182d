"""The model that a run starts from: the settings that come with it, and those that contradict it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.model_json import (
    context_length,
    model_settings_from_huggingface,
    read_model_config,
    read_model_json,
    refuse_adapters,
)
from common.errors import CheckpointError, SettingsError
from config import FEED_FORWARD, MODEL_SETTINGS, SCALING_SETTINGS, Config, ModelConfig, extension_module
from plan.resume_rules import MODEL_SHAPE, SETTING_OF, assignments
from plan.starts import ADAPTERS, Start

# The settings of adapters, which come with them, and their fields in PEFT's adapter_config.json.
ADAPTER_FIELDS = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
                  "lora_rslora": "use_rslora"}


class ModelOfStart(NamedTuple):
    """What a start model decides."""

    start: Start  # with the number of layers to which the model is cut, if it is
    settings: dict[str, Any]  # values for settings that nobody set
    notes: list[str]


def model_of_start(start: Start, config: Config, sources: Mapping[str, str], explicit: Iterable[str]
                   ) -> ModelOfStart:
    """Return the settings that the weights of a start bring. A continued run has them in its record."""
    if start.kind != "from" or start.folder is None:
        return ModelOfStart(start, {}, [])
    if not config.lora_enabled:
        refuse_adapters(Path(start.folder), "train them with LORA_ENABLED=true, or merge them first")
    folder = Path(start.base or start.folder)
    model = read_model_config(folder)
    values, notes = model.model_dump(include={*MODEL_SETTINGS}), []
    if start.has_adapters:
        content = read_model_json(Path(start.folder) / ADAPTERS)
        values |= {name: content[key] for name, key in ADAPTER_FIELDS.items() if content.get(key) is not None}
        if isinstance(layers := content.get("target_modules"), list):
            values["lora_target_modules"] = Config(lora_target_modules=",".join(layers)).lora_target_modules
    if not {*FEED_FORWARD}.isdisjoint(sources):  # the width may be set in another way
        values = {name: value for name, value in values.items() if name not in FEED_FORWARD}
    asks_to_cut = "n_layers" in explicit or "n_layers" in sources and config.training_stage == "pretrain"
    if asks_to_cut and config.n_layers < model.n_layers and config.lora_enabled:
        raise SettingsError(f"N_LAYERS={config.n_layers} cuts the {model.n_layers} layers of {folder}, but "
                            "other programs would open adapters with the whole model; remove N_LAYERS, or "
                            "set LORA_ENABLED=false")
    if asks_to_cut and config.n_layers < model.n_layers:
        start = start._replace(layers=config.n_layers)
        notes.append(f"N_LAYERS={config.n_layers} keeps the first {config.n_layers} of the {model.n_layers} "
                     f"layers of {folder}, with its embedding, norm and head")
    values = {name: value for name, value in values.items() if name not in sources}
    adopted = {name.upper(): value for name, value in values.items() if value != getattr(config, name)}
    if adopted:
        notes.insert(0, f"model settings from {folder}: {assignments(adopted).removeprefix('set ')}")
    return ModelOfStart(start, values, notes)


def check_model(start: Start, config: Config, sources: Mapping[str, str] = {}) -> list[str]:
    """Compare the settings, which come from `sources`, with the model of a start; return warnings."""
    folder = Path(start.base or start.folder)
    saved = read_model_config(folder)
    if start.layers:
        saved = saved.model_copy(update={"n_layers": start.layers})

    def compare(names: Iterable[str]) -> tuple[dict[str, Any], str]:
        """Return the saved values of settings that differ, and a description."""
        saved_values, differences = {}, []
        for name in names:
            there, here = getattr(saved, name.lower()), getattr(config, name.lower())
            if there == here or name == "HEAD_WIDTH" and saved.head_dim == config.head_dim:
                continue
            causes = FEED_FORWARD if name == "HIDDEN_DIM" else (name.lower(),)
            cause = next((cause for cause in causes if cause in sources), "")
            by = f" by {cause.upper()}" * (cause not in ("", SETTING_OF.get(name, name).lower()))
            where = f"{by} ({sources[cause]})" if cause else ""
            saved_values[name] = there
            differences.append(f"{SETTING_OF.get(name, name)} is {there} there and {here} here{where}")
        return saved_values, "; ".join(differences)

    saved_values, description = compare(MODEL_SHAPE)
    if saved_values:
        fewer = saved_values.keys() == {"N_LAYERS"} and config.n_layers < saved.n_layers
        cut = f", or use its first layers alone with the flag --n-layers {config.n_layers}" if fewer else ""
        raise CheckpointError(f"{folder} contains a different model: {description}. To start from it, remove "
                              f"these settings, or {assignments(saved_values)}{cut}")
    # Different values may be intended, for example to learn longer contexts.
    names = ["NORM_EPS", "ROPE_THETA", "NO_ROPE_EVERY", "SLIDING_WINDOW", "SLIDING_EVERY"]
    names += map(str.upper, SCALING_SETTINGS if saved.rope_scaling_factor else SCALING_SETTINGS[:1])
    saved_values, description = compare(names)
    other_trainers = extension_module("other_trainers")
    warnings = other_trainers.unused_fields(folder) if other_trainers else []
    if saved_values:
        warnings.append(f"the model in {folder} was trained with other settings: {description}")
    if (context := context_of(folder, config)) < config.max_seq_len:
        warnings.append(f"MAX_SEQ_LEN={config.max_seq_len} is longer than the {context:,} positions of the "
                        f"model in {folder} (max_position_embeddings): it has not learned those beyond. "
                        "Lower MAX_SEQ_LEN, or set ROPE_SCALING_FACTOR or a larger ROPE_THETA")
    return warnings


def context_of(folder: Path, config: ModelConfig) -> int:
    """Return how many tokens the model in a folder reads with the RoPE scaling of these settings."""
    content = read_model_json(folder / "config.json")
    before = model_settings_from_huggingface(content)["rope_scaling_factor"] or 1
    return int(context_length(content) * (config.rope_scaling_factor or 1) / before)
