"""Several runs side by side: settings that differ, results with standard errors, and paired tests."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Optional

from checkpoint.item_scores import ItemScores
from report.charts import task_names
from report.curves import Curve
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
    paired, refused = tests(runs)
    return {"settings": [*differing_settings(runs)], "results": [*results(runs)], "tests": paired,
            "refused": refused}


def differing_settings(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield each setting that is not the same in all runs; null in one whose version did not have it."""
    each = [run.settings for run in runs]
    for name in dict.fromkeys(name for settings in each for name in settings):
        values = [spelt(settings[name]) if name in settings else None for settings in each]
        if len(set(values)) > 1 and name not in NOT_COMPARED:
            yield {"name": name, "values": values}


def results(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield a row for each result, at the last step that all runs have, and validation also at its best.

    Without a common step each run has its own last one, which the page names.
    """
    def row(name: str, better: str, curve: str, error: str = "") -> dict[str, Any]:
        curves = [run.curves.get(curve, Curve()) for run in runs]
        steps = [set(each.steps().tolist()) for each in curves if each.newest]
        step = max(set.intersection(*steps), default=None)
        if step is None:
            return {"name": f"{name} (last)", "better": None,
                    "cells": cells(error, [each.newest for each in curves])}
        pairs = [(each.at(step), step) if each.newest else None for each in curves]
        return {"name": f"{name} at step {step:,}", "better": better, "cells": cells(error, pairs)}

    def cells(error: str, found: list[Optional[tuple[float, int]]]) -> list[Optional[dict[str, Any]]]:
        errors = [run.curves.get(error, Curve()) for run in runs]
        return [pair and {"value": pair[0], "stderr": each.at(pair[1]), "step": pair[1]}
                for pair, each in zip(found, errors)]

    names = list(dict.fromkeys(name for run in runs for name in run.curves if run.curves[name].newest))
    settings = runs[0].settings
    if "val_loss" in names:
        yield row("validation loss", "lower", "val_loss", "val_loss_stderr")
        best = [run.curves.get("val_loss", Curve()).lowest for run in runs]
        yield {"name": "validation loss (best)", "better": "lower", "cells": cells("val_loss_stderr", best)}
    for name, label in (("val_perplexity", "perplexity"), ("val_bits_per_byte", "bits per byte")):
        if name in names:
            yield row(label, "lower", name)
    for name, label in task_names(names, settings.get("HELLASWAG_NAME", "HellaSwag")).items():
        stem = name.removesuffix("_norm").removesuffix("_acc")
        yield row(f"{label} accuracy", "higher", name, "" if name.endswith("_norm") else f"{stem}_stderr")
    for name in HIGHER:
        if name in names:
            yield row(name.replace("_", " "), "higher", name, f"{name}_stderr")
    if "train_loss" in names:
        yield row("training loss", "lower", "train_loss")


def tests(runs: list[RunReader]) -> tuple[list[dict[str, Any]], list[str]]:
    """A paired test of each two runs on each evaluation, at the last step after which both scored it.

    Returns:
        The tests, and a sentence for each evaluation without such a step.
    """
    scored = [{(line.step, line.name, line.items) for line in run.item_scores()} for run in runs]
    found, refused = [], []
    for a, b in combinations(range(len(runs)), 2):
        for name in sorted({name for _, name, _ in scored[a]} & {name for _, name, _ in scored[b]}):
            common = [key for key in scored[a] & scored[b] if key[1] == name]
            if common:
                found.append((a, b, max(common)))
                continue
            last = [f"{runs[i].name} (last at step {max(key[0] for key in scored[i] if key[1] == name):,})"
                    for i in (a, b)]
            refused.append(f"{title_of(name, runs[a])}: {last[0]} and {last[1]} scored no items in common at "
                           "the same step, and are not compared")
    chosen = {key for *_, key in found}
    lines = [{key: line for line in run.item_scores()
              if (key := (line.step, line.name, line.items)) in chosen} for run in runs]
    return [test_of((runs[a], runs[b]), (lines[a][key], lines[b][key]), metric, kind)
            for a, b, key in found for metric, kind in KINDS.items()
            if metric in lines[a][key].scores and metric in lines[b][key].scores], refused


def title_of(name: str, run: RunReader) -> str:
    """The title of an evaluation."""
    return run.settings.get("HELLASWAG_NAME", "HellaSwag") if name == "hellaswag" else name


def test_of(pair: tuple[RunReader, RunReader], lines: tuple[ItemScores, ItemScores], metric: str,
            kind: Kind) -> dict[str, Any]:
    """A paired test as in the page's data."""
    values = [line.scores[metric] for line in lines]
    weights = {"weights": lines[0].scores.get("count")} if metric == "loss" else {}
    test = kind.test(*values, **weights)
    names = (pair[0].name, pair[1].name)
    better, sentence = describe(test, names, kind)
    label, step = f"{title_of(lines[0].name, pair[0])} {kind.label}", lines[0].step
    return {"name": label, "a": names[0], "b": names[1], "step": step, "n": test.n, "a_value": test.a,
            "b_value": test.b, "difference": test.difference, "stderr": test.stderr, "p": test.p,
            "better": better, "sentence": f"{label} at step {step:,}: {sentence}"}
