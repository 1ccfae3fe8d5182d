"""Compare the speed of Paddock's training step with its peers, with the same weights, data and optimizer.

    python scripts/dev/benchmark.py --model cpu-4k           (a CPU, 8 minutes)
    python scripts/dev/benchmark.py --model 174m --blocks 2  (a GPU)
    python scripts/dev/benchmark.py --contenders paddock-causal,hf --turns 3

Contenders, each in a separate process (bf16 if the hardware is fast at it, unless PRECISION=fp32):
    paddock          as in train.py: compiled, with document masking
    paddock-causal   the same without document masking, like the peers
    paddock-budget   with ACTIVATION_CHECKPOINTING=selective
    paddock-eager    not compiled; can be combined: paddock-causal-eager
    hf, hf-compile   transformers' Llama under autocast
    hf-liger         the same, compiled, with Liger's kernels
    litgpt           litgpt's GPT, compiled
All contenders get the same tokens. A contender is skipped if its package is not installed, and rejected if
its first loss (initial weights, no document masking) differs. Each one processes as many rows at a time as
fit into memory, and accumulates gradients to the same batch size. Compare figures only within one call:
blocks run in the order A B B A, and the result is the median ratio with its 95 % bootstrap interval.
With --turns, every contender is started once and stays in memory, which takes less time.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import last_line  # noqa: E402
from parallel.process import configure_allocator  # noqa: E402
from scripts.dev.paired import huggingface_model, in_turns, ratio  # noqa: E402


class Workload(NamedTuple):
    """The model and data that every contender trains on."""

    rows: int  # per step
    seq_len: int
    vocab: int
    warmup: int  # steps
    steps: int  # timed steps
    shape: dict[str, int]


SMALL = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768)
MODELS = {
    "tiny": Workload(2, 64, 512, 2, 2, dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)),
    "cpu-4k": Workload(8, 256, 4096, 5, 20, SMALL),
    "cpu-128k": Workload(4, 256, 128_256, 2, 6, SMALL),
    "sample": Workload(16, 256, 1280, 3, 20, dict(dim=128, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=352)),
    "174m": Workload(32, 2048, 128_256, 20, 60,
                     dict(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048)),
    "1b": Workload(4, 4096, 128_256, 10, 25,
                   dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192)),
}
MODELS["1b-8rows"] = MODELS["1b"]._replace(rows=8)
BUDGET = {"activation_checkpointing": "selective", "activation_memory_budget": 0.9}
ALIVE: dict[str, subprocess.Popen] = {}  # contenders that take turns
LIGER = "0.7"  # 0.8.5 calls addmm with an out_dtype, which torch 2.11 does not trace
# The packages that a contender needs, for each word in its name.
NEEDS = {"hf": ("transformers",), "liger": ("liger_kernel", "triton"), "litgpt": ("litgpt",)}


def draw_documents(rows: int, seq_len: int):
    """Return int32 (B, T) document ids; lengths are log-normal with a median of an eighth of a row."""
    import torch

    rng = random.Random(7)
    document_ids_BT = torch.zeros(rows, seq_len, dtype=torch.int32)
    for row in document_ids_BT:
        start, number = 0, 0
        while start < seq_len:
            number += 1
            length = max(2, round(rng.lognormvariate(math.log(max(16, seq_len // 8)), 1.0)))
            row[start:start + length] = number
            start += length
    return document_ids_BT


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides empty modules for packages that litgpt imports but its model does not use."""

    def find_spec(self, name, path=None, target=None):
        unused = name.partition(".")[0] in ("lightning", "lightning_utilities", "psutil", "jsonargparse")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def exec_module(self, module) -> None:
        def empty_class(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})

        module.__getattr__ = empty_class


