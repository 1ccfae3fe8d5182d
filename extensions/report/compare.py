"""Compare runs: settings that differ, results with standard errors, and what seeds or shared items say."""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations, product
from statistics import fmean, stdev
from typing import Any, Optional

import numpy as np

from checkpoint.schema import REWARD, VALIDATION
from common.text import PROGRAM, counted, setting_text
from extensions import decide
from extensions.report.curves import Curve, rounded, task_names
from extensions.report.data import NOT_COMPARED, SPEEDS, RunReader
from extensions.report.items import ItemScores, read_item_scores
from extensions.report.numbers import is_share
from plan.command_line import describe_settings

MOST_TESTED = 8  # runs
FEWEST_AVERAGED = 6  # runs in a mean curve; page.js has the same number
SEEDS = ("SEED", "DATA_SEED")
ONE_SEED = ("One seed each: this compares models, not recipes. With other seeds, the order may be another; "
            f"{PROGRAM} decide --help says how to compare recipes.")


# Settings of how a run is watched, kept and repeated do not change what it is.
WATCHED = {*NOT_COMPARED, "CACHE_DIR", "DEBUG", "DISTRIBUTED_TIMEOUT",
           "PREPARATION_WORKERS", "STOP_STEP", "VERIFY_DATA",
           *(line.name for line in describe_settings() if line.on_resume == "safe"
             and line.section.startswith(("Evaluation", "Checkpoint", "Log", "Extension")))}
HIGHER = ("generation_exact_match", "generation_rouge_l", "generation_bleu", "tokens_per_second",
          "mfu", "hfu")
# Metrics with a score for each item, and what follows the evaluation's name in their titles.
METRICS = {"correct": "accuracy", "correct_norm": "accuracy per character", "loss": "loss",
           "preferred": "preference accuracy", "reward": "reward", "exact": "exact match",
           "rouge_l": "ROUGE-L"}


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
    configurations, sentences = by_configuration(runs, rows)
    paired, refused = [], []
    if not configurations and len(runs) <= MOST_TESTED:
        paired, refused = tests([run for run in runs if not has_failed(run)])
        sentences = [test["sentence"] for test in paired]
        why = f" {refused[0]}." if refused else ""
        sentences.append(
            ONE_SEED if paired else f"No items of the same evaluation say which run is better.{why}")
        for test, row in product(paired if len(runs) == 2 else (), rows):
            if test["better"] and row["name"] == f"{test['name']} at step {test['step']:,}":
                row["cells"]["ab".index(test["better"])]["is_better"] = True
    sentences += [f"{run.name} {run.state()[1]}; it counts as the worst, and is left out of means"
                  for run in runs if has_failed(run)]
    if len(runs) == 2 and not (configurations or any(map(has_failed, runs))):
        sentences += ways_to_compare(runs, paired)
    return {"sentences": sentences, "settings": settings, "results": rows, "tests": paired,
            "refused": refused, "configurations": configurations}


def ways_to_compare(runs: list[RunReader], paired: list[dict[str, Any]]) -> Iterator[str]:
    """Yield commands for two runs whose last or best models the tests do not compare."""
    names, losses = [run.name for run in runs], [run.trends["val_loss"] for run in runs]
    if differ(runs, "TOKENIZER_PATH"):
        can = all("val_bits_per_byte" in run.curves for run in runs)
        what = "only bits per byte of the same text can" if can else "losses per token cannot"
        yield f"Their tokenizers differ: {what} be compared"
        return
    if are_unlike(runs, "val_loss"):
        yield f"To compare the models on the same items: {PROGRAM} eval {' '.join(names)}"
    tested = max((test["step"] for test in paired), default=math.inf)
    if longer := [name for name, loss in zip(names, losses) if loss.last and loss.last.step > tested]:
        yield (f"{' and '.join(longer)} trained further than step {tested:,}; to compare the last models: "
               f"{PROGRAM} eval {' '.join(names)}")
    if risen := [name for name, loss in zip(names, losses) if loss.last and loss.rise()]:
        yield (f"{' and '.join(risen)} ended above the best validation loss; to compare the best "
               f"checkpoints: {PROGRAM} eval {names[0]}:best {names[1]}:best")


def differ(runs: Iterable[RunReader], setting: str) -> bool:
    return len({run.settings.get(setting) for run in runs}) > 1


def choice_name(runs: list[RunReader]) -> str:
    """Return the name of the items in HELLASWAG_PATH that these runs answered, or their names."""
    names = {run.hellaswag for run in runs if "hellaswag_acc" in run.curves} or {runs[0].hellaswag}
    return " or ".join(sorted(names))


def has_failed(run: RunReader) -> bool:
    return run.state()[0] == "failed"


