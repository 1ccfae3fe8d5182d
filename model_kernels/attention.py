"""Attention: the plan of a forward (kernel, positions, mask), the kernels, and the choice among them.

Shape suffixes: B rows, T queries, S keys, N query heads, K key/value heads, H head. On an H100, kernels
differ by a factor of two in speed. Which can run depends on device, dtype, head dimension and kind of mask.
"""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import SettingsError
from config import ModelConfig


class Kernel(NamedTuple):
    """The requirements and features of a kernel."""

    backend: Optional[SDPBackend] = None  # for scaled_dot_product_attention; None = torch chooses
    max_dim: int = 1 << 20  # largest head dimension
    half_only: bool = True  # bf16 and fp16 only
    grouped: bool = True  # fewer key/value heads than query heads, which are repeated otherwise
    deterministic: bool = True  # backward under torch.use_deterministic_algorithms
    takes_spans: int = 0  # documents as Spans, without a mask; the multiple of entries in `cu_seqlens`
    # Set by extensions. attend(q, k, v, cu_seqlens): computes attention; without `cu_seqlens`, each row is a
    # document. pays(purpose, is_half): is this kernel faster on a CPU? saved(rows, tokens, n_heads): the most
    # numbers that a layer keeps for its backward.
    attend: Optional[Callable[..., Tensor]] = None
    pays: Callable[[str, bool], bool] = lambda purpose, is_half: False
    saved: Callable[[int, int, int], int] = lambda rows, tokens, n_heads: 0


KERNELS = {
    # The package flash_attn_interface, via torch; the package flash_attn; and torch.nn.attention.varlen
    "flash-3": Kernel(SDPBackend.FLASH_ATTENTION, max_dim=256, takes_spans=1),  # hangs on empty documents
    "flash-2": Kernel(max_dim=256, takes_spans=64),
    "varlen": Kernel(max_dim=256, takes_spans=64),
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, max_dim=128, deterministic=False),
    "cudnn-expanded": Kernel(SDPBackend.CUDNN_ATTENTION, max_dim=128, deterministic=False, grouped=False),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, max_dim=256),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, half_only=False, grouped=False),
    "math": Kernel(SDPBackend.MATH, half_only=False),
    "sdpa": Kernel(half_only=False),
    "grouped": Kernel(half_only=False),  # attend_grouped, on a CPU
}
# With a mask, torch may choose cuDNN, whose backward gives NaN at some lengths (pytorch issue 196678), and
# whose forward is wrong for few key/value heads on a B200 (193893).
SAFE_WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Activating FlashAttention-3 changes the implementation of these kernels in the whole process.
REPLACED_BY_FLASH_3 = {"flash", "varlen"}
SHARED_PREFIX = 0  # id of a document that later ones of its row attend to, up to the next with this id
LONG_ROW = 256  # tokens; up to here, evaluation with a shared prefix is faster with a mask, on a CPU
GROUPED_QUERIES = 16  # with more queries per row, torch's kernel is faster than "grouped"
CHOSEN: set[str] = set()  # kernels that this process uses
VARLEN: dict[str, Callable[..., Tensor]] = {}  # of kernels after a trial; the compiler warns of @cache


# ------------------------------------------------------------------------------------ the plan of a forward


class Spans(NamedTuple):
    """The keys that each token attends to, for kernels that take spans."""

    cu_seqlens: Tensor  # see `compute_spans`
    longest: Tensor  # (tokens of the longest document, 0); as a size, it can vary within one compilation
    window: int = 0  # number of keys up to the query, SLIDING_WINDOW; 0 = the whole document

    def to(self, device: torch.device) -> "Spans":
        """Copy `cu_seqlens` to a device without waiting for it, for one compilation of all sizes."""
        cu_seqlens, longest, window = self
        if device.type == "cuda":
            cu_seqlens = cu_seqlens.pin_memory()  # a copy from unpinned memory waits for the device
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, cu_seqlens.ndim - 1)
            torch._dynamo.maybe_mark_dynamic(longest, 0)
        return Spans(cu_seqlens, longest, window)


