"""Which kernel computes attention: what each can do, the order in which they are tried by architecture, and the calls.

Shapes: B rows, T queries, S keys, N query heads, K key/value heads, H head. Forward and backward rates on an H100 differ by
a factor of two between kernels; which of them runs depends on the device, the dtype, the head and the kind of mask.
"""

import inspect
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import SettingsError
from config import ModelConfig


class Kernel(NamedTuple):
    """What one way of computing attention can do."""

    backend: Optional[SDPBackend] = None  # of scaled_dot_product_attention; None = torch's own choice
    widest: int = 1 << 20  # head that it takes
    half_only: bool = True  # bf16 and fp16
    grouped: bool = True  # takes fewer key/value heads than query heads; else they are repeated
    deterministic: bool = True  # its backward, where torch.use_deterministic_algorithms asks for it


KERNELS = {
    "flash-3": Kernel(SDPBackend.FLASH_ATTENTION, widest=256),  # the package flash_attn_interface, activated in torch
    "flash-2": Kernel(widest=256),  # the package flash_attn
    "varlen": Kernel(widest=256),  # torch.nn.attention.varlen
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, widest=128, deterministic=False),
    "cudnn-expanded": Kernel(SDPBackend.CUDNN_ATTENTION, widest=128, deterministic=False, grouped=False),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, widest=256),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, half_only=False, grouped=False),
    "math": Kernel(SDPBackend.MATH, half_only=False),
    "sdpa": Kernel(half_only=False),
}
VARLEN = ("flash-3", "flash-2", "varlen")  # take documents as their borders, and need no mask

# By purpose, for devices from a major compute capability on. What is not installed, or fails when it is tried, is passed over.
# cuDNN is faster than FlashAttention-2 on Hopper (631 against 329 TFLOP/s forward on an H100) and slower elsewhere; it plans anew
# for each shape of a mask, which takes seconds, and evaluation has many shapes.
ORDERS = {
    "causal": {10: ("flash", "cudnn", "cudnn-expanded", "efficient", "math"),
               9: ("flash-3", "cudnn", "cudnn-expanded", "flash", "efficient", "math"),
               8: ("flash", "efficient", "math"), 0: ("efficient", "math")},
    "documents": {10: ("flash-2", "varlen", "efficient", "math"), 9: ("flash-3", "flash-2", "varlen", "efficient", "math"),
                  8: ("flash-2", "varlen", "efficient", "math"), 0: ("efficient", "math")},
    "mask": {0: ("efficient", "math")},  # HellaSwag's shared prefixes, and prompts with a cache
}
NAMED = {"cudnn": ("cudnn", "cudnn-expanded"), "math": ("math",), "sdpa": ("sdpa",)}


def kernel_order(purpose: str, capability: Optional[tuple[int, int]], dtype: torch.dtype, head_dim: int,
                 deterministic: bool = False, backend: str = "auto") -> tuple[str, ...]:
    """The kernels to try, best first; empty where ATTENTION_BACKEND names what cannot do it.

    Args:
        purpose: "causal"; "documents", which see themselves only; or "mask", any other.
        capability: of the CUDA device; None = a CPU.
        backend: ATTENTION_BACKEND. For masks other than the training's, flash and cudnn mean auto.
    """
    if capability is None:
        order = {"auto": ("sdpa",), "sdpa": ("sdpa",), "math": ("math",)}.get(backend, ())
    elif backend in ("auto", "flash") or (purpose == "mask" and backend == "cudnn"):
        order = next(order for lowest, order in ORDERS[purpose].items() if capability[0] >= lowest)
        if backend == "flash" and purpose != "mask":
            order = tuple(name for name in order if name == "flash" or name in VARLEN)
    else:
        order = NAMED[backend]
    is_half = dtype in (torch.bfloat16, torch.float16)
    return tuple(name for name in order if head_dim <= KERNELS[name].widest and (is_half or not KERNELS[name].half_only)
                 and (KERNELS[name].deterministic or not deterministic))


def attend(kernel: str, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_B1TS: Optional[Tensor] = None,
           cu_seqlens: Optional[Tensor] = None) -> Tensor:
    """(B, T, N, H) attention by one of KERNELS; causal, unless a mask (True = may attend) or `cu_seqlens` says more.

    Args:
        cu_seqlens: int32 borders of the documents in the flattened batch, for one of VARLEN.
    """
    if cu_seqlens is not None:
        flat = (heads.flatten(0, 1) for heads in (q_BTNH, k_BSKH, v_BSKH))
        return varlen_function(kernel)(*flat, cu_seqlens, q_BTNH.shape[1]).view_as(q_BTNH)
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    if group > 1 and not KERNELS[kernel].grouped:
        k_BSKH, v_BSKH = (heads.repeat_interleave(group, dim=2) for heads in (k_BSKH, v_BSKH))
    backend = KERNELS[kernel].backend
    with nullcontext() if backend is None else sdpa_kernel(backend):
        attended_BNTH = F.scaled_dot_product_attention(
            *(heads.transpose(1, 2) for heads in (q_BTNH, k_BSKH, v_BSKH)), attn_mask=mask_B1TS, is_causal=mask_B1TS is None,
            enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2])
    return attended_BNTH.transpose(1, 2)


