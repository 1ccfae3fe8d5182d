"""Parts of scripts/gpu_suite.py that measure what a device does apart from training: matmul, copy, attention, a checkpoint,
HellaSwag."""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

SHAPES = ((4, 4096, 32, 8, 64), (32, 2048, 12, 4, 64), (4, 4096, 32, 8, 128))  # rows, tokens, query and key/value heads, width
TINY_SHAPES = ((2, 128, 4, 2, 16),)
DOCUMENTS = (1, 8, 64, 512)  # in a row
EMPTY = (0, 200)  # documents without a token, with which the borders are padded
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 6e-3}  # of the norm


def seconds_of(task, make: Callable[[], object]) -> float:
    """The mean time of a call, after some that warm up."""
    repeats, warm = (10, 3) if task.cuda else (2, 1)
    for _ in range(warm):
        make()
    if not task.cuda:
        started = time.perf_counter()
        for _ in range(repeats):
            make()
        return (time.perf_counter() - started) / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        make()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def probe(task) -> None:
    """What matmul and copy reach today: the ceiling that a run's figures stand under. And whether there is a compiler."""
    size = 256 if task.tiny else 8192
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if task.cuda else (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=task.device, dtype=dtype) for _ in range(2))
        name = f"matmul {size}^3 {str(dtype).removeprefix('torch.')} TFLOP/s"
        task.figure(name, round(2 * size**3 / seconds_of(task, lambda a=a, b=b: a @ b) / 1e12, 3))
    big = torch.empty(2**20 if task.tiny else 2**30, device=task.device, dtype=torch.bfloat16)
    other = torch.empty_like(big)
    task.figure("copy TB/s", round(2 * big.nbytes / seconds_of(task, lambda: other.copy_(big)) / 1e12, 3))
    if task.cuda:
        for kind in ("pageable", "pinned"):
            host = torch.empty(2**29, dtype=torch.bfloat16, pin_memory=kind == "pinned")
            seconds = seconds_of(task, lambda host=host: host.copy_(big[:2**29]))
            task.figure(f"to the host, {kind}, GB/s", round(host.nbytes / seconds / 1e9, 1))
    from config import Config
    from model_utils import why_not_compile

    reason = why_not_compile(Config(), task.device)
    task.check("compiler", reason is None, reason or "found")
    if task.cuda:
        started = time.perf_counter()
        with task.attempt("a compiled kernel"):
            compiled = torch.compile(lambda x: (x.float() * 2 + 1).to(x.dtype).sum(-1))
            x = torch.randn(64, 64, device=task.device)
            alike = torch.allclose(compiled(x), (x * 2 + 1).sum(-1))
            task.check("a compiled kernel, s", alike, round(time.perf_counter() - started, 1))


# --------------------------------------------------------------------------------------------------------- attention


def heads_of(shape: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """q_BTNH, k_BTKH and v_BTKH that want gradients, the same for each device."""
    rows, length, n_heads, n_kv_heads, width = shape
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, length, n, width, generator=generator).to(device, dtype).requires_grad_()
            for n in (n_heads, n_kv_heads, n_kv_heads)]


