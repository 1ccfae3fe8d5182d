"""The head and its losses over chunks of logits: all logits of 128k ids would dominate peak memory.

Shape suffixes: M flattened positions, D model, V vocabulary (padded), K tokens with trainable rows.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from config import Config
from model_kernels.matmul import linear, upcast_for_matmul

IGNORE_INDEX = -100  # marks positions without a target
CHUNK_BYTES = {"cuda": 2**31, "mps": 2**28, "cpu": 2**28}  # float32 logits of one chunk
CACHED_LOGITS, CACHED_ROWS = 2**19, 2**12  # on a CPU, logits or weights' rows with gradients at a time
CACHED_POSITIONS, CACHED_IDS = 1024, 512  # without gradients, on a CPU: logits of a tile

# Of an extension: set the chunk of a model's head, given a config, the bytes of a number, and the device.
CHUNK_CHOICES: list[Callable[[Any, Config, int, torch.device], None]] = []

# From (M, vocab_size) float32 logits of a slice of positions, and the slice, to the summed loss and gradient.
LogitsLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def tokens_in_chunk(chosen: int, rows: int, device_type: str) -> int:
    """Return the number of positions whose logits, of so many rows, are computed together; 0 = unset."""
    return chosen or max(1, CHUNK_BYTES[device_type] // 4 // rows)


def slices(length: int, size: int) -> list[slice]:
    """Divide `length` into slices of at most `size`, nearly equal, so that few shapes are compiled."""
    size = -(-length // max(1, -(-length // size))) or 1
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def with_any_rows(varies: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a compiled function; if it `varies`, one graph serves all numbers of rows.

    Otherwise a compiler takes the first number for a constant, and compiles again for the second. The usual
    case, in which all tokens are targets, keeps its constant.
    """
    if varies and "torch._dynamo" in sys.modules:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


# Computations over the vocabulary, which ChunkedHead.compile compiles


def float_logits(logits_MV: Tensor, vocab_size: int) -> Tensor:
    """Return float32 logits with minus infinity for padded ids, so that they are never predicted."""
    if vocab_size < logits_MV.shape[1]:
        is_padding_V = torch.arange(logits_MV.shape[1], device=logits_MV.device) >= vocab_size
        logits_MV = logits_MV.masked_fill(is_padding_V, -torch.inf)
    return logits_MV.float()


def add_at(values_MV: Tensor, index_M1: Tensor, added_M1: Tensor) -> Tensor:
    """Add a number to one column of each row, in place unless compiled.

    A compiled comparison fuses with the computation of the values; scatter_add_ needs a separate pass.
    """
    if torch.compiler.is_compiling():
        index_V = torch.arange(values_MV.shape[1], device=values_MV.device)
        return values_MV + torch.where(index_V == index_M1, added_M1, 0)
    return values_MV.scatter_add_(1, index_M1, added_M1)


