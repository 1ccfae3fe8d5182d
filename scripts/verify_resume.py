"""Check that a run resumes exactly: train a few steps without a stop, and again with a kill -9 in the middle.

    python scripts/verify_resume.py --preset sample
    python scripts/verify_resume.py --nproc-per-node 2 --steps 20
    python scripts/verify_resume.py --layouts 1x4,1x2,2x2

Settings are read as in train.py (.env, environment, flags), except for the number of steps and how often
checkpoints are saved. Both runs must end with the same bits. With --layouts, each RANKSxMICRO_BATCH_SIZE also
takes one step of the same batch, and the gradients are compared; --steps 0 does only that. All files go to a
new folder in OUTPUT_DIR, which is removed at the end unless something differs.

The exit code is 0 if everything is the same, 1 if something differs, 2 if a setting is wrong.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401  # isort: skip (reports a package that is missing)

from checkpoint.schema import read_entries  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import last_line, show  # noqa: E402
from config import Config  # noqa: E402
from run.log import CLOCKS  # noqa: E402
from settings.load import Loaded, exit_with, export, load_config  # noqa: E402

STOP_SECONDS = 60  # for a run to save and exit when this script is stopped
KILL_ATTEMPTS = 5
# Differences allowed between layouts, relative to the largest gradient: sums run in another order, and in
# bf16 and fp16 the gradient of each micro-batch is rounded separately.
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


class Verdict(NamedTuple):
    """One line of the table."""

    name: str
    same: bool
    text: str


def find_first_step(config: Config, load: Callable[[list[str]], Loaded]) -> tuple[dict[str, Any], int]:
    """The settings with which a new run starts from the checkpoint that is named, and the steps it has done.

    `load` reads the settings again, with further flags.
    """
    from checkpoint import store
    from parallel.ranks import Ranks
    from run.start import find_start

    changes = {"RESUME": "auto"}
    if named := config.named_checkpoint:
        setting = "RESUME" if config.resume == named else config.start_setting
        # A bare name means a step of the user's own run, so it becomes a path.
        folder = store.locate(named, Path(config.output_dir) / (config.run_name or "-"))
        changes[setting] = str(folder.resolve())
    changed = load([f"--{name.lower().replace('_', '-')}={value}" for name, value in changes.items()])
    start = find_start(changed, None, Path(config.output_dir) / "verify-resume", Ranks())
    if not start.is_own and config.start_step is not None:
        return changes, config.start_step
    return changes, start.state["progress"]["step"] if start.state else 0


# ----------------------------------------------------------------------------------------------------- runs


class TrialRun(NamedTuple):
    """A run that this script starts."""

    folder: Path
    flags: list[str]
    ranks: int

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """The lines of ledger.jsonl so far, one a step."""
        return list(read_entries(self.folder / "ledger.jsonl"))

    @property
    def saved(self) -> list[int]:
        folders = (self.folder / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in folders)

    @property
    def output(self) -> Path:
        """The file that it prints to."""
        return self.folder.with_suffix(".txt")


class Verification(NamedTuple):
    """What all runs have in common."""

    flags: list[str]  # for train.py
    config: Config
    folder: Path
    start: dict[str, Any]  # the settings that name the checkpoint to start from
    first: int  # the step that they start after

    def run(self, name: str, steps: int, ranks: int, **changes: Any) -> TrialRun:
        """A run with settings by which a few steps include everything that happens in a run."""
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
        own = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
        return TrialRun(self.folder / name, [*self.flags, *own], ranks)  # the last flag of a name counts


@contextmanager
def started(run: TrialRun) -> Iterator[subprocess.Popen]:
    """Start the run in its own process group, which Ctrl-C does not reach, and stop it at the end."""
    command = [ROOT / "train.py"]
    if run.ranks > 1:
        command = [ROOT / "scripts" / "launch.py", f"--nproc-per-node={run.ranks}"]
    with open(run.output, "a") as output:
        process = subprocess.Popen([sys.executable, *map(str, command), *run.flags], stdin=subprocess.DEVNULL,
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


def follow(process: subprocess.Popen, run: TrialRun, what: str, steps: int,
           until: Callable[[], bool] = lambda: False) -> list[float]:
    """Show the progress until the run ends or `until()` is true; returns when each step was seen."""
    from tqdm import tqdm

    seen: list[float] = []
    with tqdm(desc=what, total=steps, unit="step", leave=False, disable=None) as bar:
        while process.poll() is None and not until():
            new = len(run.ledger) - len(seen)
            seen += [time.monotonic()] * new
            bar.update(new)
            time.sleep(0.005)
    return seen


def finish(run: TrialRun, what: str, steps: int) -> list[float]:
    """Run to the end; returns when each step was seen. Raises PaddockError if the run fails."""
    with started(run) as process:
        seen = follow(process, run, what, steps)
    if process.returncode:
        printed = run.output.read_text(errors="replace")
        errors = [line.removeprefix("error: ") for line in printed.splitlines() if line.startswith("error: ")]
        reason = errors[-1] if errors else last_line(printed)
        raise PaddockError(f"the run ({what}) ended with exit code {process.returncode}: {reason} (its whole "
                           f"output is in {run.output})")
    return seen


def kill_once(run: TrialRun, first: int, steps: int, step_seconds: float, rng: random.Random) -> str:
    """Start a run after the step `first`, and kill -9 its rank 0 at a random time after a checkpoint.

    Returns when that was.
    """
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
            finish(run, "killed", steps)  # it failed before the kill, and fails again with its reason
        done = len(run.ledger)
        if process.returncode and done < steps:
            saving = any((run.folder / "checkpoints").glob("tmp-*"))
            return (f"kill -9 of rank 0 after step {first + done}{' and in the middle of a save' * saving}; "
                    f"step {run.saved[-1]} was saved")
        shutil.rmtree(run.folder)
    raise PaddockError(f"the run ended before it could be killed, {KILL_ATTEMPTS} times; take more steps: "
                       f"--steps {4 * steps}")


# ----------------------------------------------------------------------------------------------- comparison


def tensors_in(checkpoint: Path, optimizer: bool) -> dict[str, Callable]:
    """Functions that read each tensor of the optimizer's state, or of the weights or adapters, by name."""
    from safetensors import safe_open

    tensors: dict[str, Callable] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        if (path.name == "optimizer.safetensors") == optimizer:
            file = safe_open(path, framework="pt")
            tensors |= {name: partial(file.get_tensor, name) for name in file.keys()}
    return tensors


