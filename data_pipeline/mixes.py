"""Several sources drawn from at random by weight, document by document, as a JSON file describes them."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from random import Random

from common.errors import SettingsError
from data_pipeline.sources import Reading, Source, source_of


@dataclass(frozen=True)
class Mix:
    """Several sources, drawn from at random by weight, document by document."""

    sources: tuple[Source, ...]
    seed: int = 0
    stop: str = "first_exhausted"  # or all_exhausted: the others go on alone; no document comes twice


def read_mix(path: str | Path) -> Mix:
    """The mix that a JSON file describes: {"sources": [{"path" or "name": ..., "weight": ...}, ...], "seed": 0, "stop": ...}.

    Raises:
        SettingsError: the file cannot be read, or a field is unknown, missing or impossible.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: cannot be read as JSON: {error}; mend it, --help shows one") from error
    sources = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(sources, list) or not sources or not all(isinstance(source, dict) for source in sources):
        raise SettingsError(f'{path}: expected {{"sources": [{{"path" or "name": ..., "weight": ...}}, ...]}}')
    refuse_unknown(f"{path}", content, {"sources", "seed", "stop"})
    known = {field.name for field in fields(Source)}
    for number, source in enumerate(sources, 1):
        where = f"{path}: source {number}"
        refuse_unknown(where, source, known)
        if ("path" in source) == ("name" in source):
            raise SettingsError(f"{where}: give either a path (files) or a name (a dataset of the hub)")
        weight = source.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1e9:
            raise SettingsError(f"{where}: weight={weight!r:.40} must be a number above 0, 1e9 at most")
        for name in known - {"weight"}:
            if not isinstance(source.get(name, ""), str) or (name in ("path", "name") and source.get(name) == ""):
                raise SettingsError(f"{where}: {name}={source[name]!r:.40} must be a string that says something")
    mix = Mix(tuple(Source(**source) for source in sources), content.get("seed", 0), content.get("stop", "first_exhausted"))
    if mix.stop not in ("first_exhausted", "all_exhausted") or not isinstance(mix.seed, int):
        raise SettingsError(f"{path}: stop must be first_exhausted or all_exhausted, and seed a whole number; "
                            f"got {mix.stop!r} and {mix.seed!r}")
    return mix


def refuse_unknown(where: str, given: Iterable[str], known: set[str]) -> None:
    """Raise SettingsError where a mix names a field that does not exist."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise SettingsError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


def draw(mix: Mix, streams: Sequence[Iterator[str]]) -> Iterator[str]:
    """Documents of several streams in the proportion of their weights, the same at every call.

    Not datasets.interleave_datasets: our streams say file:line of each record, and its all_exhausted repeats documents.
    """
    random, live, weights = Random(mix.seed), list(streams), [source.weight for source in mix.sources]
    while live:
        bounds = list(accumulate(weights))
        index = min(bisect_right(bounds, random.random() * bounds[-1]), len(live) - 1)
        document = next(live[index], None)
        if document is not None:
            yield document
        elif mix.stop == "first_exhausted":
            return
        else:
            del live[index], weights[index]


def fraction_read(mix: Mix, readings: Sequence[Reading]) -> float | None:
    """The share of a mix's bytes that was read, None where their number is not known."""
    if not all(reading.bytes_total for reading in readings):
        return None
    if mix.stop == "first_exhausted":
        return max(reading.bytes_done / reading.bytes_total for reading in readings)
    return sum(reading.bytes_done for reading in readings) / sum(reading.bytes_total for reading in readings)


def mix_of(source: str | Source | Mix) -> Mix:
    """Whatever names a source, as a mix of one or several."""
    if isinstance(source, str):
        source = source_of(source)
    return Mix((source,)) if isinstance(source, Source) else source


def pinned(mix: Mix, identities: Sequence[dict]) -> Mix:
    """The mix with each dataset of the hub at the very commit that its identity names."""
    return replace(mix, sources=tuple(replace(source, revision=identity.get("revision", source.revision))
                                      for source, identity in zip(mix.sources, identities)))
