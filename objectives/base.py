"""The interface of an objective, and cross-entropy. No objective knows ranks, files or clocks."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from fused.chunked_head import IGNORE_INDEX


class LossSum(NamedTuple):
    """A sum of losses with its graph, and sums of metrics without one."""

    total: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """What a model is trained to minimize: the mean of a loss over units (targets, or preference pairs).

    An objective returns sums; the training loop divides by the global count of units, over all micro-batches
    and ranks. So it must be additive over rows.
    """

    def count(self, batch) -> Tensor:
        """Return the integer number of units in a batch, which may be on the CPU."""

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """Return the loss summed over these units."""

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        """Return the (B, T) targets by whose text a model is compared with others, and from the result of
        `loss_sum` their summed cross-entropy in nats."""


class NextToken:
    """Cross-entropy of the next token in nats; in SFT, the targets are the assistant's tokens only."""

    def count(self, batch) -> Tensor:
        """Return the number of targets."""
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """Return the cross-entropy summed over the targets."""
        return LossSum(-model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT,
                              target_index_M=batch.target_index_M, reduction="sum"), {})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        """Return all targets and the loss."""
        return batch.targets_BT, summed.total
