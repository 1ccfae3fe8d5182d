"""The checks of a step: non-finite numbers, loss spikes, replicas that differ; ledger and debug files."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from common.errors import CheckpointError, DriftError, LossSpikeError, NonFiniteError
from common.text import command
from dataloaders import Batch
from parallel.fsdp import is_divided, is_sharded, named_parameters, own, ranks_per_copy
from run import diagnostics
from run.life import Run, StepResult, follow_folder, save_checkpoint

ROWS_SHOWN = 16


def append_ledger(run: Run, result: StepResult) -> None:
    """Append the step's line to ledger.jsonl, which `scripts/replay_step.py` compares a replay with.

    Warns once of a run that diverges or no longer learns.
    """
    step = run.progress.step + 1
    if run.ranks.is_rank0:
        rows = run.inputs.order(run.config, run.ranks).all_rows(run.progress.step)
        facts = {"rows_crc32": f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}", "loss": result.loss,
                 "grad_norm": result.grad_norm, "updated": result.updated}
        if result.spike:
            facts |= {"spike": round(result.spike, 1), "rows": rows.tolist()}
        run.log.entry(step, facts)
        for kind, sentence in run.log.divergence.add(result.loss, result.grad_norm).items():
            text = (f"{sentence}. Start again with RESUME=never and a LEARNING_RATE well "
                    f"below {run.config.learning_rate:g}")
            run.log.warn(f"step {step}: {text}")
            run.log.event(kind, step, text=text)


def dump_step(run: Run, batches: list[Batch], result: StepResult,
              first_bad: Optional[diagnostics.FirstBadModule] = None,
              is_own_finite: Callable[[], bool] = lambda: True) -> tuple[Path, list[dict]]:
    """Write what is known of a bad step into the debug folder, and save the state before it if that is good.

    A rank's tensors are its micro-batches (`tokens_BT.0`, `targets_BT.0`, ...); those of rank 0 also the
    non-finite gradients (`gradient.<parameter>`), averaged over the ranks; and of several ranks those that
    are not finite by themselves have `own_gradient.<parameter>`, of their own micro-batches. Of a sharded
    model, each rank of one copy has its own part of the averaged gradients.
    Collective: every rank must call it.

    Returns:
        The debug folder, and the reports of all ranks.
    """
    follow_folder(run)
    step = run.progress.step + 1
    report = {"step": step, "rank": run.ranks.rank,
              "loss": str(result.loss), "grad_norm": str(result.grad_norm),
              "rows": run.inputs.order(run.config, run.ranks).micro_batches(step - 1).tolist(),
              "first_bad_module": first_bad.found if first_bad else None,
              "tensors": diagnostics.describe_tensors(run.model)}
    # Before the gradients are computed again. The exchange has made them equal on all ranks.
    keeps = run.ranks.rank < ranks_per_copy(run.model)
    gradients = diagnostics.bad_gradients(run.model, "gradient") if keeps else {}
    report["finite"] = is_own_finite()
    if run.ranks.world_size > 1 and not report["finite"] and not is_sharded(run.model):
        gradients |= diagnostics.bad_gradients(run.model, "own_gradient")
    reports = run.ranks.all_gather_json(report)
    folder = run.folder / "debug" / f"step-{step:08d}"
    inputs = {f"{name}.{number}": getattr(batch, name) for number, batch in enumerate(batches)
              for name in ("tokens_BT", "targets_BT")}
    try:
        diagnostics.write_dump(folder, report, inputs | gradients)
    except OSError as error:
        run.log.warn(f"{folder} cannot be written: {error}")
    try:
        if run.saved is None and not has_bad_weights(reports):
            save_checkpoint(run)
    except CheckpointError as error:  # on every rank
        run.log.warn(str(error))
    return folder, reports


def has_bad_weights(reports: list[dict]) -> bool:
    """Whether parameters of some rank were non-finite before the step, which is no state to resume from."""
    return any(tensor["kind"] == "parameter" for report in reports for tensor in report["tensors"])


def what_is_saved(run: Run, reports: list[dict]) -> str:
    """Whether the state before a bad step is saved."""
    if has_bad_weights(reports):
        return "the weights were not finite before it and are not saved"
    return "the state before it is saved" if run.saved else "the state before it could not be saved"


def replay_command(run: Run) -> str:
    """The command that examines the step that was just taken."""
    return command("scripts/replay_step.py", run.folder, "--step", str(run.progress.step + 1))


def stop_non_finite(run: Run, batches: list[Batch], result: StepResult,
                    first_bad: Optional[diagnostics.FirstBadModule],
                    is_own_finite: Callable[[], bool]) -> None:
    """Keep what is known of a non-finite step, and the last good state. Collective: every rank must call it.

    Args:
        is_own_finite: computes this rank's part of the step again, because the exchange of gradients has
            mixed those of all ranks.
    """
    folder, reports = dump_step(run, batches, result, first_bad, is_own_finite)
    for line in diagnostics.banner(reports).split("\n"):
        run.log.info(line)
    ranks = diagnostics.bad_ranks(reports)
    if ranks:
        where = f"was not finite on rank {', '.join(map(str, ranks))}"
        presets = ",".join(filter(None, (run.config.preset, "stable")))
        advice = f"try a lower LEARNING_RATE, --preset {presets}, or DEBUG=true to name the first bad module"
    else:
        where = ("was not finite, but is finite on every rank when computed again: a transient fault, most "
                 "likely of the hardware or the network")
        advice = "resume with the same command; if it happens again, find the machine that causes it"
    raise NonFiniteError(f"step {run.progress.step + 1} {where}; nothing was updated, "
                         f"{what_is_saved(run, reports)}. {folder} has its rows (rank-*.json), and its "
                         "tokens and non-finite gradients (rank-*.safetensors). Examine it with "
                         f"{replay_command(run)}, or {advice}")


def handle_loss_spike(run: Run, batches: list[Batch], result: StepResult) -> None:
    """Report a loss spike with its rows, and act as LOSS_SPIKE_POLICY says.

    Collective: every rank must call it.
    """
    config, step = run.config, run.progress.step + 1
    rows = run.inputs.order(config, run.ranks).all_rows(step - 1).tolist()
    shown = f"{rows[:ROWS_SHOWN]}"[:-1] + (", ... (all in ledger.jsonl)]" if len(rows) > ROWS_SHOWN else "]")
    what = (f"loss spike in step {step}: {result.loss:.4f} is {result.spike:.0f} robust standard deviations "
            f"above the last {len(run.progress.recent_losses)}; rows {shown}")
    if config.loss_spike_policy != "stop":
        skipped = "; its update is skipped" if config.loss_spike_policy == "skip" else ""
        run.log.warn(f"{what}{skipped}. Examine it with {replay_command(run)}")
        return
    folder, reports = dump_step(run, batches, result)
    raise LossSpikeError(f"{what}. Nothing was updated, {what_is_saved(run, reports)}, and {folder} has its "
                         f"rows. Examine it with {replay_command(run)}; to continue past it, "
                         "LOSS_SPIKE_POLICY=skip or warn")


def check_replicas(run: Run) -> None:
    """Check that parameters and optimizer state are bit-identical on all ranks that hold the same rows.

    Collective: every rank must call it.
    """
    if run.ranks.world_size == 1:
        return
    parameters, states = named_parameters(run.model), run.optimizer.state_tensors()
    tensors = {name: own(parameter) for name, parameter in parameters.items()} | states
    divided = [is_divided(parameters.get(name, parameters.get(name.rpartition(".")[0]))) for name in tensors]
    sums, degree = diagnostics.checksums(tensors.values()).tolist(), ranks_per_copy(run.model)

    def combined(which: bool) -> int:
        chosen = [own_sum for own_sum, is_chosen in zip(sums, divided) if is_chosen == which]
        return zlib.crc32(json.dumps(chosen).encode())

    everyone = run.ranks.all_gather_json([combined(False), combined(True)])
    if not [*differences(everyone, [False, True], degree)]:
        return
    everyone = run.ranks.all_gather_json(sums)
    found = sorted(differences(everyone, divided, degree))
    number, first, _ = found[0]
    others, name = [str(rank) for *place, rank in found if place == [number, first]], [*tensors][number]
    raise DriftError(f"after step {run.progress.step} the ranks no longer have the same model: {name} "
                     f"differs between rank {first} and rank {', '.join(others)}. Nothing more is saved; a "
                     "GPU or its memory may be failing. Resume from an earlier checkpoint: the ranks were "
                     f"last found equal {run.config.drift_check_every} steps ago")


def differences(everyone: list[list[int]], divided: Sequence[bool],
                degree: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, first rank, other rank) where ranks that hold the same rows have another checksum.

    Args:
        everyone: of each rank, the checksum of each tensor.
        divided: whether a tensor is divided over every `degree` ranks, or whole on all.
    """
    for rank, sums in enumerate(everyone):
        for number, own_sum in enumerate(sums):
            first = rank % degree if divided[number] else 0
            if own_sum != everyone[first][number]:
                yield number, first, rank
