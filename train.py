"""Train Llama 3: `python train.py`, or `torchrun --standalone --nproc_per_node N train.py`. --help lists every setting."""

import math
import os
import sys
import time
import traceback
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Optional

from common.errors import SettingsError
from common.text import exit_if_unread, print_safely, printable, write_line_by_line
from parallel.exit_report import (
    EXIT_PREEMPTED,
    exit_at_signals,
    exit_with_launcher,
    first_on_machine,
    open_missing_streams,
    write_error_file,
)
from settings.load import Loaded, exit_with, load_or_exit

USAGE = "python train.py [--preset NAME] [--config FILE.json] [--env-file FILE] [--any-setting VALUE ...] [--check]"

if __name__ == "__main__":
    open_missing_streams()
    exit_with_launcher()
    exit_at_signals()
    write_line_by_line()
    load_or_exit(sys.argv[1:], USAGE)  # once before torch, whose import takes seconds: a typo is told at once

# ruff: noqa: E402
import torch
from torch import Tensor

from common.heartbeat import HEARTBEAT
from data_pipeline.batch import Batch
from model_utils import (
    build_model,
    choose_device,
    choose_dtype,
    clip_scale,
    compile_where_possible,
    gradient_norm,
    make_deterministic,
    seed_step,
    wrap_model,
)
from parallel.collectives import Interrupted, StopSignals, classify_exception, joined_ranks, leave_if_stopped, stop_watchdog
from scripts.sample.world import provide_sample
from training import diagnostics, preflight
from training.build_objective import Base, choose_objective
from training.evaluation import due, measure
from training.optim import Optimizer, learning_rate
from training.run_folder import open_run_folder
from training.run_log import RunLog, console_line, leaving_trackers_behind
from training.state import (
    Run,
    StepResult,
    begin,
    check_room,
    find_start,
    how_to_go_on,
    keep_settings,
    open_inputs,
    place_weights,
    resume,
    save_checkpoint,
)
from training.step_guards import append_ledger, check_replicas, handle_loss_spike, stop_non_finite


def main(argv: Optional[list[str]] = None) -> int:
    """Run from the command line; returns the exit code."""
    loaded = load_or_exit(sys.argv[1:] if argv is None else argv, USAGE)
    try:
        with exit_if_unread() if loaded.check else nullcontext():
            provide_sample(loaded.config, may_write=not loaded.check)
            code = preflight.check(loaded) if loaded.check else train(loaded)
    except Exception as error:
        stop_watchdog()
        ending = classify_exception(error)
        if ending is None:
            sentence = printable(f"rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}")
            write_error_file(1, sentence, traceback.format_exc())
            raise
        if not write_error_file(ending.code, ending.sentence, is_secondary=ending.is_secondary):
            if isinstance(error, SettingsError):
                exit_with(error)
            with first_on_machine() if ending.on_all_ranks else nullcontext(True) as speaks:
                if speaks:
                    print_safely(f"error: {ending.sentence}", sys.stderr)
        return ending.code
    write_error_file(code)
    return code


def train(loaded: Loaded) -> int:
    """Look, check, and only then write: build, resume, and take every step that is left; returns the exit code.

    Collective: every rank must call it.
    """
    config = loaded.config
    device_type = choose_device(config)
    make_deterministic(config, device_type)
    dtype = choose_dtype(config, device_type)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        ranks = stack.enter_context(joined_ranks(device_type, config.distributed_timeout))
        inputs = open_inputs(config, ranks)
        place = stack.enter_context(open_run_folder(config, ranks, loaded.warnings.append))
        folder = place.path
        HEARTBEAT.stacks_folder = folder / "log"
        model = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
        start = find_start(config, inputs, folder, ranks)
        place_weights(config, start, model, inputs, dtype, ranks)
        optimizer = Optimizer(model, config)
        scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
        progress = resume(config, start, model, optimizer, scaler)
        if progress.step < config.max_steps:
            check_room(folder, model, ranks)
        log = RunLog(config, ranks.rank, device_type, wandb_run_id=progress.wandb_run_id)
        stack.push(lambda error, *_: log.close(finished=error is None and signals.received is None))
        progress.wandb_run_id = log.wandb_run_id
        for message in (*loaded.warnings, *start.warnings):
            log.warn(message)
        for message in (*loaded.notes, *start.notes):
            log.info(message)
        try:
            base = Base(config, progress, folder, log.warn)
            objective, inputs = choose_objective(config, inputs, model, dtype, base, ranks, signals, log.info)
            run = Run(config, ranks, signals, inputs, place, model, optimizer, scaler, progress, objective, start.folder, log)
            preflight.announce(run, dtype)
            if reason := compile_where_possible(model, config, device_type):
                log.warn(f"no torch.compile: {reason}")
            leave_if_stopped(ranks, signals)
        except Interrupted:
            log.info("Stopped by a signal before the first step, and nothing is changed; the same command begins again.")
            return EXIT_PREEMPTED
        begin(run)
        return train_loop(run)


