"""LoRA adapters in PEFT's format, with the hash of their base in a separate file."""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional

from torch import Tensor

from checkpoint import huggingface, model_json
from checkpoint.huggingface import TokenIds, checked
from checkpoint.model_json import ADAPTERS as CONFIG_FILE
from checkpoint.model_json import LORA_FIELDS, other_format, read_model_json, write_json
from checkpoint.tensors import LazyTensor, open_tensors
from common.errors import CheckpointError
from config import LINEAR_LAYERS, LORA_LAYERS, LoraConfig, ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "paddock_adapter.json"
PEFT_LAYERS = {name: huggingface.HUGGINGFACE_NAMES[name].rpartition(".")[2]
               for name in ("tok_embeddings", "output")}
# Fields of adapter_config.json that are read, or do not affect the computation.
READ_FIELDS = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "trainable_token_indices", "base_model_name_or_path", "revision", "task_type",
    "auto_mapping", "peft_version", "inference_mode", "ensure_weight_tying", "fan_in_fan_out",
    "megatron_core", "qalora_group_size", "runtime_config"}
# Required values of the other fields. Other values of init_lora_weights change the base's weights.
PLAIN_VALUES = {"peft_type": ("LORA",), "bias": ("none", None),
                "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
                "layers_pattern": (None, "", [], "layers", ["layers"])}
NOTHING = (None, False, {}, [], "")
MERGE = "merge the adapters into their base with PEFT (merge_and_unload), and use the merged model"
NOT_MERGED = re.compile("PROMPT|PREFIX|P_TUNING|CPT|CARTRIDGE|POLY|XLORA")  # more than another base's weights


class Adapter(NamedTuple):
    """The content of an adapter folder."""

    state: dict[str, Tensor]  # trained parameters under internal names
    config: LoraConfig
    base_path: Optional[str]  # a folder or hub name
    base_sha256: Optional[str]  # `weights_sha256` of the base; None if PEFT wrote the folder
    token_ids: TokenIds  # ids of trained rows

    def check_base(self, base_sha256: str, base: str | Path) -> None:
        """Raise CheckpointError unless the adapters were trained on these weights."""
        if self.base_sha256 not in (None, base_sha256):
            raise CheckpointError(f"the adapters belong to another base: the weights in {base} have SHA-256 "
                                  f"{base_sha256}, but the adapters were trained on {self.base_sha256} "
                                  f"(then in {self.base_path}); set that base")


def peft_name(name: str) -> str:
    """Return PEFT's name of a LoRA factor, trained token rows, or a fully trained parameter."""
    stem, _, last = name.rpartition(".")
    suffix = {"weight": "weight", "rows": "token_adapter.trainable_tokens_delta"}.get(last, f"{last}.weight")
    return f"base_model.model.{huggingface.huggingface_name(f'{stem}.weight').removesuffix('weight')}{suffix}"


def to_peft(state_dict: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig, vocab_rows: int
            ) -> dict[str, LazyTensor]:
    """Return trained parameters under PEFT's names; a tied matrix appears as embedding and as head."""
    tensors = {peft_name(name): huggingface.to_huggingface_layout(name, tensor, model_config, vocab_rows)
               for name, tensor in state_dict.items()}
    if model_config.tie_embeddings and (tied := tensors.get(peft_name("tok_embeddings.weight"))) is not None:
        tensors[peft_name("output.weight")] = tied
    return tensors


def from_peft(tensors: Mapping[str, LazyTensor], model_config: ModelConfig, padded_vocab: int, rank: int,
              token_ids: TokenIds, vocab_size: Optional[int] = None) -> dict[str, Tensor]:
    """Return PEFT's tensors under internal names, inverting `to_peft`, and only `vocab_size` rows of them."""
    remaining, state, shapes = dict(tensors), {}, {}
    for name, shape in model_config.parameter_shapes(padded_vocab).items():
        stem = name.removesuffix(".weight")
        if name in huggingface.VOCABULARY:
            shapes |= {name: shape, f"{stem}.rows": (len(token_ids.get(stem, ())), shape[1])}
        elif len(shape) == 2:
            shapes |= {f"{stem}.lora_A": (rank, shape[1]), f"{stem}.lora_B": (shape[0], rank)}
    if model_config.tie_embeddings:
        embedding = tensors.get(peft_name("tok_embeddings.weight"))
        head = remaining.pop(peft_name("output.weight"), None)
        if (embedding is None) != (head is None) or (head is not None and not embedding.equals(head)):
            raise CheckpointError("the adapters untie head and embeddings, which the base ties; use others")
    for name, shape in shapes.items():
        if (tensor := remaining.pop(peft_name(name), None)) is not None:
            mismatch = f"{peft_name(name)} is {{}}, but rank and base give {{}}; use the base of the adapters"
            tensor = checked(peft_name(name), tensor)
            if name in huggingface.VOCABULARY and vocab_size is not None:
                tensor = tensor.first_rows(vocab_size)
            state[name] = huggingface.to_internal_layout(name, tensor, shape, model_config, mismatch).full()
    if remaining:
        raise CheckpointError(f"the adapters contain {min(remaining)}, which this model does not have "
                              f"({len(remaining)} such tensors); use their own base, or {MERGE}")
    return state