def litgpt_model(model, config, vocab: int, seq_len: int):
    """Return litgpt's GPT with our model's weights, in training mode."""
    import torch

    from checkpoint.huggingface import to_huggingface
    from checkpoint.tensors import read_all

    # Import only the model: the rest of litgpt needs Lightning, which is large.
    package = types.ModuleType("litgpt")
    package.__path__ = list(importlib.util.find_spec("litgpt").submodule_search_locations)
    sys.modules["litgpt"] = package
    sys.meta_path.append(Placeholders())  # last, so that installed packages take precedence
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT

    peer = GPT(LitConfig(
        name="paddock", block_size=seq_len, vocab_size=vocab, padded_vocab_size=vocab, bias=False,
        n_layer=config.n_layers, n_head=config.n_heads, n_embd=config.dim, n_query_groups=config.n_kv_heads,
        head_size=config.head_dim, rotary_percentage=1.0, rope_base=config.rope_theta,
        parallel_residual=False, norm_class_name="RMSNorm", norm_eps=config.norm_eps,
        mlp_class_name="LLaMAMLP", intermediate_size=config.hidden_dim))
    peer.reset_parameters()
    ours = read_all(to_huggingface(model.state_dict(), config, vocab))
    embedding = ours["model.embed_tokens.weight"]
    tensors = {"transformer.wte.weight": embedding, "lm_head.weight": embedding,
               "transformer.ln_f.weight": ours["model.norm.weight"]}
    names = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
             "attn.proj": "self_attn.o_proj", "mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj",
             "mlp.proj": "mlp.down_proj"}
    for layer in range(config.n_layers):
        block = f"model.layers.{layer}"
        qkv = [ours[f"{block}.self_attn.{name}_proj.weight"] for name in "qkv"]
        tensors[f"transformer.h.{layer}.attn.qkv.weight"] = torch.cat(qkv)
        for name, our_name in names.items():
            tensors[f"transformer.h.{layer}.{name}.weight"] = ours[f"{block}.{our_name}.weight"]
    peer.load_state_dict(tensors)
    peer.lm_head.weight = peer.transformer.wte.weight
    return peer.train()


def make_contender(words: set[str], model, config, work: Workload, eager: bool) -> tuple[Any, Callable]:
    """Return the model to train, and its loss as a function of ids (B, T + 1) and documents (B, T)."""
    import torch
    from torch.nn import functional as F

    from model_utils import compile_model

    device, dtype = model.norm.weight.device, model.compute_dtype
    if "paddock" in words:
        if not eager:
            compile_model(model)

        def our_loss(ids, document_ids_BT):
            logprob = model(ids[:, :-1], ids[:, 1:], document_ids_BT, mode="sum")
            return -logprob / (len(ids) * work.seq_len)

        return model, our_loss
    if "litgpt" in words:
        peer = litgpt_model(model, config, work.vocab, work.seq_len).to(device)
    else:
        peer = huggingface_model(model, config, work.vocab, work.seq_len, "liger" in words).to(device)
    forward = torch.compile(peer) if not eager and words & {"compile", "liger", "litgpt"} else peer

    def loss_of(ids, document_ids_BT):  # the peers ignore documents
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if "litgpt" in words:
                return F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            # transformers shifts the labels itself and drops the last position.
            return forward(input_ids=ids, labels=ids, use_cache=False).loss

    return peer, loss_of


