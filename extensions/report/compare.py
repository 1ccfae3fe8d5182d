"""Compare runs: settings that differ, results with standard errors, and paired tests on shared items."""

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, NamedTuple, Optional

import numpy as np

from checkpoint.schema import REWARD, VALIDATION
from common.text import setting_text
from extensions.report.curves import Curve, task_names
from extensions.report.data import NOT_COMPARED, RunReader
from extensions.report.paired import SIGNIFICANT, Paired, mcnemar, paired_t, read_item_scores
from plan.command_line import describe_settings

MOST_TESTED = 8  # runs in pairwise tests
SEEDS = ("SEED", "DATA_SEED")


class Metric(NamedTuple):
    """A metric with one score per item (or seed), and its test."""

    label: str  # follows the name of the evaluation
    test: Callable[..., Paired]
    items: str  # plural noun for the scored items
    percent: bool = True  # print values in percentage points
    lower: bool = False  # lower values are better


# Settings of how a run is watched, kept and repeated do not change what it is.
WATCHED = {*NOT_COMPARED, "CACHE_DIR", "DEBUG", "DISTRIBUTED_TIMEOUT",
           "PREPARATION_WORKERS", "STOP_STEP", "VERIFY_DATA",
           *(line.name for line in describe_settings() if line.on_resume == "safe"
             and line.section.startswith(("Evaluation", "Checkpoint", "Log", "Extension")))}
HIGHER = ("generation_exact_match", "generation_rouge_l", "generation_bleu", "tokens_per_second",
          "mfu", "hfu")
METRICS = {"correct": Metric("accuracy", mcnemar, "items"),
           "correct_norm": Metric("length-normalized accuracy", mcnemar, "items"),
           "loss": Metric("loss", paired_t, "items", percent=False, lower=True),
           "preferred": Metric("preference accuracy", mcnemar, "items"),
           "reward": Metric("reward", paired_t, "prompts", percent=False),
           "exact": Metric("exact match", mcnemar, "chats"),
           "rouge_l": Metric("ROUGE-L", paired_t, "chats")}


def comparison(runs: list[RunReader]) -> Optional[dict[str, Any]]:
    """Return the comparison for the page's data, or None for a single run."""
    if len(runs) < 2:
        return None
    settings = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        # None if the run's version lacks the setting
        values = [setting_text(run.settings[name]) if name in run.settings else None for run in runs]
        if len(set(values)) > 1 and name not in WATCHED:
            settings.append({"name": name, "values": values})
    rows = [*results(runs)]
    configurations = by_configuration(runs, rows)
    paired, refused = [test for each in configurations if (test := each.pop("test"))], []
    if len(runs) <= MOST_TESTED and not (paired and rows[0]["better"]):
        paired, refused, unlike = tests(runs)
        for row in rows:  # on other items, a lower loss is not a better one
            row["better"] = None if row["items"] in unlike else row["better"]
    return {"settings": settings, "results": rows, "tests": paired, "refused": refused,
            "configurations": configurations}


