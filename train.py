"""Train Llama 3: `./paddock train` or torchrun starts a process for each rank. --help lists settings."""

import math
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from common import text
from common.errors import PaddockError, SettingsError
from config import KINDS
from parallel import process
from parallel.process import EXIT_PREEMPTED
from plan.command_line import Planned, exit_with, plan_on_rank0
from plan.layers import read_flags
from plan.make import make_plan

USAGE = ("./paddock train [--preset NAME] [--config FILE] [--env-file FILE] [--any-setting VALUE ...] "
         "[--check]")

if __name__ == "__main__":
    process.open_missing_streams()
    process.exit_with_launcher()
    process.exit_at_signals()
    for stream in (sys.stdout, sys.stderr):  # a line is one write, also under `python -u`, as in torchrun
        stream.reconfigure(line_buffering=True, write_through=False)
    # Before torch's import, which takes seconds: a typo is reported now.
    named = ("PRESET", *(setting for setting, _ in KINDS.values()))
    is_unset = not (sys.argv[1:] or os.path.exists(".env") or any(map(os.environ.get, named)))
    ARGV = ["--preset=sample"] if is_unset else sys.argv[1:]
    PLANNED = plan_on_rank0(ARGV, USAGE)
    if isinstance(PLANNED, PaddockError) and os.environ.get("WORLD_SIZE", "1") == "1":
        if process.write_error_file(PLANNED.exit_code, str(PLANNED)):  # the launcher prints it
            sys.exit(PLANNED.exit_code)
        exit_with(PLANNED)
    if is_unset and os.environ.get("LOCAL_RANK", "0") == "0":
        text.show("Nothing is set, so the sample model is trained (--preset sample).")

# ruff: noqa: E402
import numpy as np
import torch
from torch import Tensor

from common.activity import ACTIVITY, phase
from dataloaders import Batch, first_micro_batch, load_steps
from evaluation.during_run import evaluate
from learn.objectives import Prepared
from learn.optim import Reducer, clip_scale, learning_rate, make_reducer
from model import choose_masks
from parallel.ranks import Interrupted, classify_exception, collective, stop_watchdog, widened
from run.build import open_run
from run.extensions import Extension, find
from run.run import (
    Run,
    StepResult,
    due,
    finish_saving,
    how_to_resume,
    record_settings,
    save_checkpoint,
    saves_end,
    start_writing,
)
from run.step_log import log_step, median_and_deviation, stop_before


def main(argv: Sequence[str] = (), planned: Planned = None) -> int:
    """Run with these flags, of which rank 0 may have made a plan; return the exit code."""
    try:
        planned = planned or plan_on_rank0(argv, USAGE)
        if read_flags(argv).check:
            with text.exit_if_unread():
                code = find("forecast", "--check").check(planned, argv) if planned else 0
        else:
            code = train(planned, argv)
    except Exception as error:
        stop_watchdog()
        if (report := classify_exception(error)) is None:  # a bug in Paddock
            sentence = text.printable(f"rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}")
            process.write_error_file(1, sentence, traceback.format_exc())
            raise
        if not process.write_error_file(report.code, report.sentence, is_secondary=report.is_secondary):
            if isinstance(error, SettingsError):
                exit_with(error)
            with process.first_on_machine() if report.on_all_ranks else nullcontext(True) as is_reporting:
                if is_reporting:
                    text.print_safely(f"error: {report.sentence}", sys.stderr)
        return report.code
    process.write_error_file(code)
    return code