def compute_cu_seqlens(document_ids_BT: Tensor) -> Tensor:
    """Return the int32 offset of each document in the flattened batch, and the end, as varlen kernels take them.

    The end is repeated (empty documents) up to a multiple of 64 entries, so that compiled kernels see few shapes.
    """
    is_start_BT = F.pad(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], (1, 0), value=True)
    starts = is_start_BT.flatten().nonzero().flatten()
    size = -(-(len(starts) + 1) // 64) * 64
    return F.pad(starts, (0, size - len(starts)), value=document_ids_BT.numel()).to(torch.int32)


@cache
def varlen_function(kernel: str):
    """Attention over documents of unequal length: a function of flat q, k, v, their borders and the longest possible length.

    Raises:
        ImportError: it is not installed.
    """
    if kernel == "flash-2":
        from flash_attn import flash_attn_varlen_func

        deterministic = torch.are_deterministic_algorithms_enabled()
        return lambda q, k, v, borders, longest: flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True,
                                                                        deterministic=deterministic)
    from torch.nn.attention.varlen import varlen_attn

    # Since torch 2.12 it wants to be told of grouped queries.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return lambda q, k, v, borders, longest: varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0),
                                                         **grouped)


def activate_flash_3(on: bool) -> None:
    """Have torch's flash kernels and varlen_attn run FlashAttention-3, or again their own.

    Raises:
        ImportError, AttributeError, RuntimeError, ValueError: it is not installed, or this torch does not know it.
    """
    if on:
        attention.activate_flash_attention_impl("FA3")
    elif hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()


def trial(kernel: str, purpose: str, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Optional[str]:
    """Run a kernel once, forward and backward, on two documents; returns why it cannot be used, or None.

    Args:
        heads: query heads, key/value heads, width.
    """
    length, border = 250 if purpose == "mask" else 256, 100  # texts that are evaluated have any length
    generator = torch.Generator().manual_seed(0)
    n_heads, n_kv_heads, head_dim = heads
    q, k, v, weights = (torch.randn(1, length, n, head_dim, generator=generator).to(device, dtype)
                        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads))
    seen_TS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if purpose != "causal":
        seen_TS[border:, :border] = False
    mask = None if purpose == "causal" else seen_TS[None, None]
    cu_seqlens = None
    if purpose == "documents" and kernel in VARLEN:
        cu_seqlens = torch.tensor([0, border, *[length] * 62], dtype=torch.int32, device=device)  # padded with empty ones

    def values(name: str, dtype: torch.dtype, *how) -> list[Tensor]:
        inputs = [heads.to(dtype).requires_grad_() for heads in (q, k, v)]
        attended = attend(name, *inputs, *how)
        return [attended.detach(), *torch.autograd.grad((attended * weights.to(dtype)).sum(), inputs)]

    try:
        if kernel == "flash-3":
            activate_flash_3(True)
        with torch.enable_grad():
            found = values(kernel, dtype, mask if cu_seqlens is None else None, cu_seqlens)
            wanted = values("math", torch.float32, seen_TS[None, None])
        apart = max(float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))
        reason = None if apart < 3e-2 else f"its result is off by {apart:.1g}"
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).split("\n")[0][:200] or type(error).__name__
    if kernel == "flash-3" and reason:
        activate_flash_3(False)
    return reason


def choose_kernel(purpose: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The first kernel of the order for this device that runs, and gives what the math kernel gives; tried once.

    Raises:
        SettingsError: ATTENTION_BACKEND names a kernel that cannot run here.
    """
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    return _choose(purpose, config.attention_backend, heads, device, dtype, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(purpose: str, backend: str, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype,
            deterministic: bool) -> str:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    order = kernel_order(purpose, capability, dtype, heads[2], deterministic, backend)
    if order == ("sdpa",):  # takes whatever there is
        return "sdpa"
    reasons = []
    for name in order:
        reason = trial(name, purpose, heads, device, dtype)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    kind = f"{'deterministic ' if deterministic else ''}{purpose} attention in {str(dtype).removeprefix('torch.')}"
    why = "; ".join(reasons) or "there is no such kernel"
    raise SettingsError(f"ATTENTION_BACKEND={backend} cannot run here ({kind}, heads of {heads[2]}, {device.type}): {why}; "
                        "use auto")