def by_configuration(runs: list[RunReader], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first row's mean by runs that differ only in seeds, and a test against the first group."""
    groups: dict[tuple, dict[tuple, int]] = {}  # other settings -> seeds -> index of the run
    names = sorted({name for run in runs for name in run.settings} - {*WATCHED, *SEEDS})
    for place, run in enumerate(runs):
        key, seeds = (tuple(setting_text(run.settings.get(name)) for name in each) for each in (names, SEEDS))
        groups.setdefault(key, {})[seeds] = place
    if not rows or len(groups) == len(runs) or sum(map(len, groups.values())) < len(runs):
        return []
    varied = [place for place, values in enumerate(zip(*groups)) if len(set(values)) > 1]
    row, found, family, first = rows[0], [], [], ("", {})
    for key, members in groups.items():
        cells = {seeds: cell for seeds, place in members.items() if (cell := row["cells"][place])}
        values, count = [cell["value"] for cell in cells.values()], len(cells)
        is_finite = None not in values
        name = ", ".join(f"{names[place]}={key[place]}" for place in varied) or "all runs"
        result = {"name": row["name"], "better": row["better"], "n": count,
                  "mean": fmean(values) if values and is_finite else None,
                  "stderr": stdev(values) / math.sqrt(count) if count > 1 and is_finite else None}
        found.append({"name": name, "runs": [runs[place].name for place in members.values()],
                      "results": [result]})
        first = first if first[1] else (name, cells)
        common = [seeds for seeds in cells if seeds in first[1] and name != first[0]]
        pair = [[each[seeds]["value"] for seeds in common] for each in (first[1], cells)]
        if len(common) > 1 and None not in sum(pair, []):
            family.append((first[0], name, cells[common[0]]["step"], paired_t(*map(np.array, pair))))
    label = row["name"].partition(" at step ")[0]
    kind = Metric("", paired_t, "seeds", percent="accuracy" in label, lower=row["better"] == "lower")
    test_of = {test["b"]: test for test in corrected(label, kind, family)}
    return [each | {"test": test_of.get(each["name"])} for each in found]


def results(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield a row for each result at the last step that all runs share, else at each run's last step."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves if run.curves[name].newest))
    tasks = task_names(names, runs[0].hellaswag)
    # The main result of the first run comes first.
    main = runs[0].main
    titles = {main.curve: (main.title.lower(), "higher"), "val_loss": ("validation loss", "lower"),
              "val_perplexity": ("perplexity", "lower"), "val_bits_per_byte": ("bits per byte", "lower"),
              **{name: (f"{label} accuracy", "higher") for name, label in tasks.items()},
              **{name: (name.replace("_", " "), "higher") for name in HIGHER},
              "train_loss": ("training loss", "lower")}

    for name, (label, better) in titles.items():
        if name not in names:
            continue
        curves = [run.curves.get(name, Curve()) for run in runs]
        errors = [run.curves.get(f"{name.removesuffix('_acc')}_stderr", Curve()) for run in runs]
        shared = set.intersection(*({*curve.x} for curve in curves if curve.newest))
        rows = [(f"{label} (last)", None, [curve.newest and curve.newest[1] for curve in curves])]
        if shared:
            last = int(max(shared))
            rows = [(f"{label} at step {last:,}", better, [curve.newest and last for curve in curves])]
        if name == main.curve:
            best = [curve.best(main.higher) for curve in curves]
            rows.append((f"{label} (best)", better, [each and each[1] for each in best]))
        has_tokenizers = len({run.settings.get("TOKENIZER_PATH") for run in runs}) > 1
        is_by_data = name.startswith(("val_", "train_")) and not (
            name == "val_bits_per_byte" and has_tokenizers)  # of the same text they are comparable
        items = VALIDATION if is_by_data else name.removesuffix("_norm").removesuffix("_acc")
        for title, direction, steps in rows:  # a value of None is not finite
            cells = [None if step is None else
                     {"value": curve.at(step), "stderr": error.at(step), "step": step}
                     for step, curve, error in zip(steps, curves, errors)]
            yield {"name": title, "better": direction, "cells": cells, "items": items}


def tests(runs: list[RunReader]) -> tuple[list[dict[str, Any]], list[str], set[str]]:
    """Return a paired test for each two runs and evaluation at their last common step, and what has none.

    Last come the names of evaluations for which two runs have no items in common.
    """
    files = [run.folder / "evaluations.jsonl" for run in runs]
    scored = [{(line.step, line.name, line.items) for line in read_item_scores(file)} for file in files]
    pairs, refused, unlike, titles = [], [], set(), {"hellaswag": runs[0].hellaswag, REWARD: "held-out"}
    for a, b in combinations(range(len(runs)), 2):
        for name in sorted({name for _, name, _ in scored[a]} & {name for _, name, _ in scored[b]}):
            common = [key for key in scored[a] & scored[b] if key[1] == name]
            if common:
                pairs.append((a, b, max(common)))
                continue
            a_items, b_items = ({key[2] for key in scored[i] if key[1] == name} for i in (a, b))
            if a_items.isdisjoint(b_items):
                unlike.add(name)
                refused.append(f"{titles.get(name, name)}: {runs[a].name} and {runs[b].name} scored "
                               "different items, so there is no test")
                continue
            last = [f"{runs[i].name} (last at step {max(key[0] for key in scored[i] if key[1] == name):,})"
                    for i in (a, b)]
            refused.append(f"{titles.get(name, name)}: {last[0]} and {last[1]} did not score the same items "
                           "at the same step, so there is no test")
    chosen = {key for *_, key in pairs}
    lines = [{key: line for line in read_item_scores(file)
              if (key := (line.step, line.name, line.items)) in chosen} for file in files]
    families: dict[tuple[str, Metric], list[tuple[str, str, int, Paired]]] = {}
    for a, b, key in pairs:
        if bad := [runs[place].name for place in (a, b) if lines[place][key].not_finite]:
            refused.append(f"{titles.get(key[1], key[1])}: at step {key[0]:,}, scores of {' and '.join(bad)} "
                           "are NaN or infinite, so there is no test")
            continue
        for metric, kind in METRICS.items():
            line = lines[a][key]
            scores = [lines[place][key].scores.get(metric) for place in (a, b)]
            if scores[0] is None or scores[1] is None:
                continue
            kind = kind._replace(items=line.kind) if key[1] == VALIDATION else kind
            weights = {"weights": line.scores.get("count")} if metric == "loss" else {}
            family = families.setdefault((f"{titles.get(key[1], key[1])} {kind.label}", kind), [])
            family.append((runs[a].name, runs[b].name, key[0], kind.test(*scores, **weights)))
    made = [test for (label, kind), family in families.items() for test in corrected(label, kind, family)]
    return made, refused, unlike


def corrected(label: str, kind: Metric, family: list[tuple[str, str, int, Paired]]) -> list[dict[str, Any]]:
    """Return the tests (a, b, step, test) of a metric for the page's data, with Holm's correction (1979)."""
    made, least = {}, 0.0
    for place, (a, b, step, test) in enumerate(sorted(family, key=lambda each: each[3].p)):
        least = max(least, min(1.0, (len(family) - place) * test.p))
        factor, digits, unit = (100, 1, " points") if kind.percent else (1, 4, "")
        size = f"{factor * abs(test.difference):.{digits}f} ± {factor * test.stderr:.{digits}f}{unit}"
        p = f"p = {least:.2g}" if least >= 1e-4 else "p < 0.0001"
        better, result = None, f"{a} and {b} do not differ significantly: {size}"
        if least < SIGNIFICANT:
            better = "b" if (test.difference < 0) == kind.lower else "a"
            result = "{} is better than {} by {}".format(*((b, a) if better == "b" else (a, b)), size)
        made[a, b] = {
            "name": label, "a": a, "b": b, "step": step, "n": test.n, "a_value": test.a, "b_value": test.b,
            "difference": test.difference, "stderr": test.stderr, "p": least, "better": better,
            "sentence": f"{label} at step {step:,}: {result} ({p}, {test.n:,} {kind.items})"}
    return [made[a, b] for a, b, *_ in family]
