"""Parts of scripts/gpu/suite.py that measure a device without training."""

import hashlib
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

# Rows, tokens, query heads, key/value heads, head width.
SHAPES = ((4, 4096, 32, 8, 64), (32, 2048, 12, 4, 64), (4, 4096, 32, 8, 128))
TINY_SHAPES = ((2, 128, 4, 2, 16),)
DOCUMENTS = (1, 8, 64, 512)  # per row
EMPTY = (0, 200)  # empty documents, which pad cu_seqlens
GIB = 2**30
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 6e-3}  # relative to the norm


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtypes(task) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a run may compute in on this device."""
    return (torch.bfloat16, torch.float16, torch.float32) if task.cuda else (torch.bfloat16, torch.float32)


def wait_for_device(task) -> None:
    if task.cuda:
        torch.cuda.synchronize()


def seconds_per_call(task, function: Callable[[], object]) -> float:
    repeats, warmup = (10, 3) if task.cuda else (2, 1)
    for _ in range(warmup):
        function()
    wait_for_device(task)
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    wait_for_device(task)
    return (time.perf_counter() - started) / repeats


def probe(task) -> None:
    """Measure matmuls and copies, which bound the speed of a run, and check the compiler."""
    from config import Config
    from model_utils import why_not_compile

    size = 256 if task.tiny else 8192
    for dtype in dtypes(task):
        a, b = (torch.randn(size, size, device=task.device, dtype=dtype) for _ in range(2))
        seconds = seconds_per_call(task, partial(torch.matmul, a, b))
        task.figure(f"matmul {size}^3 {name_of(dtype)} TFLOP/s", round(2 * size**3 / seconds / 1e12, 3))
    source = torch.empty(2**20 if task.tiny else 2**30, device=task.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = seconds_per_call(task, partial(target.copy_, source))
    task.figure("copy TB/s", round(2 * source.nbytes / seconds / 1e12, 3))
    if task.cuda:
        for kind in ("pageable", "pinned"):
            host = torch.empty(2**29, dtype=torch.bfloat16, pin_memory=kind == "pinned")
            seconds = seconds_per_call(task, partial(host.copy_, source[:2**29]))
            task.figure(f"to the host, {kind}, GB/s", round(host.nbytes / seconds / 1e9, 1))

    reason = why_not_compile(Config(), task.device)
    task.check("compiler", reason is None, reason or "found")
    if task.cuda:
        started = time.perf_counter()
        with task.attempt("a compiled kernel"):
            compiled = torch.compile(lambda x: (x.float() * 2 + 1).to(x.dtype).sum(-1))
            x = torch.randn(64, 64, device=task.device)
            correct = torch.allclose(compiled(x), (x * 2 + 1).sum(-1))
            task.check("a compiled kernel, s", correct, round(time.perf_counter() - started, 1))


def random_heads(shape: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return q_BTNH, k_BTKH and v_BTKH that require gradients, with the same values on each device."""
    rows, length, n_heads, n_kv_heads, width = shape
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, length, n, width, generator=generator).to(device, dtype).requires_grad_()
            for n in (n_heads, n_kv_heads, n_kv_heads)]


def make_spans(rows: int, length: int, documents: int, empty: int, device: str):
    """Return the spans of documents of nearly equal length in each row, then of empty ones."""
    from fused.attention import Spans

    starts = [row * length + document * length // documents
              for row in range(rows) for document in range(documents)]
    borders = torch.tensor(starts + [rows * length] * (1 + empty), dtype=torch.int32)
    return Spans(borders, torch.empty(int(borders.diff().max()), 0)).to(torch.device(device))


