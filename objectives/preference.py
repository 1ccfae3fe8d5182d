"""Objectives over preference pairs: DPO and its variants, ORPO and SimPO.

Shapes: B rows, T tokens, P pairs of a row (rows with fewer are padded), 2 = chosen and rejected.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from config import Config, PreferenceConfig
from fused.chunked_head import IGNORE_INDEX
from objectives.base import LossSum

# From a batch to the (B, P, 2) log-probabilities of the reference model, without a graph.
Reference = Callable[..., Tensor]
# The (B, P) loss of each pair, and (B, P) metrics by the name under which their means are logged.
PairLoss = tuple[Tensor, dict[str, Tensor]]


def sums_by_pair(values_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    """Return (B, P, 2) float32 sums over the tokens of each answer; pair j is the documents 2j - 1 and 2j.

    Args:
        document_ids_BT: int32 on the CPU, so that P is known without a GPU sync.
    """
    last = int(document_ids_BT.max())
    # Moved before it is widened: the copy of pinned memory is asynchronous.
    index_BT = document_ids_BT.to(values_BT.device, non_blocking=True).long()
    sums = torch.zeros(len(values_BT), last + 1, device=values_BT.device)
    sums = sums.scatter_add(1, index_BT, values_BT.float())
    # Padding has the odd number after the last pair.
    return sums[:, 1:last // 2 * 2 + 1].unflatten(1, (-1, 2))


def pair_logprobs(model: nn.Module, batch) -> Tensor:
    """Return the (B, P, 2) log-probabilities of each pair's answers in nats, from one forward.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290).
    """
    logprob_BT = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT,
                       target_index_M=batch.target_index_M)
    return sums_by_pair(logprob_BT, batch.document_ids_BT)


@torch.no_grad()
def frozen_logprobs(model: nn.Module, batch) -> Tensor:
    """Return `pair_logprobs` of a model that is not trained."""
    return pair_logprobs(model, batch)


def stored_reference(batch) -> Tensor:
    """Return the reference's log-probabilities that were computed before the run (`ReferencedRows`)."""
    return batch.stored["reference_BP2"]


def answer_lengths(batch) -> Tensor:
    """Return the (B, P, 2) number of targets of each pair's answers; 0 for padding."""
    return sums_by_pair(batch.targets_BT != IGNORE_INDEX, batch.document_ids_BT)


def is_pair(length_BP2: Tensor) -> Tensor:
    """Return (B, P): True for a pair, False for padding."""
    return (length_BP2 > 0).all(dim=-1)


@dataclass(frozen=True)
class PairwiseObjective:
    """Base class of objectives that sum a loss over independent pairs. A subclass gives `pair_loss`, and sets
    `needs_reference` if that compares with a reference model.
    """

    config: PreferenceConfig
    reference: Optional[Reference] = None
    needs_reference: ClassVar[bool] = False

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        """Return the loss of each pair, and metrics. Padded places have ordinary values, and are ignored.

        Args:
            logprob_BP2: float32 log-probabilities of the answers, summed over their tokens, in nats.
            length_BP2: float32 numbers of tokens of the answers, at least 1.
            reference_BP2: the reference model's log-probabilities; None without `needs_reference`.
        """
        raise NotImplementedError

    def count(self, batch) -> Tensor:
        """Return the number of pairs."""
        return is_pair(answer_lengths(batch)).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """Return loss and metrics summed over the pairs."""
        length_BP2 = answer_lengths(batch)
        is_pair_BP = is_pair(length_BP2)
        # Padding has log-probability 0, of which some losses have infinite gradients.
        logprob_BP2 = torch.where(is_pair_BP[..., None], pair_logprobs(model, batch), -1)
        reference_BP2 = self.reference(batch)[:, :logprob_BP2.shape[1]] if self.needs_reference else None
        loss_BP, metrics_BP = self.pair_loss(logprob_BP2, length_BP2.clamp(min=1), reference_BP2)
        metrics_BP |= {"logprob_chosen": logprob_BP2[..., 0], "logprob_rejected": logprob_BP2[..., 1]}
        return LossSum(torch.where(is_pair_BP, loss_BP, 0).sum(), {
            name: torch.where(is_pair_BP, value.detach(), 0).sum() for name, value in metrics_BP.items()})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        """Return the targets of the chosen answers, and their cross-entropy."""
        is_chosen_BT = (batch.document_ids_BT % 2 == 1).to(batch.targets_BT.device)
        return batch.targets_BT.where(is_chosen_BT, IGNORE_INDEX), -summed.metrics["logprob_chosen"]


