"""Attention on a CPU in blocks of 64 queries, about twice as fast in bf16 as torch's kernel.

A block of queries is multiplied only with the blocks of keys that it can see, and the query heads that share
keys are rows of one matmul. It is one operator for torch.compile, which would break its graph at the loop.

Shape suffixes: B rows, T tokens, N query heads, K key/value heads, G query heads that share one of them,
H head, C tokens of a block, X blocks of a row, L tokens of a row, padded to whole blocks, P pairs of a row
and a key/value head, Q queries of a pair's block (G * C), J blocks of queries that see equally many keys S.
"""

import math
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from model_kernels.attention import KERNELS, Kernel

BLOCK = 64
# Rows up to this length keep their probabilities for the backward pass: up to a fourth of the activations. In
# longer rows they are computed again.
KEPT_TOKENS = 512


class Group(NamedTuple):
    """Blocks of queries that see equally many blocks of keys."""

    queries: slice | Tensor  # among the X * P blocks of queries
    keys: slice | Tensor  # of each pair's L keys; or indices of the P * X blocks of keys, for each J
    bias: Tensor  # -inf = hidden, else 0: (J, 1, C, S); or (1, 1, C, C) for the last C keys of each block


def saved_count(rows: int, tokens: int, n_heads: int) -> int:
    """Return how many probabilities a layer keeps for the backward pass, at most (without documents)."""
    blocks = -(-tokens // BLOCK)
    return rows * n_heads * BLOCK**2 * blocks * (blocks + 1) // 2 if tokens <= KEPT_TOKENS else 0


@lru_cache(4)
def plan(rows: int, n_kv_heads: int, length: int, dtype: torch.dtype,
         offsets: Optional[tuple[tuple[int, ...], ...]]) -> list[Group]:
    """Return the groups of a batch, which are the same in all layers.

    Args:
        offsets: `cu_seqlens` of the documents, the first keys that they see, and where these shared prefixes
            end; None = each row is a document.
    """
    blocks, pairs, within_C = length // BLOCK, rows * n_kv_heads, torch.arange(BLOCK)
    minus_infinity = torch.full((), -torch.inf, dtype=dtype)
    if offsets is None:
        bias = torch.where(within_C[:, None] < within_C, minus_infinity, 0)[None, None]
        return [Group(slice(block * pairs, (block + 1) * pairs), slice(0, (block + 1) * BLOCK), bias)
                for block in range(blocks)]
    borders_3D = torch.tensor(offsets)
    flat_3BT = borders_3D[:, :-1].repeat_interleave(borders_3D[0].diff(), dim=1).view(3, rows, -1)
    bounds_3BT = flat_3BT - torch.arange(rows)[:, None] * flat_3BT.shape[2]
    bounds_3BXC = F.pad(bounds_3BT, (0, length - bounds_3BT.shape[2])).unflatten(2, (-1, BLOCK))
    first_BXC = bounds_3BXC[1]
    seen_BX = torch.arange(blocks) + 1 - first_BXC[:, :, 0] // BLOCK
    head_K1 = torch.arange(n_kv_heads)[:, None]

    groups = []
    for seen in seen_BX.unique().tolist():
        row_J, block_J = (seen_BX == seen).nonzero(as_tuple=True)
        pair_KJ = row_J * n_kv_heads + head_K1
        keys_KJS = (pair_KJ * blocks + block_J)[..., None] + torch.arange(1 - seen, 1)
        key_J1S = (block_J[:, None, None] + 1 - seen) * BLOCK + torch.arange(seen * BLOCK)
        query_JC1 = block_J[:, None, None] * BLOCK + within_C[:, None]
        start_JC1, first_JC1, end_JC1 = bounds_3BXC[:, row_J, block_J, :, None]
        hidden_JCS = (key_J1S < first_JC1) | (key_J1S > query_JC1)
        hidden_JCS |= (key_J1S >= end_JC1) & (key_J1S < start_JC1)
        groups.append(Group((block_J * pairs + pair_KJ).flatten(), keys_KJS.flatten(),
                            torch.where(hidden_JCS, minus_infinity, 0)[:, None]))
    return groups


def keys_of(group: Group, x_BKLH: Tensor) -> Tensor:
    """Return the keys (or values) of a group, (K * J, S, H)."""
    if isinstance(group.keys, slice):
        return x_BKLH.flatten(0, 1)[:, group.keys]
    lines = x_BKLH.view(-1, BLOCK * x_BKLH.shape[3])[group.keys]
    return lines.view(len(group.queries), -1, x_BKLH.shape[3])


def probabilities(group: Group, q_JQH: Tensor, k_JSH: Tensor, out: Optional[Tensor]) -> Tensor:
    """Return the softmax of a group's scores, (K * J, Q, S)."""
    scores = scaled_bmm(q_JQH, k_JSH)
    by_block = scores.view(-1, len(group.bias), q_JQH.shape[1] // BLOCK, BLOCK, k_JSH.shape[1])
    by_block[..., -group.bias.shape[-1]:].add_(group.bias)
    return torch.softmax(scores, -1, out=None if out is None else out[:scores.numel()].view_as(scores))


def scaled_bmm(x_JQH: Tensor, y_JSH: Tensor) -> Tensor:
    """Return the product of each x with the transpose of y, divided by the root of H."""
    unused = x_JQH.new_empty(())
    return torch.baddbmm(unused, x_JQH, y_JSH.transpose(1, 2), beta=0, alpha=x_JQH.shape[-1]**-0.5)


def groups_of(k_BKLH: Tensor, cu_seqlens: Optional[Tensor]) -> list[Group]:
    """Return the `plan` of these tensors."""
    offsets = None if cu_seqlens is None else tuple(map(tuple, cu_seqlens.expand(3, -1).tolist()))
    return plan(*k_BKLH.shape[:3], k_BKLH.dtype, offsets)


@torch.library.custom_op("paddock::attention_in_blocks", mutates_args=())
def attention_in_blocks(q: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, cu_seqlens: Optional[Tensor],
                        keep: bool) -> tuple[Tensor, Tensor]:
    """Return causal attention, like q (X * P, Q, H), and the probabilities of all groups if they are kept."""
    attended = torch.empty_like(q)
    kept = q.new_empty(_saved_count(q, k_BKLH, keep))
    rest = kept if len(kept) else None
    for group in groups_of(k_BKLH, cu_seqlens):
        p = probabilities(group, q[group.queries], keys_of(group, k_BKLH), rest)
        rest = None if rest is None else rest[p.numel():]
        attended[group.queries] = torch.bmm(p, keys_of(group, v_BKLH))
    return attended, kept


@torch.library.custom_op("paddock::attention_in_blocks_backward", mutates_args=())
def backward(grad: Tensor, q: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, cu_seqlens: Optional[Tensor],
             kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k_BKLH), torch.zeros_like(v_BKLH)
    for group in groups_of(k_BKLH, cu_seqlens):
        q_JQH, grad_JQH = q[group.queries], grad[group.queries]
        k_JSH = keys_of(group, k_BKLH)
        if len(kept):
            shape = (*q_JQH.shape[:2], k_JSH.shape[1])
            p, kept = kept[:math.prod(shape)].view(shape), kept[math.prod(shape):]
        else:
            p = probabilities(group, q_JQH, k_JSH, None)
        p_grad = scaled_bmm(grad_JQH, keys_of(group, v_BKLH))
        scores_grad = torch._softmax_backward_data(p_grad, p, -1, p.dtype)
        q_grad[group.queries] = torch.bmm(scores_grad, k_JSH)
        for key_grad, weights, values in ((k_grad, scores_grad, q_JQH), (v_grad, p, grad_JQH)):
            if isinstance(group.keys, slice):
                keys_of(group, key_grad).baddbmm_(weights.mT, values)
            else:
                added = torch.bmm(weights.mT, values).view(len(group.keys), -1)
                key_grad.view(-1, added.shape[1]).index_add_(0, group.keys, added)
    return q_grad, k_grad, v_grad


def _saved_count(q: Tensor, k_BKLH: Tensor, keep: bool) -> int:
    rows, n_kv_heads, length, _ = k_BKLH.shape
    return saved_count(rows, length, n_kv_heads * q.shape[1] // BLOCK) if keep else 0


@attention_in_blocks.register_fake
def _(q, k_BKLH, v_BKLH, cu_seqlens, keep):
    return torch.empty_like(q), q.new_empty(_saved_count(q, k_BKLH, keep))


@backward.register_fake
def _(grad, *inputs):
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # the probabilities have none
    ctx.save_for_backward(*inputs[:4], output[1])


def _backward(ctx, grad, _, backward=backward):
    return *backward(grad.contiguous(), *ctx.saved_tensors), None, None


attention_in_blocks.register_autograd(_backward, setup_context=_save)


class Eager(torch.autograd.Function):
    """The functions of both operators, whose first call would import torch._dynamo, which takes 1 s."""

    @staticmethod
    def forward(ctx, *inputs):
        output = attention_in_blocks._init_fn(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return _backward(ctx, *grads, backward._init_fn)


def attend_in_blocks(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """Return attention within the documents, (B, T, N, H); None = each row is one.

    The operator has the layouts that its matmuls need, so that a compiler writes them where it rotates.
    """
    tokens, n_kv_heads = k_BTKH.shape[1:3]
    if missing := -tokens % BLOCK:  # rows are padded to whole blocks
        q_BTNH, k_BTKH, v_BTKH = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q_BTNH, k_BTKH, v_BTKH))
    q_BXCKGH = q_BTNH.unflatten(2, (n_kv_heads, -1)).unflatten(1, (-1, BLOCK))
    q_XBKGCH = q_BXCKGH.permute(1, 0, 3, 4, 2, 5).contiguous()
    k_BKLH, v_BKLH = (x_BLKH.transpose(1, 2).contiguous() for x_BLKH in (k_BTKH, v_BTKH))
    # Modes, such as FakeTensorMode, also see the operator.
    is_eager = not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()
    function = Eager.apply if is_eager else attention_in_blocks
    attended, _ = function(q_XBKGCH.flatten(3, 4).flatten(0, 2), k_BKLH, v_BKLH, cu_seqlens,
                           torch.is_grad_enabled())
    attended_BXCKGH = attended.view_as(q_XBKGCH).permute(1, 0, 4, 2, 3, 5)
    return attended_BXCKGH.flatten(3, 4).flatten(1, 2)[:, :tokens]


# In float32, blocks pay only where they skip other documents.
KERNELS["blocks"] = Kernel(
    half_only=False, takes_spans=64, attend=attend_in_blocks, saved=saved_count,
    pays=lambda purpose, is_half: purpose == "documents" or (purpose == "causal" and is_half))