def tflops(task, attend: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> float:
    seconds = seconds_per_call(task, lambda: torch.autograd.grad(attend(*inputs).sum(), inputs))
    return round(flops / seconds / 1e12, 3)


def attention(task) -> None:
    """Test and time each attention kernel, and record which ones are chosen."""
    from config import Config
    from fused import attention as kernels

    device, shapes = torch.device(task.device), TINY_SHAPES if task.tiny else SHAPES
    config = Config(dim=512, n_heads=8, n_kv_heads=2)
    for dtype, purpose in product(dtypes(task), ("causal", "documents", "mask")):
        name = f"chosen for {purpose} in {name_of(dtype)}"
        with task.attempt(name):
            task.figure(name, kernels.choose_kernel(purpose, config, device, dtype))
    half = torch.bfloat16, torch.float16
    for dtype, kernel, count, empty in product(half, kernels.VARLEN, DOCUMENTS, EMPTY):
        if task.cuda and kernels.trial(kernel, "documents", shapes[0][2:], device, dtype) is None:
            check_documents(task, kernel, dtype, count, empty)

    # Speed, causal and then with documents.
    for shape in shapes:
        rows, length, n_heads, n_kv_heads, width = shape
        inputs = random_heads(shape, task.device, torch.bfloat16 if task.cuda else torch.float32)
        label = f"B{rows} T{length} N{n_heads}/{n_kv_heads} H{width}"
        flops = 3.5 * 4 * rows * n_heads * length**2 * width / 2  # causal, forward and backward
        rates: dict[str, float | str] = {}
        for kernel in kernels.KERNELS:
            if reason := kernels.trial(kernel, "causal", shape[2:], device, inputs[0].dtype):
                rates[kernel] = reason
            elif kernel == "flash-3" or kernel not in kernels.VARLEN:
                with task.attempt(f"{label} {kernel}"):
                    rates[kernel] = tflops(task, partial(kernels.attend, kernel), inputs, flops)
            if kernel == "flash-3":
                kernels.activate_flash_3(False)
        task.figure(f"causal {label}, TFLOP/s", rates)
        if task.cuda:
            measure_documents(task, shape, inputs, label)


def check_documents(task, kernel: str, dtype: torch.dtype, count: int, empty: int) -> None:
    """Compare a kernel's output and gradients with those of the math kernel in float32 with a mask."""
    from fused import attention as kernels

    shape = rows, length, *_ = (2, 1024, 8, 2, 64)
    inputs = random_heads(shape, task.device, dtype)
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(task.device)
    exact = [heads.detach().float().requires_grad_() for heads in inputs]

    def output_and_gradients(heads: list[Tensor], output: Tensor) -> list[Tensor]:
        return [output, *torch.autograd.grad((output.float() * weights).sum(), heads)]

    name = f"{kernel}, {name_of(dtype)}, {count} documents a row, {empty} empty"
    with task.attempt(name):
        spans = make_spans(rows, length, count, empty, task.device)
        actual = output_and_gradients(inputs, kernels.attend(kernel, *inputs, None, spans))
        number_T = torch.zeros(length, dtype=torch.int64)
        for document in range(count):
            number_T[document * length // count:] = document
        mask_TT = (number_T[:, None] == number_T) & torch.ones(length, length, dtype=torch.bool).tril()
        mask_B1TT = mask_TT.expand(rows, 1, -1, -1).to(task.device)
        expected = output_and_gradients(exact, kernels.attend("math", *exact, mask_B1TT))
        difference = max(float((one.float() - other).norm() / other.norm())
                         for one, other in zip(actual, expected, strict=True))
        task.check(f"{name}: difference", difference <= ALLOWED[dtype], difference)
    if kernel == "flash-3":
        kernels.activate_flash_3(False)


def measure_documents(task, shape: Sequence[int], inputs: list[Tensor], label: str) -> None:
    """Measure each kernel's TFLOP/s by the number of documents per row; masked positions are not counted."""
    from fused import attention as kernels

    rows, length, n_heads, _, width = shape
    device, dtype = inputs[0].device, inputs[0].dtype
    for kernel in kernels.VARLEN:
        if kernels.trial(kernel, "documents", shape[2:], device, dtype) is not None:
            continue
        rates: dict[str, float] = {}
        for count in DOCUMENTS:
            spans = make_spans(rows, length, count, 63, task.device)
            flops = 3.5 * 4 * n_heads * width * float(spans.cu_seqlens.diff().double().square().sum()) / 2
            whole_row = spans._replace(longest=torch.empty(length, 0))  # a grid that is larger than necessary
            for name, each in ((str(count), spans), (f"{count}, grid of {length}", whole_row)):
                with task.attempt(f"{kernel}, {name} documents"):
                    rates[name] = tflops(task, partial(kernels.attend, kernel, spans=each), inputs, flops)
        task.figure(f"documents {label} {kernel}, TFLOP/s by documents per row", rates)
        if kernel == "flash-3":
            kernels.activate_flash_3(False)


def random_model(task):
    from config import Config
    from model_utils import build_model, choose_dtype
    from parallel.ranks import Ranks

    shape = dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, max_seq_len=4096)
    if task.tiny:
        shape = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    config, vocab = Config(**shape, device=task.device), 512 if task.tiny else 128_256
    ranks = Ranks(device=torch.device(task.device, 0) if task.cuda else torch.device("cpu"))
    return build_model(config, vocab, ranks, choose_dtype(config, task.device)), config, vocab, ranks


BLOCK, SHARDED = {"activation_checkpointing": "block"}, {"sharding": "full"}
FORECAST = {"default": {}, "recomputed": BLOCK, "eager, recomputed": BLOCK | {"compile": False},
            "selective": {"activation_checkpointing": "selective"}, "sharded": SHARDED,
            "sharded, recomputed": SHARDED | BLOCK, "sharded, on the host": SHARDED | {"cpu_offload": True},
            "adapters": {"lora_enabled": True}}


def memory(task) -> None:
    """Compare --check's forecast with the memory of a step on a GPU, for each layout in a new process."""
    if task.layout:
        return measure_layout(task, task.layout)
    for layout in [*FORECAST][::4] if task.tiny else FORECAST:
        code, output = task.run_part("memory", "--layout", layout)
        task.check(f"{layout}, exit code", code == 0, code)
    figures = task.figures()
    shares = [figures[layout]["USABLE"] for layout in FORECAST if "USABLE" in figures.get(layout, ())]
    if shares:  # the value for observe.check.USABLE
        task.figure("USABLE", min(shares))


def measure_layout(task, layout: str) -> None:
    """Record the forecast for one layout, and the memory that torch and NVML report for two steps."""
    from config import Config
    from learn.cost import estimate_memory, with_head_chunk
    from model_utils import choose_dtype

    vocab, length, shape = 128_256, 4096, dict(dim=2048, n_layers=8, n_heads=32, n_kv_heads=8, ffn_dim=8192)
    if task.tiny:
        vocab, length, shape = 512, 64, dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    config = Config(**shape | {"device": task.device, "compile": task.cuda, "max_seq_len": length,
                               "micro_batch_size": 2, "total_batch_size": 4 * length,
                               "document_mask": False} | FORECAST[layout])
    before = used_memory() if task.cuda else {}  # used by the driver and others: CUDA has not started yet
    dtype = choose_dtype(config, task.device)
    if task.cuda:  # as a run does
        total = torch.cuda.get_device_properties(0).total_memory
        config = with_head_chunk(config, vocab, dtype.itemsize, total)
    forecast = estimate_memory(config, vocab, dtype.itemsize, task.device).total
    figures = {"forecast GiB": forecast / GIB}
    try:
        allocated = peak_of_a_step(task, config, vocab, dtype)
        if task.cuda:
            gpu, reserved = torch.cuda.get_device_properties(0), torch.cuda.memory_reserved()
            uuid = f"GPU-{gpu.uuid}"
            context = used_memory()[uuid] - before[uuid] - reserved
            # What torch reserves grows with the forecast; CUDA's context does not.
            usable = (gpu.total_memory - context) / gpu.total_memory * forecast / reserved
            figures |= {"allocated GiB": allocated / GIB, "reserved GiB": reserved / GIB,
                        "context GiB": context / GIB, "USABLE": usable}
    finally:
        task.figure(layout, {name: round(value, 3) for name, value in figures.items()})
    if task.cuda:
        off = 100 * (forecast / allocated - 1)
        task.check(f"{layout}, forecast off by %", abs(off) < 10, round(off, 1))


def used_memory() -> dict[str, int]:
    from parallel.process import read_gpus

    return {gpu.uuid: gpu.used for gpu in read_gpus()}


def peak_of_a_step(task, config, vocab: int, dtype: torch.dtype) -> int:
    """Return the peak memory of the second of two steps; 0 on a CPU."""
    import lora
    import model_utils
    from dataloaders import Batch
    from learn.objectives import NextToken
    from learn.optim import Optimizer, Reducer, clip_scale
    from parallel.fsdp import local_rows
    from parallel.ranks import Ranks

    device = torch.device(task.device, 0) if task.cuda else torch.device("cpu")
    model = model_utils.model_on_meta(config, vocab, dtype)
    if config.lora_enabled:
        lora.add_adapters(model, config, torch.Generator())
        lora.cast_base(model, dtype)
    model_utils.allocate_model(model, config, Ranks(device=device))
    for parameter in model.parameters():
        local_rows(parameter).detach().zero_()
    optimizer, reducer = Optimizer(model, config), Reducer(model, Ranks(device=device), config)
    model_utils.compile_where_possible(model, config, task.device)
    tokens = torch.zeros(config.micro_batch_size, config.max_seq_len, dtype=torch.int64, device=device)
    for _ in range(2):
        if task.cuda:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        for number in range(1, config.accumulation_steps + 1):
            with reducer.add(0, is_last=number == config.accumulation_steps):
                NextToken().loss_sum(model, Batch(tokens, tokens)).total.backward()
        scale = clip_scale(reducer.norm(), 1.0)
        optimizer.step(0.0, scale, torch.zeros((), device=device))
    return torch.cuda.max_memory_allocated() if task.cuda else 0


def timed(task, name: str, function: Callable[[], object], size: int = 0):
    wait_for_device(task)
    started = time.perf_counter()
    result = function()
    wait_for_device(task)
    seconds = time.perf_counter() - started
    task.figure(f"{name}, s", round(seconds, 3))
    if size:
        task.figure(f"{name}, GB/s", round(size / seconds / 1e9, 2))
    return result


def checkpoint(task) -> None:
    """Measure the parts of saving (copy, hash, file), a whole save, and loading."""
    from safetensors.torch import load_file, save_file

    from checkpoint import store
    from checkpoint.tensors import TensorFile, write_files
    from learn.optim import Optimizer

    model, config, _, ranks = random_model(task)
    optimizer = Optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0)
    optimizer.zero_grad()
    folder = task.runs / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights, states = model.state_dict(), optimizer.state_tensors()
    size = sum(tensor.nbytes for tensor in weights.values())
    task.figure("bytes", size + sum(tensor.nbytes for tensor in states.values()))

    def to_host() -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in weights.items()}

    def write(folder: Path) -> dict[str, dict]:
        save_file(to_host(), folder / "model.safetensors")
        return write_files(folder, {store.OPTIMIZER: TensorFile(states)})

    clock, file = partial(timed, task), folder / "weights.safetensors"
    host = clock("copy of the weights", to_host, size)
    clock("SHA-256 of the weights", lambda: [hashlib.sha256(value.numpy()) for value in host.values()], size)
    clock("write of the weights", lambda: save_file(host, file), size)
    clock("load of the weights", lambda: [value.to(ranks.device) for value in load_file(file).values()], size)
    file.unlink()
    saved, manifest = folder / "step-00000001", {"step": 1, "world_size": 1, "val_loss": None}
    clock("whole save", partial(store.publish, saved, write, manifest))
    clock("verify", partial(store.verify, saved))
    clock("load of the optimizer", lambda: optimizer.load_state_tensors(store.read_optimizer(saved)))
    shutil.rmtree(folder)


