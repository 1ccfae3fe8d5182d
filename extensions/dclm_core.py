"""CORE, the metric of DCLM and nanochat: centered accuracy over 22 tasks, from nanochat's bundle of items.

Prompts, examples and scores are those of karpathy/nanochat, nanochat/core_eval.py at 92d63d4.
Source: Li et al. 2024 (arXiv:2406.11794).
"""

import csv
import json
import random
from os.path import commonprefix
from pathlib import Path
from typing import Any, Optional

import yaml

from checkpoint.item_scores import error_of_share
from common.errors import DataError
from evaluation.during_run import Row

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"


def read_bundle(folder: Path, limit: Optional[int]) -> list[dict[str, Any]]:
    """Return the tasks of core.yaml, each with its first `items` in nanochat's order, and its `chance`."""
    try:
        with open(folder / "eval_meta_data.csv", encoding="utf-8") as file:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        tasks = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        for task in tasks:
            with open(folder / "eval_data" / task["dataset_uri"], encoding="utf-8") as file:
                items = [*map(json.loads, file)]
            random.Random(1337).shuffle(items)
            task |= {"items": items[:limit], "chance": percent[task["label"]] / 100}
            if len(task["items"]) <= task["num_fewshot"][0]:
                raise ValueError(f"{task['label']} has {len(task['items'])} items, too few for its examples")
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"--include-path {folder}: {error!r}; name the unpacked folder of {BUNDLE}, and set "
                        "no --limit, or a larger one") from error
    return tasks


def options_of(task: dict[str, Any], item: dict[str, Any]) -> list[str]:
    """Return the texts among which an item chooses."""
    pairs = [(item.get("context", "").strip(), item.get("continuation"))]  # one answer, written greedily
    if task["icl_task_type"] == "multiple_choice":
        pairs = [(item["query"], choice) for choice in item["choices"]]
    elif task["icl_task_type"] == "schema":
        pairs = [(context, item["continuation"]) for context in item["context_options"]]
    return [task.get("continuation_delimiter", " ").join(pair) for pair in pairs]


def requests_of(task: dict[str, Any], index: int, model: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Return the options of an item as (_, context, continuation), as lm-evaluation-harness scores them."""
    items, item = task["items"], task["items"][index]
    others = [other for other in range(len(items)) if other != index]
    shown = random.Random(1234 + index).sample(others, task["num_fewshot"][0])
    examples = [options_of(task, items[other])[items[other].get("gold", 0)] for other in shown]
    texts = ["\n\n".join([*examples, option]) for option in options_of(task, item)]
    prompt = [texts[0].removesuffix(item["continuation"]).strip()] if "gold" not in item else []
    ids = [[model.prefix_token_id, *model.tok_encode(text, add_special_tokens=False)]
           for text in texts + prompt]
    # The texts share their context; those of a schema share their continuation.
    is_schema = task["icl_task_type"] == "schema"
    shared = len(commonprefix([each[::-1] for each in ids] if is_schema else ids))
    starts = [len(each) - shared if is_schema else min(shared, len(each) - 1) for each in ids]
    return [(("", ""), each[:start], each[start:]) for each, start in zip(ids[:len(texts)], starts)]


def evaluate_core(model: Any, tasks: list[dict[str, Any]]) -> tuple[dict[str, float], list[Row]]:
    """Return metrics and table rows of a model of lm-evaluation-harness; the last row is CORE."""
    metrics, rows, centered, variance = {}, [], [], 0.0
    for task in tasks:
        n, chance, right = len(task["items"]), task["chance"], 0
        requests = [requests_of(task, index, model) for index in range(n)]
        flat = [option for options in requests for option in options]
        scores = zip(flat, model._loglikelihood_tokens(flat))
        for item, options in zip(task["items"], requests):
            found = [next(scores) for _ in options]
            means = [logprob / len(continuation) for (_, _, continuation), (logprob, _) in found]
            right += means.index(max(means)) == item["gold"] if "gold" in item else found[0][1][1]
        accuracy, error = right / n, error_of_share(right / n, n)
        centered.append((accuracy - chance) / (1 - chance))
        variance += (error / (1 - chance) / len(tasks)) ** 2
        metrics |= {f"core_{task['label']}_acc": accuracy, f"core_{task['label']}_centered": centered[-1]}
        rows.append(Row(task["label"], "acc", accuracy, error, chance, n))
    metrics |= {"core": sum(centered) / len(tasks), "core_stderr": variance ** 0.5, "core_n": len(tasks)}
    return metrics, [*rows, Row("CORE", "centered", metrics["core"], metrics["core_stderr"], 0.0, len(tasks))]
