"""The embedded sample: the same bytes everywhere, items that follow from their stories, and nothing to be had without them."""

import hashlib
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from common.errors import DataError
from scripts import make_sample
from scripts.sample import stories

ROOT = Path(__file__).resolve().parents[2]
COUNT = 2000
# Of 2,000 guesses at four endings, 25 % +- 4 standard deviations.
CHANCE = pytest.approx(0.25, abs=0.039)


@pytest.fixture(scope="module")
def some_items() -> list[dict]:
    return list(stories.items(COUNT, seed=2))


@pytest.fixture(scope="module")
def some_documents() -> list[str]:
    return list(stories.documents(COUNT, seed=1))


def digest(records) -> str:
    return hashlib.sha256(json.dumps(list(records)).encode()).hexdigest()[:16]


def test_the_same_seed_gives_the_same_bytes_on_every_machine():
    assert digest(stories.documents(100, 1)) == "b6c7265713077be8"
    assert digest(stories.items(100, 2)) == "462834cd4f57829c"
    assert digest(stories.questions(100, 3, held_out=False)) == "7e80b1f636e4821c"
    assert digest(stories.epilogues(100, 4)) == "913324e86d5ecfe6"
    assert digest(stories.preferences(100, 6, held_out=False)) == "0674d2a972f1f8c6"
    assert digest(islice(stories.texts(), 100)) == "f8ad1411f33beb66"


def test_the_four_endings_differ_in_one_value_and_only_the_right_one_is_the_storys(some_items):
    """The right value stands in the context; a wrong one does not, or it is the rival's. No story calls a wrong value right."""
    rivals = 0
    for index, item in enumerate(some_items):
        assert set(item) == {"ind", "activity_label", "ctx", "endings", "label", "source_id"} and item["ind"] == index
        assert len(set(item["endings"])) == 4 and not any(ending in item["ctx"] for ending in item["endings"])
        words = [re.findall(r"\w+", ending) for ending in item["endings"]]
        assert len({len(each) for each in words}) == 1
        differing = [each for each in zip(*words) if len(set(each)) > 1]
        pool = stories.POOLS[item["source_id"].split("~")[1]]
        assert differing and all(len(set(each)) == 4 and set(each) <= set(pool) for each in differing)
        messages = [value in re.findall(r"\w+", item["ctx"]) for value in differing[0]]
        assert messages[item["label"]]
        assert sum(messages) <= 2
        rivals += sum(messages) == 2
    assert rivals > COUNT / 4, "too few items that need more than having read the names"


BASELINES = {
    "longest": lambda endings, counts: [len(ending) for ending in endings],
    "shortest": lambda endings, counts: [-len(ending) for ending in endings],
    "most frequent words": lambda endings, counts: [sum(counts[word] for word in re.findall(r"\w+", e)) for e in endings],
    "rarest words": lambda endings, counts: [-sum(counts[word] for word in re.findall(r"\w+", e)) for e in endings],
    "most like the others": lambda endings, counts: [sum(len(set(a.split()) & set(b.split())) for b in endings) for a in endings],
    "first in the alphabet": lambda endings, counts: [-sorted(endings).index(ending) for ending in endings],
}


def test_without_the_story_the_right_ending_cannot_be_guessed(some_items, some_documents):
    word_counts = Counter(word for text in some_documents for word in re.findall(r"\w+", text))
    for name, baseline in BASELINES.items():
        right = 0.0
        for item in some_items:
            scores = baseline(item["endings"], word_counts)
            best = [index for index, score in enumerate(scores) if score == max(scores)]
            right += (item["label"] in best) / len(best)
        assert right / COUNT == CHANCE, name


def facts_in(records) -> set[str]:
    """The combinations of facts that a generator tells, caught as it draws them."""
    seen = set()

    def watched(rng, held_out):
        facts = original(rng, held_out)
        seen.add(" ".join((facts.hero, facts.colour, facts.thing, facts.place)))
        return facts

    original, stories.draw_facts = stories.draw_facts, watched
    try:
        list(records)
    finally:
        stories.draw_facts = original
    return seen


def test_held_out_facts_are_never_trained_on():
    """In the files of the sample, the questions of both kinds, and the tokenizer's texts."""
    files = {name: facts_in(records) for name, records in stories.parts(4 * COUNT).items()}
    measured = {"items.jsonl", "questions-held-out.jsonl", "preferences-held-out.jsonl"}
    held_out = set().union(*(files.pop(name) for name in measured))
    trained = facts_in(islice(stories.texts(), 2000)).union(*files.values())
    assert len(trained) > 4000 and len(held_out) > 1000
    assert not trained & held_out


def test_what_is_not_the_sample_is_neither_replaced_nor_a_traceback(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("a file")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    for folder, words in (("data/sample", "is not a folder.*choose another --folder"), ("own", "move them")):
        monkeypatch.setattr("sys.argv", ["make_sample.py", "--stories", "8", "--folder", str(tmp_path / folder)])
        with pytest.raises(DataError, match=words):
            make_sample.main()
    assert (tmp_path / "own" / "notes.txt").read_text() == "mine"