def logprob_and_gradient(logits_MV: Tensor, targets_M: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the targets' summed log-probability, and its (M, V) gradient to the logits in their dtype.

    The gradient may overwrite the logits: on a CPU new memory costs more than arithmetic.
    """
    dtype, logits_MV = logits_MV.dtype, float_logits(logits_MV, vocab_size)
    counted_M1 = (targets_M != IGNORE_INDEX)[:, None].float()
    index_M1 = targets_M.clamp(min=0)[:, None]
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
    target_M1 = logits_MV.gather(1, index_M1) - highest_M1
    exp_MV = logits_MV.sub_(highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
    total = ((target_M1 - sum_M1.log()) * counted_M1).sum()
    gradient_MV = add_at(exp_MV.mul_(-counted_M1 / sum_M1), index_M1, counted_M1)
    return total, gradient_MV.to(dtype)


def logprob_and_lse(logits_MV: Tensor, targets_M: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (M,) float32 log-probabilities of the targets, 0 for IGNORE_INDEX, and the logsumexp."""
    logits_MV, index_M1 = float_logits(logits_MV, vocab_size), targets_M.clamp(min=0)[:, None]
    target_M1 = logits_MV.gather(1, index_M1)
    if torch.compiler.is_compiling():  # maximum and sum in one pass; logsumexp takes two
        highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
        lse_M1 = (logits_MV - highest_M1).exp_().sum(dim=-1, keepdim=True).log() + highest_M1
        logprob_M1 = target_M1 - lse_M1
    else:  # torch's kernel keeps a row in the cache
        logprob_M1 = logits_MV.log_softmax(-1).gather(1, index_M1)
        lse_M1 = target_M1 - logprob_M1
    return torch.where(targets_M == IGNORE_INDEX, 0, logprob_M1[:, 0]), lse_M1[:, 0]


def logprob_in_tiles(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, vocab_size: int) -> Tensor:
    """Return (M,) float32 log-probabilities of the targets, from tiles of logits that fit a CPU's cache."""
    logprob_M = torch.empty(len(hidden_MD))
    tiles = slices(vocab_size, CACHED_IDS)
    for chunk in slices(len(hidden_MD), CACHED_POSITIONS):
        index_M1, chunk_MD = targets_M[chunk, None], hidden_MD[chunk]
        target_M1, lse_MK = torch.zeros(len(index_M1), 1), torch.empty(len(index_M1), len(tiles))
        memory_MV = torch.empty(len(index_M1), tiles[0].stop)  # new memory costs page faults
        for number, ids in enumerate(tiles):
            logits_MV = memory_MV[:, :ids.stop - ids.start].copy_(linear(chunk_MD, weight_VD[ids]))
            is_inside_M1 = (index_M1 >= ids.start) & (index_M1 < ids.stop)
            within_M1 = (index_M1 - ids.start).clamp(0, logits_MV.shape[1] - 1)
            target_M1 = torch.where(is_inside_M1, logits_MV.gather(1, within_M1), target_M1)
            highest_M1 = logits_MV.amax(1, keepdim=True)
            sum_M1 = logits_MV.sub_(highest_M1).exp_().sum(1, keepdim=True)
            lse_MK[:, number, None] = sum_M1.log_().add_(highest_M1)
        logprob_M[chunk] = target_M1[:, 0] - lse_MK.logsumexp(1)
    return logprob_M.where(targets_M != IGNORE_INDEX, 0)


def gradient_of_logprob(logits_MV: Tensor, targets_M: Tensor, lse_M: Tensor, factor_M: Tensor,
                        vocab_size: int) -> Tensor:
    """Return the gradient of the sum of factor * log-probability to the logits, in their dtype."""
    factor_M1 = torch.where(targets_M == IGNORE_INDEX, 0, factor_M)[:, None]
    softmax_MV = (float_logits(logits_MV, vocab_size) - lse_M[:, None]).exp_()
    return add_at(softmax_MV.mul_(-factor_M1), targets_M.clamp(min=0)[:, None], factor_M1).to(logits_MV.dtype)


# The vocabulary matrix: look-up and head


def sum_gradients_in_float32(parameter: Tensor) -> None:
    """Give a parameter that ranks gathered in bf16 a float32 gradient."""
    is_gathered = parameter.dtype != torch.float32 and not hasattr(parameter, "is_held")
    if parameter.requires_grad and parameter.is_leaf and is_gathered:
        parameter.grad_dtype = torch.float32


class Lookup(torch.autograd.Function):
    """Embedding look-up in float32, so that the gradient of a bf16 matrix is rounded only once."""

    @staticmethod
    def forward(ctx, ids, weight_VD):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight_VD)
        return F.embedding(ids, weight_VD).float()

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.ops.aten.embedding_dense_backward(gradient.float(), *ctx.saved_tensors, ctx.rows,
                                                             -1, False)


