"""Llama 3 / 3.1 / 3.2 in plain PyTorch, with Meta's parameter names.

Shapes: B rows, T tokens, S tokens that can be attended to (T, or T and the cache before it), D model, N query heads,
K key/value heads, H head, F feed-forward, V vocabulary (padded to a multiple of 128 inside), M tokens of a flattened batch.

The dtype of the residual stream is the compute dtype; weights stay fp32 and are cast where they are used: there is no autocast.
Source: Dubey et al. 2024 (arXiv:2407.21783) and Meta's reference model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from config import ModelConfig
from fused.attention import VARLEN, attend, choose_kernel
from fused.chunked_head import (
    ChunkedLogitsLoss,
    HeadFunctions,
    HeadWeight,
    LogitsLoss,
    LogprobOfTargets,
    chunk_tokens,
)
from fused.matmul import linear, upcast_for_matmul

SHARED_PREFIX = 0  # the document that every later one in its row sees


def padded(vocab_size: int) -> int:
    """The vocabulary's size inside the model, a multiple of 128 for the sake of the matmul kernels."""
    return -(-vocab_size // 128) * 128


class AttentionMeta(NamedTuple):
    """Who sees whom in a batch, and where each token stands. Made once per forward, used by every block."""

    kernel: str  # that computes the attention
    cos_BT1H: Tensor  # of each pair's angle, twice; the first axis is 1 where all rows are alike
    sin_BT1H: Tensor  # the same with the signs - and + of a rotation
    mask_B1TS: Optional[Tensor] = None  # True = may attend; None = causal
    cu_seqlens: Optional[Tensor] = None  # int32 borders of the documents in the flattened batch, for varlen kernels


def position_ids(documents_BS: Tensor) -> Tensor:
    """How many tokens each token sees before itself: its position for the rotary embedding."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0))
    within_BS = index_S - (index_S * starts_BS).cummax(dim=1).values
    prefix_B1 = (documents_BS == SHARED_PREFIX).sum(dim=1, keepdim=True)
    return within_BS + torch.where(documents_BS == SHARED_PREFIX, 0, prefix_B1)


def mask_of(documents_BS: Tensor, queries: int) -> Tensor:
    """(B, 1, T, S), True where one of the last `queries` tokens may attend: earlier, and own document or shared prefix."""
    length = documents_BS.shape[1]
    index_S = torch.arange(length, device=documents_BS.device)
    causal_TS = index_S[length - queries:, None] >= index_S
    query_BT1, key_B1S = documents_BS[:, length - queries:, None], documents_BS[:, None, :]
    return (causal_TS & ((query_BT1 == key_B1S) | (key_B1S == SHARED_PREFIX)))[:, None]


def compute_cu_seqlens(document_ids_BT: Tensor) -> Tensor:
    """int32 offsets at which a document of the flattened batch begins, and its end.

    Padded with the end (empty documents) to a multiple of 64, so that compiled kernels see few shapes.
    """
    starts = F.pad(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], (1, 0), value=True).flatten().nonzero().flatten()
    size = -(-(len(starts) + 1) // 64) * 64
    return F.pad(starts, (0, size - len(starts)), value=document_ids_BT.numel()).to(torch.int32)


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair, float32; long wavelengths are stretched as in Llama 3.1 when scaling is set."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling_factor is None:
        return frequencies
    turns = config.rope_original_max_len * frequencies / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 0 = stretched, 1 = as it was
    return share * frequencies + (1 - share) * frequencies / config.rope_scaling_factor


def apply_rotary_emb(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
    """Turn each pair (2i, 2i + 1) by its angle, in float32. Source: Su et al. 2021 (arXiv:2104.09864), in Meta's pairing."""
    x32 = x_BTNH.float()
    swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x32 * cos_BT1H, swapped, sin_BT1H).to(x_BTNH.dtype)


