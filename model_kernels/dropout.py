"""Dropout whose masks are hashes of numbers that every rank knows, so that no generator state matters."""

import numpy as np
import torch
from torch import Tensor, nn

# Source: Wellons 2018, github.com/skeeto/hash-prospector.
FACTORS = (0x21F0AAAD, 0x735A2D97)


class Dropout(nn.Module):
    """In training, set a share of the numbers to 0, and scale the others such that the mean stays.

    The mask depends on SEED, step, row of the step, module and place in the row only: not on ranks,
    MICRO_BATCH_SIZE, compilation or recomputation.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting".
    """

    keys_B: Tensor  # int32, of the rows of the next forward; set by `choose_masks`

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not (self.rate and self.training):
            return x_BTD
        tokens_T, width_D = (torch.arange(size, dtype=torch.int32, device=x_BTD.device)
                             for size in x_BTD.shape[1:])
        bits_BTD = mixed(self.keys_B[:, None] + tokens_T)[..., None] + mixed(width_D)
        bits_BTD.bitwise_xor_(bits_BTD >> 16).mul_(FACTORS[0])  # the highest bits depend on all bits
        is_dropped_BTD = bits_BTD < int(self.rate * 2**32) - 2**31
        return x_BTD.masked_fill(is_dropped_BTD, 0).mul_(1 / (1 - self.rate))


def mixed(x: Tensor) -> Tensor:
    """Return an int32 hash of int32 numbers."""
    x = (x ^ (x >> 16)) * FACTORS[0]
    x = (x ^ (x >> 15)) * FACTORS[1]
    return x ^ (x >> 15)


def choose_masks(model: nn.Module, seed: int, step: int, first_row: int, rows: int) -> None:
    """Choose the masks of a model's next forward, whose first row has the number `first_row` in the step."""
    modules = [each for each in model.modules() if isinstance(each, Dropout) and each.rate]
    if modules:
        keys_BN = np.stack([np.random.SeedSequence((seed, step, row)).generate_state(len(modules))
                            for row in range(first_row, first_row + rows)]).view(np.int32)
        device = next(model.parameters()).device
        for module, keys_B in zip(modules, torch.from_numpy(keys_BN).to(device).unbind(dim=1)):
            module.keys_B = keys_B
