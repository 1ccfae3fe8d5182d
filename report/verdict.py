"""Sentences that say whether a run learned and is healthy."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Optional

import numpy as np

from report.curves import Curve, task_names
from report.goodput import RESTARTED

Verdict = tuple[Optional[bool], str]  # is it good (None = neutral), and the sentence
UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
STOPPED_LEARNING = {"divergence", "no gradient"}  # after these alarms, the loss is meaningless


def time_text(seconds: float) -> str:
    """Return seconds in at most two units: 25 s, 2 min 05 s, 3 h 10 min, 2 d 04 h."""
    place = next((place for place, (_, size) in enumerate(UNITS) if seconds >= size), 3)
    unit, size = UNITS[place]
    smaller = [f"{int(seconds % size // part):02} {name}" for name, part in UNITS[place + 1:place + 2]]
    return " ".join([f"{int(seconds // size)} {unit}", *smaller])


def value_text(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def learning(curves: dict[str, Curve], state: str, kinds: Collection[str],
             hellaswag: str) -> Iterator[Verdict]:
    """Yield whether the last loss is more than two standard errors below the first, with the accuracies."""
    newest = {name: curve.newest[0] for name, curve in curves.items() if curve.newest}
    found = [name for name in ("val_loss", "train_loss") if name in curves and len(curves[name].recent) > 1]
    if not found:
        return
    curve, kind = curves[found[0]], "validation" if found[0] == "val_loss" else "training"
    first = curve.known()[1][0].item()
    last, error = newest.get("val_loss"), newest.get("val_loss_stderr") or 0.0
    if kind == "training":
        last = np.median(curve.recent[len(curve.recent) // 2:]).item()
        error = np.std(np.diff(curve.recent)).item() / 2 ** 0.5  # of a value around the trend
    is_lower, (best, step) = last < first - 2 * error, curve.lowest
    words = ("Learning", "Not learning") if state == "running" else ("Learned", "Did not learn")
    if state == "failed" and not STOPPED_LEARNING.isdisjoint(kinds):
        words, is_lower = ("", "Diverged"), False
    texts = [f"{words[not is_lower]}: {kind} loss {value_text(first)} → {value_text(last)}"]
    for name, label in task_names(curves, hellaswag).items():
        stem = name.removesuffix("_acc")
        if stem != name and name in newest:
            stderr, chance = newest.get(f"{stem}_stderr"), newest.get(f"{stem}_chance")
            error_text = f" ± {100 * stderr:.1f}" if stderr else ""
            chance_text = f" (chance {100 * chance:.0f} %)" if chance else ""
            texts.append(f"accuracy on {label} {100 * newest[name]:.1f} %{error_text}{chance_text}")
    yield is_lower, "; ".join(texts) + "."
    if kind == "validation" and is_lower and last > best + max(3 * error, 0.02 * abs(best)):
        yield False, f"The validation loss has risen since step {step:,}, where it was {value_text(best)}."


def health(state: str, kinds: Counter[str], interruptions: list[dict[str, Any]]) -> Verdict:
    """Return the number of alarms of each kind and the time lost to interruptions."""
    away = time_text(sum(each["away_seconds"] or 0.0 for each in interruptions))
    number = len(interruptions)
    restarts = sum(each["reason"].endswith(f"({RESTARTED})") for each in interruptions)
    restarted = f", {restarts} {RESTARTED}" * bool(restarts)
    lost = (f"{number} interruption{'s' * (number > 1)} ({away} away{restarted})" if number
            else "no interruptions")
    counts = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.most_common())
    if state in ("failed", "unknown"):
        return False, f"{state.capitalize()}. {f'Alarms: {counts}' if counts else 'No alarms'}; {lost}."
    return not kinds, f"Alarms: {counts}; {lost}." if kinds else f"Healthy: no alarms, {lost}."