def by_configuration(runs: list[RunReader], rows: list[dict[str, Any]]
                     ) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the first row's mean by runs that differ only in seeds, and how they differ from the first."""
    groups: dict[tuple, dict[tuple, int]] = {}  # other settings -> seeds -> index of the run
    names = sorted({name for run in runs for name in run.settings} - {*WATCHED, *SEEDS})
    for place, run in enumerate(runs):
        key, seeds = (tuple(setting_text(run.settings.get(name)) for name in each) for each in (names, SEEDS))
        groups.setdefault(key, {})[seeds] = place
    if not rows or len(groups) == len(runs) or sum(map(len, groups.values())) < len(runs):
        return [], []
    varied = [place for place, values in enumerate(zip(*groups)) if len(set(values)) > 1]
    row, made, by_seed = rows[0], [], []
    worst = math.inf if row["better"] == "lower" else -math.inf
    for key, members in groups.items():
        results = {seeds: {"value": None} if has_failed(runs[place]) else row["cells"][place]
                   for seeds, place in members.items()}
        by_seed.append({seeds: worst if cell["value"] is None else cell["value"]
                        for seeds, cell in results.items() if cell})
        values = [row["cells"][place]["value"] for place in members.values()
                  if row["cells"][place] and not has_failed(runs[place])]
        is_finite, count = None not in values, len(values)
        made.append({"name": ", ".join(f"{names[place]}={key[place]}" for place in varied) or "all runs",
                     "runs": [runs[place].name for place in members.values()], "n": count,
                     "mean": fmean(values) if values and is_finite else None,
                     "stderr": stdev(values) / math.sqrt(count) if count > 1 and is_finite else None})
    return made, [f"{row['name']}: {text}" for text in verdicts(made, by_seed, row)]


def verdicts(configurations: list[dict[str, Any]], by_seed: list[dict[tuple, float]], row: dict[str, Any]
             ) -> Iterator[str]:
    """Yield how each configuration differs from the first one, by the seeds that both have."""
    percent = is_share(row["name"])
    if len(configurations) == 1:
        values = [value for value in by_seed[0].values() if math.isfinite(value)]
        if not values:
            yield "the same settings, whose runs all failed"
            return
        span = f"{100 * np.ptp(values):.1f} points" if percent else f"{np.ptp(values):.4f}"
        yield f"the same settings; their {len(values)} seeds span {span}, by chance"
        return
    if row["better"] is None:
        yield "the runs have no step or items in common, so they cannot be compared"
        return
    fewest = decide.fewest_pairs(error := decide.ERROR / (len(configurations) - 1))
    for place in range(1, len(configurations)):
        common = [seeds for seeds in by_seed[0] if seeds in by_seed[place]]
        both = ([by_seed[each][seeds] for seeds in common] for each in (0, place))
        verdict = decide.compare(decide.differences_of(*both), error)
        names = [configurations[each]["name"] for each in (0, place)]
        text = decide.sentence(*names, verdict, row["better"] == "lower", percent)
        few = f"; {fewest} or more can decide" * (verdict.pairs < fewest)
        yield f"{text} ({counted(len(common), 'seed')} in common{few})"