def train_loop(run: Run) -> int:
    """The loop: a step, and what is due after it; returns the exit code. Collective: every rank must call it."""
    config, progress, log = run.config, run.progress, run.log
    if run.finished and progress.pending_metrics is None:
        early = f" {run.why_early()}" if progress.step < config.max_steps else ""
        log.info(f"Nothing to do: {progress.step} steps are finished, of MAX_STEPS={config.max_steps}.{early}")
        return 0
    trained = wrap_model(run.model, run.ranks, config.gradient_dtype)
    first_bad = diagnostics.FirstBadModule(run.model) if config.debug else None
    started, throughput = time.perf_counter(), diagnostics.Throughput()
    try:
        with run.inputs.training_batches(config, run.ranks, run.objective, progress.step) as loader:
            # A run begins with a measurement, and a resumed one with what a signal has cut off.
            reached = {} if progress.pending_metrics is None else finish_step(run)
            baseline, first = reached if progress.step == 0 else {}, progress.step
            while not run.finished:
                throughput.skip_pause()
                HEARTBEAT.enter("data", progress.step + 1)
                batches, count = next(loader)
                seed_step(config.seed, progress.step, run.ranks.rank)
                rate = learning_rate(progress.updates, config)
                result = train_step(run, trained, batches, count, rate)
                if progress.step == first:
                    keep_settings(run)
                append_ledger(run, result)
                if not result.finite:
                    stop_non_finite(run, batches, result, first_bad, partial(own_part_is_finite, run, batches, result.count))
                if result.spike:
                    handle_loss_spike(run, batches, result)
                run.advance(result)
                throughput.add(config.total_batch_size)
                if due(config.log_every, progress.step, run.finished):
                    progress.pending_metrics = step_metrics(run, result, rate, throughput.read())
                if due(config.drift_check_every, progress.step, run.finished):
                    check_replicas(run)
                if result.stop:
                    raise Interrupted
                reached = finish_step(run)
    except Interrupted:
        if progress.pending_metrics:
            log.step({"step": progress.step, **progress.pending_metrics})
        save_checkpoint(run)
        log.info(f"Stopped by a signal; {progress.step} steps are saved. To go on: {how_to_go_on(run)}.")
        return EXIT_PREEMPTED
    if progress.step < config.max_steps:
        log.info(run.why_early())
    preflight.print_summary(run, run.saved, time.perf_counter() - started, baseline, reached)
    return 0


def train_step(run: Run, trained: torch.nn.Module, batches: list[Batch], count: int, rate: float) -> StepResult:
    """Take one optimizer step on the exact mean over every counted unit of every rank.

    A GPU is waited for once, when all is enqueued: the device itself leaves an update out that is not finite, or a loss spike's
    where that is the policy, and what is decided here follows from what it did. Collective: every rank must call it.

    Args:
        trained: the model as it is wrapped for data parallelism.
        batches: this rank's micro-batches.
        count: of the units in these.
        rate: the learning rate.
    """
    HEARTBEAT.enter("forward and backward")
    config, ranks, scaler = run.config, run.ranks, run.scaler
    units = ranks.all_reduce(torch.full((), count, dtype=torch.float64, device=ranks.device))
    sums = accumulate_gradients(run, trained, batches, (ranks.world_size / units).float())
    if scaler:
        for part in run.optimizer.parts:
            scaler.unscale_(part)
    norm = gradient_norm(run.model)
    stops = torch.full_like(norm, run.signals.received is not None)
    # Of the norms, which all have, the sum: what is no number on one rank is none on all.
    *totals, norms, stops = ranks.all_reduce(torch.stack([value.double() for value in (*sums.values(), norm, stops)]))
    means = [total / units for total in totals]
    limit = run.progress.spike_limit(config)
    left_out = ~(means[0].isfinite() & norms.isfinite())
    if config.loss_spike_policy != "warn":
        left_out |= means[0] > limit
    run.optimizer.step(rate, clip_scale(norm, config.max_grad_norm), left_out.float())
    *means, norms, stops, norm, left_out, units = ranks.tolist(torch.stack(
        [value.double() for value in (*means, norms, stops, norm, left_out, units)]))
    assert units > 0, "a step without a single target"
    loss, *others = means
    finite = math.isfinite(loss) and (math.isfinite(norms) or (scaler is not None and scaler.get_scale() > 1))
    if scaler and finite:  # a run that ends here is saved as it was before
        scaler.update()
    spike = run.progress.robust_z_score(loss, config) if loss > limit else 0.0
    return StepResult(loss, dict(zip([*sums][1:], others)), round(units), norm, finite, not left_out, spike, stops > 0)


