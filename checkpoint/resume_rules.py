"""What may differ between a checkpoint and the run that goes on from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import CheckpointError
from config import START_FROM, Config, DistillationConfig, LoraConfig, PreferenceConfig, on_resume

# Told in other words, or nothing to tell of.
SILENT = {"PRESET", "RESUME", "ALLOW_RESUME_MISMATCH", "WORLD_SIZE"}
AS_SET = {"HIDDEN_DIM": "FFN_DIM"}  # the setting that makes a derived value what it was
MODEL_SHAPE = ("DIM", "N_LAYERS", "N_HEADS", "N_KV_HEADS", "HIDDEN_DIM", "TIE_EMBEDDINGS")


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


def check_changes(state: Mapping[str, Any], config: Config, now_identity: Mapping[str, Any], folder: Path,
                  own: bool = True) -> Changes:
    """What to tell of each setting and input that is not what it was when the checkpoint was written.

    Args:
        state: the trainer's state in the checkpoint, with its `settings`, `identity` and `world_size`.
        own: the checkpoint is of this very run.
    Raises:
        CheckpointError: one makes it another run, and ALLOW_RESUME_MISMATCH does not name it, or could not help.
    """
    now, idle = config.public() | now_identity, without_part(config)
    before = state["settings"] | state["identity"]
    allowed = {name.strip().upper() for name in config.allow_resume_mismatch.split(",") if name.strip()}
    changed: dict[str, list[str]] = {"safe": [], "curve": [], "fixed": []}
    for name in sorted(now):
        if name in before and before[name] != now[name] and name.lower() not in idle and name not in SILENT:
            changed["fixed" if name in now_identity else on_resume(name.lower())].append(name)

    def shown(names: list[str]) -> str:
        return ", ".join(f"{AS_SET.get(name, name)} was {before[name]}, is {now[name]}" for name in names)

    refused = [name for name in changed["fixed"] if name not in allowed or cannot_be_allowed(name)]
    if refused:
        remedies = ways_out({name: before[name] for name in changed["fixed"]}, state, config, folder, own)
        raise CheckpointError(f"{folder} belongs to a different run: {shown(refused)}. {remedies}")
    notes = [f"Changed since the checkpoint, safe: {shown(changed['safe'])}"] if changed["safe"] else []
    warnings = [f"changed since the checkpoint, and so does the curve: {shown(changed['curve'])}"] if changed["curve"] else []
    if changed["fixed"]:
        warnings.append(f"another run than before, as ALLOW_RESUME_MISMATCH permits: {shown(changed['fixed'])}")
    if state["world_size"] != config.world_size:
        warnings.append(f"the number of ranks was {state['world_size']}, is {config.world_size}: each step reads the same rows, "
                        "but sums are rounded in another order")
    return Changes(notes, warnings)


def cannot_be_allowed(name: str) -> bool:
    """Whether what was saved with another value of this setting cannot be put into the model, the adapters or the optimizer."""
    of_adapters = name.startswith("LORA_") and name not in ("LORA_ALPHA", "LORA_RSLORA", "LORA_DROPOUT", "LORA_BASE_QUANTIZATION")
    return name in MODEL_SHAPE or name == "OPTIMIZER" or of_adapters


def assignments(values: Mapping[str, Any]) -> str:
    """Settings as they are written in a .env file."""
    def written(value: Any) -> Any:
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else value

    return f"set {' '.join(f'{AS_SET.get(name, name)}={written(value)}' for name, value in values.items())}" if values else ""


def ways_out(were: Mapping[str, Any], state: Mapping[str, Any], config: Config, folder: Path, own: bool) -> str:
    """What can be done about settings that are no longer what they were: only what can work.

    Args:
        were: these settings' values in the checkpoint.
        own: the checkpoint is of this very run.
    """
    files = [name for name in were if name.endswith("_PATH")]
    restore = (assignments({name: value for name, value in were.items() if name not in files}),
               f"bring back what {' and '.join(files)} named" if files else "")
    ways = [" and ".join(filter(None, restore))]
    named = [name for name in START_FROM if getattr(config, name)]
    by_path = config.resume not in ("auto", "never")
    fits = not any(name in (*MODEL_SHAPE, "TOKENIZER_PATH") for name in were)
    can_begin = fits if named else config.training_stage == "pretrain" or config.random_init or config.distillation_enabled
    if own and not by_path and can_begin:
        ways.append(f"begin anew under another RUN_NAME{', with --reset-optimizer' if named else ''}")
    if fits and not (config.lora_enabled or state["settings"]["LORA_ENABLED"] or config.random_init):
        flags = f"--{(named or START_FROM)[0].replace('_', '-')} {folder} --reset-optimizer"
        ways.append(f"take only its weights with {f'--run-name NAME --resume auto {flags}' if own else flags}")
    if fits and not any(map(cannot_be_allowed, were)):
        ways.append(f"accept it with ALLOW_RESUME_MISMATCH={','.join(were)}")
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]
