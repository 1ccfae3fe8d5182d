"""Verify that a run resumes exactly: train a few steps without interruption, and again with a kill -9.

    python scripts/verify_resume.py --preset sample
    python scripts/verify_resume.py --nproc-per-node 2 --steps 20

Settings are read as by train.py (.env, environment, flags), except for the number of steps and how often
checkpoints are saved. Both runs must end bit-identical. All files are in a folder created in OUTPUT_DIR,
which is deleted at the end unless something differs.

The exit code is 0 if everything is the same, 1 if something differs, 2 if a setting is invalid.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401  # isort: skip (reports a package that is missing)

from checkpoint import store  # noqa: E402
from checkpoint.schema import read_entries  # noqa: E402
from common.command_line import CommandParser, number  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import command, last_line, show  # noqa: E402
from config import Config  # noqa: E402
from plan.command_line import exit_with, export  # noqa: E402
from plan.make import Plan, make_plan  # noqa: E402
from run.log import CLOCKS  # noqa: E402

STOP_SECONDS = 60  # time for a run to save and exit when this script is stopped
KILL_ATTEMPTS = 5


class Comparison(NamedTuple):
    name: str
    same: bool
    text: str


def find_first_step(config: Config, load: Callable[[list[str]], Plan]) -> tuple[dict[str, Any], int]:
    """Return the settings that start a new run from the given checkpoint, and that checkpoint's step."""
    changes = {"RESUME": "auto"}
    if named := config.named_checkpoint:
        setting = "RESUME" if config.resume == named else config.start_setting
        # A bare name is a step of the user's run, so make it a path.
        folder = store.locate(named, Path(config.output_dir) / (config.run_name or "-"))
        changes[setting] = str(folder.resolve())
    flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in changes.items()]
    changed = load(["--run-name=verify-resume", *flags])
    if not changed.start.is_own and config.start_step is not None:
        return changes, config.start_step
    return changes, changed.start.step


class TrialRun(NamedTuple):
    folder: Path
    flags: list[str]
    ranks: int

    @property
    def step_log(self) -> list[dict[str, Any]]:
        return list(read_entries(self.folder / "ledger.jsonl"))

    @property
    def saved(self) -> list[int]:
        folders = (self.folder / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in folders)

    @property
    def output(self) -> Path:
        return self.folder.with_suffix(".txt")


