"""Matmuls in the compute dtype, with weights in float32 or quantized by bitsandbytes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import SettingsError
from common.text import pip_install

NF4_BLOCK = 64  # numbers per scale

PACKED_FOR_ROWS = 8  # the number of rows of x that a packed matrix suits best; others are as fast

# A CPU without bf16 instructions is ten times faster in float32.
CPU_MULTIPLIES_BF16 = any(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)()
                          for feature in ("avx512_bf16", "amx_tile"))


def upcast_for_matmul(x: Tensor) -> Tensor:
    """Convert a bf16 tensor to float32 on a CPU that multiplies bf16 slowly."""
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_MULTIPLIES_BF16
    return x.float() if is_slow else x


def pack(weight: Tensor) -> Tensor:
    """Return a matrix in oneDNN's layout, for `linear` on a CPU; unchanged where that is not possible.

    A few rows of x are multiplied up to 2.5 times as fast.
    """
    is_fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16)
    if weight.device.type != "cpu" or not is_fast or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of x, to which the weight is rounded first."""
    if weight.layout == torch._mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    if x.dtype == weight.dtype == torch.float32:  # even no-op conversions take time
        return F.linear(x, weight)
    return F.linear(upcast_for_matmul(x), upcast_for_matmul(weight.to(x.dtype))).to(x.dtype)


def add_product(output: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return output + scale * x @ weight.T; one pass over the output where the matmul can add to it."""
    # Transposed in memory: CPUs are several times slower with rows as short as LoRA's rank.
    weight = weight.to(x.dtype).t().contiguous()
    if upcast_for_matmul(x) is not x:
        return output + linear(x * scale, weight.t())
    return torch.addmm(output.flatten(0, -2), x.flatten(0, -2), weight, alpha=scale).view_as(output)


def quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the matrix in int8 (one scale per row) or nf4 (4 bits, one scale per block), and its scales."""
    setting, operators = f"LORA_BASE_QUANTIZATION={kind}", torch.ops.bitsandbytes
    try:
        import bitsandbytes  # noqa: F401  # registers the operators
    except ImportError as error:
        raise SettingsError(f"{setting} needs bitsandbytes: {pip_install('bitsandbytes')}; or set it to "
                            f"none ({error})") from error
    try:
        if kind == "int8":
            packed, scales, _ = operators.int8_vectorwise_quant(weight.half())
        else:
            packed, scales = operators.quantize_4bit(weight.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
        dequantize(packed, scales, weight.shape, weight.dtype)  # so that a missing kernel fails here
    except (RuntimeError, ValueError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).splitlines()[0]
        raise SettingsError(f"{setting}: bitsandbytes has no working kernel for {weight.device.type} here; "
                            f"set it to none ({reason:.200})") from error
    return packed, scales


def dequantize(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the dequantized matrix."""
    if packed.dtype == torch.int8:
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(packed, scales).to(dtype)
    return torch.ops.bitsandbytes.dequantize_4bit(packed, scales, NF4_BLOCK, "nf4", shape, dtype)


class QuantizedLinear(torch.autograd.Function):
    """x @ weight.T with a quantized weight, which the backward dequantizes again instead of keeping it.

    Source: Dettmers et al. 2022 (arXiv:2208.07339) for int8; Dettmers et al. 2023 (arXiv:2305.14314) for nf4.
    """

    @staticmethod
    def forward(ctx, x, packed, scales, shape):
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        weight = dequantize(packed, scales, shape, x.dtype)
        product = F.linear(upcast_for_matmul(x), upcast_for_matmul(weight))
        # A no-op conversion at the end of a forward makes torch 2.11 compile zero gradients.
        return product if product.dtype == x.dtype else product.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        weight = dequantize(*ctx.saved_tensors, ctx.shape, gradient.dtype)
        return (upcast_for_matmul(gradient) @ upcast_for_matmul(weight)).to(gradient.dtype), None, None, None
