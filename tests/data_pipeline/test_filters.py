"""Which items are held out, and which overlap with evaluation items."""

import json
import re
from functools import cache
from itertools import count
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from factories import prepared_set, write_jsonl

from common.errors import DataError
from data_pipeline import filters
from data_pipeline import prepare as preparation
from data_pipeline.filters import EvaluationItems, words_of
from data_pipeline.prepare import SplitPlan, cut_tails, plan_split
from data_pipeline.shards import MANIFEST
from data_pipeline.sources import Document
from data_pipeline.workers import position_of
from extensions.preparation_flags import describe

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ay", "oo")]


@cache
def runs_of(text, length):
    words = re.findall(r"[a-z0-9é]+", text.lower())
    return {tuple(words[start:start + length]) for start in range(len(words) - length + 1)}


def test_an_overlap_is_what_the_sets_of_runs_share(tmp_path, monkeypatch):
    rng, texts = Random(2), []
    items = [{"ctx": " ".join(rng.choices(WORDS, k=rng.randrange(4, 30))), "label": 1,
              "endings": [" ".join(rng.choices(WORDS, k=8)) for _ in range(4)]} for _ in range(40)]
    write_jsonl(tmp_path / "items.jsonl", items)
    for _ in range(300):
        item = rng.choice(items)
        words = f"{item['ctx']} {rng.choice(item['endings'])}".split()
        length, around = rng.randrange(9, 18), rng.choices(WORDS, k=40)
        start = rng.randrange(max(1, len(words) - length))
        texts.append(" ".join(around[:20] + [word.upper() + "," for word in words[start:start + length]] + around[20:]))
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

    def run(output, **options):
        return prepared_set(kind, source, prepared.tokenizer, tmp_path / output, **options)

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


def keys(how_many, lowest=0.05, start=0):
    """Different keys whose positions are at least `lowest`, so that the usual share holds out none of them."""
    found = (f"key {number}" for number in count(start) if position_of(f"key {number}") >= lowest)
    return [next(found) for _ in range(how_many)]


def items(*openings):
    return [SimpleNamespace(split_key=key, whole_key=f"whole {key} {number}") for key, times in openings for number in range(times)]


def plan(examples, requested=0.05, kind="chats"):
    return plan_split(SimpleNamespace(name=kind), examples, requested)


@pytest.mark.parametrize("others, answers, is_common", [(184, 16, False), (183, 17, True), (3975, 25, False), (3974, 26, True)])
def test_an_opening_is_common_beyond_sixteen_answers_and_an_eighth_of_what_is_held_out(others, answers, is_common):
    opening, *more = keys(1 + others)
    assert plan(items((opening, answers), *((key, 1) for key in more))).common == [position_of(opening)] * is_common


def test_one_opening_of_few_answers_is_common_and_alone_holds_out_nothing():
    assert plan(items((keys(1)[0], 10))).common and not plan(items((keys(1)[0], 10)), kind="").common
    assert plan(items((keys(1)[0], 1)), requested=None) == SplitPlan(0.0, [position_of(keys(1)[0])])
    assert plan(items((keys(1, 0.3)[0], 1)), requested=0.3, kind="").fraction == 0.3


def test_a_large_set_keeps_its_common_openings_and_reserves_what_others_hold_out():
    opening, *more = keys(4001)
    assert plan(items((opening, 1000), *((key, 1) for key in more)), requested=None) == SplitPlan(0.005, [position_of(opening)], 0.05)
    for kind, repeats in (("", 2), ("", 6000), ("pairs", 2)):
        assert plan(items((opening, repeats), *((key, 1) for key in more[:3999])), None, kind) == SplitPlan(0.005, [], 0.05), "repeats make no set small"
    assert plan(items((opening, 2), *((key, 1) for key in more[:3998])), None, "") != SplitPlan(0.005, [], 0.05)


@pytest.mark.parametrize("size, requested, rank", [(20, 0.05, 1), (60, 0.05, 3), (70, 0.05, 3), (75, 0.05, 4), (60, None, 3)])
def test_without_a_key_in_the_share_as_many_are_held_out_as_come_nearest(size, requested, rank):
    chosen = keys(size)
    ordered = sorted(map(position_of, chosen))
    assert plan(items(*((key, 1) for key in chosen)), requested).fraction == sum(ordered[rank - 1:rank + 1]) / 2


def test_of_few_documents_the_ends_are_held_out_and_of_a_part_of_many_what_the_share_gives():
    assert [plan(items(*((key, 1) for key in keys(size))), None, kind="").fraction is None for size in (19, 20)] == [True, False]
    assert [plan(items(*((key, 1) for key in keys(size))), 0.05, kind="").fraction == 0.05 for size in (399, 400)] == [False, True]


@pytest.mark.parametrize("ends, cut", [({81: "\n\n", 88: "\n"}, 83), ({85: "\n"}, 86), ({82: "\n", 87: "\n"}, 88), ({82: "\n\n", 86: "\n\n"}, 88),
                                       ({}, 90), ({75: "\n\n"}, 90), ({91: "\n"}, 90)])
def test_a_document_is_cut_at_the_last_end_of_a_paragraph_or_line_in_its_ninth_tenth(ends, cut):
    text = "x" * 100
    for place, end in ends.items():
        text = text[:place] + end + text[place + len(end):]
    assert [*cut_tails([Document("x:1", text)])] == [Document("x:1", text[:cut], "train"), Document("x:1", text[cut:], "validation")]
    assert [*cut_tails([Document("x:1", 90 * "x" + 10 * " ")])] == [Document("x:1", 90 * "x", "train")], "a blank end is nothing"
