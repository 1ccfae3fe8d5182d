"""Kill ranks of runs at random under the launcher, and measure the goodput.

    python scripts/dev/goodput.py --minutes 30 --seed 1
    python scripts/dev/goodput.py --minutes 4 --stages pretrain,sft
    python scripts/dev/goodput.py --sample --save-every 10   # on the sample

Each stage trains undisturbed for half of its share of the time. The same steps are then repeated under
`scripts/launch.py --max-restarts`, while a random rank gets kill -9 at random times, on one and on two ranks
in turn. The run must end with the same weights, optimizer state and ledger, and resume from its last save
after every kill. Its goodput must be at least 0.97 of what the kills allow:

    useful / (useful + kills * (SAVE_EVERY / 2 * step + restart))

`useful` is the time of steps, evaluations and saves that count, and `restart` is 10 s plus the start-up of
the process that resumes. The exit code is 0 if all of this holds.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["OMP_NUM_THREADS"] = "1"

# ruff: noqa: E402
import common  # noqa: F401  # isort: skip (reports a package that is missing)
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from commands import Command
from factories import MODES, UNMEASURED, TinyRun, prepare, prepare_stages

from common.command_line import CommandParser
from common.errors import run_script
from common.text import duration
from extensions.report.data import RunReader

SHARE = 0.97  # of the goodput that the kills allow
RESTART_SECONDS = 10.0  # beyond the start-up
STAGES = ("pretrain", "sft", "dpo-stored", "lora-sft", "distilled-sft")
# The presets of the sample's stages, and what they start from: the undisturbed pretraining.
SAMPLE = {"pretrain": "sample", "sft": "sample,sample-sft", "dpo-stored": "sample,sample-dpo",
          "lora-sft": "sample,sample-sft,sample-lora", "distilled": "sample,sample-student"}
# The weights of a step do not depend on how many follow.
SETTINGS = {**UNMEASURED, "LR_SCHEDULE": "constant", "MAX_STEPS": 10**6, "KEEP_BEST": 0, "KEEP_LAST": 2}


class Measured(NamedTuple):
    """Seconds of a run under kills."""

    useful: float
    lost: float  # repeated steps, downtime and start-up
    allowed: float  # what the kills may cost
    kills: int


class SampleRun(TinyRun):
    """A run of a stage with the sample's presets, in a folder within that of all stages."""

    def __init__(self, mode: str, output_dir: Path, **settings):
        base, self.output_dir = output_dir.parents[1] / "pretrain" / "whole" / "run", output_dir
        start = {} if mode == "pretrain" else {"PRETRAIN_CHECKPOINT": base}
        if mode == "distilled":
            start = {"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": base}
        self.settings = {"PRESET": SAMPLE[mode], "RUN_NAME": "run", "OUTPUT_DIR": output_dir,
                         "LOG_EVERY": 1, **start, **settings}


def launched(run: TinyRun, ranks: int, **changes) -> Command:
    return Command(run, "scripts/launch.py", f"--nproc-per-node={ranks}", "--max-restarts=1000",
                   *run.argv(**changes))


def starts(run: TinyRun) -> list[dict]:
    return [line for line in run.lines("events") if line["event"] == "start"]


def ranks_of(command: Command) -> list[int]:
    found = []
    for pid in command.alive():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(command.pid):
                found.append(pid)
    return found


def train_undisturbed(run: TinyRun, ranks: int, seconds: float) -> int:
    """Train until the time is over; return the number of steps, which are saved."""
    with launched(run, ranks) as command:
        command.wait_for_step(1)
        time.sleep(seconds)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 143, command.text()
    return run.steps_saved()[-1]


def train_under_kills(run: TinyRun, ranks: int, steps: int, kill_every: float, rng: Random) -> None:
    """Train these steps while ranks are killed."""
    seen = 0
    while True:
        with launched(run, ranks, MAX_STEPS=steps) as command:
            while command.process.poll() is None:
                if len(starts(run)) > seen:
                    seen, wait = len(starts(run)), rng.expovariate(1 / kill_every)
                    deadline = time.monotonic() + wait
                    while command.process.poll() is None and time.monotonic() < deadline:
                        time.sleep(0.05)
                    if pids := ranks_of(command):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(rng.choice(pids), signal.SIGKILL)
                time.sleep(0.05)
            code = command.wait()
        # Two starts in a row without a save end a job; here, the kills came too early.
        assert code == 0 or "starts in a row saved no checkpoint" in command.last_line(), command.text()
        if code == 0:
            return


