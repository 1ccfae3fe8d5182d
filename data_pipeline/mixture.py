"""Mixtures: mixture.json lists sets and their weights in each phase of a run; a file of --mix, sources."""

import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from common.errors import DataError, SettingsError, unreadable
from common.files import json_sha256, read_json, write_json
from common.text import aligned, percent, without_passwords
from data_pipeline.shards import MANIFEST, MIXTURE, first_fault, read_as, read_data_manifest
from data_pipeline.source_files import Source

LABEL_COLUMNS = 32
WEIGHT_UNITS = 1 << 24  # sum of a phase's integer weights; position * weight stays below 2^63
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Phase(NamedTuple):
    """A part of a run with constant weights of the sources."""

    start: int  # first position
    weights: tuple[int, ...]  # integer weight of each source, from `weight_units`


def weight_units(weights: Sequence[float]) -> tuple[int, ...]:
    """Return weights as integers with a sum of about WEIGHT_UNITS; positive weights stay positive."""
    largest = max(weights)  # divide first: the sum of floats could overflow or vanish
    total = sum(weight / largest for weight in weights)
    return tuple(max(1, round(weight / largest / total * WEIGHT_UNITS)) if weight else 0
                 for weight in weights)


class MixtureSource(BaseModel, strict=True):
    """A source: its label in weights and tables, and the path of its set (in the file: from the folder)."""

    label: str
    set: str


class MixPhase(BaseModel, strict=True, extra="forbid"):
    """The weights until a share of MAX_STEPS; sources without a weight are not read."""

    until: float = Field(1.0, gt=0, le=1)
    weights: dict[str, Weight]


class Mixture(BaseModel, strict=True):
    """The content of mixture.json."""

    format: Literal[1] = 1
    sources: list[MixtureSource] = Field(min_length=1)
    phases: list[MixPhase] = Field(min_length=1)

    @model_validator(mode="after")
    def check_phases(self) -> "Mixture":
        labels = [source.label for source in self.sources]
        if repeated := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"two sources have the label {repeated!r}; use different labels")
        ends = [phase.until for phase in self.phases]
        if ends[-1] != 1 or not all(one < next for one, next in pairwise(ends)):
            raise ValueError(f"the phases end at {ends}; each must end later than the one before it, and the "
                             "last at 1 (or without until)")
        for number, phase in enumerate(self.phases, 1):
            if unknown := next((label for label in phase.weights if label not in labels), None):
                raise ValueError(f"phase {number} weighs {unknown!r}, which is not a source's label; the "
                                 f"labels are {', '.join(map(repr, labels))}")
            if not any(phase.weights.values()):
                raise ValueError(f"phase {number} has no weight above 0")
        for label, weights in zip(labels, zip(*self.weights)):
            if not any(weights):
                raise ValueError(f"{label!r} has no weight above 0 in a phase; add one, or remove the source")
        return self

    @property
    def weights(self) -> list[list[float]]:
        return [[phase.weights.get(source.label, 0.0) for source in self.sources] for phase in self.phases]

    def phases_of_run(self, steps: int, rows_per_step: int) -> tuple[Phase, ...]:
        begins = [0, *(round(phase.until * steps) for phase in self.phases[:-1])]
        return tuple(Phase(step * rows_per_step, weight_units(weights))
                     for step, weights in zip(begins, self.weights))

    def fingerprint(self, set_fingerprints: Sequence[str]) -> str:
        phases = [[phase.until, weight_units(weights)] for phase, weights in zip(self.phases, self.weights)]
        return json_sha256([*set_fingerprints, phases])


# A source in the file of --mix: the fields of `Source`, a weight and a label.
MixSource = create_model(
    "MixSource", __config__=ConfigDict(strict=True, extra="forbid"),
    weight=(Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)], None),
    label=(Annotated[str, Field(min_length=1)], None),
    **{field.name: (str, field.default) for field in fields(Source)})


