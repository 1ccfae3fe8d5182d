"""Parts of scripts/gpu/suite.py that measure a device without training."""

import importlib.util
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product

import torch
from torch import Tensor

# Rows, tokens, query heads, key/value heads, head width.
SHAPES = ((4, 4096, 32, 8, 64), (32, 2048, 12, 4, 64), (4, 4096, 32, 8, 128))
TINY_SHAPES = ((2, 128, 4, 2, 16),)
DOCUMENTS = (1, 8, 64, 512)  # per row
GIB = 2**30


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


def kernels(task) -> None:
    """Record the attention kernel that a run chooses for each purpose, and why not those before it."""
    from config import Config
    from model_kernels import attention
    from model_utils import choose_dtype

    device, config = torch.device(task.device), Config(dim=2048, n_heads=32, n_kv_heads=8)
    capability = torch.cuda.get_device_capability() if task.cuda else None
    dtype = choose_dtype(config, task.device)
    for purpose in attention.ORDERS:
        for kernel in attention.kernel_order(purpose, capability, dtype, config.head_dim):
            reason = attention.trial(kernel, purpose, (32, 8, 64), device, dtype)
            task.figure(f"{kernel} for {purpose} in {name_of(dtype)}", reason or "chosen")
            if reason is None:
                break


def probe(task) -> None:
    """Measure matmuls, copies and attention, which bound the speed of a run, and check the compiler."""
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
    task.figure("compiler", reason or "found")
    if task.cuda and reason is None:
        started = time.perf_counter()
        with task.attempt("a compiled kernel"):
            compiled = torch.compile(lambda x: (x.float() * 2 + 1).to(x.dtype).sum(-1))
            x = torch.randn(64, 64, device=task.device)
            correct = torch.allclose(compiled(x), (x * 2 + 1).sum(-1))
            task.check("a compiled kernel, s", correct, round(time.perf_counter() - started, 1))
    measure_shape(task, (TINY_SHAPES if task.tiny else SHAPES)[0])


def random_heads(shape: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return q_BTNH, k_BTKH and v_BTKH that require gradients, with the same values on each device."""
    rows, length, n_heads, n_kv_heads, width = shape
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, length, n, width, generator=generator).to(device, dtype).requires_grad_()
            for n in (n_heads, n_kv_heads, n_kv_heads)]


def make_spans(rows: int, length: int, documents: int, device: str, multiple: int):
    """Return the spans of documents of nearly equal length in each row."""
    from model_kernels.attention import compute_spans

    numbers_T = torch.arange(length) * documents // length + 1
    return compute_spans(numbers_T.expand(rows, -1).contiguous(), multiple).to(torch.device(device))


def tflops(task, attend: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> float:
    seconds = seconds_per_call(task, lambda: torch.autograd.grad(attend(*inputs).sum(), inputs))
    return round(flops / seconds / 1e12, 3)


def attention(task) -> None:
    for shape in TINY_SHAPES if task.tiny else SHAPES:
        measure_shape(task, shape)


def measure_shape(task, shape: Sequence[int]) -> None:
    """Measure each attention kernel's TFLOP/s, causal and then with documents."""
    from model_kernels import attention as kernels

    rows, length, n_heads, n_kv_heads, width = shape
    inputs = random_heads(shape, task.device, torch.bfloat16 if task.cuda else torch.float32)
    label = f"B{rows} T{length} N{n_heads}/{n_kv_heads} H{width}"
    flops = 3.5 * 4 * rows * n_heads * length**2 * width / 2  # causal, forward and backward
    rates: dict[str, float | str] = {}
    for kernel in kernels.KERNELS:
        if reason := kernels.trial(kernel, "causal", shape[2:], inputs[0].device, inputs[0].dtype):
            rates[kernel] = reason
        elif kernel == "flash-3" or not kernels.KERNELS[kernel].takes_spans:
            with task.attempt(f"{label} {kernel}"):
                rates[kernel] = tflops(task, partial(kernels.attend, kernel), inputs, flops)
        if kernel == "flash-3":
            kernels.activate_flash_3(False)
    task.figure(f"causal {label}, TFLOP/s", rates)
    if task.cuda:
        measure_documents(task, shape, inputs, label)


def measure_documents(task, shape: Sequence[int], inputs: list[Tensor], label: str) -> None:
    """Measure each kernel's TFLOP/s by the number of documents per row; masked positions are not counted."""
    from model_kernels import attention as kernels

    rows, length, n_heads, _, width = shape
    device, dtype = inputs[0].device, inputs[0].dtype
    for kernel in [name for name, each in kernels.KERNELS.items() if each.takes_spans]:
        if kernels.trial(kernel, "documents", shape[2:], device, dtype) is not None:
            continue
        rates: dict[str, float] = {}
        for count in DOCUMENTS:
            spans = make_spans(rows, length, count, task.device, kernels.KERNELS[kernel].takes_spans)
            flops = 3.5 * 4 * n_heads * width * float(spans.cu_seqlens.diff().double().square().sum()) / 2
            whole_row = spans._replace(longest=torch.empty(length, 0))  # a grid that is larger than necessary
            for name, each in ((str(count), spans), (f"{count}, grid of {length}", whole_row)):
                with task.attempt(f"{kernel}, {name} documents"):
                    rates[name] = tflops(task, partial(kernels.attend, kernel, spans=each), inputs, flops)
        task.figure(f"documents {label} {kernel}, TFLOP/s by documents per row", rates)
        if kernel == "flash-3":
            kernels.activate_flash_3(False)


# Parity; tests/system/gpu/test_gpu.py uses the same model and batch.

VOCAB, ROWS, LENGTH = 500, 3, 192  # the vocabulary is padded to 512 inside
SHAPE = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 384, "init_std": 0.06,
         "tf32": False}
