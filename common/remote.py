"""What comes over a network: the hub, and files behind URLs, asked again where a failure may pass."""

import io
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from common.errors import DataError, requires_package
from common.heartbeat import HEARTBEAT
from common.text import print_safely, without_passwords

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled after each try, and shortened at random so that many clients do not come back at once
PASSING_STATUS = {408, 425, 429, *range(500, 600)}
# By name, because each client has classes of its own (requests, httpx, aiohttp), and the hub changes its client.
PASSING_ERRORS = {"ConnectionError", "NetworkError", "TimeoutError", "TimeoutException", "RemoteProtocolError", "Timeout",
                  "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead", "gaierror"}
LASTING_ERRORS = {"OfflineModeIsEnabled", "SSLCertVerificationError", "ClientConnectorCertificateError"}
# As the hub has them: owner/name, or a name alone, which never has a dot. Anything else can only be a path.
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{,94}\w)?/\w([\w.-]{,94}\w)?|\w([\w-]{,94}\w)?)")
HUB_SECONDS = 5


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one line and without passwords."""
    if type(error) is FileNotFoundError and error.__cause__ is not None:  # fsspec's, which has only the name
        error = error.__cause__
    return without_passwords((str(error).strip() or type(error).__name__).splitlines()[0])


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later: no connection, a time-out, or a server that says so.

    Never where it was refused (401, 403), where there is nothing (404), or where HF_HUB_OFFLINE forbids it.
    """
    chain = list(causes(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    if names & LASTING_ERRORS or any(isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN for cause in chain):
        return False
    status = status_of(error)
    return bool(names & PASSING_ERRORS) if status is None else status in PASSING_STATUS


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a server answered with; None where none answered."""
    for cause in causes(error):
        status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def retry(what: str, ask: Callable[[], T]) -> T:
    """What ask() gives, at the latest the fifth time; each wait is told. Its last error is raised as it is.

    Args:
        what: the name of what is asked for.
    """
    for number in range(1, TRIES):
        try:
            return ask()
        except Exception as error:  # the clients share no base class
            if not is_transient(error):
                raise
            seconds = FIRST_WAIT_SECONDS * 2 ** (number - 1) * random.uniform(0.5, 1)
            print_safely(f"{without_passwords(what)}: {first_line(error)}; trying again in {seconds:.1f} s ({number + 1} of {TRIES})",
                 sys.stderr)
        time.sleep(seconds)
    return ask()


def ask_hub(name: str, ask: Callable[[], T]) -> T:
    """What ask() gives. What may be a mistyped path is asked for once; again only where the hub answers to come back later."""
    try:
        return ask()
    except Exception as error:  # the clients share no base class
        if status_of(error) is None or not is_transient(error):
            raise
    return retry(name, ask)


def why_not(error: Exception) -> str:
    """Why the hub does not give something, in a few words."""
    if status_of(error) in (401, 403, 404):
        return f"it has none of that name that may be seen from here (HTTP {status_of(error)})"
    return first_line(error)


def hub_folder(name: str, proof: str, is_whole: Callable[[Path], bool], **wanted: list[str]) -> Path:
    """The local copy of a model on the hub: from the cache where it is whole, else downloaded now.

    What the hub's client raises is raised as it is.

    Args:
        proof: a file that it must have; asked for first, so that what cannot be had fails at once.
        wanted: patterns, as huggingface_hub.snapshot_download takes them.
    """
    with requires_package("huggingface_hub", f"{name}, a name on the hub,"):
        import huggingface_hub as hub
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True, **wanted))
        if is_whole(folder):
            return folder
    except (OSError, ValueError):  # not in the cache, or no name that can be
        pass

    def download() -> Path:
        with HEARTBEAT.beat_in_background():  # the hub's client has time-outs of its own
            return Path(hub.snapshot_download(name, **wanted))

    ask_hub(name, lambda: hub.get_hf_file_metadata(hub.hf_hub_url(name, proof), timeout=HUB_SECONDS))
    return retry(name, download)


def hub_revision(name: str, revision: str) -> str:
    """The commit of a dataset on the hub that a revision (empty = the newest) means now.

    Raises:
        DataError: the hub does not know it, or cannot be reached; or no dataset can have that name.
    """
    if not HUB_NAME.fullmatch(name):
        raise DataError(f"{name} is no name of a dataset on the hub, which is owner/name; mend it, or give a path")
    with requires_package("huggingface_hub", f"{name}, a dataset of the hub,"):
        from huggingface_hub import HfApi
    try:
        return ask_hub(name, lambda: HfApi().dataset_info(name, revision=revision or None, timeout=HUB_SECONDS).sha)
    except Exception as error:  # the hub's HTTP library, and with it the errors' class, differs from version to version
        raise DataError(f"{name} is no file or folder here, and the hub does not give it: {why_not(error)}; "
                        "check the name, the network, HF_TOKEN and HF_HUB_OFFLINE, or give a path") from error


class RemoteFile(io.RawIOBase):
    """A file on a remote file system of fsspec, opened again where the connection is lost, to go on where it was."""

    def __init__(self, fs: Any, name: str, size: int):
        self.fs, self.path, self.size, self.position = fs, name, size, 0
        self.raw, self.raw_position = None, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes from the start."""
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset; nothing is asked for until something is read."""
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer) -> int:
        """Fill the buffer as far as one answer does; 0 = the end."""
        data = retry(self.path, lambda: self._read(len(buffer)))
        buffer[:len(data)] = data
        self.position += len(data)
        return len(data)

    def close(self) -> None:
        """Let go of it."""
        self._disconnect()
        super().close()

    def _read(self, count: int) -> bytes:
        try:
            self._go_to_position()
            data = self.raw.read(count)
        except BaseException:
            self._disconnect()
            raise
        self.raw_position += len(data)
        return data

    def _go_to_position(self) -> None:
        if self.raw is None:
            self.raw, self.raw_position = self.fs.open(self.path, "rb"), 0
        if self.raw_position == self.position:
            return
        try:
            self.raw.seek(self.position)
            self.raw_position = self.position
        except ValueError:  # the server knows no ranges
            if self.raw_position > self.position:
                self._disconnect()
                self.raw, self.raw_position = self.fs.open(self.path, "rb"), 0
            while (left := self.position - self.raw_position) > 0 and (passed := self.raw.read(min(left, 1 << 20))):
                self.raw_position += len(passed)

    def _disconnect(self) -> None:
        if self.raw is not None:
            self.raw.close()
        self.raw = None
