"""A run's folder: its name, its lock, its settings files, and how RESUME=never moves a run aside.

Until all checks of a start have passed, only the lock changes in it.
"""

import fcntl
import fnmatch
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Optional

from checkpoint.schema import SCHEMAS
from checkpoint.store import Warn, warn_on_console
from common.errors import CheckpointError
from common.files import FileLock, disk_errors
from config import Config
from run.log import REPORT

LOCK = "run.lock"
SEGMENTS = "configs"  # subfolder with the settings by first step
DATA = "data.json"  # the sources of a mixture and their shares
# Patterns of the files that a run writes. Once the checkpoints have moved, the run counts as moved aside.
RUN_FILES = ("checkpoints", "config.json", SEGMENTS, *SCHEMAS, DATA, REPORT, "log", "power*.csv", "profile",
             "debug", "tensorboard", *(f"{log}.bad" for log in SCHEMAS))
LOCK_ATTEMPTS = 10  # another job may delete the lock together with its folder


@dataclass(frozen=True)
class RunFolder:
    """A run's folder."""

    path: Path
    descriptor: Optional[int] = None  # of the open folder, on rank 0 only

    @property
    def is_lost(self) -> bool:
        """True on rank 0 if the folder was renamed or deleted after the start."""
        try:
            return (self.descriptor is not None
                    and not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network disk is away; the next write there reports it
            return False


@contextmanager
def make_and_lock(config: Config, warn: Warn) -> Iterator[RunFolder]:
    """Yield the run's folder, created if needed and locked against other jobs. Called on rank 0.

    A new folder is removed at the end if nothing was written into it.
    """
    default = f"{config.training_stage}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(config.output_dir) / (config.run_name or default)
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    if config.run_name is None:
        with disk_errors(path):
            path = new_folder(path)
        made = [path, *made[1:]]
    try:
        with lock_run(path, warn), ExitStack() as stack:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(f"{path} is in use by another job, although its {LOCK} was deleted; "
                                      "wait for that job, stop it, or set another RUN_NAME") from error
            except OSError:  # some file systems cannot lock folders; the lock file is held anyway
                pass
            try:
                yield RunFolder(path, descriptor)
            finally:
                with suppress(OSError):
                    if made and os.listdir(path) == [LOCK]:  # while this process holds the lock
                        (path / LOCK).unlink()
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def new_folder(path: Path) -> Path:
    """Create this folder, or the first of NAME-2, NAME-3, ... that does not exist."""
    for number in count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not os.path.lexists(folder):  # a parent is a file
                raise


@contextmanager
def lock_run(run_dir: Path, warn: Warn = warn_on_console) -> Iterator[None]:
    """A `with` block in which no other job can use the run's folder. Rank 0 holds the lock for its job."""
    path = run_dir / LOCK
    for _ in range(LOCK_ATTEMPTS):
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
        with lock:
            if holder := lock.take(lambda why: warn(f"{why}; do not use this RUN_NAME in another job")):
                raise CheckpointError(f"{run_dir} is in use by {holder}; wait for that job, stop it, or set "
                                      "another RUN_NAME")
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.file.fileno())):
                yield
                return
    raise CheckpointError(f"another job keeps deleting {path}; set another RUN_NAME")


def segment_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (first step, settings file) for each part of a run, in order."""
    return sorted((int(path.stem.removeprefix("step-")), path)
                  for path in (run_dir / SEGMENTS).glob("step-*.json")
                  if path.stem.removeprefix("step-").isdecimal())


def write_segment(run_dir: Path, first: int, settings: Mapping[str, Any], sources: list[dict],
                  plan: Mapping[str, Any]) -> None:
    """Write the settings that apply from step `first` on, and what else the plan decided; also config.json.

    `sources`, the table of a mixture, goes into data.json; it is empty for other data.
    """
    newest = run_dir / "config.json"
    with disk_errors(newest):
        earlier = segment_files(run_dir)
        (run_dir / SEGMENTS).mkdir(exist_ok=True)
        for begins, path in earlier:
            if begins > first:  # the run repeats its steps
                path.unlink()
        contents = {run_dir / SEGMENTS / f"step-{first:08d}.json": {**settings, **plan}, newest: settings}
        if sources:
            contents[run_dir / DATA] = {"sources": sources}
        else:  # earlier steps may have read a mixture
            (run_dir / DATA).unlink(missing_ok=True)
        for path, content in contents.items():
            unfinished = path.with_name(f"tmp-{path.name}")
            unfinished.write_text(json.dumps(content, indent=2) + "\n")
            unfinished.replace(path)


def earlier_runs(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("before-*/checkpoints")) + sorted(run_dir.glob("tmp-before-*/checkpoints"))


def archive_run(run_dir: Path, is_wanted: bool) -> Optional[Path]:
    """Move the run in this folder into a subfolder if `is_wanted`; return the subfolder, if any.

    An interrupted move is completed if the checkpoints have moved, else undone. If one file cannot be
    moved, all are moved back, and OSError is raised.
    """
    unfinished = max(run_dir.glob("tmp-before-*"), default=None)
    if unfinished is None and not (is_wanted and has_run(run_dir)):
        return None
    if unfinished is not None and not is_wanted and (run_dir / "checkpoints").exists():
        with suppress(OSError):
            unfinished.rmdir()
        return None

    moving, moved = unfinished or new_folder(run_dir / f"tmp-before-{time.strftime('%Y%m%d-%H%M%S')}"), []
    try:
        for entry in (name for pattern in RUN_FILES for name in fnmatch.filter(os.listdir(run_dir), pattern)):
            (run_dir / entry).rename(moving / entry)
            moved.append(entry)
    except OSError:
        for entry in moved:
            (moving / entry).rename(run_dir / entry)
        with suppress(OSError):
            moving.rmdir()
        raise
    aside = run_dir / moving.name.removeprefix("tmp-")
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}-2")
    return moving.replace(aside)


def has_run(run_dir: Path) -> bool:
    has_checkpoints = any((run_dir / "checkpoints").glob("*"))
    return has_checkpoints or any(file.stat().st_size for file in run_dir.glob("*.jsonl")
                                  if file.name != "events.jsonl")  # it gets a line before the first step
