"""Group curves into charts, and show long curves as the mean, minimum and maximum of buckets of steps."""

import math
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import numpy as np

# Id, title, unit, styles ("log", "falling", "percent", "stacked"), and curves with their labels.
KNOWN: tuple[tuple[str, str, str, tuple[str, ...], dict[str, str]], ...] = (
    ("loss", "Loss", "nats", ("falling",), {"train_loss": "training", "val_loss": "validation"}),
    ("bits-per-byte", "Bits per byte", "bits", ("falling",), {"val_bits_per_byte": "validation"}),
    ("accuracy", "Accuracy", "%", ("percent",), {}),  # curves come from `task_names`
    ("generation", "Generated answers", "%", ("percent",), {
        "generation_exact_match": "exact match", "generation_rouge_l": "ROUGE-L", "generation_bleu": "BLEU",
        "generation_rouge_1": "ROUGE-1", "generation_rouge_2": "ROUGE-2",
        "generation_rouge_lsum": "ROUGE-Lsum"}),
    ("reward", "Reward", "", (), {"reward": "answers in training", "val_reward": "held-out prompts"}),
    ("preference-accuracy", "Preference accuracy", "%", ("percent",), {
        "reward_accuracy": "training", "val_reward_accuracy": "held-out"}),
    ("length", "Answer length", "tokens", (), {"answer_tokens": "with the end"}),
    ("kl", "KL divergence", "nats", (), {"kl": "training", "val_kl": "validation"}),
    ("entropy", "Entropy", "nats", (), {"entropy": "of an answer's tokens"}),
    ("learning-rate", "Learning rate", "", (), {"learning_rate": "learning rate"}),
    ("grad-norm", "Gradient norm", "", ("log",), {"grad_norm": "gradient norm"}),
    ("throughput", "Tokens per second", "tokens/s", (), {"tokens_per_second": "tokens per second"}),
    ("utilization", "FLOPs utilization", "%", ("percent",), {
        "mfu": "MFU (FLOPs the model needs)", "hfu": "HFU (with recomputation)"}),
    ("phases", "Step time by phase", "s", ("stacked",), {
        "data_seconds": "data", "generate_seconds": "generate",
        "reward_seconds": "reward", "forward_seconds": "forward", "backward_seconds": "backward",
        "optimizer_seconds": "optimizer", "communication_seconds": "waiting for other ranks"}),
    ("pauses", "Evaluation and saving", "s", (), {
        "evaluation_seconds": "evaluation", "save_seconds": "saving"}),
    ("memory", "Peak memory", "bytes", (), {
        "peak_memory_bytes": "", "gpu_memory_bytes": "used on the GPU"}),
    ("power", "Power", "W", (), {"power_watts": "all GPUs"}),
    ("energy", "Energy per token", "J", (), {"joules_per_token": "joules per token"}),
    ("gpu-utilization", "GPU utilization", "%", (), {"gpu_utilization": "GPU utilization"}),
    ("temperature", "GPU temperature", "°C", (), {"gpu_temperature_celsius": "hottest GPU"}),
    ("clock", "SM clock", "MHz", (), {"gpu_clock_mhz": "slowest GPU"}),
    ("throttling", "Time with a throttle reason", "%", ("percent",), {"gpu_throttled": "throttled"}))
# Not drawn: x axes, derived values, and the error bands and reference lines of other curves.
HIDDEN = {"time", "step_seconds", "tokens_seen", "val_perplexity"}
SUFFIXES = ("_stderr", "_chance", "_n")
FEW = 5  # values of a curve that together say where it is
CHANCE = {"hellaswag": 0.25, "val_reward_accuracy": 0.5}  # of runs that do not log it
ACCURACIES = {"_acc": "", "_acc_norm": " (per character)"}


def task_names(names: Iterable[str], hellaswag: str) -> dict[str, str]:
    """Return the labels of the accuracy curves among these names."""
    return {name: (hellaswag if name.startswith("hellaswag_") else name.removesuffix(end)) + text
            for name in names for end, text in ACCURACIES.items() if name.endswith(end)}


def charts(last: dict[str, Optional[float]], hellaswag: str, first: str = "",
           memory: str = "allocated by PyTorch") -> list[dict[str, Any]]:
    """Return the charts for the page's data, given each curve's last value, and what peak memory counts.

    The chart of the curve `first` comes first, and those of unknown curves last.
    """
    left = [name for name in last if name not in HIDDEN and not name.endswith(SUFFIXES)]
    tasks, made = task_names(left, hellaswag), []

    def add(identity: str, title: str, unit: str, style: tuple[str, ...], curves: dict[str, str]) -> None:
        series = []
        for curve, label in curves.items():
            if curve not in left:
                continue
            left.remove(curve)
            stem = next((curve.removesuffix(end) for end in ACCURACIES if curve.endswith(end)), curve)
            has_error = f"{stem}_stderr" in last and not curve.endswith("_acc_norm")
            is_rare = curve in tasks or curve.startswith(("val_", "generation_", "evaluation_", "save_"))
            label = memory if curve == "peak_memory_bytes" else label
            chance = last.get(f"{stem}_chance", CHANCE.get(stem))
            series.append({"curve": curve, "label": label, "error": f"{stem}_stderr" if has_error else None,
                           "kind": "points" if is_rare else "line",
                           "reference": chance if curve in tasks or curve in CHANCE else None})
        if series:
            styles = {name: name in style for name in ("log", "falling", "percent", "stacked")}
            made.append({"id": identity, "title": title, "unit": unit, **styles, "series": series})

    for identity, title, unit, style, curves in KNOWN:
        if identity == "loss" and first != "val_loss":  # that of GRPO and KTO has no unit
            unit = ""
        add(identity, title, unit, style, tasks if identity == "accuracy" else curves)
    while left:  # an objective's own metric, in training and validation
        stem = left[0].removeprefix("val_")
        labels = {stem: "training", f"val_{stem}": "validation"}
        if scores_answers := stem.startswith("generation_"):  # METRIC's
            labels = {stem: "held-out prompts"}
        title = stem.removeprefix("generation_").replace("_", " ").capitalize()
        add(stem.replace("_", "-"), title + ", of generated answers" * scores_answers, "", (), labels)
    return sorted(made, key=lambda chart: all(line["curve"] != first for line in chart["series"]))


