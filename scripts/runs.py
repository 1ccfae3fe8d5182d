"""List the runs in OUTPUT_DIR with stage, step, state, loss, age and size, the newest last.

    ./paddock runs
    ./paddock runs --clean

--clean lists what can be deleted, and asks before it deletes anything: runs without a checkpoint, runs that
RESUME=never moved aside, incomplete files left by a crash, and checkpoints of finished runs that are neither
the newest nor the best. Active runs, and runs that another run starts from, are never touched.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint.manifest import read_manifest_bytes  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import CheckpointError, run_script  # noqa: E402
from common.files import FileLock, read_json  # noqa: E402
from common.text import (  # noqa: E402
    PROGRAM,
    WIDTH,
    aligned,
    counted,
    duration,
    setting_text,
    show,
    show_part,
)
from config import START_FROM  # noqa: E402
from extensions.report.data import RunReader  # noqa: E402
from extensions.report.numbers import result_text  # noqa: E402
from plan.make import make_plan  # noqa: E402

LOCK = "run.lock"
STARTS = (*(name.upper() for name in START_FROM), "TEACHER_MODEL")
HEADER = ("run", "stage", "step", "state", "loss", "age", "size")


class Run(NamedTuple):
    folder: Path
    name: str
    stage: str
    step: str
    state: str
    loss: str
    written: float  # time of the last log entry
    size: int  # bytes
    starts_from: str  # the values of settings that may name another run


class Item(NamedTuple):
    path: Path
    reason: str
    run: Path  # the run, whose lock is taken


def folder_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def size_text(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def read_run(folder: Path, name: str) -> Run:
    """Read a run's logs. Raise CheckpointError if the folder is not a run."""
    reader = RunReader(folder, name)
    reader.read()
    # A run that stopped before its first step has no config.json.
    if (checkpoint := reader.newest_checkpoint()) and not reader.settings:
        with suppress(OSError, ValueError, LookupError):
            reader.settings = read_json(checkpoint / "trainer_state.json")["settings"]
    settings = reader.settings
    state, _ = reader.state()
    words = {"val_reward": "reward", "val_reward_accuracy": "accuracy", "train_loss": "train"}
    results = {curve: words.get(curve, "val") for curve in (reader.main.curve, "val_loss", "train_loss")}
    found = next((curve for curve in results if curve in reader.curves), None)
    loss = "-"
    if found:
        value, step = reader.curves[found].newest
        loss = f"{result_text(found, value)} {results[found]}{f' at {step:,}' * (step < reader.step)}"
    stage = settings.get("TRAINING_STAGE", "-") + "+lora" * bool(settings.get("LORA_ENABLED"))
    logs = [path.stat().st_mtime for path in folder.glob("*.jsonl")] or [folder.stat().st_mtime]
    starts = " ".join(setting_text(settings.get(setting)) for setting in STARTS)
    steps = f"{reader.step:,}/{reader.max_steps:,}" if settings else str(reader.step)
    return Run(folder, name, stage, steps, state, loss, max(logs), folder_bytes(folder), starts)


def read_runs(output_dir: Path) -> list[Run]:
    """Return the runs in a folder and its subfolders (such as pipeline/sft), the newest last."""
    runs = []
    for folder in (*output_dir.glob("*/"), *output_dir.glob("*/*/")):
        if (folder / "events.jsonl").is_file() or (folder / "configs").is_dir():
            with suppress(CheckpointError):
                runs.append(read_run(folder, str(folder.relative_to(output_dir))))
    return sorted(runs, key=lambda run: run.written)


def table(runs: list[Run]) -> list[str]:
    """Return a line for each run; on a terminal two, the first with its name, if lines would be too wide."""
    now = time.time()
    ages = (" ".join(duration(now - run.written).split()[:2]) for run in runs)
    rows = [HEADER, *((run.name, run.stage, run.step, run.state, run.loss, age, size_text(run.size))
                      for run, age in zip(runs, ages))]
    lines = aligned(rows, left=len(HEADER))
    if max(map(len, lines)) <= WIDTH or not sys.stdout.isatty():
        return lines
    others = aligned([row[1:] for row in rows], left=len(HEADER) - 1)
    return [line for row, other in zip(rows, others) for line in (row[0], f"  {other}")]


def worse_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints of a run except the newest and the best; none if any cannot be read."""
    measured = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            manifest = json.loads(read_manifest_bytes(path))
        except CheckpointError:
            return []
        loss = manifest.get("val_loss")
        measured.append((manifest["written"], float("inf") if loss is None else loss, path))
    if not measured:
        return []
    kept = {max(measured)[2], min(measured, key=lambda each: each[1])[2]}
    return [path for *_, path in measured if path not in kept]


def candidates(runs: list[Run]) -> Iterator[Item]:
    for run in runs:
        others = " ".join(other.starts_from for other in runs if other is not run)
        if run.state in ("running", "unknown") or run.folder.name in others:
            continue
        if not any((run.folder / "checkpoints").glob("step-*")) and not any(run.folder.glob("*before-*")):
            yield Item(run.folder, f"{run.state} without a checkpoint", run.folder)
            continue
        for path in sorted(run.folder.glob("before-*")):
            yield Item(path, "moved aside by RESUME=never", run.folder)
        for path in sorted((*run.folder.glob("checkpoints/tmp-*"), *run.folder.glob("checkpoints/trash-*"))):
            yield Item(path, "left by a crash", run.folder)
        if run.state == "finished":
            for path in worse_checkpoints(run.folder):
                yield Item(path, "neither the newest nor the best of a finished run", run.folder)


def delete(item: Item) -> str:
    """Delete an item, or return why not: a process has the run's lock, or there are no locks."""
    problems: list[str] = []
    with FileLock(item.run / LOCK) as lock:
        if holder := lock.take(problems.append):
            return f"{item.path} was not deleted: the run is in use by {holder}"
        if problems:
            return (f"{item.path} was not deleted: {problems[0]}; if no job uses the run, delete the folder "
                    "yourself")
        shutil.rmtree(item.path)
    return ""


def clean(runs: list[Run]) -> None:
    items = [*candidates(runs)]
    if not items:
        return show("Nothing to delete.")
    sizes = [folder_bytes(item.path) for item in items]
    show(*(f"{size_text(size):>10}  {item.path}  ({item.reason})" for item, size in zip(items, sizes)))
    total = f"{counted(len(items), 'folder')} ({size_text(sum(sizes))})"
    if not sys.stdin.isatty():
        return show(f"Nothing was deleted. To delete {total}, run this command in a terminal; it "
                    "asks first.")
    show_part(f"Delete {total}? Type yes: ")
    if sys.stdin.readline().strip() != "yes":
        return show("Nothing was deleted.")
    kept = [reason for item in items if (reason := delete(item))]
    show(*kept, f"Deleted {len(items) - len(kept)} of {len(items)}.")


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--output-dir", type=Path, metavar="FOLDER",
                        help="folder that contains the runs (default: OUTPUT_DIR)")
    parser.add_argument("--clean", action="store_true", help="list what can be deleted, and ask to delete it")
    args = parser.parse_args()
    output_dir = args.output_dir or Path(make_plan(complete=False).config.output_dir)
    runs = read_runs(output_dir) if os.path.isdir(output_dir) else []
    if not runs:
        return show(f"No runs in {output_dir}. To start one, run {PROGRAM} demo")
    if args.clean:
        return clean(runs)
    show(*table(runs))


if __name__ == "__main__":
    run_script(main)
