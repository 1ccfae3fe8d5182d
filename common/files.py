"""Files that end: what is opened here is no pipe, which would be waited for, and no device, which may never end."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Optional

from common.heartbeat import HEARTBEAT

LARGEST_TEXT = 1 << 26  # bytes of what is read as a whole
BLOCK_BYTES = 1 << 26  # of what is written or synced at once, between two signs of life
SYNC_AND_WAIT = 1 | 2 | 4  # of linux/fs.h: SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
LIBC = ctypes.CDLL(None)


class NotAFileError(OSError):
    """What stands there is a pipe, a socket, a device, a folder, or a link where none is followed."""

    def __init__(self, path: str | Path):
        super().__init__(errno.EINVAL, "is no plain file but a pipe, a device, a folder or a link", str(path))


def plain(path: str, flags: int) -> int:
    """An `opener` for `open`, which takes nothing but files, also behind links, and waits for nobody.

    Raises:
        NotAFileError: it is something else.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP):  # a pipe that nobody reads, a socket; a folder; a link
            raise NotAFileError(path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotAFileError(path)


def leads_outside(name: str, folder: Path) -> bool:
    """Whether what has this name in a folder lies outside of it, by the name or behind links.

    In the hub's cache a snapshot's files are links, which may lead anywhere in the cache of that model.
    """
    home = Path(os.path.realpath(folder))
    if home.parent.name == "snapshots":
        home = home.parents[1]
    return ".." in Path(name).parts or not Path(os.path.realpath(folder / name)).is_relative_to(home)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """A file's text, its line ends as newlines.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read, or is no file, or no text.
    """
    with open(path, encoding=encoding, opener=plain) as file:
        return file.read()


def read_plain(path: Path) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read, is no file, or is larger than any text of ours.
    """
    with open(path, "rb", opener=plain) as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"is larger than {LARGEST_TEXT:,} bytes", str(path))
    return content


def why_not_writable(folder: Path) -> Optional[OSError]:
    """What stands against writing into a folder, which need not exist yet; None = nothing. Tried, and nothing is left."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        content = json.loads(read_text(path, "utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    return content


def sha256(file: BinaryIO, advance: Callable[[int], object] = lambda count: None) -> str:
    """Return the SHA-256 of the rest of an open file as hexadecimal digits.

    Args:
        advance: called with the number of bytes of each block that was hashed.
    """
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
        HEARTBEAT.beat()
        advance(len(block))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Bring a file to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "rb") as file, open(path, "rb") as ahead:  # each is told by itself of what could not be written
        if hasattr(LIBC, "sync_file_range"):
            for start in range(0, os.fstat(ahead.fileno()).st_size, BLOCK_BYTES):
                LIBC.sync_file_range(ahead.fileno(), ctypes.c_int64(start), ctypes.c_int64(BLOCK_BYTES), SYNC_AND_WAIT)
                HEARTBEAT.beat()
        os.fsync(file.fileno())


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that after a crash there is either the old file or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """A lock on a file, released by `with` or when its holder dies; the file contains the holder's name.

    Raises:
        OSError: the file cannot be opened, or, in `take`, the file system does not support locks.
    """

    def __init__(self, path: Path):
        self.taken = False
        try:
            self.file = open(path, "a+", encoding="utf-8", errors="replace", opener=_not_through_links)
        except PermissionError:  # another user's file, which can be locked all the same
            self.file = open(path, encoding="utf-8", errors="replace", opener=_not_through_links)

    def take(self) -> str:
        """Take the lock; returns the name of its holder if that is another process, else an empty string."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            return self.file.read(1000).strip() or "another job"
        self.taken = True
        self._write_holder(f"process {os.getpid()} on {socket.gethostname()}")
        return ""

    def _write_holder(self, name: str) -> None:
        with suppress(OSError):  # a full disk, or another user's file; the name is only for people
            os.ftruncate(self.file.fileno(), 0)
            os.write(self.file.fileno(), name.encode())

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_) -> None:
        with self.file:  # closing it releases the lock
            if self.taken:
                self._write_holder("")


def _not_through_links(path: str, flags: int) -> int:
    return plain(path, flags | os.O_NOFOLLOW)  # the target of a link would be overwritten
