"""Compare the speed of generation with transformers' generate, with the same weights and prompts.

    python scripts/dev/benchmark_generate.py --shape 135m --threads 1
    python scripts/dev/benchmark_generate.py --model runs/chat --json out.jsonl

Each pair of runs gives one ratio, and the order alternates between pairs. The table shows the median ratio
and, in brackets, its 95 % interval (bootstrap). Prefill is the time to the first token; decode is the rest.
CPU seconds exclude time used by other programs. The last lines compare 8 requests of different lengths, at
the same time and one after another.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import CommandParser  # noqa: E402
from common.errors import requires_package, run_script  # noqa: E402
from common.text import show  # noqa: E402
from scripts.dev.paired import huggingface_model, in_turns, ratio  # noqa: E402

SHAPES = {
    "tiny": (256, dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)),
    "sample": (1280, dict(dim=128, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=352)),
    "135m": (49_152, dict(dim=576, n_layers=30, n_heads=9, n_kv_heads=3, ffn_dim=1536)),  # SmolLM2's
    "360m": (49_152, dict(dim=960, n_layers=32, n_heads=15, n_kv_heads=5, ffn_dim=2560)),
    "1b": (128_256, dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192)),  # Llama 3.2's
}


class Timing(NamedTuple):
    """One run: wall and CPU seconds until the first token and from then on, and the new tokens."""

    prefill: tuple[float, float]
    decode: tuple[float, float]
    written: list[list[int]]


def clocks() -> tuple[float, float]:
    """Return wall and CPU time, after the GPU has finished."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def timing(times: list[tuple[float, float]], written: list[list[int]]) -> Timing:
    spans = [(later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in zip(times, times[1:])]
    return Timing(*spans, written)


def run_engine(model: Any, prompts: list[list[int]], new_tokens: list[int], rows: int) -> Timing:
    """Continue the prompts with our engine."""
    from extensions.inference.engine import Engine, Request

    longest = max(map(len, prompts))
    engine = Engine(model, rows, longest + max(new_tokens), rows * longest)
    requests = [Request(prompt, count) for prompt, count in zip(prompts, new_tokens)]
    times = [clocks()]
    for request in requests:
        engine.add(request)
    engine.step()
    if len(requests[0].output_ids) > 1:
        raise AssertionError("the first step writes one token")
    times.append(clocks())
    while not engine.idle:
        engine.step()
    return timing([*times, clocks()], [request.output_ids for request in requests])


def run_transformers(peer: Any, prompts: list[list[int]], new_tokens: int, cache: str) -> Timing:
    """Continue prompts of one length with transformers."""
    import torch
    from transformers import StoppingCriteria

    times: list[tuple[float, float]] = []

    class Stopwatch(StoppingCriteria):
        """Records the time of the first token."""

        def __call__(self, input_ids, scores, **options):
            if len(times) == 1:
                times.append(clocks())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor(prompts, device=peer.device)
    times.append(clocks())
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                        stopping_criteria=[Stopwatch()], cache_implementation=cache, pad_token_id=0)
    return timing([*times, clocks()], out[:, ids.shape[1]:].tolist())


