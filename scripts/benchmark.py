"""Hold Paddock's training step against its peers': same weights, rows, optimizer and clipping, each in a process of its own.

    python scripts/benchmark.py --model cpu-4k                       # on a CPU, about 8 minutes
    python scripts/benchmark.py --model 174m --blocks 2              # on a GPU
    python scripts/benchmark.py --model 1b --contenders paddock-causal,hf-compile --json out.json

Contenders (bf16 where the hardware is fast at it, sdpa):
    paddock          as train.py runs it: compiled, documents in a row do not see each other
    paddock-causal   the same where rows are whole, as the peers' are
    paddock-budget   with ACTIVATION_CHECKPOINTING=selective and ACTIVATION_MEMORY_BUDGET=0.9
    paddock-eager    not compiled; the words can be joined, as in paddock-causal-eager
    hf, hf-compile   transformers' Llama under autocast
    hf-liger         the same, compiled, with Liger's kernels
    litgpt           litgpt's GPT, compiled
The peers get the same tokens without documents. A package that is not installed is told, not an error. A figure counts only
against one of the same run: blocks go A B B A, the result is the median ratio of neighbours and its bootstrap interval of 95 %.
A contender whose first loss (over whole rows, with the initial weights) differs is refused.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.errors import run_script  # noqa: E402

# rows a step, tokens a row, warm-up and timed steps, and the shape
MODELS = {
    "tiny": dict(rows=2, seq_len=64, vocab=512, warmup=2, steps=2, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128,
                 tie_embeddings=True),
    "cpu-4k": dict(rows=8, seq_len=256, vocab=4096, warmup=5, steps=20, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768,
                   tie_embeddings=True),
    "cpu-128k": dict(rows=4, seq_len=256, vocab=128_256, warmup=2, steps=6, dim=256, n_layers=6, n_heads=8, n_kv_heads=4,
                     ffn_dim=768, tie_embeddings=True),
    "sample": dict(rows=16, seq_len=256, vocab=1280, warmup=3, steps=20, dim=128, n_layers=3, n_heads=2, n_kv_heads=2,
                   ffn_dim=352, tie_embeddings=True),
    "174m": dict(rows=32, seq_len=2048, vocab=128_256, warmup=20, steps=60, dim=768, n_layers=12, n_heads=12, n_kv_heads=4,
                 ffn_dim=2048, tie_embeddings=True),
    "1b": dict(rows=4, seq_len=4096, vocab=128_256, warmup=10, steps=25, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8,
               ffn_dim=8192, tie_embeddings=True),
}
MODELS["1b-8rows"] = MODELS["1b"] | {"rows": 8}


BUDGET = {"activation_checkpointing": "selective", "activation_memory_budget": 0.9}
NEEDS = {"hf": ("transformers",), "liger": ("liger_kernel", "triton"), "litgpt": ("litgpt",)}  # packages, by a word of the name


class NotHere(Exception):
    """This contender cannot run on this machine; the text says why."""


def documents_of(rows: int, seq_len: int, seed: int = 7):
    """int32 numbers of documents as a prepared text has them: log-normal lengths with a median of an eighth of a row."""
    import torch

    dice = random.Random(seed)
    numbers_BT = torch.zeros(rows, seq_len, dtype=torch.int32)
    for row in numbers_BT:
        start, number = 0, 0
        while start < seq_len:
            number += 1
            length = max(2, round(dice.lognormvariate(math.log(max(16, seq_len // 8)), 1.0)))
            row[start:start + length] = number
            start += length
    return numbers_BT


def peer_of(model, config, vocab: int, seq_len: int, liger: bool = False):
    """transformers' Llama with the weights of ours, ready to be trained; with Liger's kernels if asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from checkpoint.hf_format import huggingface_config, to_huggingface
    from model import padded

    assert padded(vocab) == vocab, "the peers have no padding"
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    peer = LlamaForCausalLM(LlamaConfig(**huggingface_config(config, vocab, seq_len, 0, 1, "float32")))
    missing = peer.load_state_dict(to_huggingface(model.state_dict(), config, vocab), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    peer.tie_weights()
    return peer.train()


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, where they are not installed, the packages that litgpt imports for what no model needs: nothing is in them."""

    def find_spec(self, name, path=None, target=None):
        wanted = name.partition(".")[0] in ("lightning", "lightning_utilities", "psutil", "jsonargparse")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def exec_module(self, module) -> None:
        def named(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})

        module.__getattr__ = named


def litgpt_model(model, config, vocab: int, seq_len: int):
    """litgpt's GPT with the weights of ours. Only its model is imported: the rest of it wants Lightning, which is large."""
    import torch

    from checkpoint.hf_format import to_huggingface

    package = types.ModuleType("litgpt")
    package.__path__ = list(importlib.util.find_spec("litgpt").submodule_search_locations)
    sys.modules["litgpt"] = package
    sys.meta_path.append(Placeholders())  # asked last
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT

    shape = LitConfig(name="paddock", block_size=seq_len, vocab_size=vocab, padded_vocab_size=vocab, n_layer=config.n_layers,
                      n_head=config.n_heads, n_embd=config.dim, n_query_groups=config.n_kv_heads, head_size=config.head_dim,
                      rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
                      norm_eps=config.norm_eps, mlp_class_name="LLaMAMLP", intermediate_size=config.hidden_dim,
                      rope_base=config.rope_theta)
    peer, theirs = GPT(shape), to_huggingface(model.state_dict(), config, vocab)
    peer.reset_parameters()
    embedding = theirs["model.embed_tokens.weight"]
    tensors = {"transformer.wte.weight": embedding, "transformer.ln_f.weight": theirs["model.norm.weight"],
               "lm_head.weight": theirs.get("lm_head.weight", embedding)}
    names = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.proj",
             "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj"}
    for layer in range(config.n_layers):
        here, there = f"model.layers.{layer}", f"transformer.h.{layer}"
        tensors |= {f"{there}.{other}.weight": theirs[f"{here}.{name}.weight"] for name, other in names.items()}
        tensors[f"{there}.attn.qkv.weight"] = torch.cat([theirs[f"{here}.self_attn.{name}_proj.weight"] for name in "qkv"])
    peer.load_state_dict(tensors)
    if config.tie_embeddings:
        peer.lm_head.weight = peer.transformer.wte.weight
    return peer.train()


