"""Measurements of a run: FLOPs, memory, and loss spikes."""

import math
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Optional

import torch

# Dense bf16 TFLOP/s with float32 accumulation, from the vendors' data sheets. B300, GB300, H20 and RTX PRO
# 6000 come from secondary sources (figures with sparsity are halved), its Max-Q edition is computed.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "H800": 989, "H20": 148,
               "B200": 2250, "GB200": 2250, "B300": 2250, "GB300": 2500, "A100": 312, "A800": 312,
               "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
               "RTX 5090": 210, "RTX PRO 6000 Blackwell Max-Q": 439, "RTX PRO 6000": 504, "V100": 125}


def peak_flops(device: torch.device, override_tflops: Optional[float] = None) -> Optional[float]:
    """Return the device's dense bf16 FLOP/s, or None if unknown."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items()
                 if re.search(rf"\b{known}\b", name)), None)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or how many threads of the CPU are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def median_and_deviation(recent: Sequence[float], window: int = 0) -> tuple[float, float]:
    """Return the median, and a standard deviation that outliers do not affect; 0 and infinity until half of
    the window is full.

    It is at least 1 % of the median, so that a flat curve raises no alarm at its first ripple.
    Source: Rousseeuw and Croux 1993: 1.4826 times the median absolute deviation.
    """
    if 2 * len(recent) < window:
        return 0.0, math.inf
    middle = statistics.median(recent)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return middle, max(deviation, 0.01 * abs(middle), 1e-12)
