"""Which kernel computes attention: the order in which they are tried, and what is found on this machine."""

import inspect
from contextlib import nullcontext
from typing import Optional

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import ModelConfig
from errors import SettingsError


def find_varlen_attention():
    """Attention over documents of unequal length, on CUDA: flash-attn's where it is installed, else torch's own."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.10 and 2.11 say is_causal; later ones window_size, and want to be told of grouped queries.
        accepted = inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)}
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        return lambda q, k, v, borders, longest: varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    return lambda q, k, v, borders, longest: flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True)


# Found once, outside of what is compiled.
VARLEN_ATTENTION = find_varlen_attention() if torch.cuda.is_available() else None

SDPA_ORDER = {
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "math": [SDPBackend.MATH],
}


def attention_kernels(backend: str):
    """A context in which scaled_dot_product_attention takes the kernels of ATTENTION_BACKEND, in that order."""
    return sdpa_kernel(SDPA_ORDER[backend], set_priority=True) if backend in SDPA_ORDER else nullcontext()


def attention_taken(config: ModelConfig, device: torch.device, dtype: torch.dtype, documents: bool) -> str:
    """The kernel that training will use, found by trying it once.

    Raises:
        SettingsError: ATTENTION_BACKEND names a kernel that cannot run here.
    """
    backend = config.attention_backend
    if documents and device.type == "cuda" and backend in ("auto", "flash") and VARLEN_ATTENTION is not None:
        return "flash (varlen)"
    query = torch.zeros(1, config.n_heads, 128, config.head_dim, device=device, dtype=dtype, requires_grad=True)
    key = torch.zeros(1, config.n_kv_heads, 128, config.head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device).tril() if documents else None

    def runs(order: Optional[list[SDPBackend]]) -> bool:
        try:
            with sdpa_kernel(order) if order else nullcontext():
                F.scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=mask is None,
                                               enable_gqa=True).sum().backward()
        except RuntimeError:
            return False
        return True

    if device.type == "cpu" and backend == "auto":
        return "sdpa"
    if backend != "auto":
        if not runs(SDPA_ORDER.get(backend)) or (device.type == "cpu" and backend in ("flash", "cudnn")):
            raise SettingsError(f"ATTENTION_BACKEND={backend} cannot run here (device {device.type}, {dtype}, head dimension "
                                f"{config.head_dim}, document mask {documents}); use auto")
        return backend
    return next(kernel.name.lower().removesuffix("_attention") for kernel in SDPA_ORDER["auto"] if runs([kernel]))
