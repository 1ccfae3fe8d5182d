"""The embedded sample: story templates, and stories, items, questions and preference pairs made from them.

A story combines *facts* (hero, colour, thing, place ...) with a *plot*. A hash splits the facts: held-out
items, questions and pairs use facts that no training text contains. A seed gives the same bytes on every
machine and Python version, because only `random()` of `random.Random` is used.
"""

import itertools
import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Templates have slots for the facts of a story, such as {hero} and {colour}, and for the hero's pronouns:
# {she}, {her} (possessive) and {them} (object). Words that may follow an article begin with a consonant. An
# ending has no pronoun, which would reveal the person, and uses only facts that every version of its plot
# mentions. A scene after the first sentence with the place repeats it: a fact mentioned once is learned late.
TEXTS = json.loads(Path(__file__).with_name("plots.json").read_text(encoding="utf-8"))
WORDS = {name: words.split() for name, words in TEXTS["words"].items()}
PEOPLE = WORDS["girls"] + WORDS["boys"]
KIND, UNKIND, QUESTIONS, WHAT_THEN = (TEXTS[name] for name in ("kind", "unkind", "questions", "what_then"))
HELD_OUT_MODULUS = 10  # one in this many combinations of facts is held out


@dataclass(frozen=True)
class Plot:
    """A sequence of events, with alternative sentences for each beat and for the ending."""

    titles: Sequence[str]
    beats: Sequence[Sequence[str]]
    endings: Sequence[str]
    questions: Sequence[Sequence[str]]  # (question, answer) templates


PLOTS = [Plot(**plot) for plot in TEXTS["plots"]]


@dataclass(frozen=True)
class Facts:
    """The facts of a story. The other_* facts are distractors."""

    hero: str
    friend: str
    colour: str
    thing: str
    place: str
    other_colour: str
    other_thing: str
    other_place: str
    animal: str
    weather: str
    time: str

    @property
    def held_out(self) -> bool:
        key = " ".join((self.hero, self.colour, self.thing, self.place))
        return zlib.crc32(key.encode()) % HELD_OUT_MODULUS == 0


@dataclass(frozen=True)
class Story:
    """A story: a title, sentences, and an ending that follows from them."""

    plot: Plot
    facts: Facts
    title: str
    sentences: tuple[str, ...]
    ending_template: str

    @property
    def ending(self) -> str:
        return tell(self.ending_template, self.facts)

    @property
    def body(self) -> str:
        return " ".join(self.sentences)

    @property
    def text(self) -> str:
        return f"{self.title}: {self.body} {self.ending}"


# The values of each slot, and the slot that it is most easily confused with
POOLS = {"hero": PEOPLE, "friend": PEOPLE, "animal": WORDS["animals"], "weather": WORDS["weathers"],
         "time": WORDS["times"], **{f"{prefix}{name}": WORDS[f"{name}s"]
                                    for name in ("colour", "thing", "place") for prefix in ("", "other_")}}
RIVALS = {"hero": "friend", "friend": "hero", "colour": "other_colour", "other_colour": "colour",
          "thing": "other_thing", "other_thing": "thing", "place": "other_place"}
PRONOUNS = {True: {"she": "she", "She": "She", "her": "her", "them": "her"},
            False: {"she": "he", "She": "He", "her": "his", "them": "him"}}


class StableRandom:
    """Random choices that are stable across Python versions, which guarantee only `random()`."""

    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def choose(self, values: Sequence):
        return values[int(self.random() * len(values))]

    def several(self, values: Sequence, count: int) -> list:
        left = list(values)
        return [left.pop(int(self.random() * len(left))) for _ in range(count)]


def slots_of(template: str) -> list[str]:
    return list(dict.fromkeys(slot for slot in re.findall(r"{(\w+)}", template) if slot in POOLS))


def tell(template: str, facts: Facts) -> str:
    return template.format_map(vars(facts) | PRONOUNS[facts.hero in WORDS["girls"]])


def draw_facts(rng: StableRandom, held_out: bool) -> Facts:
    while True:
        hero, friend = rng.several(PEOPLE, 2)
        colour, other_colour = rng.several(POOLS["colour"], 2)
        thing, other_thing = rng.several(POOLS["thing"], 2)
        place, other_place = rng.several(POOLS["place"], 2)
        facts = Facts(hero, friend, colour, thing, place, other_colour, other_thing, other_place,
                      *(rng.choose(POOLS[name]) for name in ("animal", "weather", "time")))
        if facts.held_out == held_out:
            return facts


def draw_story(rng: StableRandom, held_out: bool) -> Story:
    facts, plot = draw_facts(rng, held_out), rng.choose(PLOTS)
    title = tell(rng.choose(plot.titles), facts)
    templates = [rng.choose(beat) for beat in plot.beats]
    scene = rng.choose(TEXTS["scenes"])
    first_place = next((index for index, template in enumerate(templates) if "{place}" in template), None)
    if first_place is not None:
        templates.insert(first_place + 1, scene)
    sentences = tuple(tell(template, facts) for template in templates)
    return Story(plot, facts, title, sentences, rng.choose(plot.endings))


