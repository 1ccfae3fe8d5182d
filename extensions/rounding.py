"""Training in fewer bytes: weights and optimizer states in bf16, and updates during the backward pass.

A bf16 number has 8 significant bits, so most updates are smaller than half of its last bit: rounded to the
nearest, they would be lost. Rounded up with a probability equal to the remainder, the stored number is right
on average. The random bits are a hash of the seed, the tensor's name, its number of updates, the row and the
column. So they are the same after a resume, on other ranks, and for the rows of a sharded matrix.
Source: Gupta et al. 2015 (arXiv:1502.02551); Zamirai et al. 2020 (arXiv:2010.06192).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from checkpoint.schema import Progress
from config import Config
from learn import optim
from learn.optim import GroupOptimizer, Muon, Optimizer, Reducer, clip_scale, learning_rate
from model_utils import why_not_compile
from parallel.fsdp import local_rows, local_span, total_norm
from parallel.ranks import Ranks, collective

CHUNK = {"cpu": 2**16, "cuda": 2**22}  # numbers updated at a time without a compiler: a core's cache
WEIGHTS, MOMENT, SQUARES, SUM = range(4)  # what is rounded
# Source of the first two factors: Wellons 2018, github.com/skeeto/hash-prospector.
FACTORS = (0x21F0AAAD, 0x735A2D97, 0x9E3779B1 - 2**32)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Return int32 shifted right without its sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def hashed(x: Tensor, update: Tensor) -> Tensor:
    """Return int32 pseudo-random bits for the numbers, which it overwrites, at an update."""
    x.bitwise_xor_(shifted(x, 16)).mul_(FACTORS[0]).add_(update * FACTORS[2])
    x.bitwise_xor_(shifted(x, 15)).mul_(FACTORS[1])
    return x.bitwise_xor_(shifted(x, 15)).add_(update)


def bits_of_lines(lines_L: Tensor, owner_L: Tensor, updates_K: Tensor) -> Tensor:
    """Return random bits for the rows and columns of K matrices.

    Args:
        lines_L: the index of each row and column in its matrix, plus a key of the matrix.
        owner_L: its matrix.
    """
    update_L = updates_K[owner_L]
    return hashed(hashed(lines_L.clone(), update_L), update_L)


def random_bits(rows_R1: Tensor, columns_C: Tensor) -> Tensor:
    """Return 32 random bits for each element of a matrix."""
    bits_RC = rows_R1 + columns_C
    bits_RC.bitwise_xor_(shifted(bits_RC, 16)).mul_(FACTORS[0])
    bits_RC.bitwise_xor_(shifted(bits_RC, 15))
    return bits_RC


def lines_of(seed: int, name: str, first_row: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the int32 index of each row, of which the first has a number, and column, plus a key."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    numbers = [int.from_bytes(digest[place:place + 4], "little") for place in (0, 4)]
    wrapped = [(number + 2**31) % 2**32 - 2**31 for number in (numbers[0] + first_row, numbers[1])]
    rows_R, columns_C = (torch.arange(size, dtype=torch.int32) + key
                         for size, key in zip(shape, torch.tensor(wrapped, dtype=torch.int32)))
    return rows_R, columns_C


def round_into(target: Tensor, values: Tensor, bits: Optional[Tensor], purpose: int) -> None:
    """Store float32 values, rounded by 16 of the bits; in full if the target is float32."""
    if target.dtype == torch.bfloat16 and bits is not None:
        # One rounding does not know the bits of another.
        bits = bits if purpose in (WEIGHTS, SUM) else (bits if purpose == MOMENT else bits * FACTORS[2]) >> 16
        noisy = (bits & 0xFFFF).add_(values.view(torch.int32))
        values = noisy.bitwise_and_(-2**16).view(torch.float32)
    target.copy_(values)


# ----------------------------------------------------------------------------------------- optimizers


compiled = cache(partial(torch.compile, dynamic=True))


class Rounding:
    """Calls functions on the rows of a tensor and their random bits: compiled, or in chunks for a cache."""

    def __init__(self, config: Config, optimizer: Optimizer):
        self.config, self.optimizer = config, optimizer
        self.layouts: dict[tuple[Tensor, ...], tuple[Tensor, Tensor, list[int]]] = {}
        self.bits: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of rows (R, 1) and columns (C,)

    def is_compiled(self, device_type: str) -> bool:
        return self.config.compile and not why_not_compile(self.config, device_type)

    def start(self, matrices: tuple[Tensor, ...], updates_K: Tensor) -> None:
        """Compute the bits of all rows and columns of these matrices, given the number of their update.

        All at once, since a GPU waits for a host that starts a kernel for each matrix.
        """
        device = updates_K.device
        if matrices not in self.layouts:
            lines, owners = [], []
            for number, matrix in enumerate(matrices):
                first_row = local_span(self.optimizer.sharded.get(matrix, matrix))[0]
                lines += lines_of(self.config.seed, self.optimizer.names[matrix], first_row, matrix.shape)
                owners.append(torch.full((sum(matrix.shape),), number))
            places = (torch.cat(each).to(device) for each in (lines, owners))
            self.layouts[matrices] = (*places, [*map(len, lines)])
        *places, sizes = self.layouts[matrices]
        compute = compiled(bits_of_lines) if self.is_compiled(device.type) else bits_of_lines
        bits = compute(*places, updates_K).split(sizes)
        self.bits |= {matrix: (rows_R[:, None], columns_C)
                      for matrix, rows_R, columns_C in zip(matrices, bits[::2], bits[1::2])}

    def __call__(self, function: Callable, parameter: Tensor, tensors: Sequence[Tensor],
                 *others: Any) -> None:
        """Call `function(tensors, rows, columns, *others)` on rows of tensors as large as a parameter."""
        if parameter.ndim == 1:  # float32
            return function([each[None] for each in tensors], None, None, *others)
        (rows_R1, columns_C), size = self.bits[parameter], max(1, len(parameter))
        if self.is_compiled(parameter.device.type):
            function = compiled(function)
        else:  # a multiple of 16 rows fills the vectors of kernels
            size = -(-max(1, CHUNK[parameter.device.type] // max(1, parameter.shape[1])) // 16) * 16
        for first in range(0, len(parameter), size):
            chunk = slice(first, first + size)
            function([each[chunk] for each in tensors], rows_R1[chunk], columns_C, *others)


def adamw(tensors: Sequence[Tensor], rows_R1: Optional[Tensor], columns_C: Optional[Tensor],
          factors: Sequence[Tensor], constants: Sequence[float],
          guards: Sequence[Optional[Tensor]]) -> None:
    """Update the rows of a parameter, given its gradient, and its averages of gradients and squares."""
    (parameter, gradient, average, squares), (keep, rate, root) = tensors, factors
    (beta1, beta2, eps), (scale, skipped) = constants, guards
    gradient = gradient.float() if scale is None else gradient.float() / scale
    new_average = torch.lerp(average.float(), gradient, 1 - beta1)
    new_squares = (squares.float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    change = (new_average * rate).div_((new_squares.sqrt() * root).add_(eps))
    new_values = (parameter.float() * keep).sub_(change)
    bits = None if rows_R1 is None else random_bits(rows_R1, columns_C)
    for target, values, purpose in ((parameter, new_values, WEIGHTS), (average, new_average, MOMENT),
                                    (squares, new_squares, SQUARES)):
        values = values if skipped is None else torch.where(skipped, target.float(), values)
        round_into(target, values, bits, purpose)


def store(tensors: Sequence[Tensor], rows_R1: Tensor, columns_C: Tensor, purpose: int,
          skipped: Optional[Tensor] = None) -> None:
    """Store values in a target, rounded."""
    target, values = tensors
    values = values if skipped is None else torch.where(skipped, target.float(), values)
    round_into(target, values, random_bits(rows_R1, columns_C), purpose)


def add(tensors: Sequence[Tensor], rows_R1: Tensor, columns_C: Tensor) -> None:
    """Add the second tensor to the first."""
    target, other = tensors
    round_into(target, target.float() + other, random_bits(rows_R1, columns_C), SUM)


class RoundedAdamW(GroupOptimizer):
    """AdamW that computes in float32, and stores weights and moments of matrices in their dtypes."""

    state_names = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[dict], config: Config, whole: Optimizer):
        super().__init__(groups, config, whole)
        self.constants = config.adam_beta1, config.adam_beta2, config.adam_eps
        self.state_dtype = STATE_DTYPES[config.optimizer_dtype]
        self.rounding, self.factors = Rounding(config, whole), {}

    @torch.no_grad()
    def start(self, parameters: Iterable[Tensor]) -> None:
        """Count an update of these parameters, and compute its factors."""
        wanted, (beta1, beta2, _) = {*parameters}, self.constants
        for group in self.param_groups:
            if not (members := [each for each in group["params"] if each in wanted]):
                continue
            for parameter in members:
                if not (state := self.state[parameter]):
                    dtype = self.state_dtype if parameter.ndim > 1 else torch.float32
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, dtype=dtype)
                                                             for _ in range(2))
            counts = [self.state[parameter]["step"] for parameter in members]
            torch._foreach_add_(counts, 1.0)
            if self.found_inf is not None:
                # As a list, since a GPU would have to tell the host the value of a single tensor.
                torch._foreach_sub_(counts, [self.found_inf.to(counts[0].device)] * len(counts))
            counts_K = torch.stack(counts).double()
            if members[0].ndim > 1:
                self.rounding.start((*members,), counts_K.int())
            keep_K = torch.full_like(counts_K, 1 - group["lr"] * group["weight_decay"])
            rate_K, root_K = group["lr"] / (1 - beta1**counts_K), (1 - beta2**counts_K).rsqrt()
            factors_K3 = torch.stack([keep_K, rate_K, root_K], dim=1).float()
            self.factors |= zip(members, factors_K3.unbind())

    @torch.no_grad()
    def update(self, parameter: Tensor, skipped: Optional[Tensor]) -> None:
        """Update a parameter after `start`, unless `skipped` is true."""
        state = self.state[parameter]
        skipped = None if skipped is None else skipped.to(parameter.device)
        scale = None if self.grad_scale is None else self.grad_scale.to(parameter.device)
        tensors = [parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        self.rounding(adamw, parameter, tensors, self.factors.pop(parameter).unbind(), self.constants,
                      (scale, skipped))

    def step(self) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]
                      if each.grad is not None]
        self.start(parameters)
        skipped = None if self.found_inf is None else self.found_inf != 0
        if skipped is not None and skipped.device.type == "cpu":  # whose value is known
            if skipped:
                return
            skipped = None
        for parameter in parameters:
            self.update(parameter, skipped)


class RoundedMuon(Muon):
    """Muon that stores weights and momentum in their dtypes."""

    state_names = ("step", "momentum_buffer")

    def __init__(self, groups: list[dict], config: Config, whole: Optimizer):
        super().__init__(groups, config, whole)
        self.state_dtype = STATE_DTYPES[config.optimizer_dtype]
        self.rounding = Rounding(config, whole)

    @torch.no_grad()
    def step(self) -> None:
        self.places: dict[Tensor, tuple[Tensor, int]] = {}
        for parameter in self.matrices:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device)
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["step"] += 1 if self.found_inf is None else 1 - self.found_inf.to(parameter.device)
            self.places |= {parameter: (parameter, WEIGHTS), state["momentum_buffer"]: (parameter, MOMENT)}
        counts = [self.state[parameter]["step"] for parameter in self.matrices]
        self.rounding.start((*self.matrices,), torch.stack(counts).int())
        super().step()

    def _assign(self, tensors: list[Tensor], values: Iterable[Tensor]) -> None:
        skipped = None if self.found_inf is None else self.found_inf.to(tensors[0].device) != 0
        for tensor, value in zip(tensors, values):
            parameter, purpose = self.places[tensor]
            self.rounding(store, parameter, [tensor.data, value], purpose, skipped)


# ------------------------------------------------------------------------------------------ gradients


class RoundingReducer(Reducer):
    """Adds bf16 gradients of micro-batches with stochastic rounding, or updates during the backward pass."""

    def __init__(self, model: nn.Module, ranks: Ranks, config: Config, optimizer: Optimizer):
        super().__init__(model, ranks, config)
        self.config, self.optimizer, self.number = config, optimizer, 0
        rows_of = {parameter: rows for rows, parameter in optimizer.sharded.items()}
        self.trained = {each: rows_of.get(each, each) for each in model.parameters() if each.requires_grad}
        self.matrices = {each: rows for each, rows in self.trained.items() if each.ndim > 1}
        self.sums: dict[Tensor, Tensor] = {}
        self.norms: dict[Tensor, Tensor] = {}
        self.rounding = Rounding(config, SimpleNamespace(
            names={rows: f"gradient of {optimizer.names[rows]}" for rows in self.matrices.values()},
            sharded=optimizer.sharded))

    def begin(self, units: Tensor, progress: Progress) -> None:
        super().begin(units, progress)
        self.number = progress.step * self.config.accumulation_steps
        if self.config.update_in_backward:
            self.is_empty, scale = units == 0, None
            if progress.last_norm is not None:  # not in the first step
                last_norm = torch.full((), progress.last_norm, device=units.device)
                scale = clip_scale(last_norm, self.config.max_grad_norm)
            for optimizer in self.optimizer.optimizers:
                optimizer.grad_scale, optimizer.found_inf = scale, self.is_empty.float()
                optimizer.set_rate(learning_rate(progress.updates, self.config))
                optimizer.start(self.matrices.values())

    @contextmanager
    def add(self, step: int, is_last: bool) -> Iterator[None]:
        self.is_last, self.number = is_last, self.number + 1
        if self.sums:
            matrices = (*self.matrices.values(),)
            device = self.sums[next(iter(self.sums))].device
            number = torch.full((len(matrices),), self.number, dtype=torch.int32, device=device)
            self.rounding.start(matrices, number)
        with ExitStack() as stack:
            for parameter in self.matrices:
                stack.callback(parameter.register_post_accumulate_grad_hook(self.collect).remove)
            stack.enter_context(super().add(step, is_last))
            yield

    @torch.no_grad()
    def collect(self, parameter: Tensor) -> None:
        """Add a gradient to those of earlier micro-batches; after the last, perhaps update the parameter."""
        rows, gradient = self.matrices[parameter], local_rows(parameter.grad)
        if gradient.device.type != self.ranks.device.type:  # CPU_OFFLOAD: an old torch may still copy it
            torch.accelerator.synchronize()
        if (earlier := self.sums.pop(parameter, None)) is not None:
            self.rounding(add, rows, [gradient, earlier])
        if not self.is_last:
            self.sums[parameter], parameter.grad = gradient, None
        elif self.config.update_in_backward:
            self.norms[parameter] = float32_norm(gradient)
            rows.data, rows.grad = local_rows(parameter.data), gradient
            self.optimizer.optimizers[0].update(rows, self.is_empty)
            parameter.grad = rows.grad = None

    @collective
    def norm(self) -> Tensor:
        if not self.norms:
            return super().norm()
        norms = [self.norms.pop(each) if each in self.norms else float32_norm(each.grad)
                 for each in self.trained]
        return total_norm(self.trained, norms)


def float32_norm(tensor: Tensor) -> Tensor:
    return torch._foreach_norm([tensor], 2, torch.float32)[0]


STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
optim.SPECIAL_OPTIMIZERS |= {"adamw": (RoundedAdamW, RoundedAdamW), "muon": (RoundedMuon, RoundedAdamW)}
optim.REDUCERS["special_update"] = RoundingReducer