# Tolerances relative to the norm of each gradient; those of the loss are ten times smaller.
APART = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def random_tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))


def documents(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return rows with one document, with many, and with a last document of one token."""
    document_ids_BT = torch.ones(rows, length, dtype=torch.int32)
    document_ids_BT[1] = torch.arange(length) // 7 + 1
    document_ids_BT[2, -1] = 2
    return document_ids_BT


def batch_on(device: torch.device, document_ids_BT: Tensor | None):
    from dataloaders import Batch

    ids = random_tokens()
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids_BT).to(device)


def model_on(device: torch.device, dtype: torch.dtype = torch.float32, **settings):
    """Return a model with the same weights on every device."""
    from config import Config
    from model_utils import build_model
    from parallel.ranks import Ranks

    model = build_model(Config(**{**SHAPE, **settings}), VOCAB, Ranks(device=device), dtype)
    generator = torch.Generator().manual_seed(1)
    model.load_state_dict({
        name: 0.06 * torch.randn(value.shape, generator=generator) if value.ndim > 1 else
        0.5 + torch.rand(value.shape, generator=generator)
        for name, value in sorted(model.state_dict().items())})
    return model


def learned(model, batch) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss, and the gradients on the CPU in float64; the model may be wrapped in DDP."""
    model.zero_grad()
    logprob = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, mode="sum")
    loss = -logprob / batch.targets_BT.numel()
    loss.backward()
    return float(loss.detach()), {name.removeprefix("module."): parameter.grad.double().cpu()
                                  for name, parameter in model.named_parameters()}


def distance(one, other) -> float:
    """Return the largest distance: of a gradient relative to its norm, or ten times that of the losses."""
    apart = [float((one[1][name] - value).norm() / value.norm()) for name, value in other[1].items()]
    return max(10 * abs(one[0] - other[0]) / abs(other[0]), *apart)


def parity(task) -> None:
    """Compare losses and gradients in each dtype, eager and compiled, with a CPU's in float32."""
    from config import Config
    from model_utils import compile_model, why_not_compile

    cpu, device = torch.device("cpu"), torch.device("cuda", 0) if task.cuda else torch.device("cpu")
    model = model_on(cpu, attention_backend="math")
    expected = learned(model, batch_on(cpu, documents()))
    modes = (False, True) if why_not_compile(Config(), task.device) is None else (False,)
    for dtype, compiled in product(dtypes(task), modes):
        if compiled and task.tiny and dtype != torch.bfloat16:
            continue  # a compilation takes a minute on a CPU
        name = f"{name_of(dtype)}, {'compiled' if compiled else 'eager'}"
        with task.attempt(name):
            ours = model_on(device, dtype)
            if compiled:
                compile_model(ours)
            apart = distance(learned(ours, batch_on(device, documents())), expected)
            task.check(f"{name}: distance", apart <= APART[dtype], apart)
    if importlib.util.find_spec("transformers") is None:
        task.figure("transformers", "not installed")
        return
    with task.attempt("transformers"), torch.no_grad():
        from scripts.dev.paired import huggingface_model

        ids = random_tokens()[:, :-1]
        theirs = huggingface_model(model, model.config, VOCAB, LENGTH)(ids).logits[..., :VOCAB]
        apart = float((model(ids, mode="logits") - theirs).norm() / theirs.norm())
        task.check("transformers: distance of logits", apart < 1e-4, apart)


