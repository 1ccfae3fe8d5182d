"""Train Llama 3: `python train.py`, or `torchrun --standalone --nproc_per_node N train.py`. --help lists every setting."""

import sys
import time
from contextlib import ExitStack, nullcontext
from typing import NamedTuple, Optional

import torch

import diagnostics
import preflight
from errors import NonFiniteError, PaddockError, SettingsError
from evaluation import Interrupted, due, measure
from model_utils import (
    GradientWatch,
    build_model,
    choose_device,
    choose_dtype,
    clip_gradients,
    compile_model,
    seed_step,
    why_not_compile,
    wrap_model,
)
from objectives import OBJECTIVES, Objective
from optim import Optimizer, learning_rate
from ranks import StopSignals, start_ranks, stop_ranks
from run_log import RunLog, console_line
from run_state import Run, open_inputs, restore, save_checkpoint, start_run_dir
from settings import Loaded, exit_with, export_secrets, help_text, load_config

USAGE = "python train.py [--preset NAME] [--config FILE.json] [--env-file FILE] [--any-setting VALUE ...] [--check]"
EXIT_PREEMPTED = 143


class StepResult(NamedTuple):
    """What all ranks know of a step, the same on each."""

    loss: float  # the mean over the targets of the whole batch
    grad_norm: float
    finite: bool
    updated: bool  # False where fp16 overflowed, as it does now and then by design
    stop: bool  # a rank was signalled


