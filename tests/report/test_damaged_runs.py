"""Each file and each field of a real run's folder, damaged in every way, leaves a report."""

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Optional, Union

import pytest
from pydantic import BaseModel, ConfigDict

from extensions.report.page import Report, as_text, render

HUGE = "1" + "0" * 400
VALUES = ["null", '"high"', "[1, [2]]", '{"a": {"b": 1}}', "true", "-1", "NaN", "1e300", HUGE, "1" + "0" * 5000, '"\\ud800"',
          "[" * 2000 + "]" * 2000]
LINES = [b"", b"null", b"[1, 2]", b"{}", b'{"step": 3', b"\0\0\0\0", b"\xff\xfe\x00", b"[" * 100_000, b'{"step": 1e400}', b"x" * 2_000_000]
LOGS = ["metrics", "events", "ledger", "samples", "evaluations"]
OBJECTS = ["config.json", "data.json", "configs/step-00000001.json"]
SETTINGS = ["MAX_STEPS", "TRAINING_STAGE", "HELLASWAG_NAME", "WORLD_SIZE", "LORA_ENABLED", "LEARNING_RATE", "PRETRAIN_DATA_PATH"]
SPECIAL = ["step", "time", "step_seconds", "train_loss", "val_loss", "tokens_seen"]  # of metrics.jsonl; others are alike
WEIGHTS = "checkpoints/step-00000006/model.safetensors"

Number = Optional[float]


class PageRun(BaseModel):
    """What the page's script relies on; docs/architecture.md has all of it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    name: str
    state: str
    sentence: str
    step: int
    max_steps: int
    eta_seconds: Number
    facts: list[list[str]]
    curves: dict[str, dict[str, list[Number]]]
    samples: list[dict[str, Union[int, str]]]
    settings: list[dict[str, Union[str, bool]]]
    segments: list[dict[str, Any]]
    sources: list[dict[str, Union[str, float, None]]]
    recent: dict[str, float]
    best: Optional[tuple[float, int]]
    stage: str
    headline: dict[str, Union[str, bool]]
    failure: Optional[dict[str, Optional[str]]]
    goodput: Optional[dict[str, Any]]
    alarms: list[dict[str, Union[int, str]]]


@pytest.fixture(scope="module")
def intact(whole, tmp_path_factory) -> Path:
    """A run with something in each file."""
    folder = shutil.copytree(whole.folder, tmp_path_factory.mktemp("intact") / "run", ignore=shutil.ignore_patterns("optimizer*"))
    (folder / "data.json").write_text(json.dumps({"sources": [
        {"source": "web", "share": 0.7, "tokens": 70, "documents": 3, "passes": 1.5}, {"source": "books", "share": 0.3}]}))
    shutil.copy(folder / "configs/step-00000001.json", folder / "configs/step-00000003.json")
    with open(folder / "events.jsonl", "a") as events, open(folder / "ledger.jsonl", "a") as ledger:
        for event in ({"event": "slow rank", "rank": 1, "phase": "data", "ratio": 1.5, "host": "a"}, {"event": "drift", "rank": 2},
                      {"event": "start", "world_size": 2, "previous_step": 6, "previous_time": 1.8e9, "seconds": 2.0},
                      {"event": "end", "reason": "the disk is full"}):
            events.write(json.dumps({"time": 1.9e9, "step": 6, **event}) + "\n")
        ledger.write('{"step": 7, "rows_crc32": "0", "loss": 9.0, "grad_norm": null, "updated": false, "spike": 12.5, "rows": [1]}\n')
    return folder


def with_field(entry: dict, field: str, value: str) -> bytes:
    """The JSON of an entry with this text as the value of a field."""
    return json.dumps(entry | {field: "\1"}).replace('"\\u0001"', value).encode()


def damages(folder: Path) -> Iterator[tuple[str, str, Optional[bytes]]]:
    """Yield each damage: a file, a description, and the new content of the file; None: it is missing."""
    for log in LOGS:
        file, lines = f"{log}.jsonl", (folder / f"{log}.jsonl").read_bytes().splitlines()
        entries = [json.loads(line) for line in lines]
        for field in dict.fromkeys(name for entry in entries for name in entry):
            place = next(i for i in reversed(range(len(entries))) if field in entries[i])
            without = {name: each for name, each in entries[place].items() if name != field}
            yield file, f"no {field}", replaced(lines, place, json.dumps(without).encode())
            for value in VALUES if log != "metrics" or field in SPECIAL else VALUES[1:9:3]:
                yield file, f"{field} = {value[:20]}", replaced(lines, place, with_field(entries[place], field, value))
        for line in LINES:
            yield file, f"line {line[:20]!r}", replaced(lines, len(lines) // 2, line)
    for file in OBJECTS:
        content = json.loads((folder / file).read_text())
        for field in SETTINGS if "sources" not in content else ["sources"]:
            for value in VALUES:
                yield file, f"{field} = {value[:20]}", with_field(content, field, value)
    for field in ("source", "share", "tokens", "documents", "passes"):
        for value in VALUES:
            source = with_field({"source": "a", "share": 1}, field, value)
            yield "data.json", f"{field} = {value[:20]}", b'{"sources": [%s]}' % source
    for line in LINES:
        for file in ("run.lock", WEIGHTS, *OBJECTS):
            yield file, f"all {line[:20]!r}", line
    for header in ('{"x": 3}', '{"x": {}}', '{"x": {"shape": "ab"}}', f'{{"x": {{"shape": [{HUGE}]}}}}', "[3]"):
        yield WEIGHTS, header[:30], len(header).to_bytes(8, "little") + header.encode()
    for file in (*(f"{log}.jsonl" for log in LOGS), "run.lock", WEIGHTS, *OBJECTS):
        yield file, "missing", None


def replaced(lines: list[bytes], place: int, line: bytes) -> bytes:
    return b"\n".join([*lines[:place], line, *lines[place + 1:]]) + b"\n"


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_each_damage_leaves_a_page_and_lines_that_are_left_out_are_counted(every, intact, tmp_path):
    damaged, failed, count = shutil.copytree(intact, tmp_path / "damaged"), [], 0
    beside = Report([intact])
    beside.read()
    for file, what, content in islice(damages(intact), 0, None, every):
        if content is None:
            (damaged / file).unlink()
        else:
            (damaged / file).write_bytes(content)
        try:
            report = Report([damaged])
            report.read()
            report.runs += beside.runs  # for the comparison
            data = report.data()
            PageRun.model_validate(data["runs"][0])
            as_text(data)
            if count % 10 == 0 or "ud800" in what:
                render(data)
            if what.startswith("line"):
                assert f"1 line of {file}" in dict(data["runs"][0]["facts"])["invalid, left out"]
        except Exception as error:
            failed.append(f"{file}, {what}: {type(error).__name__}: {str(error)[:150]}")
        shutil.copy(intact / file, damaged / file)
        count += 1
    assert count * every > 900 and failed == [], f"{len(failed)} of {count}:\n" + "\n".join(failed)