def open_models(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return our model and transformers', with the same weights."""
    import torch

    from config import ModelConfig
    from extensions.inference.weights import device_and_dtype, find_model, load_for_use, pack_weights
    from lora import cast_base
    from model import Transformer
    from model_utils import DTYPES

    named = DTYPES.get("bf16" if args.weights == "int8" else args.weights)
    device, dtype = device_and_dtype(args.device and torch.device(args.device), named)
    if args.model:
        model, _ = load_for_use(find_model(args.model), None, device, dtype)
        config = model.config
    else:
        vocab, shape = SHAPES[args.shape]
        config = ModelConfig(**shape, init_std=0.04)
        from config import extension_module

        extension_module("cpu_kernels")
        model = Transformer(config, vocab, dtype).to(device)
        model.init_weights()
        cast_base(model.requires_grad_(False), dtype)
    length = args.prompt_tokens + args.new_tokens
    with requires_package("transformers", "this comparison"):
        peer = huggingface_model(model, config, model.vocab_size, length).to(dtype)
    peer.generation_config.eos_token_id = None
    pack_weights(model, args.weights == "int8")
    return model.eval(), peer.to(device).eval()


def compare(names: tuple[str, str], runs: tuple[Callable[[], Timing], Callable[[], Timing]], pairs: int,
            tokens: dict[str, int]) -> tuple[dict[str, Any], list[str]]:
    """Alternate between two runs; return the figures and table rows. `tokens`: of prefill and decode."""
    timings: list[list[Timing]] = [[run()] for run in runs]  # the warm-up
    is_same = timings[0][0].written == timings[1][0].written
    for _, index in in_turns((0, 1), pairs):
        timings[index].append(runs[index]())
    figures: dict[str, Any] = {"names": names, "same_tokens": is_same}
    lines = []
    for phase, count in tokens.items():
        seconds = [[getattr(timing, phase) for timing in each[1:]] for each in timings]
        for kind, clock in enumerate(("wall", "cpu")):
            rates = [count / statistics.median(each[kind] for each in of_run) for of_run in seconds]
            ratios = [theirs[kind] / ours[kind] for ours, theirs in zip(*seconds)]
            figures[f"{phase}_{clock}"] = {"tokens_per_second": rates, "ratios": ratios}
            both = " | ".join(f"{rate:,.1f}" for rate in rates)
            lines.append(f"| {phase}, {clock} | {both} | {ratio(ratios)} |")
    return figures, lines


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="sample", metavar="NAME",
                        help=f"shape with random weights: {', '.join(SHAPES)} (default: %(default)s)")
    parser.add_argument("--model", help="use this run, checkpoint or Hugging Face model instead")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N",
                        help="batch sizes (default: 1 8)")
    for name, default, meaning in (("--prompt-tokens", 128, "tokens in a prompt"),
                                   ("--new-tokens", 64, "tokens to generate"),
                                   ("--pairs", 4, "pairs of runs")):
        parser.add_argument(name, type=int, default=default, metavar="N",
                            help=f"number of {meaning} (default: %(default)s)")
    parser.add_argument("--caches", nargs="+", choices=("dynamic", "static"), default=["dynamic"],
                        metavar="NAME", help="transformers' caches: dynamic, static (default: dynamic)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device (default: cuda if available)")
    parser.add_argument("--weights", choices=("fp32", "bf16", "int8"),
                        help="weights; with int8, transformers has bf16 (default: bf16 on a GPU, else fp32)")
    parser.add_argument("--threads", type=int, default=0, metavar="N",
                        help="CPU threads; 0 = torch's default")
    parser.add_argument("--skip-batching", action="store_true", help="skip the test of continuous batching")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    args = parser.parse_args()
    if min(args.prompt_tokens, args.pairs, *args.batch) < 1 or args.new_tokens < 2:
        parser.error("--batch, --prompt-tokens and --pairs must be at least 1, and --new-tokens at least 2")
    return args


def main() -> None:
    args = parse_args()
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    model, peer = open_models(args)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    setup = {"model": args.model or args.shape, "threads": torch.get_num_threads(),
             "dtype": str(model.compute_dtype), "device": str(model.norm.weight.device),
             "weights_bytes": weights}
    show(f"{setup['model']}: {weights / 1e9:.2f} GB of weights, {setup['threads']} threads")
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(model.vocab_size, (length,), generator=generator).tolist()

    def report(size: dict[str, Any], names: tuple[str, str], figures: dict, lines: list[str]) -> None:
        show("", f"| {', '.join(f'{key} {value}' for key, value in size.items())} | {names[0]} tok/s | "
             f"{names[1]} tok/s | ratio |", "|---|---|---|---|", *lines)
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(setup | size | figures) + "\n")

    for batch in args.batch:
        prompts, new = [draw(args.prompt_tokens) for _ in range(batch)], args.new_tokens
        ours = partial(run_engine, model, prompts, [new] * batch, batch)
        for cache in args.caches:
            names = ("paddock", f"transformers, {cache}")
            tokens = {"prefill": batch * args.prompt_tokens, "decode": batch * (new - 1)}
            theirs = partial(run_transformers, peer, prompts, new, cache)
            figures, lines = compare(names, (ours, theirs), args.pairs, tokens)
            rate = figures["decode_wall"]["tokens_per_second"][0] / batch * weights / 1e9
            lines.append(f"| decode reads the weights at {rate:.1f} GB/s; same tokens: "
                         f"{figures['same_tokens']} | | | |")
            report({"batch": batch}, names, figures | {"weights_gb_per_second": rate}, lines)

    if not args.skip_batching:
        lengths = [args.prompt_tokens * (number + 1) // 8 or 1 for number in range(8)]
        counts = [args.new_tokens * (8 - number % 4) // 8 for number in range(8)]
        prompts = [draw(length) for length in lengths]
        runs = tuple(lambda rows=rows: whole(run_engine(model, prompts, counts, rows)) for rows in (8, 1))
        names = ("8 at once", "one after another")
        report({"requests": 8}, names, *compare(names, runs, args.pairs, {"decode": sum(counts)}))


def whole(timing: Timing) -> Timing:
    """Count all of a timing as decode."""
    (wall, cpu), (more_wall, more_cpu), written = timing
    return Timing((0, 0), (wall + more_wall, cpu + more_cpu), written)


if __name__ == "__main__":
    run_script(main)
