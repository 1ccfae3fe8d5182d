"""A step's gradients over micro-batches and ranks; AdamW and Muon, and the learning-rate schedule."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from checkpoint.schema import SavedProgress
from checkpoint.tensors import LazyTensor, lazy
from common.activity import tick
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

# ------------------------------------------------------------------------------------------ gradients


class Reducer:
    """Adds a step's gradients over micro-batches and ranks, and divides them by the units of all ranks.

    Losses are sums, which `loss_scale` multiplies. DDP wraps `model` if several ranks exchange gradients; a
    sharded model exchanges them itself.
    """

    loss_scale: Tensor | float = 1.0

    def __init__(self, model: nn.Module, ranks: Ranks, config: OptimConfig,
                 optimizer: Optional["Optimizer"] = None):
        self.ranks, self.unwrapped = ranks, model
        gradient_sync = ranks.world_size > 1 and not fsdp.is_sharded(model)
        self.model = in_ddp(model, config.gradient_dtype) if gradient_sync else model

    def begin(self, units: Tensor, progress: SavedProgress) -> None:
        """Begin a step of so many units. Without any, the gradients are 0, and the loss is NaN."""
        self.loss_scale = (self.ranks.world_size / units.clamp(min=1)).float()  # DDP averages over ranks

    @contextmanager
    def add(self, step: int, is_last: bool) -> Iterator[None]:
        """A `with` block around a micro-batch's forward and backward; only the last exchanges gradients."""
        if fsdp.is_sharded(self.model):
            # Within a shard group every backward exchanges them: a rank has no memory for whole gradients.
            self.model.set_requires_all_reduce(is_last)
        # no_sync must include the forward, in which DDP decides whether to exchange.
        waits = isinstance(self.model, DistributedDataParallel) and not is_last
        with self.model.no_sync() if waits else nullcontext():
            yield

    def scatter(self, value: Tensor) -> Tensor:
        """Return a value of the last micro-batch such that the values of a step can be added."""
        return value

    @collective
    def reduce(self, units: Tensor) -> Tensor:
        """Complete the gradients; return 0, or the largest one if they did not fit a scale, on the device."""
        if fsdp.is_sharded(self.model):
            fsdp.average_vectors(self.model, self.ranks)
        return torch.zeros_like(units)

    def rescale(self, progress: SavedProgress, misfit: float) -> None:
        """Choose a scale for a second try of the step, after `reduce` has returned this number."""

    @collective
    def norm(self) -> Tensor:
        return gradient_norm(self.unwrapped)


REDUCERS: dict[str, type[Reducer]] = {}  # of extensions


def make_reducer(model: nn.Module, ranks: Ranks, config: Config, optimizer: "Optimizer") -> Reducer:
    """Return the reducer of a run; with REPRODUCIBLE or a special update, that of the extension."""
    if not config.reproducible:
        reducer = REDUCERS["rounding"] if config.special_update else Reducer
        return reducer(model, ranks, config, optimizer)
    if "reproducible" not in REDUCERS:
        raise SettingsError("REPRODUCIBLE=true needs extensions/reproducible.py, and its name in EXTENSIONS; "
                            "or set REPRODUCIBLE=false")
    return REDUCERS["reproducible"](model, ranks, config, optimizer)


