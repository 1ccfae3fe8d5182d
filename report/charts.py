"""Which curves stand in one chart, under which title and unit."""

from collections.abc import Iterable
from typing import Any, Optional

# Id, title, unit, what holds of "log", "percent" and "stacked", and the curves with their labels.
KNOWN: tuple[tuple[str, str, str, tuple[str, ...], dict[str, str]], ...] = (
    ("loss", "Loss", "nats", (), {"train_loss": "training", "val_loss": "validation"}),
    ("bits-per-byte", "Bits per byte", "bits", (), {"val_bits_per_byte": "validation"}),
    ("accuracy", "Accuracy", "%", ("percent",), {}),  # of the tasks, see below
    ("generation", "Generated answers", "%", ("percent",), {
        "generation_exact_match": "exact match", "generation_rouge_l": "ROUGE-L", "generation_bleu": "BLEU"}),
    ("learning-rate", "Learning rate", "", (), {"learning_rate": "learning rate"}),
    ("grad-norm", "Gradient norm", "", ("log",), {"grad_norm": "gradient norm"}),
    ("throughput", "Tokens per second", "tokens/s", (), {"tokens_per_second": "tokens per second"}),
    ("utilization", "FLOPs utilization", "%", ("percent",), {
        "mfu": "MFU (what the model needs)", "hfu": "HFU (what is computed)"}),
    ("phases", "Time of a step by phase", "s", ("stacked",), {
        "data_seconds": "data", "forward_seconds": "forward", "backward_seconds": "backward",
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
# What is not drawn: times and counts that other curves rest on, and bands and references of other curves.
HIDDEN = {"time", "step_seconds", "tokens_seen", "val_perplexity"}
SUFFIXES = ("_stderr", "_chance", "_n")
ACCURACIES = {"_acc": "", "_acc_norm": " (by length)"}


def task_names(names: Iterable[str], hellaswag: str) -> dict[str, str]:
    """The labels of the accuracies among these curves."""
    return {name: (hellaswag if name.startswith("hellaswag_") else name.removesuffix(end)) + text
            for name in names for end, text in ACCURACIES.items() if name.endswith(end)}


def charts(last: dict[str, Optional[float]], hellaswag: str) -> list[dict[str, Any]]:
    """The charts of these curves, those of unknown ones last.

    Args:
        last: the last value of each curve, of which the chances are taken.
        hellaswag: the name of HellaSwag's items, HELLASWAG_NAME.
    """
    left = [name for name in last if name not in HIDDEN and not name.endswith(SUFFIXES)]
    made = []

    def series(curve: str, label: str) -> dict[str, Any]:
        stem = next((curve.removesuffix(end) for end in ACCURACIES if curve.endswith(end)), curve)
        error = f"{stem}_stderr" if f"{stem}_stderr" in last and not curve.endswith("_acc_norm") else None
        is_rare = curve in tasks or curve.startswith(("val_", "generation_", "evaluation_", "save_"))
        reference = last.get(f"{stem}_chance", 0.25 if stem == "hellaswag" else None)
        return {"curve": curve, "label": label, "error": error, "kind": "points" if is_rare else "line",
                "reference": reference if curve in tasks else None}

    tasks = task_names(left, hellaswag)
    for identity, title, unit, style, curves in KNOWN:
        own = [series(name, label) for name, label in (tasks if identity == "accuracy" else curves).items()
               if name in left]
        left = [name for name in left if name not in {each["curve"] for each in own}]
        made.append(chart(identity, title, unit, style, own))
    for name in list(left):  # an objective's own metric, in training and validation
        if name in left:
            stem = name.removeprefix("val_")
            both = {stem: "training", f"val_{stem}": "validation"}
            own = [series(each, label) for each, label in both.items() if each in left]
            left = [each for each in left if each not in both]
            made.append(chart(stem.replace("_", "-"), stem.replace("_", " ").capitalize(), "", (), own))
    return [each for each in made if each["series"]]


def chart(identity: str, title: str, unit: str, style: Iterable[str], series: list) -> dict[str, Any]:
    """A chart as in the page's data."""
    styles = {name: name in style for name in ("log", "percent", "stacked")}
    return {"id": identity, "title": title, "unit": unit, **styles, "series": series}
