"""Matmuls in the compute dtype, with weights in float32 or quantized by bitsandbytes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import SettingsError
from common.text import pip_install

NF4_BLOCK = 64  # numbers per scale

# A CPU without bf16 instructions is ten times faster in float32.
CPU_MULTIPLIES_BF16 = any(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)()
                          for feature in ("avx512_bf16", "amx_tile"))


def upcast_for_matmul(x: Tensor) -> Tensor:
    """Convert a bf16 tensor to float32 on a CPU that multiplies bf16 slowly."""
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_MULTIPLIES_BF16
    return x.float() if is_slow else x


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix rounded to a dtype, in the dtype in which it is multiplied."""
    return upcast_for_matmul(weight.to(dtype))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of x, to which the weight is rounded first."""
    if weight.layout == torch._mkldnn:  # packed, for generation
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    if x.dtype == weight.dtype == torch.float32:  # even no-op conversions take time
        return F.linear(x, weight)
    return F.linear(upcast_for_matmul(x), rounded(weight, x.dtype)).to(x.dtype)


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
    if packed.dtype == torch.int8:
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(packed, scales).to(dtype)
    return torch.ops.bitsandbytes.dequantize_4bit(packed, scales, NF4_BLOCK, "nf4", shape, dtype)


@torch.library.custom_op("paddock::dequantize_after", mutates_args=())
def dequantize_after(gradient: Tensor, packed: Tensor, scales: Tensor, shape: list[int]) -> Tensor:
    """Dequantize in a backward. As it needs the gradient, it is not taken for the forward's and kept."""
    return dequantize(packed, scales, tuple(shape), gradient.dtype)


@dequantize_after.register_fake
def _(gradient, packed, scales, shape):
    return gradient.new_empty(shape)


class FrozenProduct(torch.autograd.Function):
    """x @ weight.T of a frozen weight; with an adapter, plus (scale * adapter_x) @ lora_A.T @ lora_B.T.

    The backward dequantizes a quantized weight (one with `scales`) again instead of keeping it. The adapter
    adds to what the base returns, and its products with the rank are transposed: CPUs are several times
    slower with such short rows. `adapter_x` is x after dropout; None = x.
    Source: Dettmers et al. 2022 (arXiv:2208.07339) for int8; Dettmers et al. 2023 (arXiv:2305.14314) for nf4.
    """

    @staticmethod
    def forward(ctx, x, weight, scales, shape, adapter_x=None, *adapter):
        x_MD = upcast_for_matmul(x).flatten(0, -2)
        matrix = weight if scales is None else dequantize(weight, scales, shape, x.dtype)
        product = x_MD @ rounded(matrix, x.dtype).t()
        low_RM = None
        if adapter:
            lora_A, lora_B, scale = adapter
            adapter_MD = x_MD if adapter_x is None else upcast_for_matmul(adapter_x).flatten(0, -2)
            low_RM = rounded(lora_A, x.dtype) @ adapter_MD.t()
            product.addmm_(low_RM.t(), (rounded(lora_B, x.dtype) * scale).t().contiguous())
        ctx.save_for_backward(x if adapter_x is None else adapter_x, weight, scales, low_RM, *adapter[:2])
        ctx.shape, ctx.scale, ctx.has_dropout = shape, adapter[2:], adapter_x is not None
        product = product.view(*x.shape[:-1], -1)
        # A no-op conversion at the end of a forward makes torch 2.11 compile zero gradients.
        return product if product.dtype == x.dtype else product.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scales, low_RM, *adapter = ctx.saved_tensors
        grad_MF, x_grad, adapter_grads = upcast_for_matmul(gradient).flatten(0, -2), None, []
        if ctx.needs_input_grad[0]:
            matrix = (rounded(weight, gradient.dtype) if scales is None else
                      upcast_for_matmul(dequantize_after(gradient, weight, scales, ctx.shape)))
            x_grad = grad_MF @ matrix
        if adapter:
            (lora_A, lora_B), (scale,), dropped_grad = adapter, ctx.scale, None
            A_RD = rounded(lora_A, gradient.dtype)
            low_grad_RM = (rounded(lora_B, gradient.dtype) * scale).t().contiguous() @ grad_MF.t()
            if ctx.has_dropout:
                dropped_grad = (low_grad_RM.t() @ A_RD).view_as(x).to(x.dtype)
            elif x_grad is not None:
                x_grad.addmm_(low_grad_RM.t(), A_RD)
            A_grad = (low_grad_RM @ upcast_for_matmul(x).flatten(0, -2)).to(lora_A.dtype)
            adapter_grads = [dropped_grad, A_grad, (low_RM @ grad_MF).t().to(lora_B.dtype) * scale, None]
        x_grad = None if x_grad is None else x_grad.view_as(x).to(x.dtype)
        return x_grad, None, None, None, *(adapter_grads or [None] * (len(ctx.needs_input_grad) - 4))
