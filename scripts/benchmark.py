"""Hold Paddock's training step against its peers': same weights, rows, optimizer and clipping, each in a process of its own.

    python scripts/benchmark.py --model cpu-4k                       # on a CPU, about 6 minutes
    python scripts/benchmark.py --model 174m --blocks 2              # on a GPU
    python scripts/benchmark.py --model 1b --contenders paddock,hf-compile --json out.json

Contenders: paddock (bf16 where the hardware is fast at it, compiled), paddock-eager, hf (transformers' Llama, autocast, sdpa, eager) and
hf-compile. A figure counts only against one of the same run: blocks go A B B A, the result is the median ratio of neighbours and its
bootstrap interval of 95 %. A contender whose first loss differs is refused.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# rows a step, tokens a row, warm-up and timed steps, and the shape
MODELS = {
    "cpu-4k": dict(rows=8, seq_len=256, vocab=4096, warmup=5, steps=20, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768,
                   tie_embeddings=True),
    "cpu-128k": dict(rows=4, seq_len=256, vocab=128_256, warmup=2, steps=6, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768,
                     tie_embeddings=True),
    "sample": dict(rows=16, seq_len=256, vocab=1280, warmup=3, steps=20, dim=128, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=352,
                   tie_embeddings=True),
    "174m": dict(rows=32, seq_len=2048, vocab=128_256, warmup=20, steps=60, dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048,
                 tie_embeddings=True),
    "1b": dict(rows=4, seq_len=4096, vocab=128_256, warmup=10, steps=25, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192,
               tie_embeddings=True),
}
MODELS["1b-8rows"] = MODELS["1b"] | {"rows": 8}


def probe() -> None:
    """Print what this GPU can do today: the ceiling that a run's figures stand under."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import sdpa_kernel

    from attention_kernels import SDPA_ORDER
    from attention_kernels import VARLEN_ATTENTION as attend

    def seconds(make, repeats: int = 10) -> float:
        for _ in range(3):
            make()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            make()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"matmul 8192^3 bf16: {2 * 8192**3 / seconds(lambda: a @ b) / 1e12:.0f} TFLOP/s")
    big = torch.empty(2**30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    print(f"copy: {2 * big.nbytes / seconds(lambda: other.copy_(big)) / 1e12:.2f} TB/s")
    del big, other
    for rows, length, heads, kv_heads, width in ((4, 4096, 32, 8, 64), (32, 2048, 12, 4, 64), (4, 4096, 32, 8, 128)):
        shapes = [(rows, length, n, width) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        flops = 3.5 * 4 * rows * heads * length**2 * width / 2  # causal, forward and backward

        def causal(kernels):
            with sdpa_kernel(kernels, set_priority=True):
                out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
            torch.autograd.grad(out.sum(), (q, k, v))

        contenders = {name: (lambda order=order: causal(order)) for name, order in SDPA_ORDER.items() if name != "math"}
        if attend:
            borders = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
            padded_borders = F.pad(borders, (0, 64 - len(borders)), value=rows * length)
            for label, cu in (("varlen", borders), ("varlen, borders padded", padded_borders)):
                contenders[label] = lambda cu=cu: torch.autograd.grad(
                    attend(*(x.flatten(0, 1) for x in (q, k, v)), cu, length).sum(), (q, k, v))
        for name, make in contenders.items():
            try:
                print(f"attention B{rows} T{length} N{heads}/{kv_heads} H{width} {name}: {flops / seconds(make) / 1e12:.0f} TFLOP/s")
            except Exception as error:
                print(f"attention B{rows} T{length} H{width} {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")


def peer_of(model, config, vocab: int, seq_len: int):
    """transformers' Llama with the weights of ours, ready to be trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from convert import huggingface_config, to_huggingface
    from model import padded

    assert padded(vocab) == vocab, "the peers have no padding"
    peer = LlamaForCausalLM(LlamaConfig(**huggingface_config(config, vocab, seq_len, 0, 1, "float32")))
    missing = peer.load_state_dict(to_huggingface(model.state_dict(), config, vocab), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    peer.tie_weights()
    return peer.train()


def run_contender(name: str, shape: dict, threads: int) -> dict:
    """Train one contender for its steps and return its figures."""
    began = time.perf_counter()
    import torch

    import diagnostics
    from config import Config
    from model_utils import bf16_is_fast, build_model, clip_scale, compile_model, gradient_norm
    from optim import Optimizer
    from ranks import Ranks

    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if bf16_is_fast(device.type) else torch.float32
    sizes = {key: value for key, value in shape.items() if key not in ("rows", "seq_len", "vocab", "warmup", "steps")}
    rows, seq_len, vocab = shape["rows"], shape["seq_len"], shape["vocab"]
    config = Config(**sizes, micro_batch_size=rows, max_seq_len=seq_len, total_batch_size=rows * seq_len)
    model = build_model(config, vocab, Ranks(device=device), dtype)
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, vocab, (rows, seq_len + 1), generator=generator) for _ in range(4)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]

    if name == "paddock":
        compile_model(model)
    if name.startswith("paddock"):
        def loss_of(ids):
            return -model(ids[:, :-1], ids[:, 1:], reduction="sum") / (rows * seq_len)
    else:
        model = peer_of(model, config, vocab, seq_len).to(device)
        forward = torch.compile(model) if name == "hf-compile" else model

        def loss_of(ids):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                # Its own shift inside: it drops the last position, so it is given one more.
                return forward(input_ids=ids, labels=ids, use_cache=False).loss

    optimizer = Optimizer(model, config)

    def step(number: int):
        ids = batches[number % len(batches)].to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        norm = gradient_norm(model)
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
    figures = {"contender": name, "first_loss": first_loss, "last_loss": last_loss, "tokens_per_second": tokens / wall,
               "cpu_seconds_per_million_tokens": cpu / tokens * 1e6, "first_step_seconds": first_step_seconds,
               "peak_memory_gib": diagnostics.peak_memory_bytes(device) / 2**30, "dtype": str(dtype),
               "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"}
    peak = diagnostics.peak_flops(device)
    if peak:
        figures["mfu"] = tokens / wall * diagnostics.flops_per_token(config, vocab, seq_len) / peak
    return figures


def in_process(name: str, model: str, threads: int) -> dict:
    """The figures of a contender, run in a new process."""
    command = [sys.executable, __file__, "--model", model, "--run", name, "--threads", str(threads)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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
    lines = ["| contender | tok/s (median) | MFU | peak GiB | first step s | ours / its tok/s | its / ours CPU s |", "|---|---|---|---|---|---|---|"]
    blocks = [{entry["contender"]: entry for entry in block} for block in results]
    for name in blocks[0]:
        good = [block for block in blocks if "error" not in block[name]]
        if not good:
            lines.append(f"| {name} | failed: {blocks[0][name]['error'][:100]} | | | | | |")
            continue

        def median(key: str) -> float:
            return statistics.median(block[name][key] for block in good)

        mfu = f"{100 * median('mfu'):.1f} %" if "mfu" in good[0][name] else "-"
        row = f"| {name} | {median('tokens_per_second'):,.0f} | {mfu} | {median('peak_memory_gib'):.2f} | {median('first_step_seconds'):.1f} |"
        paired = [block for block in good if "error" not in block[ours]]
        if name == ours or not paired:
            lines.append(row + " | |")
            continue
        tolerance = 1e-3 if paired[0][ours]["dtype"] == "torch.float32" else 1e-2
        apart = max(abs(block[name]["first_loss"] - block[ours]["first_loss"]) for block in paired)
        if apart > tolerance:
            lines.append(row + f" refused: first losses differ by {apart:.4f} | |")
            continue
        speed = bootstrap([block[ours]["tokens_per_second"] / block[name]["tokens_per_second"] for block in paired])
        cpu = bootstrap([block[name]["cpu_seconds_per_million_tokens"] / block[ours]["cpu_seconds_per_million_tokens"] for block in paired])
        lines.append(row + " {:.2f} [{:.2f}, {:.2f}] |".format(*speed) + " {:.2f} [{:.2f}, {:.2f}] |".format(*cpu))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="cpu-4k")
    parser.add_argument("--contenders", default="paddock,paddock-eager,hf,hf-compile", help="the first is ours")
    parser.add_argument("--blocks", type=int, default=3, help="times that each contender runs")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = torch's own choice")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--probe", action="store_true", help="only tell what this GPU's matmul, copy and attention reach")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        probe()
        return
    if arguments.run:
        print(json.dumps(run_contender(arguments.run, MODELS[arguments.model], arguments.threads)))
        return
    names = arguments.contenders.split(",")
    results = []
    for block in range(arguments.blocks):
        order = names if block % 2 == 0 else names[::-1]
        results.append([])
        for name in order:
            results[-1].append(in_process(name, arguments.model, arguments.threads))
            print(f"block {block + 1}/{arguments.blocks}: {json.dumps(results[-1][-1])}", file=sys.stderr, flush=True)
    device = next((entry["device"] for block in results for entry in block if "device" in entry), "?")
    print(f"{arguments.model} on {device}, {arguments.blocks} blocks:\n" + "\n".join(compare(results, names[0])))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
