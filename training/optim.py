"""The optimizers, the parameters that each updates, and the learning rate of each step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from checkpoint.tensor_files import LazyTensor, lazy
from common.errors import CheckpointError
from common.heartbeat import HEARTBEAT
from config import OptimConfig
from parallel.sharding import gather_rows, own, own_rows


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the learning rate of the update that follows `step` finished ones, for every step >= 0.

    Linear warm-up, then cosine decay; or a plateau with a linear decay at its end (wsd); or a plateau.
    Source: Loshchilov & Hutter 2017 (arXiv:1608.03983); Hu et al. 2024 (arXiv:2404.06395) for wsd.
    """
    assert step >= 0, step
    peak, final = config.learning_rate, config.final_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    begin = config.warmup_steps
    if config.lr_schedule == "wsd":
        begin = max(begin, config.max_steps - round(config.decay_fraction * config.max_steps))
    progress = (step - begin) / max(1, config.max_steps - begin)
    progress = min(1.0, max(0.0, progress))
    share = 1 - progress if config.lr_schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    lr = final + share * (peak - final)
    assert math.isfinite(lr) and lr >= 0, lr
    return lr


def newton_schulz(matrices_PRC: Tensor, iterations: int = 5) -> Tensor:
    """Return P matrices of R rows and C columns with singular values near 1, by Newton-Schulz iteration.

    Source: Jordan et al. 2024, with their coefficients.
    """
    tall = matrices_PRC.shape[1] > matrices_PRC.shape[2]
    x = matrices_PRC.mT if tall else matrices_PRC
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum, with updates as large as AdamW's, so that one learning rate serves both.

    torch.optim.Muon iterates in bf16, one matrix at a time; this one in float32 on a CPU, and all matrices of
    a shape together. `grad_scale` and `found_inf` work as in a fused AdamW.
    Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982) for the size of the update.
    """

    grad_scale: Optional[Tensor] = None
    found_inf: Optional[Tensor] = None
    sharded: Mapping[Tensor, Tensor] = {}  # the parameter whose own rows a parameter is

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        for group in self.param_groups:
            together: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:  # sharded matrices are gathered one at a time
                    key = parameter if parameter in self.sharded else parameter.shape
                    together.setdefault(key, []).append(parameter)
            for parameters in together.values():
                like = self.sharded.get(parameters[0], parameters[0])
                buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                           for p in parameters]
                gradients = [p.grad for p in parameters]
                if self.grad_scale is not None:
                    torch._foreach_div_(gradients, self.grad_scale.to(gradients[0].device))
                self._assign(buffers, (torch.lerp(buffer, gradient, 1 - group["momentum"])
                                       for buffer, gradient in zip(buffers, gradients)))
                updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
                updates = torch.stack([gather_rows(update, like) for update in updates])
                if updates.device.type == "cuda":
                    updates = updates.bfloat16()
                updates = newton_schulz(updates)[:, slice(*own_rows(like))].to(gradients[0]).unbind()
                decay = 1 - group["lr"] * group["weight_decay"]
                lr = group["lr"] * 0.2 * math.sqrt(max(like.shape))
                self._assign(parameters, ((parameter * decay).sub_(update, alpha=lr)
                                          for parameter, update in zip(parameters, updates)))

    def _assign(self, tensors: list[Tensor], values: Iterable[Tensor]) -> None:
        """Give the tensors new values, unless the update is skipped, which only the device knows."""
        skipped = None if self.found_inf is None else self.found_inf.to(tensors[0].device) != 0
        for tensor, value in zip(tensors, values):
            tensor.copy_(value) if skipped is None else torch.where(skipped, tensor, value, out=tensor)


STATE_OF = {torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}  # per parameter


class Optimizer:
    """AdamW, or AdamW with Muon for the blocks' matrices, over the parameters that require gradients.

    Matrices decay, norms do not. Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Of a sharded parameter, an optimizer sees the rank's own rows, as a parameter of their own.
        self.sharded = {nn.Parameter(own(p)): p for p in trained.values() if own(p) is not p}
        own_of = {p: rows for rows, p in self.sharded.items()}
        self.names = {own_of.get(p, p): name for name, p in trained.items()}
        matrices = [p for p in self.names if p.ndim >= 2]
        vectors = [p for p in self.names if p.ndim < 2]
        # AdamW trains the factors of adapters: orthogonalising each does not orthogonalise their product.
        with_muon = [p for p in matrices if config.optimizer == "muon" and self.names[p].startswith("layers.")
                     and not self.names[p].endswith((".lora_A", ".lora_B"))]
        muon_ids = set(map(id, with_muon))
        decaying = [p for p in matrices if id(p) not in muon_ids]
        groups = [{"params": decaying, "weight_decay": config.weight_decay},
                  {"params": vectors, "weight_decay": 0.0}]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate,
                              betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)]
        if with_muon:
            self.parts.append(Muon(with_muon, lr=config.learning_rate, weight_decay=config.weight_decay))
            self.parts[-1].sharded = self.sharded

    def step(self, lr: float, grad_scale: Optional[Tensor] = None,
             found_inf: Optional[Tensor] = None) -> None:
        """Update the parameters, without waiting for the device.

        Args:
            grad_scale: float32 (), divides the gradients first; None = 1.
            found_inf: float32 (), on the device; if it is 1, parameters and state keep their bits.
        """
        for rows, parameter in self.sharded.items():  # fully_shard may have moved them
            rows.data, rows.grad = own(parameter), None if parameter.grad is None else own(parameter.grad)
        if any(rows.device.type == "cpu" for rows in self.sharded):  # with CPU_OFFLOAD the host waits
            grad_scale, found_inf = (each if each is None else each.cpu() for each in (grad_scale, found_inf))
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.grad_scale, part.found_inf = grad_scale, found_inf
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        for part in self.parts:
            part.zero_grad(set_to_none)
        for parameter in self.sharded.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state to save, by `<parameter>.<state>`: the tensors themselves, not copies.

        Of a sharded parameter, it is that of the rank's own rows.
        """
        return {f"{self.names[parameter]}.{key}": value for part in self.parts
                for parameter, state in part.state.items() for key, value in state.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        """Restore the state of a checkpoint; one from before the first update has none.

        Raises:
            CheckpointError: it is another model's; torch would read beyond the end of a smaller tensor.
        """
        if not tensors:
            return
        places = {f"{self.names[p]}.{entry}": (part, p, entry) for part in self.parts
                  for group in part.param_groups for p in group["params"] for entry in STATE_OF[type(part)]}
        found = {key: f"{tensor.dtype} {tuple(tensor.shape)}" for key, tensor in tensors.items()}
        wanted = {key: "torch.float32 ()" if entry == "step" else
                  f"{p.dtype} {tuple(self.sharded.get(p, p).shape)}" for key, (_, p, entry) in places.items()}
        if found != wanted:
            key = min(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
            raise CheckpointError(f"the optimizer's state does not belong to this model: {key} is "
                                  f"{found.get(key, 'missing')}, expected {wanted.get(key, 'nothing')}; "
                                  "use another checkpoint")
        for key, (part, parameter, entry) in places.items():
            # On the parameter's device, where a fused AdamW counts its steps.
            rows = (0, 1) if entry == "step" else own_rows(self.sharded.get(parameter, parameter))
            part.state[parameter][entry] = lazy(tensors[key]).read(*rows).to(parameter.device, copy=True)
            HEARTBEAT.beat()
