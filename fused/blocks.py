"""Attention on a CPU in blocks of 64 queries, about twice as fast in bf16 as torch's kernel.

A block of queries is multiplied only with the blocks of keys that it can see, and the query heads that share
keys are rows of one matmul. It is one operator for torch.compile, which would break its graph at the loop.

Shape suffixes: B rows, T tokens, N query heads, K key/value heads, H head, C tokens of a block, X all blocks
of a batch, J blocks of queries that see equally many blocks of keys, S the keys that each of them sees.
"""

from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
# Rows up to this length keep their probabilities for the backward pass: up to a fourth of the activations. In
# longer rows they are computed again.
KEPT_TOKENS = 512


class Group(NamedTuple):
    """Blocks of queries that see equally many blocks of keys; indices of lines of `to_blocks`."""

    queries: Tensor  # (K * J,)
    keys: Tensor  # (K * J * S / C,)
    bias: Tensor  # -inf = hidden, else 0: (J, 1, C, S); or (C, C) for the last C keys of each block


def kept_count(rows: int, tokens: int, n_heads: int) -> int:
    """Return how many probabilities a layer keeps for the backward pass, at most (without documents)."""
    blocks = -(-tokens // BLOCK)
    return rows * n_heads * BLOCK**2 * blocks * (blocks + 1) // 2 if tokens <= KEPT_TOKENS else 0


@lru_cache(4)
def plan(rows: int, tokens: int, n_kv_heads: int, dtype: torch.dtype,
         offsets: Optional[tuple[int, ...]]) -> list[Group]:
    """Return the groups of a batch, which are the same in all layers.

    Args:
        offsets: `cu_seqlens` of the documents; None = each row is one.
    """
    blocks = -(-tokens // BLOCK)
    within_C = torch.arange(BLOCK)
    first_BT = torch.zeros(rows, blocks * BLOCK, dtype=torch.int64)  # the first key that a query sees
    if offsets is not None:
        ends = torch.tensor(offsets)
        starts = torch.repeat_interleave(ends[:-1], ends.diff()).view(rows, tokens)
        first_BT[:, :tokens] = starts - torch.arange(rows)[:, None] * tokens
    first_XC = first_BT.view(-1, BLOCK)
    block_X = torch.arange(blocks).repeat(rows)
    seen_X = block_X + 1 - first_XC[:, 0] // BLOCK
    heads_K1 = torch.arange(n_kv_heads)[:, None] * len(block_X)

    groups = []
    for seen in seen_X.unique().tolist():
        queries_J = (seen_X == seen).nonzero().flatten()
        keys = (queries_J[:, None] + torch.arange(1 - seen, 1)).flatten()
        if offsets is None:
            hidden = within_C[:, None] < within_C
        else:
            block_J11 = block_X[queries_J, None, None]
            key_J1S = (block_J11 + 1 - seen) * BLOCK + torch.arange(seen * BLOCK)
            query_JC1 = block_J11 * BLOCK + within_C[:, None]
            hidden = ((key_J1S < first_XC[queries_J, :, None]) | (key_J1S > query_JC1))[:, None]
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        groups.append(Group((heads_K1 + queries_J).flatten(), (heads_K1 + keys).flatten(), bias))
    return groups


def groups_of(q_BTNH: Tensor, k_BTKH: Tensor, cu_seqlens: Optional[Tensor]) -> list[Group]:
    """Return the `plan` of these tensors."""
    return plan(*q_BTNH.shape[:2], k_BTKH.shape[2], q_BTNH.dtype,
                None if cu_seqlens is None else tuple(cu_seqlens.tolist()))


def to_blocks(x_BTNH: Tensor, n_kv_heads: int) -> Tensor:
    """Return (K * X, N / K * C * H): a line per block and key/value head. Rows are padded to whole blocks."""
    x = F.pad(x_BTNH, (0, 0, 0, 0, 0, -x_BTNH.shape[1] % BLOCK))
    x = x.unflatten(2, (n_kv_heads, -1)).unflatten(1, (-1, BLOCK))
    return x.permute(3, 0, 1, 4, 2, 5).flatten(3).flatten(0, 2)


def from_blocks(lines: Tensor, like_BTNH: Tensor, n_kv_heads: int) -> Tensor:
    """Undo `to_blocks`."""
    rows, tokens, heads, head_dim = like_BTNH.shape
    x = lines.view(n_kv_heads, rows, -1, heads // n_kv_heads, BLOCK, head_dim).permute(1, 2, 4, 0, 3, 5)
    return x.reshape(rows, -1, heads, head_dim)[:, :tokens].contiguous()


def scaled_bmm(x_JQH: Tensor, y_JSH: Tensor) -> Tensor:
    """Return the product of each x with the transpose of y, divided by the root of H."""
    unused = x_JQH.new_empty(())
    return torch.baddbmm(unused, x_JQH, y_JSH.transpose(1, 2), beta=0, alpha=x_JQH.shape[-1]**-0.5)


def probabilities(q: Tensor, k: Tensor, bias: Tensor, n_kv_heads: int, out: Optional[Tensor]) -> Tensor:
    """Return the softmax of a group's scores, (K * J, N / K * C, S)."""
    scores = scaled_bmm(q, k)
    by_head = scores.view(n_kv_heads, len(q) // n_kv_heads, -1, BLOCK, k.shape[1])
    by_head[..., -bias.shape[-1]:].add_(bias)
    return torch.softmax(scores, -1, out=None if out is None else out[:scores.numel()].view_as(scores))


@torch.library.custom_op("paddock::attention_in_blocks", mutates_args=())
def attention_in_blocks(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Optional[Tensor],
                        keep: bool) -> tuple[Tensor, Tensor]:
    """Return causal attention, (B, T, N, H), and the probabilities of all groups if they are kept."""
    n_kv_heads, head_dim = k_BTKH.shape[2:]
    q, k, v = (to_blocks(heads, n_kv_heads) for heads in (q_BTNH, k_BTKH, v_BTKH))
    attended = torch.empty_like(q)
    kept = q.new_empty(kept_count(*q_BTNH.shape[:3]) if keep else 0)
    rest = kept if len(kept) else None
    for group in groups_of(q_BTNH, k_BTKH, cu_seqlens):
        of_queries = (len(group.queries), -1, head_dim)
        k_JSH, v_JSH = (lines[group.keys].view(of_queries) for lines in (k, v))
        p = probabilities(q[group.queries].view(of_queries), k_JSH, group.bias, n_kv_heads, rest)
        rest = None if rest is None else rest[p.numel():]
        attended[group.queries] = torch.bmm(p, v_JSH).flatten(1)
    return from_blocks(attended, q_BTNH, n_kv_heads), kept


@torch.library.custom_op("paddock::attention_in_blocks_backward", mutates_args=())
def backward(grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Optional[Tensor],
             kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    n_kv_heads, head_dim = k_BTKH.shape[2:]
    q, k, v, grad = (to_blocks(heads, n_kv_heads) for heads in (q_BTNH, k_BTKH, v_BTKH, grad_BTNH))
    q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for group in groups_of(q_BTNH, k_BTKH, cu_seqlens):
        of_queries = (len(group.queries), -1, head_dim)
        q_J, grad_J = (lines[group.queries].view(of_queries) for lines in (q, grad))
        k_JSH, v_JSH = (lines[group.keys].view(of_queries) for lines in (k, v))
        if len(kept):
            shape = (*q_J.shape[:2], k_JSH.shape[1])
            p, kept = kept[:shape[0] * shape[1] * shape[2]].view(shape), kept[shape[0] * shape[1] * shape[2]:]
        else:
            p = probabilities(q_J, k_JSH, group.bias, n_kv_heads, None)
        scores_grad = torch._softmax_backward_data(scaled_bmm(grad_J, v_JSH), p, -1, p.dtype)
        q_grad[group.queries] = torch.bmm(scores_grad, k_JSH).flatten(1)
        for key_grad, weights, values in ((k_grad, scores_grad, q_J), (v_grad, p, grad_J)):
            added = torch.bmm(weights.transpose(1, 2), values)
            key_grad.index_add_(0, group.keys, added.view(len(group.keys), -1))
    return (from_blocks(q_grad, q_BTNH, n_kv_heads), from_blocks(k_grad, k_BTKH, n_kv_heads),
            from_blocks(v_grad, v_BTKH, n_kv_heads))


@attention_in_blocks.register_fake
def _(q_BTNH, k_BTKH, v_BTKH, cu_seqlens, keep):
    kept = q_BTNH.new_empty(kept_count(*q_BTNH.shape[:3]) if keep else 0)
    return torch.empty_like(q_BTNH, memory_format=torch.contiguous_format), kept


@backward.register_fake
def _(grad_BTNH, *inputs):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], output[1])


def _backward(ctx, grad_BTNH, _):
    return *backward(grad_BTNH, *ctx.saved_tensors), None, None


attention_in_blocks.register_autograd(_backward, setup_context=_save)


def attend_in_blocks(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """Return attention within the documents, (B, T, N, H); None = each row is one."""
    return attention_in_blocks(q_BTNH, k_BTKH, v_BTKH, cu_seqlens, torch.is_grad_enabled())[0]