FEWEST_POINTS = 50  # shown per long curve
RECENT_LINES = 21  # the recent value is their median


class Points(NamedTuple):
    """The points of a curve; each one stands for one or more logged values."""

    x: np.ndarray  # (n,) float64, ascending: the mean step
    y: np.ndarray  # (n,) float64, the mean value; NaN for a gap
    low: np.ndarray  # (n,) float64, the lowest value
    high: np.ndarray  # (n,) float64, the highest value
    count: np.ndarray  # (n,) float64, the number of values; 0 for a gap


class Curve:
    """The values of a metric, added in the order of their steps; None and non-finite values are gaps."""

    def __init__(self):
        self.x, self.y = array("d"), array("d")

    def add(self, x: float, y: Optional[float]) -> None:
        self.x.append(x)
        self.y.append(y if y is not None and math.isfinite(y) else math.nan)

    def __len__(self) -> int:
        return len(self.x)

    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values without gaps."""
        y = np.array(self.y)
        return np.array(self.x, np.int64)[~np.isnan(y)], y[~np.isnan(y)]

    @property
    def recent(self) -> np.ndarray:
        return self.known()[1][-RECENT_LINES:]

    @property
    def newest(self) -> Optional[tuple[float, int]]:
        """The newest value (NaN for a gap), and its step."""
        return (self.y[-1], int(self.x[-1])) if self.x else None

    def best(self, higher: bool = False) -> Optional[tuple[float, int]]:
        """Return the lowest (or highest) value, and its step."""
        x, y = self.known()
        index = (-y if higher else y).argmin() if len(y) else None
        return (y[index].item(), x[index].item()) if len(y) else None

    def at(self, step: int) -> Optional[float]:
        x, y = self.known()
        return y[x == step][0].item() if step in x else None

    def falls_since(self, step: int) -> bool:
        """Return whether the newest values, by their median, are below those up to a step."""
        x, y = self.known()
        return not len(y) or bool(np.median(y[-FEW:]) < np.median(y[x <= max(step, x[0])][-FEW:]))

    def rises_again_since(self, step: int) -> bool:
        """Return whether the newest value is above the one at a step, by which the curve had fallen."""
        x, y = self.known()
        until = y[x <= step]
        return len(until) > 0 and bool(until.max() > until[-1] < y[-1])

    def is_high(self) -> bool:
        """Return whether the newest value is above half of the highest."""
        _, y = self.known()
        return bool(y[-1] > y.max() / 2)

    def points(self, most: int, first: float = -math.inf, last: float = math.inf) -> Points:
        """Return at most `most` points, of the steps from `first` to `last`.

        Values are merged by buckets, whose width is a power of two, except the first and the last value.
        """
        x, y = np.array(self.x), np.array(self.y)
        x, y = (each[(x >= first) & (x <= last)] for each in (x, y))
        starts, width = np.arange(len(x)), 1
        while len(starts) > most and width <= 2 * np.ptp(x):
            is_start = np.diff(x // width, prepend=-1) != 0
            is_start[[0, 1, -1]] = True
            starts, width = np.flatnonzero(is_start), 2 * width
        sizes, count = np.diff(starts, append=len(x)), np.add.reduceat(~np.isnan(y), starts, dtype=np.float64)
        mean = np.add.reduceat(np.nan_to_num(y), starts) / np.maximum(count, 1)
        return Points(np.add.reduceat(x, starts) / sizes, np.where(count > 0, mean, np.nan),
                      np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts), count)

    def as_json(self, most: int) -> dict[str, Any]:
        """Return at most `most` points as JSON. Of a long curve, half show the last tenth: `fine`."""
        if len(self) <= most:
            return as_json(self.points(most))
        late = self.points(most // 2, self.x[-1] - (self.x[-1] - self.x[0]) / 10)
        return as_json(self.points(most // 2)) | {"fine": as_json(late)}


def rounded(value: Optional[float], digits: int = 6) -> Optional[float]:
    """Return the value with `digits` significant digits, as an int if possible; None if it is not finite."""
    if value is None or not np.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def as_json(points: Points) -> dict[str, list]:
    """Return points as JSON: steps, and values with eight digits, null for a gap. People see half as many.

    `low` and `high`, with four digits, are included if some points are merged.
    """
    curve = {"x": np.rint(points.x).astype(int).tolist(),
             "y": [rounded(value, 8) for value in points.y.tolist()]}
    if (points.count > 1).any():
        curve |= {"low": [rounded(value, 4) for value in points.low.tolist()],
                  "high": [rounded(value, 4) for value in points.high.tolist()]}
    return curve


def points_per_curve(lengths: list[int], budget: int) -> int:
    """Return the limit of points per curve that keeps the sum within `budget`; short curves need fewer."""
    waiting = sorted(lengths)
    while waiting and waiting[0] <= budget // len(waiting):
        budget -= waiting.pop(0)
    return max(FEWEST_POINTS, budget // len(waiting)) if waiting else max(lengths, default=0)
