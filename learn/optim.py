"""A step's gradients over micro-batches and ranks; AdamW and Muon, and the learning-rate schedule."""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from checkpoint.schema import Progress
from checkpoint.tensors import LazyTensor, lazy
from common.errors import CheckpointError, SettingsError
from config import Config, OptimConfig
from parallel import fsdp
from parallel.ranks import Ranks, collective


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the learning rate of the next update, after `step` finished ones.

    Linear warm-up, then cosine decay, a plateau with a final linear decay (wsd), or a plateau (constant).
    Source: Loshchilov & Hutter 2017 (arXiv:1608.03983); Hu et al. 2024 (arXiv:2404.06395) for wsd.
    """
    peak, final = config.learning_rate, config.final_learning_rate
    warmup = round(config.warmup_steps * (config.max_steps if config.warmup_steps < 1 else 1))
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_schedule == "constant":
        return peak
    start = warmup
    if config.lr_schedule == "wsd":
        start = max(start, config.max_steps - round(config.decay_fraction * config.max_steps))
    progress = (step - start) / max(1, config.max_steps - start)
    progress = min(1.0, max(0.0, progress))
    fraction = 1 - progress if config.lr_schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return final + fraction * (peak - final)


FLOATS = (torch.float32, torch.bfloat16)  # dtypes of the optimizer's state
MUON_BATCHES, MUON_BATCH_NUMEL = 8, 2**24  # minimum batches per shape; maximum numbers in a batch


class Reducer:
    """Adds a step's gradients over micro-batches and ranks, and divides them by the units of all ranks.

    Losses are sums, which `loss_scale` multiplies. With several ranks, DDP wraps a model that is whole.
    """

    loss_scale: Tensor | float = 1.0

    def __init__(self, model: nn.Module, ranks: Ranks, config: OptimConfig,
                 optimizer: Optional["Optimizer"] = None):
        self.ranks, self.unwrapped, self.is_sharded = ranks, model, fsdp.is_sharded(model)
        self.uses_ddp = ranks.world_size > 1 and not self.is_sharded
        self.model = in_ddp(model, config.gradient_dtype) if self.uses_ddp else model

    def begin(self, units: Tensor, progress: Progress) -> None:
        """Begin a step of so many units. Without any, the gradients are 0, and the loss is NaN."""
        self.loss_scale = (self.ranks.world_size / units.clamp(min=1)).float()  # DDP averages over ranks

    @contextmanager
    def add(self, step: int, is_last: bool) -> Iterator[None]:
        """A `with` block around a micro-batch's forward and backward; only the last exchanges gradients."""
        if self.is_sharded:
            # Within a shard group every backward exchanges them: a rank has no memory for whole gradients.
            self.model.set_requires_all_reduce(is_last)
        # no_sync must include the forward, in which DDP decides whether to exchange.
        with self.model.no_sync() if self.uses_ddp and not is_last else nullcontext():
            yield

    def scatter(self, value: Tensor) -> Tensor:
        """Return a value of the last micro-batch such that the values of a step can be added."""
        return value

    @collective
    def reduce(self, units: Tensor) -> Tensor:
        """Complete the gradients; return 0, or the largest one if they did not fit a scale, on the device."""
        if self.is_sharded:
            gradients = [parameter.grad for parameter in self.model.parameters()  # those that FSDP ignores
                         if parameter.grad is not None and not fsdp.is_divided(parameter)]
            if gradients:
                shares = nn.utils.parameters_to_vector(gradients) / self.ranks.world_size
                nn.utils.vector_to_parameters(self.ranks.all_reduce(shares), gradients)
        return torch.zeros_like(units)

    def rescale(self, progress: Progress, misfit: float) -> None:
        """Choose a scale for a second try of the step, after `reduce` has returned this number."""

    @collective
    def norm(self) -> Tensor:
        return gradient_norm(self.unwrapped)


REDUCERS: dict[str, type[Reducer]] = {}  # of extensions, by the property of a Config that they serve


def make_reducer(model: nn.Module, ranks: Ranks, config: Config, optimizer: "Optimizer") -> Reducer:
    """Return the reducer of a run."""
    served = next((name for name in ("reproducible", "special_update") if getattr(config, name)), "")
    if served == "reproducible" and served not in REDUCERS:
        raise SettingsError("REPRODUCIBLE=true needs extensions/reproducible.py, and its name in EXTENSIONS; "
                            "or set REPRODUCIBLE=false")
    return (REDUCERS[served] if served else Reducer)(model, ranks, config, optimizer)