class KVCache:
    """Keys and values of the tokens so far, for generation.

    Args:
        length: tokens that fit, prompt included.
    """

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layers, rows, length, config.n_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.documents_BS = torch.ones(rows, length, device=device, dtype=torch.int32)
        self.used = 0

    def store(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        """Append to one layer and return all of its keys and values."""
        end = self.used + k_BTKH.shape[1]
        self.keys[layer, :, self.used:end] = k_BTKH
        self.values[layer, :, self.used:end] = v_BTKH
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class Linear(nn.Linear):
    """A matrix without bias, cast to the dtype of what it multiplies."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def linear_together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of several linear layers on one input, as one matmul where all of them are plain."""
    if any(type(layer) is not Linear for layer in layers):
        return tuple(layer(x) for layer in layers)
    together = linear(x, torch.cat([layer.weight for layer in layers]))
    return together.split([layer.out_features for layer in layers], dim=-1)


class RMSNorm(nn.Module):
    """Scale to unit root mean square, in float32. Source: Zhang & Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. Source: Ainslie et al. 2023 (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = Linear(config.dim, config.n_heads * config.head_dim)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim)

    def forward(self, x_BTD: Tensor, layout: AttentionMeta, store: Optional[Callable]) -> Tensor:
        q_BTNH, k_BTKH, v_BTKH = (projected.unflatten(-1, (-1, self.head_dim))
                                  for projected in linear_together(x_BTD, self.wq, self.wk, self.wv))
        q_BTNH = apply_rotary_emb(q_BTNH, layout.cos_BT1H, layout.sin_BT1H)
        k_BTKH = apply_rotary_emb(k_BTKH, layout.cos_BT1H, layout.sin_BT1H)
        if store is not None:
            k_BTKH, v_BTKH = store(k_BTKH, v_BTKH)
        heads = (upcast_for_matmul(heads) for heads in (q_BTNH, k_BTKH, v_BTKH))
        attended_BTNH = attend(layout.kernel, *heads, layout.mask_B1TS, layout.cu_seqlens)
        return self.wo(attended_BTNH.flatten(-2).to(x_BTD.dtype))


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden_dim)
        self.w2 = Linear(config.hidden_dim, config.dim)
        self.w3 = Linear(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear_together(x, self.w1, self.w3)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    It does not know its number, so that one compilation serves all blocks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, layout: AttentionMeta, store: Optional[Callable] = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), layout, store)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Transformer(nn.Module):
    """Llama 3.

    Args:
        config: the shape.
        vocab_size: ids of the tokenizer; inside, the embedding is padded to a multiple of 128.
        compute_dtype: of the residual stream and the matmuls.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.vocab_size, self.compute_dtype = config, vocab_size, compute_dtype
        # Without the initialisation of nn.Embedding, which on the meta device imports torch._dynamo for a second and a half.
        self.tok_embeddings = nn.Embedding.from_pretrained(torch.empty(padded(vocab_size), config.dim), freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_embeddings else Linear(config.dim, padded(vocab_size))
        self.head = HeadFunctions()  # replaced by their compiled forms

    @property
    def head_weight(self) -> HeadWeight:
        """(V, D), the embedding's own matrix when tied, and what of it learns."""
        head = self.tok_embeddings if self.output is None else self.output
        return HeadWeight(head.weight, head.weight) if isinstance(head, (nn.Embedding, Linear)) else head.as_head()

    @torch.no_grad()
    def init_weights(self, generator: Optional[torch.Generator] = None) -> None:
        """Draw all weights anew: normal with INIT_STD, residual projections scaled by depth, padded ids zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("wo.weight", "w2.weight"))
            std = self.config.init_std / (math.sqrt(2 * self.config.n_layers) if residual else 1)
            parameter.normal_(0.0, std, generator=generator)
            if parameter.shape[0] == padded(self.vocab_size) and ("tok_embeddings" in name or "output" in name):
                parameter[self.vocab_size:] = 0

    def layout(self, tokens: Tensor, documents: Optional[Tensor], cache: Optional[KVCache]) -> AttentionMeta:
        """Positions and visibility of a batch. Documents may lie on the CPU, which spares a synchronisation."""
        device, queries = tokens.device, tokens.shape[1]
        purpose, mask, borders = "causal", None, None
        if cache is not None:
            new = 1 if documents is None else documents.to(device)
            cache.documents_BS[:, cache.used:cache.used + queries] = new
            documents = cache.documents_BS[:, :cache.used + queries]
        if documents is not None:
            shared = cache is not None or int(documents.min()) == SHARED_PREFIX  # the lowest number that there is
            purpose = "mask" if shared else "documents"
        kernel = choose_kernel(purpose, self.config, device, self.compute_dtype)
        if documents is None:
            positions = torch.arange(queries, device=device)[None]
        else:
            if kernel in VARLEN:
                borders = compute_cu_seqlens(documents).to(device, non_blocking=True)
                torch._dynamo.maybe_mark_dynamic(borders, 0)  # one compilation for any number of documents
            documents = documents.to(device, non_blocking=True)
            positions = position_ids(documents)[:, -queries:]
            mask = mask_of(documents, queries) if borders is None else None
        angles = positions[:, :, None, None].float() * inverse_frequencies(self.config, device)
        sin = angles.sin()
        cos, signed_sin = angles.cos().repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return AttentionMeta(kernel, cos, signed_sin, mask, borders)

    def hidden(self, tokens_BT: Tensor, document_ids_BT: Optional[Tensor] = None, cache: Optional[KVCache] = None) -> Tensor:
        """The normalised last hidden states, (B, T, D) in the compute dtype."""
        layout = self.layout(tokens_BT, document_ids_BT, cache)
        x_BTD = self.tok_embeddings(tokens_BT).to(self.compute_dtype)
        for layer, block in enumerate(self.layers):
            if self.config.activation_checkpointing == "block" and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, layout, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, layout, None if cache is None else partial(cache.store, layer))
        if cache is not None:
            cache.used += tokens_BT.shape[1]
        return self.norm(x_BTD)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, document_ids_BT: Optional[Tensor] = None, *,
                target_index_M: Optional[Tensor] = None, reduction: str | LogitsLoss = "none") -> Tensor:
        """Log-probabilities of the targets in nats, float32, without ever holding all logits.

        Args:
            tokens_BT: int64 ids.
            targets_BT: int64 ids, already shifted; IGNORE_INDEX = not predicted, counts 0.
            document_ids_BT: int32 numbers of the documents; a token sees its own and SHARED_PREFIX. None = rows are whole.
            target_index_M: int64, where the flattened targets are not ignored: the head runs only there. None = everywhere.
            reduction: "none" gives (B, T); "sum" their sum, whose backward costs one head matmul less; a function of
                (M, vocab_size) float32 logits and of which positions these are gives the sum of what it returns.
        """
        return self.logprobs(self.hidden(tokens_BT, document_ids_BT), targets_BT, target_index_M=target_index_M, reduction=reduction)

    def logprobs(self, hidden_BTD: Tensor, targets_BT: Tensor, *, target_index_M: Optional[Tensor] = None,
                 reduction: str | LogitsLoss = "none") -> Tensor:
        """The head's part of `forward`, for hidden states of any leading shape."""
        hidden_MD, targets_M = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        if target_index_M is not None:
            hidden_MD, targets_M = hidden_MD[target_index_M], targets_M[target_index_M]
        chunk = self.config.head_chunk_tokens or chunk_tokens(padded(self.vocab_size), hidden_MD.device.type)
        if callable(reduction) or (reduction == "sum" and torch.is_grad_enabled()):
            return self.sum_over_logits(hidden_MD, targets_M, chunk, reduction)
        logprob_M = LogprobOfTargets.apply(hidden_MD, *self.head_weight, targets_M, self.vocab_size, chunk, self.head)
        if reduction == "sum":
            return logprob_M.sum()
        if target_index_M is not None:
            logprob_M = torch.zeros(targets_BT.numel(), device=logprob_M.device).index_put((target_index_M,), logprob_M)
        return logprob_M.view_as(targets_BT)

    def sum_over_logits(self, hidden_MD: Tensor, targets_M: Tensor, chunk: int, loss: str | LogitsLoss) -> Tensor:
        """The sum of the targets' log-probabilities ("sum"), or of a function of the logits."""
        def of_logprobs(hidden: Tensor, weight: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            return self.head.logprob_and_gradient(hidden, weight, targets_M[part], self.vocab_size)

        def of_loss(hidden: Tensor, weight: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            total, gradient_MV = loss(linear(hidden, weight)[:, :self.vocab_size].float(), part)
            gradient_MV, missing = gradient_MV.to(hidden.dtype), len(weight) - self.vocab_size
            return total, F.pad(gradient_MV, (0, missing)) if missing else gradient_MV  # padding by nothing copies

        return ChunkedLogitsLoss.apply(hidden_MD, *self.head_weight, chunk, of_loss if callable(loss) else of_logprobs)

    def logits(self, tokens_BT: Tensor, document_ids_BT: Optional[Tensor] = None, cache: Optional[KVCache] = None, *,
               last_only: bool = False) -> Tensor:
        """All logits, (B, T, vocab_size) float32 without padded ids; (B, 1, vocab_size) with `last_only`."""
        hidden_BTD = self.hidden(tokens_BT, document_ids_BT, cache)
        hidden_BTD = hidden_BTD[:, -1:] if last_only else hidden_BTD
        return linear(hidden_BTD, self.head_weight.values_VD)[..., :self.vocab_size].float()
