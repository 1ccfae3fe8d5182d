"""Sentences that say whether a run learned and is healthy."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from common.text import counted, duration
from extensions.decide import ERROR, FEWEST, difference_text, sign_test
from extensions.report.curves import Curve, task_names
from extensions.report.goodput import RESTARTED
from extensions.report.items import Trend
from extensions.report.numbers import number_text

Finding = tuple[Optional[bool], str]  # is it good (None = neutral), and the sentence
# By outcome, for a run that ended and for one that is running.
WORDS = {"better": ("Learned", "Learning"), "same": ("Did not learn", "Not learning"),
         "few": ("Too few to tell", "Too few to tell"),
         "worse": ("Got worse", "Getting worse"), "overfit": ("Overfit", "Overfitting"),
         "diverged": ("Diverged", "Diverging"), "stopped": ("Stopped learning", "Not learning")}


class Headline(NamedTuple):
    """The main result of a stage."""

    curve: str
    training: str  # the curve of the same quantity in training
    title: str
    in_training: str
    higher: bool = False  # higher values are better
    percent: bool = False


LOSS = Headline("val_loss", "train_loss", "Validation loss", "training loss")
HEADLINES = {"grpo": Headline("val_reward", "reward", "Held-out reward", "training reward", higher=True),
             "dpo": Headline("val_reward_accuracy", "reward_accuracy", "Held-out preference accuracy",
                             "training preference accuracy", higher=True, percent=True)}


def learning(curves: dict[str, Curve], state: str, kinds: Collection[str], hellaswag: str,
             main: Headline = LOSS, trends: Mapping[str, Trend] = {}) -> Iterator[Finding]:
    """Yield whether the result `main` improved from its first to its last value, with the accuracies.

    A paired test of the item scores in `trends` decides. Without them, two standard errors do.
    """
    measured = [name for name in (main.curve, main.training)
                if name in curves and len(curves[name]) > 1 and len(curves[name].recent)]
    if not measured:
        return
    newest = {name: curve.newest[0] for name, curve in curves.items() if curve.newest}
    curve, trend, label = curves[measured[0]], trends.get(measured[0]), main.title.lower()
    first, last, test = curve.known()[1][0].item(), newest[measured[0]], trend and trend.against(trend.first)
    margin, proof = 2 * (newest.get(f"{measured[0]}_stderr") or 0.0), " (unpaired)"
    if measured[0] == main.training:
        label, last = main.in_training, np.median(curve.recent[len(curve.recent) // 2:]).item()
        proof = " (recent median)"
        margin = 2 * np.std(np.diff(curve.recent)).item() / 2 ** 0.5  # of a value around the trend
    elif main.percent and first == 0:  # the reference itself, which prefers no answer
        first, proof = 0.5, " (from chance)"
        if trend and trend.last:
            right, number = round(last * trend.last.number), trend.last.number
            proof = f" (from chance, over {number:,} {trend.last.kind})"
            margin = 0.0 if sign_test(right, number - right) < ERROR else math.inf
    elif test:
        first, last, proof = test.a, test.b, difference_text(test, trend.last.kind, main.percent)
        margin = 0.0 if test.p < ERROR else math.inf
    worse_by = (first - last) if main.higher else (last - first)
    outcome = "better" if worse_by < -margin else "worse" if worse_by > margin else "same"
    is_few = trend is not None and trend.last is not None and trend.last.number < FEWEST
    if is_few and measured[0] == main.curve:
        items = counted(trend.last.number, trend.last.kind.removesuffix("s"))
        outcome, proof = "few", f" ({items} held out; a verdict needs {FEWEST}: raise VALIDATION_FRACTION)"
    losses = trends.get(LOSS.curve)
    rise = losses and losses.rise()
    last_text = number_text(last, None, main.percent)
    if math.isnan(newest[measured[0]]):
        outcome, last_text, proof = "diverged", "not finite", ""
    elif math.isnan(newest.get(LOSS.curve, 0)):
        outcome, proof = "diverged", ""
        last_text = f"{number_text(newest[measured[0]], None, main.percent)}; validation loss not finite"
    elif state == "failed" and "step not finite" in kinds:
        outcome, proof = "diverged", f"{proof}, until a step was NaN or infinite"
    elif outcome == "worse" and "divergence" in kinds:
        outcome = "diverged"
    elif state == "failed" and "no gradient" in kinds:
        outcome = "stopped"
    elif rise and main is LOSS and losses.best is not losses.first:
        falls = main.training not in curves or curves[main.training].falls_since(losses.best.step)
        outcome, proof = "overfit" if falls else "worse", difference_text(rise, losses.last.kind)
        last_text = f"{number_text(rise.a)} at step {losses.best.step:,} → {last_text}"
    word = WORDS[outcome][state == "running"]
    texts = [f"{word}: {label} {number_text(first, None, main.percent)} → {last_text}{proof}",
             *accuracies(curves, newest, hellaswag)]
    yield None if outcome == "few" else outcome == "better", "; ".join(texts) + "."
    if rise and main is not LOSS:
        yield None, (f"The validation loss has risen since step {losses.best.step:,}, where it was "
                     f"{number_text(rise.a)}{difference_text(rise, losses.last.kind)}.")
    best, step = curve.best()
    if measured[0] == LOSS.curve and not test and outcome == "better" and last > best + max(
            1.5 * margin, 0.02 * abs(best)):
        yield False, f"The validation loss has risen since step {step:,}, where it was {number_text(best)}."


def accuracies(curves: dict[str, Curve], newest: Mapping[str, float], hellaswag: str) -> Iterator[str]:
    """Yield the first and the newest accuracy of each set of items."""
    for name, label in task_names(curves, hellaswag).items():
        stem = name.removesuffix("_acc")
        if stem != name and name in newest:
            stderr, chance = newest.get(f"{stem}_stderr"), newest.get(f"{stem}_chance")
            chance_text = f" (chance {100 * chance:.0f} %)" if chance else ""
            known = curves[name].known()[1]
            began = f"{number_text(known[0].item(), None, True)} → " if len(known) > 1 else ""
            yield f"accuracy on {label} {began}{number_text(newest[name], stderr, True)}{chance_text}"


def alarms_and_downtime(state: str, kinds: Counter[str], interruptions: list[dict[str, Any]],
                        learned: bool = True) -> Finding:
    """Return the number of alarms of each kind and the time lost to interruptions."""
    downtime = duration(sum(each["downtime_seconds"] for each in interruptions))
    number = len(interruptions)
    restarts = sum(each["reason"].endswith(f"({RESTARTED})") for each in interruptions)
    restarted = f", {restarts} {RESTARTED}" * bool(restarts)
    lost = (f"{counted(number, 'interruption')} ({downtime} downtime{restarted})" if number
            else "no interruptions")
    counts = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.most_common())
    if state in ("failed", "unknown"):
        return False, f"{state.capitalize()}. {f'Alarms: {counts}' if counts else 'No alarms'}; {lost}."
    if kinds:
        return False, f"Alarms: {counts}; {lost}."
    return (True, f"Healthy: no alarms, {lost}.") if learned else (None, f"No alarms, {lost}.")
