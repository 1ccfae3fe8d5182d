"""A run's folder: its name, its lock, what RESUME=never moves aside, and where it is after somebody has renamed it.

Nothing in it but the lock is touched before the start is accepted.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Optional

from checkpoint.store import warn_on_console
from common.errors import CheckpointError
from common.files import plain
from config import Config
from parallel.collectives import Ranks
from training.run_log import naming_refusals

LOCK = "run.lock"
SEGMENTS = "configs"  # the folder of the settings of each part of a run
LOGS = tuple(f"{name}.jsonl{bad}" for name in ("metrics", "ledger", "samples") for bad in ("", ".bad"))
# What a run has written. The checkpoints go first: from then on the run that was here lies aside, whatever else is still to go.
OWN = ("checkpoints", *LOGS, "config.json", SEGMENTS, "log", "debug", "tensorboard")
TRIES = 10  # for a lock that another job takes away with its folder at the same moment
Warn = Callable[[str], None]


class RunFolder:
    """Where a run's folder is.

    Args:
        handle: a descriptor of the folder itself, whatever its name; rank 0 has it.
    """

    def __init__(self, path: Path, handle: Optional[int] = None):
        self.path, self.handle = Path(path), handle

    def find(self) -> Optional[Path]:
        """Where it is now; None where it was deleted, or moved to where this process cannot see it."""
        if self.handle is None:
            return self.path
        places = [self.path]
        with suppress(OSError):
            places.append(Path(os.readlink(f"/proc/self/fd/{self.handle}")))
        for place in places:
            try:
                if os.path.samestat(os.stat(place), os.fstat(self.handle)):
                    return place
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # a disk behind a network, whose absence is told by what comes to write there
                return self.path
        return None


@contextmanager
def open_run_folder(config: Config, ranks: Ranks, warn: Warn) -> Iterator[RunFolder]:
    """The run's folder, made where it is not there yet, and locked against a second job; rank 0 decides on its name.

    What was made is gone again afterwards if nothing was written into it. Collective: every rank must call it.

    Raises:
        CheckpointError: another job has it, or it cannot be made or written.
    """
    with ExitStack() as stack:
        own = ranks.on_rank0(lambda: stack.enter_context(hold(config, warn)))
        path = ranks.broadcast(own and str(own.path))
        yield own or RunFolder(path)


@contextmanager
def hold(config: Config, warn: Warn) -> Iterator[RunFolder]:
    """The same, for rank 0."""
    output_dir = Path(config.output_dir)
    path = output_dir / (config.run_name or f"{config.training_stage}-{time.strftime('%Y%m%d-%H%M%S')}")
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    if config.run_name is None:
        with naming_refusals(path):
            path = new_folder(path)
        made = [path, *made[1:]]
    with ExitStack() as stack:
        stack.callback(drop_empty, made)
        stack.enter_context(lock_run(path, warn))
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{path} is in use by another job, although its {LOCK} was deleted; wait for it, stop it, or "
                                  "set another RUN_NAME") from error
        except OSError:  # not all file systems lock folders, and the file is locked
            pass
        if made:
            stack.callback(drop_lone_lock, path)
        yield RunFolder(path, handle)


def numbered(path: Path) -> Iterator[Path]:
    """The same, and with a number after the name, from 2 on."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def new_folder(path: Path) -> Path:
    """Make a folder that nobody else makes: of this name, or where there is one already with a number after it."""
    for folder in numbered(path):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not os.path.lexists(folder):  # it is a parent that is in the way
                raise


