"""CORE, the metric of DCLM and nanochat: centered accuracy over 22 tasks, from nanochat's bundle of items.

Source: Li et al. 2024 (arXiv:2406.11794); prompts and scores as in karpathy/nanochat 92d63d4, core_eval.py.
"""

import random
from os.path import commonprefix
from typing import Any

from checkpoint.schema import error_of_share
from evaluation.during_run import Row


def requests_of(task: dict[str, Any], index: int, model: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Return an item's options as lm-evaluation-harness scores them: (unused, context, continuation)."""
    items, kind = task["items"], task["icl_task_type"]

    def options(item: dict[str, Any]) -> list[str]:
        pairs = {"multiple_choice": lambda: [(item["query"], choice) for choice in item["choices"]],
                 "schema": lambda: [(context, item["continuation"]) for context in item["context_options"]],
                 "language_modeling": lambda: [(item["context"].strip(), item["continuation"])]}[kind]()
        return [task.get("continuation_delimiter", " ").join(pair) for pair in pairs]

    others = [*range(index), *range(index + 1, len(items))]
    shown = random.Random(1234 + index).sample(others, task["num_fewshot"][0])
    examples = [options(items[other])[items[other].get("gold", 0)] for other in shown]
    texts = ["\n\n".join([*examples, option]) for option in options(items[index])]
    prompt = [each.removesuffix(items[index]["continuation"]).strip() for each in texts if len(texts) == 1]
    ids = [[model.prefix_token_id, *model.tok_encode(text, add_special_tokens=False)]
           for text in texts + prompt]
    # Options share their context; those of a schema share their continuation.
    shared = len(commonprefix([each[::-1] for each in ids] if kind == "schema" else ids))
    starts = [len(each) - shared if kind == "schema" else min(shared, len(each) - 1) for each in ids]
    return [(("", ""), each[:start], each[start:]) for each, start, _ in zip(ids, starts, texts)]


def evaluate_core(model: Any, tasks: list[dict]) -> tuple[dict[str, float], list[Row]]:
    """Return metrics and table rows of a model of lm-evaluation-harness; the last row is CORE.

    A task is that of core.yaml, with its `items` and its `chance`, the accuracy of guessing.
    """
    metrics, rows, variance = {}, [], 0.0
    for task in tasks:
        n, scale, right = len(task["items"]), 1 - task["chance"], 0
        requests = [requests_of(task, index, model) for index in range(n)]
        scores = iter(model._loglikelihood_tokens([option for options in requests for option in options]))
        for item, options in zip(task["items"], requests):
            found = [next(scores) for _ in options]
            means = [score / len(continuation) for (score, _), (*_, continuation) in zip(found, options)]
            right += means.index(max(means)) == item["gold"] if len(found) > 1 else found[0][1]
        error = error_of_share(right / n, n)
        variance += (error / scale / len(tasks)) ** 2
        metrics |= {f"core_{task['label']}_acc": right / n,
                    f"core_{task['label']}_centered": (right / n - task["chance"]) / scale}
        rows.append(Row(task["label"], "acc", right / n, error, task["chance"], n))
    core = sum(value for name, value in metrics.items() if name.endswith("_centered")) / len(tasks)
    rows.append(Row("CORE", "centered", core, variance ** 0.5, 0.0, len(tasks)))
    return metrics | {"core": core, "core_stderr": variance ** 0.5, "core_n": len(tasks)}, rows
