"""Measure how well DEPTH's learning rate transfers: train several depths, each at rates around it.

    python scripts/measure_depth.py --pretrain-data-path data/sample/pretrain \\
        --tokenizer-path data/sample/tokenizer.model \\
        --total-batch-size 1024 --max-seq-len 128 --max-steps 256

Other flags are settings of train.py. Runs that --output has are not trained again. The table has, for each
depth, the validation loss at each rate, and how far above the best of them two rates lie: DEPTH's, and the
one that is best for the first depth.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import DataError, local_path, run_script  # noqa: E402
from common.text import show  # noqa: E402
from settings.load import load_config  # noqa: E402


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--depths", nargs="+", default=["1", "2", "4"], help="(default: 1 2 4)")
    parser.add_argument("--factors", nargs="+", type=float, default=[0.25, 0.5, 1, 2, 4],
                        help="of DEPTH's rate (default: 0.25 0.5 1 2 4)")
    parser.add_argument("--seeds", nargs="+", default=["1337"], help="losses are averaged over them")
    parser.add_argument("--output", default="runs/measure-depth", type=local_path, help="folder of the runs")
    return parser.parse_known_args()


def loss_of(output: Path, flags: list[str], name: str) -> float:
    """Return a run's last validation loss, or infinity if it diverged; train it unless it is there."""
    own = ["--output-dir", str(output), "--run-name", name, "--hellaswag-every", "0", "--sample-every", "0"]
    done = subprocess.run([sys.executable, ROOT / "train.py", *flags, *own], stdout=subprocess.DEVNULL)
    if done.returncode == 4:
        return math.inf
    if done.returncode:
        raise DataError(f"{output / name} was not trained to its end; see above why")
    metrics = map(json.loads, (output / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["val_loss"] for line in metrics if "val_loss" in line][-1]


def above_best(losses: dict[float, float], rate: float) -> str:
    """Return by how much the loss at a rate, interpolated between the measured ones, exceeds the best."""
    rates = sorted(losses)
    if not rates[0] <= rate <= rates[-1]:
        return "not measured"
    above = max(1, next(index for index, measured in enumerate(rates) if rate <= measured * (1 + 1e-9)))
    low, high = rates[above - 1], rates[above]
    share = math.log(rate / low) / math.log(high / low)
    return f"{(1 - share) * losses[low] + share * losses[high] - min(losses.values()):+.3f}"


def main() -> None:
    args, flags = parse_args()
    constant = None
    table = ["", "| depth | loss by rate | DEPTH's rate | above the best | with the first depth's best |",
             "|---|---|---|---|---|"]
    for depth in args.depths:
        sized = [*flags, "--depth", depth]
        chosen = load_config(sized).config.learning_rate
        losses = {}
        for rate in (chosen * factor for factor in args.factors):
            losses[rate] = statistics.mean(
                loss_of(args.output, [*sized, "--learning-rate", str(rate), "--seed", seed],
                        f"depth-{depth}-rate-{rate:.2e}-seed-{seed}") for seed in args.seeds)
            show(f"depth {depth}, rate {rate:.2e}: {losses[rate]:.4f}")
        constant = constant or min(losses, key=losses.get)
        curve = ", ".join(f"{rate:.2e}: {loss:.3f}" for rate, loss in sorted(losses.items()))
        table.append(f"| {depth} | {curve} | {chosen:.2e} | {above_best(losses, chosen)} | "
                     f"{constant:.2e}: {above_best(losses, constant)} |")
    show(*table)


if __name__ == "__main__":
    run_script(main)
