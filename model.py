"""Llama 3, Qwen 2 and 3, Mistral and SmolLM 3 in plain PyTorch, with the parameter names of Meta's model.py.

Shape suffixes: B rows, T tokens, D model, N query heads, K key/value heads, H head, F feed-forward, V
vocabulary (padded), M flattened positions.

The residual stream has the compute dtype; float32 weights are cast where they are used, without autocast.
Source: Dubey et al. 2024 (arXiv:2407.21783); github.com/meta-llama/llama3.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from config import ModelConfig, padded
from model_kernels.attention import AttentionPlan, attend, plan_attention, rotate
from model_kernels.head import ChunkedHead, HeadWeight, LogitsLoss, embed
from model_kernels.matmul import linear, upcast_for_matmul

FACTORS = (0x21F0AAAD, 0x735A2D97)  # Source: Wellons 2018, github.com/skeeto/hash-prospector.


class Normalized(torch.autograd.Function):
    """RMSNorm in fewer passes than autograd needs; the backward normalizes x again instead of keeping it."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = x.float()
        normed = x32.square()
        factor = normed.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return torch.mul(x32, factor, out=normed).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, factor = ctx.saved_tensors
        x32, gradient = x.float(), gradient.float()
        x_grad = gradient * x32
        product_MD, weight_grad = x_grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            weight_grad = (product_MD.t() @ factor.flatten()).to(weight.dtype)
        mean = (product_MD @ weight.float()).view_as(factor).div_(-x.shape[-1])
        torch.mul(gradient, weight, out=x_grad).addcmul_(x32, mean.mul_(factor.square())).mul_(factor)
        return x_grad.to(x.dtype), weight_grad, None


class RMSNorm(nn.Module):
    """Scale to unit root mean square, in float32. Source: Zhang & Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return Normalized.apply(x, self.weight, self.eps)
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Dropout(nn.Module):
    """In training, set a share of the numbers to 0, and scale the others such that the mean stays.

    The mask is a hash of SEED, step, row of the step, module and place in the row. So it does not depend on
    ranks, MICRO_BATCH_SIZE, compilation or recomputation, and no generator state matters.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting".
    """

    keys_B: Tensor  # int32, of the rows of the next forward; set by `choose_masks`

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not (self.rate and self.training):
            return x_BTD
        tokens_T, width_D = (torch.arange(size, dtype=torch.int32, device=x_BTD.device)
                             for size in x_BTD.shape[1:])
        bits_BTD = mixed(self.keys_B[:, None] + tokens_T)[..., None] + mixed(width_D)
        bits_BTD.bitwise_xor_(bits_BTD >> 16).mul_(FACTORS[0])  # the highest bits depend on all bits
        is_dropped_BTD = bits_BTD < int(self.rate * 2**32) - 2**31
        return x_BTD.masked_fill(is_dropped_BTD, 0).mul_(1 / (1 - self.rate))


def mixed(x: Tensor) -> Tensor:
    """Return an int32 hash of int32 numbers."""
    x = (x ^ (x >> 16)) * FACTORS[0]
    x = (x ^ (x >> 15)) * FACTORS[1]
    return x ^ (x >> 15)


class Linear(nn.Linear):
    """A linear layer without bias, whose weight is cast to the dtype of the input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Bias(nn.Module):
    """A vector that is added in float32 to the output of a linear layer, which may have an adapter."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() + self.weight).to(x.dtype)


def fused_linear(x: Tensor, *layers: nn.Module, decoding: bool = False) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers for one input; one matmul if none of them has an adapter."""
    # While decoding, concatenating the weights costs more than it saves.
    packed = layers[0].weight.layout == torch._mkldnn
    if decoding or packed or any(type(layer) is not Linear for layer in layers):
        return tuple(layer(x) for layer in layers)
    outputs = linear(x, torch.cat([layer.weight for layer in layers]))
    return outputs.split([layer.out_features for layer in layers], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention. Source: Ainslie et al. 2023 (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.model_type = config.head_dim, config.model_type
        heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq, self.wk, self.wv = (Linear(config.dim, width) for width in (heads, kv_heads, kv_heads))
        self.wo = Linear(heads, config.dim)
        if self.model_type == "qwen2":
            self.bq, self.bk, self.bv = Bias(heads), Bias(kv_heads), Bias(kv_heads)
        elif self.model_type == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))

    def forward(self, x_BTD: Tensor, plan: AttentionPlan) -> Tensor:
        projected = fused_linear(x_BTD, self.wq, self.wk, self.wv, decoding=plan.store is not None)
        if self.model_type == "qwen2":
            projected = tuple(bias(each) for bias, each in zip((self.bq, self.bk, self.bv), projected))
        q_BTNH, k_BTKH, v_BTKH = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.model_type == "qwen3":
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rotate(q_BTNH, plan), rotate(k_BTKH, plan)
        if plan.store is not None:
            k_BTKH, v_BTKH = plan.store(k_BTKH, v_BTKH)
        heads = (upcast_for_matmul(heads) for heads in (q_BTNH, k_BTKH, v_BTKH))
        attended_BTNH = attend(plan.kernel, *heads, plan.mask_B1TS, plan.spans)
        return self.wo(attended_BTNH.flatten(-2).to(x_BTD.dtype))


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden_dim)
        self.w2 = Linear(config.hidden_dim, config.dim)
        self.w3 = Linear(config.dim, config.hidden_dim)

    def forward(self, x: Tensor, decoding: bool = False) -> Tensor:
        gate, up = fused_linear(x, self.w1, self.w3, decoding=decoding)
        return self.w2(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    A block does not know its index, so that one compilation serves all blocks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_drop, self.ffn_drop = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, plan: AttentionPlan) -> Tensor:
        x_BTD = x_BTD + self.attention_drop(self.attention(self.attention_norm(x_BTD), plan))
        return x_BTD + self.ffn_drop(self.feed_forward(self.ffn_norm(x_BTD), plan.store is not None))