def accumulate_gradients(run: Run, trained: torch.nn.Module, batches: list[Batch],
                         factor: Tensor | float) -> dict[str, Tensor]:
    """Forward and backward of this rank's micro-batches; where the model is wrapped for data parallelism, gradients are exchanged
    with the last.

    Args:
        factor: of each loss, which is a sum over units: one over their number, times the ranks that DDP averages over.
    Returns:
        The sums over the micro-batches: of the loss, and of the objective's metrics; on the device.
    """
    # DDP's buckets keep the gradients of several ranks.
    run.optimizer.zero_grad(set_to_none=run.ranks.world_size == 1)
    trained.train()  # an evaluation may have ended dropout
    without_exchange = getattr(trained, "no_sync", nullcontext)
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, 1):
        # Chosen before the forward, which is where data parallelism looks at it.
        with without_exchange() if number < len(batches) else nullcontext():
            total, metrics = run.objective.loss_sum(trained, batch)
            mean = total * factor
            (run.scaler.scale(mean) if run.scaler else mean).backward()
        for name, value in {"loss": total.detach(), **metrics}.items():
            sums[name] = sums.get(name, 0) + value
        HEARTBEAT.beat()
    return sums


def own_part_is_finite(run: Run, batches: list[Batch], count: int) -> bool:
    """Whether this rank's loss and gradients are finite when its part of a step is computed again, without the other ranks.

    Args:
        count: of the units of all ranks.
    """
    seed_step(run.config.seed, run.progress.step, run.ranks.rank)
    sums = accumulate_gradients(run, run.model, batches, run.ranks.world_size / count)
    return math.isfinite(sums["loss"]) and math.isfinite(gradient_norm(run.model))


def step_metrics(run: Run, result: StepResult, rate: float, tokens_per_second: float) -> dict[str, Any]:
    """What a logged step tells, which also goes to the console."""
    config, ranks, progress = run.config, run.ranks, run.progress
    metrics = {"train_loss": result.loss, **result.metrics, "counted": result.count, "learning_rate": rate,
               "grad_norm": result.grad_norm, "tokens_seen": progress.tokens_seen, "tokens_per_second": tokens_per_second,
               "peak_memory_bytes": diagnostics.peak_memory_bytes(ranks.device)}
    if peak := diagnostics.peak_flops(ranks.device, config.peak_tflops):
        flops = diagnostics.flops_per_token(config, run.inputs.tokenizer.vocab_size, config.max_seq_len)
        metrics["mfu"] = tokens_per_second * flops / (peak * ranks.world_size)
    tokens_left = (config.max_steps - progress.step) * config.total_batch_size
    run.log.info(console_line(progress.step, config.max_steps, metrics, tokens_left / tokens_per_second))
    return metrics


def finish_step(run: Run) -> dict[str, Any]:
    """Measure, log and save what is due after the last step; returns its metrics. Collective: every rank must call it.

    Raises:
        Interrupted: a rank was signalled; what is due is still to be done.
    """
    config, progress = run.config, run.progress
    measure(run)
    metrics, progress.pending_metrics = progress.pending_metrics, None
    if metrics:
        run.log.step({"step": progress.step, **metrics})
    new_best = progress.best_step == progress.step and config.keep_best > 0 < config.save_every
    if run.finished or (progress.step > 0 and (new_best or due(config.save_every, progress.step))):
        save_checkpoint(run)
    return metrics


if __name__ == "__main__":
    with leaving_trackers_behind():
        sys.exit(main())