def borders(rows: int, length: int, documents: int, empty: int, device: str) -> Tensor:
    """int32 borders of so many documents in each row, whose lengths differ by one at most, and of some empty ones."""
    edges = [row * length + number * length // documents for row in range(rows) for number in range(documents)]
    return torch.tensor([*edges, *[rows * length] * (1 + empty)], dtype=torch.int32, device=device)


def seen(rows: int, length: int, documents: int, device: str) -> Tensor:
    """The mask (B, 1, T, T) of the same documents."""
    number_T = torch.zeros(length, dtype=torch.int64)
    for document in range(documents):
        number_T[document * length // documents:] = document
    return ((number_T[:, None] == number_T) & torch.ones(length, length, dtype=torch.bool).tril())[None, None].expand(
        rows, -1, -1, -1).to(device)


def rate_of(task, attend: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> float:
    """TFLOP/s of forward and backward of a function of q, k and v."""
    return round(flops / seconds_of(task, lambda: torch.autograd.grad(attend(*inputs).sum(), inputs)) / 1e12, 3)


def attention(task) -> None:
    """Each kernel: whether it runs, whether it is right, and how fast it is; and which is chosen."""
    from fused import attention as kernels

    device = torch.device(task.device)
    shapes = TINY_SHAPES if task.tiny else SHAPES
    chosen_kernels(task, kernels, device)
    for dtype, kernel, count, empty in product((torch.bfloat16, torch.float16), kernels.VARLEN, DOCUMENTS, EMPTY):
        if task.cuda and kernels.trial(kernel, "documents", shapes[0][2:], device, dtype) is None:
            check_documents(task, kernels, kernel, dtype, (count, empty))
    for shape in shapes:
        rows, length, n_heads, n_kv_heads, width = shape
        inputs = heads_of(shape, task.device, torch.bfloat16 if task.cuda else torch.float32)
        flops = 3.5 * 4 * rows * n_heads * length**2 * width / 2  # causal, forward and backward
        label = f"B{rows} T{length} N{n_heads}/{n_kv_heads} H{width}"
        found: dict[str, float | str] = {}
        for kernel in kernels.KERNELS:
            reason = kernels.trial(kernel, "causal", shape[2:], device, inputs[0].dtype)
            if reason is None and not (kernel in kernels.VARLEN and kernel != "flash-3"):
                with task.attempt(f"{label} {kernel}"):
                    found[kernel] = rate_of(task, partial(kernels.attend, kernel), inputs, flops)
            elif reason:
                found[kernel] = reason
            if kernel == "flash-3":
                kernels.activate_flash_3(False)
        task.figure(f"causal {label}, TFLOP/s", found)
        if task.cuda:
            documents_rates(task, kernels, shape, inputs)


def chosen_kernels(task, kernels, device: torch.device) -> None:
    """What training and evaluation would take, by dtype."""
    from config import Config

    config = Config(dim=512, n_heads=8, n_kv_heads=2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if task.cuda else (torch.bfloat16, torch.float32):
        for purpose in ("causal", "documents", "mask"):
            name = f"chosen for {purpose} in {str(dtype).removeprefix('torch.')}"
            with task.attempt(name):
                task.figure(name, kernels.choose_kernel(purpose, config, device, dtype))


def check_documents(task, kernels, kernel: str, dtype: torch.dtype, what: tuple[int, int]) -> None:
    """Hold a kernel over borders against the math kernel in float32 with a mask, values and gradients."""
    count, empty = what
    shape = (2, 1024, 8, 2, 64)
    inputs = heads_of(shape, task.device, dtype)
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(task.device)
    exact = [heads.detach().float().requires_grad_() for heads in inputs]

    def values(heads: list[Tensor], attended: Tensor) -> list[Tensor]:
        return [attended, *torch.autograd.grad((attended.float() * weights).sum(), heads)]

    name = f"{kernel}, {str(dtype).removeprefix('torch.')}, {count} documents a row, {empty} empty"
    with task.attempt(name):
        found = values(inputs, kernels.attend(kernel, *inputs, None, borders(*shape[:2], count, empty, task.device)))
        wanted = values(exact, kernels.attend("math", *exact, seen(*shape[:2], count, task.device)))
        apart = max(float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))
        task.check(f"{name}: apart", apart <= ALLOWED[dtype], apart)
    if kernel == "flash-3":
        kernels.activate_flash_3(False)


def documents_rates(task, kernels, shape: Sequence[int], inputs: list[Tensor]) -> None:
    """TFLOP/s of each kernel over borders, by the number of documents in a row; what they skip is no work."""
    rows, length, n_heads, n_kv_heads, width = shape
    device = torch.device(task.device)
    for kernel in kernels.VARLEN:
        found: dict[str, float] = {}
        if kernels.trial(kernel, "documents", shape[2:], device, inputs[0].dtype) is not None:
            continue
        for count in DOCUMENTS:
            cu = borders(rows, length, count, 63, task.device)
            flops = 3.5 * 4 * n_heads * width * float(cu.diff().double().square().sum()) / 2
            with task.attempt(f"{kernel}, {count} documents"):
                found[str(count)] = rate_of(task, partial(kernels.attend, kernel, cu_seqlens=cu), inputs, flops)
        task.figure(f"documents B{rows} T{length} N{n_heads}/{n_kv_heads} H{width} {kernel}, TFLOP/s by documents a row", found)
        if kernel == "flash-3":
            kernels.activate_flash_3(False)


# -------------------------------------------------------------------------------------------- checkpoint and HellaSwag


def model_of(task, **changes):
    """A model of the shape of Llama 3.2 1B with random weights, its settings, and its vocabulary."""
    from config import Config
    from model_utils import build_model, choose_dtype
    from parallel.collectives import Ranks

    sizes = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128) if task.tiny else \
        dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, max_seq_len=4096)
    vocab = 512 if task.tiny else 128_256
    config = Config(**sizes, device=task.device, **changes)
    device = torch.device(task.device, 0) if task.cuda else torch.device("cpu")
    ranks = Ranks(device=device)
    return build_model(config, vocab, ranks, choose_dtype(config, task.device)), config, vocab, ranks


def clock(task, name: str, make: Callable[[], object], size: int = 0):
    """What make() gives; its seconds are a figure, and so are the gigabytes a second of what it moves."""
    if task.cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    made = make()
    if task.cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    task.figure(f"{name}, s", round(seconds, 3))
    if size:
        task.figure(f"{name}, GB/s", round(size / seconds / 1e9, 2))
    return made


def checkpoint(task) -> None:
    """Where the time of a checkpoint goes: the copy to the host, the hash, the file; and what saving and resuming cost in all."""
    import hashlib

    from safetensors.torch import load_file, save_file

    from checkpoint import store
    from training.optim import Optimizer

    model, config, _, ranks = model_of(task)
    optimizer = Optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0)
    optimizer.zero_grad()
    folder = task.folder / "runs" / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights, states = model.state_dict(), optimizer.state_tensors()
    size = sum(tensor.nbytes for tensor in weights.values())
    task.figure("bytes", size + sum(tensor.nbytes for tensor in states.values()))
    host = clock(task, "copy of the weights", lambda: {name: tensor.cpu() for name, tensor in weights.items()}, size)
    clock(task, "SHA-256 of the weights", lambda: [hashlib.sha256(tensor.numpy()).digest() for tensor in host.values()], size)
    file = folder / "weights.safetensors"
    clock(task, "write of the weights", lambda: save_file(host, file), size)
    clock(task, "load of the weights", lambda: [tensor.to(ranks.device) for tensor in load_file(file).values()], size)
    file.unlink()

    def write(folder: Path) -> None:
        save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")

    contents = store.Contents(1, write, {}, states, size)
    saved = clock(task, "save in all", lambda: store.save(folder / "checkpoints", contents, ranks))
    clock(task, "verify", lambda: store.verify(saved))
    clock(task, "load of the optimizer", lambda: optimizer.load_state_tensors(store.read_optimizer(saved)))
    shutil.rmtree(folder)


