"""Compare the final validation loss in fp32 with that in bf16, rounded stochastically and to the nearest.

    python scripts/dev/compare_rounding.py --seeds 10 -- --preset sample \\
        --max-steps 150 --micro-batch-size 2

What follows `--` are flags of ./paddock train. Each seed trains once per variant, in this process. The table
has the mean loss of a variant, and its mean difference from fp32 with the same seed, with the standard error.
"""

import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from common.command_line import CommandParser
from common.errors import run_script
from extensions import rounding
from parallel.fsdp import local_rows


def to_nearest(target: torch.Tensor, values: torch.Tensor, *_) -> None:
    target.copy_(values)


class Float32Sums(rounding.RoundingReducer):
    """Adds the gradients of micro-batches in float32."""

    @torch.no_grad()
    def collect(self, parameter: torch.Tensor) -> None:
        gradient = local_rows(parameter.grad)
        total = gradient.float() + self.sums.pop(parameter, 0)
        if self.is_last:
            gradient.copy_(total)
        else:
            self.sums[parameter], parameter.grad = total, None


BF16 = ["--weight-dtype", "bf16", "--optimizer-dtype", "bf16"]
VARIANTS: dict[str, tuple[list[str], Callable]] = {
    "fp32": ([], contextlib.nullcontext),
    "bf16": (BF16, contextlib.nullcontext),
    "bf16, gradients added in fp32": (
        BF16, lambda: mock.patch.dict(rounding.optim.REDUCERS, {"special_update": Float32Sums})),
    "bf16 weights": (BF16[:2], contextlib.nullcontext),
    "bf16, rounded to the nearest": (BF16, lambda: mock.patch.object(rounding, "round_into", to_nearest))}

ALONE = ["--run-name", "run", "--resume", "never", "--report", "false", "--hellaswag-every", "0",
         "--sample-every", "0", "--save-every", "0", "--log-every", "0", "--validate-every", "1000000"]


def final_losses(variants: list[str], seeds: int, flags: list[str]) -> Iterator[tuple[str, int, float]]:
    """Train; yield each variant's final validation loss for each seed."""
    for seed in range(seeds):
        for name in variants:
            settings, patch = VARIANTS[name]
            with tempfile.TemporaryDirectory() as folder, patch():
                argv = [*flags, *settings, *ALONE, "--seed", str(seed), "--output-dir", folder]
                started, output = time.process_time(), io.StringIO()
                with contextlib.redirect_stdout(output):
                    code = train.main(argv)
                if code:
                    sys.exit(f"{name}, seed {seed}: exit code {code}\n{output.getvalue()}")
                lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            losses = [entry["val_loss"] for entry in map(json.loads, lines) if "val_loss" in entry]
            seconds = time.process_time() - started
            print(f"seed {seed}, {name}: {losses[-1]:.5f} in {seconds:.0f} CPU seconds", file=sys.stderr)
            yield name, seed, losses[-1]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each variant [10]")
    parser.add_argument("--variants", default=";".join(VARIANTS),
                        help="separated by semicolons: " + "; ".join(VARIANTS))
    parser.add_argument("flags", nargs="*", help="flags of ./paddock train")
    arguments = parser.parse_args()
    variants = [name for name in VARIANTS if name == "fp32" or name in arguments.variants.split(";")]
    losses: dict[str, list[float]] = {name: [] for name in variants}
    for name, _, loss in final_losses(variants, arguments.seeds, arguments.flags):
        losses[name].append(loss)
    print("| variant | final validation loss | difference from fp32 |\n|---|---|---|")
    for name, values in losses.items():
        relative = [100 * (value / other - 1) for value, other in zip(values, losses["fp32"])]
        error = statistics.stdev(relative) / math.sqrt(len(relative)) if len(relative) > 1 else math.nan
        difference = "" if name == "fp32" else f"{statistics.mean(relative):+.3f} % ± {error:.3f}"
        print(f"| {name} | {statistics.mean(values):.4f} | {difference} |")


if __name__ == "__main__":
    run_script(main)