def contender_of(words: set[str], model, config, shape: dict, eager: bool) -> tuple[Any, Callable]:
    """What is trained, and a function from ids (B, T + 1) to its mean loss.

    Args:
        words: of the contender's name.
        eager: compile nothing.
    Raises:
        NotHere: a package cannot be imported.
    """
    import torch
    from torch.nn import functional as F

    from model_utils import compile_model

    device, dtype = model.norm.weight.device, model.compute_dtype
    rows, seq_len, vocab = shape["rows"], shape["seq_len"], shape["vocab"]
    eager = eager or "eager" in words
    if "paddock" in words:
        document_ids_BT = None if "causal" in words else documents_of(rows, seq_len)
        if not eager:
            compile_model(model)

        def our_loss(ids, document_ids_BT=document_ids_BT):
            return -model(ids[:, :-1], ids[:, 1:], document_ids_BT, reduction="sum") / (rows * seq_len)

        return model, our_loss
    try:
        peer = (litgpt_model(model, config, vocab, seq_len) if "litgpt" in words else
                peer_of(model, config, vocab, seq_len, "liger" in words)).to(device)
    except ImportError as error:
        raise NotHere(f"cannot be imported: {error}") from error
    compiled = not eager and bool(words & {"compile", "liger", "litgpt"})
    forward = torch.compile(peer) if compiled else peer

    def loss_of(ids):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if "litgpt" in words:
                return F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            # Its own shift inside: it drops the last position, so it is given one more.
            return forward(input_ids=ids, labels=ids, use_cache=False).loss

    return peer, loss_of


