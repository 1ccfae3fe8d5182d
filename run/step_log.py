"""Whether a step counts: the step log, the limit of a loss spike, checksums of the weights, and the stop.

The device decides on a step, and the host reads the decision later. A step that does not count changes
nothing, and the state before it is saved.
"""

import math
import statistics
import zlib
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import CheckpointError, LossSpikeError, NonFiniteError
from common.text import setting_text
from parallel import fsdp
from parallel.ranks import collective
from run.run import Run, StepResult, finish_saving, is_folder_lost, save_checkpoint

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
SUMMED_WORDS = {"cpu": 2**16, "cuda": 2**24}  # at a time: what fits into a core's cache, or few launches


def rows_crc32(rows: np.ndarray) -> str:
    return f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}"


def log_step(run: Run, result: StepResult) -> None:
    """Append the step's line to ledger.jsonl."""
    step = run.progress.step + 1
    if run.ranks.is_rank0:
        rows = run.order.all_rows(run.progress.step)
        entry = {"step": step, "rows_crc32": rows_crc32(rows), "loss": result.loss,
                 "grad_norm": result.grad_norm, "updated": result.updated}
        if not result.count:
            run.log.warn_without_targets(f"step {step} has no targets: it counts, but changes no weight; "
                                         "others may follow, whose loss is null in the logs")
        if result.checksums:
            entry |= {"weights": f"{total_checksum(result.checksums):016x}",
                      "tensors": "".join(f"{checksum >> 32:08x}" for checksum in result.checksums)}
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


@cache
def multipliers(seed: int, device: torch.device, count: int) -> Tensor:
    """Return odd pseudo-random int64 factors: the same on every machine, a longer list starts the same."""
    raw = np.random.PCG64(seed).random_raw(count).view(np.int64)
    return torch.from_numpy(raw | 1).to(device)


@torch.no_grad()
def checksum(rows: Tensor, start: int = 0) -> Tensor:
    """Return a checksum, an int64 scalar, of the bits of rows that begin at row `start` of a tensor.

    The sum over all elements of bits x factor of the row x factor of the column, modulo 2^64. Integer sums do
    not depend on their order, so the shards of a tensor add up. A factor is odd, so that any change of one
    element changes the sum; other changes cancel out with a probability of about 2^-31.
    Source: multilinear hashing, Carter & Wegman 1979; Lemire & Kaser 2014 (arXiv:1202.4961).
    """
    rows = rows.detach() if rows.ndim else rows.detach()[None]
    columns, end = rows.shape[1:].numel(), start + len(rows)
    bits = rows.view(WORDS[rows.element_size()]).reshape(len(rows), columns)
    longest = 1 << max(end, columns).bit_length()
    rows_R, columns_C = (multipliers(seed, rows.device, longest) for seed in (0, 1))
    chunk = max(1, SUMMED_WORDS[rows.device.type] // max(1, columns))
    sums_R = torch.cat([(part * columns_C[:columns]).sum(dim=1) for part in bits.split(chunk)])
    return (sums_R * rows_R[start:end]).sum()


@collective
def weight_checksums(model: nn.Module) -> Tensor:
    """Return the checksum of each trained tensor, by name, as (2K,) doubles: upper and lower halves."""
    trained = [each for _, each in sorted(fsdp.named_parameters(model).items()) if each.requires_grad]
    sums = [checksum(fsdp.local_rows(each), fsdp.local_span(each)[0]) for each in trained]
    sums_K = fsdp.add_shards(sums, trained)
    return torch.cat([sums_K >> 32, sums_K & 0xFFFFFFFF]).double()


def joined(halves: Sequence[float]) -> list[int]:
    """Return the 64-bit checksums that `weight_checksums` divided into halves."""
    count = len(halves) // 2
    return [(int(high) << 32 | int(low)) % 2**64 for high, low in zip(halves[:count], halves[count:])]


def total_checksum(checksums: Sequence[int]) -> int:
    """Return one checksum of all tensors, in which each has another odd factor."""
    factors = multipliers(2, torch.device("cpu"), len(checksums)).tolist()
    return sum(factor * checksum for factor, checksum in zip(factors, checksums)) % 2**64