class MixFile(BaseModel, strict=True, extra="forbid"):
    """The file of --mix. Weights are those of the sources, or of the phases (by label)."""

    sources: list[MixSource] = Field(min_length=1)
    phases: list[MixPhase] | None = None

    @model_validator(mode="after")
    def check_sources(self) -> "MixFile":
        for index, source in enumerate(self.sources, 1):
            if bool(source.path) == bool(source.name):
                raise ValueError(f"source {index}: give either a path (files) or a name (on the hub)")
            if self.phases is not None and source.weight is not None:
                raise ValueError(f"source {index}: remove its weight, because the phases have weights")
        return self


def read_mix(path: str | Path) -> tuple[list[Source], Mixture]:
    """Return the sources in a `MixFile`, and their mixture, whose sets do not exist yet.

    The default label of a source is its path or name.
    """
    try:
        mix = MixFile.model_validate(read_json(Path(path)))
        labels = [entry.label or without_passwords(entry.path)
                  or "/".join(filter(None, (entry.name, entry.config))) for entry in mix.sources]
        phases = mix.phases
        if phases is None:
            weights = [1.0 if entry.weight is None else entry.weight for entry in mix.sources]
            phases = [{"weights": dict(zip(labels, weights))}]
        return ([Source(**entry.model_dump(exclude={"weight", "label"})) for entry in mix.sources],
                Mixture(sources=[{"label": label, "set": ""} for label in labels],
                                phases=phases))
    except OSError as error:
        raise SettingsError(f"{path}: {unreadable(error, 'check the path')}") from error
    except ValidationError as error:
        raise SettingsError(f"{path}: {first_fault(error)}; see the example in --help") from error
    except ValueError as error:
        raise SettingsError(f"{path}: is not a JSON object: {error}; see the example in --help") from error


def write_mixture(output_dir: Path, mixture: Mixture) -> Path:
    """Write a mixture beside its prepared sets; return its folder, named after sets and weights."""
    folder = output_dir / mixture.fingerprint([Path(source.set).name for source in mixture.sources])[:16]
    folder.mkdir(exist_ok=True)
    write_json(folder / MIXTURE, mixture.model_dump())
    return folder


def is_mixture(path: str | Path | None) -> bool:
    return path is not None and os.path.lexists(Path(path) / MIXTURE)


def read_mixture(folder: Path) -> Mixture:
    """Return the mixture in a folder."""
    mixture = read_as(Mixture, folder / MIXTURE, "prepare the mixture again")
    for source in mixture.sources:
        source.set = os.path.normpath(folder / source.set)
        if not os.path.lexists(Path(source.set) / MANIFEST):
            raise DataError(f"{folder / MIXTURE}: {source.set}, the set of {source.label!r}, is missing; "
                            "copy or prepare it")
    return mixture


def source_table(mixture: Mixture) -> list[dict[str, Any]]:
    """Return a table of the sources as JSON: training splits, weights, and shares of a run."""
    lengths = [end - begin for begin, end in pairwise([0.0, *(phase.until for phase in mixture.phases)])]
    totals = [sum(weights) for weights in mixture.weights]
    table = []
    for number, source in enumerate(mixture.sources):
        train = read_data_manifest(Path(source.set)).splits["train"]
        weights = [weights[number] / total for weights, total in zip(mixture.weights, totals)]
        share = sum(length * weight for length, weight in zip(lengths, weights))
        table.append({"source": source.label, "set": source.set, "documents": train.documents,
                      "tokens": train.tokens, "weights": weights, "share": share})
    return table


def describe_sources(mixture: Mixture, sources: Sequence[dict[str, Any]]) -> list[str]:
    """Return `source_table` as lines, with "passes" over each source if present, else the tokens per pass."""
    ends = [f"{phase.until:.4g}" for phase in mixture.phases]
    rows = [["source", "documents", "tokens", *(f"until {end}" for end in ends if len(ends) > 1), "share",
             "passes" if "passes" in sources[0] else "a pass every"]]
    for entry in sources:
        label, width = entry["source"], LABEL_COLUMNS
        weights = [percent(weight, 2) for weight in entry["weights"]] if len(ends) > 1 else []
        read = f"{entry['passes']:.2f}" if "passes" in entry else f"{entry['tokens'] / entry['share']:,.0f}"
        rows.append([label if len(label) <= width else f"...{label[3 - width:]}", f"{entry['documents']:,}",
                     f"{entry['tokens']:,}", *weights, percent(entry["share"], 2), read])
    return aligned(rows)
