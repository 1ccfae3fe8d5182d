"""Adapters on disk, in PEFT's format: a folder that PEFT loads onto the base, with the base's hash in a file of ours beside."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from pydantic import ValidationError
from torch import Tensor

from checkpoint.hf_format import (
    HUGGINGFACE_NAMES,
    TokenIds,
    from_peft,
    read_json,
    read_tensors,
    to_peft,
    write_json,
)
from checkpoint.tensor_files import write_tensors
from common.errors import CheckpointError
from config import LoraConfig, ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
BASE_FILE = "paddock_adapter.json"
THEIR_LAYERS = {"tok_embeddings": "embed_tokens", "output": "lm_head"}


class Adapter(NamedTuple):
    """What an adapter folder holds."""

    state: dict[str, Tensor]  # under our names
    config: LoraConfig
    base_path: Optional[str]  # a folder, or a name on the hub
    base_sha256: Optional[str]  # `weights_sha256` of the base; None where PEFT made the folder
    token_ids: TokenIds  # whose rows learn

    def check_base(self, base_sha256: str, base: str | Path) -> None:
        """See that these are the weights which the adapters were trained on.

        Raises:
            CheckpointError: they are others.
        """
        if self.base_sha256 not in (None, base_sha256):
            raise CheckpointError(f"the adapters belong to another base: the weights in {base} have SHA-256 {base_sha256}, those "
                                  f"that the adapters were trained on had {self.base_sha256} (then in {self.base_path}); name "
                                  "that base")


def peft_config(config: LoraConfig, tied: bool, base_path: str, token_ids: TokenIds) -> dict[str, Any]:
    """The content of adapter_config.json."""
    targets = [name.strip() for name in config.lora_target_modules.split(",")]
    theirs = [name.rpartition(".")[2] for part, name in HUGGINGFACE_NAMES.items() if part.rpartition(".")[2] in targets]
    trained = (config.lora_train_embeddings, config.lora_train_head)
    both = tied and any(trained)
    whole = [module for module, alone in zip(("embed_tokens", "lm_head"), trained) if alone or both]
    rows: Any = {THEIR_LAYERS[name]: list(ids) for name, ids in token_ids.items()}
    if tied and rows:  # a list means the embedding, which is the head too
        rows = rows["embed_tokens"]
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_path, "r": config.lora_rank,
            "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout, "use_rslora": config.lora_rslora,
            "target_modules": theirs, "modules_to_save": whole or None,
            "trainable_token_indices": rows or None,
            "ensure_weight_tying": both, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
            "inference_mode": True}


def check_plain_lora(content: Mapping[str, Any]) -> None:
    """See that an adapter_config.json describes nothing beyond LoRA itself.

    Raises:
        CheckpointError: it does.
    """
    # Other ways to begin change the base's weights.
    plain = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, None, "gaussian", "orthogonal")}
    plain |= dict.fromkeys(("use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "use_qalora", "alora_invocation_tokens",
                            "arrow_config", "layer_replication"), (None, False, {}, []))
    unlike = [f"{key}={content.get(key)!r}" for key, values in plain.items() if content.get(key) not in values]
    lacking = [key for key in ("r", "lora_alpha") if key not in content]
    if unlike or lacking:
        raise CheckpointError(f"{CONFIG_FILE} has {', '.join(unlike) or f'no {lacking[0]}'}; only plain LoRA can be read")


def token_ids_of(content: Mapping[str, Any], tied: bool, padded_vocab: int) -> TokenIds:
    """Whose rows learn, by an adapter_config.json's `trainable_token_indices`: a list means the embedding.

    Raises:
        CheckpointError: it is none that a Llama's adapters can have.
    """
    found = content.get("trainable_token_indices") or {}
    found = found if isinstance(found, dict) else {"embed_tokens": found}
    token_ids = {}
    for theirs, ids in found.items():
        layer = next((ours for ours, name in THEIR_LAYERS.items() if theirs.rpartition(".")[2] == name), None)
        known = isinstance(ids, list) and all(type(number) is int and 0 <= number < padded_vocab for number in ids)
        if layer is None or not known or not ids or ids != sorted(set(ids)):
            raise CheckpointError(f"{CONFIG_FILE} has trainable_token_indices={found!r:.200}; only ascending ids of embed_tokens "
                                  f"and lm_head below {padded_vocab} can be read")
        token_ids[layer] = ids
    if tied and token_ids:
        if len(set(map(tuple, token_ids.values()))) > 1:
            raise CheckpointError(f"{CONFIG_FILE} trains other rows of the head than of the embedding, which are one matrix in "
                                  "the base")
        token_ids = {"tok_embeddings": next(iter(token_ids.values()))}
    return token_ids


def lora_config_of(content: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> LoraConfig:
    """The settings of adapters: their scale from adapter_config.json, their places from their own names.

    Raises:
        CheckpointError: a value is none that LoRA can have.
    """
    targets = dict.fromkeys(name.split(".")[-2] for name in state_dict if name.endswith(".lora_A"))
    try:
        return LoraConfig(lora_enabled=True, lora_rank=content["r"], lora_alpha=content["lora_alpha"],
                          lora_dropout=content.get("lora_dropout") or 0.0, lora_rslora=content.get("use_rslora") or False,
                          lora_target_modules=",".join(targets), lora_train_head="output.weight" in state_dict,
                          lora_train_embeddings="tok_embeddings.weight" in state_dict)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(f"{CONFIG_FILE}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; get it anew") from error


def save_adapter_folder(folder: Path, state_dict: Mapping[str, Tensor], config: LoraConfig, model_config: ModelConfig,
                        base_path: str, base_sha256: str, tokenizer, token_ids: Optional[TokenIds] = None) -> None:
    """Write an adapter folder that PEFT loads onto its base, with the base's hash and the tokenizer's files.

    Args:
        state_dict: what LoRA trains, under our names.
        base_path: the base's folder, or its name on the hub.
        base_sha256: `weights_sha256` of the base.
        token_ids: whose rows learn.
    """
    folder = Path(folder)
    write_tensors(folder / WEIGHTS_FILE, to_peft(state_dict, model_config, tokenizer.vocab_size), {"format": "pt"})
    write_json(folder / CONFIG_FILE, peft_config(config, model_config.tie_embeddings, base_path, token_ids or {}))
    write_json(folder / BASE_FILE, {"base_sha256": base_sha256})
    tokenizer.save_huggingface(folder)


def load_adapter_folder(folder: Path, model_config: ModelConfig, padded_vocab: int) -> Adapter:
    """The adapters in a folder of ours or of PEFT's.

    Raises:
        CheckpointError: there are none, a file is damaged, or they do not fit this model.
    """
    folder = Path(folder)
    if not os.path.exists(folder / CONFIG_FILE):
        raise CheckpointError(f"{folder} holds no adapters: it has no {CONFIG_FILE}; name another folder")
    content = read_json(folder / CONFIG_FILE)
    check_plain_lora(content)
    own = read_json(folder / BASE_FILE) if os.path.exists(folder / BASE_FILE) else {}
    token_ids = token_ids_of(content, model_config.tie_embeddings, padded_vocab)
    state = from_peft(read_tensors(folder / WEIGHTS_FILE), model_config, padded_vocab, content["r"], token_ids)
    if not state:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} holds no adapters; name another folder")
    return Adapter(state, lora_config_of(content, state), content.get("base_model_name_or_path"), own.get("base_sha256"),
                   token_ids)


def refuse_adapters(folder: Path) -> None:
    """Raises CheckpointError where a folder holds no whole model."""
    if os.path.exists(folder / CONFIG_FILE):
        raise CheckpointError(f"{folder} holds adapters, not a whole model; merge them first: python scripts/merge_lora.py "
                              f"{folder} --output FOLDER")
