"""Train with every combination of the given settings, each with several seeds, and compare the results.

    ./paddock sweep --vary LEARNING_RATE=1e-3,3e-3 --seeds 3 --preset sample
    ./paddock sweep --vary DEPTH=2,4 --vary WEIGHT_DECAY=0,0.1 --name shape

All other flags are settings. The runs are in OUTPUT_DIR/NAME. With several GPUs, each GPU trains one run at
a time. If interrupted, the same command resumes. At the end, a table and a report show the mean and standard
error over the seeds, and whether each configuration differs from the first one, which takes at least six
seeds. ./paddock decide compares settings with as few seeds as that takes.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser, number  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import aligned, counted, show  # noqa: E402
from config import PLAIN_NAME, Config  # noqa: E402
from extensions.arms import (  # noqa: E402
    Fleet,
    Trial,
    gpus_of,
    make_trial,
    parse_vary,
    prepared_once,
    slug_of,
)
from extensions.report.compare import by_configuration, results  # noqa: E402
from extensions.report.numbers import is_share, number_text  # noqa: E402
from extensions.report.page import Report  # noqa: E402
from parallel.process import EXIT_PREEMPTED  # noqa: E402
from plan.command_line import exit_with  # noqa: E402
from plan.make import make_plan  # noqa: E402


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(__doc__, "./paddock train --help lists the settings.", allow_abbrev=False,
                           usage="%(prog)s --vary NAME=VALUES [--seeds N] [settings]")
    parser.add_argument("--vary", metavar="NAME=VALUES", action="append", default=[],
                        help="a setting and its values, separated by commas; can be repeated")
    parser.add_argument("--seeds", metavar="N", default=1,
                        type=number(int, "from 1 to 1,000", lambda value: 1 <= value <= 1000),
                        help="number of seeds for each combination: SEED, SEED + 1, ... (default: "
                             "%(default)s)")
    parser.add_argument("--name", "--run-name", metavar="NAME",
                        help="name of the sweep's folder in OUTPUT_DIR (default: sweep-SETTING-...); its "
                             "runs are NAME/SETTING-VALUE...")
    args, flags = parser.parse_known_args()
    args.vary = parse_vary(args.vary)
    args.name = args.name or "-".join(["sweep", *(name for name, _ in args.vary)])
    if not PLAIN_NAME.fullmatch(args.name):
        raise SettingsError(f"--name {args.name} must be a plain folder name: letters, digits, '.', '_', '-'")
    return args, flags


def list_trials(args: argparse.Namespace, config: Config, flags: list[str]) -> list[Trial]:
    """Return the sweep's runs; exit if a setting is invalid."""
    folder, trials, problems = Path(config.output_dir) / args.name, [], []
    for seed in range(config.seed, config.seed + args.seeds):
        for values in itertools.product(*(values for _, values in args.vary)):
            chosen = {**dict(zip((name for name, _ in args.vary), values)), "seed": seed}
            try:
                slug = slug_of(f"{name}-{value}" for name, value in chosen.items())
                trials.append(make_trial(folder / slug, flags, chosen))
            except SettingsError as error:
                problems += [line for line in str(error).splitlines() if line not in problems]
    if problems:
        exit_with(SettingsError(*problems))
    return trials


def show_table(trials: Sequence[Trial]) -> None:
    """Print a line for each configuration, or for each run if there is one seed, and write the report."""
    report = Report([trial.folder for trial in trials])
    report.read()
    measured = [*results(report.runs)]
    if not measured:
        return

    def shown(value: Optional[float], stderr: Optional[float]) -> str:
        return number_text(value, stderr, is_share(measured[0]["name"]))

    rows = [("run", measured[0]["name"])]
    rows += [(run.name, shown(cell["value"], cell["stderr"]) if cell else "-")
             for run, cell in zip(report.runs, measured[0]["cells"])]
    legend = "± is one standard error, over the evaluated items."
    configurations, _ = by_configuration(report.runs, measured)
    if configurations:
        rows = [("configuration", "seeds", measured[0]["name"])]
        rows += [(each["name"], str(each["n"]), shown(each["mean"], each["stderr"]) if each["n"] else "-")
                 for each in configurations]
        legend = "± is one standard error, over the seeds."
    show(*aligned(rows, left=len(rows[0])), legend)
    subprocess.run([sys.executable, str(ROOT / "scripts/report.py"), *(run.folder for run in report.runs),
                    "--output", str(trials[0].folder.parent / "report.html")], check=False)


def main() -> None:
    args, flags = parse_args()
    config = make_plan(flags, complete=False).config
    if args.seeds == 1 and not args.vary:
        raise SettingsError("nothing varies; use --vary NAME=VALUE,VALUE or --seeds above 1")
    trials = list_trials(args, config, flags)
    prepared = prepared_once(config, flags)
    trials = [Trial(trial.folder, [*trial.flags, *prepared]) for trial in trials]
    left = [each for each in trials if not (run := each.reader()) or run.state()[0] != "finished"]
    show(f"{counted(len(trials), 'run')} in {trials[0].folder.parent}, {len(trials) - len(left)} finished")
    fleet = Fleet(gpus_of(config))
    fleet.train(left, done=len(trials) - len(left))
    if fleet.received is not None:
        show("Stopped. Run the same command again to resume.")
        raise SystemExit(EXIT_PREEMPTED)
    if begun := [trial for trial in trials if trial.reader()]:  # failed ones are named
        show_table(begun)
    if fleet.failed:
        codes = ", ".join(f"{name} (exit code {code})" for name, code in fleet.failed.items())
        raise PaddockError(f"{len(fleet.failed)} of {counted(len(trials), 'run')} failed: {codes}")


if __name__ == "__main__":
    run_script(main)