@collective
def train(planned: Planned, argv: Sequence[str]) -> int:
    """Start the run and train until it is finished; return the exit code."""
    try:
        with (text.status_line(lambda: f"step {ACTIVITY.step}: {ACTIVITY.phase}".removeprefix("step 0: ")),
              open_run(planned, partial(make_plan, argv, None)) as run):
            reducer = make_reducer(run.model, run.ranks, run.config, run.optimizer)
            start_writing(run)
            ACTIVITY.phase, ACTIVITY.step = "other", run.progress.step
            hooks = ACTIVITY.hooks  # runs may be nested
            ACTIVITY.hooks = [extension.phase for extension in run.extensions
                              if type(extension).phase is not Extension.phase]
            for extension in run.extensions:
                extension.run_start(run)
            with saves_end(run):
                code = train_loop(run, reducer)
            del reducer  # destroying a DDP model after its process group can hang
            ACTIVITY.phase, ACTIVITY.hooks = "the end", hooks
            return code
    except Interrupted:  # before the first step
        return EXIT_PREEMPTED


@collective
def train_loop(run: Run, reducer: Reducer) -> int:
    """Take the remaining steps, and evaluate, log and save when due; return the exit code."""
    config, progress, log = run.config, run.progress, run.log
    if run.takes_no_step and progress.pending_metrics is None:
        log.info(f"Nothing to do: the run is at step {progress.step}, and MAX_STEPS={config.max_steps}. "
                 f"{run.how_to_continue()}")
        return 0
    started, seconds, first = time.perf_counter(), [], progress.step
    try:
        with load_steps(run.inputs.rows, run.order, run.ranks.device, run.objective.count,
                        progress.step) as loader:
            # A new run is evaluated before its first step; a resumed one completes what a signal interrupted.
            if progress.pending_metrics is not None:
                finish_step(run)
            while not run.takes_no_step:
                for extension in run.extensions:
                    extension.step_begin(run)
                ACTIVITY.step, begun = progress.step + 1, time.perf_counter()
                with phase("data"):
                    prepared = prepare_step(run, *next(loader))
                    seed_step(config.seed, progress.step, run.ranks.rank)
                    lr = learning_rate(progress.updates, config)
                take = getattr(run.objective, "take_step", take_step)
                result = take(run, reducer, prepared.batches, prepared.count, lr)
                result = result._replace(metrics=prepared.metrics | result.metrics)
                seconds.append(time.perf_counter() - begun)

                # Log the step first: a bad step is not counted, and the run stops.
                if progress.step == first:
                    record_settings(run)
                log_step(run, result)
                for extension in run.extensions:
                    extension.step_end(run, prepared.batches, result)
                if not result.finite or (result.spike and config.loss_spike_policy == "stop"):
                    stop_before(run, result)
                run.advance(result)

                if due(config.log_every, progress.step, run.finished):
                    progress.pending_metrics = step_metrics(run, result, lr, sum(seconds) / len(seconds))
                    seconds.clear()
                if result.is_written:
                    finish_saving(run)
                if result.stop:
                    raise Interrupted
                finish_step(run)
    except Interrupted:
        if progress.pending_metrics:
            log.step({"step": progress.step, **progress.pending_metrics})
        save_checkpoint(run, wait=True)
        log.ending = [f"Stopped by a signal; step {progress.step} is saved.",
                      f"To resume: {how_to_resume(run)}."]
        return EXIT_PREEMPTED
    if progress.step != config.max_steps:
        log.info(run.how_to_continue())
    took = f"; this start took {progress.step - first:,} of them" if first else ""
    took = f"{took} in {text.duration(time.perf_counter() - started)}"
    log.ending = [f"{'Finished' if run.finished else 'Stopped after'} {text.counted(progress.step, 'step')} "
                  f"({progress.tokens_seen:,} tokens){took}."]
    for line in (line for extension in run.extensions for line in extension.summary(run)):
        log.info(line, shown="")
    return 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators for one step of one rank, so that an objective of your own resumes exactly."""
    entropy = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]
    torch.default_generator.manual_seed(int(entropy) & (2**63 - 1))
    if torch.cuda.is_initialized():  # otherwise torch.manual_seed would format a stack, for later
        torch.cuda.manual_seed_all(int(entropy) & (2**63 - 1))
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(int(entropy) & (2**63 - 1))
    random.seed(int(entropy))
    np.random.seed(int(entropy) & 0xFFFFFFFF)


@collective
def prepare_step(run: Run, batches: list[Batch], count: int) -> Prepared:
    """Return a step's batches, with `count` units, as the extensions and the objective want them."""
    for extension in run.extensions:
        if (changed := extension.batches(run, batches)) is not batches:
            batches, count = changed, sum(int(run.objective.count(batch)) for batch in changed)
    if prepare := getattr(run.objective, "prepare_step", None):
        with phase("forward"):
            return prepare(batches, run.progress.step)
    return Prepared(batches, count, {})