def peft_config(config: LoraConfig, tied: bool, base_path: str, token_ids: TokenIds) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    modules = [LORA_LAYERS[name] for name in config.lora_target_modules.split(",")]  # in the model's order
    trained = (config.lora_train_embeddings, config.lora_train_head)
    both = tied and any(trained)
    full = [module for module, is_trained in zip(PEFT_LAYERS.values(), trained) if is_trained or both]
    rows: Any = {PEFT_LAYERS[name]: list(ids) for name, ids in token_ids.items()}
    if tied and rows:  # a list means the embedding, which is also the head
        rows = rows["embed_tokens"]
    base = {"base_model_name_or_path": base_path}
    if name := model_json.name_of_download(base_path):  # PEFT downloads it if missing
        base = dict(zip(("base_model_name_or_path", "revision"), name.split("@")))
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", **base,
            **{field: getattr(config, name) for name, field in LORA_FIELDS.items()},
            "target_modules": modules, "modules_to_save": full or None,
            "trainable_token_indices": rows or None, "ensure_weight_tying": both, "bias": "none",
            "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}


def check_targets(content: Mapping[str, Any], names: Collection[str], model_config: ModelConfig,
                  token_ids: TokenIds) -> None:
    """Raise CheckpointError unless tensors with these names are adapters that this model supports.

    Adapters must be on the same linear layers in every block, besides the matrices and rows listed in
    adapter_config.json. The tensors' names decide which layers have adapters.
    """
    def refuse(field: str, problem: str, advice: str = MERGE) -> NoReturn:
        raise CheckpointError(f"{CONFIG_FILE} has {field}={content.get(field)!r:.80}, {problem}; {advice}")

    full = content.get("modules_to_save") or []
    full = [str(name).rpartition(".")[2] for name in full] if isinstance(full, list) else [str(full)]
    if unknown := {*full} - {*PEFT_LAYERS.values()}:
        refuse("modules_to_save", "but only embed_tokens and lm_head can be fully trained, not "
               f"{min(unknown)}")
    needed = {f"{layer}.weight": "modules_to_save" for layer, name in PEFT_LAYERS.items() if name in full}
    needed |= {f"{layer}.rows": "trainable_token_indices" for layer in token_ids}
    for name, field in needed.items():
        if peft_name(name) not in names:
            refuse(field, f"but {WEIGHTS_FILE} lacks {peft_name(name)}", "download both files again")
    adapted = {name.partition(".lora_")[0].removeprefix("base_model.model.")
               for name in names if ".lora_" in name}
    if outside := adapted & {"model.embed_tokens", "lm_head"}:
        refuse("target_modules", f"and {min(outside)} cannot have adapters here")
    all_layers, chosen = range(model_config.n_layers), content.get("layers_to_transform")
    chosen = all_layers if chosen in (None, []) else chosen if isinstance(chosen, list) else [chosen]
    for module in LINEAR_LAYERS.values():
        layers = {f"model.layers.{layer}.{module}": layer for layer in all_layers}
        missing = [name for name, layer in layers.items() if name not in adapted or layer not in chosen]
        if missing and not adapted.isdisjoint(layers):
            field = next((field for field in ("layers_to_transform", "exclude_modules")
                          if content.get(field) not in (None, [], "")), "target_modules")
            refuse(field, f"which omits {missing[0]}: only adapters on the same linear layers of every "
                   "block are supported")