def run_contender(name: str, work: Workload, args: argparse.Namespace) -> Iterator[dict]:
    """Train one contender here, args.rows rows at a time; yield its figures for each line that is read."""
    started = time.perf_counter()
    import torch

    from config import Config
    from extensions import cpu_kernels  # noqa: F401, which it registers
    from extensions.cost import choose_head_chunk
    from extensions.profile import peak_memory_bytes
    from learn.optim import Optimizer, clip_scale, gradient_norm
    from model_utils import bf16_is_fast, build_model, why_not_compile
    from parallel.ranks import Ranks

    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    fast = bf16_is_fast(device.type) and os.environ.get("PRECISION") != "fp32"
    dtype = torch.bfloat16 if fast else torch.float32
    words = set(name.split("-"))
    eager = args.eager or "eager" in words or why_not_compile(Config(), device.type) is not None
    config = Config(**work.shape, **(BUDGET if "budget" in words else {}), tie_embeddings=True,
                    compile=not eager, micro_batch_size=args.rows, max_seq_len=work.seq_len,
                    total_batch_size=work.rows * work.seq_len)
    model = build_model(config, work.vocab, Ranks(device=device), dtype)
    choose_head_chunk(model, config, dtype.itemsize, device)
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, work.vocab, (work.rows, work.seq_len + 1), generator=generator)
               for _ in range(4)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    trained, loss_of = make_contender(words, model, config, work, eager)
    accumulation = config.accumulation_steps
    masked = "paddock" in words and "causal" not in words
    documents = draw_documents(work.rows, work.seq_len).split(args.rows) if masked else [None] * accumulation
    causal_loss = None
    if masked:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses = [loss_of(ids.to(device), None).item() for ids in batches[0].split(args.rows)]
            causal_loss = statistics.mean(losses)
    if trained is not model:
        del model  # frees its memory
    optimizer = Optimizer(trained, config)

    def step(number: int):
        optimizer.zero_grad()
        loss = 0.0
        for ids, document_ids_BT in zip(batches[number % len(batches)].split(args.rows), documents):
            share = loss_of(ids.to(device, non_blocking=True), document_ids_BT) / accumulation
            share.backward()
            loss += share.detach()
        norm = gradient_norm(trained)
        optimizer.step(3e-4, clip_scale(norm, 1.0), (~norm.isfinite()).float())
        return loss, norm

    # Warm up, then measure.
    first_loss = step(0)[0].item()
    first_step_seconds = time.perf_counter() - started
    for number in range(1, work.warmup):
        step(number)[0].item()
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(work.steps):
            loss, norm = step(number)
            norm.item()  # as in train.py
        last_loss = loss.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        tokens = work.steps * work.rows * work.seq_len
        figures = {"contender": name, "rows": args.rows, "accumulation": accumulation,
                   "first_loss": first_loss if causal_loss is None else causal_loss, "last_loss": last_loss,
                   "tokens_per_second": tokens / wall, "cpu_seconds_per_million_tokens": cpu / tokens * 1e6,
                   "first_step_seconds": first_step_seconds,
                   "peak_memory_gib": peak_memory_bytes(device) / 2**30, "dtype": str(dtype)}
        figures |= more_figures(config, work, device, dtype, tokens / wall)
        if "paddock" not in words:
            del figures["memory_forecast_gib"]
        if args.profile:
            figures["profile"] = profile(step, device, args.profile)
        yield figures


def run_or_report_memory(work: Workload, args: argparse.Namespace) -> None:
    """Print the figures of one contender whenever a line is read, or `out_of_memory` with the reason."""
    import torch

    try:
        for figures in run_contender(args.run, work, args):
            print(json.dumps(figures), flush=True)
    except torch.OutOfMemoryError as error:
        print(json.dumps({"contender": args.run, "out_of_memory": str(error).splitlines()[0]}))


def more_figures(config, work: Workload, device, dtype, tokens_per_second: float) -> dict[str, Any]:
    """Return the device, train.py's memory forecast, and the MFU if the device's peak is known."""
    import torch

    from extensions.cost import estimate_memory, forward_flops
    from extensions.profile import peak_flops

    estimate = estimate_memory(config, work.vocab, dtype.itemsize, device.type)
    figures = {"device": torch.cuda.get_device_name() if device.type == "cuda" else
               f"CPU, {torch.get_num_threads()} threads", "memory_forecast_gib": estimate.total / 2**30,
               "compiled": config.compile}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        figures |= {"reserved_gib": torch.cuda.memory_reserved(device) / 2**30,
                    "device_gib": (total - free) / 2**30}  # of all processes, with CUDA's context
    if peak := peak_flops(device):
        flops = 3 * sum(forward_flops(config, work.vocab, work.seq_len))
        half_of_attention = 6 * config.n_layers * config.n_heads * config.head_dim * work.seq_len
        figures |= {"mfu": tokens_per_second * flops / peak,
                    "mfu_causal": tokens_per_second * (flops - half_of_attention) / peak}
    return figures