def run_contender(name: str, shape: dict, arguments: argparse.Namespace) -> dict:
    """Train one contender for its steps and return its figures."""
    began = time.perf_counter()
    import torch

    from config import Config
    from model_utils import bf16_is_fast, build_model, clip_scale, gradient_norm
    from parallel.collectives import Ranks
    from training import diagnostics
    from training.memory_estimate import estimate_memory
    from training.optim import Optimizer

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if bf16_is_fast(device.type) else torch.float32
    words = set(name.split("-"))
    rows, seq_len, vocab = shape["rows"], shape["seq_len"], shape["vocab"]
    sizes = {key: value for key, value in shape.items() if key not in ("rows", "seq_len", "vocab", "warmup", "steps")}
    if "budget" in words:
        if not set(BUDGET) <= set(Config.model_fields):
            raise NotHere("this commit has no ACTIVATION_MEMORY_BUDGET")
        if arguments.eager:
            raise NotHere("it acts in the compiler only")
        sizes |= BUDGET
    config = Config(**sizes, micro_batch_size=rows, max_seq_len=seq_len, total_batch_size=rows * seq_len)
    model = build_model(config, vocab, Ranks(device=device), dtype)
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, vocab, (rows, seq_len + 1), generator=generator) for _ in range(4)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    trained, loss_of = contender_of(words, model, config, shape, arguments.eager)
    causal_loss = None
    if "paddock" in words and "causal" not in words:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            causal_loss = loss_of(batches[0].to(device), None).item()
    if trained is not model:
        del model
    optimizer = Optimizer(trained, config)

    def step(number: int):
        ids = batches[number % len(batches)].to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        norm = gradient_norm(trained)
        optimizer.step(3e-4, clip_scale(norm, 1.0), (~norm.isfinite()).float())
        return loss, norm

    first_loss = step(0)[0].item()
    first_step_seconds = time.perf_counter() - began
    for number in range(1, shape["warmup"]):
        loss, _ = step(number)
    loss.item()  # the GPU is done with the warm-up
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(shape["steps"]):
        loss, norm = step(number)
        norm.item()  # the loop looks at each step's norm before the update is trusted
    last_loss = loss.item()
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = shape["steps"] * rows * seq_len
    figures = {"contender": name, "first_loss": first_loss if causal_loss is None else causal_loss, "last_loss": last_loss,
               "tokens_per_second": tokens / wall, "cpu_seconds_per_million_tokens": cpu / tokens * 1e6,
               "first_step_seconds": first_step_seconds, "peak_memory_gib": diagnostics.peak_memory_bytes(device) / 2**30,
               "dtype": str(dtype),
               "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"}
    if "paddock" in words:
        forecast = estimate_memory(config.model_copy(update={"compile": not (arguments.eager or "eager" in words)}), vocab,
                                   dtype.itemsize, device.type)
        figures["memory_forecast_gib"] = forecast.total / 2**30
    if peak := diagnostics.peak_flops(device):
        flops = diagnostics.flops_per_token(config, vocab, seq_len)
        half_of_attention = 6 * config.n_layers * config.n_heads * config.head_dim * seq_len
        figures |= {"mfu": tokens / wall * flops / peak, "mfu_causal": tokens / wall * (flops - half_of_attention) / peak}
    if arguments.profile:
        figures["profile"] = profile_of(step, device, arguments.profile)
    return figures