def token_ids_of(content: Mapping[str, Any], tied: bool, padded_vocab: int) -> TokenIds:
    """Return the trained token ids of an adapter_config.json."""
    indices = content.get("trainable_token_indices") or {}
    indices = indices if isinstance(indices, dict) else {"embed_tokens": indices}  # the meaning of a list
    token_ids = {}
    for module, ids in indices.items():
        name = module.rpartition(".")[2]
        layer = next((layer for layer, peft_layer in PEFT_LAYERS.items() if peft_layer == name), None)
        valid = isinstance(ids, list) and all(type(each) is int and 0 <= each < padded_vocab for each in ids)
        if layer is None or not valid or not ids or ids != sorted(set(ids)):
            raise CheckpointError(f"{CONFIG_FILE} has trainable_token_indices={indices!r:.200}; only "
                                  "ascending ids of embed_tokens and lm_head are supported, below "
                                  f"{padded_vocab}")
        token_ids[layer] = ids
    if tied and token_ids:
        if len(set(map(tuple, token_ids.values()))) > 1:
            raise CheckpointError(f"{CONFIG_FILE} trains other rows of the head than of the embedding, which "
                                  "are one matrix in the base; use other adapters")
        token_ids = {"tok_embeddings": next(iter(token_ids.values()))}
    return token_ids


def save_settings(folder: Path, adapter: Adapter, model_config: ModelConfig, tokenizer) -> None:
    """Write the other files of an adapter folder: configuration, the base's hash and the tokenizer."""
    config = peft_config(adapter.config, model_config.tie_embeddings, adapter.base_path, adapter.token_ids)
    write_json(folder / CONFIG_FILE, config)
    write_json(folder / BASE_FILE, {"base_sha256": adapter.base_sha256})
    if (suppressed := tokenizer.generation.get("suppress_tokens")) is not None:  # fewer than the base's
        write_json(folder / "generation_config.json", {"suppress_tokens": suppressed})
    tokenizer.save_huggingface(folder)


def load_adapter_folder(folder: Path, model_config: ModelConfig, padded_vocab: int,
                        vocab_size: Optional[int] = None) -> Adapter:
    """Return the adapters in a Paddock or PEFT folder, which must fit the model."""
    if not os.path.exists(folder / CONFIG_FILE):
        raise CheckpointError(f"{folder} contains no adapters ({CONFIG_FILE} is missing); use another folder")
    content = read_model_json(folder / CONFIG_FILE)
    unlike = [f"{key}={value!r:.80}" for key, value in content.items()
              if key not in READ_FIELDS and value not in PLAIN_VALUES.get(key, NOTHING)]
    unlike += [f"no {key}" for key in ("peft_type", "r", "lora_alpha") if content.get(key) is None]
    if unlike:
        way = "use PEFT, or train with LoRA" if NOT_MERGED.search(str(content.get("peft_type"))) else MERGE
        raise CheckpointError(f"{CONFIG_FILE} has {', '.join(unlike)}; only plain LoRA is supported: {way}")
    base_info = read_model_json(folder / BASE_FILE) if os.path.exists(folder / BASE_FILE) else {}
    token_ids = token_ids_of(content, model_config.tie_embeddings, padded_vocab)
    if not os.path.exists(folder / WEIGHTS_FILE):
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}{other_format(folder)}")
    tensors = open_tensors(folder / WEIGHTS_FILE)
    check_targets(content, tensors, model_config, token_ids)
    state = from_peft(tensors, model_config, padded_vocab, content["r"], token_ids, vocab_size)
    if not state:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} contains no adapters; use another folder")
    stems = {re.sub(r"\d+", str(layer), name[:-1], count=1) for name in state if ".lora_" in name
             for layer in range(model_config.n_layers)}
    if missing := sorted({stem + which for stem in stems for which in "AB"} - state.keys()):
        raise CheckpointError(f"{folder / WEIGHTS_FILE} has adapters without {missing[0]}; copy it again")
    targets = dict.fromkeys(name.split(".")[-2] for name in state if name.endswith(".lora_A"))
    settings = {name: content[field] for name, field in LORA_FIELDS.items() if content.get(field) is not None}
    settings |= {"lora_enabled": True, "lora_target_modules": ",".join(targets),
                 "lora_train_head": "output.weight" in state,
                 "lora_train_embeddings": "tok_embeddings.weight" in state}
    config = model_json.checked_settings(settings, CONFIG_FILE, LORA_FIELDS, LoraConfig)
    return Adapter(state, config, content.get("base_model_name_or_path"), base_info.get("base_sha256"),
                   token_ids)
