"""Build a model, compile and wrap it for the hardware, load its weights, and check them against settings."""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from checkpoint import huggingface, store
from checkpoint.model_json import context_of, read_model_json, refuse_adapters
from checkpoint.tensors import LazyTensor
from common.errors import CheckpointError, DataError, SettingsError
from common.text import counted
from config import Config, ModelConfig, RunConfig
from model import Transformer, padded
from model_kernels.matmul import CPU_MULTIPLIES_BF16
from parallel import fsdp
from parallel.fsdp import DeviceMesh
from parallel.process import why_no_kernels
from parallel.ranks import Ranks, collective
from plan.identity import is_beyond
from tokenizer import BaseTokenizer, load_tokenizer

CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # cuBLAS is deterministic only with these
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(config: RunConfig) -> str:
    """Return "cuda", "mps" or "cpu". A torch for ROCm calls AMD's GPUs cuda too."""
    seen = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(name for name in seen if seen[name]) if config.device == "auto" else config.device
    if not seen[device]:
        raise SettingsError(f"DEVICE={device}, but torch sees no such GPU; set it to cpu, or install a torch "
                            f"for {'CUDA or ROCm' if device == 'cuda' else 'Apple silicon'}")
    if device == "cuda" and (reason := why_no_kernels(torch.cuda.get_device_capability(),
                                                      torch.cuda.get_arch_list())):
        raise SettingsError(f"{torch.cuda.get_device_name()}: {reason}")
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU (mps)" if device.type == "mps" else f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def bf16_is_fast(device_type: str) -> bool:
    """Return whether the hardware multiplies bf16 natively. Other CPUs are several times faster in fp32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and CPU_MULTIPLIES_BF16


def choose_dtype(config: RunConfig, device_type: str) -> torch.dtype:
    """Return the compute dtype of PRECISION on this device."""
    if config.precision == "fp16" and device_type == "cpu":
        raise SettingsError("PRECISION=fp16 has no fast kernels on a CPU; use fp32, or bf16")
    if config.precision != "auto":
        return DTYPES[config.precision]
    return torch.bfloat16 if bf16_is_fast(device_type) else torch.float32


def make_deterministic(config: RunConfig, device_type: str) -> None:
    """With DETERMINISTIC or REPRODUCIBLE, let torch use only deterministic CUDA kernels; a CPU's always are.

    With REPRODUCIBLE, a CPU's rank has one thread, because another number may round differently.
    Call it before the first computation. An operation without such a kernel raises an error, which
    `classify_exception` explains. With warn_only, torch's attention would not be deterministic.
    """
    if config.reproducible and device_type == "cpu":
        torch.set_num_threads(1)
    if not (config.deterministic or config.reproducible) or device_type != "cuda":
        return
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        allowed = " or ".join(CUBLAS_WORKSPACES)
        raise SettingsError(f"DETERMINISTIC=true needs CUBLAS_WORKSPACE_CONFIG={allowed} in the environment, "
                            f"but it is {workspace!r}; unset it, or set DETERMINISTIC=false")
    torch.use_deterministic_algorithms(True)  # torch.compile respects it too
    torch.utils.deterministic.fill_uninitialized_memory = False  # only costs time here
    torch.backends.cudnn.deterministic = True


# --------------------------------------------------------------------------------------- building


@collective
def build_model(config: Config, vocab_size: int, ranks: Ranks, dtype: torch.dtype,
                mesh: Optional[DeviceMesh] = None) -> Transformer:
    """Return a Transformer on the rank's device. Its initial weights depend only on SEED, not on sharding."""
    model = model_on_meta(config, vocab_size, dtype)
    matrices = [each for each in model.parameters() if each.ndim > 1 and config.weight_dtype == "bf16"]
    for parameter in matrices:
        parameter.data = parameter.data.to(torch.bfloat16)
    allocate_model(model, config, ranks, mesh)
    for parameter in model.parameters():
        parameter.is_held = True  # unlike what FSDP gathers
    generator = torch.Generator(ranks.device).manual_seed(config.seed)

    @contextmanager
    def full_tensor(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        tensor = torch.empty(parameter.shape, device=ranks.device)  # one at a time
        yield tensor
        fsdp.put(parameter, tensor)

    model.init_weights(generator, full_tensor if fsdp.is_sharded(model) or matrices else nullcontext)
    return model


def model_on_meta(config: ModelConfig, vocab_size: int, dtype: torch.dtype) -> Transformer:
    """Return a Transformer on the meta device, without memory; CheckpointError if it could not be saved."""
    with torch.device("meta"):
        model = Transformer(config, vocab_size, dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: shape for name, shape in config.parameter_shapes(padded(vocab_size)).items()
              if re.sub(r"layers\.\d+\.|\.weight$", "", name) in huggingface.HUGGINGFACE_NAMES}
    if names := [name for name in (*shapes, *stored) if shapes.get(name) != stored.get(name)]:
        raise CheckpointError(
            f"checkpoints cannot store this model ({len(names)} such parameters): {names[0]} is "
            f"{shapes.get(names[0], 'missing')} in model.py and {stored.get(names[0], 'missing')} in the "
            "tables; add it to block_shapes in config.py, and its name to HUGGINGFACE_NAMES in "
            "checkpoint/huggingface.py, or to LINEAR_LAYERS in config.py if it is a linear layer")
    return model


@collective
def make_mesh(config: Config, ranks: Ranks) -> Optional[DeviceMesh]:
    """Return the mesh over which SHARDING divides models, or None."""
    # With REPRODUCIBLE, groups of one rank are not sharded: FSDP would not call the custom reduce-scatter.
    if config.sharding != "none" and (config.ranks_per_copy > 1 or not config.reproducible):
        return fsdp.make_mesh(ranks, config.ranks_per_copy)
    return None


@collective
def allocate_model(model: Transformer, config: Config, ranks: Ranks, mesh: Optional[DeviceMesh] = None
                   ) -> None:
    """Move a model from the meta device to the rank's device; with SHARDING, only the rank's rows of it."""
    mesh = mesh or make_mesh(config, ranks)
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
    if mesh is not None:
        fsdp.shard_model(model, mesh, model.compute_dtype, DTYPES[config.gradient_dtype], config.cpu_offload,
                         config.reproducible)
    if fsdp.is_sharded(model):
        model.to_empty(device="cpu" if config.cpu_offload else ranks.device)
    else:  # to_empty's empty_like of a tensor without memory imports sympy, which takes 0.4 s
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device))
    for parameter in model.parameters():
        if not fsdp.is_divided(parameter):
            parameter.data = parameter.data.to(ranks.device)