def decode(task) -> None:
    """Generate as a run does: weights rounded for each token, once, with CUDA graphs; the same tokens."""
    from inference.engine import Batch
    from inference.generate import generate
    from inference.weights import packed_weights

    model, _, vocab, _ = random_model(task)
    new, rng, written = (24 if task.tiny else 160), random.Random(0), {}
    for rows in (1, 16):
        prompts = [[rng.randrange(vocab) for _ in range(20 if task.tiny else 200)] for _ in range(rows)]
        for name, packing, Batch.captures in (("rounded for each token", nullcontext(), False),
                                              ("rounded once", packed_weights(model), False),
                                              ("rounded once, graphs", packed_weights(model), True)):
            with packing:
                generate(model, prompts, 2)
                started = time.perf_counter()
                written[name] = generate(model, prompts, new)
                seconds = time.perf_counter() - started
            task.figure(f"{rows} rows, {name}: tokens/s", round(rows * new / seconds, 1))
        every, once, graphs = written.values()
        task.check(f"{rows} rows: same tokens with graphs", graphs == once, graphs == once)
        task.check(f"{rows} rows: graphs did not fail", Batch.captures, Batch.captures)
        same = every == once  # not on a CPU, where the matrices are packed
        task.check(f"{rows} rows: same tokens when rounded once", same or not task.cuda, same)


