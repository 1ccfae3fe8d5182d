"""List the runs in OUTPUT_DIR: stage, step, state, loss, age and size, the newest last.

    ./paddock runs
    ./paddock runs --clean

--clean lists what can be deleted: runs that ended without a checkpoint, runs that RESUME=never moved aside,
what a crash left half-written, and of finished runs the checkpoints that are neither the newest nor the best.
It deletes nothing before you have typed yes. A run that is running, and one that another run starts from,
keeps everything.
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

from checkpoint.manifest import read_sealed  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import CheckpointError, run_script  # noqa: E402
from common.files import FileLock  # noqa: E402
from common.text import show, show_part  # noqa: E402
from config import START_FROM  # noqa: E402
from report.data import RunReader, spelt  # noqa: E402
from settings.load import load_config  # noqa: E402

LOCK = "run.lock"
STARTS = (*(name.upper() for name in START_FROM), "TEACHER_MODEL")
HEADER = ("run", "stage", "step", "state", "loss", "age", "size")


class Run(NamedTuple):
    """A run as a line of the table."""

    folder: Path
    name: str
    stage: str
    step: str
    state: str
    loss: str
    written: float  # time of its last sign of life
    size: int  # bytes
    starts_from: str  # the values of the settings that name another run


class Item(NamedTuple):
    """Something that can be deleted."""

    path: Path
    why: str
    run: Path  # the folder whose lock protects it


def bytes_of(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def size_text(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def age_text(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return "now"


def read_run(folder: Path, name: str) -> Run:
    """Read a run's logs. Raises CheckpointError if the folder is not a run."""
    reader = RunReader(folder, name)
    reader.read()
    step, max_steps = max(0, reader.newest), reader.settings.get("MAX_STEPS") or 0
    state, _ = reader.state(step, max_steps)
    losses = ((kind, reader.value(f"{kind}_loss")) for kind in ("val", "train"))
    loss = next((f"{value:.4f} {kind}" for kind, value in losses if value is not None), "-")
    stage = reader.settings.get("TRAINING_STAGE", "-") + "+lora" * bool(reader.settings.get("LORA_ENABLED"))
    logs = [path.stat().st_mtime for path in folder.glob("*.jsonl")] or [folder.stat().st_mtime]
    starts = " ".join(spelt(reader.settings.get(setting)) for setting in STARTS)
    return Run(folder, name, stage, f"{step:,}/{max_steps:,}", state, loss, max(logs), bytes_of(folder),
               starts)


def read_runs(output_dir: Path) -> list[Run]:
    """Return the runs below a folder, the newest last; also runs in a subfolder, such as pipeline/sft."""
    runs = []
    for folder in (*output_dir.glob("*/"), *output_dir.glob("*/*/")):
        if (folder / "config.json").is_file() and (folder / "configs").is_dir():
            with suppress(CheckpointError):
                runs.append(read_run(folder, str(folder.relative_to(output_dir))))
    return sorted(runs, key=lambda run: run.written)


def table(runs: list[Run]) -> list[str]:
    """Return the runs as lines in columns."""
    now = time.time()
    rows = [HEADER, *((run.name, run.stage, run.step, run.state, run.loss, age_text(now - run.written),
                       size_text(run.size)) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def worse_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run but the newest and the best; none if one of them cannot be read."""
    measured = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            manifest = json.loads(read_sealed(path))
        except CheckpointError:
            return []
        loss = manifest.get("val_loss")
        measured.append((manifest["written"], float("inf") if loss is None else loss, path))
    if not measured:
        return []
    kept = {max(measured)[2], min(measured, key=lambda each: each[1])[2]}
    return [path for *_, path in measured if path not in kept]


def candidates(runs: list[Run]) -> Iterator[Item]:
    """Yield what can be deleted."""
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
    """Delete it under the run's lock; return why not, if a job has the run."""
    with FileLock(item.run / LOCK) as lock:
        if holder := lock.take():
            return f"{item.path} is kept: {holder} has the run"
        shutil.rmtree(item.path)
    return ""


def clean(runs: list[Run]) -> None:
    """List what can be deleted, ask, and delete it."""
    items = [*candidates(runs)]
    if not items:
        return show("There is nothing to delete.")
    sizes = [bytes_of(item.path) for item in items]
    show(*(f"{size_text(size):>10}  {item.path}  ({item.why})" for item, size in zip(items, sizes)))
    total = f"{len(items)} folders, {size_text(sum(sizes))}"
    if not sys.stdin.isatty():
        return show(f"{total}. Nothing was deleted; run this in a terminal to choose.")
    show_part(f"Delete these {total}? Type yes: ")
    if sys.stdin.readline().strip() != "yes":
        return show("Nothing was deleted.")
    kept = [reason for item in items if (reason := delete(item))]
    show(*kept, f"Deleted {len(items) - len(kept)} of {len(items)}.")


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--output-dir", type=Path, metavar="FOLDER",
                        help="the folder that holds the runs (default: OUTPUT_DIR)")
    parser.add_argument("--clean", action="store_true", help="list what can be deleted, and ask")
    args = parser.parse_args()
    output_dir = args.output_dir or Path(load_config(complete=False).config.output_dir)
    runs = read_runs(output_dir) if os.path.isdir(output_dir) else []
    if not runs:
        return show(f"There are no runs in {output_dir}. Start one: ./paddock demo")
    if args.clean:
        return clean(runs)
    show(*table(runs))


if __name__ == "__main__":
    run_script(main)
