"""Writing a prepared set so that a crash at any moment leaves something to go on from: token shards, JSON, the lock."""

import hashlib
import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from common.files import FileLock
from common.text import show
from data_pipeline.shard_reader import HEADER_BYTES, header_bytes

WAIT_SECONDS = 0.2  # between two looks at a lock


class Tokens(NamedTuple):
    """Some documents or examples of one split, one after the other."""

    ids: np.ndarray
    documents: int
    segments: np.ndarray | None = None  # of examples: uint32, how their tokens are cut
    target_tokens: int = 0  # of examples: how many tokens are learned from


class ShardWriter:
    """The shards of one stream of ids while they are written: all full but the last."""

    def __init__(self, folder: Path, stream: str, shard_tokens: int, dtype: str, done: dict | None = None):
        """Go on behind the ids that `done` (an earlier `sync()`) counts; what was written after it is cut off."""
        self.folder, self.stream, self.shard_tokens, self.dtype = folder, stream, shard_tokens, np.dtype(dtype)
        self.tokens, self.shards = (done["tokens"], done["shards"]) if done else (0, [])
        self.file = None
        if self.in_shard:
            self.file, size = open(self.path, "r+b"), HEADER_BYTES + self.in_shard * self.dtype.itemsize
            if os.fstat(self.file.fileno()).st_size < size:
                raise DataError(f"{self.path}: is shorter than its journal says; delete {folder} and start again")
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    @property
    def path(self) -> Path:
        """The shard that is being written, or the next one."""
        return self.folder / f"{self.stream}-{len(self.shards):05d}.bin"

    @property
    def in_shard(self) -> int:
        """Ids in the shard that is being written."""
        return self.tokens - sum(shard["tokens"] for shard in self.shards)

    def write(self, ids: np.ndarray) -> None:
        """Append ids, over as many shards as they need."""
        ids = ids.astype(self.dtype.newbyteorder("<"), copy=False)
        while len(ids):
            if self.file is None:
                self.file = open(self.path, "wb")
                self.file.write(header_bytes(0, self.dtype.name))
            part, ids = np.split(ids, [min(len(ids), self.shard_tokens - self.in_shard)])
            self.file.write(part.data)
            self.tokens += len(part)
            if self.in_shard == self.shard_tokens:
                self.end_shard()

    def end_shard(self) -> None:
        """Patch the shard's header to its true count, and hash the whole file."""
        count, path = self.in_shard, self.path
        self.file.seek(0)
        self.file.write(header_bytes(count, self.dtype.name))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None
        digest = hashlib.sha256()
        with open(path, "rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        self.shards.append({"file": path.name, "tokens": count, "sha256": digest.hexdigest()})

    def sync(self, finish: bool = False) -> dict:
        """Bring everything written so far to the disk, on request as the end of it all; returns the counts that stand for it."""
        if self.file is not None and finish:
            self.end_shard()
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"tokens": self.tokens, "shards": self.shards}

    def close(self) -> None:
        """Let go of the file."""
        if self.file is not None:
            self.file.close()


class SplitWriter:
    """One split while it is written: its tokens and, where it holds examples, the segments that these are cut into."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: str, has_segments: bool, done: dict | None = None):
        """Go on behind what `done` (an earlier `sync()`) counts."""
        done = done or {}
        self.documents, self.target_tokens = done.get("documents", 0), done.get("target_tokens", 0)
        self.ids = ShardWriter(folder, split, shard_tokens, dtype, done)
        self.segments = None
        if has_segments:
            self.segments = ShardWriter(folder, f"{split}-segments", shard_tokens, "uint32", done.get("segments"))

    def write(self, tokens: Tokens) -> None:
        """Append some documents or examples."""
        self.ids.write(tokens.ids)
        self.documents += tokens.documents
        if self.segments is not None:
            self.segments.write(tokens.segments)
            self.target_tokens += tokens.target_tokens

    def sync(self, finish: bool = False) -> dict:
        """Bring everything written so far to the disk, on request as the end of it all; returns the counts that stand for it."""
        ids = self.ids.sync(finish)
        counts = {"tokens": ids["tokens"], "documents": self.documents, "shards": ids["shards"]}
        if self.segments is not None:
            counts |= {"target_tokens": self.target_tokens, "segments": self.segments.sync(finish)}
        return counts

    def close(self) -> None:
        """Let go of the files."""
        self.ids.close()
        if self.segments is not None:
            self.segments.close()


def read_json(path: Path) -> dict:
    """A JSON object that we wrote ourselves, {} where there is none.

    Raises:
        DataError: it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is damaged: {error}; delete it and start again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: is damaged: it holds no JSON object; delete it and start again")
    return content


@contextmanager
def locked(path: Path):
    """Be the only one; wait for whoever holds the lock. The system lets go of it when its holder dies."""
    with FileLock(path) as lock:
        if holder := lock.take():
            show(f"{path.parent}: {holder} prepares the same data; waiting for it")
            while lock.take():
                time.sleep(WAIT_SECONDS)
        yield


@contextmanager
def naming_disk_errors(folder: Path):
    """Turn what the disk refuses into a DataError with the path and the free space."""
    try:
        yield
    except OSError as error:
        place = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
        raise DataError(f"{error.filename or folder}: cannot be written: {error.strerror}; "
                        f"{shutil.disk_usage(place).free:,} bytes are free there; free some, or choose another --output"
                        ) from error