def draw_epilogue(rng: StableRandom, facts: Facts, kinds: Sequence[Sequence[str]] = (KIND, UNKIND)) -> str:
    """Draw an epilogue of the story; each entry of `kinds` is equally probable."""
    return tell(rng.choose(rng.choose(kinds)), facts)


def documents(count: int, seed: int) -> Iterator[str]:
    """Yield training texts: title, colon, story, and in half of them an epilogue."""
    rng = StableRandom(seed)
    for _ in range(count):
        story = draw_story(rng, held_out=False)
        yield story.text + (" " + draw_epilogue(rng, story.facts) if rng.random() < 0.5 else "")


def wrong_endings(rng: StableRandom, story: Story, slot: str) -> list[str]:
    """Return three endings, each with another wrong value of one slot, if possible the rival's."""
    mentioned = {getattr(story.facts, other) for other in slots_of(story.ending_template)
             if POOLS[other] is POOLS[slot]}
    others = [value for value in POOLS[slot] if value not in mentioned]
    rival = getattr(story.facts, RIVALS[slot])
    values = [rival] if rival in others and re.search(rf"\b{rival}\b", story.body) else []
    values += rng.several([value for value in others if value not in values], 3 - len(values))
    return [tell(story.ending_template, replace(story.facts, **{slot: value})) for value in values]


def items(count: int, seed: int) -> Iterator[dict]:
    """Yield items in HellaSwag's schema, whose endings differ in a person, colour, thing or place."""
    rng = StableRandom(seed)
    for index in range(count):
        story = draw_story(rng, held_out=True)
        slot = rng.choose([slot for slot in slots_of(story.ending_template) if slot in RIVALS])
        endings, label = wrong_endings(rng, story, slot), rng.choose(range(4))
        endings.insert(label, story.ending)
        yield {"ind": index, "activity_label": story.title, "ctx": story.body, "endings": endings,
               "label": label, "source_id": f"sample~{slot.removeprefix('other_')}"}


def chat(prompt: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def questions(count: int, seed: int, held_out: bool) -> Iterator[dict]:
    """Yield chats: a story with a question, and the only correct answer."""
    rng = StableRandom(seed)
    for _ in range(count):
        story = draw_story(rng, held_out)
        question, answer = rng.choose((*story.plot.questions, *QUESTIONS))
        yield chat(f"{story.text}\n\n{tell(question, story.facts)}", tell(answer, story.facts))


def prompts(count: int, seed: int) -> Iterator[dict]:
    """Yield questions about training facts for rewards, with their answers."""
    for record in questions(count, seed, held_out=False):
        question, answer = record["messages"]
        yield {"prompt": question["content"], "answer": answer["content"]}


def epilogues(count: int, seed: int, kinds: Sequence[Sequence[str]] = (KIND, UNKIND)) -> Iterator[dict]:
    """Yield chats: a story, and a kind or unkind epilogue, so that a model learns both."""
    rng = StableRandom(seed)
    for _ in range(count):
        story = draw_story(rng, held_out=False)
        yield chat(f"{story.text}\n\n{WHAT_THEN}", draw_epilogue(rng, story.facts, kinds))


def preferences(count: int, seed: int, held_out: bool) -> Iterator[dict]:
    """Yield preference pairs: a story, the kind epilogue (chosen) and the unkind one (rejected)."""
    rng = StableRandom(seed)
    for _ in range(count):
        story = draw_story(rng, held_out)
        chosen, rejected = (tell(rng.choose(epilogue), story.facts) for epilogue in (KIND, UNKIND))
        yield {"prompt": f"{story.text}\n\n{WHAT_THEN}", "chosen": chosen, "rejected": rejected}


def texts() -> Iterator[str]:
    """Yield an endless mix of all kinds of text for tokenizer training."""
    for number in itertools.count(100):
        yield from documents(10, number)
        for record in (*questions(5, number, held_out=False), *epilogues(5, number)):
            yield from (message["content"] for message in record["messages"])


def parts(stories: int) -> dict[str, Iterable[dict]]:
    """Return the records of each file of the sample by name. Training uses no `held-out` file."""
    chats, held_out = stories // 5, min(500, stories // 8)
    # Most epilogues are unkind, so that DPO has something to change.
    question_chats = questions(chats, 3, held_out=False)
    epilogue_chats = epilogues(chats, 4, (KIND, UNKIND, UNKIND, UNKIND))
    return {
        "stories.jsonl": ({"text": text} for text in documents(stories, seed=1)),
        "items.jsonl": items(held_out, seed=2),
        "questions.jsonl": (record for pair in zip(question_chats, epilogue_chats) for record in pair),
        "questions-held-out.jsonl": questions(held_out, 5, held_out=True),
        "preferences.jsonl": preferences(chats // 2, 6, held_out=False),
        "preferences-held-out.jsonl": preferences(held_out, 7, held_out=True),
        "prompts.jsonl": prompts(chats, 8),
    }


def write_jsonl(path: Path, records: Iterable[dict]) -> int:
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_bytes("".join(lines).encode("ascii"))
    return len(lines)
