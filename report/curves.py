"""Group curves into charts, and store curves of any length in bounded memory.

A long curve keeps the mean, minimum and maximum of buckets of steps."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import numpy as np

# Id, title, unit, styles ("log", "falling", "percent", "stacked"), and curves with their labels.
KNOWN: tuple[tuple[str, str, str, tuple[str, ...], dict[str, str]], ...] = (
    ("loss", "Loss", "nats", ("falling",), {"train_loss": "training", "val_loss": "validation"}),
    ("bits-per-byte", "Bits per byte", "bits", ("falling",), {"val_bits_per_byte": "validation"}),
    ("accuracy", "Accuracy", "%", ("percent",), {}),  # curves come from `task_names`
    ("generation", "Generated answers", "%", ("percent",), {
        "generation_exact_match": "exact match", "generation_rouge_l": "ROUGE-L", "generation_bleu": "BLEU"}),
    ("reward", "Reward", "", (), {"reward": "answers in training", "val_reward": "held-out prompts"}),
    ("length", "Answer length", "tokens", (), {"answer_tokens": "with the end"}),
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
        "peak_memory_bytes": "allocated by PyTorch", "gpu_memory_bytes": "used on the GPU"}),
    ("power", "Power", "W", (), {"power_watts": "all GPUs"}),
    ("energy", "Energy per token", "J", (), {"joules_per_token": "joules per token"}),
    ("gpu-utilization", "GPU utilization", "%", (), {"gpu_utilization": "GPU utilization"}),
    ("temperature", "GPU temperature", "°C", (), {"gpu_temperature_celsius": "hottest GPU"}),
    ("clock", "SM clock", "MHz", (), {"gpu_clock_mhz": "slowest GPU"}),
    ("throttling", "Time with a throttle reason", "%", ("percent",), {"gpu_throttled": "throttled"}))
# Not drawn: x axes, derived values, and the error bands and reference lines of other curves.
HIDDEN = {"time", "step_seconds", "tokens_seen", "val_perplexity"}
SUFFIXES = ("_stderr", "_chance", "_n")
ACCURACIES = {"_acc": "", "_acc_norm": " (by length)"}


def task_names(names: Iterable[str], hellaswag: str) -> dict[str, str]:
    """Return the labels of the accuracy curves among these names."""
    return {name: (hellaswag if name.startswith("hellaswag_") else name.removesuffix(end)) + text
            for name in names for end, text in ACCURACIES.items() if name.endswith(end)}


def charts(last: dict[str, Optional[float]], hellaswag: str) -> list[dict[str, Any]]:
    """Return the charts for the page's data, given each curve's last value; unknown curves come last."""
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
            chance = last.get(f"{stem}_chance", 0.25 if stem == "hellaswag" else None)
            series.append({"curve": curve, "label": label, "error": f"{stem}_stderr" if has_error else None,
                           "kind": "points" if is_rare else "line",
                           "reference": chance if curve in tasks else None})
        if series:
            styles = {name: name in style for name in ("log", "falling", "percent", "stacked")}
            made.append({"id": identity, "title": title, "unit": unit, **styles, "series": series})

    for identity, title, unit, style, curves in KNOWN:
        add(identity, title, unit, style, tasks if identity == "accuracy" else curves)
    while left:  # an objective's own metric, in training and validation
        stem = left[0].removeprefix("val_")
        add(stem.replace("_", "-"), stem.replace("_", " ").capitalize(), "", (),
            {stem: "training", f"val_{stem}": "validation"})
    return made


MOST_POINTS = 4096  # kept per curve; a page shows fewer
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
    """The points of a metric, added in order. Beyond twice MOST_POINTS, points are merged into buckets.

    Bucket widths are powers of two, so that mean and range remain exact after any number of merges. The first
    and last points are never merged.
    """

    def __init__(self):
        self.kept, self.width = Points(*np.empty((5, 0))), 1
        self.recent = np.empty(0)  # the newest values, at most RECENT_LINES
        self.first: Optional[float] = None
        self.lowest: Optional[tuple[float, int]] = None  # the lowest value, and its step
        self.newest: Optional[tuple[float, int]] = None  # the newest value, and its step

    def add(self, x: Iterable[int], y: np.ndarray) -> None:
        """Append points in order; a non-finite value is a gap."""
        x, y = np.array(x, np.float64), np.where(np.isfinite(y), y, np.nan)
        is_known = ~np.isnan(y)
        if is_known.any():
            place = np.nanargmin(y)
            self.lowest = min(filter(None, (self.lowest, (y[place].item(), int(x[place])))))
            self.first = y[is_known][0].item() if self.first is None else self.first
            self.newest = y[is_known][-1].item(), int(x[is_known][-1])
        self.recent = np.concatenate((self.recent, y[is_known]))[-RECENT_LINES:]
        added = Points(x, y, y, y, is_known.astype(np.float64))
        self.kept = Points(*map(np.concatenate, zip(self.kept, added)))
        if len(self) > 2 * MOST_POINTS:
            self.width, self.kept = merged(self.kept, MOST_POINTS, self.width)

    def __len__(self) -> int:
        return len(self.kept.x)

    def steps(self) -> np.ndarray:  # with an unmerged value, ascending
        return self.kept.x[self.kept.count == 1].astype(np.int64)

    def at(self, step: int) -> Optional[float]:
        """Return the value of a step, or None if it has none or is merged with others."""
        values = self.kept.y[(self.kept.x == step) & (self.kept.count == 1)]
        return values[0].item() if len(values) else None

    def points(self, most: int) -> Points:
        kept = bucketed(self.kept, self.width) if self.width > 1 else self.kept
        return merged(kept, most, self.width)[1]

    def as_json(self, most: int) -> dict[str, Any]:
        """Return at most `most` points as JSON. Of a long curve, half show the last tenth: `fine`."""
        if len(self) <= most:
            return as_json(self.points(most))
        is_late = self.kept.x >= self.kept.x[-1] - np.ptp(self.kept.x) / 10
        late = merged(Points(*(column[is_late] for column in self.kept)), most // 2, self.width)[1]
        return as_json(self.points(most // 2)) | {"fine": as_json(late)}


def merged(points: Points, most: int, width: int = 1) -> tuple[int, Points]:
    """Double the bucket width (a power of two) until at most `most` points or few buckets remain."""
    while len(points.x) > most:
        points = bucketed(points, width)
        if len(points.x) <= most or width > np.ptp(points.x):
            break
        width *= 2
    return width, points


def bucketed(points: Points, width: int) -> Points:
    """Merge the points in each bucket of `width` steps, except the first and last points of the curve."""
    if len(points.x) <= 2:
        return points
    bucket = points.x // width
    is_start = np.diff(bucket, prepend=bucket[0] - 1) != 0
    is_start[[1, -1]] = True
    starts = np.flatnonzero(is_start)
    sizes = np.diff(starts, append=len(bucket))
    count = np.add.reduceat(points.count, starts)
    # Weight of each point in its bucket; equal weights if the bucket contains only gaps.
    weight = np.where(np.repeat(count, sizes) > 0, points.count, 1)
    share = weight / np.repeat(np.where(count > 0, count, sizes), sizes)
    y = np.add.reduceat(np.nan_to_num(points.y) * share, starts)
    return Points(np.add.reduceat(points.x * share, starts), np.where(count > 0, y, np.nan),
                  np.fmin.reduceat(points.low, starts), np.fmax.reduceat(points.high, starts), count)


def rounded(value: Optional[float], digits: int = 6) -> Optional[float]:
    """Return the value with `digits` significant digits, as an int if possible; None if it is not finite."""
    if value is None or not np.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def as_json(points: Points) -> dict[str, list]:
    """Return points as JSON: steps, and values with six digits, null for a gap.

    `low` and `high`, with four digits, are included if some points are merged.
    """
    curve = {"x": np.rint(points.x).astype(int).tolist(),
             "y": [rounded(value) for value in points.y.tolist()]}
    if (points.count > 1).any():
        curve |= {"low": [rounded(value, 4) for value in points.low.tolist()],
                  "high": [rounded(value, 4) for value in points.high.tolist()]}
    return curve


def points_per_curve(lengths: list[int], budget: int) -> int:
    """Return the limit of points per curve that keeps the sum within `budget`; short curves need fewer."""
    waiting = sorted(lengths)
    while waiting and waiting[0] <= budget // len(waiting):
        budget -= waiting.pop(0)
    return max(FEWEST_POINTS, budget // len(waiting)) if waiting else MOST_POINTS * 2
