"""Files that must stay as they are while they are read, and what is remembered of those that were verified."""

import json
import os
import resource
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from common.errors import DataError
from common.files import plain, read_plain

SEALS = ".verified.json"
OTHER_FILES = 64  # that a process has open besides


def seal(status: os.stat_result) -> dict[str, int]:
    """What stands for a file's contents in a later process."""
    # The change time as well: a copy that keeps the modification time may still be a bad copy.
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def load_seals(folder: Path) -> dict[str, dict[str, Any]]:
    """What is remembered in a folder, by file; {} where nothing is, or not legibly: then everything is read again."""
    try:
        known = json.loads(read_plain(folder / SEALS))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) and all(isinstance(found, dict) for found in known.values()) else {}


def save_seals(folder: Path, known: dict[str, dict[str, Any]]) -> bool:
    """Remember what was found for the next start; whether the folder could be written."""
    unfinished = folder / f"{SEALS}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(known, indent=1), encoding="utf-8")
        unfinished.replace(folder / SEALS)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        return False
    return True


def let_open(files: int, folder: Path) -> None:
    """Raise this process's limit on open files where so many of a folder need it. Raises DataError where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files + OTHER_FILES > hard:
        raise DataError(f"{folder}: has {files:,} shards, and this shell lets a process open {hard:,} files; raise that "
                        "(ulimit -n), or prepare the data again with a larger SHARD_TOKENS")
    if soft < (wanted := min(hard, 2 * (files + OTHER_FILES))):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class WatchedFile:
    """A file that is read piece by piece. It is not mapped into memory, where one that is cut short ends the process (SIGBUS).

    Args:
        status: of the file as it was verified; None: it may change.
        scattered: pieces lie anywhere. Reading ahead would fetch megabytes for each few kilobytes, 100 times slower when cold.
        unharmed: says of a file whose status has changed whether it holds what it did.
    Raises:
        DataError: it cannot be read. Likewise in `read`, where it is not what it was.
    """

    def __init__(self, path: Path, status: Optional[os.stat_result] = None, scattered: bool = False,
                 unharmed: Callable[[os.stat_result], bool] = lambda status: False):
        self.path, self.status, self.unharmed = path, status, unharmed
        try:
            self.descriptor = plain(str(path), os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self.descriptor)
        if scattered:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes from there on; they are looked at first and the file after them, so that no change slips in between."""
        try:
            content, now = os.pread(self.descriptor, size, offset), os.fstat(self.descriptor)
        except OSError as error:
            raise self._unreadable(error) from error
        if self.status is not None and _watched(now) != _watched(self.status):
            if not self.unharmed(now):
                raise self._changed(now)
            self.status = now
            return self.read(offset, size)
        if len(content) != size:
            raise self._changed(now)
        return content

    def _changed(self, now: os.stat_result) -> DataError:
        if (was := self.status) is None:
            return DataError(f"{self.path}: is cut short; start again, and what it lacks is made again")
        how = ("another file has its name" if was.st_ino != now.st_ino else
               "it was written to" if was.st_size == now.st_size else f"it had {was.st_size:,} bytes and has {now.st_size:,}")
        return DataError(f"{self.path}: was changed while it was read: {how}; bring back what it was and start again, then the "
                         "run goes on from its last checkpoint")

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: cannot be read: {error.strerror}; see to the disk and to who may read it, and "
                         "start again")


def _watched(status: os.stat_result) -> tuple[int, int, int]:
    # Not the change time: a backup that makes hard links changes that.
    return status.st_size, status.st_mtime_ns, status.st_ino
