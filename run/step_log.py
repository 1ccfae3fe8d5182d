"""Whether a step counts: the step log, the limit of a loss spike, and the stop.

The device decides on a step, and the host reads the decision later. A step that does not count changes
nothing, and the state before it is saved.
"""

import math
import statistics
import zlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from common.errors import CheckpointError, LossSpikeError, NonFiniteError
from common.text import setting_text
from parallel import fsdp
from parallel.ranks import collective
from run.run import Run, StepResult, finish_saving, is_folder_lost, save_checkpoint


def rows_crc32(rows: np.ndarray) -> str:
    return f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}"


def log_step(run: Run, result: StepResult) -> None:
    """Append the step's line to ledger.jsonl."""
    step = run.progress.step + 1
    if run.ranks.is_rank0:
        rows = run.order.all_rows(run.progress.step)
        entry = {"step": step, "rows_crc32": rows_crc32(rows), "loss": result.loss,
                 "grad_norm": result.grad_norm, "updated": result.updated, **result.log_fields}
        if not result.count:
            run.log.warn_without_targets(f"step {step} has no targets: it counts, but changes no weight; "
                                         "others may follow, whose loss is null in the logs")
        if result.spike:
            entry |= {"spike": round(result.spike, 1), "rows": rows.tolist()}
        run.log.append("ledger", entry)


def median_and_deviation(recent: Sequence[float], window: int = 0) -> tuple[float, float]:
    """Return the median and a robust standard deviation; 0 and infinity until half of the window is full.

    The deviation is at least 1 % of the median, so that ripples in a flat curve raise no alarm.
    Source: Rousseeuw and Croux 1993: 1.4826 times the median absolute deviation.
    """
    if 2 * len(recent) < window:
        return 0.0, math.inf
    middle = statistics.median(recent)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return middle, max(deviation, 0.01 * abs(middle), 1e-12)


@collective
def save_before(run: Run) -> str:
    """Save the state before a step that does not count, unless it is bad too; return a sentence on it."""
    if run.config.update_in_backward:
        return "Its gradients have changed the weights, which are not saved."
    if run.undo:  # earlier updates of the step were finite, so the state before it is good
        run.undo()
    elif not run.ranks.all_agree(all(bool(fsdp.local_rows(each).isfinite().all())
                                     for each in run.model.parameters())):
        return "The weights were NaN or infinite before it, and are not saved."
    try:
        finish_saving(run)
        if run.saved is None or is_folder_lost(run):
            save_checkpoint(run, wait=True)
    except CheckpointError as error:  # on every rank
        run.log.warn(str(error))
    return f"Step {run.progress.step:,} {'is' if run.saved else 'could not be'} saved."


def describe_failure(run: Run, result: StepResult) -> str:
    name, value = ("loss", result.loss) if not math.isfinite(result.loss) else ("gradient", result.grad_norm)
    return f"the {name} became {'NaN' if math.isnan(value) else 'infinite'} in step {run.progress.step + 1:,}"


@collective
def stop_before(run: Run, result: StepResult) -> NoReturn:
    """Save the state before a step that does not count, and raise an error if no extension has done so."""
    saved = save_before(run)
    if result.finite:
        raise LossSpikeError(f"loss spike in step {run.progress.step + 1:,}: {result.loss:.4f}. {saved} "
                             "To continue past it, set LOSS_SPIKE_POLICY=skip or warn")
    raise NonFiniteError(f"{describe_failure(run, result)}. {saved} Try a lower LEARNING_RATE "
                         f"(now {setting_text(run.config.learning_rate)})")