def in_ddp(model: nn.Module, gradient_dtype: str = "fp32") -> DistributedDataParallel:
    """Return the model in DDP, which without `device_ids` moves no CPU tensors of a batch to the GPU."""
    def exchange_in_bf16(group, bucket) -> torch.futures.Future[Tensor]:
        # As another function, because DDP refuses the original with gloo, although it works there.
        return bf16_compress_hook(group, bucket)

    def exchange_in_float32(group, bucket) -> torch.futures.Future[Tensor]:
        summed = bucket.buffer().float().div_(torch.distributed.get_world_size())
        work = torch.distributed.all_reduce(summed, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if gradient_dtype == "fp32" and any(each.dtype == torch.bfloat16 for each in model.parameters()):
        parallel.register_comm_hook(None, exchange_in_float32)
    elif gradient_dtype == "bf16":
        parallel.register_comm_hook(None, exchange_in_bf16)
    return parallel


@collective
def gradient_norm(model: nn.Module) -> Tensor:
    return fsdp.total_norm(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def clip_scale(norm: Tensor, max_norm: float) -> Optional[Tensor]:
    """Return the divisor that clips gradients of this norm to `max_norm`; None if that is 0 (off).

    It is 1 if the norm is not finite, so that one bad gradient does not spread to all parameters.
    """
    if max_norm == 0:
        return None
    return torch.where(norm.isfinite(), ((norm + 1e-6) / max_norm).clamp(min=1), 1)


# ----------------------------------------------------------------------------------------- optimizers


def newton_schulz(matrices_PRC: Tensor, iterations: int = 5) -> Tensor:
    """Return P matrices of R rows and C columns with singular values near 1, by Newton-Schulz iteration.

    Source and coefficients: Jordan et al. 2024.
    """
    tall = matrices_PRC.shape[1] > matrices_PRC.shape[2]
    x = matrices_PRC.mT if tall else matrices_PRC
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class GroupOptimizer:
    """Base class of the optimizers of some groups of parameters, each with `weight_decay` and `factor`.

    An update divides the gradients by `grad_scale`, and is skipped if `found_inf` is not 0: scalars on the
    device, None = 1 and 0. Not of torch, whose wrappers for compiled optimizers import torch._dynamo (1 s).
    """

    state_names: ClassVar[tuple[str, ...]]  # tensors that it keeps for each parameter
    state_dtype = torch.float32  # of those of matrices
    grad_scale: Optional[Tensor] = None
    found_inf: Optional[Tensor] = None

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig, whole: "Optimizer"):
        self.param_groups = [{"factor": 1.0, **group} for group in groups]
        self.set_rate(config.learning_rate)
        self.config, self.whole = config, whole
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    def set_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr * group["factor"]

    def step(self) -> None:
        raise NotImplementedError


class AdamW(GroupOptimizer):
    """torch's fused AdamW. Source: Loshchilov & Hutter 2019 (arXiv:1711.05101)."""

    state_names = ("step", "exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self) -> None:
        config = self.config
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            device, columns = parameters[0].device, ([], [], [])
            for parameter in parameters:
                if not (state := self.state[parameter]):
                    state["step"] = torch.zeros((), device=device)
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                for name, column in zip(self.state_names, columns):
                    column.append(state[name])
            scale, skipped = (each if each is None else each.to(device, non_blocking=True)
                              for each in (self.grad_scale, self.found_inf))
            counts, averages, squares = columns
            torch._foreach_add_(counts, 1)
            torch._fused_adamw_(
                parameters, [each.grad for each in parameters], averages, squares, [], counts,
                amsgrad=False, maximize=False, lr=group["lr"], beta1=config.adam_beta1,
                beta2=config.adam_beta2, weight_decay=group["weight_decay"], eps=config.adam_eps,
                grad_scale=scale, found_inf=skipped)
            if skipped is not None:
                torch._foreach_sub_(counts, [skipped] * len(counts))


def muon_batch(count: int, numel: int) -> int:
    """Return how many of `count` equal matrices Muon batches, such that 8 ranks can divide the batches."""
    return max(1, min(-(-count // MUON_BATCHES), MUON_BATCH_NUMEL // numel))


class Muon(GroupOptimizer):
    """Orthogonalized momentum, with updates as large as AdamW's, so that both share one learning rate.

    Unlike torch.optim.Muon, which iterates in bf16 over single matrices, it computes in float32 on a CPU, and
    in batches of equal shapes, which the ranks divide. All its matrices have gradients.
    Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982) for the size of the update.
    """

    state_names = ("momentum_buffer",)

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig, whole: "Optimizer"):
        super().__init__(groups, config, whole)
        self.matrices = [each for group in groups for each in group["params"]]
        equal: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in self.matrices:
            equal.setdefault(whole.sharded.get(matrix, matrix).shape, []).append(matrix)
        # They do not depend on the number of ranks: kernels may round differently at another batch size.
        batches: list[tuple[torch.Size, list[nn.Parameter]]] = []
        for shape, members in equal.items():
            size = muon_batch(len(members), shape.numel())
            batches += [(torch.Size((len(batch), *shape)), batch) for batch in (
                members[first:first + size] for first in range(0, len(members), size))]

        def flops(batch: tuple[torch.Size, list[nn.Parameter]]) -> int:
            count, short, long = batch[0][0], min(batch[0][1:]), max(batch[0][1:])
            return count * short * short * (2 * long + short)

        # The most expensive first, so that ranks get nearly equal work.
        self.shapes, self.batches = zip(*sorted(batches, key=flops, reverse=True))
        like = self.like = whole.sharded.get(self.matrices[0], self.matrices[0])
        self.device = torch.device(like.device_mesh.device_type) if fsdp.is_divided(like) else like.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @torch.no_grad()
    def step(self) -> None:
        momentum, rates = self.config.muon_momentum, {}
        for group in self.param_groups:
            rates |= dict.fromkeys(group["params"], (group["lr"], 1 - group["lr"] * group["weight_decay"]))
        gradients = [matrix.grad for matrix in self.matrices]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale.to(gradients[0].device))
        for matrix in self.matrices:
            if "momentum_buffer" not in (state := self.state[matrix]):
                state["momentum_buffer"] = torch.zeros_like(matrix, dtype=self.state_dtype)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in self.matrices]
        self._assign(buffers, (torch.lerp(buffer.float(), gradient.float(), 1 - momentum)
                               for buffer, gradient in zip(buffers, gradients)))

        def stack(index: int) -> Tensor:
            gradients = [matrix.grad.float() for matrix in self.batches[index]]
            buffers = [self.state[matrix]["momentum_buffer"].float() for matrix in self.batches[index]]
            return torch.stack(torch._foreach_lerp(gradients, buffers, momentum)).to(self.device, self.dtype)

        computed = fsdp.compute_in_turns(self.shapes, stack, newton_schulz, self.like, self.dtype,
                                         self.whole.ranks)
        for (_, *shape), batch, updates in zip(self.shapes, self.batches, computed):
            self._assign(batch, (
                (matrix.float() * decay).sub_(update.to(matrix.device, torch.float32),
                                              alpha=lr * 0.2 * math.sqrt(max(shape)))
                for matrix, update, (lr, decay) in zip(batch, updates, map(rates.get, batch))))

    def _assign(self, tensors: list[Tensor], values: Iterable[Tensor]) -> None:
        """Assign new values unless the update is skipped, which only the device knows."""
        skipped = None if self.found_inf is None else self.found_inf.to(tensors[0].device) != 0
        for tensor, value in zip(tensors, values):
            tensor.copy_(value) if skipped is None else torch.where(skipped, tensor, value, out=tensor)


# By OPTIMIZER: the optimizers of the blocks' matrices, without adapters, and of the other parameters.
OPTIMIZERS: dict[str, tuple[type[GroupOptimizer], type[GroupOptimizer]]] = {
    "adamw": (AdamW, AdamW), "muon": (Muon, AdamW)}
# The same of an extension, for `Config.special_update`.
SPECIAL_OPTIMIZERS: dict[str, tuple[type[GroupOptimizer], type[GroupOptimizer]]] = {}


def rate_factors(config: OptimConfig, names: Iterable[str]) -> dict[str, float]:
    """Return the factors of LEARNING_RATE_FACTORS by the names of parameters; 1 without a pattern."""
    names, pattern_of, factors = [*names], {}, dict.fromkeys(names, 1.0)
    setting = f"LEARNING_RATE_FACTORS={config.learning_rate_factors}"
    for pattern, factor in config.rate_factors:
        if not (matched := fnmatch.filter(names, pattern)):
            tied = "" if "output.weight" in names else ". With TIE_EMBEDDINGS, the head is tok_embeddings"
            raise SettingsError(f"{setting}: no trained parameter matches {pattern}; the names are "
                                f"{', '.join(names[:12])}, ...{tied}")
        for name in matched:
            if name in pattern_of:
                raise SettingsError(f"{setting}: {pattern_of[name]} and {pattern} match {name}; remove one")
            pattern_of[name], factors[name] = pattern, factor
    return factors


class Optimizer:
    """The optimizers of the trainable parameters, as one.

    Weight decay applies to matrices only.

    Args:
        ranks: ranks that call `step` together with equal gradients; they may divide the work.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks = Ranks()):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        # torch's optimizers see this rank's rows of a sharded parameter as a separate parameter.
        self.sharded = {nn.Parameter(fsdp.local_rows(p)): p for p in trained.values()
                        if fsdp.local_rows(p) is not p}
        rows_of = {p: rows for rows, p in self.sharded.items()}
        self.names, self.ranks = {rows_of.get(p, p): name for name, p in trained.items()}, ranks
        kinds = SPECIAL_OPTIMIZERS if config.special_update else OPTIMIZERS
        if config.optimizer not in kinds:
            raise SettingsError("WEIGHT_DTYPE, OPTIMIZER_DTYPE and UPDATE_IN_BACKWARD need OPTIMIZER=adamw "
                                "or muon, and extensions/rounding.py, with its name in EXTENSIONS; or remove "
                                "them")
        of_matrices, of_rest = kinds[config.optimizer]
        # Orthogonalizing both factors of an adapter does not orthogonalize their product.
        matrices = [p for p, name in self.names.items() if of_matrices is not of_rest and p.ndim >= 2
                    and name.startswith("layers.") and not name.endswith((".lora_A", ".lora_B"))]
        rest = [p for p in self.names if not any(p is other for other in matrices)]
        factors = rate_factors(config, self.names.values())

        def groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
            by_factor: dict[float, list[nn.Parameter]] = defaultdict(list)
            for parameter in parameters:
                by_factor[factors[self.names[parameter]]].append(parameter)
            return [{"params": members, "weight_decay": weight_decay, "factor": factor}
                    for factor, members in by_factor.items()]

        decayed = groups([p for p in rest if p.ndim >= 2], config.weight_decay)
        self.optimizers = [of_rest(decayed + groups([p for p in rest if p.ndim < 2], 0.0), config, self)]
        if matrices:
            self.optimizers.append(of_matrices(groups(matrices, config.weight_decay), config, self))

    @collective
    def step(self, lr: float, grad_scale: Optional[Tensor] = None,
             found_inf: Optional[Tensor] = None) -> None:
        """Update the parameters without waiting for the device.

        Args:
            grad_scale: float32 scalar by which the gradients are divided first; None = 1.
            found_inf: float32 scalar on the device; 1 leaves parameters and state unchanged.
        """
        for rows, parameter in self.sharded.items():  # fully_shard may have moved them
            rows.data = fsdp.local_rows(parameter)
            rows.grad = None if parameter.grad is None else fsdp.local_rows(parameter.grad)
        if any(rows.device.type == "cpu" for rows in self.sharded):  # CPU_OFFLOAD: the host has to wait
            grad_scale, found_inf = (each if each is None else each.cpu() for each in (grad_scale, found_inf))
        if found_inf is not None and found_inf.device.type == "mps":  # whose fused AdamW ignores both
            if found_inf:
                return
            if grad_scale is not None:
                torch._foreach_div_([p.grad for p in self.names if p.grad is not None], grad_scale)
            grad_scale = found_inf = None
        for optimizer in self.optimizers:
            optimizer.set_rate(lr)
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to 0: those of a sharded model are always removed."""
        gradients = [rows.grad for rows in self.names if rows.grad is not None]
        if gradients and not set_to_none:
            torch._foreach_zero_(gradients)
        for parameter in (*(self.names if set_to_none else ()), *self.sharded.values()):
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of the state, not copies, by `<parameter>.<state>`."""
        return {f"{self.names[parameter]}.{key}": value for optimizer in self.optimizers
                for parameter, state in optimizer.state.items() for key, value in state.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """Restore a checkpoint's state, but not of frozen layers; it is empty before the first update."""
        tensors = {key: each for key, each in tensors.items() if key.rpartition(".")[0] not in self.frozen}
        if not tensors:
            return
        places = {f"{self.names[p]}.{entry}": (optimizer, p, entry) for optimizer in self.optimizers
                  for group in optimizer.param_groups for p in group["params"]
                  for entry in optimizer.state_names}
        # Muon counts its updates only if it rounds.
        counts = {key: each for key, each in tensors.items() if key.endswith(".step")}
        tensors = {key: each for key, each in tensors.items() if key in places or key not in counts}
        tensors |= {key: counts[min(counts)] for key, (_, _, entry) in places.items()
                    if entry == "step" and key not in counts and counts}
        # Float32 and bf16 are converted.
        saved = {key: f"{'float' if tensor.dtype in FLOATS else tensor.dtype} {tuple(tensor.shape)}"
                 for key, tensor in tensors.items()}
        wanted = {key: f"float {() if entry == 'step' else tuple(self.sharded.get(p, p).shape)}"
                  for key, (_, p, entry) in places.items()}
        if saved != wanted:
            key = min(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
            raise CheckpointError(f"the optimizer's state does not belong to this model: {key} is "
                                  f"{saved.get(key, 'missing')}, expected {wanted.get(key, 'nothing')}; "
                                  "use another checkpoint")
        for key, (optimizer, parameter, entry) in places.items():
            # A fused AdamW counts its steps on the parameter's device.
            rows = (0, 1) if entry == "step" else fsdp.local_span(self.sharded.get(parameter, parameter))
            dtype = optimizer.state_dtype if entry != "step" and parameter.ndim > 1 else torch.float32
            optimizer.state[parameter][entry] = lazy(tensors[key]).read(*rows).to(
                parameter.device, dtype, copy=True)
