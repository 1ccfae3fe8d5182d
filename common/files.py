"""File primitives: regular files only, durable and atomic writes, SHA-256, locks."""

import codecs
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Optional

from common.activity import tick
from common.errors import CheckpointError, PaddockError
from common.text import ROOT, show

LARGEST_TEXT = 1 << 26  # bytes of a file that is read as a whole
# Errors of a network disk that is temporarily unavailable. A full or read-only disk is an error immediately.
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN,
                    errno.EHOSTDOWN, errno.ENETUNREACH}
BLOCK_BYTES = 1 << 26  # written or synced between ticks
SYNC_AND_WAIT = 1 | 2 | 4  # of linux/fs.h: SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
LIBC = ctypes.CDLL(None)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
AS_UTF8 = "save it as UTF-8, for example with: iconv -f {} -t UTF-8 OLD > NEW"
# Longest first: UTF-16's mark is the start of UTF-32's.
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
                    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
BINARY_STARTS = {b"\x1f\x8b": ".gz", b"BZh9": ".bz2", b"\xfd7zXZ": ".xz",
                 b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}


class NotAFileError(OSError):
    """The path is a pipe, a socket, a device, a folder, or a link that must not be followed."""

    def __init__(self, path: str | Path):
        super().__init__(errno.EINVAL, "is not a plain file but a pipe, device, folder or link", str(path))


class WrongContentError(OSError):
    """The content is not what the file's name says; the message has the remedy."""

    has_remedy = True

    def __init__(self, path: str | Path, content: str, remedy: str):
        super().__init__(errno.EINVAL, f"it is {content}; {remedy}", str(path))

    def __str__(self) -> str:
        return self.strerror


def check_start(path: str | Path, start: bytes, is_text: bool = False, by_suffix: bool = False) -> None:
    """Raise WrongContentError if a file is a git-lfs pointer, packed "text", or text in UTF-16 or UTF-32."""
    if start.startswith(LFS_POINTER):
        raise WrongContentError(path, "a git-lfs pointer, not the file itself", "install git-lfs and run git "
                                f"lfs pull in {Path(path).absolute().parent}, or download the file again")
    suffix = next((suffix for mark, suffix in BINARY_STARTS.items() if start.startswith(mark)), None)
    if suffix and is_text:
        # A reader that goes by the suffix unpacks it.
        may_rename = by_suffix and Path(path).suffix.lower() not in BINARY_STARTS.values()
        remedy = f"rename it to {Path(path).name}{suffix}" if may_rename else "write its content as text"
        raise WrongContentError(path, f"not text but a {suffix} file", remedy)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    # Without a mark, every second byte of English text is 0.
    zeros = start[::2].count(0), start[1::2].count(0)
    if encoding is None and min(zeros) == 0 and 4 * max(zeros) > max(4, len(start) // 2):
        encoding = "UTF-16BE" if zeros[0] else "UTF-16LE"
    if encoding and is_text:
        raise WrongContentError(path, f"{encoding} text", AS_UTF8.format(encoding))


def advice_on_encoding(sample: bytes) -> str:
    """Return how to save a text with these bytes, not all UTF-8; "" if most of its characters are UTF-8."""
    high = re.findall("[^\0-\x7f]", sample.decode("utf-8", "surrogateescape"))
    if 2 * sum("\udc80" <= character <= "\udcff" for character in high) < len(high):
        return ""  # iconv would spoil the others
    return AS_UTF8.format("WINDOWS-1252") + " (with its encoding in place of WINDOWS-1252)"


def plain(path: str, flags: int) -> int:
    """An `opener` for `open` that accepts only regular files, also behind links, and never blocks.

    It refuses to read a git-lfs pointer.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # From a socket or a pipe without a reader; a folder; a link with O_NOFOLLOW.
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP):
            raise NotAFileError(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotAFileError(path)
        if not flags & (os.O_WRONLY | os.O_RDWR):
            start = b""
            with suppress(OSError):  # the reader meets the error again, and may repeat the read
                start = os.pread(descriptor, len(LFS_POINTER), 0)
            check_start(path, start)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the content of a text file. Raises OSError."""
    with open(path, encoding=encoding, opener=plain) as file:
        check_start(path, file.buffer.peek(), is_text=True)
        try:
            return file.read()
        except UnicodeDecodeError as error:
            way = advice_on_encoding(error.object) or "correct it"
            raise WrongContentError(path, f"not UTF-8 text at byte {error.start + 1:,}", way) from error


def read_plain(path: Path) -> bytes:
    """Return the content of a text file of at most LARGEST_TEXT bytes. Raises OSError."""
    with open(path, "rb", opener=plain) as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"is larger than {LARGEST_TEXT:,} bytes", str(path))
    check_start(path, content[:4096], is_text=True)
    return content


