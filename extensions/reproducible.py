"""Sums for REPRODUCIBLE, whose bits do not depend on how many ranks add them, or in which order.

The gradient of a micro-batch is rounded to integers, which are multiples of a power of two. Integers can be
added in any order, on any rank. A step's sum is divided by its units and rounded to float32 once. Floating-
point numbers (losses, norms) are laid out in a tensor whose shape does not depend on the ranks, and added
there.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint.schema import Progress
from common.activity import waiting
from common.errors import SettingsError
from config import Config
from dataloaders import first_micro_batch
from learn.optim import REDUCERS, Optimizer, Reducer
from parallel.fsdp import SHARD, is_divided, is_sharded, local_rows, local_span
from parallel.ranks import Ranks, collective

INTEGER_BITS = 62  # of a sum over all micro-batches
HEADROOM_BITS = 10  # by which gradients may grow or shrink before a step is repeated with another scale
LOWEST_EXPONENT = -60  # smaller gradients are rounded to multiples of 2^-110 or less, which float32 can scale
ALIGNMENT = 16  # numbers in the widest vector of a kernel
SMALL = 2**22  # gradients; so few are added after the backward, where a CPU does it three times as fast
# Its name before torch 2.13, and since then.
REDUCE_SCATTER = "reduce_scatter_" + ("single" if hasattr(dist, "reduce_scatter_single") else "tensor")
CHUNK = {"cuda": 2**26, "cpu": 2**17}  # numbers converted at a time: a core's cache


def row_sums(values_RC: Tensor) -> Tensor:
    """Return the (R,) sums of rows, which it overwrites.

    It adds halves of all rows elementwise: a kernel for sums may choose another order for another R.
    """
    while (columns := values_RC.shape[1]) > 1:
        half = -(-columns // 2)
        values_RC[:, :columns - half].add_(values_RC[:, half:])
        values_RC = values_RC[:, :half]
    return values_RC[:, 0]


def check_alignment(model: nn.Module, ranks: int) -> None:
    """Raise SettingsError if a rank's rows of a trained matrix would start within a vector of AdamW's kernel.

    On a CPU, the fused kernel computes the last numbers of a tensor, which fill no vector, in another way.
    """
    for name, matrix in model.named_parameters():
        if not matrix.requires_grad or matrix.ndim == 1:
            continue
        rows, width = matrix.shape[0], matrix.shape[1:].numel()
        if -(-rows // ranks) * width % ALIGNMENT:
            raise SettingsError(f"REPRODUCIBLE=true cannot divide {name}, which has {rows} rows of {width} "
                                f"numbers, over {ranks} ranks: the rows of a rank must have a multiple of "
                                f"{ALIGNMENT} numbers; set another SHARD_DEGREE, or SHARDING=none")


class ShardedSum:
    """Sums the gradients of one module of FSDP over micro-batches and ranks, as its custom reduce-scatter.

    FSDP's own results are views of `gradients`; they are overwritten when the sum is complete.
    """

    gradients: Tensor
    dtype: torch.dtype  # of a micro-batch's gradients
    integers: Optional[Tensor] = None  # this rank's slice
    scale: float
    range: Tensor  # smallest and largest value of the micro-batch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op,
                 async_op: bool = False) -> None:
        input_tensor = input_tensor.to(self.dtype)
        self.gradients, self.range = output_tensor, torch.stack(torch.aminmax(input_tensor)).float()
        integers = torch.empty(output_tensor.shape, dtype=torch.int64, device=output_tensor.device)
        getattr(dist, REDUCE_SCATTER)(integers, input_tensor.mul_(self.scale).long(), group=group)
        self.integers = integers if self.integers is None else self.integers.add_(integers)


class ReproducibleReducer(Reducer):
    """Sums a step's gradients over micro-batches and ranks as integers.

    One scale serves all tensors, because all-reduces and FSDP's buffers hold several of them. The integers
    leave 2^-42 of the largest gradient times the number of micro-batches; an element that rounds to zero is
    far below ADAM_EPS. If the largest gradient does not fit, the step is repeated with another scale, so that
    the scale is a function of settings and data.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, config: Config,
                 optimizer: Optional[Optimizer] = None):
        self.model, self.ranks = model, ranks
        micro_batches = config.reproducible_micro_batches
        if is_sharded(model):
            check_alignment(model, config.ranks_per_copy)
        self.bits = INTEGER_BITS - (micro_batches - 1).bit_length()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.full = [parameter for parameter in self.trained if not is_divided(parameter)]
        for parameter in self.full:
            if parameter.dtype == torch.bfloat16:  # sum look-up and head in float32, as with FSDP
                parameter.grad_dtype = None
        self.sharded = {module: ShardedSum() for module in model.modules() if is_sharded(module)}
        for module, each in self.sharded.items():
            module.set_custom_reduce_scatter(each)
            # FSDP has float32 gradients; those of a whole bf16 matrix are bf16.
            each.dtype = torch.bfloat16 if config.weight_dtype == "bf16" else torch.float32
        # One tensor, for one all-reduce: gradients, whether each is not finite, each micro-batch's largest.
        sizes = [parameter.numel() for parameter in self.full]
        sizes += [len(self.full) + len(self.sharded), micro_batches]
        self.integers = torch.zeros(sum(sizes), dtype=torch.int64, device=ranks.device)
        *self.sums, self.not_finite, self.largest = self.integers.split(sizes)

    def begin(self, units: Tensor, progress: Progress) -> None:
        """Begin a step whose gradients should be at most 2^gradient_exponent."""
        self.exponent = progress.gradient_exponent
        self.scale = 2.0**(self.bits - self.exponent)
        self.integers.zero_()
        for each in self.sharded.values():
            each.integers, each.scale = None, self.scale
        self.done = first_micro_batch(len(self.largest), self.ranks.rank, self.ranks.world_size)

    @contextmanager
    def add(self, step: int, is_last: bool) -> Iterator[None]:
        """A `with` block around a micro-batch's forward and backward, which adds its gradients."""
        chunk, nothing = CHUNK[self.ranks.device.type], torch.zeros(2, device=self.ranks.device)
        ranges = [nothing] * len(self.not_finite)

        def add(index: int, parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad.flatten().to(parameter.dtype), None
            ranges[index] = torch.stack(torch.aminmax(gradient))
            for sums, values in zip(self.sums[index].split(chunk), gradient.mul_(self.scale).split(chunk)):
                sums.add_(values.long())

        for parameter in self.trained:
            parameter.grad = None
        for each in self.sharded.values():
            each.range = nothing
        with ExitStack() as stack:
            if len(self.integers) > SMALL:
                for index, parameter in enumerate(self.full):
                    handle = parameter.register_post_accumulate_grad_hook(partial(add, index))
                    stack.callback(handle.remove)
            yield
        for index, parameter in enumerate(self.full):
            if parameter.grad is not None:
                add(index, parameter)
        ranges[len(self.full):] = [each.range for each in self.sharded.values()]
        peaks_T = torch.stack(ranges).abs().amax(dim=1)
        is_finite_T = peaks_T.isfinite()
        self.not_finite += ~is_finite_T
        # As bits, which the all-reduce does not change.
        self.largest[self.done] = peaks_T.where(is_finite_T, 0).max().view(torch.int32)
        self.done += 1

    def scatter(self, value: Tensor) -> Tensor:
        """Return float64 zeros with the value at its micro-batch's index; such tensors add up exactly."""
        return F.pad(value.detach().double()[None], (self.done - 1, len(self.largest) - self.done))

    @collective
    def reduce(self, units: Tensor) -> Tensor:
        """Add the sums of all ranks; set the gradients to these sums divided by `units`.

        Return the largest of a micro-batch if it did not fit, else 0. Non-finite tensors become NaN.
        """
        self.ranks.all_reduce(self.integers)
        divisors = (units * self.scale).where(self.not_finite == 0, torch.nan).unbind()
        for parameter, integers, divisor in zip(self.full, self.sums, divisors):
            gradient = integers.view(parameter.dtype)[:len(integers)]  # in the same memory
            parameter.grad = gradient.copy_(integers.double().div_(divisor)).view_as(parameter)
        for (module, each), divisor in zip(self.sharded.items(), divisors[len(self.full):]):
            if each.integers is not None:
                if self.model.copies is not None:
                    with waiting():
                        dist.all_reduce(each.integers, group=self.model.copies)
                each.gradients.copy_(each.integers.double().div_(divisor))
                for rows in (local_rows(parameter.grad) for parameter in module.parameters()
                             if parameter.requires_grad and is_divided(parameter)):
                    if rows.dtype != each.gradients.dtype:  # FSDP has converted, and so copied them
                        first = rows.storage_offset()
                        rows.copy_(each.gradients[first:first + rows.numel()].view_as(rows))
        largest = self.largest.max().int().view(torch.float32).double()
        lowest = 2.0**(self.exponent - 2 * HEADROOM_BITS) if self.exponent > LOWEST_EXPONENT else 0.0
        fits = (largest <= 2.0**self.exponent) & ((largest > lowest) | (largest == 0))
        return largest.where(~fits, 0)

    @collective
    def norm(self) -> Tensor:
        """Return the global gradient norm, from the sums of rows, which ranks never divide."""
        counts = [len(each) if each.ndim > 1 else 1 for each in self.trained]
        sums_R = torch.zeros(sum(counts), device=self.ranks.device)
        mesh = next((each.device_mesh for each in self.trained if is_divided(each)), None)
        for parameter, sums in zip(self.trained, sums_R.split(counts)):
            rows = local_rows(parameter.grad)
            start, end = local_span(parameter) if parameter.ndim > 1 else (0, 1)
            if end > start and (is_divided(parameter) or mesh is None or mesh.get_local_rank(SHARD) == 0):
                sums[start:end] = row_sums(rows.float().square().view(end - start, -1))
        if mesh is not None:
            with waiting():
                dist.all_reduce(sums_R, group=mesh.get_group(SHARD))
        return row_sums(sums_R[None])[0].sqrt()

    def rescale(self, progress: Progress, misfit: float) -> None:
        progress.gradient_exponent = max(LOWEST_EXPONENT, math.frexp(misfit)[1] + HEADROOM_BITS)


REDUCERS["reproducible"] = ReproducibleReducer
