"""Writes token shards so that a crash at any moment leaves something to continue from."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from common.files import sha256
from data_pipeline.shard_reader import HEADER_BYTES, header_bytes


class Tokens(NamedTuple):
    """Consecutive documents or examples of one split."""

    ids: np.ndarray
    documents: int
    segments: np.ndarray | None = None  # of examples: uint32, as tokenize_chats describes them
    target_tokens: int = 0  # of examples: the number of tokens with a loss


class ShardWriter:
    """Writes one stream of ids as shards that are all full except the last."""

    def __init__(self, folder: Path, stream: str, shard_tokens: int, dtype: str, done: dict | None = None):
        """Continue after the ids that `done` (a result of `sync()`) counts; what was written later is cut."""
        self.folder, self.stream, self.shard_tokens = folder, stream, shard_tokens
        self.dtype = np.dtype(dtype)
        self.tokens, self.shards = (done["tokens"], done["shards"]) if done else (0, [])
        self.file = None
        if self.in_shard:
            self.file, size = open(self.path, "r+b"), HEADER_BYTES + self.in_shard * self.dtype.itemsize
            if os.fstat(self.file.fileno()).st_size < size:
                raise DataError(f"{self.path} is shorter than its journal says; delete {folder}, start again")
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    @property
    def path(self) -> Path:
        """The path of the current shard."""
        return self.folder / f"{self.stream}-{len(self.shards):05d}.bin"

    @property
    def in_shard(self) -> int:
        """The number of ids in the current shard."""
        return self.tokens - sum(shard["tokens"] for shard in self.shards)

    def write(self, ids: np.ndarray) -> None:
        """Append ids to as many shards as they need."""
        ids = ids.astype(self.dtype.newbyteorder("<"), copy=False)
        while len(ids):
            if self.file is None:
                self.file = open(self.path, "wb")
                self.file.write(header_bytes(0, self.dtype.name))
            part, ids = np.split(ids, [min(len(ids), self.shard_tokens - self.in_shard)])
            self.file.write(part.data)
            self.tokens += len(part)
            if self.in_shard == self.shard_tokens:
                self._finish_shard()

    def _finish_shard(self) -> None:
        """Write the true count into the shard's header, and hash the whole file."""
        count, path = self.in_shard, self.path
        self.file.seek(0)
        self.file.write(header_bytes(count, self.dtype.name))
        self._flush()
        self.file.close()
        self.file = None
        with open(path, "rb") as file:
            self.shards.append({"file": path.name, "tokens": count, "sha256": sha256(file)})

    def _flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def sync(self, finish: bool = False) -> dict:
        """Write everything to disk and return the counts that `done` takes.

        Args:
            finish: this is the end of the stream.
        """
        if self.file is not None:
            self._finish_shard() if finish else self._flush()
        return {"tokens": self.tokens, "shards": self.shards}

    def close(self) -> None:
        """Close the current file."""
        if self.file is not None:
            self.file.close()


class SplitWriter:
    """Writes one split: its tokens and, if it holds examples, their segments."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: str, has_segments: bool,
                 done: dict | None = None):
        """Continue after what `done` (a result of `sync()`) counts."""
        done = done or {}
        self.documents, self.target_tokens = done.get("documents", 0), done.get("target_tokens", 0)
        self.ids = ShardWriter(folder, split, shard_tokens, dtype, done)
        self.segments = None
        if has_segments:
            self.segments = ShardWriter(folder, f"{split}-segments", shard_tokens, "uint32",
                                        done.get("segments"))

    def write(self, tokens: Tokens) -> None:
        """Append documents or examples."""
        self.ids.write(tokens.ids)
        self.documents += tokens.documents
        if self.segments is not None:
            self.segments.write(tokens.segments)
            self.target_tokens += tokens.target_tokens

    def sync(self, finish: bool = False) -> dict:
        """Do as `ShardWriter.sync`, for the whole split."""
        ids = self.ids.sync(finish)
        counts = {"tokens": ids["tokens"], "documents": self.documents, "shards": ids["shards"]}
        if self.segments is not None:
            counts |= {"target_tokens": self.target_tokens, "segments": self.segments.sync(finish)}
        return counts

    def close(self) -> None:
        """Close the files."""
        self.ids.close()
        if self.segments is not None:
            self.segments.close()
