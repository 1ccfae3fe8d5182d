"""GRPO: a policy gradient on groups of the model's own answers, compared with each other by their rewards.

Shape suffixes: B rows, each with a prompt and answers to it; T tokens; P prompts; G answers to a prompt.
"""

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from config import Config
from fused.head import IGNORE_INDEX
from learn.objectives import LossSum, Prepared, token_logprobs

STD_EPSILON = 1e-4  # added to the standard deviation of a group's rewards, as in TRL


def advantages(rewards_PG: Tensor, scaled: bool) -> Tensor:
    """Return the rewards minus the mean of their group, divided by its standard deviation if `scaled`.

    NaN marks an answer without a reward: it does not count in its group, and its advantage is 0.
    Source: Shao et al. 2024, section 4.1.2 (arXiv:2402.03300); without scaling Liu et al. 2025.
    """
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = rewards_PG.nansum(dim=1, keepdim=True) / count_P1.clamp(min=1)
    centered_PG = torch.where(valid_PG & ~all_equal(rewards_PG)[:, None], rewards_PG - mean_P1, 0)
    if not scaled:
        return centered_PG
    variance_P1 = centered_PG.square().sum(dim=1, keepdim=True) / (count_P1 - 1).clamp(min=1)
    return centered_PG / (variance_P1.sqrt() + STD_EPSILON)


def all_equal(rewards_PG: Tensor) -> Tensor:
    """Return (P,): whether the rewards of a group are equal, so that it teaches nothing."""
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf, posinf=torch.inf).amax(dim=1)
    return highest_P <= rewards_PG.nan_to_num(nan=torch.inf, neginf=-torch.inf).amin(dim=1)


class GRPO:
    """Group relative policy optimization: the clipped ratio to the policy that answered, times the advantage.

    A unit is an answer, or with GRPO_LOSS=dapo a token. `batch.stored` has `advantage_BT` and `length_BT` of
    each token's answer, and from the first update on `sampled_BT`: this update's own log-probabilities, so
    that its ratio is exactly 1.
    Source: Shao et al. 2024, eq. 3 and 4 (arXiv:2402.03300), for grpo; Liu et al. 2025 (arXiv:2503.20783) for
    dr_grpo; Yu et al. 2025, eq. 8 (arXiv:2503.14476) for dapo.

    Args:
        rollouts: turns the prompts of a step into batches of answers (`extensions.rollouts`).
        reference: from a batch to the (B, T) log-probabilities of the reference, without a graph.
    """

    def __init__(self, config: Config, rollouts: Optional[Callable] = None,
                 reference: Optional[Callable[..., Tensor]] = None):
        self.config, self.rollouts, self.reference = config, rollouts, reference
        self.by_token = config.grpo_loss == "dapo"

    def prepare_step(self, prompts: list, step: int) -> Prepared:
        return self.rollouts(prompts, step, self.count)

    def count(self, batch) -> Tensor:
        is_target_BT = batch.targets_BT != IGNORE_INDEX
        length_BT = 1 if self.by_token else batch.stored.get("length_BT", 1)  # prompts have no answers yet
        return (is_target_BT / length_BT).sum().round().long()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        c, stored = self.config, batch.stored
        is_target_BT = batch.targets_BT != IGNORE_INDEX
        logprob_BT = token_logprobs(model, batch)
        sampled_BT = stored.setdefault("sampled_BT", logprob_BT.detach())
        ratio_BT, advantage_BT = (logprob_BT - sampled_BT).exp(), stored["advantage_BT"]
        clipped_BT = ratio_BT.clamp(1 - c.grpo_clip_low, 1 + c.grpo_clip_high)
        gain_BT = torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
        loss_BT, metrics = -gain_BT, {"entropy": -logprob_BT, "clipped": gain_BT != ratio_BT * advantage_BT}
        if self.reference:
            if "reference_BT" not in stored:
                stored["reference_BT"] = self.reference(batch)
            gap_BT = stored["reference_BT"] - logprob_BT
            # Schulman 2020, "Approximating KL divergence", k3: unbiased, and never negative.
            metrics["kl"] = gap_BT.expm1() - gap_BT
            loss_BT = loss_BT + c.grpo_beta * metrics["kl"]

        def mean(value_BT: Tensor) -> Tensor:
            return (value_BT * is_target_BT / divisor_BT).sum()

        divisor_BT = torch.ones_like(stored["length_BT"]) if self.by_token else stored["length_BT"]
        sums = {name: mean(value_BT.detach()) for name, value_BT in metrics.items()}
        if c.grpo_loss == "dr_grpo":
            divisor_BT = torch.full_like(divisor_BT, c.answer_tokens)
        return LossSum(mean(loss_BT), sums)