def hellaswag(task) -> None:
    """HellaSwag's scoring, on items of random tokens with the lengths that real ones have, the first time and the second."""
    import random

    from fused.chunked_head import IGNORE_INDEX
    from hellaswag_utils import Task as Item
    from hellaswag_utils import evaluate
    from model import SHARED_PREFIX

    model, config, vocab, ranks = model_of(task)
    dice = random.Random(0)

    def item() -> Item:
        endings = [dice.randint(8, 45) for _ in range(4)]
        context = dice.randint(20, 90)
        targets, documents = [IGNORE_INDEX] * context, [SHARED_PREFIX] * context
        tokens = [dice.randrange(vocab) for _ in range(context + sum(endings))]
        for number, length in enumerate(endings, 1):
            targets += [dice.randrange(vocab) for _ in range(length)]
            documents += [number] * length
        return Item(*(torch.tensor(values, dtype=torch.int32) for values in (tokens, documents, targets)), endings,
                    [4 * length for length in endings], dice.randrange(4))

    items = [item() for _ in range(20 if task.tiny else 500)]
    task.figure("items", len(items))
    for name in ("cold", "warm"):
        counts = clock(task, name, partial(evaluate, model, items, device=ranks.device,
                                           batch_tokens=config.hellaswag_batch_tokens))
    task.check("items scored", counts.n == len(items), counts.n)
    if task.cuda:
        task.figure("peak memory GiB", round(torch.cuda.max_memory_allocated() / 2**30, 2))