class Verification(NamedTuple):
    """The settings that all runs share."""

    flags: list[str]  # for train.py
    config: Config
    folder: Path
    start: dict[str, Any]  # settings that name the checkpoint to start from
    first: int  # step of that checkpoint

    def run(self, name: str, steps: int, ranks: int, **changes: Any) -> TrialRun:
        """Return a run in which a few steps include validation, evaluations, samples and checkpoints."""
        config, interval = self.config, max(1, steps // 4)
        often = {name.upper(): min(getattr(config, name), interval)  # 0 stays 0
                 for name in ("validate_every", "hellaswag_every", "sample_every", "drift_check_every")}
        rows = min(config.validation_rows, 2 * config.micro_batch_size * config.world_size)
        settings = {**self.start, **often, "MAX_STEPS": self.first + steps, "SAVE_EVERY": interval,
                    "KEEP_LAST": 1, "KEEP_BEST": 0, "VALIDATION_ROWS": rows, "EARLY_STOPPING_PATIENCE": 0,
                    "HELLASWAG_EXAMPLES": min(config.hellaswag_examples or 8, 8), "LOG_EVERY": 1,
                    "SAMPLE_TOKENS": min(config.sample_tokens, 8), "WANDB_ENABLED": "false",
                    "TENSORBOARD_ENABLED": "false", "REPORT": "false", **changes,
                    "OUTPUT_DIR": self.folder, "RUN_NAME": name}
        flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
        return TrialRun(self.folder / name, [*self.flags, *flags], ranks)  # the last of equal flags counts


@contextmanager
def started(run: TrialRun) -> Iterator[subprocess.Popen]:
    """Start a run in a new session, so that Ctrl-C does not reach it, and stop it when the block ends."""
    script = [ROOT / "train.py"]
    if run.ranks > 1:
        script = [ROOT / "scripts" / "launch.py", f"--nproc-per-node={run.ranks}"]
    with open(run.output, "a") as output:
        process = subprocess.Popen([sys.executable, *map(str, script), *run.flags], stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()


def follow(process: subprocess.Popen, run: TrialRun, title: str, steps: int,
           until: Callable[[], bool] = lambda: False) -> list[float]:
    """Show the progress until the run ends or `until()` is true; return the time of each step."""
    from tqdm import tqdm

    seen: list[float] = []
    with tqdm(desc=title, total=steps, unit="step", leave=False, disable=None) as bar:
        while process.poll() is None and not until():
            new = len(run.step_log) - len(seen)
            seen += [time.monotonic()] * new
            bar.update(new)
            time.sleep(0.005)
    return seen


def finish(run: TrialRun, title: str, steps: int) -> list[float]:
    """Run to the end; return the time of each step. Raise PaddockError if the run fails."""
    with started(run) as process:
        seen = follow(process, run, title, steps)
    if process.returncode:
        printed = run.output.read_text(errors="replace")
        errors = [line.removeprefix("error: ") for line in printed.splitlines() if line.startswith("error: ")]
        reason = errors[-1] if errors else last_line(printed)
        raise PaddockError(f"the run ({title}) failed with exit code {process.returncode}: {reason} (its "
                           f"complete output is in {run.output})")
    return seen


def kill_once(run: TrialRun, first: int, steps: int, step_seconds: float, rng: random.Random) -> str:
    """Start a run, kill -9 its rank 0 at a random time after a checkpoint, and describe when that was."""
    interval = max(1, steps // 4)
    for attempt in range(KILL_ATTEMPTS):
        step = rng.choice(range(first + interval, first + steps - interval + 1, interval))
        delay = interval * step_seconds * rng.random() / 2**attempt
        with started(run) as process:
            follow(process, run, "killed", steps, lambda step=step: bool(run.saved) and run.saved[-1] >= step)
            follow(process, run, "killed", steps,
                   lambda end=time.monotonic() + delay: time.monotonic() >= end)
            holder = re.match(r"process (\d+) ", (run.folder / "run.lock").read_text()) if run.saved else None
            if holder and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(int(holder[1]), signal.SIGKILL)
            process.wait()
        if process.returncode and not run.saved:
            finish(run, "killed", steps)  # it failed before the kill: raise its error
        done = len(run.step_log)
        if process.returncode and done < steps:
            saving = any((run.folder / "checkpoints").glob("tmp-*"))
            return (f"kill -9 of rank 0 after step {first + done}{', during a save' * saving}; the last "
                    f"checkpoint is step {run.saved[-1]}")
        shutil.rmtree(run.folder)
    raise PaddockError(f"in {KILL_ATTEMPTS} attempts, the run always finished before it could be killed; use "
                       f"more steps: --steps {4 * steps}")


# ----------------------------------------------------------------------------------------------- comparison


def compare_files(title: str, is_optimizer: bool, folders: Sequence[Path]) -> Comparison:
    """Compare the files of two checkpoints that have the optimizer's state, or the weights or adapters."""
    one, other = ({name: file for name, file in store.read_manifest(folder)["files"].items()
                   if name.endswith(".safetensors") and (name == store.OPTIMIZER) == is_optimizer}
                  for folder in folders)
    differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return Comparison(title, not differing, f"{' and '.join(differing or one)}"
                      f"{'' if differing else ', bit-identical'}")


def compare_lines(title: str, one: list[dict], other: list[dict], names: tuple[str, ...] = ()) -> Comparison:
    """Compare two lists of entries by these keys, or by all keys except CLOCKS."""
    for a, b in zip(one, other):
        if a["step"] != b["step"]:
            return Comparison(title, False, f"step {a['step']} in one run, step {b['step']} in the other")
        for name in names or sorted(filterfalse(CLOCKS.fullmatch, a.keys() | b.keys())):
            if a.get(name) != b.get(name):
                values = f"{a.get(name)} in one run, {b.get(name)} in the other"
                return Comparison(title, False, f"step {a['step']}: {name} is {values}")
    if len(one) != len(other):
        return Comparison(title, False, f"{len(one)} lines in one run, {len(other)} in the other")
    return Comparison(title, bool(one), f"{len(one)} lines" if one else "there are no lines to compare")


def compare_runs(one: TrialRun, other: TrialRun, last: int) -> list[Comparison]:
    folders = [run.folder / "checkpoints" / f"step-{last:08d}" for run in (one, other)]
    metrics = [list(read_entries(run.folder / "metrics.jsonl")) for run in (one, other)]
    states = [store.read_state(folder)["progress"] | {"wandb_run_id": None} for folder in folders]
    differing = [name for name in states[0] if states[0][name] != states[1].get(name)]
    return [compare_files("weights", False, folders), compare_files("optimizer state", True, folders),
            compare_lines("rows", one.step_log, other.step_log, ("rows_crc32",)),
            compare_lines("losses and norms", one.step_log, other.step_log),
            compare_lines("metrics", *metrics),
            Comparison("progress", not differing, ", ".join(differing) or f"{len(states[0])} entries")]


def check_resume(check: Verification, steps: int, info: Callable[[str, str], None]) -> list[Comparison]:
    """Train without interruption, and with a kill in the middle, and compare the two runs."""
    config, first, last = check.config, check.first, check.first + steps
    straight, killed = (check.run(name, steps, config.world_size) for name in ("straight", "killed"))
    started_at = time.monotonic()
    seen = finish(straight, "straight", steps)
    info("straight", f"{steps} steps in {time.monotonic() - started_at:.0f} s")
    match = re.search(r"Hardware: (.*)", straight.output.read_text(errors="replace"))
    hardware = match[1] if match else "unknown"
    info("hardware", f"{hardware}; DETERMINISTIC={str(config.deterministic).lower()}")

    step_seconds = (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else 0.0
    info("killed", kill_once(killed, first, steps, step_seconds, random.Random(config.seed)))
    finish(killed, "resumed", steps)
    resumed = re.findall(r"resuming after step (\d+)", killed.output.read_text(errors="replace"))
    comparisons = [Comparison("resumed", bool(resumed) and int(resumed[-1]) > first,
                        f"from step {resumed[-1]} to {last}" if resumed else "it restarted from step 0"),
                *compare_runs(straight, killed, last)]
    if all(each.same for each in comparisons):
        return comparisons

    # Did the resume differ, or do two uninterrupted runs differ too?
    again = check.run("straight-again", steps, config.world_size)
    finish(again, "straight again", steps)
    same = all(each.same for each in compare_runs(straight, again, last))
    text = "two uninterrupted runs are the same, so the resume differs"
    if not same:
        text = ("two uninterrupted runs differ too: with these settings, training is not deterministic on "
                "this machine, so no resume can be compared")
        if not (config.deterministic or hardware.startswith("CPU")):
            text += "; set DETERMINISTIC=true and verify again"
    return [*comparisons, Comparison("straight again", same, text)]


def main() -> None:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--steps", default=8, metavar="N", help="number of steps (default: %(default)s)",
                        type=number(int, "of at least 4", lambda value: value >= 4))
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default=1, metavar="N",
                        type=number(int, "of at least 1", lambda value: value >= 1),
                        help="number of ranks (default: %(default)s)")
    args, flags = parser.parse_known_args()

    def load(more: list[str]) -> Plan:
        environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(args.nproc_per_node)}
        return make_plan([*flags, *more], environ)

    try:
        loaded = load([])
        config = loaded.config
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    start, first = find_first_step(config, load)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    folder, keep = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=config.output_dir)), True
    check = Verification(flags, config, folder, start, first)

    def info(name: str, text: str) -> None:
        show(f"  {name:<18}{text}")

    try:
        show(f"Training ({config.training_stage}, ranks: {args.nproc_per_node}) in {folder}")
        compared = check_resume(check, args.steps, info)
        for each in compared:
            info(each.name, f"{'ok' if each.same else 'DIFFERS'}: {each.text}")
        keep = not all(each.same for each in compared)
    except (KeyboardInterrupt, SystemExit):
        keep = False
        raise
    finally:
        if keep:
            show(f"The runs are in {folder}")
        else:
            shutil.rmtree(folder)
    if keep:
        show(f"To find the step: {command('scripts/diff_runs.py', folder / 'straight', folder / 'killed')}")
        raise SystemExit(1)
    print("All runs are the same.")


if __name__ == "__main__":
    run_script(main)
