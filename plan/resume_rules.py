"""A run that continues, and its record: which settings still apply, what the record keeps, what changed."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import CheckpointError
from common.remote import is_hub_name
from config import DROPPED, EXTENSION_SECTIONS, FEED_FORWARD, SECTIONS, START_FROM, Config, on_resume
from plan import derived
from plan.layers import LENGTH, Values
from plan.names import SETTING_OF, assignments, in_env, or_run, validate
from plan.starts import MODEL_SHAPE, Asked, Start, started_from

# Settings of one start, which a record does not pass on.
FOR_ONE_START = {
    "preset", "output_dir", "run_name", "resume", "stop_step", "epochs", "allow_resume_mismatch", "cache_dir",
    "device", "world_size", "device_memory", "debug", "extensions", "profile_steps", "memory_snapshot"}
RESTARTS = ("reset_optimizer", "start_step", "random_init")  # of the first start of a run
# Reported elsewhere (EPOCHS as MAX_STEPS, RUN_NAME as the folder), or not worth reporting.
SILENT = {"PRESET", "RESUME", "RUN_NAME", "ALLOW_RESUME_MISMATCH", "WORLD_SIZE", "EPOCHS"}


def applies(name: str, asked: Asked, start: Start) -> bool:
    """Return whether a setting that somebody set applies to a continued run, by the rules of plan/make.py."""
    record, now = start.state["settings"], getattr(asked.config, name)
    kind, value, stage = on_resume(name), record.get(name.upper()), record["TRAINING_STAGE"]
    if name in asked.for_this_start or kind == "safe" or name in LENGTH or now == value:
        return True
    if name.endswith("_data_path") and name != f"{stage}_data_path":
        return True  # of another stage
    if name in START_FROM and name == asked.setting and start.setting != "resume":
        return start.named == now or started_from(now, start.state["progress"], asked.run_dir)
    if not start.is_own and start.setting != "resume" and kind != "curve":
        return True  # a new run may not differ from what it continues: it is compared, and refused
    if not value or name not in (f"{stage}_data_path", "tokenizer_path", "teacher_model"):
        return False
    # What was moved is found by the new path, and its content is compared.
    is_on_hub = name != f"{stage}_data_path" and is_hub_name(value.partition("@")[0])
    return not is_on_hub and not os.path.exists(or_run(value, asked.config.output_dir))


def recorded_settings(config: Config, given: Values, start: Start) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that a continued run keeps, as they were recorded, and warnings.

    New defaults do not apply. A value that this version refuses is a warning, of a fixed setting an error.
    """
    record = start.state["settings"]
    left_out = {*FOR_ONE_START, *({"max_steps"} if config.epochs else ())}
    if not start.is_own:
        left_out |= {*RESTARTS, *START_FROM}
    elif any(name in given and getattr(config, name) for name in START_FROM):
        left_out |= {*START_FROM}
    if "depth" in given and config.depth != record.get("DEPTH"):
        same_stage = config.model_copy(update={"training_stage": record["TRAINING_STAGE"]})
        left_out |= derived.settings_of_depth(same_stage, ()).keys()
    if not {*FEED_FORWARD}.isdisjoint(given):  # the width may be set in another way
        left_out |= {*FEED_FORWARD}
    if type(steps := record.get("MAX_STEPS")) is int:  # what followed from it follows from the new number
        by_length = derived.settings_of_length(steps, Config.model_fields)
        left_out |= {name for name, every in by_length.items() if every == record.get(name.upper())}
    values = {name: record[name.upper()] for name in Config.model_fields
              if name not in left_out and name not in given and name.upper() in record}
    valid, invalid = validate({name: (value, start.folder) for name, value in values.items()})
    warnings = []
    for name, message in invalid.items():
        if on_resume(name) not in ("fixed", "content"):
            warnings.append(f"{message}; this version of Paddock no longer accepts it, and continues "
                            f"with {in_env(name, getattr(valid, name))}")
            continue
        by_flag = f"set {name.upper()} by a flag with ALLOW_RESUME_MISMATCH={name.upper()}, "
        raise CheckpointError(f"{message}, in this version of Paddock; continue the run with the version "
                              f"that recorded it, {'' if cannot_be_allowed(name.upper()) else by_flag}"
                              "or use another checkpoint")
    # Keep equal values unchanged, so that 600 is not recorded as 600.0.
    return {name: value if value == getattr(valid, name) else getattr(valid, name)
            for name, value in values.items() if name not in invalid}, warnings


