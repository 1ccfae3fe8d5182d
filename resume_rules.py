"""What may differ between a checkpoint and the run that goes on from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from config import Config, DistillationConfig, LoraConfig, PreferenceConfig, on_resume
from errors import CheckpointError

# Told in other words, or nothing to tell of.
SILENT = {"PRESET", "RESUME", "ALLOW_RESUME_MISMATCH", "WORLD_SIZE"}


class Changes(NamedTuple):
    """What is to be told of the settings that differ."""

    notes: list[str]
    warnings: list[str]


def identity(config: Config, data_fingerprint: str, tokenizer_sha256: str) -> dict[str, Any]:
    """What a run reads, by content, and its derived shape, under the names of the settings that they come from."""
    return {"HIDDEN_DIM": config.hidden_dim, f"{config.training_stage}_DATA_PATH".upper(): data_fingerprint,
            "TOKENIZER_PATH": tokenizer_sha256}


def without_part(config: Config) -> set[str]:
    """The settings that play no part in this run."""
    sections = ((LoraConfig, config.lora_enabled), (PreferenceConfig, config.training_stage == "dpo"),
                (DistillationConfig, config.distillation_enabled))
    names = {name for section, is_used in sections if not is_used for name in section.model_fields}
    return names - {"lora_enabled", "distillation_enabled"}


def check_changes(state: Mapping[str, Any], config: Config, now_identity: Mapping[str, Any], world_size: int,
                  folder: Path) -> Changes:
    """What to tell of each setting and input that is not what it was when the checkpoint was written.

    Args:
        state: the trainer's state in the checkpoint, with its `settings`, `identity` and `world_size`.
    Raises:
        CheckpointError: one makes it another run, and ALLOW_RESUME_MISMATCH does not name it.
    """
    now, idle = config.public() | now_identity, without_part(config)
    before = state["settings"] | state["identity"]
    allowed = {name.strip().upper() for name in config.allow_resume_mismatch.split(",") if name.strip()}
    changed: dict[str, list[str]] = {"safe": [], "curve": [], "fixed": []}
    for name in sorted(now):
        if name in before and before[name] != now[name] and name.lower() not in idle and name not in SILENT:
            changed["fixed" if name in now_identity else on_resume(name.lower())].append(name)

    def shown(names: list[str]) -> str:
        return ", ".join(f"{name} was {before[name]}, is {now[name]}" for name in names)

    refused = [name for name in changed["fixed"] if name not in allowed]
    if refused:
        raise CheckpointError(f"{folder} belongs to a different run: {shown(refused)}. Restore the setting, choose another "
                              f"RUN_NAME, start from its weights with --pretrain-checkpoint {folder} --reset-optimizer, or "
                              f"accept it with ALLOW_RESUME_MISMATCH={','.join(refused)}")
    notes = [f"Changed since the checkpoint, safe: {shown(changed['safe'])}"] if changed["safe"] else []
    warnings = [f"changed since the checkpoint, and so does the curve: {shown(changed['curve'])}"] if changed["curve"] else []
    if changed["fixed"]:
        warnings.append(f"another run than before, as ALLOW_RESUME_MISMATCH permits: {shown(changed['fixed'])}")
    if state["world_size"] != world_size:
        warnings.append(f"the number of ranks was {state['world_size']}, is {world_size}: each step reads the same rows, but "
                        "sums are rounded in another order")
    return Changes(notes, warnings)