class StepNumbers(NamedTuple):
    """Scalars of a step, the same on every rank: on the device, and then on the host."""

    units: Tensor | float  # in the global batch
    norm: Tensor | float  # of the gradients
    norm_sum: Tensor | float  # over the ranks: not finite if the norm of one rank is not
    stopping_ranks: Tensor | float
    written_ranks: Tensor | float  # those that have written their part of the checkpoint
    is_skipped: Tensor | float
    misfit: Tensor | float


@collective
def take_step(run: Run, reducer: Reducer, batches: list[Batch], count: int, lr: float) -> StepResult:
    """Take a step; with REPRODUCIBLE, repeat it until its gradients fit the scale of their sums."""
    result = train_step(run, reducer, batches, count, lr)
    while result.misfit:
        reducer.rescale(run.progress, result.misfit)
        result = train_step(run, reducer, batches, count, lr)
    return result


@phase("optimizer")
@collective
def train_step(run: Run, reducer: Reducer, batches: list[Batch], count: int, lr: float) -> StepResult:
    """Take one optimizer step on the exact mean over all units of the global batch.

    The host waits for the GPU only once, after everything is enqueued. So the device decides whether to skip
    the update (it is not finite, or LOSS_SPIKE_POLICY excludes it), and the host reads the decision later.
    `count` is the number of units (targets or pairs) in this rank's micro-batches.
    """
    config, ranks, scaler = run.config, run.ranks, run.scaler
    with phase("forward"):
        units = ranks.all_reduce(widened(torch.full((), count, device=ranks.device)))
        reducer.begin(units, run.progress)
    sums = accumulate_gradients(run, reducer, batches)
    # With DDP or FSDP, the last backward has averaged the gradients over the ranks, and `reduce` adds those
    # that FSDP leaves out. With REPRODUCIBLE, `reduce` adds all.
    misfit = reducer.reduce(units.clamp(min=1))
    if scaler:
        for optimizer in run.optimizer.optimizers:
            scaler.unscale_(optimizer)
    norm = reducer.norm()
    for extension in run.extensions:
        extension.before_update(run, batches)

    # Sum over all ranks. All ranks have the same norm, but if it is NaN on one of them, all must know.
    is_lost = run.run_folder.is_lost  # on rank 0, which knows it
    must_stop = torch.full_like(norm, is_lost or run.context.signals.received is not None)
    has_written = torch.full_like(norm, run.has_written)
    local_sums = [widened(value).flatten() for value in (*sums.values(), norm, must_stop, has_written)]
    all_sums = ranks.all_reduce(torch.cat(local_sums)).split([*map(len, local_sums)])
    *totals, norm_sum, stopping_ranks, written_ranks = [values.sum() for values in all_sums]
    means = {name: total / units for name, total in zip(sums, totals)}

    middle, deviation = median_and_deviation(run.progress.recent_losses, config.loss_spike_window)
    limit = middle + config.loss_spike_threshold * deviation
    is_skipped = ~(means["loss"].isfinite() & norm_sum.isfinite() & (misfit == 0))
    if config.loss_spike_policy != "warn":
        is_skipped |= means["loss"] > limit
    run.optimizer.step(lr, clip_scale(norm, config.max_grad_norm), is_skipped.float())

    on_device = StepNumbers(units, norm, norm_sum, stopping_ranks, written_ranks, is_skipped, misfit)
    scalars = torch.stack([widened(value) for value in (*means.values(), *on_device)])
    measured = [measure() for measure, _ in run.measures]
    values = ranks.tolist(torch.cat([scalars, *measured]))  # the only wait for the device
    loss, *metrics = values[:len(means)]
    numbers = StepNumbers(*values[len(means):len(scalars)])
    finite = numbers.units == 0 or math.isfinite(loss) and (
        math.isfinite(numbers.norm_sum) or (scaler is not None and scaler.get_scale() > 1))
    if scaler and finite:  # if the run stops here, its checkpoint keeps the current scale
        scaler.update()
    spike = (loss - middle) / deviation if loss > limit else 0.0
    is_written = numbers.written_ranks == ranks.world_size
    log_fields, end = {}, len(scalars)
    for numbers_K, (_, fields_of) in zip(measured, run.measures):
        begin, end = end, end + len(numbers_K)
        log_fields |= fields_of(values[begin:end])
    return StepResult(loss, dict(zip([*sums][1:], metrics)), round(numbers.units), numbers.norm, finite,
                      not numbers.is_skipped, spike, numbers.stopping_ranks > 0, log_fields, is_written,
                      numbers.misfit)


