"""The memory of a training step, traced with fake tensors and ranks for a model of any size: the reference of the forecast.

The model, sharding, objective and optimizer of a real run take one rank's step on shapes instead of numbers:
two micro-batches (more need no additional memory), gradient norm, clipping and update.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import lora
from checkpoint.schema import Progress
from config import Config, ModelConfig
from dataloaders import Batch
from extensions.distillation import Distillation, LlamaTeacher
from extensions.forecast import probe_objective
from extensions.online import GRPO
from extensions.reproducible import ReproducibleReducer
from extensions.rounding import RoundingReducer
from learn.objectives import Objective, frozen_logprobs, reference_is_live, token_logprobs
from learn.optim import Optimizer, Reducer, clip_scale
from model import Transformer
from model_kernels import matmul
from parallel.fsdp import local_rows, make_mesh, shard_model
from parallel.ranks import Ranks


class Traced(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int  # teacher or reference
    peak: int


class Tracker(MemTracker):
    """Tracks memory without reports by module, which would require gradients of frozen parameters."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda self, *_: None


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group in which only rank 0, this process, exists."""
    multiplies, pin = matmul.CPU_MULTIPLIES_BF16, torch.Tensor.pin_memory
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    matmul.CPU_MULTIPLIES_BF16 = True  # as a GPU does
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # for CPU_OFFLOAD; fake tensors cannot be pinned
    try:
        yield
    finally:
        matmul.CPU_MULTIPLIES_BF16, torch.Tensor.pin_memory = multiplies, pin
        dist.destroy_process_group()


def nbytes(tensors: Iterable[Any]) -> int:
    return sum(local_rows(tensor).nbytes for tensor in tensors if tensor is not None)


def build(config: Config, vocab_size: int, dtype: torch.dtype, teacher: Optional[ModelConfig],
          mesh) -> tuple[Transformer, Optional[Transformer], Objective]:
    """Return the model, the frozen model (or None) and the objective, as a run builds them."""
    model, frozen = Transformer(config, vocab_size, dtype), None
    for parameter in model.parameters():
        if config.weight_dtype == "bf16" and parameter.ndim > 1:
            parameter.data, parameter.is_held = parameter.data.bfloat16(), True
    if config.lora_enabled:
        lora.add_adapters(model, config, torch.Generator())
        lora.cast_base(model, dtype)
    if teacher:
        frozen = Transformer(teacher, vocab_size, dtype)
        objective = Distillation(config, LlamaTeacher(frozen, vocab_size))
    else:
        if reference_is_live(config) and not config.lora_enabled:
            frozen = Transformer(config, vocab_size, dtype).eval()
        if config.training_stage == "grpo":
            reference = partial(frozen_logprobs, frozen or model, compute=token_logprobs) if config.grpo_beta else None
            objective = GRPO(config, reference=reference)
        else:
            objective = probe_objective(config, frozen or model)
    if frozen:
        lora.cast_base(frozen.requires_grad_(False), dtype)
    if mesh:
        for each in [model] if teacher or frozen is None else [model, frozen]:
            shard_model(each, mesh, dtype, offload=config.cpu_offload, reproducible=config.reproducible)
    return model, frozen, objective


def trace(config: Config, vocab_size: int, dtype: torch.dtype,
          teacher: Optional[ModelConfig] = None) -> Traced:
    """Trace a step of rank 0 on fake tensors; the optimizer state exists from the start."""
    with fake_ranks(config.world_size):
        ranks = Ranks(rank=0, world_size=config.world_size, device=torch.device("cpu"))
        mesh = make_mesh(ranks, config.ranks_per_copy) if config.sharding != "none" else None
        with FakeTensorMode():
            model, frozen, objective = build(config, vocab_size, dtype, teacher, mesh)
            optimizer = Optimizer(model, config, ranks)
            trained = [p for p in model.parameters() if p.requires_grad]
            for parameter in trained:  # an earlier step creates the optimizer state
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(config.learning_rate)
            if mesh or config.world_size == 1:  # DDP's buckets keep the gradients
                optimizer.zero_grad()
            tracker = Tracker()
            tracker.track_external(model, *map(local_rows, optimizer.state_tensors().values()), *([frozen] if frozen else []))
            shape, ids_BT = (config.micro_batch_size, config.max_seq_len), None
            tokens_BT = torch.zeros(shape, dtype=torch.int64)
            stored = {"advantage_BT": torch.zeros(shape), "length_BT": torch.ones(shape)}  # for GRPO
            if config.document_mask and config.training_stage != "grpo" or config.training_stage == "dpo":
                # One document or pair in each row; the host reads these two values.
                ids_BT = torch.ones_like(tokens_BT, dtype=torch.int32)
                ids_BT.min, ids_BT.max = lambda: 1, lambda: 2
            micro_batches, units = min(2, config.accumulation_steps), torch.ones((), dtype=torch.float64)
            reducer = (RoundingReducer if config.special_update else Reducer)(model, Ranks(), config, optimizer)
            with tracker:
                if config.reproducible:
                    reducer = ReproducibleReducer(model, ranks, config)
                if config.reproducible or config.special_update:
                    reducer.begin(units, Progress(0))
                for number in range(1, micro_batches + 1):
                    with reducer.add(0, is_last=number == micro_batches):
                        batch = Batch(tokens_BT, tokens_BT, ids_BT, stored={**stored})
                        objective.loss_sum(model, batch).total.backward()
                if config.reproducible:
                    reducer.reduce(units)
                gradients = nbytes(parameter.grad for parameter in trained)
                scale = clip_scale(reducer.norm(), config.max_grad_norm)
                # The host of a CPU reads whether the rounded update is skipped, which fake tensors do not know.
                optimizer.step(config.learning_rate, scale, None if config.special_update else torch.zeros(()))
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
            return Traced(nbytes(model.parameters()), gradients, nbytes(optimizer.state_tensors().values()),
                          nbytes(frozen.parameters()) if frozen else 0, peak)