def main(argv: Optional[list[str]] = None) -> int:
    """Run from the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(help_text(USAGE))
        return 0
    try:
        loaded = load_config(argv)
        export_secrets(loaded.config)
        return preflight.check(loaded) if loaded.check else train(loaded)
    except PaddockError as error:
        if error.told_by_main:
            return error.exit_code
        if isinstance(error, SettingsError):
            exit_with(error)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def train(loaded: Loaded) -> int:
    """Build, resume, and take every step that is left; returns the exit code. Collective: every rank must call it."""
    config, signals = loaded.config, StopSignals()
    device_type = choose_device(config)
    dtype = choose_dtype(config, device_type)
    ranks = start_ranks(device_type, config.distributed_timeout)
    with ExitStack() as stack:
        inputs = open_inputs(config, ranks)
        folder = start_run_dir(config, ranks, stack)
        model = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
        optimizer = Optimizer(model, config)
        scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
        progress, started_from, messages = restore(config, inputs, folder, model, optimizer, scaler, ranks)
        log = RunLog(config, ranks.rank, device_type, folder, progress.wandb_run_id, progress.step)
        stack.callback(log.close)
        progress.wandb_run_id = log.wandb_run_id
        run = Run(config, ranks, signals, inputs, folder, model, optimizer, scaler, progress, started_from, log)
        for message in (*loaded.warnings, *messages):
            log.warn(message)
        preflight.announce(run, dtype)
        if config.compile and (reason := why_not_compile(config, device_type)):
            log.warn(f"no torch.compile: {reason}")
        elif config.compile:
            compile_model(model)
        code = take_steps(run)
    stop_ranks()
    return code


def take_steps(run: Run) -> int:
    """The loop: steps, and what is due between them; returns the exit code. Collective: every rank must call it."""
    config, progress, ranks, log = run.config, run.progress, run.ranks, run.log
    if progress.step >= config.max_steps:
        log.say(f"Nothing to do: MAX_STEPS={config.max_steps}, and {progress.step} steps are finished.")
        return 0
    objective = OBJECTIVES[config.training_stage]
    trained, watch = wrap_model(run.model, ranks)
    first_bad = diagnostics.FirstBadModule(run.model) if config.debug else None
    flops = diagnostics.flops_per_token(config, run.inputs.tokenizer.vocab_size, config.max_seq_len)
    peak = diagnostics.peak_flops(ranks.device, config.peak_tflops)
    throughput = diagnostics.Throughput()
    started, saved, saved_at, baseline = time.perf_counter(), None, None, {}
    try:
        if progress.step == 0:
            baseline = measure(run, objective, last=False)
            if baseline:
                log.step({"step": 0, **baseline})
        with run.inputs.training_batches(config, ranks, progress.step) as loader:
            throughput.skip_pause()
            for batches in loader:
                seed_step(config.seed, progress.step, ranks.rank)
                rate = learning_rate(progress.step, config)
                result = train_step(run, trained, watch, objective, batches, rate)
                if not result.finite:
                    stop_non_finite(run, batches, result, watch, first_bad)
                progress.advance(config.total_batch_size, skipped=not result.updated)
                throughput.add(config.total_batch_size)
                last, metrics = progress.step == config.max_steps, {}
                if due(config.log_every, progress.step, last):
                    tokens_per_second = throughput.read()
                    metrics = {"train_loss": result.loss, "learning_rate": rate, "grad_norm": result.grad_norm,
                               "tokens_seen": progress.tokens_seen, "tokens_per_second": tokens_per_second,
                               "peak_memory_bytes": diagnostics.peak_memory_bytes(ranks.device)}
                    if peak:
                        metrics["mfu"] = tokens_per_second * flops / (peak * ranks.world_size)
                    tokens_left = (config.max_steps - progress.step) * config.total_batch_size
                    log.say(console_line(progress.step, config.max_steps, metrics, tokens_left / tokens_per_second))
                measured = {} if result.stop else measure(run, objective, last)
                if metrics or measured:
                    log.step({"step": progress.step, **metrics, **measured})
                is_best = "val_loss" in measured and progress.best_step == progress.step
                given_up = 0 < config.early_stopping_patience <= progress.validations_without_best
                if (due(config.save_every, progress.step, last) or last or given_up or result.stop
                        or (is_best and config.keep_best and config.save_every)):
                    saved, saved_at = save_checkpoint(run, measured.get("val_loss")), progress.step
                if result.stop:
                    raise Interrupted
                if given_up:
                    log.say(f"Early stopping: {config.early_stopping_patience} validations without a loss below "
                            f"{progress.best_val_loss:.4f} (step {progress.best_step}).")
                if last or given_up:
                    break
                throughput.skip_pause()
    except Interrupted:
        if saved_at != progress.step:
            save_checkpoint(run)
        log.say(f"Stopped by a signal; {progress.step} steps are saved. To go on: the same command"
                + ("." if config.run_name else f" with --run-name {run.folder.name}."))
        return EXIT_PREEMPTED
    preflight.farewell(run, saved, time.perf_counter() - started, baseline, measured)
    return 0


def train_step(run: Run, trained: torch.nn.Module, watch: Optional[GradientWatch], objective: Objective, batches: list,
               rate: float) -> StepResult:
    """Take one optimizer step on the exact mean over every counted unit of every rank.

    DDP averages gradients over ranks, hence the factor world_size. Collective: every rank must call it.

    Args:
        trained: the model as it is wrapped for data parallelism.
        batches: this rank's micro-batches.
        rate: the learning rate.
    """
    ranks, scaler = run.ranks, run.scaler
    count = ranks.sum([float(sum(objective.count(batch) for batch in batches))])[0]
    assert count > 0, "a step without a single target"
    run.optimizer.zero_grad()
    loss_sum = torch.zeros((), device=ranks.device)
    for number, batch in enumerate(batches, 1):
        # Chosen before the forward, which is where data parallelism looks at it.
        alone = ranks.world_size > 1 and number < len(batches)
        with trained.no_sync() if alone else nullcontext():
            total = objective.loss_sum(trained, batch).total
            mean = total * (ranks.world_size / count)
            (scaler.scale(mean) if scaler else mean).backward()
        loss_sum += total.detach()
    if scaler:
        for part in run.optimizer.parts:
            scaler.unscale_(part)
    grad_norm = float(clip_gradients(run.model, run.config.max_grad_norm))
    finite_gradient = abs(grad_norm) < float("inf")  # NaN is not
    own_gradient = watch.read() if watch else finite_gradient
    loss = float(loss_sum)
    loss, bad_losses, bad_gradients, stops = ranks.sum(
        [loss, not abs(loss) < float("inf"), not (finite_gradient and own_gradient), run.signals.received is not None])
    finite = not bad_losses and (not bad_gradients or (scaler is not None and scaler.get_scale() > 1))
    updated = finite and not bad_gradients
    if updated:
        run.optimizer.step(rate)
    if scaler:
        scaler.update()
    return StepResult(loss / count, grad_norm, finite, updated, stops > 0)


def stop_non_finite(run: Run, batches: list, result: StepResult, watch: Optional[GradientWatch], first_bad) -> None:
    """Keep what is known of a step that went bad, and the last good state. Collective: every rank must call it.

    Raises:
        NonFiniteError: always.
    """
    step = run.progress.step + 1
    own = {"step": step, "rank": run.ranks.rank, "loss": str(result.loss), "grad_norm": str(result.grad_norm),
           "own_gradient_finite": watch.last if watch else False,
           "rows": run.inputs.order(run.config, run.ranks).micro_batches(step - 1).tolist(),
           "first_bad_module": first_bad.found if first_bad else None, "tensors": diagnostics.describe_tensors(run.model)}
    everyone = run.ranks.gather(own)
    folder = run.folder / "debug" / f"step-{step:08d}"
    inputs = {f"{name}.{number}": getattr(batch, name) for number, batch in enumerate(batches) for name in ("tokens_BT", "targets_BT")}
    diagnostics.write_dump(folder, own, inputs)
    run.log.say("\n" + diagnostics.banner(everyone))
    save_checkpoint(run)
    error = NonFiniteError(f"step {step} was not finite on rank {', '.join(map(str, diagnostics.bad_ranks(everyone)))}; nothing was updated, "
                           f"the state before it is saved, and {folder} holds its rows and tensors. Try a lower LEARNING_RATE, "
                           "--preset stable, or DEBUG=true to name the first bad module")
    error.told_by_main = not run.ranks.is_main
    raise error


if __name__ == "__main__":
    sys.exit(main())