def accumulate_gradients(run: Run, reducer: Reducer, batches: list[Batch]) -> dict[str, Tensor]:
    """Run this rank's micro-batches forward and backward; ranks exchange gradients in the last backward.

    Return the sums over the micro-batches, on the device: "loss" first, then the objective's metrics.
    """
    run.optimizer.zero_grad(set_to_none=run.ranks.world_size == 1)  # DDP's buckets keep them otherwise
    if not run.model.training:  # an evaluation switched dropout off; always to visit all modules takes time
        reducer.model.train()
    sums: dict[str, Tensor] = {}
    config, ranks, step = run.config, run.ranks, run.progress.step
    micro_batches = config.rows_per_step // config.micro_batch_size
    row = first_micro_batch(micro_batches, ranks.rank, ranks.world_size) * config.micro_batch_size
    for number, batch in enumerate(batches, 1):
        choose_masks(run.model, config.seed, step, row, len(batch.tokens_BT))
        row += len(batch.tokens_BT)
        with reducer.add(step, is_last=number == len(batches)):
            with phase("forward"):
                total, metrics = run.objective.loss_sum(reducer.model, batch)
                mean = total * reducer.loss_scale
            with phase("backward"):
                (run.scaler.scale(mean) if run.scaler else mean).backward()
        for name, value in {"loss": total.detach(), **metrics}.items():
            sums[name] = sums.get(name, 0) + reducer.scatter(value)
    return sums


def step_metrics(run: Run, result: StepResult, lr: float, seconds: float) -> dict[str, Any]:
    """Print the metrics of a step, with those of extensions, and return them; `seconds` is its duration."""
    config, progress = run.config, run.progress
    metrics = {"train_loss": result.loss, **result.metrics, "counted": result.count, "learning_rate": lr,
               "grad_norm": result.grad_norm, "tokens_seen": progress.tokens_seen,
               "tokens_per_second": config.total_batch_size / seconds, "step_seconds": seconds}
    for extension in run.extensions:
        metrics |= extension.metrics(run)
    run.log.progress(progress.step, metrics, seconds)
    return metrics


@collective
def finish_step(run: Run) -> None:
    """Evaluate, log and save if due after the last step.

    Raises Interrupted at a stop signal; the resumed run then completes the step.
    """
    config, progress = run.config, run.progress
    evaluate(run)
    metrics, progress.pending_metrics = progress.pending_metrics, None
    if metrics:
        run.log.step({"step": progress.step, **metrics})
    is_due = run.saves_best or due(config.save_every, progress.step) or due(config.keep_every, progress.step)
    if run.takes_no_step or (progress.step > 0 and is_due):
        save_checkpoint(run, wait=run.takes_no_step)


if __name__ == "__main__":
    with process.leaving_what_is_stuck():
        sys.exit(main(ARGV, PLANNED))
