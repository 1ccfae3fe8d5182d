"""Files that end: what is opened here is no pipe, which would be waited for, and no device, which may never end."""

import errno
import os
import stat
from pathlib import Path

LARGEST_TEXT = 1 << 26  # bytes of what is read as a whole


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
