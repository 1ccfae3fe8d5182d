"""Near-duplicates are those that all pairs of texts show, and overlaps those that all runs of words show."""

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
from data_pipeline.filters import HASHES, EvaluationItems, NearDuplicates, signature_of, words_of
from data_pipeline.shards import MANIFEST
from data_preparation_utils import PreparationOptions, describe, prepare_set

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ay", "oo")]


@cache
def runs_of(text, length):
    words = re.findall(r"[a-z0-9é]+", text.lower())
    return {tuple(words[start:start + length]) for start in range(len(words) - length + 1)}


def jaccard(text, other):
    first, second = runs_of(text, 5), runs_of(other, 5)
    return len(first & second) / len(first | second)


def variants(count, seed=0):
    """Texts, most of them made from an earlier one by changing some of its words, or its letter case and punctuation."""
    dice, texts = Random(seed), []
    for _ in range(count):
        if not texts or dice.random() < 0.3:
            texts.append(" ".join(dice.choices(WORDS, k=dice.randrange(60, 300))))
            continue
        words, share = dice.choice(texts).split(" "), dice.choice([0, 0.005, 0.02, 0.05, 0.1, 0.4])
        words = [dice.choice(WORDS) if dice.random() < share else word for word in words]
        texts.append(" ".join(word.title() + dice.choice(["", ",", " -", "!"]) for word in words))
    return texts


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_what_is_removed_is_what_all_pairs_show(threshold):
    """Apart from pairs so near the threshold that an estimate cannot tell (three standard errors)."""
    margin = 3 * np.sqrt(threshold * (1 - threshold) / HASHES)
    seen, kept, counts = NearDuplicates(threshold), [], {True: 0, False: 0}
    for text in variants(300, seed=1):
        similar = max((jaccard(text, other) for other in kept), default=0)
        found = seen.add(signature_of(words_of(text)))
        if abs(similar - threshold) > margin:
            assert (found is not None) == (similar > threshold), (similar, found)
            counts[found is not None] += 1
        if found is None:
            kept.append(text)
        else:
            assert abs(found - similar) < 5 * np.sqrt(0.25 / HASHES)
    assert min(counts.values()) > 30 and seen.count == len(kept)


@pytest.mark.parametrize("threshold", [0.5, 0.75, 0.8])
def test_bytes_that_agree_by_chance_do_not_make_a_duplicate(threshold):
    """Of P agreeing bytes, (P - 1/256) / (1 - 1/256) is the similarity: a byte of two different minima agrees once in 256."""
    first = np.arange(HASHES, dtype=np.uint8)
    for agreeing in range(round(HASHES * threshold) - 2, HASHES + 1):
        other = first + np.where(np.arange(HASHES) < agreeing, 0, 1).astype(np.uint8)
        seen = NearDuplicates(threshold)
        assert seen.add(first) is None
        similarity, found = (agreeing / HASHES - 1 / 256) / (1 - 1 / 256), seen.add(other)
        assert found == (pytest.approx(similarity) if similarity >= threshold else None), agreeing


def test_short_and_odd_texts_are_duplicates_only_of_the_same_words():
    seen = NearDuplicates(0.8)
    texts = ["yes", "Yes!", "no", "...", "!?", "...", "one two three", "one two four", "漢字仮名交じり文です", "漢字仮名交じり文だ!"]
    found = [seen.add(signature_of(words_of(text))) is None for text in texts]
    assert found == [True, False, True, True, True, False, True, True, True, True]
    assert words_of("It's 漢字_Éa") == ["it", "s", "漢", "字", "éa"]
    long = " ".join(Random(0).choices(WORDS, k=5000))
    assert seen.add(signature_of(words_of(long))) is None and seen.add(signature_of(words_of(long + " end"))) > 0.99


def test_a_table_that_grew_is_the_one_that_its_signatures_make():
    seen, dice = NearDuplicates(0.8), np.random.default_rng(0)
    signatures = dice.integers(0, 256, (5000, HASHES), dtype=np.uint8)
    signatures[:, :7] = signatures[0, :7]  # one set that overflows
    for signature in signatures:
        assert seen.add(signature) is None
    again = NearDuplicates(0.8, seen.signatures[:seen.count].copy())
    assert seen.sets == again.sets > 256 and (seen.table == again.table).all()
    assert all(seen.add(signature) == 1 for signature in signatures[::97])


def overlap_cases(tmp_path):
    dice = Random(2)
    items = [{"ctx": " ".join(dice.choices(WORDS, k=dice.randrange(4, 30))), "label": 1,
              "endings": [" ".join(dice.choices(WORDS, k=8)) for _ in range(4)]} for _ in range(40)]
    write_jsonl(tmp_path / "items.jsonl", items)
    texts = []
    for _ in range(300):
        item = dice.choice(items)
        words = f"{item['ctx']} {dice.choice(item['endings'])}".split()
        length, around = dice.randrange(9, 18), dice.choices(WORDS, k=40)
        start = dice.randrange(max(1, len(words) - length))
        texts.append(" ".join(around[:20] + [word.upper() + "," for word in words[start:start + length]] + around[20:]))
    return items, texts