def measure(run: TinyRun, save_every: int) -> Measured:
    """Return where the time of a run went; raise AssertionError if a kill cost more than its last save."""
    reader = RunReader(run.folder, "run")
    reader.read()
    useful = lost = allowed = 0.0
    for number, process in enumerate(reader.processes):
        parts = process.parts()
        useful += parts["steps"] + parts["evaluation"] + parts["saving"] + parts["other"]
        lost += parts["repeated steps"]
        if number:
            lost += parts["start-up"]
            allowed += parts["start-up"] + RESTART_SECONDS
    step = sum(process.steps_seconds for process in reader.processes) / reader.newest
    time_spent = reader.data(10)["goodput"]
    for interruption in time_spent["interruptions"]:
        saves = [event["step"] for event in reader.events
                 if event["event"] == "saved" and event["time"] <= interruption["time"]]
        assert interruption["resumed_from"] >= max(saves, default=0), f"a save is lost: {interruption}"
    lost += {part["name"]: part["seconds"] for part in time_spent["parts"]}["downtime"]
    kills = len(time_spent["interruptions"])
    return Measured(useful, lost, allowed + kills * save_every / 2 * step, kills)


def try_stage(make: Callable[..., TinyRun], mode: str, ranks: int, folder: Path, args,
              rng: Random) -> Measured:
    """Train a stage with and without kills, compare the ends, and print a row of the table."""
    whole, run = (make(mode, folder / name, **SETTINGS, SAVE_EVERY=args.save_every)
                  for name in ("whole", "killed"))
    seconds, started = 60 * args.minutes / len(args.stages or STAGES) / 2, time.monotonic()
    steps = train_undisturbed(whole, ranks, seconds)
    train_under_kills(run, ranks, steps, args.kill_every, rng)
    assert run.hashes(steps) == whole.hashes(steps), f"{mode}: the weights differ at the end"
    assert run.lines("ledger") == whole.lines("ledger"), f"{mode}: the ledgers differ"
    found = measure(run, args.save_every)
    report(mode, ranks, steps, found, time.monotonic() - started)
    return found


def report(mode: str, ranks: int | str, steps: int | str, found: Measured, seconds: float) -> float:
    goodput = found.useful / (found.useful + found.lost)
    bound = found.useful / (found.useful + found.allowed)
    per_kill = (found.lost / found.kills) if found.kills else 0.0
    print(f"| {mode} | {ranks} | {steps} | {found.kills} | {found.useful:.0f} s | {per_kill:.1f} s | "
          f"{goodput:.3f} | {bound:.3f} | {goodput / bound:.3f} | {duration(seconds)} |", flush=True)
    return goodput / bound


def main() -> int:
    parser = CommandParser(__doc__)
    parser.add_argument("--minutes", type=float, default=30, metavar="M",
                        help="minutes of training, without restarts (default: %(default)s)")
    parser.add_argument("--stages", type=lambda text: text.split(","), metavar="NAMES",
                        help=f"stages, separated by commas (default: {','.join(STAGES)})")
    parser.add_argument("--sample", action="store_true",
                        help="train with the sample's presets on its data, which must exist, instead of "
                             "with tiny models")
    parser.add_argument("--kill-every", type=float, default=30, metavar="S",
                        help="mean seconds from a start to its kill (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=50, metavar="N",
                        help="SAVE_EVERY (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills (default: %(default)s)")
    args, started = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paddock-goodput-") as name:
        folder = Path(name)
        make = SampleRun
        if not args.sample:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                stages = prepare_stages(prepare(folder / "data"), folder)
            modes = {**MODES, "pretrain": {"TRAINING_STAGE": "pretrain"}}

            def make(mode: str, folder: Path, **changes) -> TinyRun:
                return TinyRun(stages.prepared, folder, **stages.settings(mode, modes) | changes)

        print("| stage | ranks | steps | kills | useful | lost per kill | goodput | allowed | ratio | time |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        found = [try_stage(make, mode, 1 + number % 2, folder / mode, args, Random(f"{args.seed} {mode}"))
                 for number, mode in enumerate(args.stages or (SAMPLE if args.sample else STAGES))]
    ratio = report("all", "", "", Measured(*map(sum, zip(*found))), time.monotonic() - started)
    return 0 if ratio >= SHARE else 1


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