def titles(runs: list[RunReader]) -> dict[str, tuple[str, str]]:
    """Return the title of each result that the runs have, and whether a higher or lower one is better."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves if run.curves[name].newest))
    tasks, main = task_names(names, choice_name(runs)), runs[0].main
    # The main result of the first run comes first.
    known = {main.curve: (main.title.lower(), "higher"), "val_loss": ("validation loss", "lower"),
             "val_perplexity": ("perplexity", "lower"), "val_bits_per_byte": ("bits per byte", "lower"),
             **{name: (f"{label} accuracy", "higher") for name, label in tasks.items()},
             **{name: (name.replace("_", " "), "higher") for name in HIGHER},
             "train_loss": ("training loss", "lower")}
    return {name: title for name, title in known.items() if name in names}


def results(runs: list[RunReader]) -> Iterator[dict[str, Any]]:
    """Yield a row for each result at the last step that all runs share, else at each run's last step.

    The first step says nothing of a run. Last steps are compared where all runs are finished.
    """
    all_failed, main = all(map(has_failed, runs)), runs[0].main
    are_finished = all(run.state()[0] == "finished" for run in runs)
    for name, (label, better) in titles(runs).items():
        curves = [run.curves.get(name, Curve()) for run in runs]
        if name in SPEEDS:  # a single step says nothing of a speed, and other programs may have run
            yield {"name": f"{label} (recent median)", "better": better,
                   "cells": [{"value": rounded(np.median(curve.recent)), "stderr": None,
                              "step": curve.newest[1]} if len(curve.recent) else None for curve in curves]}
            continue
        errors = [run.curves.get(f"{name.removesuffix('_acc')}_stderr", Curve()) for run in runs]
        # A run that failed does not shorten the others.
        steps = [{*curve.x} for run, curve in zip(runs, curves)
                 if curve.newest and (all_failed or not has_failed(run))]
        shared = set.intersection(*steps) - {0} if steps else set()
        rows = [(f"{label} (last)", better if are_finished else None,
                 [curve.newest and curve.newest[1] for curve in curves])]
        if shared:
            last = int(max(shared))
            rows = [(f"{label} at step {last:,}", better, [last if last in curve.x else None
                                                           for curve in curves])]
        if name == main.curve:
            best = [curve.best(main.higher) for curve in curves]
            rows.append((f"{label} (best)", better, [each and each[1] for each in best]))
        is_unlike = are_unlike(runs, name)
        for title, direction, steps in rows:  # a value of None is not finite
            cells = [None if step is None else
                     {"value": curve.at(step), "stderr": error.at(step), "step": step}
                     for step, curve, error in zip(steps, curves, errors)]
            yield {"name": title, "better": None if is_unlike else direction, "cells": cells}


def are_unlike(runs: list[RunReader], result: str) -> bool:
    """Return whether two runs have no items in common for a result: a lower loss is not a better one then."""
    has_tokenizers = differ(runs, "TOKENIZER_PATH")
    is_by_data = result.startswith(("val_", "train_")) and not (
        result == "val_bits_per_byte" and has_tokenizers)  # of the same text they are comparable
    evaluation = VALIDATION if is_by_data else result.removesuffix("_norm").removesuffix("_acc")
    items = [run.items[evaluation] for run in runs if evaluation in run.items]
    return any(a.isdisjoint(b) for a, b in combinations(items, 2))


def tests(runs: list[RunReader]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return paired tests of each other run against the first, and why evaluations have none."""
    if len(runs) < 2:
        return [], []
    # The first step says nothing of a run.
    first, *others = [{(line.step, line.name, line.items): line
                       for line in read_item_scores(run.folder / "evaluations.jsonl") if line.step}
                      for run in runs]
    refused, titles = [], {"hellaswag": choice_name(runs), REWARD: "held-out"}
    families: dict[str, list[tuple[str, ItemScores, decide.Paired]]] = {}
    for run, lines in zip(runs[1:], others):
        names = (runs[0].name, run.name)
        for name in sorted({name for _, name, _ in first} & {name for _, name, _ in lines}):
            keys = [{key for key in each if key[1] == name} for each in (first, lines)]
            last, title = max(keys[0] & keys[1], default=None), titles.get(name, name)
            a, b = first.get(last), lines.get(last)
            if {items for *_, items in keys[0]}.isdisjoint(items for *_, items in keys[1]):
                causes = [each for each in ("TOKENIZER_PATH", "MAX_SEQ_LEN") if differ((runs[0], run), each)]
                reason = f"scored different items{f', as {causes[0]} differs' if causes else ''}"
            elif last is None:
                steps = " and ".join(f"{max(each)[0]:,}" for each in keys)
                reason = f"did not score the same items at the same step (last at {steps})"
            elif bad := [each for each, line in zip(names, (a, b)) if line.not_finite]:
                reason = f"have NaN or infinite scores at step {last[0]:,} ({' and '.join(bad)})"
            elif a.number < decide.FEWEST:
                items = counted(a.number, a.kind.removesuffix("s"))
                reason = f"share {items}, and a verdict needs {decide.FEWEST}"
            else:
                for metric in (each for each in METRICS if each in a.scores and each in b.scores):
                    test = decide.compare_items(a.scores[metric], b.scores[metric], a.scores.get("count"))
                    families.setdefault(f"{title} {METRICS[metric]}", []).append((run.name, a, test))
                continue
            refused.append(f"{title}: {names[0]} and {names[1]} {reason}, so they are not compared")
    made = [test for label in sorted(families, key=is_share)  # losses first
            for test in corrected(label, runs[0].name, families[label])]
    return made, refused


def corrected(label: str, a: str, family: list[tuple[str, ItemScores, decide.Paired]]
              ) -> Iterator[dict[str, Any]]:
    """Yield the tests (b, scores, test) of a metric against the run `a` for the page's data."""
    for (b, scores, test), p in zip(family, decide.holm([test.p for *_, test in family])):
        size = decide.size_text(test.difference, test.stderr, is_share(label))
        signed = "-" * (test.difference < 0) + size
        better, result = None, f"these two models do not differ significantly: {b} minus {a} is {signed}"
        if p < decide.ERROR:
            better = "b" if (test.difference < 0) == label.endswith("loss") else "a"
            names = (b, a) if better == "b" else (a, b)
            result = "of these two models, {} is better than {} by {}".format(*names, size)
        tested = f"{f'p = {p:.2g}' if p >= 1e-4 else 'p < 0.0001'}, {test.n:,} {scores.kind}"
        yield {"name": label, "a": a, "b": b, "step": scores.step, "n": test.n, "a_value": test.a,
               "b_value": test.b, "difference": test.difference, "stderr": test.stderr, "p": p,
               "better": better, "sentence": f"{label} at step {scores.step:,}: {result} ({tested})"}
