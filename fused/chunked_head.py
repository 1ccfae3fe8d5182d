"""The head and its losses, a chunk of logits at a time: with a vocabulary of 128k all logits together are the peak of memory.

Shapes: M positions, D model, V vocabulary padded to a multiple of 128.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fused.matmul import linear, upcast_for_matmul

IGNORE_INDEX = -100  # a target that is not predicted
LOWEST_LOGPROB = -1e4  # stands for the logarithm of 0: no arithmetic makes NaN of it, and float16 holds it
CHUNK_BYTES = {"cuda": 2**31, "cpu": 2**28}  # of logits that exist at a time, 4 bytes each


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """How many positions' logits exist at a time."""
    return max(1, CHUNK_BYTES[device_type] // 4 // vocab_size)


def float_logits(logits_MV: Tensor, vocab_size: int) -> Tensor:
    """The logits in float32; padded ids get minus infinity, so they are never predicted."""
    if vocab_size < logits_MV.shape[1]:
        logits_MV = logits_MV.masked_fill(torch.arange(logits_MV.shape[1], device=logits_MV.device) >= vocab_size, -torch.inf)
    return logits_MV.float()


def add_at(values_MV: Tensor, index_M1: Tensor, added_M1: Tensor) -> Tensor:
    """The values with something added at one place of each row; in place where it is not compiled.

    Compiled, a comparison is part of the kernel that makes the values; scatter_add_ has them written and read once more.
    """
    if torch.compiler.is_compiling():
        return values_MV + torch.where(torch.arange(values_MV.shape[1], device=values_MV.device) == index_M1, added_M1, 0)
    return values_MV.scatter_add_(1, index_M1, added_M1)


def logprob_and_gradient(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The summed log-probability of the targets, and its gradient to the logits (M, V) in the dtype of the hidden states.

    In place from the logits to their gradient: on a CPU new memory costs more than the arithmetic.
    """
    logits_MV = float_logits(linear(hidden_MD, weight_VD), vocab_size)
    counted_M1 = (targets_M != IGNORE_INDEX)[:, None].float()
    index_M1 = targets_M.clamp(min=0)[:, None]
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
    target_M1 = logits_MV.gather(1, index_M1) - highest_M1
    exp_MV = logits_MV.sub_(highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
    total = ((target_M1 - sum_M1.log()) * counted_M1).sum()
    gradient_MV = add_at(exp_MV.mul_(-counted_M1 / sum_M1), index_M1, counted_M1)
    return total, gradient_MV.to(hidden_MD.dtype)


def logprob_and_lse(logits_MV: Tensor, targets_M: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(M,) float32 log-probabilities of the targets, 0 where the target is IGNORE_INDEX, and the logits' logsumexp."""
    logits_MV = float_logits(logits_MV, vocab_size)
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)  # compiled, one pass gives maximum and sum; logsumexp takes two
    lse_M1 = (logits_MV - highest_M1).exp_().sum(dim=-1, keepdim=True).log() + highest_M1
    logprob_M1 = logits_MV.gather(1, targets_M.clamp(min=0)[:, None]) - lse_M1
    return torch.where(targets_M == IGNORE_INDEX, 0, logprob_M1[:, 0]), lse_M1[:, 0]


def gradient_of_logprob(logits_MV: Tensor, targets_M: Tensor, lse_M: Tensor, factor_M: Tensor, vocab_size: int) -> Tensor:
    """The gradient to the logits, in their dtype, of the sum of log-probabilities times a factor each."""
    factor_M1 = torch.where(targets_M == IGNORE_INDEX, 0, factor_M)[:, None]
    softmax_MV = (float_logits(logits_MV, vocab_size) - lse_M[:, None]).exp_()
    return add_at(softmax_MV.mul_(-factor_M1), targets_M.clamp(min=0)[:, None], factor_M1).to(logits_MV.dtype)


class HeadFunctions(NamedTuple):
    """What is computed over the vocabulary, as it is or compiled."""

    logprob_and_gradient: Callable = logprob_and_gradient
    logprob_and_lse: Callable = logprob_and_lse
    gradient_of_logprob: Callable = gradient_of_logprob


class HeadWeight(NamedTuple):
    """The head's matrix, and what of it learns."""

    values_VD: Tensor
    learned: Tensor  # the matrix itself, or (K, D), some of its rows
    ids_K: Optional[Tensor] = None  # whose rows these are; None = all


class HeadGradients:
    """The gradients of the head's matmul, filled in a chunk of positions at a time; the weight's is summed in its own dtype.

    Args:
        learned, ids_K: as in HeadWeight; None where nothing of it learns.
    """

    def __init__(self, hidden_MD: Tensor, learned: Optional[Tensor], ids_K: Optional[Tensor]):
        self.hidden_MD = torch.empty_like(hidden_MD)
        self.learned, self.ids_K = None if learned is None else torch.zeros_like(learned), ids_K

    def add(self, part: slice, gradient_MV: Tensor, hidden_MD: Tensor, weight_VD: Tensor) -> None:
        """Take in the gradient to a chunk's logits.

        Args:
            hidden_MD: of the chunk.
            weight_VD: in the compute dtype.
        """
        gradient_MV, hidden_MD = upcast_for_matmul(gradient_MV), upcast_for_matmul(hidden_MD)
        self.hidden_MD[part] = gradient_MV @ upcast_for_matmul(weight_VD)
        if self.learned is None:
            return
        if self.ids_K is not None:
            gradient_MV = gradient_MV[:, self.ids_K]
        if gradient_MV.dtype == self.learned.dtype:
            torch.addmm(self.learned, gradient_MV.T, hidden_MD, out=self.learned)
        elif gradient_MV.device.type == "cuda":  # the matmul adds in float32 by itself
            torch.addmm(self.learned, gradient_MV.T, hidden_MD, out_dtype=self.learned.dtype, out=self.learned)
        else:
            self.learned += gradient_MV.T @ hidden_MD


class ChunkedLogitsLoss(torch.autograd.Function):
    """A sum over positions of a function of their logits, whose gradients are made in the forward, a chunk of logits at a time.

    The gradient to each position's part is one number, known to be a factor: so no logits are kept or made twice.
    """

    @staticmethod
    def forward(ctx, hidden_MD, values_VD, learned, ids_K, chunk, total_and_gradient):
        weight = values_VD.to(hidden_MD.dtype)
        total = torch.zeros((), device=hidden_MD.device)
        ctx.gradients = HeadGradients(hidden_MD, learned if ctx.needs_input_grad[2] else None, ids_K)
        for part in slices(len(hidden_MD), chunk):
            part_total, gradient_MV = total_and_gradient(hidden_MD[part], weight, part)
            total += part_total
            ctx.gradients.add(part, gradient_MV, hidden_MD[part], weight)
        return total

    @staticmethod
    def backward(ctx, factor):
        # Once only: they are scaled in place, and handed on without a second reference, so that autograd need not copy them.
        hidden_MD, learned = ctx.gradients.hidden_MD, ctx.gradients.learned
        del ctx.gradients
        return hidden_MD.mul_(factor), None, None if learned is None else learned.mul_(factor), None, None, None


class LogprobOfTargets(torch.autograd.Function):
    """(M,) float32 log-probabilities of the targets; logits that fill more than one chunk are made again in the backward."""

    @staticmethod
    def forward(ctx, hidden_MD, values_VD, learned, ids_K, targets_M, vocab_size, chunk, head):
        weight, parts = values_VD.to(hidden_MD.dtype), slices(len(hidden_MD), chunk)
        logprob_M, lse_M = (torch.empty(len(hidden_MD), device=hidden_MD.device) for _ in range(2))
        for part in parts:
            logits_MV = linear(hidden_MD[part], weight)
            logprob_M[part], lse_M[part] = head.logprob_and_lse(logits_MV, targets_M[part], vocab_size)
        ctx.save_for_backward(hidden_MD, values_VD, learned, ids_K, targets_M, lse_M, logits_MV if len(parts) == 1 else None)
        ctx.parts, ctx.vocab_size, ctx.head = parts, vocab_size, head
        return logprob_M

    @staticmethod
    def backward(ctx, factor_M):
        hidden_MD, values_VD, learned, ids_K, targets_M, lse_M, kept_MV = ctx.saved_tensors
        weight = values_VD.to(hidden_MD.dtype)
        gradients = HeadGradients(hidden_MD, learned if ctx.needs_input_grad[2] else None, ids_K)
        for part in ctx.parts:
            logits_MV = linear(hidden_MD[part], weight) if kept_MV is None else kept_MV
            gradient_MV = ctx.head.gradient_of_logprob(logits_MV, targets_M[part], lse_M[part], factor_M[part], ctx.vocab_size)
            gradients.add(part, gradient_MV, hidden_MD[part], weight)
        return gradients.hidden_MD, None, gradients.learned, None, None, None, None, None


def slices(length: int, size: int) -> list[slice]:
    """Consecutive slices of `size` at most that cover a length, as equal as can be: compiled kernels then see one shape."""
    size = -(-length // max(1, -(-length // size))) or 1
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


# What is summed of some positions' logits, and its gradient to them; the slice says which of all positions they are.
LogitsLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
