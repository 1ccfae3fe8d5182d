"""The embedded sample: the same bytes everywhere, items that follow from their stories, and nothing to be had without them."""

import hashlib
import json
import re
from itertools import islice
from random import Random

from scripts.sample import preferences, stories

COUNT = 2000


def digest(records) -> str:
    return hashlib.sha256(json.dumps(list(records)).encode()).hexdigest()[:16]


def test_the_same_seed_gives_the_same_bytes_on_every_machine():
    assert digest(stories.documents(100, 1)) == "b6c7265713077be8"
    assert digest(stories.items(100, 2)) == "462834cd4f57829c"
    assert digest(stories.questions(100, 3, held_out=False)) == "7e80b1f636e4821c"
    assert digest(stories.epilogues(100, 4)) == "913324e86d5ecfe6"
    assert digest(stories.preferences(100, 6, held_out=False)) == "0674d2a972f1f8c6"
    assert digest(islice(stories.texts(), 100)) == "f8ad1411f33beb66"


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


def test_neither_a_layout_nor_a_length_is_right_in_more_than_half_of_the_pairs():
    records = preferences.pairs(preferences.WORDS, 40, Random(0))
    assert sorted((each["chosen"].count("\n"), each["rejected"].count("\n")) for each in records) == [(0, 2)] * 20 + [(2, 0)] * 20
    for each in records:
        words = set(re.findall(r"\w+", each["chosen"]))
        assert words == set(re.findall(r"\w+", each["rejected"])) and words <= set(re.findall(r"\w+", each["prompt"]))
        assert each["prompt"].endswith("column." if "\n" in each["chosen"] else "row.")
        assert preferences.words(each["prompt"], each["rejected"].upper(), {"answer": each["chosen"]}) == 1
