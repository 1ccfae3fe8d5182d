"""Text from a model: one token after another, with the keys and values of earlier ones kept.

Shapes: B prompts, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from common.heartbeat import HEARTBEAT
from model import KVCache, Transformer

PROMPT, PADDING = 1, 2  # documents: what the cache takes new tokens for, and what no prompt sees


@torch.no_grad()
def generate(model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0,
             top_p: float = 1.0, top_k: int = 0, seed: int = 0, stop_ids: Collection[int] = ()) -> list[list[int]]:
    """Continue each prompt, and return the new tokens without the stop token that ended them.

    The result follows from the arguments alone. A prompt's does not depend on the others beside it, except that its random
    numbers go by its place among them.

    Args:
        prompts: token ids, at least one each.
        temperature: 0 = the likeliest token always.
        top_p: sample from the smallest set of tokens that has this probability.
        top_k: sample from so many tokens at most; 0 = all.
        stop_ids: tokens that end a text.
    """
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt needs a token, such as the document's start"
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    # Drawn on the CPU and all at once, so that they do not depend on the device or on when other prompts stop.
    draws_BT = torch.rand(len(prompts), max_new_tokens, generator=torch.Generator().manual_seed(seed))
    was_training = model.training
    model.eval()
    try:
        return continue_prompts(model, prompts, draws_BT, temperature, top_p, top_k, frozenset(stop_ids))
    finally:
        model.train(was_training)


def continue_prompts(model: Transformer, prompts: Sequence[Sequence[int]], draws_BT: Tensor, temperature: float, top_p: float,
                     top_k: int, stop_ids: frozenset[int]) -> list[list[int]]:
    """The new tokens of each prompt, as many as there are draws or up to a stop token."""
    device, max_new_tokens = model.norm.weight.device, draws_BT.shape[1]
    longest = max(map(len, prompts))
    # Padded on the left, so that all prompts end in the last column and one forward continues all of them.
    tokens_BT = torch.stack([F.pad(torch.tensor(prompt), (longest - len(prompt), 0)) for prompt in prompts]).to(device)
    document_ids_BT = torch.tensor([[PADDING] * (longest - len(prompt)) + [PROMPT] * len(prompt) for prompt in prompts],
                                dtype=torch.int32)
    cache = KVCache(model.config, len(prompts), longest + max_new_tokens - 1, device, model.compute_dtype)
    logits_BV = model.logits(tokens_BT, document_ids_BT, cache, last_only=True)[:, -1]
    written: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    for position in range(max_new_tokens):
        HEARTBEAT.beat()
        next_B = choose(logits_BV, draws_BT[:, position].to(device), temperature, top_p, top_k)
        for row, token in enumerate(next_B.tolist()):
            if token in stop_ids:
                unfinished.discard(row)
            elif row in unfinished:
                written[row].append(token)
        if not unfinished or position == max_new_tokens - 1:
            break
        logits_BV = model.logits(next_B[:, None], None, cache, last_only=True)[:, -1]
    return written


def choose(logits_BV: Tensor, draws_B: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """(B,) token ids: the likeliest, or those where the cumulative probability of the nucleus passes the draw.

    Args:
        draws_B: uniform in [0, 1).
    Source: Holtzman et al. 2020 (arXiv:1904.09751) for the nucleus.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    sorted_BV, ids_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV, ids_BV = sorted_BV[:, :top_k], ids_BV[:, :top_k]
    # The highest is subtracted first: divided by a small temperature, logits would overflow.
    probability_BV = ((sorted_BV - sorted_BV[:, :1]) / temperature).softmax(dim=-1)
    likelier_BV = probability_BV.cumsum(dim=-1) - probability_BV
    in_nucleus_BV = likelier_BV < top_p
    cumulative_BV = (probability_BV * in_nucleus_BV).cumsum(dim=-1)
    passed_B = (cumulative_BV <= draws_B[:, None] * cumulative_BV[:, -1:]).sum(dim=-1)
    # Rounding in the sums must not lead out of the nucleus.
    index_B = passed_B.minimum(in_nucleus_BV.sum(dim=-1) - 1)
    return ids_BV.gather(1, index_B[:, None])[:, 0]