def hellaswag(task) -> None:
    """Score random items with lengths like HellaSwag's, twice."""
    from fused.head import IGNORE_INDEX
    from hellaswag_utils import Task, evaluate_batches
    from model import SHARED_PREFIX

    model, config, vocab, ranks = random_model(task)
    rng = random.Random(0)

    def random_item(_: int) -> Task:
        context, endings = rng.randint(20, 90), [rng.randint(8, 45) for _ in range(4)]
        tokens = [rng.randrange(vocab) for _ in range(context + sum(endings))]
        targets, documents = [IGNORE_INDEX] * context, [SHARED_PREFIX] * context
        for number, length in enumerate(endings, SHARED_PREFIX + 1):
            targets += [rng.randrange(vocab) for _ in range(length)]
            documents += [number] * length
        tensors = (torch.tensor(values, dtype=torch.int32) for values in (tokens, documents, targets))
        return Task(*tensors, endings, [4 * length for length in endings], rng.randrange(4))

    items = [*map(random_item, range(20 if task.tiny else 500))]
    task.figure("items", len(items))

    def score() -> list[int]:
        batches = evaluate_batches(model, items, device=ranks.device,
                                   batch_tokens=config.hellaswag_batch_tokens)
        return [index for indices, _ in batches for index in indices]

    for name in ("cold", "warm"):
        scored = timed(task, name, score)
    task.check("items scored", sorted(scored) == [*range(len(items))], len(scored))
    if task.cuda:
        task.figure("peak memory GiB", round(torch.cuda.max_memory_allocated() / GIB, 2))
