"""Train with every combination of the given settings, each with several seeds, and compare the results.

    ./paddock sweep --vary LEARNING_RATE=1e-3,3e-3 --seeds 3 --preset sample
    ./paddock sweep --vary DEPTH=2,4 --vary WEIGHT_DECAY=0,0.1 --name shape

All other flags are settings. The runs are in OUTPUT_DIR/NAME. With several GPUs, each GPU trains one run at
a time. If interrupted, the same command resumes. At the end, a table and a report show the mean and standard
error over the seeds, and a test of each configuration against the first one.
"""

import argparse
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser, number  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import aligned, counted, duration, show  # noqa: E402
from config import KIND_OF_STAGE, PLAIN_NAME, START_FROM  # noqa: E402
from data_pipeline.shards import KINDS  # noqa: E402
from data_preparation_utils import prepare_from_flags  # noqa: E402
from extensions.preparation import is_source  # noqa: E402
from extensions.report.compare import by_configuration, results  # noqa: E402
from extensions.report.numbers import number_text  # noqa: E402
from extensions.report.page import Report  # noqa: E402
from parallel.process import EXIT_PREEMPTED, STOP_SIGNALS, VISIBLE  # noqa: E402
from plan.command_line import exit_with  # noqa: E402
from plan.make import make_plan  # noqa: E402

FAILED_ALONE = {1, 4, 6}  # exit codes after which the sweep continues: crash, non-finite loss, hang


class Trial(NamedTuple):
    name: str
    flags: list[str]


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
    args.vary = [(name.strip().lower().replace("-", "_"), [*filter(None, map(str.strip, values.split(",")))])
                for name, _, values in (each.partition("=") for each in args.vary)]
    if empty := [name for name, values in args.vary if not values]:
        raise SettingsError(f"--vary {empty[0]} has no values; write --vary LEARNING_RATE=1e-3,3e-3")
    if args.seeds == 1 and not args.vary:
        raise SettingsError("nothing varies; use --vary NAME=VALUE,VALUE or --seeds above 1")
    args.name = args.name or "-".join(["sweep", *(name for name, _ in args.vary)])
    if not PLAIN_NAME.fullmatch(args.name):
        raise SettingsError(f"--name {args.name} must be a plain folder name: letters, digits, '.', '_', '-'")
    return args, flags


def list_trials(args: argparse.Namespace, flags: list[str]) -> tuple[Path, list[Trial]]:
    """Return the sweep's folder and its runs; exit if a setting is invalid."""
    config = make_plan(flags, complete=False).config
    folder, trials, problems = Path(config.output_dir) / args.name, [], []
    for seed in range(config.seed, config.seed + args.seeds):
        for values in itertools.product(*(values for _, values in args.vary)):
            chosen = [*zip((name for name, _ in args.vary), values), ("seed", str(seed))]
            name = re.sub(r"[^\w.-]", "-", ".".join(f"{setting}-{value}" for setting, value in chosen))
            chosen += [("output_dir", str(folder)), ("run_name", name)]
            trial = Trial(name, [*flags, *(f"--{setting.replace('_', '-')}={value}"
                                           for setting, value in chosen)])
            try:
                settings = make_plan(trial.flags).config
                for setting in (*START_FROM, "teacher_model", "tokenizer_path"):  # a run beside the sweep
                    if (named := getattr(settings, setting)) and (folder.parent / named).is_dir():
                        trial.flags.append(f"--{setting.replace('_', '-')}={folder.parent / named}")
            except SettingsError as error:
                problems += [line for line in str(error).splitlines() if line not in problems]
            trials.append(trial)
    if problems:
        exit_with(SettingsError(*problems))
    return folder, trials


