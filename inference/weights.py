"""Weights laid out for generation: in the compute dtype, packed for the matmuls of a CPU, or in int8."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fused.matmul import linear, pack
from model import Linear, Transformer
from parallel.fsdp import is_sharded

INT8_ROWS = 16  # above this many rows of x, torch's int8 kernel is slower than the matmul in x's dtype


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, rounded to nearest, and one scale per output."""

    def __init__(self, weight: Tensor):
        super().__init__()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
        rounded = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) > INT8_ROWS:
            return linear(x, self.weight) * self.scales
        return torch._weight_int8pack_mm(rows, self.weight, self.scales).unflatten(0, x.shape[:-1])


@torch.no_grad()
def pack_weights(model: Transformer, int8: bool = False) -> None:
    """Lay out a frozen model's matrices for `fused.matmul.linear`; with `int8`, quantize the blocks'."""
    for name, layer in [*model.named_modules()]:
        if type(layer) is Linear and int8:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(layer.weight))
        elif type(layer) is Linear:
            layer.weight = nn.Parameter(pack(layer.weight.to(model.compute_dtype)), requires_grad=False)
    head = model.head_matrix
    head.packed = pack(head.as_head().values_VD.detach().to(model.compute_dtype))


@contextmanager
def packed_weights(model: Transformer) -> Iterator[None]:
    """Round and lay out the matrices of a model in training, once for all tokens; restore them at the end."""
    # In float32, packing pays for large matrices only. Sharded ones are gathered in the compute dtype.
    if model.compute_dtype == torch.float32 or is_sharded(model):
        return (yield)
    before = [(layer, layer.weight) for layer in model.modules() if type(layer) is Linear]
    try:
        pack_weights(model)
        yield
    finally:
        for layer, weight in before:
            layer.weight = weight
        model.head_matrix.packed = None
