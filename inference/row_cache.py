"""The keys and values of many texts that grow independently, in one block of memory.

Shape suffixes as in model.py: B rows, T new tokens, S tokens of a row, K key/value heads, H head.
"""

from collections.abc import Sequence
from copy import copy
from typing import Optional

import torch
from torch import Tensor

from config import ModelConfig
from model import KVCache, precompute_freqs

# Attention reads a multiple of so many tokens: a GPU's memory and kernels serve few lengths best.
GRAIN = {"cuda": 128}


class RowCache(KVCache):
    """Keys and values of the tokens so far of many rows, for generation; each row has a length of its own.

    Args:
        length: the most tokens of a row, prompt included.
    """

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype):
        # The last column takes the padding that is beyond a row's end; no token attends to it.
        shape = (config.n_layers, rows, length + 1, config.n_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.index_S = torch.arange(length + 1, device=device)
        self.cos_1S1H, self.sin_1S1H = precompute_freqs(config, self.index_S[None])
        self.rows, self.used = range(rows), [0] * rows
        self.rows_B = self.used_B = None  # the same on the device, where slices do not suffice

    def at(self, rows: Sequence[int], used: Sequence[int]) -> "RowCache":
        """Return the cache of some rows, in the same memory, which hold so many tokens each."""
        part = copy(self)
        part.rows, part.used, part.rows_B, part.used_B = rows, used, None, None
        return part

    def begin(self, tokens: int) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """As KVCache; the first tokens of all rows need no mask."""
        device, length, longest = self.index_S.device, len(self.index_S), max(self.used)
        block = slice(self.rows[0], self.rows[0] + len(self.rows))
        adjacent = [*self.rows] == [*range(block.start, block.stop)]
        new = slice(longest, longest + tokens)
        if adjacent and min(self.used) == longest and new.stop <= length:
            self.to_write, self.to_read = (block, new), block  # by slices nothing is copied
            cos, sin, places_BT = self.cos_1S1H[:, new], self.sin_1S1H[:, new], self.index_S[None, new]
        else:
            if self.used_B is None:
                self.used_B, self.rows_B = torch.tensor([self.used, [*self.rows]], device=device)
            places_BT = (self.used_B[:, None] + self.index_S[:tokens]).clamp(max=length - 1)
            self.used_B = self.used_B + tokens
            self.to_write = (self.rows_B[:, None], places_BT)
            self.to_read = block if adjacent else self.rows_B
            cos, sin = self.cos_1S1H[0, places_BT], self.sin_1S1H[0, places_BT]
        grain = GRAIN.get(device.type, 1) if longest else 1
        self.end = min(-(-new.stop // grain) * grain, length)
        self.used = [used + tokens for used in self.used]
        return cos, sin, (self.index_S[:self.end] <= places_BT[..., None])[:, None] if longest else None

    def store(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        """As KVCache."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.to_write], values[self.to_write] = k_BTKH, v_BTKH
        return keys[self.to_read, :self.end], values[self.to_read, :self.end]
