"""Requests to the Hugging Face hub and to remote files, repeated after temporary failures."""

import errno
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from common.activity import foreign_call
from common.errors import DataError, requires_package
from common.text import print_safely, without_passwords

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled after each try, and shortened randomly to spread out clients
STALL_SECONDS = 60  # without data before a connection counts as lost
HUB_SECONDS = 5
TRANSIENT_STATUS = {408, 425, 429, *range(500, 600)}
# By name, because each client has its own classes (requests, httpx, aiohttp).
TRANSIENT_ERRORS = {
    "ConnectionError", "NetworkError", "TimeoutError", "TimeoutException", "RemoteProtocolError", "Timeout",
    "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead", "gaierror"}
PERMANENT_ERRORS = {"OfflineModeIsEnabled", "SSLCertVerificationError", "ClientConnectorCertificateError"}
# Valid hub names: owner/name, or a name without owner and dots. Anything else is a path.
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]{,94}\w)?/\w([\w.-]{,94}\w)?|\w([\w-]{,94}\w)?)")

FILE_SUFFIXES = (".model", ".tiktoken", ".json", ".jsonl", ".bpe", ".txt", ".bin", ".npy", ".safetensors")


def is_hub_name(name: str) -> bool:
    """Return whether this can be a name on the hub: not a file's, nor a path into an existing folder."""
    is_path = os.path.exists(name) or name.endswith(FILE_SUFFIXES) or (
        "/" in name and os.path.isdir(name.partition("/")[0]))  # such as a misspelled `runs/frist`
    return not is_path and HUB_NAME.fullmatch(name) is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without passwords."""
    if type(error) is FileNotFoundError and error.__cause__ is not None:  # fsspec's is only the name
        error = error.__cause__
    return without_passwords((str(error).strip() or type(error).__name__).splitlines()[0])


def _with_causes(error: BaseException) -> list[BaseException]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [error, *(_with_causes(cause) if cause else ())]


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the server's response, or None without a response."""
    for cause in _with_causes(error):
        response = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: no connection, a time-out, a busy server."""
    chain = _with_causes(error)
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    unknown_host = any(isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN
                       for cause in chain)
    if unknown_host or names & PERMANENT_ERRORS:
        return False
    status = status_of(error)
    return bool(names & TRANSIENT_ERRORS) if status is None else status in TRANSIENT_STATUS


def retry(name: str, request: Callable[[], T], only_if_answered: bool = False) -> T:
    """Return the result of `request`, after up to TRIES tries; print a line with `name` before each wait.

    If `only_if_answered`, do not retry if the server never responds: the name may be a mistyped path.
    """
    for number in range(1, TRIES):
        try:
            return request()
        except Exception as error:  # the clients have no common base class
            if not is_transient(error) or only_if_answered and number == 1 and status_of(error) is None:
                raise
            seconds = FIRST_WAIT_SECONDS * 2 ** (number - 1) * random.uniform(0.5, 1)
            print_safely(f"{without_passwords(name)}: {first_line(error)}; retrying in {seconds:.1f} s "
                         f"({number + 1} of {TRIES})", sys.stderr)
        time.sleep(seconds)
    return request()


def why_not(error: Exception) -> str:
    """Return why a request to the hub failed, and what to check; the caller adds an alternative."""
    reason = first_line(error)
    if status_of(error) in (401, 403, 404):
        reason = f"the name does not exist, or this account has no access to it (HTTP {status_of(error)})"
    return f"{reason}; check the name, the network, HF_TOKEN and HF_HUB_OFFLINE, or give"


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or path, and its name there."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    local = os.path.expanduser(url)
    if os.path.lexists(local) or "://" not in url:  # names may contain ::
        return LocalFileSystem(), str(Path.cwd() / local)
    options = {}
    if url.startswith(("http://", "https://")):
        with requires_package("aiohttp", url):
            from aiohttp import ClientTimeout
        # aiohttp's default is 5 minutes for a whole file.
        timeout = ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        options["client_kwargs"] = {"timeout": timeout}
    return url_to_fs(url, **options)


@contextmanager
def downloaded(fs: Any, name: str) -> Iterator[BinaryIO]:
    """Download a file of a remote fsspec file system into a temporary file for the `with` block.

    `simplecache::` makes the same call, but treats a partial file after a lost connection as complete.
    """
    with tempfile.TemporaryDirectory(prefix="download-") as folder:
        local = os.path.join(folder, "content")
        try:
            retry(name, lambda: fs.get_file(name, local))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(f"{name}: the disk of {folder} is full; set TMPDIR to a folder with room for the "
                            "largest file of the source") from error
        file = open(local, "rb")
    with file:  # already unlinked, so that a killed process leaves nothing behind
        yield file


def hub_folder(name: str, required_file: str, is_complete: Callable[[Path], bool],
               revision: str | None = None, **patterns: list[str]) -> Path:
    """Return the cached copy of a hub model if complete, else download it, beginning with `required_file`."""
    with requires_package("huggingface_hub", f"{name}, a name on the hub,"):
        import huggingface_hub as hub
    snapshot = partial(hub.snapshot_download, name, revision=revision, **patterns)
    try:
        folder = Path(snapshot(local_files_only=True))
        if is_complete(folder):
            return folder
    except (OSError, ValueError):  # not in the cache, or not a valid name
        pass
    url = hub.hf_hub_url(name, required_file, revision=revision)
    retry(name, lambda: hub.get_hf_file_metadata(url, timeout=HUB_SECONDS), only_if_answered=True)
    with foreign_call():  # the hub's client has its own time-outs
        return Path(retry(name, snapshot))


def cached_dataset(name: str, config: str, revision: str) -> Path | None:
    """Return the local copy of a hub dataset without a request; the folder is named after the commit.

    It is a whole repository (`hf download`), or the Arrow files of a config (`datasets`); None without both.
    """
    if not HUB_NAME.fullmatch(name):
        return None
    with requires_package("datasets", f"{name}, a dataset of the hub,"):
        from datasets.config import HF_DATASETS_CACHE
        from datasets.naming import camelcase_to_snakecase
        from huggingface_hub import snapshot_download
    try:
        snapshot = Path(snapshot_download(name, repo_type="dataset", revision=revision or None,
                                          local_files_only=True))
        # The client stores this list of files only for complete downloads.
        if (snapshot.parents[1] / "trees" / f"{snapshot.name}.json").is_file():
            return snapshot
    except (OSError, ValueError):
        pass
    owner, _, dataset = name.rpartition("/")
    folder = (f"{owner}___" if owner else "") + camelcase_to_snakecase(dataset)
    commits = [info.parent for info in Path(HF_DATASETS_CACHE, folder, config or "default").glob(
               "*/*/dataset_info.json") if revision in ("", "main", info.parent.name)]
    return max(commits, key=lambda commit: commit.stat().st_mtime, default=None)


@cache
def say_once(line: str) -> None:
    print_safely(line, sys.stderr)


def hub_revision(name: str, revision: str, config: str = "") -> str:
    """Return the current commit of a hub dataset's revision, or that of the local copy if the hub is away."""
    if not HUB_NAME.fullmatch(name):
        raise DataError(f"{name} is not a valid hub name (owner/name); correct it, or give a path")
    with requires_package("huggingface_hub", f"{name}, a dataset of the hub,"):
        from huggingface_hub import HfApi
    try:
        return retry(name, lambda: HfApi().dataset_info(
            name, revision=revision or None, timeout=HUB_SECONDS).sha, only_if_answered=True)
    except Exception as error:  # its class differs between versions of the hub's HTTP library
        if status_of(error) is None and (copy := cached_dataset(name, config, revision)):
            say_once(f"{name}: the hub cannot be reached; using its local copy, commit {copy.name}")
            return copy.name
        without_copy = f" (no local copy has its config {config or 'default'!r})" * (status_of(error) is None)
        raise DataError(f"{name} is not a local file or folder, and the request to the hub failed: "
                        f"{why_not(error)} a path{without_copy}") from error
