"""Overlaps with evaluation items are those that all runs of words show."""

import json
import re
from functools import cache
from random import Random

import numpy as np
import pytest
from factories import write_jsonl

from common.errors import DataError
from data_pipeline import filters
from data_pipeline import prepare as preparation
from data_pipeline.filters import EvaluationItems, words_of
from data_pipeline.shards import MANIFEST
from data_preparation_utils import PreparationOptions, describe, prepare_set

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ay", "oo")]


@cache
def runs_of(text, length):
    words = re.findall(r"[a-z0-9é]+", text.lower())
    return {tuple(words[start:start + length]) for start in range(len(words) - length + 1)}


def overlap_cases(tmp_path):
    rng = Random(2)
    items = [{"ctx": " ".join(rng.choices(WORDS, k=rng.randrange(4, 30))), "label": 1,
              "endings": [" ".join(rng.choices(WORDS, k=8)) for _ in range(4)]} for _ in range(40)]
    write_jsonl(tmp_path / "items.jsonl", items)
    texts = []
    for _ in range(300):
        item = rng.choice(items)
        words = f"{item['ctx']} {rng.choice(item['endings'])}".split()
        length, around = rng.randrange(9, 18), rng.choices(WORDS, k=40)
        start = rng.randrange(max(1, len(words) - length))
        texts.append(" ".join(around[:20] + [word.upper() + "," for word in words[start:start + length]] + around[20:]))
    return items, texts


def test_an_overlap_is_what_the_sets_of_runs_share(tmp_path, monkeypatch):
    items, texts = overlap_cases(tmp_path)
    found = EvaluationItems(str(tmp_path / "items.jsonl"))
    # A text of 12 words, the shortest here, is compared as a whole.
    of_items = [set().union(*(runs_of(text, min(13, len(text.split()))) for text in (f"{item['ctx']} {ending}" for ending in item["endings"])))
                for item in items]
    overlaps = [found.overlap(words_of(text)) for text in texts]
    expected = [bool((runs_of(text, 12) | runs_of(text, 13)) & set().union(*of_items)) for text in texts]
    assert [overlap is not None for overlap in overlaps] == expected
    assert 50 < sum(overlap is not None for overlap in overlaps) < 250
    for overlap in filter(None, overlaps):
        run, line = re.fullmatch(rf"'([^']+)' is in {tmp_path}/items.jsonl:(\d+)", overlap).groups()
        assert tuple(run.split()) in of_items[int(line) - 1]
    # Where all hashes are the same, nothing is found that is not there.
    monkeypatch.setattr(filters, "hashes_of_runs", lambda words, length: np.zeros(max(0, len(words) - length + 1), np.uint64))
    assert EvaluationItems(str(tmp_path / "items.jsonl")).overlap(WORDS) is None


@pytest.mark.parametrize("kind, record", [
    ("documents", lambda text: {"text": text}),
    ("chats", lambda text: {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]}),
    ("pairs", lambda text: {"prompt": text[:20], "chosen": text[20:], "rejected": text[20:40]})])
def test_a_set_is_filtered_the_same_by_any_number_of_workers_and_after_a_stop(prepared, tmp_path, monkeypatch, kind, record):
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 4000)
    rng = Random(3)
    contexts = [" ".join(rng.choices(WORDS, k=20)) for _ in range(3)]
    write_jsonl(tmp_path / "items.jsonl", [{"ctx": context, "endings": ["a", "b", "c", "d"]} for context in contexts])
    texts = [" ".join(rng.choices(WORDS, k=60)) for _ in range(150)]
    texts[30:120:10] = [f"{text} {context.title()}" for text, context in zip(texts[30:120:10], contexts * 3)]
    texts += texts[::3]
    source = write_jsonl(tmp_path / "x.jsonl", map(record, texts))

    def run(output, workers=1, **options):
        options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0.1, workers=workers, **options)
        return prepare_set(kind, source, tmp_path / output, options)

    items = {"decontaminate": str(tmp_path / "items.jsonl")}
    calm = run("calm", **items)
    manifest = json.loads((calm / MANIFEST).read_text())
    overlaps = manifest["removed"]["overlaps"]
    assert sum(split["documents"] for split in manifest["splits"].values()) == 200 - 12
    # Nine hold an item, and three of them come again.
    assert overlaps["count"] == 12 and f"{tmp_path}/x.jsonl:31: '" in overlaps["listed"][0]
    assert f"12 {kind}" in "\n".join(describe(calm))
    # Stopped in the middle, it neither examines nor keeps anything twice.
    examined, examine = [], filters.examine

    def failing(options, chunk):
        if len(examined) == 6:
            raise DataError("planted")
        examined.append(chunk[0].where)
        return examine(options, chunk)

    monkeypatch.setattr(filters, "examine", failing)
    with pytest.raises(DataError, match="planted"):
        run("stopped", journal_seconds=0.0, **items)
    monkeypatch.setattr(filters, "examine", lambda *arguments: examined.append(arguments[1][0].where) or examine(*arguments))
    stopped = run("stopped", **items)
    assert len(examined) == len(set(examined)) > 6
    monkeypatch.setattr(filters, "examine", examine)
    for folder in (stopped, run("parallel", workers=2, **items)):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in calm.iterdir()}
    # The key counts the filter, and the content of the items, not their name.
    (tmp_path / "items.jsonl").rename(tmp_path / "renamed.jsonl")
    assert run("calm", decontaminate=str(tmp_path / "renamed.jsonl")) == calm != run("calm")
    write_jsonl(tmp_path / "renamed.jsonl", [{"ctx": contexts[0], "endings": ["a", "b", "c", "d"]}])
    changed = json.loads((run("calm", decontaminate=str(tmp_path / "renamed.jsonl")) / MANIFEST).read_text())
    assert changed["removed"]["overlaps"]["count"] == 6, "the same process reads them again"
