"""Compare the settings of a checkpoint with those of the run that resumes from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from common.errors import CheckpointError
from config import DROPPED, EXTENSION_SECTIONS, SECTIONS, SHAPE_SETTINGS, START_FROM, Config, on_resume

# Reported elsewhere (EPOCHS as MAX_STEPS, RUN_NAME as the folder), or not worth reporting.
SILENT = {"PRESET", "RESUME", "RUN_NAME", "ALLOW_RESUME_MISMATCH", "WORLD_SIZE", "EPOCHS"}
SETTING_OF = {"HIDDEN_DIM": "FFN_DIM"}  # the setting that restores a derived value
MODEL_SHAPE = (*map(str.upper, SHAPE_SETTINGS), "HIDDEN_DIM")


class Changes(NamedTuple):
    """Messages about changed settings."""

    notes: list[str]
    warnings: list[str]


def check_changes(state: Mapping[str, Any], plan: Any, now_identity: Mapping[str, Any]) -> Changes:
    """Compare the settings and inputs of a plan that continues with those of its checkpoint.

    Args:
        state: the checkpoint's trainer state, with `settings`, `identity` and `world_size`.
        now_identity: the current `run.recorded_identity`.
    """
    config, sources, start = plan.config, plan.sources, plan.start
    now = config.public() | now_identity
    # A setting that was not recorded, as of an extension that was not there, had its default.
    defaults = {name.upper(): field.default for name, field in Config.model_fields.items()}
    before = defaults | state["settings"] | state["identity"]
    not_recorded = sorted(now_identity.keys() - state["identity"].keys())
    before |= {name: now[name] for name in not_recorded}
    allowed = {name.strip().upper() for name in config.allow_resume_mismatch.split(",") if name.strip()}

    # Settings of features that are off are not compared.
    unused = {name for section in SECTIONS for name in section.model_fields
              if section.used_if and getattr(config, section.used_if[0]) != section.used_if[1]}
    unused -= {"lora_enabled", "distillation_enabled"}
    fixed = {*now_identity} | ({"MICRO_BATCH_SIZE"} if config.reproducible else set())
    changed: dict[str, list[str]] = {"safe": [], "curve": [], "fixed": []}
    for name in sorted(now):
        if before[name] != now[name] and name.lower() not in unused and name not in SILENT:
            kind = "fixed" if name in fixed else on_resume(name.lower())
            changed["safe" if kind == "content" else kind].append(name)

    def differences(names: list[str]) -> str:
        places = {name: f" ({sources[name.lower()]})" for name in names if name.lower() in sources}
        return ", ".join(f"{SETTING_OF.get(name, name)} was {shown(name, state['settings'], before)}, is "
                         f"{shown(name, config.public(), now)}{places.get(name, '')}" for name in names)

    def shown(name: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        value = values[name]
        if name in now_identity and name.endswith(("_PATH", "_MODEL")) and value:
            return f"{settings.get(name)} with SHA-256 {value[:12]}"
        return str(value).lower() if value is None or isinstance(value, bool) else value  # as in .env

    refused = [name for name in changed["fixed"] if name not in allowed or cannot_be_allowed(name)]
    if refused:
        remedies = ways_out({name: before[name] for name in changed["fixed"]}, state, plan)
        raise CheckpointError(f"{start.folder} belongs to a different run: {differences(refused)}. "
                              f"{remedies}")
    titles = {"safe": "Changed since the checkpoint, safe",
              "curve": "changed since the checkpoint, and changes the curve",
              "fixed": "different from the checkpoint, as ALLOW_RESUME_MISMATCH permits"}
    texts = {kind: f"{titles[kind]}: {differences(names)}" for kind, names in changed.items() if names}
    notes = [texts.pop("safe")] if "safe" in texts else []
    warnings = [*texts.values()]
    warnings += [f"{name}={value} of the checkpoint's run is not a setting of this version, and has no effect"
                 for name, value in before.items() if value != DROPPED.get(name.lower(), value)]
    if not_recorded:
        notes.append("The checkpoint, of an older version, does not say what "
                     f"{' and '.join(not_recorded)} was")
    unknown = sorted(before.keys() - now.keys() - {name.upper() for name in DROPPED})
    if unknown and not EXTENSION_SECTIONS:
        warnings.append("Without extensions/, these settings of the checkpoint's run have no effect: "
                        f"{', '.join(unknown)}")
    if state["world_size"] != config.world_size and not config.reproducible:
        has_dropout = config.lora_enabled and config.lora_dropout
        dropout = ", and LoRA dropout draws different numbers" if has_dropout else ""
        warnings.append(f"the number of ranks was {state['world_size']}, is {config.world_size}: each step "
                        f"reads the same rows, but sums are rounded in a different order{dropout}")
    return Changes(notes, warnings)


def cannot_be_allowed(name: str) -> bool:
    """Return whether another value of this setting cannot work with the saved model or optimizer state."""
    if name.startswith("LORA_"):
        return name not in ("LORA_ALPHA", "LORA_RSLORA", "LORA_DROPOUT", "LORA_BASE_QUANTIZATION")
    return name in MODEL_SHAPE or name == "OPTIMIZER"


def assignments(values: Mapping[str, Any]) -> str:
    """Advice such as "set SEED=1 COMPILE=true"; empty without values."""
    def written(value: Any) -> Any:
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else value

    pairs = (f"{SETTING_OF.get(name, name)}={written(value)}" for name, value in values.items())
    return f"set {' '.join(pairs)}" if values else ""


def ways_out(before: Mapping[str, Any], state: Mapping[str, Any], plan: Any) -> str:
    """Return the remedies that work for changed fixed settings, with their values in the checkpoint."""
    # Restore the settings, or start another run, without or with the checkpoint's weights.
    config, start = plan.config, plan.start
    files = [name for name in before if name.endswith(("_PATH", "_MODEL"))]
    restore = (assignments({name: value for name, value in before.items() if name not in files}),
               f"restore what {' and '.join(files)} named" if files else "")
    ways = [" and ".join(filter(None, restore))]
    named = config.start_settings
    fits = not any(name in (*MODEL_SHAPE, "TOKENIZER_PATH") for name in before)
    can_begin = fits if named else (
        config.training_stage == "pretrain" or config.random_init or config.distillation_enabled)
    if start.is_own and start.setting != "resume" and can_begin:
        ways.append(f"start a new run with another RUN_NAME{', with --reset-optimizer' if named else ''}")
    if fits and not (config.lora_enabled or state["settings"]["LORA_ENABLED"] or config.random_init):
        flags = f"--{(named or START_FROM)[0].replace('_', '-')} {start.folder} --reset-optimizer"
        is_other = start.is_own or start.setting == "resume"
        ways.append("load only its weights with "
                    f"{f'--run-name NAME --resume auto {flags}' if is_other else flags}")

    # Accept the change.
    if fits and not any(map(cannot_be_allowed, before)):
        ways.append(f"accept it with ALLOW_RESUME_MISMATCH={','.join(before)}")
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]
