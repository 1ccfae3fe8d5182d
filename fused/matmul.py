"""How numbers of the compute dtype are multiplied on this machine."""

import torch
from torch import Tensor
from torch.nn import functional as F

# A CPU without bf16 arithmetic is ten times faster in float32.
CPU_MULTIPLIES_BF16 = any(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)()
                          for feature in ("avx512_bf16", "amx_tile"))


def upcast_for_matmul(x: Tensor) -> Tensor:
    """The same numbers, widened to float32 where the hardware could multiply them only slowly."""
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_MULTIPLIES_BF16 else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of numbers rounded to the dtype of x, in that dtype."""
    return F.linear(upcast_for_matmul(x), upcast_for_matmul(weight.to(x.dtype))).to(x.dtype)