def reward_metrics(reward_BP2: Tensor, margin_BP: Tensor) -> dict[str, Tensor]:
    """Return the metrics of implicit rewards; the chosen answer wins if its margin is above 0."""
    chosen_BP, rejected_BP = reward_BP2.unbind(dim=-1)
    return {"reward_margin": chosen_BP - rejected_BP, "reward_accuracy": (margin_BP > 0).float(),
            "reward_chosen": chosen_BP, "reward_rejected": rejected_BP}


class DPO(PairwiseObjective):
    """Direct preference optimization: the chosen answer gains on the rejected one, relative to a reference.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); Azar et al. 2023, eq. 17 (arXiv:2310.12036) for
    ipo, whose margin is of log-probabilities per token; Zhao et al. 2023 (arXiv:2305.10425) for hinge;
    Mitchell 2023 for smoothed labels.
    """

    needs_reference = True

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        """Return DPO_LOSS of the margin, plus DPO_SFT_WEIGHT times the chosen answer's cross-entropy."""
        c, ratio_BP2 = self.config, logprob_BP2 - reference_BP2
        score_BP2 = ratio_BP2 / length_BP2 if c.dpo_length_normalised or c.dpo_loss == "ipo" else ratio_BP2
        margin_BP = score_BP2[..., 0] - score_BP2[..., 1]
        scaled_BP = c.dpo_beta * margin_BP
        if c.dpo_loss == "ipo":
            loss_BP = (margin_BP - 1 / (2 * c.dpo_beta)).square()
        elif c.dpo_loss == "hinge":
            loss_BP = F.relu(1 - scaled_BP)
        else:
            smoothing = c.dpo_label_smoothing
            loss_BP = -(1 - smoothing) * F.logsigmoid(scaled_BP) - smoothing * F.logsigmoid(-scaled_BP)
        if c.dpo_sft_weight:
            loss_BP = loss_BP - c.dpo_sft_weight * logprob_BP2[..., 0] / length_BP2[..., 0]
        return loss_BP, reward_metrics(c.dpo_beta * ratio_BP2, margin_BP)


class ORPO(PairwiseObjective):
    """Cross-entropy of the chosen answer, and the odds ratio of the chosen and the rejected one.

    Source: Hong et al. 2024, eq. 6 and 7 (arXiv:2403.07691); probabilities are per token.
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        """Return the cross-entropy plus ORPO_LAMBDA times the odds-ratio loss."""
        mean_BP2 = logprob_BP2 / length_BP2
        log_odds_BP2 = mean_BP2 - log1mexp(mean_BP2)
        ratio_BP = log_odds_BP2[..., 0] - log_odds_BP2[..., 1]
        nll_BP = -mean_BP2[..., 0]
        return nll_BP - self.config.orpo_lambda * F.logsigmoid(ratio_BP), {
            "log_odds_ratio": ratio_BP, "reward_accuracy": (ratio_BP > 0).float(), "nll_chosen": nll_BP}


class SimPO(PairwiseObjective):
    """Simple preference optimization: the mean log-probabilities per token must differ by a margin.

    Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734).
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        """Return the logistic loss of the reward margin minus SIMPO_GAMMA."""
        reward_BP2 = self.config.simpo_beta * logprob_BP2 / length_BP2
        margin_BP = reward_BP2[..., 0] - reward_BP2[..., 1]
        return -F.logsigmoid(margin_BP - self.config.simpo_gamma), reward_metrics(reward_BP2, margin_BP)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, exact at both ends.

    Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-1e-7)  # a certain answer would have infinite odds
    small = x > -math.log(2)
    return torch.where(small, (-torch.expm1(torch.where(small, x, -1))).log(),
                       torch.log1p(-torch.where(small, -1, x).exp()))


# By PREFERENCE_OBJECTIVE.
PREFERENCE_OBJECTIVES: dict[str, type[PairwiseObjective]] = {"dpo": DPO, "orpo": ORPO, "simpo": SimPO}


def reference_is_stored(config: Config) -> bool:
    """Return whether the settings ask for reference log-probabilities that are computed before the run."""
    objective = PREFERENCE_OBJECTIVES[config.preference_objective]
    return (config.training_stage == "dpo" and objective.needs_reference
            and config.dpo_reference in (("stored",) if config.lora_enabled else ("stored", "auto")))
