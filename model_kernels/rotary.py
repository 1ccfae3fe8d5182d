"""The rotary position embedding, and its scalings for longer contexts. Shape suffixes as in model.py."""

import math

import torch
from torch import Tensor

from config import ModelConfig


def precompute_freqs(config: ModelConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of AttentionMeta, float32."""
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


def apply_rotary_emb(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) by its angle, in float32. Source: Su et al. 2021 (arXiv:2104.09864)."""
    x32 = x_BTNH.float()
    swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x32 * cos_BT1H, swapped, sin_BT1H).to(x_BTNH.dtype)