def existing_parent(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free


def free_host_memory() -> int:
    """Return the free bytes of the machine's memory, or of the container's if it is limited."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # Linux only
        free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[1])
    with suppress(OSError, ValueError):  # no control group of version 2, or no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + int(cached[1]))
    return free


def why_not_writable(folder: Path) -> Optional[OSError]:
    """Return the error of creating a file in a folder, which need not exist yet, or None."""
    try:
        with tempfile.TemporaryFile(dir=existing_parent(folder)):
            return None
    except OSError as error:
        return error


@contextmanager
def disk_errors(path: Path, failure: type[PaddockError] = CheckpointError,
                advice: str = "set OUTPUT_DIR to a folder that can be written",
                needed_bytes: int = 0) -> Iterator[None]:
    """A `with` block that turns an OSError from writing into `failure` with `advice`."""
    try:
        yield
    except NotAFileError as error:
        raise failure(f"{error.filename} {error.strerror}; move it away") from error
    except OSError as error:
        written = re.sub(r"\.tmp-\d+$", "", str(error.filename2 or error.filename or path))  # atomic_write's
        written = path if "/tmp-" in written else written  # as `store.temporary_of` does
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = f"{needed_bytes:,} bytes needed, " if needed_bytes else ""
        room = f"{needed}{free_bytes(path):,} bytes free; free some space, or " if is_full else ""
        raised = failure(f"{written} cannot be written: {error.strerror or error}; {room}{advice}")
        raised.errno = error.errno  # also on ranks that only get the message
        raise raised from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or ValueError for other content."""
    try:
        content = json.loads(read_text(path, "utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it contains a {type(content).__name__}")
    return content


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sha256(file: BinaryIO, advance: Callable[[int], object] = lambda count: None,
           size: int = sys.maxsize) -> str:
    """Return the SHA-256 of a file's next `size` bytes; `advance` is called with the size of each block."""
    digest = hashlib.sha256()
    while block := file.read(min(1 << 20, size)):
        digest.update(block)
        size -= len(block)
        tick()
        advance(len(block))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file to the disk, block by block, and tick. Raises OSError."""
    # A descriptor reports a failed write only once, so blocks are flushed through a separate one.
    with open(path, "rb") as file, open(path, "rb") as ahead:
        if hasattr(LIBC, "sync_file_range"):
            for start in range(0, os.fstat(ahead.fileno()).st_size, BLOCK_BYTES):
                LIBC.sync_file_range(ahead.fileno(), ctypes.c_int64(start), ctypes.c_int64(BLOCK_BYTES),
                                     SYNC_AND_WAIT)
                tick()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A `with` block that writes to the path it yields, which replaces `path` at the end. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


class FileLock(AbstractContextManager):
    """A file lock, released by `with` or when its holder dies; the file contains the holder's name."""

    def __init__(self, path: Path):
        self.taken, options = False, {"encoding": "utf-8", "errors": "replace"}
        options["opener"] = lambda path, flags: plain(path, flags | os.O_NOFOLLOW)  # protects a link's target
        try:
            self.file = open(path, "a+", **options)
        except PermissionError:  # another user's file, which can still be locked
            self.file = open(path, **options)

    def take(self, warn: Callable[[str], Any] = show) -> str:
        """Try to take the lock; return another holder's name or ""; `warn` if the file system lacks locks."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            return self.file.read(1000).strip() or "another job"
        except OSError as error:  # NFS and Lustre can be mounted without locks
            warn(f"{self.file.name} cannot be locked on this file system ({error.strerror})")
            return ""
        self.taken = True
        self._write_holder(f"process {os.getpid()} on {socket.gethostname()}")
        return ""

    def _write_holder(self, name: str) -> None:
        with suppress(OSError):  # a full disk, or another user's file; the name is only informative
            os.ftruncate(self.file.fileno(), 0)
            os.write(self.file.fileno(), name.encode())

    def __exit__(self, *_) -> None:
        with self.file:  # closing it releases the lock
            if self.taken:
                self._write_holder("")


@cache
def commit() -> str:
    """Return the commit of the code, with -dirty if files changed; empty outside a git repository."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        if (ROOT / ".git").exists():
            return subprocess.run(git, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
                                  env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}).stdout.strip()
    return ""