class VocabularyMatrix(nn.Module):
    """A matrix with one row per token id, used as the embedding, the head or both."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weight)

    def as_head(self) -> HeadWeight:
        return HeadWeight(self.weight, self.weight)

    def use_as_head(self, x: Tensor, function: Callable[[HeadWeight, Tensor], Tensor]) -> Tensor:
        """Return `function(head, x)`; a sharded matrix is gathered only for this call."""
        return function(self.as_head(), x)


class Transformer(nn.Module):
    """Llama 3, or another family of MODEL_TYPE.

    Args:
        vocab_size: the tokenizer's; embedding and head have `padded(vocab_size)` rows.
        compute_dtype: dtype of the residual stream and the matmuls.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.vocab_size, self.compute_dtype = config, vocab_size, compute_dtype
        self.source: Any = None  # model_utils.Source, if the weights were loaded
        self.tok_embeddings = VocabularyMatrix(padded(vocab_size), config.dim)
        self.embedding_drop = Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_embeddings else VocabularyMatrix(padded(vocab_size), config.dim)
        self.head = ChunkedHead(vocab_size, config.head_chunk_tokens)
        self.layer_kinds = config.layer_kinds

    @property
    def head_matrix(self) -> VocabularyMatrix:
        return self.tok_embeddings if self.output is None else self.output

    @torch.no_grad()
    def init_weights(self, generator: Optional[torch.Generator] = None,
                     full_tensor: Callable[[Tensor], AbstractContextManager[Tensor]] = nullcontext) -> None:
        """Draw all parameters: normal with INIT_STD, less in residual projections; norms are 1, biases 0.

        With INIT_COPY, WO is WV transposed: a head begins by adding the tokens that it attends to.
        Source: Trockman & Kolter 2023 (arXiv:2305.09828), who start from products near the identity.

        Args:
            full_tensor: yields the tensor to fill for a parameter, which may be sharded.
        """
        config, wv = self.config, torch.empty(0)  # of the same block
        for name, parameter in self.named_parameters():
            path, _, _ = name.rpartition(".")
            layer = path.rpartition(".")[2]
            residual = layer in ("wo", "w2")
            scale = 1 / math.sqrt(2 * config.n_layers) if residual else 1.0
            with full_tensor(parameter) as weight:
                if weight.ndim == 1:
                    is_bias = isinstance(self.get_submodule(path), Bias) or name.endswith(".bias")
                    weight.fill_(0.0 if is_bias else 1.0)
                elif config.init_copy and layer == "wo":
                    heads_KHD = wv.unflatten(0, (config.n_kv_heads, -1))
                    heads_NHD = heads_KHD.repeat_interleave(config.n_heads // config.n_kv_heads, dim=0)
                    weight.copy_(scale * heads_NHD.flatten(0, 1).T)
                else:
                    weight.normal_(0.0, scale * config.init_std, generator=generator)
                if name in ("tok_embeddings.weight", "output.weight"):
                    weight[self.vocab_size:] = 0
                if layer == "wv":
                    wv = weight

    def forward(self, tokens_BT: Tensor, targets_BT: Optional[Tensor] = None,
                document_ids_BT: Optional[Tensor] = None, *, target_index_M: Optional[Tensor] = None,
                mode: str | LogitsLoss = "logprobs", cache: Any = None) -> Tensor:
        """Return the log-probabilities of the targets in nats, float32, without ever holding all logits.

        Args:
            tokens_BT: int64 ids.
            targets_BT: int64 ids, already shifted; IGNORE_INDEX marks positions to skip, which count as 0.
            document_ids_BT: int32; a token attends to its own document and to the latest SHARED_PREFIX of its
                row. None = each row is one document.
            target_index_M: int64 positions of the flattened tokens to predict; None = all.
            mode: "logprobs" returns (B, T); "each" too, faster without a graph, but with other rounding on a
                CPU. "sum" returns their sum and saves a matmul of the head. A LogitsLoss returns the sum of
                that loss. Without targets, "hidden" returns the normalized last hidden states, (B, T, D) in
                the compute dtype, and "logits" (B, T, vocab_size) in float32; both (M, ...) of an index.
            cache: of earlier tokens, which these continue, without document ids. Its `plan(tokens)` returns
                each layer's AttentionPlan (`extensions/inference`).
        """
        if cache is None:
            plans = plan_attention(self.config, self.layer_kinds, self.compute_dtype, tokens_BT,
                                   document_ids_BT)
        else:
            plans = cache.plan(tokens_BT.shape[1])
        x_BTD = self.embedding_drop(self.tok_embeddings(tokens_BT).to(self.compute_dtype))
        recomputes = self.config.activation_checkpointing == "block" and torch.is_grad_enabled()
        for block, plan in zip(self.layers, plans):
            if recomputes:
                x_BTD = checkpoint(block, x_BTD, plan, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, plan)
        hidden = self.norm(x_BTD)
        if mode not in ("hidden", "logits"):
            return self.logprobs(hidden, targets_BT, target_index_M=target_index_M, mode=mode)
        if target_index_M is not None:
            hidden = hidden.flatten(0, 1)[target_index_M]
        if mode == "hidden":
            return hidden
        logits = self.head_matrix.use_as_head(hidden, lambda weight, hidden: linear(hidden, weight.values_VD))
        return logits[..., :self.vocab_size].float()

    def logprobs(self, hidden_BTD: Tensor, targets_BT: Tensor, *, target_index_M: Optional[Tensor] = None,
                 mode: str | LogitsLoss = "logprobs") -> Tensor:
        """Run the head's part of `forward` on hidden states of any leading shape."""
        compute = partial(self.head.logprobs, targets_BT=targets_BT, target_index_M=target_index_M, mode=mode)
        return self.head_matrix.use_as_head(hidden_BTD, compute)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off in the `with` block."""
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)


def choose_masks(model: nn.Module, seed: int, step: int, first_row: int, rows: int) -> None:
    """Choose the masks of a model's next forward, whose first row has the number `first_row` in the step."""
    if modules := [each for each in model.modules() if isinstance(each, Dropout) and each.rate]:
        keys_BN = torch.from_numpy(np.stack(
            [np.random.SeedSequence((seed, step, row)).generate_state(len(modules))
             for row in range(first_row, first_row + rows)]).view(np.int32))
        device = next(model.parameters()).device
        if on_cuda := device.type == "cuda":
            keys_BN = keys_BN.pin_memory()  # a copy from unpinned memory waits for the device
        for module, keys_B in zip(modules, keys_BN.to(device, non_blocking=on_cuda).unbind(dim=1)):
            module.keys_B = keys_B
