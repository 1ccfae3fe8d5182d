"""CORE: prompts, choice by the mean log-probability, greedy answers, and the centered mean."""

import json
import math
import random

import pytest

from extensions.dclm_core import evaluate_core, requests_of
from scripts.evaluate import read_bundle

TASKS = """icl_tasks:
- {label: colors, dataset_uri: a/colors.jsonl, num_fewshot: [1], icl_task_type: multiple_choice, continuation_delimiter: "\\nAnswer: "}
- {label: who, dataset_uri: who.jsonl, num_fewshot: [0], icl_task_type: schema}
- {label: ends, dataset_uri: ends.jsonl, num_fewshot: [2], icl_task_type: language_modeling}
"""
ITEMS = {
    "a/colors.jsonl": [{"query": f"Sky {number}?", "choices": ["blue", "bluish green"], "gold": number % 2} for number in range(4)],
    "who.jsonl": [{"context_options": ["Ann", "The dog"], "continuation": "barks.", "gold": 1},
                  {"context_options": ["Ann", "The dog"], "continuation": "sings.", "gold": 0}],
    "ends.jsonl": [{"context": f"one two {number} ", "continuation": f"end {number}"} for number in range(5)]}


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "core.yaml").write_text(TASKS)
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Task Category,Random baseline\ncolors,x,50\nwho,x,50.0\nends,x,0\nunused,x,7\n")
    for name, items in ITEMS.items():
        file = tmp_path / "eval_data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return tmp_path


class Model:
    """Characters are tokens; a continuation's log-probability comes from `logprob`, and greedy answers are those in `known`."""

    prefix_token_id, max_length = 0, 1000

    def __init__(self, logprob, known=()):
        self.logprob, self.known, self.requests = logprob, known, []

    def tok_encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [*map(ord, text)]

    def _loglikelihood_tokens(self, requests):
        texts = ["".join(map(chr, each)) for _, *pair in requests for each in pair]
        self.requests += zip(texts[::2], texts[1::2])
        return [(self.logprob(*pair), pair[1] in self.known) for pair in zip(texts[::2], texts[1::2])]


def test_prompts_have_their_examples_and_split_where_the_options_differ(bundle):
    tasks = read_bundle(bundle, None)
    model = Model(lambda *_: 0.0)
    evaluate_core(model, tasks)
    colors, who, ends = (task["items"] for task in tasks)
    other = random.Random(1234).sample([1, 2, 3], 1)[0]  # the example of the first item
    example = f"{colors[other]['query']}\nAnswer: {colors[other]['choices'][colors[other]['gold']]}"
    context = f"\0{example}\n\n{colors[0]['query']}\nAnswer: blu"
    assert model.requests[:2] == [(context, "e"), (context, "ish green")]
    assert model.requests[8:10] == [("\0Ann", f" {who[0]['continuation']}"), ("\0The dog", f" {who[0]['continuation']}")]
    shown = [ends[number] for number in random.Random(1234 + 4).sample([0, 1, 2, 3], 2)]
    lines = [f"{item['context'].strip()} {item['continuation']}\n\n" for item in shown]
    assert model.requests[-1] == (f"\0{lines[0]}{lines[1]}{ends[4]['context'].strip()}", f" {ends[4]['continuation']}")


def test_core_is_the_mean_of_the_centered_accuracies(bundle):
    """By the mean per token `bluish green` wins with -10 over 9 tokens, against -2 over one; by the sum it would lose."""
    model = Model(lambda context, continuation: {"e": -2.0, "ish green": -10.0}.get(continuation, -len(context)),
                  known=(" end 1", " end 3", " end 4"))
    metrics, rows = evaluate_core(model, read_bundle(bundle, None))
    assert [row.value for row in rows[:3]] == [0.5, 0.5, 0.6]  # always the second, always the shorter context, 3 of 5
    assert [metrics[f"core_{name}_centered"] for name in ("colors", "who", "ends")] == pytest.approx([0, 0, 0.6])
    assert metrics["core"] == pytest.approx(0.2) and rows[-1][:3] == ("CORE", "centered", metrics["core"]) and rows[-1].n == 3
    errors = [2 * math.sqrt(0.25 / 3), 2 * math.sqrt(0.25 / 1), math.sqrt(0.24 / 4)]
    assert metrics["core_stderr"] == pytest.approx(math.hypot(*errors) / 3)
    worse, _ = evaluate_core(Model(lambda context, continuation: -len(context + continuation)), read_bundle(bundle, None))
    assert worse["core"] == pytest.approx((0 + 0 + 0) / 3) and worse["core_colors_acc"] == 0.5


def test_an_option_that_begins_another_one_still_has_a_token():
    task = {"icl_task_type": "multiple_choice", "num_fewshot": [0], "items": [{"query": "q", "choices": ["a", "ab"], "gold": 0}]}
    assert [len(request[2]) for request in requests_of(task, 0, Model(None))] == [1, 1]