def test_an_overlap_is_what_the_sets_of_runs_share(tmp_path, monkeypatch):
    items, texts = overlap_cases(tmp_path)
    found = EvaluationItems(str(tmp_path / "items.jsonl"))
    of_items = [set().union(*(runs_of(f"{item['ctx']} {ending}", 13) for ending in item["endings"])) for item in items]
    overlaps = [found.overlap(words_of(text)) for text in texts]
    assert [overlap is not None for overlap in overlaps] == [bool(runs_of(text, 13) & set().union(*of_items)) for text in texts]
    assert 50 < sum(overlap is not None for overlap in overlaps) < 250
    for overlap in filter(None, overlaps):
        run, line = re.fullmatch(rf"'([^']+)' is in {tmp_path}/items.jsonl:(\d+)", overlap).groups()
        assert tuple(run.split()) in of_items[int(line) - 1]
    # Where all hashes are the same, nothing is found that is not there.
    monkeypatch.setattr(filters, "hashes_of_runs", lambda words, length: np.zeros(max(0, len(words) - length + 1), np.uint64))
    assert EvaluationItems(str(tmp_path / "items.jsonl")).overlap(WORDS) is None


def test_items_of_any_columns_are_taken_and_those_without_words_refused(tmp_path):
    run = "a b c d e f g h i j k l m"
    for record in ({"question": run}, {"turns": [{"content": run.upper()}], "n": 1}):
        (tmp_path / "items.json").write_text(json.dumps([{"x": "y"}, record]))
        found = EvaluationItems(str(tmp_path / "items.json"))
        assert "items.json:1 (item 2)" in found.overlap(words_of(f"so: {run}.")) and found.overlap(run.split()[1:]) is None
    (tmp_path / "items.json").write_text('[{"ctx": "too short", "endings": ["is this"]}]')
    with pytest.raises(DataError, match="--decontaminate .*items.json: no item has a text with 13 words"):
        EvaluationItems(str(tmp_path / "items.json"))


@pytest.mark.parametrize("kind, record", [
    ("documents", lambda text: {"text": text}),
    ("chats", lambda text: {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]}),
    ("pairs", lambda text: {"prompt": text[:20], "chosen": text[20:], "rejected": text[20:40]})])
def test_a_set_is_filtered_the_same_by_any_number_of_workers_and_after_a_stop(prepared, tmp_path, monkeypatch, kind, record):
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 4000)
    dice = Random(3)
    items = [{"ctx": " ".join(dice.choices(WORDS, k=20)), "endings": ["a", "b", "c", "d"]} for _ in range(3)]
    write_jsonl(tmp_path / "items.jsonl", items)
    texts = [" ".join(dice.choices(WORDS, k=60)) for _ in range(150)]
    texts[30:120:10] = [f"{text} {item['ctx'].title()}" for text, item in zip(texts[30:120:10], items * 3)]
    texts += texts[::3]
    source = write_jsonl(tmp_path / "x.jsonl", map(record, texts))

    def run(output, workers=1, **options):
        options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0.1, workers=workers, **options)
        return prepare_set(kind, source, tmp_path / output, options)

    both = {"near_duplicates": 0.8, "decontaminate": str(tmp_path / "items.jsonl")}
    calm = run("calm", **both)
    manifest = json.loads((calm / MANIFEST).read_text())
    overlaps, repeated = (manifest["removed"][reason] for reason in ("overlaps", "near_duplicates"))
    assert sum(split["documents"] for split in manifest["splits"].values()) == 141
    # Nine hold an item, and three of them come again; the other 47 that come again are near-duplicates.
    assert (overlaps["count"], repeated["count"]) == (12, 47) and f"{tmp_path}/x.jsonl:31: '" in overlaps["listed"][0]
    assert repeated["listed"][0] == f"{tmp_path}/x.jsonl:151: 1.00 similar to an earlier one"
    assert f"47 {kind}" in "\n".join(describe(calm)) and f"12 {kind}" in "\n".join(describe(calm))
    # Stopped in the middle, it neither examines nor keeps anything twice.
    examined, examine = [], filters.examine

    def failing(options, chunk):
        if len(examined) == 6:
            raise DataError("planted")
        examined.append(chunk[0].where)
        return examine(options, chunk)

    monkeypatch.setattr(filters, "examine", failing)
    with pytest.raises(DataError, match="planted"):
        run("stopped", journal_seconds=0.0, **both)
    monkeypatch.setattr(filters, "examine", lambda *arguments: examined.append(arguments[1][0].where) or examine(*arguments))
    stopped = run("stopped", **both)
    assert len(examined) == len(set(examined)) > 6
    monkeypatch.setattr(filters, "examine", examine)
    for folder in (stopped, run("parallel", workers=2, **both)):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in calm.iterdir()}
    # The key counts a filter that is on, and the content of the items, not their name.
    (tmp_path / "items.jsonl").rename(tmp_path / "renamed.jsonl")
    assert run("calm", near_duplicates=0.8, decontaminate=str(tmp_path / "renamed.jsonl")) == calm
    names = {run("calm", near_duplicates=near).name for near in (0.0, 0.8, 0.9)} | {calm.name}
    assert len(names) == 4