def compare_tensors(what: str, one: Mapping[str, Callable], other: Mapping[str, Callable]) -> Verdict:
    """Compare two sets of tensors bit by bit."""
    import torch

    if one.keys() != other.keys():
        return Verdict(what, False, f"only in one run: {', '.join(sorted(one.keys() ^ other.keys())[:3])}")
    differing = []
    for name in one:
        a, b = one[name](), other[name]()
        if a.shape != b.shape:
            differing.append(f"{name}, of another shape")
        elif not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
            differing.append(f"{name} by {float((a.double() - b.double()).abs().max()):.2g}")
    if differing:
        return Verdict(what, False, f"{len(differing)} of {len(one)} tensors, first {differing[0]}")
    return Verdict(what, True, f"{len(one)} tensors, bit for bit")


def compare_lines(what: str, one: list[dict], other: list[dict], names: tuple[str, ...] = ()) -> Verdict:
    """Compare two lists of entries by these keys, or by all keys except CLOCKS."""
    for a, b in zip(one, other):
        if a["step"] != b["step"]:
            return Verdict(what, False, f"step {a['step']} in one run, step {b['step']} in the other")
        for name in names or sorted(filterfalse(CLOCKS.fullmatch, a.keys() | b.keys())):
            if a.get(name) != b.get(name):
                return Verdict(what, False, f"step {a['step']}: {name} is {a.get(name)} in one run, "
                                            f"{b.get(name)} in the other")
    if len(one) != len(other):
        return Verdict(what, False, f"{len(one)} lines in one run, {len(other)} in the other")
    return Verdict(what, bool(one), f"{len(one)} lines" if one else "there are no lines to compare")


