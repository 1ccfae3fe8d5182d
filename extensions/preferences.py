"""Objectives for preferences other than DPO: ORPO, SimPO, and KTO for unpaired answers.

Shapes: B rows, T tokens, P pairs of a row (padded), 2 = chosen and rejected.
"""

import math
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.activity import tick
from learn.objectives import (
    PREFERENCE_OBJECTIVES,
    LossSum,
    PairLoss,
    PairwiseObjective,
    Prepared,
    answer_lengths,
    is_pair,
    pair_logprobs,
    reward_metrics,
)
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import widened


class ORPO(PairwiseObjective):
    """Cross-entropy of the chosen answer, plus ORPO_LAMBDA times a loss of both answers' odds ratio.

    Probabilities are per token. Source: Hong et al. 2024, eq. 6 and 7 (arXiv:2403.07691).
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        mean_BP2 = logprob_BP2 / length_BP2
        log_odds_BP2 = mean_BP2 - log1mexp(mean_BP2)
        ratio_BP = log_odds_BP2[..., 0] - log_odds_BP2[..., 1]
        nll_BP = -mean_BP2[..., 0]
        return nll_BP - self.config.orpo_lambda * F.logsigmoid(ratio_BP), {
            "log_odds_ratio": ratio_BP, "reward_accuracy": (ratio_BP > 0).float(), "nll_chosen": nll_BP}


class SimPO(PairwiseObjective):
    """Simple preference optimization: mean log-probabilities per token should differ by SIMPO_GAMMA.

    Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734).
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        reward_BP2 = self.config.simpo_beta * logprob_BP2 / length_BP2
        margin_BP = reward_BP2[..., 0] - reward_BP2[..., 1]
        return -F.logsigmoid(margin_BP - self.config.simpo_gamma), reward_metrics(reward_BP2, margin_BP)


