"""What a step can set off: numbers that are none, a loss far above the others, replicas that are no longer equal."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from common.errors import CheckpointError, DriftError, LossSpikeError, NonFiniteError
from data_pipeline.batch import Batch
from training import diagnostics
from training.state import Run, StepResult, follow_folder, save_checkpoint

ROWS_SHOWN = 16


def append_ledger(run: Run, result: StepResult) -> None:
    """Keep for each step what `scripts/replay_step.py` holds a replay against; the rows by their CRC-32, as they follow from
    the settings."""
    if run.ranks.is_rank0:
        rows = run.inputs.order(run.config, run.ranks).all_rows(run.progress.step)
        facts = {"rows_crc32": f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}", "loss": result.loss,
                 "grad_norm": result.grad_norm, "updated": result.updated}
        if result.spike:
            facts |= {"spike": round(result.spike, 1), "rows": rows.tolist()}
        run.log.entry(run.progress.step + 1, facts)


def keep_evidence(run: Run, batches: list[Batch], result: StepResult, first_bad: Optional[diagnostics.FirstBadModule] = None,
                  is_own_finite: Callable[[], bool] = lambda: True) -> tuple[Path, list[dict]]:
    """Save the state before the step, if it is good, and all that is known of the step; returns where, and the reports of all
    ranks. Collective: every rank must call it."""
    follow_folder(run)
    step = run.progress.step + 1
    own = {"step": step, "rank": run.ranks.rank, "loss": str(result.loss), "grad_norm": str(result.grad_norm),
           "rows": run.inputs.order(run.config, run.ranks).micro_batches(step - 1).tolist(),
           "first_bad_module": first_bad.found if first_bad else None,
           "tensors": diagnostics.describe_tensors(run.model)}
    own["finite"] = is_own_finite()  # after the gradients are described, which it may compute again
    everyone = run.ranks.all_gather_json(own)
    folder = run.folder / "debug" / f"step-{step:08d}"
    inputs = {f"{name}.{number}": getattr(batch, name) for number, batch in enumerate(batches)
              for name in ("tokens_BT", "targets_BT")}
    try:
        diagnostics.write_dump(folder, own, inputs)
    except OSError as error:
        run.log.warn(f"{folder} cannot be written: {error}")
    try:
        if run.saved is None and not bad_weights(everyone):
            save_checkpoint(run)
    except CheckpointError as error:  # on every rank
        run.log.warn(str(error))
    return folder, everyone


def bad_weights(reports: list[dict]) -> bool:
    """Whether some rank's parameters were no numbers before the step: that is no state to go on from."""
    return any(tensor["kind"] == "parameter" for report in reports for tensor in report["tensors"])


def kept(run: Run, reports: list[dict]) -> str:
    """What became of the state before the step, in words."""
    if bad_weights(reports):
        return "the weights were not finite before it and are not saved"
    return "the state before it is saved" if run.saved else "the state before it could not be saved"


def how_to_look(run: Run) -> str:
    """The command that shows what was in the step that has just been taken."""
    return f"python scripts/replay_step.py {run.folder} --step {run.progress.step + 1}"


def stop_non_finite(run: Run, batches: list[Batch], result: StepResult, first_bad: Optional[diagnostics.FirstBadModule],
                    is_own_finite: Callable[[], bool]) -> None:
    """Keep what is known of a step that went bad, and the last good state. Collective: every rank must call it.

    Args:
        is_own_finite: computes this rank's part of the step again, without the others: the exchange of gradients has mixed them.
    Raises:
        NonFiniteError: always.
    """
    folder, everyone = keep_evidence(run, batches, result, first_bad, is_own_finite)
    run.log.info("\n" + diagnostics.banner(everyone))
    culprits = diagnostics.bad_ranks(everyone)
    where = (f"was not finite on rank {', '.join(map(str, culprits))}" if culprits else
             "was not finite, but is on every rank when computed again: that is transient, most likely a fault of hardware or "
             "of communication")
    presets = ",".join(filter(None, (run.config.preset, "stable")))
    advice = (f"try a lower LEARNING_RATE, --preset {presets}, or DEBUG=true to name the first bad module" if culprits else
              "go on with the same command; where it comes again, look for the machine that it comes from")
    raise NonFiniteError(f"step {run.progress.step + 1} {where}; nothing was updated, {kept(run, everyone)}, and {folder} "
                           f"holds its rows and tensors. Look at it with {how_to_look(run)}, or {advice}")


def handle_loss_spike(run: Run, batches: list[Batch], result: StepResult) -> None:
    """Tell of a loss spike, with its rows, and do as LOSS_SPIKE_POLICY says. Collective: every rank must call it.

    Raises:
        LossSpikeError: the policy is "stop".
    """
    config, step = run.config, run.progress.step + 1
    rows = run.inputs.order(config, run.ranks).all_rows(step - 1).tolist()
    shown = f"{rows[:ROWS_SHOWN]}"[:-1] + (", ... (all in ledger.jsonl)]" if len(rows) > ROWS_SHOWN else "]")
    what = (f"loss spike in step {step}: {result.loss:.4f} is {result.spike:.0f} robust standard deviations above the last "
            f"{len(run.progress.recent_losses)}; rows {shown}")
    if config.loss_spike_policy != "stop":
        skipped = "; its update is left out" if config.loss_spike_policy == "skip" else ""
        run.log.warn(f"{what}{skipped}. Look at it with {how_to_look(run)}")
        return
    folder, everyone = keep_evidence(run, batches, result)
    raise LossSpikeError(f"{what}. Nothing was updated, {kept(run, everyone)}, and {folder} holds its rows. Look at it "
                           f"with {how_to_look(run)}; to go on past it, LOSS_SPIKE_POLICY=skip or warn")


def check_replicas(run: Run) -> None:
    """See that parameters and optimizer state are the same on every rank, bit by bit. Collective: every rank must call it.

    Raises:
        DriftError: they are not; names the first tensor that differs, and the ranks.
    """
    if run.ranks.world_size == 1:
        return
    tensors = dict(run.model.named_parameters()) | run.optimizer.state_tensors()
    own = diagnostics.checksums(tensors.values()).tolist()
    if len(set(run.ranks.all_gather_json(zlib.crc32(json.dumps(own).encode())))) == 1:
        return
    everyone = run.ranks.all_gather_json(own)
    number, name = next((number, name) for number, name in enumerate(tensors) if len({sums[number] for sums in everyone}) > 1)
    others = [str(rank) for rank, sums in enumerate(everyone) if sums[number] != everyone[0][number]]
    raise DriftError(f"after step {run.progress.step} the ranks no longer have the same model: {name} differs between rank 0 "
                       f"and rank {', '.join(others)}. Nothing more is saved; a GPU or its memory may be failing. Go on from a "
                       f"checkpoint of before: the ranks were last seen equal {run.config.drift_check_every} steps ago")