class Sweep:
    """The runs of a sweep, and the processes that train them."""

    def __init__(self, folder: Path, trials: list[Trial]):
        self.folder, self.trials = folder, trials
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.processes: dict[str, subprocess.Popen] = {}
        self.failed: dict[str, int] = {}
        self.received: Optional[int] = None  # a stop signal
        self.seconds: list[float] = []
        self.lock = threading.Lock()

    def is_finished(self, trial: Trial) -> bool:
        run = self.folder / trial.name
        if not (run / "config.json").is_file():
            return False
        reader = Report([run]).runs[0]
        reader.read()
        return reader.state()[0] == "finished"

    def train(self, gpus: list[Optional[str]]) -> None:
        """Train the unfinished runs, one at a time on each of these GPUs (None: the default device)."""
        left = [trial for trial in self.trials if not self.is_finished(trial)]
        show(f"{counted(len(self.trials), 'run')} in {self.folder}, {len(self.trials) - len(left)} finished")
        for position, trial in enumerate(left, 1 + len(self.trials) - len(left)):
            self.waiting.put((position, trial))
        for stop in STOP_SIGNALS:
            signal.signal(stop, self.stop)
        threads = [threading.Thread(target=self.work, args=(gpu, len(gpus)), daemon=True) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)  # with a timeout, so that signals are handled in between

    def stop(self, received: int, frame) -> None:
        self.received = received
        for process in [*self.processes.values()]:
            process.send_signal(signal.SIGTERM)

    def work(self, gpu: Optional[str], workers: int) -> None:
        while self.received is None and not {*self.failed.values()} - FAILED_ALONE:
            try:
                position, trial = self.waiting.get_nowait()
            except queue.Empty:
                return
            where, rounds = f" on GPU {gpu}" if gpu else "", (self.waiting.qsize() + workers) / workers
            left = f", about {duration(fmean(self.seconds) * rounds)} left" if self.seconds else ""
            show(f"=== {position}/{len(self.trials)} {trial.name}{where}{left}")
            started = time.monotonic()
            # A separate session, so that Ctrl-C reaches the run only once, through `stop`.
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *trial.flags], start_new_session=True,
                env=os.environ | ({VISIBLE: gpu} if gpu else {}),
                stdout=subprocess.DEVNULL if workers > 1 else None)
            self.processes[trial.name] = process
            if self.received is not None:
                process.send_signal(signal.SIGTERM)
            code = process.wait()
            del self.processes[trial.name]
            self.seconds.append(time.monotonic() - started)
            if code == EXIT_PREEMPTED and self.received is None:
                self.received = signal.SIGTERM  # the run itself was stopped
            elif code and code != EXIT_PREEMPTED:
                self.failed[trial.name] = code
                show(f"{trial.name} failed with exit code {code}; see {self.folder / trial.name / 'log'}")


def show_table(folder: Path, trials: list[Trial]) -> None:
    """Print a line for each configuration, or for each run if there is one seed, and write the report."""
    report = Report([folder / trial.name for trial in trials])
    report.read()
    measured = [*results(report.runs)]
    if not measured:
        return

    def shown(value: Optional[float], stderr: Optional[float]) -> str:
        return number_text(value, stderr, "accuracy" in measured[0]["name"])

    rows = [("run", measured[0]["name"])]
    rows += [(run.name, shown(cell["value"], cell["stderr"]) if cell else "-")
             for run, cell in zip(report.runs, measured[0]["cells"])]
    legend = "± is one standard error, over the evaluated items."
    if configurations := by_configuration(report.runs, measured):
        rows = [("configuration", "seeds", measured[0]["name"], "vs. first", "p (Holm)")]
        for each in configurations:
            result, test = each["results"][0], each["test"]
            mean = shown(result["mean"], result["stderr"]) if result["n"] else "-"
            sign = "-" if test and test["difference"] < 0 else "+"
            rows.append((each["name"], str(result["n"]), mean, *(
                (sign + shown(abs(test["difference"]), None), f"{test['p']:.2g}") if test else ("", ""))))
        legend = "± is one standard error, over the seeds."
    show(*aligned(rows, left=len(rows[0])), legend)
    subprocess.run([sys.executable, str(ROOT / "scripts/report.py"), *(run.folder for run in report.runs),
                    "--output", str(folder / "report.html")], check=False)


def main() -> None:
    args, flags = parse_args()
    folder, trials = list_trials(args, flags)
    import torch

    visible = os.environ.get(VISIBLE, "").split(",")
    gpus = [visible[place] if visible[0] else str(place) for place in range(torch.cuda.device_count())]
    config = make_plan(flags, complete=False).config
    kind = KIND_OF_STAGE[config.training_stage]
    if (data := os.path.expanduser(config.data_path or "")) and is_source(kind, data):  # once for all runs
        prepared = prepare_from_flags(kind, [*flags, "--source", data])
        for trial in trials:
            trial.flags.append(f"--{KINDS[kind][0].lower().replace('_', '-')}={prepared}")
    sweep = Sweep(folder, trials)
    sweep.train([None] if config.device == "cpu" or len(gpus) < 2 else gpus)
    if sweep.received is not None:
        show("Stopped. Run the same command again to resume.")
        raise SystemExit(EXIT_PREEMPTED)
    if finished := [trial for trial in trials if sweep.is_finished(trial)]:
        show_table(folder, finished)
    if sweep.failed:
        codes = ", ".join(f"{name} (exit code {code})" for name, code in sweep.failed.items())
        raise PaddockError(f"{len(sweep.failed)} of {counted(len(trials), 'run')} failed: {codes}")


if __name__ == "__main__":
    run_script(main)
