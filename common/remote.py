"""Requests to the Hugging Face hub, repeated after temporary failures."""

import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.activity import foreign_call
from common.errors import requires_package
from common.text import print_safely, without_passwords

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled after each try, and shortened randomly to spread out clients
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


def hub_folder(name: str, required_file: str, is_complete: Callable[[Path], bool],
               revision: str | None = None, **patterns: list[str]) -> Path:
    """Return the cached copy of a hub model if complete, else download it, beginning with `required_file`."""
    with requires_package("huggingface_hub", f"{name}, a name on the hub,"):
        import huggingface_hub as hub
    snapshot = partial(hub.snapshot_download, name, revision=revision, **patterns)
    with suppress(OSError, ValueError):  # not in the cache, or not a valid name
        folder = Path(snapshot(local_files_only=True))
        if is_complete(folder):
            return folder
    url = hub.hf_hub_url(name, required_file, revision=revision)
    retry(name, lambda: hub.get_hf_file_metadata(url, timeout=HUB_SECONDS), only_if_answered=True)
    with foreign_call():  # the hub's client has its own time-outs
        return Path(retry(name, snapshot))
