"""The file that --mix names: several sources, and their weights in a run."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from common.errors import SettingsError
from common.files import read_json
from common.text import without_passwords
from data_pipeline.manifest import first_fault
from data_pipeline.mixture import Mixture
from data_pipeline.sources import Source

EXAMPLE = '{"sources": [{"path" or "name": ..., "weight": 0.7}, ...]}'
OLD_FIELDS = ("seed", "stop")


class Mix(NamedTuple):
    """Several sources, and the phases of a run as mixture.json has them."""

    sources: list[Source]
    labels: list[str]
    phases: list[dict]


def read_mix(path: str | Path) -> Mix:
    """Read {"sources": [{"path" or "name": ..., "weight": ..., "label": ...}, ...], "phases": [...]} as JSON.

    With phases, such as {"until": 0.8, "weights": {label: 0.9, ...}}, the sources themselves have no weights.
    A source's label is by default its path or name.

    Raises:
        SettingsError: the file cannot be read, or a field is unknown, missing or out of range.
    """
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise SettingsError(f"{path}: is not a JSON object: {error}; see the example in --help") from error
    entries = content.get("sources")
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise SettingsError(f"{path}: expected {EXAMPLE}")
    if old := next((name for name in OLD_FIELDS if name in content), None):
        raise SettingsError(f"{path}: leave out {old!r}: a mixture is no longer drawn when it is prepared, "
                            "but in training, by SEED, and a source that is used up is read again")
    _refuse_unknown_fields(f"{path}", content, {"sources", "phases"})
    sources, labels, weights = zip(*(_source(f"{path}: source {number}", entry, "phases" in content)
                                     for number, entry in enumerate(entries, 1)))
    phases = content.get("phases", [{"weights": dict(zip(labels, weights))}])
    parts = [{"label": label, "set": ""} for label in labels]
    try:
        mixture = Mixture.model_validate({"sources": parts, "phases": phases})
    except ValidationError as error:
        raise SettingsError(f"{path}: {first_fault(error)}; see the example in --help") from error
    return Mix([*sources], [*labels], [phase.model_dump() for phase in mixture.phases])


def _source(where: str, entry: dict, has_phases: bool) -> tuple[Source, str, float]:
    """Return a source, its label and its weight."""
    strings = {field.name for field in fields(Source)} | {"label"}
    _refuse_unknown_fields(where, entry, strings | {"weight"})
    if ("path" in entry) == ("name" in entry):
        raise SettingsError(f"{where}: give either a path (files) or a name (a dataset on the hub)")
    if has_phases and "weight" in entry:
        raise SettingsError(f"{where}: leave out its weight, because the phases have weights")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1e9:
        raise SettingsError(f"{where}: weight={weight!r:.40} must be a number above 0, 1e9 at most")
    for name in strings:
        value = entry.get(name, "")
        if not isinstance(value, str) or (name in ("path", "name", "label") and name in entry and not value):
            raise SettingsError(f"{where}: {name}={value!r:.40} must be a string that is not empty")
    source = Source(**{name: value for name, value in entry.items() if name not in ("weight", "label")})
    place = without_passwords(source.path) or "/".join(filter(None, (source.name, source.config)))
    return source, entry.get("label", place), float(weight)


def _refuse_unknown_fields(where: str, given: Iterable[str], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise SettingsError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
