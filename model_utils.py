"""Building the model and wrapping it for the hardware: device, dtype, compilation, data parallelism, seeds."""

import os
import random
import shutil
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from chunked_head import HeadFunctions
from config import Config, RunConfig
from errors import SettingsError
from model import Transformer
from numerics import CPU_MULTIPLIES_BF16
from pulse import PULSE
from ranks import Ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(config: RunConfig) -> str:
    """"cuda" or "cpu".

    Raises:
        SettingsError: DEVICE=cuda without a GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("DEVICE=cuda, but torch sees no GPU here; set DEVICE=cpu or auto, or install the CUDA build of torch")
    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def bf16_is_fast(device_type: str) -> bool:
    """Whether the hardware multiplies bf16 natively; a CPU without it is several times slower than in fp32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return CPU_MULTIPLIES_BF16


def choose_dtype(config: RunConfig, device_type: str) -> torch.dtype:
    """The compute dtype of PRECISION on this device.

    Raises:
        SettingsError: PRECISION=fp16 on a CPU.
    """
    if config.precision == "fp16" and device_type == "cpu":
        raise SettingsError("PRECISION=fp16 has no fast kernels on a CPU; use fp32, or bf16")
    if config.precision != "auto":
        return DTYPES[config.precision]
    return torch.bfloat16 if bf16_is_fast(device_type) else torch.float32


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every generator for one step of one rank, so that no generator's state needs saving."""
    entropy = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(entropy) & (2**63 - 1))
    random.seed(int(entropy))
    np.random.seed(int(entropy) & 0xFFFFFFFF)


def build_model(config: Config, vocab_size: int, ranks: Ranks, dtype: torch.dtype) -> Transformer:
    """A Transformer with initial weights that follow from SEED alone, on the rank's device."""
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
    with torch.device("meta"):
        model = Transformer(config, vocab_size, dtype)
    model.to_empty(device=ranks.device)
    model.init_weights(torch.Generator(ranks.device).manual_seed(config.seed))
    return model


def why_not_compile(config: RunConfig, device_type: str) -> Optional[str]:
    """Why torch.compile cannot be used here although it was asked for, or None."""
    if config.debug:
        return "DEBUG=true watches every module, which needs eager execution"
    if device_type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton is not installed"
        compilers = (os.environ.get("CC"), "gcc", "cc", "clang")
    else:
        compilers = (os.environ.get("CXX"), "g++", "clang++")
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return f"no C{'' if device_type == 'cuda' else '++'} compiler was found (install gcc or set COMPILE=false)"
    return None


def compile_where_possible(model: Transformer, config: RunConfig, device_type: str) -> Optional[str]:
    """Compile the model if COMPILE asks for it; returns why that was not possible, or None."""
    reason = why_not_compile(config, device_type) if config.compile else None
    if config.compile and reason is None:
        compile_model(model)
    return reason


def compile_model(model: Transformer) -> None:
    """Compile each block, the final norm and the head's functions in place.

    One compilation serves all blocks, and gradients of a block can be exchanged while earlier ones are computed. With selective
    activation checkpointing the compiler chooses what a block keeps for its backward.
    """
    # A block is compiled once more for each of training and evaluating, with adapters and without, with and without a mask.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    selective = model.config.activation_checkpointing == "selective"
    torch._functorch.config.activation_memory_budget = model.config.activation_memory_budget if selective else 1.0
    for block in model.layers:
        block.compile(fullgraph=True)
    model.norm.compile(fullgraph=True)
    model.head = HeadFunctions(*map(torch.compile, HeadFunctions()))


class GradientWatch:
    """Notes whether this rank's own gradients were finite, before data parallelism mixes them with the others'."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros((), device=device)

    def hook(self, process_group, bucket):
        """DDP's all-reduce, after a look at the bucket."""
        PULSE.waits = True  # until the micro-batch is done
        self.sums += bucket.buffer().sum() * 0
        return allreduce_hook(process_group, bucket)

    def read(self) -> bool:
        """Whether all gradients since the last reading were finite."""
        finite = bool(self.sums.isfinite())
        self.sums.zero_()
        return finite


def wrap_model(model: nn.Module, ranks: Ranks) -> tuple[nn.Module, Optional[GradientWatch]]:
    """The model as the objective calls it: data parallel where there are several ranks."""
    if ranks.world_size == 1:
        return model, None
    parallel = DistributedDataParallel(model, device_ids=[ranks.local_rank] if ranks.device.type == "cuda" else None,
                                       gradient_as_bucket_view=True)
    watch = GradientWatch(ranks.device)
    parallel.register_comm_hook(None, watch.hook)
    return parallel, watch


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients together."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients, whose norm is given, down to `max_norm` where it is above; 0 = never.

    Only for finite gradients: one that is not would spread to all.
    """
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