def embed(ids: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows of ids of any shape."""
    if not (weight_VD.requires_grad and torch.is_grad_enabled()):
        return F.embedding(ids, weight_VD)
    sum_gradients_in_float32(weight_VD)
    return Lookup.apply(ids, weight_VD)


class HeadWeight(NamedTuple):
    """The head's matrix and its trainable part."""

    values_VD: Tensor
    learned: Tensor  # the matrix itself, or the (K, D) rows of some tokens
    ids_K: Optional[Tensor] = None  # the ids of these tokens; None = all


class ChunkedHead:
    """Computes log-probabilities or a loss over logits from hidden states, eagerly until `compile` is called.

    `positions` is the size of a chunk; 0 = as many as CHUNK_BYTES allows.
    """

    def __init__(self, vocab_size: int, positions: int = 0):
        self.vocab_size, self.positions = vocab_size, positions
        self.logprob_and_gradient = logprob_and_gradient
        self.logprob_and_lse = logprob_and_lse
        self.gradient_of_logprob = gradient_of_logprob

    def compile(self) -> None:
        for name in ("logprob_and_gradient", "logprob_and_lse", "gradient_of_logprob"):
            setattr(self, name, torch.compile(getattr(self, name)))

    def chunks(self, hidden_MD: Tensor, weight_VD: Tensor) -> list[slice]:
        return slices(len(hidden_MD), tokens_in_chunk(self.positions, len(weight_VD), hidden_MD.device.type))

    def logprobs(self, weight: HeadWeight, hidden_BTD: Tensor, targets_BT: Tensor,
                 target_index_M: Optional[Tensor], mode: str | LogitsLoss) -> Tensor:
        """See `Transformer.forward`; the hidden states may have any leading shape."""
        sum_gradients_in_float32(weight.learned)
        hidden_MD, targets_M = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        # Whether the number of targets differs from call to call
        varies = target_index_M is not None or hidden_BTD.dim() == 2
        if target_index_M is not None:
            hidden_MD, targets_M = hidden_MD[target_index_M], targets_M[target_index_M]
        if callable(mode) or (mode == "sum" and torch.is_grad_enabled()):
            return self.sum_over_logits(weight, hidden_MD, targets_M, mode, varies)
        in_rows = mode == "logprobs" and hidden_BTD.dim() > 2  # compared with another model's, to the bit
        if in_rows or torch.is_grad_enabled() or hidden_MD.device.type != "cpu":
            logprob_M = LogprobOfTargets.apply(hidden_MD, *weight, targets_M, self, varies)
        else:
            weight_VD = weight.values_VD.to(hidden_MD.dtype)
            logprob_M = logprob_in_tiles(hidden_MD, weight_VD, targets_M, self.vocab_size)
        if mode == "sum":
            return logprob_M.sum()
        if target_index_M is not None:
            zeros = torch.zeros(targets_BT.numel(), device=logprob_M.device)
            logprob_M = zeros.index_put((target_index_M,), logprob_M)
        return logprob_M.view_as(targets_BT)

    def sum_over_logits(self, weight: HeadWeight, hidden_MD: Tensor, targets_M: Tensor,
                        loss: str | LogitsLoss, varies: bool) -> Tensor:
        """Return the sum of the targets' log-probabilities ("sum") or of a LogitsLoss."""
        def total_and_gradient(hidden_MD: Tensor, weight_VD: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            logits_MV, chunk_M = linear(hidden_MD, weight_VD), targets_M[chunk]
            if not callable(loss) and logits_MV.device.type == "cpu":  # in place, in parts that fit the cache
                parts = slices(len(logits_MV), 2**max(0, (CACHED_LOGITS // len(weight_VD)).bit_length() - 1))
                totals = torch.zeros(len(parts))
                for number, part in enumerate(parts):
                    rows = with_any_rows(varies, logits_MV[part], chunk_M[part])
                    totals[number], logits_MV[part] = self.logprob_and_gradient(*rows, self.vocab_size)
                return totals.sum(), logits_MV
            if not callable(loss):
                return self.logprob_and_gradient(*with_any_rows(varies, logits_MV, chunk_M), self.vocab_size)
            total, gradient_MV = loss(logits_MV[:, :self.vocab_size].float(), chunk)
            gradient_MV, padding = gradient_MV.to(hidden_MD.dtype), len(weight_VD) - self.vocab_size
            return total, F.pad(gradient_MV, (0, padding)) if padding else gradient_MV  # F.pad by 0 copies

        chunks = self.chunks(hidden_MD, weight.values_VD)
        return ChunkedLogitsLoss.apply(hidden_MD, *weight, chunks, total_and_gradient)


class HeadGradients:
    """Accumulates the gradients of the head's matmul over chunks; that of `learned` in float32."""

    def __init__(self, hidden_MD: Tensor, learned: Optional[Tensor], ids_K: Optional[Tensor]):
        self.hidden_MD, self.ids_K = torch.empty_like(hidden_MD), ids_K
        self.learned = None if learned is None else torch.zeros_like(learned, dtype=torch.float32)

    def add(self, chunk: slice, gradient_MV: Tensor, hidden_MD: Tensor, weight_VD: Tensor) -> None:
        """Add a chunk, given the gradient to its logits, its hidden states, and the matrix in their dtype."""
        gradient_MV, hidden_MD = upcast_for_matmul(gradient_MV), upcast_for_matmul(hidden_MD)
        self.hidden_MD[chunk] = gradient_MV @ upcast_for_matmul(weight_VD)
        if self.learned is None:
            return
        if self.ids_K is not None:
            gradient_MV = gradient_MV[:, self.ids_K]
        if gradient_MV.dtype == torch.float32:
            torch.addmm(self.learned, gradient_MV.T, hidden_MD, out=self.learned)
        elif gradient_MV.device.type == "cuda" and not torch.version.hip:  # accumulates bf16 in float32
            torch.addmm(self.learned, gradient_MV.T, hidden_MD, out_dtype=torch.float32, out=self.learned)
        else:
            for rows in slices(len(self.learned), CACHED_ROWS):
                self.learned[rows] += gradient_MV[:, rows].T @ hidden_MD


class ChunkedLogitsLoss(torch.autograd.Function):
    """The sum of a loss over logits. The forward computes the gradients too, chunk by chunk.

    The backward only scales them by the sum's gradient, so logits are neither kept nor recomputed.
    """

    @staticmethod
    def forward(ctx, hidden_MD, values_VD, learned, ids_K, chunks, total_and_gradient):
        weight_VD = values_VD.to(hidden_MD.dtype)
        total = torch.zeros((), device=hidden_MD.device)
        ctx.gradients = HeadGradients(hidden_MD, learned if ctx.needs_input_grad[2] else None, ids_K)
        for chunk in chunks:
            added, gradient_MV = total_and_gradient(hidden_MD[chunk], weight_VD, chunk)
            total += added
            ctx.gradients.add(chunk, gradient_MV, hidden_MD[chunk], weight_VD)
            del gradient_MV  # before the next one
        return total

    @staticmethod
    def backward(ctx, factor):
        # Scaled in place and returned without another reference, so that autograd does not copy them.
        hidden_MD, learned = ctx.gradients.hidden_MD, ctx.gradients.learned
        del ctx.gradients
        learned = None if learned is None else learned.mul_(factor)
        return hidden_MD.mul_(factor), None, learned, None, None, None


class LogprobOfTargets(torch.autograd.Function):
    """(M,) float32 log-probabilities of the targets; the backward recomputes logits of several chunks."""

    @staticmethod
    def forward(ctx, hidden_MD, values_VD, learned, ids_K, targets_M, head, varies):
        weight_VD, chunks = values_VD.to(hidden_MD.dtype), head.chunks(hidden_MD, values_VD)
        logprob_M, lse_M = (torch.empty(len(hidden_MD), device=hidden_MD.device) for _ in range(2))
        for chunk in chunks:
            logits_MV = linear(hidden_MD[chunk], weight_VD)
            rows = with_any_rows(varies, logits_MV, targets_M[chunk])
            logprob_M[chunk], lse_M[chunk] = head.logprob_and_lse(*rows, head.vocab_size)
        kept_MV = logits_MV if len(chunks) == 1 else None
        ctx.save_for_backward(hidden_MD, values_VD, learned, ids_K, targets_M, lse_M, kept_MV)
        ctx.chunks, ctx.head, ctx.varies = chunks, head, varies
        return logprob_M

    @staticmethod
    def backward(ctx, factor_M):
        hidden_MD, values_VD, learned, ids_K, targets_M, lse_M, kept_MV = ctx.saved_tensors
        weight_VD, head = values_VD.to(hidden_MD.dtype), ctx.head
        gradients = HeadGradients(hidden_MD, learned if ctx.needs_input_grad[2] else None, ids_K)
        for chunk in ctx.chunks:
            logits_MV = linear(hidden_MD[chunk], weight_VD) if kept_MV is None else kept_MV
            rows = with_any_rows(ctx.varies, logits_MV, targets_M[chunk], lse_M[chunk], factor_M[chunk])
            gradient_MV = head.gradient_of_logprob(*rows, head.vocab_size)
            gradients.add(chunk, gradient_MV, hidden_MD[chunk], weight_VD)
            del rows, logits_MV, gradient_MV  # before the next ones
        return gradients.hidden_MD, None, gradients.learned, None, None, None, None
