"""What a run's folder says besides its logs: settings, segments, sources, and the size of its model."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from pydantic import BaseModel, TypeAdapter, ValidationError

from checkpoint.schema import RunData, RunSettings, Tensor
from common.files import LARGEST_TEXT, plain, read_json
from config import Config
from settings.help import describe_settings

NOT_COMPARED = ("WORLD_SIZE", "RUN_NAME", "OUTPUT_DIR", "RESUME", "PRESET", "ALLOW_RESUME_MISMATCH")
TENSORS = TypeAdapter(dict[str, Tensor])  # the header of a safetensors file


def read_fields(path: Path, schema: type[BaseModel], aside: Counter[str]) -> dict[str, Any]:
    """The valid fields of the JSON object in a file of a run; empty if it is missing.

    Args:
        aside: counts what is not valid, by its description.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        aside[f"{path.name} ({error})"] += 1
        return {}
    try:
        schema.model_validate(content)
    except ValidationError as error:
        for name in {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False)}:
            aside[f"{name} in {path.name}"] += 1
            del content[name]
    return content


def spelt(value: Any) -> str:
    """A setting's value as `.env` spells it; empty for none."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def setting_lines(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting that the run's version had, with its default of today and its meaning."""
    known = {line.name: line for line in describe_settings()}
    order = {name: place for place, name in enumerate(known)}
    lines = []
    for name in sorted(settings, key=lambda name: order.get(name, len(order))):
        line, value = known.get(name), spelt(settings[name])
        default = Config.model_fields[name.lower()].default if line else None
        lines.append({"name": name, "value": value, "default": spelt(default),
                      "changed": line is not None and settings[name] != default,
                      "meaning": line.meaning if line else "of another version of Paddock"})
    return lines


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The settings that both have with different values; names and places are left out."""
    return [name for name in after if name in before and before[name] != after[name]
            and name not in NOT_COMPARED]


def segments(folder: Path, aside: Optional[Counter[str]] = None) -> Iterator[dict[str, Any]]:
    """Yield each part of a run: its first step, its ranks, and which settings changed there."""
    before = None
    for path in sorted((folder / "configs").glob("step-*.json")):
        first = path.stem.removeprefix("step-")
        if not first.isdecimal():
            continue
        settings = read_fields(path, RunSettings, Counter() if aside is None else aside)
        names = differing(before, settings) if before is not None else []
        yield {"step": int(first), "world_size": settings.get("WORLD_SIZE"),
               "changes": [{"name": name, "before": spelt(before[name]), "after": spelt(settings[name])}
                           for name in names]}
        before = settings


def sources(folder: Path, settings: dict[str, Any], aside: Counter[str]) -> list[dict[str, Any]]:
    """What a run reads: the table of a mixture, else one line."""
    fields = {"label": "source", "share": "share", "tokens": "tokens", "documents": "documents",
              "epochs": "passes"}
    table = read_fields(folder / "data.json", RunData, aside).get("sources")
    if table:
        return [{label: source.get(name) for label, name in fields.items()} for source in table]
    data = settings.get(f"{settings.get('TRAINING_STAGE', '').upper()}_DATA_PATH")
    return [{"label": str(data), "share": 1.0}] if data else []


def parameters_in(checkpoint: Optional[Path]) -> Optional[int]:
    """The parameters in a checkpoint's weight files, from their headers alone; None if it has none.

    Source: the format of safetensors: the header's length as 8 bytes, then the header in JSON.
    """
    total = 0
    for path in checkpoint.glob("*model*.safetensors") if checkpoint else ():
        try:
            with open(path, "rb", opener=plain) as file:
                size = int.from_bytes(file.read(8), "little")
                header = TENSORS.validate_json(file.read(min(LARGEST_TEXT, size)))
        except (OSError, ValueError):  # pruned meanwhile, or damaged
            return None
        total += sum(math.prod(tensor.shape) for name, tensor in header.items() if name != "__metadata__")
    return total or None