def profile(step: Callable, device, rows: int) -> list[dict[str, Any]]:
    """Return the kernels (on a CPU, the operations) that take the most time in two steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_gpu = device.type == "cuda"
    with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for number in range(2):
            step(number)
        if on_gpu:
            torch.cuda.synchronize()
    # An operation's time on the device is that of its kernels: count only one of them.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    milliseconds = [(event, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 2e3)
                    for event in profiler.key_averages() if event.device_type == kind]
    total = sum(ms for _, ms in milliseconds) or 1
    milliseconds.sort(key=lambda pair: pair[1], reverse=True)
    return [{"name": event.key[:80], "ms": round(ms, 3), "share": round(ms / total, 4),
             "calls": event.count // 2} for event, ms in milliseconds[:rows]]


def with_rows_that_fit(name: str, args: argparse.Namespace, deadline: float, rows: int) -> dict:
    """Run a contender with this many rows at a time, halved until they fit; see `in_process`."""
    while True:
        result = in_process(name, args, deadline - time.monotonic(), rows)
        if "out_of_memory" not in result:
            return result
        if rows == 1:
            return {"contender": name, "error": f"one row: {result['out_of_memory']}"}
        rows //= 2


def in_process(name: str, args: argparse.Namespace, seconds: float, rows: int) -> dict:
    """Run a contender in a new process; return its figures, or a reason: skipped, error or out_of_memory."""
    if seconds <= 0:
        return {"contender": name, "skipped": "no time left"}
    if name in ALIVE:
        return figures_of(name, ALIVE[name], seconds)
    words = set(name.split("-"))
    if "budget" in words and (args.eager or "eager" in words):
        return {"contender": name, "skipped": "selective checkpointing needs the compiler"}
    profile_rows = args.profile if name == args.contenders.split(",")[0] else 0
    needed = {package for word in words for package in NEEDS.get(word, ())}
    if missing := sorted(package for package in needed if importlib.util.find_spec(package) is None):
        return {"contender": name, "skipped": f"not installed: {', '.join(missing)}"}
    if "liger" in words and not (version := importlib.metadata.version("liger-kernel")).startswith(LIGER):
        return {"contender": name, "skipped": f"liger-kernel {version} does not compile with torch 2.11; "
                                              f"install liger-kernel {LIGER}.0"}
    command = [sys.executable, __file__, "--model", args.model, "--run", name, "--rows", str(rows),
               "--threads", str(args.threads), "--profile", str(profile_rows),
               *(["--eager"] if args.eager else []), *(["--fast"] if args.fast else []),
               *(["--device", args.device] if args.device else []), "--turns", str(args.turns)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})
    errors = tempfile.TemporaryFile("w+")  # deleted when it is no longer referenced
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                               text=True, env=environment)
    figures = figures_of(name, process, seconds)
    if args.turns and "tokens_per_second" in figures:
        ALIVE[name] = process
    else:
        process.communicate()
    if "error" in figures:
        errors.seek(0)
        figures["error"] = last_line(errors.read())
    return figures


def figures_of(name: str, process: subprocess.Popen, seconds: float) -> dict:
    """Let a contender measure once; return its figures."""
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), process.kill)
    timer.start()
    print(file=process.stdin, flush=True)
    line = next((line for line in process.stdout if line.startswith("{")), None)
    timer.cancel()
    if line is not None:
        return json.loads(line)
    if process.wait() == -signal.SIGKILL:
        return {"contender": name, "skipped": f"not finished in the remaining {seconds:.0f} s, or killed"}
    return {"contender": name, "error": "exited without a reason"}


def compare(results: list[list[dict]], ours: str) -> list[str]:
    """Return a table: each contender's figures, and ratios (above 1: ours is faster) over the blocks."""
    lines = ["| contender | rows x accumulation | tok/s (median) | MFU, causal | peak GiB (forecast) | "
             "first step s | tok/s ratio | CPU s ratio |", "|---|---|---|---|---|---|---|---|"]
    blocks = [{entry["contender"]: entry for entry in block} for block in results]
    for name, entry in blocks[0].items():
        good = [block for block in blocks if "tokens_per_second" in block[name]]
        if not good:
            reason = f"failed: {entry['error'][:100]}" if "error" in entry else f"skipped: {entry['skipped']}"
            lines.append(f"| {name} | | {reason} | | | | | |")
            continue

        def median(key: str, name: str = name, good: list[dict] = good) -> float:
            return statistics.median(block[name][key] for block in good)

        mfu, forecast = "-", ""
        if "mfu" in good[0][name]:
            mfu = f"{100 * median('mfu'):.1f} %, {100 * median('mfu_causal'):.1f} %"
        if "memory_forecast_gib" in good[0][name]:
            forecast = f" ({median('memory_forecast_gib'):.2f})"
        rows = f"{good[-1][name]['rows']} x {good[-1][name]['accumulation']}"
        row = (f"| {name} | {rows} | {median('tokens_per_second'):,.0f} | {mfu} | "
               f"{median('peak_memory_gib'):.2f}{forecast} | {median('first_step_seconds'):.1f} |")
        pairs = [(block[ours], block[name]) for block in good if "tokens_per_second" in block[ours]]
        if name == ours or not pairs:
            lines.append(row + " | |")
            continue
        difference = max(abs(one["first_loss"] - other["first_loss"]) for one, other in pairs)
        if difference > (1e-3 if pairs[0][0]["dtype"] == "torch.float32" else 1e-2):
            lines.append(row + f" rejected: first losses differ by {difference:.4f} | |")
            continue
        cpu = "cpu_seconds_per_million_tokens"
        for ratios in ([one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs],
                       [other[cpu] / one[cpu] for one, other in pairs]):
            row += f" {ratio(ratios)} |"
        lines.append(row)
    return lines


