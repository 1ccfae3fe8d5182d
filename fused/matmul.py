"""Matmuls in the compute dtype, also on CPUs that multiply bf16 slowly."""

import torch
from torch import Tensor
from torch.nn import functional as F

# A CPU without bf16 arithmetic is ten times faster in float32.
CPU_MULTIPLIES_BF16 = any(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)()
                          for feature in ("avx512_bf16", "amx_tile"))


def upcast_for_matmul(x: Tensor) -> Tensor:
    """Return the tensor, in float32 if it is bf16 on a CPU that multiplies bf16 slowly."""
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_MULTIPLIES_BF16
    return x.float() if is_slow else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of x, to which the weight is rounded first."""
    return F.linear(upcast_for_matmul(x), upcast_for_matmul(weight.to(x.dtype))).to(x.dtype)
