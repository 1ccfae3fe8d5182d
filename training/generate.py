"""Text generation with a KV cache.

Shape suffixes: B prompts, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.heartbeat import HEARTBEAT
from model import KVCache, Transformer
from parallel.sharding import same_on_all

PROMPT, PADDING = 1, 2  # document ids: KVCache gives new tokens the prompt's; no prompt attends to padding


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    top_k: int = 0  # sample from at most this many tokens; 0 = all
    seed: int = 0


@torch.no_grad()
def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int,
             sampling: Sampling = Sampling(), stop_ids: Collection[int] = ()) -> list[list[int]]:
    """Continue each prompt; return the new tokens, without the stop token that ended them.

    The result depends on the arguments only. It does not depend on the other prompts, except that a prompt's
    random numbers go with its index. Collective if the model is sharded: every rank must call it.

    Args:
        prompts: token ids, at least one each.
    """
    assert all(len(prompt) > 0 for prompt in prompts), "a prompt needs a token, such as the document's start"
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    # Drawn on the CPU and all at once, so that they depend neither on the device nor on when prompts stop.
    generator = torch.Generator().manual_seed(sampling.seed)
    draws_BT = torch.rand(len(prompts), max_new_tokens, generator=generator)
    was_training = model.training
    model.eval()
    try:
        return continue_prompts(model, prompts, draws_BT, sampling, stop_ids)
    finally:
        model.train(was_training)


def continue_prompts(model: Transformer, prompts: Sequence[Sequence[int]], draws_BT: Tensor,
                     sampling: Sampling, stop_ids: Collection[int]) -> list[list[int]]:
    """Return at most as many new tokens per prompt as there are draws."""
    device, max_new_tokens = model.norm.weight.device, draws_BT.shape[1]
    # Padded on the left, so that all prompts end in the last column and one forward continues all of them.
    missing = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    tokens_BT = torch.stack([F.pad(torch.tensor(prompt), (pad, 0)) for prompt, pad in zip(prompts, missing)])
    document_ids = [[PADDING] * pad + [PROMPT] * len(prompt) for prompt, pad in zip(prompts, missing)]
    document_ids_BT = torch.tensor(document_ids, dtype=torch.int32)
    length = tokens_BT.shape[1] + max_new_tokens - 1
    cache = KVCache(model.config, len(prompts), length, device, model.compute_dtype)
    logits_BV = model.logits(tokens_BT.to(device), document_ids_BT, cache, last_only=True)[:, -1]

    # One token of every prompt at a time
    written: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    for position in range(max_new_tokens):
        HEARTBEAT.beat()
        next_B = same_on_all(model, choose(logits_BV, draws_BT[:, position].to(device), sampling))
        for row, token in enumerate(next_B.tolist()):
            if token in stop_ids:
                unfinished.discard(row)
            elif row in unfinished:
                written[row].append(token)
        if not unfinished or position == max_new_tokens - 1:
            break
        logits_BV = model.logits(next_B[:, None], None, cache, last_only=True)[:, -1]
    return written


def choose(logits_BV: Tensor, draws_B: Tensor, sampling: Sampling) -> Tensor:
    """Return (B,) token ids: the most likely, or where the nucleus' cumulative probability passes the draw.

    Args:
        draws_B: uniform in [0, 1).
    Source: Holtzman et al. 2020 (arXiv:1904.09751) for the nucleus.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    sorted_BV, ids_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_BV, ids_BV = sorted_BV[:, :sampling.top_k], ids_BV[:, :sampling.top_k]
    # The maximum is subtracted first: divided by a small temperature, logits would overflow.
    probability_BV = ((sorted_BV - sorted_BV[:, :1]) / sampling.temperature).softmax(dim=-1)
    in_nucleus_BV = probability_BV.cumsum(dim=-1) - probability_BV < sampling.top_p
    cumulative_BV = (probability_BV * in_nucleus_BV).cumsum(dim=-1)
    passed_B = (cumulative_BV <= draws_B[:, None] * cumulative_BV[:, -1:]).sum(dim=-1)
    # Rounding in the sums must not lead out of the nucleus.
    index_B = passed_B.minimum(in_nucleus_BV.sum(dim=-1) - 1)
    return ids_BV.gather(1, index_B[:, None])[:, 0]
