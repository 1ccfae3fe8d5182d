"""Building the model and wrapping it for the hardware: device, dtype, compilation, data parallelism, seeds."""

import os
import random
import shutil
import sysconfig
from functools import cache
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from chunked_head import HeadFunctions
from config import Config, RunConfig
from errors import SettingsError
from model import Transformer
from numerics import CPU_MULTIPLIES_BF16
from pulse import PULSE
from ranks import Ranks

CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # with which it is deterministic
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(config: RunConfig) -> str:
    """"cuda" or "cpu".

    Raises:
        SettingsError: DEVICE=cuda without a GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("DEVICE=cuda, but torch sees no GPU here; set DEVICE=cpu or auto, or install the CUDA build of torch")
    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def make_deterministic(config: RunConfig, device_type: str) -> None:
    """With DETERMINISTIC=true, have torch take kernels that give the same bits each time. To be called before anything is
    computed on CUDA; a CPU gives the same bits anyway.

    An operation that has no such kernel raises an error from then on, which `ranks.explain` tells. If it only warned, torch's
    attention would not be deterministic either.

    Raises:
        SettingsError: the environment denies cuBLAS the workspace for it.
    """
    if not config.deterministic or device_type != "cuda":
        return
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise SettingsError(f"DETERMINISTIC=true needs CUBLAS_WORKSPACE_CONFIG={' or '.join(CUBLAS_WORKSPACES)} in the "
                            f"environment, where it is {workspace!r}; leave it out, or set DETERMINISTIC=false")
    torch.use_deterministic_algorithms(True)  # the compiler heeds it too
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would only take time
    torch.backends.cudnn.deterministic = True


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
    return why_no_kernel(device_type) if device_type == "cuda" else None


@cache
def why_no_kernel(device_type: str) -> Optional[str]:
    """Why the smallest compiled kernel fails on this device, or None; tried once."""
    numbers = torch.arange(8.0, device=device_type)
    try:
        if torch.equal(torch.compile(lambda x: 2 * x + 1)(numbers), 2 * numbers + 1):
            return None
        reason = "it gives wrong numbers"
    except Exception as error:  # what compilers and drivers raise has no class in common
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    if not os.path.exists(os.path.join(sysconfig.get_path("include", "posix_prefix"), "Python.h")):
        reason = "Python.h, which a kernel's launcher is compiled with, is missing: install python3-dev"
    return f"a first small kernel could not be compiled ({reason}, or set COMPILE=false)"


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


def wrap_model(model: nn.Module, ranks: Ranks, gradient_dtype: str = "fp32") -> nn.Module:
    """The model as the objective calls it: data parallel where there are several ranks, which exchange gradients in this dtype.

    Without `device_ids` nothing is moved to the GPU that a batch has on the CPU.
    """
    if ranks.world_size == 1:
        return model
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if gradient_dtype == "bf16":
        parallel.register_comm_hook(None, exchange_in_bf16)
    # A backward ends with the first of the parameters, or nearly so: then it waits for the other ranks' gradients.
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    first.register_post_accumulate_grad_hook(note_wait)
    return parallel


def note_wait(parameter) -> None:
    """Say that this rank has its own gradients, until it moves on."""
    PULSE.waits = True


def exchange_in_bf16(process_group, bucket):
    """torch's hook, which DDP refuses by its name where ranks speak gloo, although it works there."""
    return bf16_compress_hook(process_group, bucket)


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients together."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def clip_scale(norm: Tensor, max_norm: float) -> Optional[Tensor]:
    """What gradients of this norm are to be divided by, so that it is `max_norm` at most; None where that is 0 = never.

    1 where the norm is not finite: a bad gradient must not spread to all.
    """
    if max_norm == 0:
        return None
    return torch.where(norm.isfinite(), ((norm + 1e-6) / max_norm).clamp(min=1), 1)