class KTO(PairwiseObjective):
    """Kahneman-Tversky optimization: each answer is good or bad, compared with a reference point.

    The reference point is the divergence from the reference, at least 0, estimated from the answers of other
    records in the rows: of all ranks' micro-batches of a step, and elsewhere of the batch.
    `batch.stored["label_BP"]` is described in `ExampleRows`.
    Source: Ethayarajh et al. 2024, eq. 7 and 8 (arXiv:2402.01306).
    """

    needs_reference = True

    @torch.no_grad()
    def prepare_step(self, batches: list, step: int) -> Prepared:
        sums = []
        for batch in batches:
            tick()
            batch.stored["reference_BP2"] = self.reference(batch)
            # The point needs only the other answers, and the loss only the own ones.
            _, gain_BP2 = self.gains(self.model.eval(), self.only(batch, -1))
            is_pair_BP = is_pair(answer_lengths(batch))
            sums.append(torch.stack([widened(gain_BP2[..., 1] * is_pair_BP).sum(), is_pair_BP.sum()]))
        sums = torch.stack(sums).tolist()
        # Summed exactly, so that the point does not depend on the ranks.
        total, count = map(math.fsum, zip(*(each for rank in self.gather(sums) for each in rank)))
        for batch in batches:
            point = max(total / max(count, 1), 0.0)  # NaN stays
            batch.stored["point_B1"] = torch.full_like(batch.stored["reference_BP2"][:, :1, 0], point)
        trained = [self.only(batch, 1) for batch in batches]
        return Prepared(trained, round(sum(pairs for _, pairs in sums)), {})

    def side(self, batch) -> Tensor:
        """Return (B, T), on the CPU: 1 for tokens of a record's own answer, -1 of the other, 0 of padding."""
        document_BT, label_BP = batch.document_ids_BT.long() - 1, (batch.host or batch).stored["label_BP"]
        label_BT = F.pad(label_BP, (0, 1)).gather(1, document_BT // 2)
        return torch.where(document_BT % 2 == 0, label_BT, -label_BT)

    def only(self, batch, side: int):
        """Return a batch of the tokens of one side, in shorter rows unless a compiler wants equal shapes."""
        host = batch.host or batch  # the device is not asked, which would wait for it
        is_kept_BT, last = self.side(host) == side, int(host.document_ids_BT.max())
        length = is_kept_BT.shape[1] if self.config.compile else int(is_kept_BT.sum(dim=1).max()) + 1
        order_BT = (~is_kept_BT).int().argsort(dim=1, stable=True)[:, :length]
        is_kept_BT = is_kept_BT.gather(1, order_BT)
        # The odd number after the last pair is that of padding.
        document_ids_BT = host.document_ids_BT.gather(1, order_BT).where(is_kept_BT, last // 2 * 2 + 1)
        targets_BT = host.targets_BT.gather(1, order_BT).where(is_kept_BT, IGNORE_INDEX)
        one_side = replace(
            host, tokens_BT=host.tokens_BT.gather(1, order_BT) * is_kept_BT, targets_BT=targets_BT,
            document_ids_BT=document_ids_BT, padding=int((~is_kept_BT).sum()),
            target_index_M=(targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten())
        if host is not batch:
            one_side = one_side.to(batch.tokens_BT.device)
        return replace(one_side, stored=batch.stored)

    def gains(self, model: nn.Module, batch) -> tuple[Tensor, Tensor]:
        """Return the (B, P, 2) log-probabilities of the own and the other answer, and their gains over the
        reference."""
        logprob_BP2, reference_BP2 = pair_logprobs(model, batch), batch.stored.get("reference_BP2")
        reference_BP2 = self.reference(batch) if reference_BP2 is None else reference_BP2
        gain_BP2 = logprob_BP2 - reference_BP2[:, :logprob_BP2.shape[1]]
        return self.own_first(batch, logprob_BP2), self.own_first(batch, gain_BP2)

    def own_first(self, batch, values_BP2: Tensor) -> Tensor:
        is_good_BP1 = batch.stored["label_BP"][:, :values_BP2.shape[1], None] > 0
        return torch.where(is_good_BP1, values_BP2, values_BP2.flip(-1))

    def by_item(self, model: nn.Module, batch, items: str = "pairs") -> LossSum:
        c, (logprob_BP2, gain_BP2) = self.config, self.gains(model, batch)
        gain_BP, other_BP = gain_BP2.unbind(dim=-1)
        is_pair_BP = self.own_first(batch, answer_lengths(batch))[..., 0] > 0
        label_BP = batch.stored["label_BP"][:, :gain_BP.shape[1]]
        point_B1 = batch.stored.get("point_B1")
        if point_B1 is None:
            mean = (other_BP.detach() * is_pair_BP).sum() / is_pair_BP.sum().clamp(min=1)
            point_B1 = mean.clamp(min=0).expand(len(label_BP), 1)
        weight_BP = torch.where(label_BP > 0, c.kto_desirable_weight, c.kto_undesirable_weight)
        above_BP = label_BP * (gain_BP - point_B1)
        metrics = {"kl": point_B1, "reward_accuracy": above_BP > 0, "logprob_answer": logprob_BP2[..., 0],
                   "reward_margin": c.dpo_beta * label_BP * gain_BP}
        return LossSum(weight_BP * torch.sigmoid(-c.dpo_beta * above_BP) * is_pair_BP, {
            name: value.detach() * is_pair_BP for name, value in metrics.items()})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        is_own_BT = (self.side(batch) > 0).to(batch.targets_BT.device)
        return batch.targets_BT.where(is_own_BT, IGNORE_INDEX), -summed.metrics["logprob_answer"]


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate at both ends.

    Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-1e-7)  # a certain answer has infinite odds
    small = x > -math.log(2)
    return torch.where(small, (-torch.expm1(torch.where(small, x, -1))).log(),
                       torch.log1p(-torch.where(small, -1, x).exp()))


PREFERENCE_OBJECTIVES |= {"orpo": ORPO, "simpo": SimPO, "kto": KTO}
