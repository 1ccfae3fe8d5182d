"""Measure the steps and CPU seconds of a recipe until it answers 90 % of the sample's held-out items.

    ./paddock race --seeds 3                    the preset as it comes
    ./paddock race --seeds 3 --name fast --learning-rate 0.02
    ./paddock race                              all recipes so far

All other flags are settings. Each seed runs `train.py --preset sample` until an evaluation reaches the goal.
CPU seconds are those of the whole command, with its evaluations. A seed that ends below the goal counts as
slower than all others. Results are kept in OUTPUT_DIR/race/results.jsonl; the same command runs only the
seeds that are missing. p compares a recipe with the first one by a rank-sum test.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from checkpoint.schema import read_entries  # noqa: E402
from common.command_line import CommandParser, number  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import show  # noqa: E402
from config import PLAIN_NAME  # noqa: E402
from plan.make import make_plan  # noqa: E402

METRIC = "hellaswag_acc"
DRAWN = 100_000  # arrangements for a p-value


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's flags and train.py's flags."""
    parser = CommandParser(__doc__, "./paddock train --help lists the settings.", allow_abbrev=False,
                           usage="%(prog)s [--seeds N] [--name NAME] [settings]")
    parser.add_argument("--seeds", metavar="N", default=0, help="number of seeds: SEED, SEED + 1, ...",
                        type=number(int, "from 0 to 1,000", lambda value: 0 <= value <= 1000))
    parser.add_argument("--name", default="preset", help="name of the recipe (default: %(default)s)")
    parser.add_argument("--goal", metavar="SHARE", default=0.9, help="share of items (default: %(default)s)",
                        type=number(float, "above 0 and at most 1", lambda value: 0 < value <= 1))
    parser.add_argument("--every", metavar="STEPS", default=25, help="steps between evaluations "
                        "(default: %(default)s)", type=number(int, "from 1 on", lambda value: value > 0))
    own, flags = parser.parse_known_args()
    if not PLAIN_NAME.fullmatch(own.name):
        raise SettingsError(f"--name {own.name} must be a plain name: letters, digits, '.', '_', '-'")
    return own, flags


def reach(goal: float, every: int, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Train in a new folder until the goal or the end; return the steps to the goal (or None) and seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), *flags, f"--output-dir={folder.parent}",
               f"--run-name={folder.name}", f"--hellaswag-every={every}", "--validate-every=0",
               "--sample-every=0", "--save-every=0"]
    started, stopped = time.monotonic(), False
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        if not stopped and first_at(goal, folder) is not None:
            process.send_signal(signal.SIGTERM)
            stopped = True
        time.sleep(0.2)
    code, step = os.waitstatus_to_exitcode(ended[1]), first_at(goal, folder)
    if code and step is None:
        raise PaddockError(f"{folder.name} failed with exit code {code}; see {folder / 'log'}")
    shutil.rmtree(folder)
    cpu = ended[2].ru_utime + ended[2].ru_stime
    return {"steps": step, "cpu_seconds": round(cpu, 1), "seconds": round(time.monotonic() - started, 1)}


def first_at(goal: float, folder: Path) -> Optional[int]:
    """Return the first evaluated step of a run that has reached the goal."""
    lines = read_entries(folder / "metrics.jsonl")
    return next((line["step"] for line in lines if (line.get(METRIC) or 0.0) >= goal), None)


def exchange_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the difference of mean ranks, by randomly drawn arrangements.

    Source: Wilcoxon 1945 (rank sum); Phipson and Smyth 2010, doi:10.2202/1544-6115.1585, for drawn ones.
    """
    values, rng = [*a, *b], random.Random(0)
    ranks = [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]
    expected = fmean(ranks) * len(a)
    seen = abs(sum(ranks[:len(a)]) - expected) - 1e-9
    extreme = sum(abs(sum(rng.sample(ranks, len(a))) - expected) >= seen for _ in range(DRAWN))
    return (extreme + 1) / (DRAWN + 1)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each recipe: the mean and standard deviation of the seeds that reached the goal."""
    def cell(values: list[float]) -> str:
        return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else str(*values or "-")

    rows, baseline = [("recipe", "reached", "steps", "p", "CPU seconds", "p")], []
    for name in dict.fromkeys(result["name"] for result in results):
        seeds, cells = [result for result in results if result["name"] == name], []
        reached = [result for result in seeds if result["steps"] is not None]
        for key in ("steps", "cpu_seconds"):
            values = [result[key] for result in reached] + [inf] * (len(seeds) - len(reached))
            p = f"{exchange_p(baseline[len(cells) // 2], values):.2g}" if len(rows) > 1 else ""
            baseline += [values] * (len(rows) == 1)
            cells += [cell([result[key] for result in reached]), p]
        rows.append((name, f"{len(reached)}/{len(seeds)}", *cells))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def main() -> None:
    own, flags = parse_args()
    flags = ["--preset=sample", *flags]
    config = make_plan(flags, complete=False).config
    log = Path(config.output_dir) / "race" / "results.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    results = [each for each in results if (each["goal"], each["every"]) == (own.goal, own.every)]
    named = [each for each in results if each["name"] == own.name]
    if own.seeds and any(each["flags"] != flags for each in named):
        raise SettingsError(f"the recipe {own.name} had other settings; choose another --name")
    for seed in range(config.seed, config.seed + own.seeds):
        if all(each["seed"] != seed for each in named):
            recipe = {"name": own.name, "goal": own.goal, "every": own.every, "flags": flags, "seed": seed}
            folder = log.parent / f"{own.name}.seed-{seed}"
            results.append(recipe | reach(own.goal, own.every, folder, [*flags, f"--seed={seed}"]))
            with log.open("a") as lines:
                lines.write(json.dumps(results[-1]) + "\n")
            show("{name}, seed {seed}: {steps} steps, {cpu_seconds} CPU s".format_map(results[-1]))
    show(f"Until {100 * own.goal:g} % of the held-out items, evaluated every {own.every} steps:",
         *table(results))


if __name__ == "__main__":
    run_script(main)
