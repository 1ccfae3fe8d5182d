"""Text files that grow: each call reads what was appended since the last one."""

import os
from collections.abc import Callable
from pathlib import Path

from checkpoint.schema import MAX_LINE_BYTES
from common.errors import CheckpointError
from common.files import plain

TAIL_BYTES = 256  # compared, to notice that a file was replaced


class GrowingFile:
    """A text file that another process appends to, and that a resumed run replaces by a shorter one.

    Args:
        restart: called before the first line, and again before the first line of a file that was replaced.
        add: called with each complete line; a line that is being written is left for the next call. A line
            for which it raises a ValueError is set aside and counted.
    """

    def __init__(self, path: Path, restart: Callable[[], None], add: Callable[[bytes], None]):
        self.path, self.restart, self.add = path, restart, add
        self.offset, self.tail, self.set_aside = 0, b"", 0

    def read(self) -> None:
        """Read what is new.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            with open(self.path, "rb", opener=plain) as file:
                file.seek(self.offset - len(self.tail))
                if not self.offset or file.read(len(self.tail)) != self.tail:
                    self._begin()
                    file.seek(0)
                while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    self.offset += len(line)
                    self.tail = line[-TAIL_BYTES:]
                    try:
                        self.add(line)
                    except ValueError:
                        self.set_aside += 1
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}; check what is at "
                                  "this path") from error

    def _begin(self) -> None:
        self.offset, self.tail, self.set_aside = 0, b"", 0
        self.restart()


def signature(paths: list[Path], contents: bool = True) -> tuple:
    """Return what changes when one of these files is replaced or removed, and, with `contents`, written."""
    found = []
    for path in paths:
        try:
            facts = os.stat(path)
            found.append((str(path), facts.st_ino, contents and (facts.st_size, facts.st_mtime_ns)))
        except OSError:
            found.append((str(path), None))
    return tuple(found)