class AttentionPlan(NamedTuple):
    """How a layer attends in one forward, besides its queries, keys and values; layers of a kind share it."""

    kernel: str  # one of KERNELS
    cos_BT1H: Tensor  # cosine of each pair's angle, repeated for both elements; B is 1 if all rows share it
    sin_BT1H: Tensor  # sine, negative for the first element of each pair
    mask_B1TS: Optional[Tensor] = None  # True = may attend; None = causal
    spans: Optional[Spans] = None  # for kernels that take them, instead of a mask
    rotation_BT1H: Optional[Tensor] = None  # cosine + i sine of each pair; on a CPU
    # Of a cache: adds a layer's keys and values to those of earlier tokens, and returns all of them.
    store: Optional[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = None


def plan_attention(config: ModelConfig, kinds: Sequence[tuple[bool, bool]], dtype: torch.dtype,
                   tokens_BT: Tensor, document_ids: Optional[Tensor]) -> list[AttentionPlan]:
    """Return the plan of each layer for rows of documents. Ids on the CPU avoid waiting for the GPU.

    Args:
        kinds: of each layer, whether SLIDING_WINDOW limits it and whether it has a rotary embedding.
        dtype: of queries, keys and values.
    """
    device, tokens, mask, spans = tokens_BT.device, tokens_BT.shape[1], None, None
    choose = partial(choose_kernel, config=config, device=device, dtype=dtype)
    index_T, host_ids, has_prefix = torch.arange(tokens, device=device), document_ids, False
    if document_ids is None:
        kernel, positions = choose("causal"), index_T[None]
    else:
        blocks_pay = device.type == "cpu" and (torch.is_grad_enabled() or tokens > LONG_ROW)
        has_prefix = int(document_ids.min()) == SHARED_PREFIX
        kernel = choose("mask" if has_prefix and not blocks_pay else "documents")
        if multiple := KERNELS[kernel].takes_spans:
            spans = compute_spans(document_ids, multiple).to(device)
        document_ids = document_ids.to(device, non_blocking=device.type == "cuda")
        start_BT, prefix_BT, end_BT = borders = document_borders(document_ids)
        # As many as the earlier tokens that it attends to.
        positions = index_T - start_BT + end_BT - prefix_BT
        mask = document_mask(*borders) if spans is None else None
    cos, sin = precompute_freqs(config, positions)
    full = windowed = AttentionPlan(kernel, cos, sin, mask, spans)
    if config.sliding_window is not None and tokens > config.sliding_window:
        kernel = choose("mask" if has_prefix else "window")
        if multiple := KERNELS[kernel].takes_spans:
            rows = torch.ones(tokens_BT.shape, dtype=torch.int32) if host_ids is None else host_ids
            spans = compute_spans(rows, multiple, config.sliding_window).to(device)
            windowed = full._replace(kernel=kernel, mask_B1TS=None, spans=spans)
        else:
            window = window_mask(config, positions, positions)
            if document_ids is not None:
                window &= document_mask(*borders) if mask is None else mask
            windowed = full._replace(kernel=kernel, mask_B1TS=window, spans=None)
    return by_layer(kinds, full, windowed)


def by_layer(kinds: Sequence[tuple[bool, bool]], full: AttentionPlan, windowed: AttentionPlan
             ) -> list[AttentionPlan]:
    """Return the plan of each layer, given the plans without and with SLIDING_WINDOW."""
    cos, sin, rotation = full.cos_BT1H, full.sin_BT1H, None
    if cos.device.type == "cpu":
        rotation = torch.complex(cos[..., ::2], sin[..., 1::2])
        full, windowed = (each._replace(rotation_BT1H=rotation) for each in (full, windowed))
    plans = [windowed if slides else full for slides, _ in kinds]
    # Ones and zeros rotate nothing, and leave one compilation for all blocks.
    return [plan if rotates else
            plan._replace(cos_BT1H=torch.ones_like(cos), sin_BT1H=torch.zeros_like(sin),
                          rotation_BT1H=None if rotation is None else torch.ones_like(rotation))
            for plan, (_, rotates) in zip(plans, kinds)]


def document_borders(document_ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each token's document starts, and start and end of the shared prefix that it attends to.

    All are (B, T) indices in the row. Without a prefix, its start is its end.
    """
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    is_start_BT = F.pad(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], (1, 0), value=True)
    is_prefix_BT = document_ids_BT == SHARED_PREFIX
    start_BT, prefix_BT, end_BT = (index_BT.cummax(dim=1).values for index_BT in (
        index_T * is_start_BT, index_T * (is_start_BT & is_prefix_BT), (index_T + 1) * is_prefix_BT))
    return start_BT, prefix_BT, torch.where(is_prefix_BT, prefix_BT, end_BT)


def compute_spans(document_ids_BT: Tensor, multiple: int, window: int = 0) -> Spans:
    """Return the spans of documents; `cu_seqlens` has their int32 offsets in the flattened batch and its end.

    The end is repeated (empty documents) up to a `multiple` of entries, so that few shapes are compiled. With
    shared prefixes, for "blocks" (an extension), two more lines: a document's first key, its prefix's end.
    """
    start_BT, prefix_BT, end_BT = document_borders(document_ids_BT)
    index_BT = torch.arange(document_ids_BT.numel()).view_as(start_BT)
    is_start_BT = start_BT == index_BT - index_BT[:, :1]
    offsets = index_BT[is_start_BT]
    if int(document_ids_BT.min()) == SHARED_PREFIX:
        lines = torch.where(end_BT > prefix_BT, prefix_BT, start_BT), end_BT
        offsets = torch.stack([offsets, *((line_BT + index_BT[:, :1])[is_start_BT] for line_BT in lines)])
    size = -(-(offsets.shape[-1] + 1) // multiple) * multiple
    cu_seqlens = F.pad(offsets, (0, size - offsets.shape[-1]), value=document_ids_BT.numel()).int()
    longest = int(torch.atleast_2d(cu_seqlens)[0].diff().max())
    # A compiler takes a size of 1 for a constant.
    return Spans(cu_seqlens, torch.empty(max(2, longest), 0), window)


def document_mask(start_BT: Tensor, prefix_BT: Tensor, end_BT: Tensor) -> Tensor:
    """Return a (B, 1, T, S) mask from `document_borders`: True where a token attends to another.

    A token attends to itself and to earlier tokens of its own document and of the shared prefix.
    """
    key_S = torch.arange(start_BT.shape[1], device=start_BT.device)
    is_in_prefix_BTS = (key_S >= prefix_BT[..., None]) & (key_S < end_BT[..., None])
    return ((key_S <= key_S[:, None]) & ((key_S >= start_BT[..., None]) | is_in_prefix_BTS))[:, None]


def window_mask(config: ModelConfig, queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
    """Return a (B, 1, T, S) mask, True for keys at most SLIDING_WINDOW - 1 positions before the query."""
    distance_BTS = queries_BT[..., None] - keys_BS[:, None]
    return ((distance_BTS >= 0) & (distance_BTS < config.sliding_window))[:, None]


def precompute_freqs(config: ModelConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of AttentionPlan, float32."""
    index = torch.arange(0, config.head_dim, 2, device=positions_BT.device, dtype=torch.float32)
    freqs, scale = 1.0 / config.rope_theta**(index / config.head_dim), 1.0  # radians per position
    if config.rope_scaling_factor is not None:  # stretch long wavelengths and keep short ones
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        rotations = config.rope_original_max_len * freqs / (2 * math.pi)  # within the original context length
        smooth = ((rotations - low) / (high - low)).clamp(0, 1)  # 0 = stretched, 1 = unchanged
        if config.rope_scaling_type == "linear":  # all. Source: Chen et al. 2023 (arXiv:2306.15595)
            smooth = torch.zeros_like(freqs)
        elif config.rope_scaling_type == "yarn":  # Source: Peng et al. 2023 (arXiv:2309.00071)
            first, last = (math.log(config.rope_original_max_len / (2 * math.pi * rotations))
                           * config.head_dim / (2 * math.log(config.rope_theta)) for rotations in (high, low))
            first, last = max(math.floor(first), 0), min(math.ceil(last), config.head_dim - 1)  # pairs
            smooth = 1 - ((index / 2 - first) / max(last - first, 0.001)).clamp(0, 1)
            scale = 0.1 * math.log(config.rope_scaling_factor) + 1
        freqs = smooth * freqs + (1 - smooth) * freqs / config.rope_scaling_factor
    angles = positions_BT[:, :, None, None].float() * freqs
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


def rotate(x_BTNH: Tensor, plan: AttentionPlan) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of queries or keys by the angle of its position, in float32.

    Source: Su et al. 2021 (arXiv:2104.09864).
    """
    x32 = x_BTNH.float()
    if plan.rotation_BT1H is None or torch.compiler.is_compiling():
        swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.addcmul(x32 * plan.cos_BT1H, swapped, plan.sin_BT1H).to(x_BTNH.dtype)
    # One pass; a compiler fuses the other form.
    pairs = torch.view_as_complex(x32.unflatten(-1, (-1, 2))) * plan.rotation_BT1H
    return torch.view_as_real(pairs).flatten(-2).to(x_BTNH.dtype)


# ---------------------------------------------------------------------------------------------- the kernels


def attend(kernel: str, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_B1TS: Optional[Tensor] = None,
           spans: Optional[Spans] = None) -> Tensor:
    """Compute (B, T, N, H) attention with one of KERNELS.

    It is limited by the mask, or causal in each row or in `spans`. Unmasked, a single query sees all keys.
    """
    if KERNELS[kernel].attend:
        return KERNELS[kernel].attend(q_BTNH, k_BSKH, v_BSKH, None if spans is None else spans.cu_seqlens)
    if kernel == "grouped" and q_BTNH.shape[1] <= GROUPED_QUERIES:
        return attend_grouped(q_BTNH, k_BSKH, v_BSKH, mask_B1TS)
    if k_BSKH.stride(-1) != 1:
        k_BSKH = k_BSKH.contiguous()
    if spans is not None:
        flat = (heads.flatten(0, 1) for heads in (q_BTNH, k_BSKH, v_BSKH))
        return VARLEN[kernel](*flat, spans.cu_seqlens, spans.longest.shape[0], spans.window).view_as(q_BTNH)
    queries, group = q_BTNH.shape[1], q_BTNH.shape[2] // k_BSKH.shape[2]
    if group > 1 and not KERNELS[kernel].grouped:
        k_BSKH, v_BSKH = (heads.repeat_interleave(group, dim=2) for heads in (k_BSKH, v_BSKH))
    is_causal = mask_B1TS is None
    if queries == 1:  # a branch: torch takes no symbolic flag from the compiler
        is_causal = False
    backend = KERNELS[kernel].backend
    if kernel == "sdpa" and mask_B1TS is not None and q_BTNH.is_cuda:
        backend = SAFE_WITH_MASK
    with nullcontext() if backend is None else sdpa_kernel(backend):
        attended_BNTH = F.scaled_dot_product_attention(
            *(heads.transpose(1, 2) for heads in (q_BTNH, k_BSKH, v_BSKH)), attn_mask=mask_B1TS,
            is_causal=is_causal, enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2])
    return attended_BNTH.transpose(1, 2)


def attend_grouped(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_B1TS: Optional[Tensor]) -> Tensor:
    """Return attention of few queries to many keys (None = to all); keys and values are not expanded.

    The query heads of a group are rows of one matmul.
    """
    (rows, _, n_kv_heads, head_dim), queries = k_BSKH.shape, q_BTNH.shape[1]
    q_BKTGH = q_BTNH.unflatten(2, (n_kv_heads, -1)).transpose(1, 2)
    q = q_BKTGH.reshape(rows * n_kv_heads, -1, head_dim)
    k_HS = k_BSKH.permute(0, 2, 3, 1).reshape(len(q), head_dim, -1)
    scores = torch.baddbmm(q.new_empty(()), q, k_HS, beta=0, alpha=head_dim**-0.5)
    if mask_B1TS is not None:
        by_head = scores.view(rows, n_kv_heads, queries, -1, scores.shape[-1])
        by_head.masked_fill_(~mask_B1TS[:, :, :, None], -torch.inf)
    attended = torch.bmm(scores.softmax(-1), v_BSKH.transpose(1, 2).reshape(len(q), -1, head_dim))
    return attended.view_as(q_BKTGH).transpose(1, 2).flatten(2, 3)


def varlen_function(kernel: str):
    """Return a function of flat q, k, v and the values of Spans, with a number for `longest`."""
    if kernel == "flash-2":
        from flash_attn import flash_attn_varlen_func

        deterministic = torch.are_deterministic_algorithms_enabled()
        return lambda q, k, v, cu_seqlens, longest, window: flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, window_size=(window - 1, 0),
            deterministic=deterministic)  # -1 = unlimited
    from torch.nn.attention.varlen import varlen_attn

    # Required for grouped queries since torch 2.12.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return lambda q, k, v, cu_seqlens, longest, window: varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(window - 1, 0), **grouped)


# ----------------------------------------------------------------------------------- the choice of a kernel


# Preferences by purpose and minimum major compute capability. Kernels that are missing or fail their trial
# are skipped. cuDNN is faster than FlashAttention-2 on Hopper (631 against 329 TFLOP/s forward on an H100),
# and slower elsewhere. It plans each new shape of a mask for seconds, and evaluation has many shapes.
ORDERS = {
    "causal": {10: ("flash", "cudnn", "cudnn-expanded", "efficient", "math"),
               9: ("flash-3", "cudnn", "cudnn-expanded", "flash", "efficient", "math"),
               8: ("flash", "efficient", "math"), 0: ("efficient", "math")},
    "documents": {10: ("flash-2", "varlen", "efficient", "math"),
                  9: ("flash-3", "flash-2", "varlen", "efficient", "math"),
                  8: ("flash-2", "varlen", "efficient", "math"), 0: ("efficient", "math")},
    "window": {9: ("flash-3", "flash-2", "varlen", "efficient", "math"),
               8: ("flash-2", "varlen", "efficient", "math"), 0: ("efficient", "math")},
    "mask": {0: ("efficient", "math")},  # shared prefixes on a GPU, and prompts with a cache
}
NAMED = {"cudnn": ("cudnn", "cudnn-expanded"), "math": ("math",), "sdpa": ("sdpa",)}


def kernel_order(purpose: str, capability: Optional[tuple[int, int]], dtype: torch.dtype, head_dim: int,
                 deterministic: bool = False, backend: str = "auto") -> tuple[str, ...]:
    """Return the kernels to try, best first; none if ATTENTION_BACKEND does not support the purpose.

    Args:
        purpose: "causal", "documents" (attention within documents), "window" (the same, limited to
            SLIDING_WINDOW) or "mask" (any other).
        capability: compute capability; None = a CPU.
        backend: ATTENTION_BACKEND; for windows and masks, flash and cudnn mean auto.
    """
    is_half, is_masked = dtype in (torch.bfloat16, torch.float16), purpose in ("window", "mask")
    if capability is None:
        auto = "grouped" if is_masked else "sdpa"
        auto = next((name for name, kernel in KERNELS.items() if kernel.pays(purpose, is_half)), auto)
        order = {"auto": (auto,), "sdpa": ("sdpa",), "math": ("math",)}.get(backend, ())
    elif backend in ("auto", "flash") or (is_masked and backend == "cudnn"):
        order = next(order for lowest, order in ORDERS[purpose].items() if capability[0] >= lowest)
        if backend == "flash" and not is_masked:
            order = tuple(name for name in order if name == "flash" or KERNELS[name].takes_spans)
    else:
        order = NAMED[backend]

    return tuple(name for name in order
                 if head_dim <= KERNELS[name].max_dim and (is_half or not KERNELS[name].half_only)
                 and (KERNELS[name].deterministic or not deterministic))


def activate_flash_3(on: bool) -> None:
    """Switch torch's flash kernels and varlen_attn to FlashAttention-3 or back."""
    if on:
        attention.activate_flash_attention_impl("FA3")
    elif getattr(attention, "current_flash_attention_impl", lambda: None)():
        attention.restore_flash_attention_impl()


@torch.inference_mode(False)  # generation calls this in inference mode, without gradients
def trial(kernel: str, purpose: str, heads: tuple[int, int, int], device: torch.device,
          dtype: torch.dtype) -> Optional[str]:
    """Run a kernel forward and backward on two documents; return why it cannot be used, or None."""
    length, border = 250 if purpose == "mask" else 256, 100  # evaluation has odd lengths
    generator = torch.Generator().manual_seed(0)
    n_heads, n_kv_heads, head_dim = heads
    q, k, v, weights = (torch.randn(1, length, n, head_dim, generator=generator).to(device, dtype)
                        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads))
    mask_TS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if purpose != "causal":
        mask_TS[border:, :border] = False
    window = border // 2 if purpose == "window" else 0
    if window:
        mask_TS.triu_(1 - window)
    mask, spans = None if purpose == "causal" else mask_TS[None, None], None
    if purpose in ("documents", "window") and (multiple := KERNELS[kernel].takes_spans):
        ids_BT = (torch.arange(length)[None] >= border).int() + 1
        mask, spans = None, compute_spans(ids_BT, multiple, window).to(device)

    def output_and_gradients(name: str, dtype: torch.dtype, *masks) -> list[Tensor]:
        inputs = [heads.to(dtype).requires_grad_() for heads in (q, k, v)]
        attended = attend(name, *inputs, *masks)
        return [attended.detach(), *torch.autograd.grad((attended * weights.to(dtype)).sum(), inputs)]

    is_new_flash_3 = kernel == "flash-3" and kernel not in CHOSEN
    # The reference is the math kernel in float32 with a mask.
    try:
        if spans is not None and not KERNELS[kernel].attend:
            VARLEN[kernel] = varlen_function(kernel)
        if is_new_flash_3:
            activate_flash_3(True)
        actual = output_and_gradients(kernel, dtype, mask, spans)
        expected = output_and_gradients("math", torch.float32, mask_TS[None, None])
        off = max(float((each.float() - reference).norm() / reference.norm())
                  for each, reference in zip(actual, expected, strict=True))
        reason = None if off < 3e-2 else f"its result is off by {off:.1g}"
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).split("\n")[0][:200] or type(error).__name__
    if is_new_flash_3 and reason:
        activate_flash_3(False)
    return reason


