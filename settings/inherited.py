"""Values of settings that nobody gives, from files: the run to resume, the prepared data, or the start."""

import json
import re
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from common.files import read_text
from config import MODEL_SETTINGS, START_FROM, Config
from settings.derived import settings_of_depth

STATE = "trainer_state.json"  # of a checkpoint
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w-]*")  # not a file
# Settings that hold for one start: names and places, the hardware, and measurements. The model's shape, which
# FFN_DIM and others spell in several ways, is adopted with the checkpoint itself.
FOR_ONE_START = {
    "preset", "output_dir", "run_name", "resume", "random_init", "reset_optimizer", "start_step", "epochs",
    "keep_layers", "allow_resume_mismatch", "cache_dir", "device", "world_size", "device_memory", "debug",
    "profile_steps", "power_steps", "memory_snapshot", *MODEL_SETTINGS}


def recorded_settings(config: Config, given: Container[str]) -> tuple[str, dict[str, Any]]:
    """Return the newest checkpoint of the run to resume, and what it recorded of settings that are not given.

    A new default of a later version therefore never changes or stops a run. Nothing is verified here.
    """
    if config.resume == "never" or config.resume == "auto" and config.run_name is None:
        return "", {}
    named = config.resume != "auto"
    folder = Path(config.resume) if named else Path(config.output_dir) / config.run_name
    states = [folder / STATE]
    with suppress(OSError):  # a name that is too long
        states += sorted(folder.glob(f"checkpoints/step-*/{STATE}"), reverse=True)
    for state in states:
        try:
            saved = {**json.loads(read_text(state))["settings"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        recorded = {name: saved[name.upper()] for name in Config.model_fields
                    if name.upper() in saved and name not in given and name not in FOR_ONE_START}
        if saved.get("TRAINING_STAGE") != config.training_stage and "training_stage" in given:
            return "", {}
        if "depth" in given and config.depth != saved.get("DEPTH"):
            decided = settings_of_depth(config, ())
            recorded = {name: value for name, value in recorded.items() if name not in decided}
        if named or any(name in given for name in START_FROM):
            recorded = {name: value for name, value in recorded.items() if name not in START_FROM}
        return str(state.parent), recorded
    return "", {}


def find_tokenizer(config: Config) -> Optional[str]:
    """Return the tokenizer that the prepared data names, or that of the checkpoint to start from."""
    start, wrong = config.named_checkpoint, (OSError, ValueError, KeyError, IndexError, TypeError)
    if config.data_path:
        data = Path(config.data_path)
        sets = [data, *data.glob("*/")]
        with suppress(*wrong):
            sets.append(data / json.loads(read_text(data / "mixture.json"))["sources"][0]["set"])
        for folder in sets:
            with suppress(*wrong):
                named = json.loads(read_text(folder / "manifest.json"))["tokenizer"]
                if Path(named).exists() or HUB_NAME.fullmatch(named):
                    return named
    if start is None:
        return None
    places = [Path(start), Path(config.output_dir) / start]
    for place in places:
        for folder in (place, *sorted(place.glob("checkpoints/step-*"), reverse=True)):
            if (folder / "tokenizer.json").is_file():
                return str(folder)
    return None if any(place.exists() for place in places) else start.partition("@")[0]  # on the hub
