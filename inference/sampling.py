"""How the next token is chosen from logits.

Shape suffixes: B rows, R rows that are sampled, V vocabulary, W the most likely tokens of it, ordered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_LIKELY = 512  # tokens that are looked at first, as to order the whole vocabulary takes ten times longer


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: as by transformers' logits processors, in their order."""

    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    top_k: int = 0  # sample from at most this many tokens; 0 = all
    min_p: float = 0.0  # sample from tokens at least this times as probable as the most likely
    repetition_penalty: float = 1.0  # makes what is in the prompt or was written less likely, if above 1
    seed: int = 0


def penalize(logits_V: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Return logits in which the ids that were seen are less likely.

    Source: Keskar et al. 2019 (arXiv:1909.05858).
    """
    seen = torch.tensor(ids, device=logits_V.device)
    of_seen = logits_V[seen]
    return logits_V.index_put((seen,), torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty))


def choose(logits_BV: Tensor, draws_B: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return (B,) ids: the most likely, or where the cumulative probability of what is kept passes the draw.

    Args:
        draws_B: uniform in [0, 1).
        samplings: of each row.
    """
    chosen_B = logits_BV.argmax(dim=-1)
    rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if rows:
        chosen_B[rows] = sample(logits_BV[rows], draws_B[rows], [samplings[row] for row in rows])
    return chosen_B


def sample(logits_RV: Tensor, draws_R: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return (R,) ids by temperature, top-k, top-p and min-p.

    Source: Holtzman et al. 2020 (arXiv:1904.09751): top-p; Nguyen et al. 2024 (arXiv:2407.01082): min-p.
    """
    def column(name: str) -> Tensor:
        values = [getattr(sampling, name) for sampling in samplings]
        return torch.tensor(values, device=logits_RV.device)[:, None]

    # The maximum is subtracted first: divided by a small temperature, logits would overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / column("temperature")
    top_k_R1, top_p_R1, min_p_R1 = column("top_k"), column("top_p"), column("min_p")
    uncut_R1 = (top_k_R1 == 0) & (top_p_R1 == 1) & (min_p_R1 == 0)
    vocabulary = scaled_RV.shape[1]
    first = max(MOST_LIKELY, *(sampling.top_k for sampling in samplings))
    for width in (min(first, vocabulary), vocabulary):
        if width < vocabulary:
            sorted_RW, ids_RW = scaled_RV.topk(width, dim=-1)
        else:
            sorted_RW, ids_RW = scaled_RV.sort(dim=-1, descending=True, stable=True)
        in_top_k_RW = (torch.arange(width, device=ids_RW.device) < top_k_R1) | (top_k_R1 == 0)
        weights_RW = sorted_RW.exp() * in_top_k_RW
        whole_R1 = torch.where(top_k_R1 == 0, scaled_RV.exp(), 0).sum(dim=-1, keepdim=True)
        probability_RW = weights_RW / torch.where(top_k_R1 == 0, whole_R1, weights_RW.sum(-1, keepdim=True))
        before_RW = probability_RW.cumsum(dim=-1) - probability_RW
        kept_RW = in_top_k_RW & (before_RW < top_p_R1) & (probability_RW >= min_p_R1 * probability_RW[:, :1])
        cumulative_RW = (probability_RW * kept_RW).cumsum(dim=-1)
        mass_R1 = torch.where(uncut_R1 & (width < vocabulary), 1, cumulative_RW[:, -1:])
        passed_R = (cumulative_RW <= draws_R[:, None] * mass_R1).sum(dim=-1)
        # Enough if all that is kept was looked at, or if all tokens are kept and the draw lies among these.
        if width == vocabulary or bool((~kept_RW[:, -1] | (uncut_R1[:, 0] & (passed_R < width))).all()):
            break
    # Rounding in the sums must not lead out of what is kept.
    index_R = passed_R.minimum(kept_RW.sum(dim=-1) - 1)
    return ids_RW.gather(1, index_R[:, None])[:, 0]
