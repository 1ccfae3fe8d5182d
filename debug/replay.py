"""A step of a run taken again, to see what was in it: the same rows, the same weights, watched closely.

Nothing is written into the run's folder, so that a run can be looked at while it goes on. Shapes: B rows, T tokens.
"""

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
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import hf_format, store
from checkpoint.schema import read_entries
from common.errors import NonFiniteError, SettingsError
from common.text import printable, show
from config import Config, rules
from data_pipeline.batch import Batch
from debug.row_report import RowReport, describe_parameters, describe_row, examine_rows, numbered
from model import padded
from model_utils import (
    build_model,
    choose_device,
    choose_dtype,
    compile_where_possible,
    make_deterministic,
    seed_step,
)
from objectives.base import LossSum, Objective
from parallel.collectives import Ranks, RunContext, StopSignals
from settings.load import Layer, read_json_file, validate
from train import train_step
from training.build_objective import Base, choose_objective
from training.diagnostics import robust_z_score
from training.optim import Optimizer, learning_rate
from training.run_folder import RunFolder, segments
from training.run_log import RunLog
from training.start import find_base, named_checkpoint, start_at
from training.state import Run, StepResult, place_weights, read_inputs, resume

ROUNDING = 1e-3  # relative: what other kernels, or sums in another order, make of a loss at most
STANDS_OUT = 8.0  # robust standard deviations above the median row

Say = Callable[[str], Any]


# --------------------------------------------------------------------------------------------------------- what there was then


def read_settings(run_dir: Path, flags: Layer, step: int) -> tuple[Config, int]:
    """The settings that a step of a run was taken with, for a replay in one process, changed by flags; and the number of ranks
    that the run had.

    Raises:
        SettingsError: there is no such run, or its settings and the flags do not go together.
    """
    parts = [file for begins, file in segments(run_dir) if begins <= step]
    file = parts[-1] if parts else run_dir / "config.json"
    if not file.is_file():
        raise SettingsError(f"{run_dir} is no run's folder, or no step was taken in it: it holds no config.json; name one, "
                            "such as runs/first")
    kept = read_json_file(file)
    merged = {**kept.values, **flags.values, "world_size": (1, "replay")}
    config, invalid = validate(merged)
    problems = [*kept.problems, *flags.problems, *invalid.values()] or [problem.message for problem in rules(config)]
    if problems:
        raise SettingsError(*problems)
    return config, int(kept.values.get("world_size", (1, ""))[0])


def read_ledger(run_dir: Path, step: int) -> dict[int, dict[str, Any]]:
    """The ledger's lines by their steps.

    Raises:
        SettingsError: there is none of this step.
    """
    path = run_dir / "ledger.jsonl"
    lines = {entry["step"]: entry for entry in read_entries(path)}
    if step not in lines:
        there = f"{path} has the steps {min(lines)} to {max(lines)}" if lines else f"{path} has none yet"
        raise SettingsError(f"--step {step}: there is no such step of this run; {there}")
    return lines


def find_weights(run_dir: Path, step: int, config: Config) -> tuple[Optional[Path], bool, list[str]]:
    """The newest verified checkpoint before a step, or what the run began with; whether it is of this run; warnings.

    Raises:
        CheckpointError: there are checkpoints, and none of them verifies; or what the run began with is gone.
    """
    checkpoints_dir = run_dir / "checkpoints"
    folder, messages = store.newest_verified(checkpoints_dir, step - 1)
    named = named_checkpoint(config)
    if folder or named is None:
        return folder, folder is not None, messages
    by_path = config.resume == named
    later, _ = store.newest_verified(checkpoints_dir)
    progress = store.read_state(later)["progress"] if later else {}
    if progress.get("base") and not by_path:  # the very weights, wherever they are now
        folder = find_base(config, progress, run_dir, messages.append)
    else:
        folder = store.locate(named, run_dir, messages.append)
    if (folder / store.MANIFEST).exists():
        store.verify(folder)
    return folder, by_path, messages


