"""Building the model and wrapping it for the hardware: device, dtype, compilation, data parallelism, seeds."""

import os
import random
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from checkpoint import hf_format, peft_format, store
from checkpoint.hf_format import from_huggingface, load_model_weights, model_settings_from_huggingface, read_json, vocabulary_rows
from checkpoint.peft_format import refuse_adapters
from checkpoint.resume_rules import MODEL_SHAPE, SETTING_OF, assignments
from common.errors import CheckpointError, SettingsError
from common.heartbeat import HEARTBEAT
from config import Config, ModelConfig, RunConfig
from fused.chunked_head import HeadFunctions
from fused.matmul import CPU_MULTIPLIES_BF16
from model import Transformer, padded
from parallel.collectives import Ranks
from tokenizer import load_tokenizer

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
    HEARTBEAT.is_waiting = True


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


def load_weights(folder: Path, model: Transformer) -> None:
    """Put a folder's weights into the model.

    Raises:
        CheckpointError: they are of another shape than the settings say, or only adapters.
    """
    peft_format.refuse_adapters(folder)
    tensors = hf_format.from_huggingface(hf_format.load_model_weights(folder), model.config, padded(model.vocab_size))
    model.load_state_dict(tensors)


def cut_padding(tensors: dict[str, Tensor], model: Transformer) -> dict[str, Tensor]:
    """The same without the rows of padded ids, which no saved folder shows."""
    rows = padded(model.vocab_size)
    return {name: tensor[:model.vocab_size] if is_vocabulary(name) and tensor.ndim == 2 and len(tensor) == rows else tensor
            for name, tensor in tensors.items()}


def restore_padding(tensors: dict[str, Tensor], model: Transformer) -> dict[str, Tensor]:
    """The inverse of `cut_padding`; padded ids get no gradient, so their state is zero."""
    missing = padded(model.vocab_size) - model.vocab_size
    return {name: nn.functional.pad(tensor, (0, 0, 0, missing)) if is_vocabulary(name) and tensor.ndim == 2 else tensor
            for name, tensor in tensors.items()}


def is_vocabulary(name: str) -> bool:
    """Whether a parameter, or an optimizer's tensor of it, has a row for each id."""
    return name.startswith(hf_format.VOCABULARY)


def transformer_of(tensors: dict[str, Tensor], config: ModelConfig, vocab_size: int,
                   dtype: torch.dtype = torch.float32) -> Transformer:
    """A model around the tensors of a Hugging Face Llama, which keep their own dtype, that computes in the given one."""
    state = from_huggingface(tensors, config, padded(vocab_size))
    with torch.device("meta"):
        model = Transformer(config, vocab_size, dtype)
    model.load_state_dict(state, assign=True)
    return model


def model_config_of(folder: Path) -> ModelConfig:
    """The settings of the Llama in a folder.

    Raises:
        CheckpointError: it has no config.json that describes one.
    """
    content = read_json(folder / "config.json")
    try:
        return ModelConfig(**model_settings_from_huggingface(content))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_model_folder(folder: Path) -> tuple[Transformer, Any]:
    """The folder's model, on the GPU in bf16 where there is one and otherwise in fp32, and its tokenizer.

    Raises:
        CheckpointError: it holds no Llama that can be read, only adapters, or a damaged one.
        DataError: its tokenizer cannot be used.
    """
    refuse_adapters(folder)
    if os.path.exists(folder / store.MANIFEST):
        store.verify(folder)
    config = model_config_of(folder)
    tensors = load_model_weights(folder)
    vocab_size = vocabulary_rows(tensors)
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(f"{folder}: its tokenizer has {tokenizer.vocab_size:,} ids and its model {vocab_size:,}; put the "
                              "model's own tokenizer there")
    on_gpu = torch.cuda.is_available()
    model = transformer_of(tensors, config, vocab_size, torch.bfloat16 if on_gpu else torch.float32)
    return model.float().to("cuda" if on_gpu else "cpu"), tokenizer


def check_model(folder: Path, config: ModelConfig) -> list[str]:
    """Hold the settings against the model in a folder; returns what to warn of.

    Raises:
        CheckpointError: it holds a model of another shape, only adapters, or none.
    """
    refuse_adapters(folder)
    theirs = model_config_of(folder)

    def differing(*names: str) -> dict[str, Any]:
        return {name.upper(): getattr(theirs, name) for name in names if getattr(theirs, name) != getattr(config, name)}

    def shown(others: dict[str, Any]) -> str:
        return "; ".join(f"{SETTING_OF.get(name, name)} is {value} there and {getattr(config, name.lower())} here"
                         for name, value in others.items())

    if others := differing(*map(str.lower, MODEL_SHAPE)):
        raise CheckpointError(f"{folder} holds another model: {shown(others)}. To start from it, {assignments(others)}")
    # The same weights compute something else with these, which is done on purpose to learn longer contexts.
    scaling = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_len") if theirs.rope_scaling_factor else ()
    others = differing("norm_eps", "rope_theta", "rope_scaling_factor", *scaling)
    return [f"the model in {folder} was made with other settings: {shown(others)}"] if others else []
