"""How one batch becomes a number to descend. Knows tensors only: no ranks, files or clocks.

An objective returns sums; the loop divides by the global count of what was summed, over micro-batches and ranks.
"""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from model import IGNORE_INDEX


class LossSum(NamedTuple):
    """A sum of losses with its graph, and sums to report (detached)."""

    total: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """The seam for a new mode: what it averages over, and what it sums."""

    def count(self, batch) -> Tensor:
        """How many units (targets, or pairs) the batch holds; integer, on the batch's device."""

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """The loss summed over these units."""


class NextToken:
    """Cross-entropy of the next token, in nats."""

    def count(self, batch) -> Tensor:
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        return LossSum(-model(batch.tokens_BT, batch.targets_BT, batch.documents_BT, reduction="sum"), {})


OBJECTIVES: dict[str, Objective] = {"pretrain": NextToken()}