class AsRanks:
    """The objective for one step, with dropout drawn as each of the run's ranks drew it; their micro-batches come one after
    the other.

    Args:
        step: so many are finished before it.
        micro_batches: of all ranks.
    """

    def __init__(self, objective: Objective, seed: int, step: int, micro_batches: int, world_size: int):
        self.objective, self.seed, self.step = objective, seed, step
        self.of_each, self.taken = max(1, micro_batches // world_size), 0

    def count(self, batch: Batch) -> Tensor:
        """The objective's."""
        return self.objective.count(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LossSum:
        """The objective's, after the seed where a rank's part begins."""
        rank, within = divmod(self.taken, self.of_each)
        if not within:
            seed_step(self.seed, self.step, rank)
        self.taken += 1
        return self.objective.loss_sum(model, batch)


def open_run(run_dir: Path, config: Config, step: int, info: Say) -> Run:
    """The run as it was when it had the last verified checkpoint before the step, in this process alone.

    Raises:
        CheckpointError, DataError: what the run read or began with is gone, damaged or not what it was.
    """
    device_type = choose_device(config)
    make_deterministic(config, device_type)
    dtype = choose_dtype(config, device_type)
    ranks = Ranks(device=torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type))
    inputs = read_inputs(config.model_copy(update={"validate_every": 0, "hellaswag_every": 0}), verify=True)
    model = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
    start = start_at(*find_weights(run_dir, step, config), config, inputs.identity(config), run_dir, ranks)
    for message in (*start.warnings, *start.notes):
        info(f"Note: {message}")
    if start.own and not config.lora_enabled:  # as they are, which may not be finite
        tensors = hf_format.load_model_weights(start.folder)
        model.load_state_dict(hf_format.from_huggingface(tensors, model.config, padded(model.vocab_size), finite=False))
    else:
        place_weights(config, start, model, inputs, dtype, ranks)
    optimizer = Optimizer(model, config)
    scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
    progress = resume(config, start, model, optimizer, scaler)
    if progress.step >= step:
        raise SettingsError(f"--step {step}: this run began with step {progress.step + 1} (START_STEP, or a checkpoint's)")
    signals, log = StopSignals(), RunLog(config, 0, device_type)
    context = RunContext(ranks, signals, SimpleNamespace(info=info, warn=info))
    base = Base(config, progress, run_dir)
    objective, inputs = choose_objective(config, inputs, model, dtype, base, context)
    compile_where_possible(model, config, device_type)
    return Run(config, ranks, signals, inputs, RunFolder(run_dir), model, optimizer, scaler, progress, objective, start.folder,
               log)


# ------------------------------------------------------------------------------------------------------------ the steps again


def take_step(run: Run, batches: list[Batch], count: int, world_size: int) -> StepResult:
    """Take the next step as the run did on so many ranks, whose micro-batches hold so many units."""
    objective = AsRanks(run.objective, run.config.seed, run.progress.step, len(batches), world_size)
    rate = learning_rate(run.progress.updates, run.config)
    return train_step(replace(run, objective=objective), run.model, batches, count, rate)


def difference(value: float, then: Optional[float]) -> float:
    """How far a number is from the ledger's, relative to that; infinite where only one of them is a number."""
    if then is None or not math.isfinite(value):
        return 0.0 if then is None and not math.isfinite(value) else math.inf
    return abs(value - then) / max(abs(then), 1e-12)


def catch_up(run: Run, step: int, world_size: int, ledger: dict[int, dict[str, Any]]) -> tuple[str, bool]:
    """Take the steps before a step again; returns in words how they went, and whether they went as they did then.

    Raises:
        NonFiniteError: one of them was not finite.
    """
    first, furthest, astray = run.progress.step + 1, 0.0, ""
    begun = f"those of {run.started_from}" if run.started_from else "the initial ones"
    if first == step:
        return begun, True
    with run.inputs.training_batches(run.config, run.ranks, run.objective, run.progress.step) as loader:
        what = f"Steps {first} to {step - 1} again"
        for now in tqdm(range(first, step), desc=what, unit="step", delay=2, leave=False, disable=None):
            result = take_step(run, *next(loader), world_size)
            if not result.finite:
                raise NonFiniteError(f"step {now} is not finite already: replay that one, or this one with --at-checkpoint")
            if now in ledger:
                furthest = max(furthest, difference(result.loss, ledger[now]["loss"]))
                if furthest > ROUNDING and not astray:
                    astray = f"step {now} has a loss of {result.loss:.6g}, then {ledger[now]['loss']}"
            run.advance(result)
    how = "each gave the loss of the ledger" if furthest == 0 else f"their losses are within {furthest:.1e} of the ledger's"
    if astray:
        how = f"BUT {astray}: settings, data or machine are not what they were"
    again = f"step {first}" if first == step - 1 else f"steps {first} to {step - 1}"
    return f"{begun}, and {again} again; {how}", not astray


# ------------------------------------------------------------------------------------------------------------------ the replay


def compare(name: str, now: float, then: Optional[float]) -> str:
    """A number of the step beside the ledger's."""
    apart = difference(now, then)
    verdict = ("the same" if apart == 0 else f"{apart:.1e} apart, which is rounding" if apart <= ROUNDING else "ANOTHER")
    return f"{name:<14} {now:<12.6g} then {'not finite' if then is None else f'{then:.6g}':<12} {verdict}"


def named(reports: list[RowReport]) -> str:
    """The numbers of the first rows."""
    return ", ".join(str(report.row) for report in reports[:8])


def conclude(result: StepResult, then: dict[str, Any], reports: list[RowReport], bad_parameters: bool, alike: bool) -> str:
    """What it comes to, in a sentence or two.

    Args:
        alike: rows and weights are those of the step.
    """
    bad = [report for report in reports if report.is_bad]
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    then_finite = then["loss"] is not None and then["grad_norm"] is not None
    apart = [name for name, now in (("loss", result.loss), ("gradient norm", result.grad_norm))
             if difference(now, then["loss" if name == "loss" else "grad_norm"]) > ROUNDING]
    if bad_parameters:
        met = f", and row{'s' if len(bad) > 1 else ''} {named(bad)} met what is bad" if bad else ""
        return f"The weights were not finite before this step{met}: replay an earlier one to see what made them so."
    if bad:
        return f"Row{'s' if len(bad) > 1 else ''} {named(bad)} make{'' if len(bad) > 1 else 's'} it not finite."
    if not result.finite:
        return "The step is not finite, and none of its rows is to blame alone: lower LEARNING_RATE, or set PRECISION=bf16."
    if not then_finite:
        blame = ("neither data nor weights are to blame. Suspect the machine that it ran on, or its kernels" if alike else
                 "but it has other rows or weights than then")
        return f"It is finite now and was not then: {blame}."
    out = [report for report in reports if robust_z_score(report.loss, losses, 0) > STANDS_OUT]
    stands = ""
    if out:
        stands = (f"{f'rows {named(out)} stand' if len(out) > 1 else f'row {named(out)} stands'} out: a loss of "
                  f"{out[0].loss:.4f} beside {float(np.median(losses)):.4f} of the median row")
    if apart or not alike:
        why = f"it has another {' and '.join(apart)}" if alike else "it has other rows or weights"
        return (f"This is not the step that was: {why}. As it is now, all is finite and {stands or 'no row stands out'}, which "
                "says nothing about the step then.")
    if stands:
        return f"All is finite; {stands}."
    return "Nothing is wrong with this step: all is finite, and no row stands out."


def print_wrapped(text: str) -> None:
    """Print one entry, on lines of at most 120 columns, with what belongs to it indented."""
    indent = " " * (4 + len(text) - len(text.lstrip()))
    show(*textwrap.wrap(printable(text), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def replay(run_dir: Path, step: int, config: Config, world_size: int, rows_shown: int = 3, at_checkpoint: bool = False,
           info: Say = print_wrapped) -> None:
    """Take a step of a run again, and tell what is in it.

    Args:
        world_size: the run's.
        at_checkpoint: with the weights of the last checkpoint, which are older.
    Raises:
        SettingsError: the run has no such step.
        CheckpointError, DataError: what the run read or began with is gone, damaged or not what it was.
        NonFiniteError: a step before it was not finite.
    """
    ledger = read_ledger(run_dir, step)
    then = ledger[step]
    run = open_run(run_dir, config, step, info)
    order = run.inputs.order(config, run.ranks)
    rows = order.all_rows(step - 1)
    info(f"Step {step} of {run_dir} ({config.training_stage}), again on {run.ranks.device.type.upper()}")
    own_rows = f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}" == then["rows_crc32"]
    info(f"Rows: {len(rows)}, " + ("those of the ledger" if own_rows else "NOT those of the ledger: settings or data have changed "
                                  "since, and what follows is about other rows"))
    if at_checkpoint and run.progress.step < step - 1:
        weights, own_weights = f"those after step {run.progress.step}, which are older than the step's", False
    else:
        weights, own_weights = catch_up(run, step, world_size, ledger)
    info(f"Weights: {weights}")
    batches = [run.inputs.rows(micro_batch).to(run.ranks.device) for micro_batch in order.micro_batches(step - 1)]
    count = sum(int(run.objective.count(batch)) for batch in batches)
    parameters, bare = describe_parameters(run), numbered(run.inputs.rows)
    eager = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    with eager:
        reports = examine_rows(run, rows.tolist(), count)
        details = [describe_row(run, bare, report, count) for report in reports[:rows_shown]]
    run.progress.step = step - 1
    result = take_step(run, batches, count, world_size)
    info(compare("Loss", result.loss, then["loss"]))
    info(compare("Gradient norm", result.grad_norm, then["grad_norm"]))
    for line in (*parameters, *(line for lines in details for line in lines)):
        info(line)
    info(conclude(result, then, reports, bool(parameters), own_rows and own_weights))