def check_changes(state: Mapping[str, Any], plan: Any, now_identity: Mapping[str, Any],
                  earlier: Callable[[], str] = str) -> tuple[list[str], list[str]]:
    """Compare a plan that continues with its checkpoint; return notes and warnings."""
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

    def shown(name: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        value = values[name]
        if name in now_identity and name.endswith(("_PATH", "_MODEL")) and value:
            return f"{settings.get(name)} with SHA-256 {value[:12]}"
        return in_env(name, value).partition("=")[2]

    refused = [name for name in changed["fixed"] if name not in allowed or cannot_be_allowed(name)]
    if refused:
        remedies = ways_out({name: before[name] for name in changed["fixed"]}, state, plan, earlier())
        raise CheckpointError(f"{start.folder} belongs to a different run: {differences(refused)}. "
                              f"{remedies}")
    titles = {"safe": "Changed since the checkpoint, safe",
              "curve": "changed since the checkpoint, and changes the curve",
              "fixed": "different from the checkpoint, as ALLOW_RESUME_MISMATCH permits"}
    texts = {kind: f"{titles[kind]}: {differences(names)}" for kind, names in changed.items() if names}
    usual = ("safe", "curve") if changed["curve"] == ["MAX_STEPS"] else ("safe",)  # a longer run is no risk
    notes = [texts.pop(kind) for kind in usual if kind in texts]
    warnings = [*texts.values(), *(f"ALLOW_RESUME_MISMATCH names {name}, which is not a setting"
                                   for name in sorted(allowed - now.keys()))]
    warnings += [f"{name}={value} of the checkpoint's run is not a setting of this version, and has no effect"
                 for name, value in before.items() if value != DROPPED.get(name.lower(), value)]
    if not_recorded:
        notes.append(f"The checkpoint's older version did not record {' and '.join(not_recorded)}")
    unknown = sorted(before.keys() - now.keys() - {name.upper() for name in DROPPED})
    if unknown and not EXTENSION_SECTIONS:
        warnings.append("Without extensions/, these settings of the checkpoint's run have no effect: "
                        f"{', '.join(unknown)}")
    if state["world_size"] != config.world_size and not config.reproducible:
        warnings.append(f"the number of ranks was {state['world_size']}, is {config.world_size}: each step "
                        f"reads the same rows, but sums are rounded in a different order")
    return notes, warnings


def cannot_be_allowed(name: str) -> bool:
    """Return whether another value of this setting cannot work with the saved model or optimizer state."""
    if name.startswith("LORA_"):
        return name not in ("LORA_ALPHA", "LORA_RSLORA", "LORA_DROPOUT", "LORA_BASE_QUANTIZATION")
    return name in MODEL_SHAPE or name == "OPTIMIZER"


def ways_out(before: Mapping[str, Any], state: Mapping[str, Any], plan: Any, earlier: str) -> str:
    """Return the remedies that work for changed fixed settings, with their values in the checkpoint."""
    config, start, named = plan.config, plan.start, plan.config.start_settings
    # Restore the settings, or start another run, which has no record, perhaps with the checkpoint's weights.
    added = {name: f" --{name.replace('_', '-')} {getattr(config, name)}" for name in (
        "training_stage", f"{config.training_stage}_data_path", *named) if name not in plan.sources}
    files = [name for name in before if name.endswith(("_PATH", "_MODEL"))]
    settings = assignments({name: value for name, value in before.items() if name not in files})
    restore = f"restore what {' and '.join(files)} named{f' (perhaps {earlier})' * bool(earlier)}"
    ways = [" and ".join([f"set {settings}"] * bool(settings) + [restore] * bool(files))]
    fits = not any(name in (*MODEL_SHAPE, "TOKENIZER_PATH") for name in before)
    can_begin = fits if named else (
        config.training_stage == "pretrain" or config.random_init or config.distillation_enabled)
    if start.is_own and start.setting != "resume" and can_begin:
        flags = " --reset-optimizer" * bool(named) + "".join(added.values())
        ways.append(f"start a new run with another RUN_NAME{', with' * bool(flags)}{flags}")
    elif start.setting in config.start_settings and config.training_stage == "pretrain":
        ways.append(f"remove {in_env(start.setting, start.named)}, to start from random weights")
    if fits and not (config.lora_enabled or state["settings"]["LORA_ENABLED"] or config.random_init):
        flags = f"--{(named or START_FROM)[0].replace('_', '-')} {start.folder} --reset-optimizer"
        stage = "".join(text for name, text in added.items() if name not in named)
        elsewhere = f"--run-name NAME --resume auto{stage} " * (start.is_own or start.setting == "resume")
        ways.append(f"load only its weights with {elsewhere}{flags}")
    if fits and not any(map(cannot_be_allowed, before)):
        ways.append(f"accept it with ALLOW_RESUME_MISMATCH={','.join(before)}")
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]
