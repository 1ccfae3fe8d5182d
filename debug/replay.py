"""Replay one step of a run, with the same rows and weights, and report what was in it.

Nothing is written into the run's folder, so that a run can be examined while it continues.
"""

import itertools
import math
import textwrap
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from checkpoint import store
from checkpoint.schema import read_entries
from common.errors import NonFiniteError, SettingsError
from common.text import printable, show
from config import Config, rules
from data_pipeline.batch import Batch
from debug.row_report import RowReport, describe_parameters, describe_row, examine_rows, numbered
from model_utils import seed_step
from objectives.base import LossSum
from parallel.collectives import Ranks, RunContext, StopSignals
from settings.load import Layer, Loaded, read_json_file, validate
from train import train_step
from training.diagnostics import robust_z_score
from training.optim import learning_rate
from training.run_folder import RunFolder, segments
from training.setup import build_run, prepare_device, read_inputs
from training.start import Found, find_base, named_checkpoint, start_from
from training.state import Run, StepResult

ROUNDING = 1e-3  # the largest relative difference of a loss between kernels or orders of summation
OUTLIER = 8.0  # robust standard deviations above the median row

Say = Callable[[str], Any]


# ------------------------------------------------------------------------------ what the run recorded


def read_settings(run_dir: Path, flags: Layer, step: int) -> tuple[Config, int]:
    """Return a step's settings, changed by flags, for one process; and the number of ranks that the run had.

    Raises:
        SettingsError: there is no such run, or its settings and the flags contradict each other.
    """
    parts = [file for begins, file in segments(run_dir) if begins <= step]
    file = parts[-1] if parts else run_dir / "config.json"
    if not file.is_file():
        raise SettingsError(f"{run_dir} is no run's folder, or the run has taken no step: it holds no "
                            "config.json; name a run's folder, such as runs/first")
    saved = read_json_file(file)
    merged = {**saved.values, **flags.values, "world_size": (1, "replay"), "sharding": ("none", "replay"),
              "cpu_offload": (False, "replay"), "memory_snapshot": (None, "replay")}
    config, invalid = validate(merged)
    problems = [*saved.problems, *flags.problems, *invalid.values()] or [*rules(config)]
    if problems:
        raise SettingsError(*problems)
    return config, int(saved.values.get("world_size", (1, ""))[0])


def read_ledger(run_dir: Path, step: int) -> dict[int, dict[str, Any]]:
    """Return the ledger's lines by step.

    Raises:
        SettingsError: this step has none.
    """
    path = run_dir / "ledger.jsonl"
    lines = {entry["step"]: entry for entry in read_entries(path)}
    if step not in lines:
        recorded = f"has the steps {min(lines)} to {max(lines)}" if lines else "is empty"
        raise SettingsError(f"--step {step}: the run has no such step; {path} {recorded}")
    return lines


def find_weights(run_dir: Path, step: int, config: Config) -> Found:
    """The newest verified checkpoint before a step, or what the run started from.

    Raises:
        CheckpointError: there are checkpoints, and none of them verifies; or what the run began with is gone.
    """
    checkpoints_dir = run_dir / "checkpoints"
    folder, messages = store.newest_verified(checkpoints_dir, step - 1)
    named = named_checkpoint(config)
    if folder or named is None:
        return Found(folder, folder is not None, messages)
    by_path = config.resume == named
    later, _ = store.newest_verified(checkpoints_dir)
    progress = store.read_state(later)["progress"] if later else {}
    if progress.get("base") and not by_path:  # the very weights, wherever they are now
        folder = find_base(config, progress, run_dir, messages.append)
    else:
        folder = store.locate(named, run_dir, messages.append)
    if (folder / store.MANIFEST).exists():
        store.verify(folder)
    return Found(folder, by_path, messages)



class ReplayLog:
    """Where a replay's messages go, instead of a run's log."""

    def __init__(self, info: Say):
        self.info = info

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.info(f"Note: {text}")


