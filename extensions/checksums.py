"""LEDGER_CHECKSUM: checksums of the weights after each step, in the step log.

Shapes: K trained tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from extensions.guards import checksum, multipliers
from parallel import fsdp
from parallel.ranks import collective
from run.extensions import Extension
from run.run import Run


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


class Checksums(Extension):
    """Adds one checksum of all weights to each line of the step log, and half of each tensor's."""

    def run_start(self, run: Run) -> None:
        run.measures.append((lambda: weight_checksums(run.model), log_fields))


def log_fields(halves: Sequence[float]) -> dict[str, str]:
    checksums = joined(halves)
    return {"weights": f"{total_checksum(checksums):016x}",
            "tensors": "".join(f"{checksum >> 32:08x}" for checksum in checksums)}


EXTENSION = Checksums