def compare_runs(one: TrialRun, other: TrialRun, last: int) -> list[Verdict]:
    """Compare everything that two runs wrote."""
    from checkpoint import store

    folders = [run.folder / "checkpoints" / f"step-{last:08d}" for run in (one, other)]
    metrics = [list(read_entries(run.folder / "metrics.jsonl")) for run in (one, other)]
    states = [store.read_state(folder)["progress"] | {"wandb_run_id": None}
              for folder in folders]
    differing = [name for name in states[0] if states[0][name] != states[1].get(name)]
    return [*(compare_tensors(what, *(tensors_in(folder, what != "weights") for folder in folders))
              for what in ("weights", "optimizer state")),
            compare_lines("rows", one.ledger, other.ledger, ("rows_crc32",)),
            compare_lines("losses and norms", one.ledger, other.ledger), compare_lines("metrics", *metrics),
            Verdict("progress", not differing, ", ".join(differing) or f"{len(states[0])} entries")]


def check_resume(check: Verification, steps: int, info: Callable[[str, str], None]) -> list[Verdict]:
    """Train without a stop, and with a kill in the middle, and compare the two runs."""
    config, first, last = check.config, check.first, check.first + steps
    straight, killed = (check.run(name, steps, config.world_size) for name in ("straight", "killed"))
    started_at = time.monotonic()
    seen = finish(straight, "straight", steps)
    info("straight", f"{steps} steps in {time.monotonic() - started_at:.0f} s")
    found = re.search(r"Hardware: (.*)", straight.output.read_text(errors="replace"))
    hardware = found[1] if found else "unknown"
    info("hardware", f"{hardware}; DETERMINISTIC={str(config.deterministic).lower()}")

    step_seconds = (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else 0.0
    info("killed", kill_once(killed, first, steps, step_seconds, random.Random(config.seed)))
    finish(killed, "resumed", steps)
    resumed = re.findall(r"resuming after step (\d+)", killed.output.read_text(errors="replace"))
    verdicts = [Verdict("resumed", bool(resumed) and int(resumed[-1]) > first,
                        f"from step {resumed[-1]} to {last}" if resumed else "it restarted from step 0"),
                *compare_runs(straight, killed, last)]
    if all(verdict.same for verdict in verdicts):
        return verdicts

    # Does the resume differ, or does this machine never compute the same bits twice?
    again = check.run("straight-again", steps, config.world_size)
    finish(again, "straight again", steps)
    same = all(verdict.same for verdict in compare_runs(straight, again, last))
    text = "two straight runs are the same, so the resume differs"
    if not same:
        text = ("two straight runs differ too: with these settings this machine computes other bits each "
                "time, and no resume can be compared")
        if not (config.deterministic or hardware.startswith("CPU")):
            text += "; set DETERMINISTIC=true, and verify again"
    return [*verdicts, Verdict("straight again", same, text)]


# -------------------------------------------------------------------------------------------------- layouts


def parse_layouts(text: str) -> list[tuple[int, int]]:
    """(ranks, rows of a micro-batch) of each layout. Raises SettingsError if the text is malformed."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(found) or len(found) < 2:
        raise SettingsError(f"command line: --layouts {text}: expected two or more RANKSxMICRO_BATCH_SIZE, "
                            "such as 1x4,1x2,2x2")
    return [(int(match[1]), int(match[2])) for match in found]


def compare_gradients(name: str, one: Mapping[str, Callable], other: Mapping[str, Callable],
                      dtype: str) -> Verdict:
    """Compare the gradients of one step by the optimizers' first moments, which are proportional to them."""
    largest_difference, where, found = 0.0, "", False
    for kind in (".exp_avg", ".momentum_buffer"):  # of AdamW and of Muon, which scale them differently
        names = [key for key in one if key.endswith(kind)]
        found |= bool(names)
        largest = max((float(one[key]().abs().max()) for key in names), default=0.0)
        for key in names:
            a, b = one[key]().double(), other[key]().double()
            difference = float((a - b).abs().max()) / largest if largest else 0.0
            if not difference <= largest_difference:  # NaN counts
                largest_difference, where = difference, f", most in {key.removesuffix(kind)}"
    if not found:
        return Verdict(name, False, "the step was skipped, as fp16 does at first: set PRECISION=bf16 or fp32")
    return Verdict(name, largest_difference <= ALLOWED[dtype],
                   f"gradients differ by {largest_difference:.1e} of the largest{where} "
                   f"({ALLOWED[dtype]:.0e} is allowed in {dtype})")


def check_layouts(check: Verification, layouts: list[tuple[int, int]]) -> Iterator[Verdict]:
    """Take one step of the same batch with each layout, and compare its gradients with the first layout's."""
    from model_utils import choose_device, choose_dtype

    dtype = str(choose_dtype(check.config, choose_device(check.config))).removeprefix("torch.")
    # Each rank draws its own dropout, and TF32 rounds as it likes.
    changes = {"VALIDATE_EVERY": 0, "HELLASWAG_EVERY": 0, "SAMPLE_EVERY": 0, "LORA_DROPOUT": 0,
               "TF32": "false"}
    runs: list[TrialRun] = []
    for ranks, rows in layouts:
        name = f"layout {ranks}x{rows}"
        runs.append(check.run(name.replace(" ", "-"), 1, ranks, **changes, MICRO_BATCH_SIZE=rows))
        finish(runs[-1], name, 1)
        if len(runs) == 1:
            yield Verdict(name, True, f"loss {runs[0].ledger[0]['loss']:.6f}; the others are compared to it")
            continue
        same_rows = compare_lines(name, runs[0].ledger, runs[-1].ledger, ("rows_crc32",))
        folders = (run.folder / "checkpoints" / f"step-{check.first + 1:08d}" for run in (runs[0], runs[-1]))
        moments = [tensors_in(folder, optimizer=True) for folder in folders]
        yield compare_gradients(name, *moments, dtype) if same_rows.same else same_rows


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and the flags for train.py."""
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=8, metavar="N",
                        help="steps to train; 0 = only --layouts (default: %(default)s)")
    parser.add_argument("--layouts", metavar="RxM,...",
                        help="ranks x MICRO_BATCH_SIZE to compare, such as 1x4,1x2,2x2")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="N",
                        help="ranks (default: %(default)s)")
    args, flags = parser.parse_known_args()
    if args.nproc_per_node < 1 or not (args.steps >= 4 or (args.steps == 0 and args.layouts)):
        parser.error("--steps must be 4 or more, or 0 with --layouts; --nproc-per-node must be 1 or more")
    return args, flags


def main() -> None:
    args, flags = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

    def load(more: list[str], ranks: int = args.nproc_per_node) -> Loaded:
        environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        return load_config([*flags, *more], environ)

    try:
        loaded = load([])
        config = loaded.config
        layouts = parse_layouts(args.layouts) if args.layouts else []
        for ranks, rows in layouts:  # all are checked before anything is started
            load([f"--micro-batch-size={rows}"], ranks)
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    start, first = find_first_step(config, load)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    folder, keep = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=config.output_dir)), True
    check = Verification(flags, config, folder, start, first)

    def info(name: str, text: str) -> None:
        show(f"  {name:<18}{text}")

    def report(verdict: Verdict) -> bool:
        info(verdict.name, f"{'ok' if verdict.same else 'DIFFERS'}: {verdict.text}")
        return verdict.same

    try:
        show(f"Training ({config.training_stage}, ranks: {args.nproc_per_node}) in {folder}")
        verdicts = check_resume(check, args.steps, info) if args.steps else []
        same = [report(verdict) for verdict in chain(verdicts, check_layouts(check, layouts))]
        keep = not all(same)
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if keep:
            show(f"The runs are kept in {folder}")
        else:
            shutil.rmtree(folder)
    if keep:
        raise SystemExit(1)
    print("Everything is the same.")


if __name__ == "__main__":
    run_script(main)