BLOCK, SHARDED = {"activation_checkpointing": "block"}, {"sharding": "full"}
# By part. The layout `selective` needs a compiler, also on a CPU.
FORECAST = {"memory": {"default": {}, "eager": {"compile": False}},
            "more-memory": {"selective": {"activation_checkpointing": "selective", "compile": True},
                            "sharded": SHARDED, "sharded, recomputed": SHARDED | BLOCK,
                            "adapters": {"lora_enabled": True},
                            "sharded, on the host": SHARDED | {"cpu_offload": True}, "recomputed": BLOCK,
                            "eager, recomputed": BLOCK | {"compile": False}}}


def memory(task) -> None:
    """Compare --check's forecast with the memory of a step on a GPU, for each layout in a new process."""
    if task.layout:
        return measure_layout(task, task.layout)
    started, slowest, layouts = time.perf_counter(), 0.0, [*FORECAST[task.part]]
    for layout in layouts[::4] if task.tiny else layouts:
        before = time.perf_counter()
        if before - started + slowest > task.seconds:
            task.figure(layout, "no time left")
            continue
        code, _ = task.run(*sys.argv, "--layout", layout)
        task.check(f"{layout}, exit code", code == 0, code)
        slowest = max(slowest, time.perf_counter() - before)
    figures = task.figures()
    shares = [figures[layout]["USABLE"] for layout in layouts if "USABLE" in figures.get(layout, ())]
    if shares:  # the value for extensions.forecast.USABLE
        task.figure("USABLE", min(shares))


def measure_layout(task, layout: str) -> None:
    """Record the forecast for one layout, and the memory that torch and NVML report for two steps."""
    from config import Config
    from extensions.cost import estimate_memory, with_head_chunk
    from model_utils import choose_dtype

    vocab, length, shape = 128_256, 4096, dict(dim=2048, n_layers=8, n_heads=32, n_kv_heads=8, ffn_dim=8192)
    if task.tiny:
        vocab, length, shape = 512, 64, dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    config = Config(**shape | {"device": task.device, "compile": task.cuda, "max_seq_len": length,
                               "micro_batch_size": 2, "total_batch_size": 4 * length,
                               "document_mask": False} | FORECAST[task.part][layout])
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
            figures |= {"allocated GiB": allocated / GIB, "reserved GiB": reserved / GIB}
            if (uuid := f"GPU-{gpu.uuid}") in before:
                context = used_memory()[uuid] - before[uuid] - reserved
                # What torch reserves grows with the forecast; CUDA's context does not.
                usable = (gpu.total_memory - context) / gpu.total_memory * forecast / reserved
                figures |= {"context GiB": context / GIB, "USABLE": usable}
    finally:
        task.figure(layout, {name: round(value, 3) for name, value in figures.items()})
    if task.cuda:
        off = 100 * (forecast / allocated - 1)
        task.check(f"{layout}, forecast off by %", abs(off) < 10, round(off, 1))


def used_memory() -> dict[str, int]:
    """Return each GPU's used memory by its UUID; nothing if NVML or its package is missing."""
    from scripts.gpus import read_gpus

    with suppress(Exception):
        return {gpu.uuid: gpu.used for gpu in read_gpus()}
    return {}


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


def decode(task) -> None:
    """Generate as a run does: weights rounded for each token, once, with CUDA graphs; the same tokens."""
    from extensions.inference.engine import EAGER_STEPS, Batch, generate
    from extensions.inference.weights import packed_weights

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
    if task.cuda:  # graphs share their memory
        reserved = []
        for _ in range(10):
            with packed_weights(model):
                generate(model, prompts, 2 * EAGER_STEPS)
            reserved.append(torch.cuda.memory_reserved())
        growth = (reserved[-1] - reserved[1]) / GIB
        task.check("reserved memory's growth in ten calls, GiB", growth <= 0, round(growth, 3))