# ------------------------------------------------------------------ compilation and data parallelism


def why_not_compile(config: Config, device_type: str) -> Optional[str]:
    """Return why the model is not compiled here, or None if it is."""
    language, compilers = "C++", (os.environ.get("CXX"), "g++", "clang++")
    if device_type == "cuda":
        language, compilers = "C", (os.environ.get("CC"), "gcc", "cc", "clang")
    reason, folder = None, os.path.dirname(torch.__file__)
    if not config.compile:
        reason = "COMPILE=false"
    elif config.debug:
        reason = "DEBUG=true checks every module, which needs eager execution"
    elif device_type == "mps":
        reason = "it is not used on mps, where torch calls it a prototype"
    elif device_type == "cuda" and not (sys.modules.get("triton") or find_spec("triton")):
        reason = "triton is not installed"
    elif device_type == "cpu" and " " in folder and torch.__version__ < (2, 15):  # which does not quote it
        reason = (f"the C++ compiler cannot read {folder}, because its path has a space (move the "
                  "environment)")
    elif not any(compiler and shutil.which(compiler) for compiler in compilers):
        reason = f"no {language} compiler was found (install gcc or set COMPILE=false)"
    elif device_type == "cuda":
        reason = why_no_kernel(device_type)
    if reason and config.activation_checkpointing == "selective":
        raise SettingsError(f"ACTIVATION_CHECKPOINTING=selective needs the compiler, but {reason}; use "
                            "block, or none")
    return reason


@cache
def why_no_kernel(device_type: str) -> Optional[str]:
    """Return why a minimal compiled kernel fails on this device, or None; tested once per process."""
    numbers = torch.arange(8.0, device=device_type)
    try:
        if torch.equal(torch.compile(lambda x: 2 * x + 1)(numbers), 2 * numbers + 1):
            return None
        reason = "its results are wrong"
    except Exception as error:  # compilers and drivers raise errors without a common class
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    if not os.path.exists(os.path.join(sysconfig.get_path("include", "posix_prefix"), "Python.h")):
        reason = "Python.h, which compiling a kernel's launcher needs, is missing: install python3-dev"
    return f"a minimal kernel could not be compiled ({reason}, or set COMPILE=false)"


def compile_where_possible(model: Transformer, config: Config, device_type: str) -> Optional[str]:
    """Compile the model if COMPILE is true; return the reason if that is not possible, else None."""
    if (reason := why_not_compile(config, device_type)) is None:
        compile_model(model)
    return reason if config.compile else None