def profile_of(step: Callable, device, rows: int) -> list[dict[str, Any]]:
    """The first rows of torch's profiler over two steps: kernels, or a CPU's operations, by their own time."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for number in range(2):
            step(number)
        if on_gpu:
            torch.cuda.synchronize()
    own = (lambda event: event.self_device_time_total) if on_gpu else (lambda event: event.self_cpu_time_total)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU  # an operation's time on the device is that of its kernels once more
    events = sorted((event for event in profiler.key_averages() if event.device_type == kind), key=own, reverse=True)
    total = sum(map(own, events)) or 1
    return [{"name": event.key[:80], "ms": round(own(event) / 2e3, 3), "share": round(own(event) / total, 4),
             "calls": event.count // 2} for event in events[:rows]]


def in_process(name: str, arguments: argparse.Namespace, seconds: Optional[float], profile: int) -> dict:
    """The figures of a contender, run in a new process; `skipped` or `error` where there are none."""
    if seconds is not None and seconds <= 0:
        return {"contender": name, "skipped": "no time was left"}
    needed = {package for word in name.split("-") for package in NEEDS.get(word, ())}
    if missing := sorted(package for package in needed if importlib.util.find_spec(package) is None):
        return {"contender": name, "skipped": f"not installed: {', '.join(missing)}"}
    command = [sys.executable, __file__, "--model", arguments.model, "--run", name, "--threads", str(arguments.threads),
               "--profile", str(profile), *(["--eager"] if arguments.eager else []),
               *(["--fast"] if arguments.fast else []), *(["--device", arguments.device] if arguments.device else [])]
    environment = os.environ | ({"OMP_NUM_THREADS": str(arguments.threads)} if arguments.threads else {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"contender": name, "skipped": f"it was not done when the {seconds:.0f} s left were over"}
    if done.returncode:
        return {"contender": name, "error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def bootstrap(ratios: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def compare(results: list[list[dict]], ours: str) -> list[str]:
    """A line a contender: its own figures, and ours over its, block by block."""
    lines = ["| contender | tok/s (median) | MFU, causal | peak GiB (forecast) | first step s | ours / its tok/s | "
             "its / ours CPU s |", "|---|---|---|---|---|---|---|"]
    blocks = [{entry["contender"]: entry for entry in block} for block in results]
    for name in blocks[0]:
        good = [block for block in blocks if "tokens_per_second" in block[name]]
        if not good:
            entry = blocks[0][name]
            why = f"failed: {entry['error'][:100]}" if "error" in entry else f"skipped: {entry['skipped']}"
            lines.append(f"| {name} | {why} | | | | | |")
            continue

        def median(key: str, name: str = name, good: list[dict] = good) -> float:
            return statistics.median(block[name][key] for block in good)

        mfu = f"{100 * median('mfu'):.1f} %, {100 * median('mfu_causal'):.1f} %" if "mfu" in good[0][name] else "-"
        forecast = f" ({median('memory_forecast_gib'):.2f})" if "memory_forecast_gib" in good[0][name] else ""
        row = (f"| {name} | {median('tokens_per_second'):,.0f} | {mfu} | {median('peak_memory_gib'):.2f}{forecast} | "
               f"{median('first_step_seconds'):.1f} |")
        paired = [block for block in good if "tokens_per_second" in block[ours]]
        if name == ours or not paired:
            lines.append(row + " | |")
            continue
        tolerance = 1e-3 if paired[0][ours]["dtype"] == "torch.float32" else 1e-2
        apart = max(abs(block[name]["first_loss"] - block[ours]["first_loss"]) for block in paired)
        if apart > tolerance:
            lines.append(row + f" refused: first losses differ by {apart:.4f} | |")
            continue
        speed = bootstrap([block[ours]["tokens_per_second"] / block[name]["tokens_per_second"] for block in paired])
        cpu = bootstrap([block[name]["cpu_seconds_per_million_tokens"] / block[ours]["cpu_seconds_per_million_tokens"]
                         for block in paired])
        lines.append(row + " {:.2f} [{:.2f}, {:.2f}] |".format(*speed) + " {:.2f} [{:.2f}, {:.2f}] |".format(*cpu))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="cpu-4k")
    parser.add_argument("--contenders", default="paddock,paddock-causal,paddock-eager,hf,hf-compile", help="the first is ours")
    parser.add_argument("--blocks", type=int, default=3, help="times that each contender runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--fast", action="store_true", help="half of the steps, enough for a GPU that nobody shares")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = torch's own choice")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="also the profiler's first N rows of the first")
    parser.add_argument("--seconds", type=float, help="after which no contender is begun, and the last one is ended")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--probe", action="store_true", help="only tell what this GPU's matmul, copy and attention reach")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        sys.exit(subprocess.call([sys.executable, str(ROOT / "scripts" / "gpu_suite.py"), "--parts", "probe,attention"]))
    if arguments.run:
        try:
            shape = MODELS[arguments.model]
            if arguments.fast:
                shape = shape | {name: max(2, shape[name] // 2) for name in ("warmup", "steps")}
            figures = run_contender(arguments.run, shape, arguments)
        except NotHere as reason:
            figures = {"contender": arguments.run, "skipped": str(reason)}
        print(json.dumps(figures))
        return
    names, ends = arguments.contenders.split(","), time.monotonic() + (arguments.seconds or math.inf)
    results: list[list[dict]] = []
    for block in range(arguments.blocks):
        order = names if block % 2 == 0 else names[::-1]
        results.append([])
        for name in order:
            left = ends - time.monotonic()
            profile = arguments.profile if block == 0 and name == names[0] else 0
            figures = in_process(name, arguments, left if arguments.seconds else None, profile)
            results[-1].append(figures)
            print(f"block {block + 1}/{arguments.blocks}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    device = next((entry["device"] for block in results for entry in block if "device" in entry), "?")
    print(f"{arguments.model} on {device}, {arguments.blocks} blocks:\n" + "\n".join(compare(results, names[0])))
    for row in results[0][0].get("profile", ()):
        print(f"{row['ms']:10.3f} ms {100 * row['share']:5.1f} % {row['calls']:6} x {row['name']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_script(main)