def choose_kernel(purpose: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the first kernel of `kernel_order` that passes its trial; trials run once per process."""
    return _choose(purpose, config.attention_backend, (config.n_heads, config.n_kv_heads, config.head_dim),
                   device, dtype, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(purpose: str, backend: str, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype,
            deterministic: bool) -> str:
    if device.type == "mps" and backend == "auto":
        backend = "sdpa"  # the other kernels without a capability are a CPU's
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    order = kernel_order(purpose, capability, dtype, heads[2], deterministic, backend)
    if len(order) == 1 and (order[0] in ("sdpa", "grouped") or KERNELS[order[0]].attend):  # always work
        return order[0]
    reasons = []
    for name in order:
        if name == "flash-3" and CHOSEN & REPLACED_BY_FLASH_3:
            reason = "FlashAttention-2 is in use for another kind of attention"
        else:
            reason = trial(name, purpose, heads, device, dtype)
        if reason is None:
            CHOSEN.add(name)
            return name
        reasons.append(f"{name}: {reason}")
    purpose = f"deterministic {purpose}" if deterministic else purpose
    dtype_name = str(dtype).removeprefix("torch.")
    raise SettingsError(f"ATTENTION_BACKEND={backend} has no kernel that runs here ({purpose} attention in "
                        f"{dtype_name} with head dimension {heads[2]} on {device.type})"
                        f"{': ' * bool(reasons)}{'; '.join(reasons)}; set ATTENTION_BACKEND=auto")