def in_ddp(model: nn.Module, gradient_dtype: str = "fp32") -> DistributedDataParallel:
    """Return the model in DDP, which without `device_ids` moves no CPU tensors of a batch to the GPU."""
    def exchange_in_float32(group, bucket) -> torch.futures.Future[Tensor]:
        summed = bucket.buffer().float().div_(torch.distributed.get_world_size())
        work = torch.distributed.all_reduce(summed, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if gradient_dtype == "fp32" and any(each.dtype == torch.bfloat16 for each in model.parameters()):
        parallel.register_comm_hook(None, exchange_in_float32)
    elif gradient_dtype == "bf16":
        # As another function, because DDP refuses the original with gloo, although it works there.
        parallel.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return parallel


@collective
def gradient_norm(model: nn.Module) -> Tensor:
    """Return the global gradient norm."""
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


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that divide the gradients by `grad_scale`, and skip the update if `found_inf`.

    It goes without torch's wrappers for compiled optimizers, whose first call imports torch._dynamo (1 s).
    """

    state_names: ClassVar[tuple[str, ...]]  # tensors that it keeps for each parameter
    state_dtype = torch.float32  # of those of matrices
    grad_scale: Optional[Tensor] = None
    found_inf: Optional[Tensor] = None
    sharded: Mapping[Tensor, Tensor] = {}  # by local rows: the parameter that they belong to
    ranks = Ranks()  # they have equal gradients
    names: Mapping[Tensor, str] = {}

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @classmethod
    def from_config(cls, groups: list[dict], config: OptimConfig) -> "EagerOptimizer":
        """Return the optimizer of groups of parameters, each with its `weight_decay`."""
        raise NotImplementedError


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW."""

    state_names = ("step", "exp_avg", "exp_avg_sq")
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    @classmethod
    def from_config(cls, groups: list[dict], config: OptimConfig) -> "AdamW":
        return cls(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                   eps=config.adam_eps, fused=True)


def muon_batch(count: int, numel: int) -> int:
    """Return how many of `count` equal matrices Muon batches, such that 8 ranks can divide the batches."""
    return max(1, min(-(-count // MUON_BATCHES), MUON_BATCH_NUMEL // numel))


class Muon(EagerOptimizer):
    """Orthogonalized momentum, with updates as large as AdamW's, so that both share one learning rate.

    Unlike torch.optim.Muon, which iterates in bf16 over single matrices, it computes in float32 on a CPU, and
    in batches of equal shapes, which the ranks divide.
    Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982) for the size of the update.
    """

    state_names = ("momentum_buffer",)

    def __init__(self, params: list, lr: float, weight_decay: float, momentum: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @classmethod
    def from_config(cls, groups: list[dict], config: OptimConfig) -> "Muon":
        return cls(groups, config.learning_rate, config.weight_decay, config.muon_momentum)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            if self.grad_scale is not None:
                torch._foreach_div_(gradients, self.grad_scale.to(gradients[0].device))
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    buffer = torch.zeros_like(parameter, dtype=self.state_dtype)
                    self.state[parameter]["momentum_buffer"] = buffer
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            self._assign(buffers, (torch.lerp(buffer.float(), gradient.float(), 1 - group["momentum"])
                                   for buffer, gradient in zip(buffers, gradients)))
            decay, batches = 1 - group["lr"] * group["weight_decay"], self._batches(parameters)
            for batch, updates in zip(batches, self._updates(batches, group["momentum"])):
                lr = group["lr"] * 0.2 * math.sqrt(max(self._whole(batch[0]).shape))
                self._assign(batch, ((parameter.float() * decay).sub_(
                    update.to(parameter.device, torch.float32), alpha=lr)
                    for parameter, update in zip(batch, updates)))

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        return self.sharded.get(parameter, parameter)

    def _batches(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return batches of equal shapes, the most expensive first, so that ranks get nearly equal work.

        They do not depend on the number of ranks: kernels may round differently at another batch size.
        """
        def flops(batch: list[nn.Parameter]) -> int:
            short, long = sorted(self._whole(batch[0]).shape)
            return len(batch) * short * short * (2 * long + short)

        equal: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            equal.setdefault(self._whole(parameter).shape, []).append(parameter)
        batches = []
        for shape, members in equal.items():
            size = muon_batch(len(members), shape.numel())
            batches += [members[first:first + size] for first in range(0, len(members), size)]
        return sorted(batches, key=flops, reverse=True)

    def _updates(self, batches: list[list[nn.Parameter]], momentum: float) -> Iterator[Tensor]:
        """Yield the orthogonalized updates (P, local rows, C) of each batch."""
        like = self._whole(batches[0][0])
        device = torch.device(like.device_mesh.device_type) if fsdp.is_divided(like) else like.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def stack(index: int) -> Tensor:
            gradients = [parameter.grad.float() for parameter in batches[index]]
            buffers = [self.state[parameter]["momentum_buffer"].float() for parameter in batches[index]]
            return torch.stack(torch._foreach_lerp(gradients, buffers, momentum)).to(device, dtype)

        shapes = [torch.Size((len(batch), *self._whole(batch[0]).shape)) for batch in batches]
        return fsdp.compute_in_turns(shapes, stack, newton_schulz, like, dtype, self.ranks)

    def _assign(self, tensors: list[Tensor], values: Iterable[Tensor]) -> None:
        """Assign new values unless the update is skipped, which only the device knows."""
        skipped = None if self.found_inf is None else self.found_inf.to(tensors[0].device) != 0
        for tensor, value in zip(tensors, values):
            tensor.copy_(value) if skipped is None else torch.where(skipped, tensor, value, out=tensor)


# By OPTIMIZER: the optimizers of the blocks' matrices, without adapters, and of the other parameters.
OPTIMIZERS: dict[str, tuple[type[EagerOptimizer], type[EagerOptimizer]]] = {
    "adamw": (AdamW, AdamW), "muon": (Muon, AdamW)}


class Optimizer:
    """The optimizers of the trainable parameters, as one.

    Weight decay applies to matrices only. Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).

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
        self.names = {rows_of.get(p, p): name for name, p in trained.items()}
        kind = f"rounded {config.optimizer}" if config.special_update else config.optimizer
        if kind not in OPTIMIZERS:
            raise SettingsError("WEIGHT_DTYPE, OPTIMIZER_DTYPE and UPDATE_IN_BACKWARD need OPTIMIZER=adamw "
                                "or muon, and extensions/rounding.py, with its name in EXTENSIONS; or remove "
                                "them")
        of_matrices, of_rest = OPTIMIZERS[kind]
        # Orthogonalizing both factors of an adapter does not orthogonalize their product.
        matrices = [p for p, name in self.names.items() if of_matrices is not of_rest and p.ndim >= 2
                    and name.startswith("layers.") and not name.endswith((".lora_A", ".lora_B"))]
        rest = [p for p in self.names if not any(p is other for other in matrices)]
        groups = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
                  {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizers = [of_rest.from_config([group for group in groups if group["params"]], config)]
        if matrices:
            decayed = {"params": matrices, "weight_decay": config.weight_decay}
            self.optimizers.append(of_matrices.from_config([decayed], config))
        for optimizer in self.optimizers:
            optimizer.sharded, optimizer.ranks, optimizer.names = self.sharded, ranks, self.names

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
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for parameter in self.sharded.values():
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
            tick()