def drop_empty(folders: list[Path]) -> None:
    """Delete folders in which there is nothing."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def drop_lone_lock(run_dir: Path) -> None:
    """Delete the lock, which this process has, where there is nothing else."""
    with suppress(OSError):
        if os.listdir(run_dir) == [LOCK]:
            (run_dir / LOCK).unlink()


@contextmanager
def lock_run(run_dir: Path, warn: Warn = warn_on_console) -> Iterator[None]:
    """Keep every other job out of the run's folder; rank 0 holds the lock for its job.

    The system drops the lock of a process that dies, so a stale one is taken over.
    Raises:
        CheckpointError: another job holds it; names that job.
    """
    path = Path(run_dir) / LOCK
    with naming_refusals(path):
        file = take_lock(path, warn)
    with file:
        try:
            yield
        finally:
            with suppress(OSError):  # a disk that has died; the name is for people, and the lock goes with the process
                file.truncate(0)


def take_lock(path: Path, warn: Warn) -> FileIO:
    """The file of the lock, with the name of this process in it. Raises CheckpointError, OSError."""
    with ExitStack() as stack:
        for number in range(1, TRIES + 1):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link, whose target would be written over.
            file = stack.enter_context(open(path, "ab+", buffering=0,
                                            opener=lambda name, flags: plain(name, flags | os.O_NOFOLLOW)))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read(1000).decode(errors="replace").strip() or "another job"
                raise CheckpointError(f"{path.parent} is in use by {holder}; wait for it, stop it, or set another "
                                      "RUN_NAME") from error
            except OSError as error:
                warn(f"{path} cannot be locked on this file system ({error}); let no other job use this RUN_NAME")
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
            if number < TRIES:
                file.close()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        stack.pop_all()
        return file


@contextmanager
def make_again(run_dir: Path) -> Iterator[None]:
    """A run's folder, locked, in place of one that is gone.

    Raises:
        CheckpointError: there is another one by now, or it cannot be made.
    """
    with naming_refusals(run_dir):
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError as error:
            raise CheckpointError(f"{run_dir} is another folder than the one that this run began in, which was deleted, or moved "
                                  "to where this job cannot see it; nothing more can be saved") from error
    with lock_run(run_dir):
        yield


# ------------------------------------------------------------------------------------------------------------------- its settings


def segments(run_dir: Path) -> list[tuple[int, Path]]:
    """The settings that each part of a run was trained with: the first step of that part, and the file; in their order."""
    return sorted((int(path.stem.removeprefix("step-")), path) for path in (run_dir / SEGMENTS).glob("step-*.json")
                  if path.stem.removeprefix("step-").isdecimal())


def write_segment(run_dir: Path, first: int, settings: Mapping[str, Any]) -> None:
    """Write down the settings of a part of a run, from its first step on; config.json is the newest of these.

    Raises:
        CheckpointError: they cannot be written.
    """
    newest = run_dir / "config.json"
    with naming_refusals(newest):
        kept = segments(run_dir)
        (run_dir / SEGMENTS).mkdir(exist_ok=True)
        if first > 1 and not kept and newest.exists():  # of a version that kept the newest alone
            shutil.copyfile(newest, run_dir / SEGMENTS / "step-00000001.json")
        for begins, path in kept:
            if begins > first:  # steps that are taken again
                path.unlink()
        for path in (run_dir / SEGMENTS / f"step-{first:08d}.json", newest):
            unfinished = path.with_name(f"tmp-{path.name}")
            unfinished.write_text(json.dumps(settings, indent=2) + "\n")
            unfinished.replace(path)


# ------------------------------------------------------------------------------------------------------------ what is moved aside


def earlier_runs(run_dir: Path) -> list[Path]:
    """The checkpoints of runs that were moved aside, the last one last."""
    return sorted(run_dir.glob("before-*/checkpoints")) + sorted(run_dir.glob("tmp-before-*/checkpoints"))


def move_aside(run_dir: Path, asked: bool) -> Optional[Path]:
    """Move the run that is here into a folder of its own, if that is asked for; and end a move that was interrupted, as the
    place of the checkpoints says: forwards, or before it has begun.

    Returns:
        The folder of what was moved, if any.
    Raises:
        OSError: something cannot be moved; then nothing is.
    """
    unfinished = max(run_dir.glob("tmp-before-*"), default=None)
    if unfinished is None and not (asked and has_run(run_dir)):
        return None
    if unfinished is not None and not asked and (run_dir / "checkpoints").exists():
        with suppress(OSError):
            unfinished.rmdir()
        return None
    moving, moved = unfinished or new_folder(run_dir / f"tmp-before-{time.strftime('%Y%m%d-%H%M%S')}"), []
    try:
        for entry in OWN:
            if os.path.lexists(run_dir / entry):
                (run_dir / entry).rename(moving / entry)
                moved.append(entry)
    except OSError:
        for entry in moved:
            (moving / entry).rename(run_dir / entry)
        with suppress(OSError):
            moving.rmdir()
        raise
    aside = numbered(run_dir / moving.name.removeprefix("tmp-"))
    return moving.replace(next(folder for folder in aside if not os.path.lexists(folder)))


def has_run(run_dir: Path) -> bool:
    """Whether a run has come so far that there is something to keep of it."""
    return any((run_dir / "checkpoints").glob("*")) or any(file.stat().st_size for file in run_dir.glob("*.jsonl"))