def open_run(run_dir: Path, config: Config, step: int, info: Say) -> Run:
    """The run as it was at the last verified checkpoint before the step, in this process alone.

    Raises:
        CheckpointError, DataError: what the run read or started from is missing, damaged or changed.
    """
    device, log = prepare_device(config), ReplayLog(info)
    ranks = Ranks(device=torch.device("cuda", 0) if device.type == "cuda" else device)
    inputs = read_inputs(config.model_copy(update={"validate_every": 0, "hellaswag_every": 0}), verify=True)
    loaded = Loaded(config, dict.fromkeys(Config.model_fields, str(run_dir)))
    start = start_from(find_weights(run_dir, step, config), loaded, inputs.identity, run_dir, ranks)
    for message in (*start.warnings, *start.notes):
        log.warn(message)
    context = RunContext(ranks, StopSignals(), log)
    run = build_run(config, context, inputs, RunFolder(run_dir), start, for_replay=True)
    if run.progress.step >= step:
        raise SettingsError(f"--step {step}: this run began with step {run.progress.step + 1} (START_STEP, "
                            "or a checkpoint's)")
    return run


# ------------------------------------------------------------------------------------------ the steps


def take_step(run: Run, batches: list[Batch], count: int, world_size: int) -> StepResult:
    """Take the next step like a run on `world_size` ranks, whose micro-batches hold `count` units."""
    per_rank, done = max(1, len(batches) // world_size), itertools.count()

    def loss_sum(model: nn.Module, batch: Batch) -> LossSum:
        # Dropout as each rank drew it, which seeded its generators before its first micro-batch.
        rank, within = divmod(next(done), per_rank)
        if not within:
            seed_step(run.config.seed, run.progress.step, rank)
        return run.objective.loss_sum(model, batch)

    lr = learning_rate(run.progress.updates, run.config)
    one_process = replace(run, objective=SimpleNamespace(loss_sum=loss_sum))
    return train_step(one_process, run.model, batches, count, lr)


def difference(now: float, then: Optional[float]) -> float:
    """Return the relative difference from the ledger's number; infinite if only one of them is finite."""
    if then is None or not math.isfinite(now):
        return 0.0 if then is None and not math.isfinite(now) else math.inf
    return abs(now - then) / max(abs(then), 1e-12)


def replay_before(run: Run, step: int, world_size: int,
                  ledger: dict[int, dict[str, Any]]) -> tuple[str, bool]:
    """Take the steps before `step`; return a description, and whether their losses agree with the ledger.

    Raises:
        NonFiniteError: one of them was not finite.
    """
    # `largest` is the largest relative difference, `deviating` describes the first one that is not rounding.
    first, largest, deviating = run.progress.step + 1, 0.0, ""
    start = f"from {run.started_from}" if run.started_from else "the initial ones"
    if first == step:
        return start, True
    with run.inputs.training_batches(run.config, run.ranks, run.objective, run.progress.step) as loader:
        title = f"Replaying steps {first} to {step - 1}"
        for now in tqdm(range(first, step), desc=title, unit="step", delay=2, leave=False, disable=None):
            result = take_step(run, *next(loader), world_size)
            if not result.finite:
                raise NonFiniteError(f"step {now} is not finite already: replay it, or add --at-checkpoint")
            if now in ledger:
                largest = max(largest, difference(result.loss, ledger[now]["loss"]))
                if largest > ROUNDING and not deviating:
                    deviating = f"the loss of step {now} is {result.loss:.6g}, not {ledger[now]['loss']}"
            run.advance(result)
    steps = f"step {first}" if first == step - 1 else f"steps {first} to {step - 1}"
    agreement = f"losses within {largest:.1e} of the ledger" if largest else "losses equal to the ledger"
    if deviating:
        agreement = f"BUT {deviating}: settings, data or machine have changed"
    return f"{start}, then {steps} replayed; {agreement}", not deviating


# ----------------------------------------------------------------------------------------- the report


def compare(name: str, now: float, then: Optional[float]) -> str:
    """Return a line with a number of the step and the ledger's."""
    apart, ledger = difference(now, then), "not finite" if then is None else f"{then:.6g}"
    verdict = f"differs by {apart:.1e}, which is rounding" if apart else "the same"
    return f"{name:<14} {now:<12.6g} ledger {ledger:<12} {verdict if apart <= ROUNDING else 'DIFFERENT'}"


def rows_of(reports: list[RowReport]) -> str:
    """Return the numbers of the first rows, as in "rows 3, 5"."""
    return f"row{'s' if len(reports) > 1 else ''} {', '.join(str(report.row) for report in reports[:8])}"


def conclude(result: StepResult, then: dict[str, Any], reports: list[RowReport], bad_parameters: bool,
             is_same: bool) -> str:
    """Return the conclusion of the replay, one or two sentences.

    Args:
        then: the step's line in the ledger.
        is_same: the rows and weights are those of the step.
    """
    # Something is not finite, now or then.
    bad = [report for report in reports if report.is_bad]
    if bad_parameters:
        met = f", and {rows_of(bad)} used them" if bad else ""
        return f"The weights were not finite before this step{met}: replay an earlier step to find the cause."
    if bad:
        return f"Not finite because of {rows_of(bad)}."
    if not result.finite:
        return ("The step is not finite, but each of its rows alone is: lower LEARNING_RATE, or set "
                "PRECISION=bf16.")
    if then["loss"] is None or then["grad_norm"] is None:
        cause = "it has other rows or weights than then"
        if is_same:
            cause = "data and weights are not the cause. Suspect the machine that it ran on, or its kernels"
        return f"It is finite now, but was not then: {cause}."

    # All is finite.
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    outliers = [report for report in reports if robust_z_score(report.loss, losses, 0) > OUTLIER]
    found = "no row is an outlier"
    if outliers:
        what = "are outliers" if len(outliers) > 1 else "is an outlier"
        found = (f"{rows_of(outliers)} {what} with a loss of {outliers[0].loss:.4f}, the median is "
                 f"{float(np.median(losses)):.4f}")
    numbers = {"loss": (result.loss, then["loss"]), "gradient norm": (result.grad_norm, then["grad_norm"])}
    apart = [name for name, pair in numbers.items() if difference(*pair) > ROUNDING]
    if apart or not is_same:
        why = f"another {' and '.join(apart)}" if is_same else "other rows or weights"
        return (f"This is not the recorded step, as it has {why}. Now all is finite and {found}, which says "
                "nothing about the recorded step.")
    return f"All is finite; {found}." if outliers else f"Nothing is wrong: all is finite, and {found}."


def print_wrapped(text: str) -> None:
    """Print an entry, wrapped at 120 columns with a hanging indent."""
    indent = " " * (4 + len(text) - len(text.lstrip()))
    show(*textwrap.wrap(printable(text), 120, subsequent_indent=indent, break_long_words=False,
                        break_on_hyphens=False))


def replay(run_dir: Path, step: int, flags: Layer, rows_shown: int = 3, at_checkpoint: bool = False,
           info: Say = print_wrapped) -> None:
    """Replay a step of a run in this process, and report what is in it.

    Args:
        flags: settings to change.
        rows_shown: rows to describe, the worst first.
        at_checkpoint: use the weights of the last checkpoint instead of replaying the steps after it.
    Raises:
        SettingsError: the run has no such step, or the flags do not fit its settings.
        CheckpointError, DataError: what the run read or started from is missing, damaged or changed.
        NonFiniteError: a step before this one is not finite.
    """
    config, world_size = read_settings(run_dir, flags, step)
    ledger = read_ledger(run_dir, step)
    then = ledger[step]
    run = open_run(run_dir, config, step, info)
    info(f"Step {step} of {run_dir} ({config.training_stage}), replayed on {run.ranks.device.type.upper()}")

    # Its rows and weights
    order = run.inputs.order(config, run.ranks)
    rows = order.all_rows(step - 1)
    same_rows = f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}" == then["rows_crc32"]
    info(f"Rows: {len(rows)}, " + ("as in the ledger" if same_rows else
                                   "NOT those of the ledger: settings or data have changed since"))
    if at_checkpoint and run.progress.step < step - 1:
        weights, same_weights = f"of step {run.progress.step}, older than the recorded step's", False
    else:
        weights, same_weights = replay_before(run, step, world_size, ledger)
    info(f"Weights: {weights}")

    # Row by row, in eager mode, as hooks watch the modules; then the step itself
    batches = [run.inputs.rows(micro_batch).to(run.ranks.device)
               for micro_batch in order.micro_batches(step - 1)]
    count = sum(int(run.objective.count(batch)) for batch in batches)
    parameters, bare = describe_parameters(run), numbered(run.inputs.rows)
    with torch.compiler.set_stance("force_eager") if config.compile else nullcontext():
        reports = examine_rows(run, rows.tolist(), count)
        details = [line for report in reports[:rows_shown] for line in describe_row(run, bare, report, count)]
    run.progress.step = step - 1
    result = take_step(run, batches, count, world_size)
    info(compare("Loss", result.loss, then["loss"]))
    info(compare("Gradient norm", result.grad_norm, then["grad_norm"]))
    for line in (*parameters, *details):
        info(line)
    info(conclude(result, then, reports, bool(parameters), same_rows and same_weights))
