"""Remote files by fsspec, and datasets on the Hugging Face hub."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import DataError, requires_package
from common.remote import HUB_NAME, HUB_SECONDS, retry, status_of, why_not
from common.text import print_safely

STALL_SECONDS = 60  # without data before a connection counts as lost


def local_name(url: str) -> str | None:
    """Return the absolute path of a local path or of a file:// URL; None for another URL."""
    path = os.path.expanduser(url)
    if not os.path.lexists(path) and "://" in url:  # names may contain ::
        return url.removeprefix("file://") if url.startswith("file://") else None
    return str(Path.cwd() / path)


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and its name there."""
    from fsspec.core import url_to_fs

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
    with suppress(OSError, ValueError):
        snapshot = Path(snapshot_download(name, repo_type="dataset", revision=revision or None,
                                          local_files_only=True))
        # The client stores this list of files only for complete downloads.
        if (snapshot.parents[1] / "trees" / f"{snapshot.name}.json").is_file():
            return snapshot
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
