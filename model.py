"""Llama 3, Qwen 2 and 3, Mistral and SmolLM 3 in plain PyTorch, with the parameter names of Meta's model.py.

Shape suffixes: B rows, T tokens, S tokens that can be attended to (T, plus those in the KV cache), D model,
N query heads, K key/value heads, H head, F feed-forward, V vocabulary (padded), M flattened positions.

The residual stream has the compute dtype; float32 weights are cast where they are used, without autocast.
Source: Dubey et al. 2024 (arXiv:2407.21783); github.com/meta-llama/llama3.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from config import ModelConfig, padded
from model_kernels.attention import (
    SHARED_PREFIX,
    VARLEN,
    Spans,
    attend,
    choose_kernel,
    compute_spans,
    document_spans,
)
from model_kernels.head import ChunkedHead, HeadWeight, LogitsLoss, embed
from model_kernels.matmul import linear, upcast_for_matmul
from model_kernels.norm import Normalized
from model_kernels.rotary import apply_rotary_emb, precompute_freqs

LONG_ROW = 256  # tokens; up to here, evaluation with a shared prefix is faster with a mask, on a CPU


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


# Attention within and between documents: the mask and the positions


class AttentionMeta(NamedTuple):
    """Inputs of attention besides queries, keys and values; computed once per forward for all blocks."""

    kernel: str  # one of model_kernels.attention.KERNELS
    cos_BT1H: Tensor  # cosine of each pair's angle, repeated for both elements; B is 1 if all rows share it
    sin_BT1H: Tensor  # sine, negative for the first element of each pair
    mask_B1TS: Optional[Tensor] = None  # True = may attend; None = causal
    spans: Optional[Spans] = None  # for varlen kernels, instead of a mask
    rotation_BT1H: Optional[Tensor] = None  # cosine + i sine of each pair; on a CPU

    def rotate(self, x_BTNH: Tensor) -> Tensor:
        """Return queries or keys with the rotary embedding of their positions."""
        if self.rotation_BT1H is None or torch.compiler.is_compiling():
            return apply_rotary_emb(x_BTNH, self.cos_BT1H, self.sin_BT1H)
        # One pass; a compiler fuses the other form.
        pairs = torch.view_as_complex(x_BTNH.float().unflatten(-1, (-1, 2))) * self.rotation_BT1H
        return torch.view_as_real(pairs).flatten(-2).to(x_BTNH.dtype)


def position_ids(document_ids_BS: Tensor) -> Tensor:
    """Return each token's position for the rotary embedding: how many earlier tokens it attends to."""
    start_BS, prefix_BS, end_BS = document_spans(document_ids_BS)
    return torch.arange(start_BS.shape[1], device=start_BS.device) - start_BS + end_BS - prefix_BS


def attention_mask(document_ids_BS: Tensor) -> Tensor:
    """Return a (B, 1, T, S) mask, True where a token attends to another; here S = T.

    A token attends to itself and to earlier tokens of its own document and of the shared prefix.
    """
    start_BT1, prefix_BT1, end_BT1 = (index_BT[..., None] for index_BT in document_spans(document_ids_BS))
    key_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    is_in_prefix_BTS = (key_S >= prefix_BT1) & (key_S < end_BT1)
    return ((key_S <= key_S[:, None]) & ((key_S >= start_BT1) | is_in_prefix_BTS))[:, None]


def window_mask(config: ModelConfig, queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
    """Return a (B, 1, T, S) mask, True for keys at most SLIDING_WINDOW - 1 positions before the query."""
    distance_BTS = queries_BT[..., None] - keys_BS[:, None]
    return ((distance_BTS >= 0) & (distance_BTS < config.sliding_window))[:, None]


# The blocks


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


class KVCache(Protocol):
    """The interface of a cache that keeps the keys and values of earlier tokens."""

    def begin(self, tokens: int) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
        """Make room for this many tokens per row; return their cosines, sines, mask (None = causal) and
        the mask of layers with a sliding window (None = the same)."""

    def store(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values to a layer; return all of the layer's keys and values, (B, S, K, H)."""


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

    def forward(self, x_BTD: Tensor, meta: AttentionMeta, store: Optional[Callable]) -> Tensor:
        projected = fused_linear(x_BTD, self.wq, self.wk, self.wv, decoding=store is not None)
        if self.model_type == "qwen2":
            projected = tuple(bias(each) for bias, each in zip((self.bq, self.bk, self.bv), projected))
        q_BTNH, k_BTKH, v_BTKH = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.model_type == "qwen3":
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = meta.rotate(q_BTNH), meta.rotate(k_BTKH)
        if store is not None:
            k_BTKH, v_BTKH = store(k_BTKH, v_BTKH)
        heads = (upcast_for_matmul(heads) for heads in (q_BTNH, k_BTKH, v_BTKH))
        attended_BTNH = attend(meta.kernel, *heads, meta.mask_B1TS, meta.spans)
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

    def forward(self, x_BTD: Tensor, meta: AttentionMeta, store: Optional[Callable] = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), meta, store)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD), store is not None)


