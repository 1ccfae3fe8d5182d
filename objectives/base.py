"""How one batch becomes a number to descend. Knows tensors only: no ranks, files or clocks.

An objective returns sums; the loop divides by the global count of what was summed, over micro-batches and ranks.
Shapes: B rows, T tokens, P pairs of a row (those that have fewer are padded), 2 = chosen and rejected.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from config import PreferenceConfig
from fused.chunked_head import IGNORE_INDEX


class LossSum(NamedTuple):
    """A sum of losses with its graph, and sums to report (detached)."""

    total: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """The seam for a new mode: what it averages over, and what it sums."""

    def count(self, batch) -> Tensor:
        """How many units (targets, or pairs) the batch holds; integer, on the batch's device, be it the CPU."""

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """The loss summed over these units."""


class NextToken:
    """Cross-entropy of the next token, in nats: of every token in pretraining, of the assistant's in SFT."""

    def count(self, batch) -> Tensor:
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        return LossSum(-model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=batch.target_index_M,
                              reduction="sum"), {})


def sums_by_pair(values_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    """(B, P, 2) sums over the tokens of each pair's chosen and rejected sequence, the documents 1 and 2, 3 and 4, ...

    Args:
        document_ids_BT: int32, on the CPU, so that P is known without waiting for a GPU.
    """
    last = int(document_ids_BT.max())
    index_BT = document_ids_BT.to(values_BT.device, non_blocking=True).long()  # moved first: pinned memory is not waited for
    sums = torch.zeros(len(values_BT), last + 1, device=values_BT.device).scatter_add(1, index_BT, values_BT.float())
    return sums[:, 1:last // 2 * 2 + 1].unflatten(1, (-1, 2))  # padding has the odd number after the last pair


def pair_logprobs(model: nn.Module, batch) -> Tensor:
    """(B, P, 2) log-probabilities of each pair's answers in nats; chosen and rejected go in one forward.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290).
    """
    logprob_BT = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=batch.target_index_M)
    return sums_by_pair(logprob_BT, batch.document_ids_BT)


def answer_lengths(batch) -> Tensor:
    """(B, P, 2) target tokens of each pair's answers; 0 where a row has fewer pairs, or is padding."""
    return sums_by_pair(batch.targets_BT != IGNORE_INDEX, batch.document_ids_BT)


def is_pair(length_BP2: Tensor) -> Tensor:
    """(B, P) whether there is a pair at this place."""
    return (length_BP2 > 0).all(dim=-1)


def sums_over(is_pair_BP: Tensor, **values_BP: Tensor) -> dict[str, Tensor]:
    """Sums over the pairs that there are, without a graph."""
    return {name: torch.where(is_pair_BP, value.detach(), 0).sum() for name, value in values_BP.items()}


# (B, P, 2) log-probabilities by the model that the learner starts from, without a graph.
Reference = Callable[..., Tensor]


def stored_reference(batch) -> Tensor:
    """What was computed once, before the run."""
    return batch.stored["reference_BP2"]


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation: the chosen answer gains on the rejected one, against a reference model.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); Azar et al. 2023, eq. 17 (arXiv:2310.12036) for ipo, whose margin is
    of log-probabilities by the token; Zhao et al. 2023 (arXiv:2305.10425) for hinge; Mitchell 2023 for smoothed labels.
    """

    config: PreferenceConfig
    reference: Reference
    needs_reference: ClassVar[bool] = True

    def count(self, batch) -> Tensor:
        return is_pair(answer_lengths(batch)).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        c, length_BP2 = self.config, answer_lengths(batch)
        there_BP, length_BP2 = is_pair(length_BP2), length_BP2.clamp(min=1)
        logprob_BP2 = pair_logprobs(model, batch)
        ratio_BP2 = logprob_BP2 - self.reference(batch)[:, :logprob_BP2.shape[1]]
        score_BP2 = ratio_BP2 / length_BP2 if c.dpo_length_normalised or c.dpo_loss == "ipo" else ratio_BP2
        margin_BP = score_BP2[..., 0] - score_BP2[..., 1]
        loss_BP = self.loss_of(margin_BP)
        if c.dpo_sft_weight:
            loss_BP = loss_BP - c.dpo_sft_weight * logprob_BP2[..., 0] / length_BP2[..., 0]
        reward_BP2 = c.dpo_beta * ratio_BP2
        return LossSum(torch.where(there_BP, loss_BP, 0).sum(), sums_over(
            there_BP, reward_margin=reward_BP2[..., 0] - reward_BP2[..., 1], reward_accuracy=(margin_BP > 0).float(),
            reward_chosen=reward_BP2[..., 0], reward_rejected=reward_BP2[..., 1], logprob_chosen=logprob_BP2[..., 0],
            logprob_rejected=logprob_BP2[..., 1]))

    def loss_of(self, margin_BP: Tensor) -> Tensor:
        """The loss of each pair, by how far the chosen answer is ahead."""
        c, scaled_BP = self.config, self.config.dpo_beta * margin_BP
        if c.dpo_loss == "ipo":
            return (margin_BP - 1 / (2 * c.dpo_beta)).square()
        if c.dpo_loss == "hinge":
            return F.relu(1 - scaled_BP)
        return -(1 - c.dpo_label_smoothing) * F.logsigmoid(scaled_BP) - c.dpo_label_smoothing * F.logsigmoid(-scaled_BP)


@dataclass(frozen=True)
class ORPO:
    """Cross-entropy of the chosen answer, and the odds of the chosen against the rejected one; needs no reference.

    Source: Hong et al. 2024, eq. 6 and 7 (arXiv:2403.07691); probabilities are by the token.
    """

    config: PreferenceConfig
    needs_reference: ClassVar[bool] = False

    def count(self, batch) -> Tensor:
        return is_pair(answer_lengths(batch)).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        length_BP2 = answer_lengths(batch)
        there_BP = is_pair(length_BP2)
        mean_BP2 = pair_logprobs(model, batch) / length_BP2.clamp(min=1)
        # A place without a pair has log-probability 0, whose odds are infinite.
        mean_BP2 = torch.where(there_BP[..., None], mean_BP2, -1)
        odds_BP2 = mean_BP2 - log1mexp(mean_BP2)
        ratio_BP = odds_BP2[..., 0] - odds_BP2[..., 1]
        loss_BP = -mean_BP2[..., 0] - self.config.orpo_lambda * F.logsigmoid(ratio_BP)
        return LossSum(torch.where(there_BP, loss_BP, 0).sum(), sums_over(
            there_BP, log_odds_ratio=ratio_BP, reward_accuracy=(ratio_BP > 0).float(), nll_chosen=-mean_BP2[..., 0]))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends. Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))"."""
    x = x.clamp(max=-1e-7)  # a certain answer would have infinite odds
    small = x > -math.log(2)
    return torch.where(small, (-torch.expm1(torch.where(small, x, -1))).log(), torch.log1p(-torch.where(small, -1, x).exp()))


# PREFERENCE_OBJECTIVE chooses one, made of (config, reference), or of (config) where it needs no reference.
PREFERENCE_OBJECTIVES = {"dpo": DPO, "orpo": ORPO}