def compile_model(model: Transformer) -> None:
    """Compile each block, the final norm and the head in place.

    One compilation serves all blocks, and DDP exchanges a block's gradients while earlier ones are computed.
    With selective activation checkpointing, the compiler chooses what a block keeps for its backward.
    """
    # A block is compiled separately for training and evaluation, adapters on and off, a mask or none.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # For DDP, torch would split each block's graph, which then keeps a third more for the backward. Gradients
    # are exchanged during the backward anyway, since blocks are compiled one by one.
    torch._dynamo.config.optimize_ddp = False
    selective = model.config.activation_checkpointing == "selective"
    budget = model.config.activation_memory_budget if selective else 1.0
    torch._functorch.config.activation_memory_budget = budget
    for block in model.layers:
        block.compile(fullgraph=True)
    model.norm.compile(fullgraph=True)
    model.head.compile()


def forced_eager() -> AbstractContextManager:
    if "torch._dynamo" not in sys.modules:  # then nothing is; its import takes 1 s
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


# ---------------------------------------------------------------------- loading and checking weights


def read_parameters(folder: Path, config: ModelConfig, vocab_size: int, finite: bool = True,
                    layers: Optional[int] = None) -> dict[str, LazyTensor]:
    """Return the parameters of a folder's model, perhaps cut to its first layers, with a row for each id."""
    refuse_adapters(folder)
    stored = huggingface.load_model_weights(folder)
    if layers is not None:
        stored = {name: tensor for name, tensor in stored.items() if not is_beyond(name, layers)}
    tensors = huggingface.with_rows(stored, vocab_size)
    return huggingface.from_huggingface(tensors, config, padded(vocab_size), finite)


class Source(NamedTuple):
    """Facts about the folder from which a model's weights were loaded."""

    context: int  # tokens that it reads
    dtype: Optional[str]  # of the first model's weights, for exports; None if they are a run's own
    unused_rows: dict[str, Tensor]  # without a token, of the matrices that are trained beside adapters


def load_weights(folder: Path, model: Transformer, finite: bool = True, layers: Optional[int] = None) -> None:
    """Load a folder's weights, perhaps of the first layers, into the model, which remembers their source."""
    stored, state = huggingface.load_model_weights(folder), store.read_state(folder)
    dtype = str(stored["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    whole = [name for name in huggingface.VOCABULARY if getattr(model.config, "lora_enabled", False)
             and name in dict(model.named_parameters()) and model.get_parameter(name).requires_grad]
    rest = {name: stored[huggingface.huggingface_name(name)] for name in whole}
    model.source = Source(context_of(folder, model.config), state.get("base_dtype") if state else dtype, {
        name: tensor.read(model.vocab_size, tensor.rows) for name, tensor in rest.items()
        if tensor.rows > model.vocab_size})
    for name, tensor in read_parameters(folder, model.config, model.vocab_size, finite, layers).items():
        module = model.get_submodule(name.removesuffix(".weight"))
        getattr(module, "load_base", partial(fsdp.load_rows, module.weight))(tensor.read)


def check_vocabulary(folder: Path, tokenizer: BaseTokenizer, config: Config) -> list[str]:
    """Compare the tokenizer with the model that a run starts from; return messages for the log.

    The tokenizer may have more ids if all of the model's ids mean the same to it.
    """
    rows, ids = huggingface.vocabulary_rows(huggingface.load_model_weights(folder)), tokenizer.vocab_size
    advice = "set TOKENIZER_PATH to the model's tokenizer, or to it with tokens added, and prepare the data"
    if (described := read_model_json(folder / "config.json").get("vocab_size")) != rows:
        raise CheckpointError(f"the model in {folder} has {rows:,} rows of the vocabulary, but vocab_size is "
                              f"{described} in its config.json; correct it")
    own = None
    try:
        own = load_tokenizer(str(folder))
    except DataError as error:
        if rows < ids:
            raise CheckpointError(f"the tokenizer has {ids:,} ids, but the model in {folder} has {rows:,} "
                                  f"and no tokenizer to compare with ({error}); {advice}") from error
    if own and not own.is_same(tokenizer.sha256) and (difference := own.differing_id(tokenizer)):
        number, there, here = difference
        raise CheckpointError(f"the tokenizer has {ids:,} ids, and the model in {folder} has {rows:,}, but "
                              f"the id {number} is {there!r} there and {here!r} here; {advice}")
    if rows >= ids:
        unused = counted(rows - ids, "row")
        return [f"dropping {unused} of the model's vocabulary, without a token"] if rows > ids else []
    place = f"{rows:,} to {ids - 1:,} of the embedding{'' if config.tie_embeddings else ' and of the head'}"
    trained = f"; TRAIN_ONLY={config.train_only} does not train them" if config.train_only else ""
    whole = config.lora_train_embeddings and (config.lora_train_head or config.tie_embeddings)
    if config.lora_enabled and not whole and config.lora_train_tokens != "auto":
        trained = f"; LORA_TRAIN_TOKENS={config.lora_train_tokens} decides which of them are trained"
    return [f"{counted(ids - rows, 'new token')}: rows {place} start as the mean of the others{trained}"]
