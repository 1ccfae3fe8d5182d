"""How the next token is chosen from logits.

Shape suffixes: B rows, R rows that are sampled, V vocabulary, W the most likely tokens of it, ordered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_LIKELY = 512  # tokens that are looked at first, as to order the whole vocabulary takes ten times longer
FIXED_POINT = 2.0**52  # of sums of probabilities


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: as by transformers' logits processors, in their order."""

    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    top_k: int = 0  # sample from at most this many tokens; 0 = all
    min_p: float = 0.0  # sample from tokens at least this times as probable as the most likely
    repetition_penalty: float = 1.0  # makes what is in the prompt or was written less likely, if above 1
    seed: int = 0


class Samplings:
    """How the next tokens of several rows are chosen: columns on the device, which serve many steps."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu"):
        def column(name: str, rows: Sequence[Sampling]) -> Tensor:
            return torch.tensor([getattr(sampling, name) for sampling in rows], device=device)[:, None]

        self.penalty_B1 = None
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            self.penalty_B1 = column("repetition_penalty", samplings)
        rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        self.drawn_R = torch.tensor(rows, device=device) if rows else None  # rows that are sampled
        if rows:
            drawn = [samplings[row] for row in rows]
            self.temperature_R1, self.top_k_R1 = column("temperature", drawn), column("top_k", drawn)
            self.top_p_R1, self.min_p_R1 = column("top_p", drawn), column("min_p", drawn)
            self.highest_top_k = max(sampling.top_k for sampling in drawn)


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Return logits in which the ids that were seen are less likely.

    Source: Keskar et al. 2019 (arXiv:1909.05858).
    """
    penalized_BV = torch.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def choose(logits_BV: Tensor, draws_B: Tensor, samplings: Samplings) -> Tensor:
    """Return (B,) ids: the most likely, or where the cumulative probability of what is kept passes the draw.

    Args:
        draws_B: uniform in [0, 1).
    """
    drawn_R = samplings.drawn_R
    if drawn_R is not None and len(drawn_R) == len(logits_BV):
        return sample(logits_BV, draws_B, samplings)
    chosen_B = logits_BV.argmax(dim=-1)
    if drawn_R is not None:
        chosen_B[drawn_R] = sample(logits_BV[drawn_R], draws_B[drawn_R], samplings)
    return chosen_B


def running_sum(share_RW: Tensor) -> Tensor:
    """Return the sums of a row up to each number in [0, 1], added in fixed point.

    A GPU adds floats in an order that varies, which DETERMINISTIC=true does not allow.
    """
    return (share_RW * FIXED_POINT).long().cumsum(dim=-1) / FIXED_POINT


def sample(logits_RV: Tensor, draws_R: Tensor, samplings: Samplings) -> Tensor:
    """Return (R,) ids by temperature, top-k, top-p and min-p.

    Source: Holtzman et al. 2020 (arXiv:1904.09751): top-p; Nguyen et al. 2024 (arXiv:2407.01082): min-p.
    """
    # The maximum is subtracted first: divided by a small temperature, logits would overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / samplings.temperature_R1
    top_k_R1, top_p_R1, min_p_R1 = samplings.top_k_R1, samplings.top_p_R1, samplings.min_p_R1
    uncut_R1 = (top_k_R1 == 0) & (top_p_R1 == 1) & (min_p_R1 == 0)
    vocabulary = scaled_RV.shape[1]
    # A GPU orders all tokens sooner than the host could ask it whether the first ones are enough.
    first = max(MOST_LIKELY, samplings.highest_top_k) if logits_RV.device.type == "cpu" else vocabulary
    for width in (min(first, vocabulary), vocabulary):
        if width < vocabulary:
            sorted_RW, ids_RW = scaled_RV.topk(width, dim=-1)
        else:
            sorted_RW, ids_RW = scaled_RV.sort(dim=-1, descending=True, stable=True)
        in_top_k_RW = (torch.arange(width, device=ids_RW.device) < top_k_R1) | (top_k_R1 == 0)
        weights_RW = sorted_RW.exp() * in_top_k_RW
        whole_R1 = torch.where(top_k_R1 == 0, scaled_RV.exp(), 0).sum(dim=-1, keepdim=True)
        probability_RW = weights_RW / torch.where(top_k_R1 == 0, whole_R1, weights_RW.sum(-1, keepdim=True))
        before_RW = running_sum(probability_RW) - probability_RW
        kept_RW = in_top_k_RW & (before_RW < top_p_R1) & (probability_RW >= min_p_R1 * probability_RW[:, :1])
        cumulative_RW = running_sum(probability_RW * kept_RW)
        mass_R1 = torch.where(uncut_R1 & (width < vocabulary), 1, cumulative_RW[:, -1:])
        passed_R = (cumulative_RW <= draws_R[:, None] * mass_R1).sum(dim=-1)
        # Enough if all that is kept was looked at, or if all tokens are kept and the draw lies among these.
        if width == vocabulary or bool((~kept_RW[:, -1] | (uncut_R1[:, 0] & (passed_R < width))).all()):
            break
    # Rounding in the sums must not lead out of what is kept.
    index_R = passed_R.minimum(kept_RW.sum(dim=-1) - 1)
    return ids_RW.gather(1, index_R[:, None])[:, 0]