def main() -> None:
    parser = CommandParser(__doc__)
    group = parser.add_argument_group("contenders")
    group.add_argument("--model", choices=MODELS, default="cpu-4k", metavar="NAME",
                       help=f"{', '.join(MODELS)} (default: %(default)s)")
    group.add_argument("--contenders", default="paddock,paddock-causal,paddock-eager,hf,hf-compile",
                       metavar="NAME,...", help="ratios are relative to the first (default: %(default)s)")
    group.add_argument("--device", choices=("cuda", "cpu"), help="device (default: cuda if available)")
    group.add_argument("--threads", type=int, default=0, metavar="N",
                       help="CPU threads; 0 = torch's default")
    group.add_argument("--eager", action="store_true", help="do not compile")
    group.add_argument("--run", help=argparse.SUPPRESS)  # one contender, in this process
    group.add_argument("--rows", type=int, help=argparse.SUPPRESS)  # at a time
    group = parser.add_argument_group("duration and output")
    group.add_argument("--blocks", type=int, default=3, metavar="N",
                       help="number of runs of each contender (default: %(default)s)")
    group.add_argument("--fast", action="store_true", help="half the steps, enough for an unshared GPU")
    group.add_argument("--turns", type=int, default=0, metavar="N",
                       help="keep the contenders in memory, for turns of N steps")
    group.add_argument("--seconds", type=float, metavar="S", help="stop after this time")
    group.add_argument("--profile", type=int, default=0, metavar="N",
                       help="also print the profiler's top N rows for the first contender")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args()
    configure_allocator()  # as a run does
    if args.run:
        work = MODELS[args.model]
        if args.fast:
            work = work._replace(warmup=max(2, work.warmup // 2), steps=max(2, work.steps // 2))
        run_or_report_memory(work._replace(steps=args.turns or work.steps), args)
        return
    names, deadline = args.contenders.split(","), time.monotonic() + (args.seconds or math.inf)
    results: list[list[dict]] = [[] for _ in range(args.blocks)]
    rows = dict.fromkeys(names, MODELS[args.model].rows)
    for block, name in in_turns(names, args.blocks):
        result = with_rows_that_fit(name, args, deadline, rows[name])
        results[block].append(result)
        rows[name] = result.get("rows", rows[name])
        print(f"block {block + 1}/{args.blocks}: {json.dumps(result)}", file=sys.stderr, flush=True)
    device = next((entry["device"] for block in results for entry in block if "device" in entry), "?")
    print(f"{args.model} on {device}, {args.blocks} blocks:\n" + "\n".join(compare(results, names[0])))
    for row in results[0][0].get("profile", ()):
        print(f"{row['ms']:10.3f} ms {100 * row['share']:5.1f} % {row['calls']:6} x {row['name']}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_script(main)
