"""Data files that are verified once and watched while they are read, and the folders that cache results."""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

from common.errors import DataError, SettingsError
from common.files import atomic_write, plain, read_plain, why_not_writable

VERIFIED = ".verified.json"


class Cache(NamedTuple):
    """The folders for what is computed from data: `chosen`; else beside the data, or else `fallback`."""

    chosen: Optional[Path] = None  # CACHE_DIR
    fallback: Optional[Path] = None

    def places(self, data: Path, fingerprint: str) -> list[Path]:
        """Return the folders in which results for the data in a folder may be, the preferred one first."""
        name = f"data-{fingerprint[:16]}"
        if self.chosen:
            return [self.chosen / name]
        return [data, *([self.fallback / name] if self.fallback else [])]

    def place_to_write(self, data: Path, fingerprint: str, name: str = "") -> tuple[Path, str]:
        """Return the first writable folder, and why the preferred one is not: "" if it is.

        Args:
            name: of the result, an entry there that may exist already and belong to another user.
        Raises:
            DataError: no folder is writable.
        """
        refusals = []
        for place in self.places(data, fingerprint):
            folders = [place, place / name] if os.path.isdir(place / name) else [place]
            refused = [f"{folder} cannot be written: {error.strerror}" for folder in folders
                       if (error := why_not_writable(folder))]
            if not refused:
                return place, "; ".join(refusals)
            refusals.append(refused[0])
        raise DataError(f"{'; '.join(refusals)}; set CACHE_DIR to a writable folder")

    def check(self) -> None:
        """Raise SettingsError if CACHE_DIR cannot be written."""
        if self.chosen and (error := why_not_writable(self.chosen)):
            raise SettingsError(f"CACHE_DIR={self.chosen} cannot be written to: {error.strerror}; set it to "
                                "a writable folder, or leave it unset")


def file_stamp(status: os.stat_result) -> dict[str, int]:
    """Return what identifies an unchanged file in a later process, as JSON."""
    # The change time as well: a copy that preserves the modification time may still be a bad copy.
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def load_verified(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the facts of a folder's verified files by name; {} if none are stored or readable."""
    try:
        known = json.loads(read_plain(folder / VERIFIED))
    except (OSError, ValueError, RecursionError):
        return {}
    well_formed = isinstance(known, dict) and all(isinstance(facts, dict) for facts in known.values())
    return known if well_formed else {}


def save_verified(folder: Path, known: dict[str, dict[str, Any]]) -> bool:
    """Store the facts of a folder's verified files; return whether that was possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / VERIFIED) as temporary:
            temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    except OSError:
        return False
    return True


class WatchedFile:
    """A file that is read in pieces and must not change meanwhile.

    It is not memory-mapped: truncating a mapped file kills the process that reads it (SIGBUS).

    Args:
        status: of the file when it was verified; None = it may change.
        scattered: the pieces are far apart, so the kernel should not read ahead: 100 times faster when cold.
        is_unharmed: returns whether a file with a changed status still has the verified content.
    Raises:
        DataError: the file cannot be read or, in `read`, has changed.
    """

    def __init__(self, path: Path, status: Optional[os.stat_result] = None, scattered: bool = False,
                 is_unharmed: Callable[[os.stat_result], bool] = lambda status: False):
        self.path, self.status, self.is_unharmed = path, status, is_unharmed
        try:
            self.descriptor = plain(str(path), os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self.descriptor)
        if scattered:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on."""
        try:
            # The content first and the status after it, so that no change in between is missed.
            content, now = os.pread(self.descriptor, size, offset), os.fstat(self.descriptor)
        except OSError as error:
            raise self._unreadable(error) from error
        if self.status is not None and _identity(now) != _identity(self.status):
            if not self.is_unharmed(now):
                raise self._changed(now)
            self.status = now
            return self.read(offset, size)
        if len(content) != size:
            raise self._changed(now)
        return content

    def _changed(self, now: os.stat_result) -> DataError:
        before = self.status
        if before is None:
            return DataError(f"{self.path}: is cut short; start again to recompute what is missing")
        if before.st_ino != now.st_ino:
            how = "another file has its name"
        elif before.st_size == now.st_size:
            how = "it was written to"
        else:
            how = f"it had {before.st_size:,} bytes and has {now.st_size:,}"
        return DataError(f"{self.path}: was changed while it was read: {how}; restore the file and start "
                         "again, and the run resumes from its last checkpoint")

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: cannot be read: {error.strerror}; check the disk and the file's "
                         "permissions, and start again")


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    # Not the change time: a backup that makes hard links changes it.
    return status.st_size, status.st_mtime_ns, status.st_ino
