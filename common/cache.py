"""Where what is computed of data once is kept, and the lock that lets one process at a time write it."""

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

from common.errors import DataError, SettingsError


def why_not_writable(folder: Path) -> Optional[OSError]:
    """What stands against writing into a folder, which need not exist yet; None = nothing. Tried, and nothing is left."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error


class Cache(NamedTuple):
    """Where what is computed of data is kept: in `chosen`; without it beside the data, or else in `otherwise`."""

    chosen: Optional[Path] = None  # CACHE_DIR
    otherwise: Optional[Path] = None

    def places(self, data: Path, fingerprint: str) -> list[Path]:
        """Where it may lie, for data in a folder, the likeliest first."""
        name = f"data-{fingerprint[:16]}"
        if self.chosen:
            return [self.chosen / name]
        return [data, *([self.otherwise / name] if self.otherwise else [])]

    def place_to_write(self, data: Path, fingerprint: str, name: str = "") -> tuple[Path, str]:
        """Where it can be written, and why not beside the data, in words; empty = it is there, or the user chose.

        Args:
            name: of the folder there that it will be, which may exist and belong to somebody else.
        Raises:
            DataError: nowhere.
        """
        refusals = []
        for place in self.places(data, fingerprint):
            refused = [f"{folder} cannot be written: {error.strerror}" for folder in (place, place / name)
                       if (error := why_not_writable(folder))]
            if not refused:
                return place, "; ".join(refusals)
            refusals.append(refused[0])
        raise DataError(f"{'; '.join(refusals)}; set CACHE_DIR to a folder that can")

    def check(self) -> None:
        """See that what the user chose can be written. Raises SettingsError where it cannot."""
        if self.chosen and (error := why_not_writable(self.chosen)):
            raise SettingsError(f"CACHE_DIR={self.chosen} cannot be written to: {error.strerror}; set it to a folder "
                                "that can, or leave it away")


class FileLock:
    """A `with` block around a lock that the system takes back when its holder dies; the file says who that is.

    Raises:
        OSError: the file cannot be written, or, in `take`, the file system knows no locks.
    """

    def __init__(self, path: Path):
        try:
            self.file = open(path, "a+", encoding="utf-8")
        except PermissionError:
            self.file = open(path, encoding="utf-8")  # another user's, which is enough for a lock

    def take(self) -> str:
        """Who else has the lock, in words; empty: it is taken."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            return self.file.read(1000).strip() or "another process"
        self._name_holder(f"process {os.getpid()} on {socket.gethostname()}")
        return ""

    def _name_holder(self, name: str) -> None:
        with suppress(OSError):  # a full disk, or a file that is another user's; the name is for people
            os.ftruncate(self.file.fileno(), 0)
            os.write(self.file.fileno(), name.encode())

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_) -> None:
        with self.file:  # with which the lock goes
            self._name_holder("")