class VocabularyMatrix(nn.Module):
    """A matrix with one row per token id, used as the embedding, the head or both."""

    packed: Optional[Tensor] = None  # the head's values in the layout of `model_kernels.matmul.pack`

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ids of any shape."""
        return embed(tokens, self.weight)

    def as_head(self) -> HeadWeight:
        return HeadWeight(self.weight, self.weight)

    def use_as_head(self, x: Tensor, function: Callable[[HeadWeight, Tensor], Tensor]) -> Tensor:
        """Return `function(head, x)`; a sharded matrix is gathered only for this call."""
        return function(self.as_head() if self.packed is None else HeadWeight(self.packed, self.weight), x)


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
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_embeddings else VocabularyMatrix(padded(vocab_size), config.dim)
        self.head = ChunkedHead(vocab_size, config.head_chunk_tokens)
        self.suppressed: Optional[Tensor] = None

    def suppress(self, ids: Iterable[int]) -> None:
        """Never sample these ids."""
        ids = [each for each in ids if 0 <= each < self.vocab_size]
        self.suppressed = torch.tensor(ids, device=self.norm.weight.device) if ids else None

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

    def attention_metas(self, tokens_BT: Tensor, document_ids: Optional[Tensor],
                        cache: Optional[KVCache]) -> list[AttentionMeta]:
        """Return each layer's AttentionMeta. Document ids on the CPU avoid waiting for the GPU."""
        config, device, queries = self.config, tokens_BT.device, tokens_BT.shape[1]
        choose = partial(choose_kernel, config=config, device=device, dtype=self.compute_dtype)
        mask = window = spans = None
        host_ids, has_prefix = document_ids, False
        if cache is not None:
            cos, sin, mask, window = cache.begin(queries)
            # On a GPU, kernels for causal attention plan every new length.
            kernel = choose("causal" if mask is None and queries > 1 and device.type == "cpu" else "mask")
        elif document_ids is None:
            kernel, positions = choose("causal"), torch.arange(queries, device=device)[None]
        else:
            blocks_pay = device.type == "cpu" and (torch.is_grad_enabled() or queries > LONG_ROW)
            has_prefix = int(document_ids.min()) == SHARED_PREFIX
            kernel = choose("mask" if has_prefix and not blocks_pay else "documents")
            if kernel in VARLEN:
                spans = compute_spans(document_ids).to(device)
            document_ids = document_ids.to(device, non_blocking=device.type == "cuda")
            positions = position_ids(document_ids)
            mask = attention_mask(document_ids) if spans is None else None
        if cache is None:
            cos, sin = precompute_freqs(config, positions)
        rotation = torch.complex(cos[..., ::2], sin[..., 1::2]) if device.type == "cpu" else None
        full = windowed = AttentionMeta(kernel, cos, sin, mask, spans, rotation)
        if window is not None:
            windowed = full._replace(kernel=choose("mask"), mask_B1TS=window, spans=None)
        elif cache is None and config.sliding_window is not None and queries > config.sliding_window:
            kernel = choose("mask" if has_prefix else "window")
            if kernel in VARLEN:
                rows = torch.ones(tokens_BT.shape, dtype=torch.int32) if host_ids is None else host_ids
                spans = compute_spans(rows, config.sliding_window).to(device)
                windowed = full._replace(kernel=kernel, mask_B1TS=None, spans=spans)
            else:
                window = window_mask(config, positions, positions)
                if document_ids is not None:
                    window &= attention_mask(document_ids) if mask is None else mask
                windowed = full._replace(kernel=kernel, mask_B1TS=window, spans=None)
        metas = [windowed if config.slides(layer) else full for layer in range(config.n_layers)]
        # Ones and zeros rotate nothing, and leave one compilation for all blocks.
        return [meta if config.rotates(layer) else
                meta._replace(cos_BT1H=torch.ones_like(cos), sin_BT1H=torch.zeros_like(sin),
                              rotation_BT1H=None if rotation is None else torch.ones_like(rotation))
                for layer, meta in enumerate(metas)]

    def forward(self, tokens_BT: Tensor, targets_BT: Optional[Tensor] = None,
                document_ids_BT: Optional[Tensor] = None, *, target_index_M: Optional[Tensor] = None,
                mode: str | LogitsLoss = "logprobs", cache: Optional[KVCache] = None) -> Tensor:
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
            cache: holds earlier tokens, which these continue; it excludes document ids.
        """
        metas = self.attention_metas(tokens_BT, document_ids_BT, cache)
        x_BTD = self.tok_embeddings(tokens_BT).to(self.compute_dtype)
        for layer, (block, meta) in enumerate(zip(self.layers, metas)):
            if self.config.activation_checkpointing == "block" and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, meta, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, meta, None if cache is None else partial(cache.store, layer))
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
