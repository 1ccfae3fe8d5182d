"""Several runs side by side: settings that differ, results with standard errors, and paired tests."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Optional

import numpy as np

from checkpoint.item_scores import ItemScores, read_item_scores
from report.charts import task_names
from report.paired_tests import Kind, describe, mcnemar, paired_t
from report.run_data import RunReader
from report.run_facts import NOT_COMPARED, spelt

HIGHER = ("generation_exact_match", "generation_rouge_l", "generation_bleu", "tokens_per_second",
          "mfu", "hfu")


KINDS = {"correct": Kind("accuracy", mcnemar, "items"),
         "correct_norm": Kind("accuracy by length", mcnemar, "items"),
         "loss": Kind("loss", paired_t, "blocks", percent=False, lower=True),
         "exact": Kind("exact match", mcnemar, "chats"),
         "rouge_l": Kind("ROUGE-L", paired_t, "chats")}


def comparison(runs: list[RunReader]) -> Optional[dict[str, Any]]:
    """The comparison as in the page's data; None of a single run."""
    if len(runs) < 2:
        return None
    return {"settings": [*differing_settings(runs)], "results": [*results(runs)], "tests": [*tests(runs)]}


def differing_settings(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield each setting that is not the same in all runs; null in one whose version did not have it."""
    each = [run.settings for run in runs]
    for name in dict.fromkeys(name for settings in each for name in settings):
        values = [spelt(settings[name]) if name in settings else None for settings in each]
        if len(set(values)) > 1 and name not in NOT_COMPARED:
            yield {"name": name, "values": values}


def results(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield a row for each result, at the last step that has it, and validation also at its best."""
    def row(name: str, better: str, curve: str, error: str = "", best: bool = False) -> dict[str, Any]:
        return {"name": name, "better": better, "cells": [cell(run, curve, error, best) for run in runs]}

    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    settings = runs[0].settings
    if "val_loss" in names:
        yield row("validation loss (last)", "lower", "val_loss", "val_loss_stderr")
        yield row("validation loss (best)", "lower", "val_loss", "val_loss_stderr", best=True)
    for name, label in (("val_perplexity", "perplexity"), ("val_bits_per_byte", "bits per byte")):
        if name in names:
            yield row(f"{label} (last)", "lower", name)
    for name, label in task_names(names, settings.get("HELLASWAG_NAME", "HellaSwag")).items():
        stem = name.removesuffix("_norm").removesuffix("_acc")
        yield row(f"{label} accuracy", "higher", name, "" if name.endswith("_norm") else f"{stem}_stderr")
    for name in HIGHER:
        if name in names:
            yield row(name.replace("_", " "), "higher", name, f"{name}_stderr")
    if "train_loss" in names:
        yield row("training loss (last)", "lower", "train_loss")


def cell(run: RunReader, curve: str, error: str, best: bool) -> Optional[dict[str, Any]]:
    """The last or the lowest value of a run's curve, with its standard error if there is one."""
    if curve not in run.curves or run.curves[curve].last() is None:
        return None
    points = run.curves[curve].points(len(run.curves[curve]))
    finite = np.flatnonzero(np.isfinite(points.y))
    place = finite[np.argmin(points.y[finite])] if best else finite[-1]
    step = points.x[place].item()
    stderr = None
    if error in run.curves:
        errors = run.curves[error].points(len(run.curves[error]))
        found = errors.y[errors.x == step]
        stderr = found[0].item() if len(found) and np.isfinite(found[0]) else None
    return {"value": points.y[place].item(), "stderr": stderr, "step": step}


def tests(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield a paired test of each two runs on each evaluation of which both scored the same items last."""
    last = [{line.name: line for line in read_item_scores(run.folder / "evaluations.jsonl")} for run in runs]
    for (run_a, of_a), (run_b, of_b) in combinations(zip(runs, last), 2):
        for name, line in of_a.items():
            other = of_b.get(name)
            if other is None or other.items != line.items:
                continue
            for metric, kind in KINDS.items():
                if metric in line.scores and metric in other.scores:
                    yield test_of((run_a, run_b), (line, other), metric, kind)


def test_of(pair: tuple[RunReader, RunReader], lines: tuple[ItemScores, ItemScores], metric: str,
            kind: Kind) -> dict[str, Any]:
    """A paired test as in the page's data."""
    values = [line.scores[metric] for line in lines]
    weights = {"weights": lines[0].scores["count"]} if metric == "loss" else {}
    test = kind.test(*values, **weights)
    names = (pair[0].name, pair[1].name)
    better, sentence = describe(test, names, kind)
    title = lines[0].name
    if title == "hellaswag":
        title = pair[0].settings.get("HELLASWAG_NAME", "HellaSwag")
    label = f"{title} {kind.label}"
    return {"name": label, "a": names[0], "b": names[1], "step_a": lines[0].step, "step_b": lines[1].step,
            "n": test.n, "a_value": test.a, "b_value": test.b, "difference": test.difference,
            "stderr": test.stderr, "p": test.p, "better": better, "sentence": f"{label}: {sentence}"}
