"""Measure how well DEPTH's learning rate transfers: train several depths, each at rates around it.

    python scripts/measure_depth.py --pretrain-data-path data/sample/pretrain \\
        --tokenizer-path data/sample/tokenizer.model --total-batch-size 1024 --max-seq-len 128 --max-steps 256

Other flags are settings of train.py. Results are kept in --output, and what is in it is not trained again.
The table has, for each depth, the validation loss at each factor of DEPTH's rate, how far DEPTH's rate lies
above the best of them, and how far the rate that is best for the smallest depth would lie above it.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.errors import DataError, run_script  # noqa: E402
from common.text import show  # noqa: E402
from settings.load import load_config  # noqa: E402

Losses = dict[float, float]  # by learning rate


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--depths", default="1,2,4", help="with commas (default: 1,2,4)")
    parser.add_argument("--factors", default="0.25,0.5,1,2,4", help="of DEPTH's rate (default: 0.25,0.5,1,2,4)")
    parser.add_argument("--seeds", default="1337", help="each rate is trained with each; losses are averaged")
    parser.add_argument("--output", default="runs/measure-depth", type=Path, help="folder of all these runs")
    return parser.parse_known_args()


def loss_of(output: Path, flags: list[str], depth: int, rate: float, seed: int) -> float:
    """Return the validation loss at the end of a run, which is trained unless it is there.

    Raises:
        DataError: it failed; why was printed.
    """
    name = f"depth-{depth}-rate-{rate:.2e}-seed-{seed}".replace("+", "")
    flags = [*flags, "--depth", str(depth), "--learning-rate", str(rate), "--seed", str(seed), "--run-name", name,
             "--output-dir", str(output), "--hellaswag-every", "0", "--sample-every", "0", "--save-every", "0"]
    if subprocess.run([sys.executable, ROOT / "train.py", *flags], stdout=subprocess.DEVNULL).returncode:
        raise DataError(f"{output / name} was not trained to its end; see above why")
    lines = map(json.loads, (output / name / "metrics.jsonl").read_text().splitlines())
    return [line["val_loss"] for line in lines if "val_loss" in line][-1]


def above_best(losses: Losses, rate: float) -> str:
    """Return by how much the loss at a rate, interpolated between the measured ones, exceeds the best."""
    rates = sorted(losses)
    if not rates[0] <= rate <= rates[-1]:
        return "not measured"
    at = next(index for index in range(1, len(rates)) if rate <= rates[index])
    low, high = rates[at - 1], rates[at]
    share = math.log(rate / low) / math.log(high / low)
    return f"{(1 - share) * losses[low] + share * losses[high] - min(losses.values()):+.3f}"


def main() -> None:
    args, flags = parse_args()
    depths, seeds = sorted(map(int, args.depths.split(","))), list(map(int, args.seeds.split(",")))
    measured: dict[int, Losses] = defaultdict(dict)
    predicted = {}
    for depth in depths:
        predicted[depth] = load_config([*flags, "--depth", str(depth)]).config.learning_rate
        for rate in (predicted[depth] * float(factor) for factor in args.factors.split(",")):
            losses = [loss_of(args.output, flags, depth, rate, seed) for seed in seeds]
            measured[depth][rate] = statistics.mean(losses)
            show(f"depth {depth}, rate {rate:.2e}: {measured[depth][rate]:.4f}")
    constant = min(measured[depths[0]], key=measured[depths[0]].get)
    show("", f"| depth | loss by rate | DEPTH's rate | above the best | constant rate {constant:.2e} |",
         "|---|---|---|---|---|")
    for depth, losses in measured.items():
        curve = ", ".join(f"{rate:.2e}: {loss:.3f}" for rate, loss in sorted(losses.items()))
        show(f"| {depth} | {curve} | {predicted[depth]:.2e} | {above_best(losses, predicted[depth])} | "
             f"{above_best(losses, constant)} |")


if __name__ == "__main__":
    run_script(main)
