"""A checkpoint that the ranks of rank 0's machine write together, each its share of the rows."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from checkpoint import store
from checkpoint.manifest import MANIFEST, rows_of_part
from checkpoint.tensors import LazyTensor, TensorFile
from common.activity import Background, tick
from common.files import BLOCK_BYTES, disk_errors, free_host_memory, sync
from common.text import once
from parallel.fsdp import send_rows
from parallel.ranks import Ranks, collective

GIB = 2**30
SPARE_MEMORY = 1 * GIB  # of the host, which copies leave free
Warn = Callable[[str], None]


def pinned_bytes(size: int) -> int:
    """Return the host memory for `size` pinned bytes, which torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class RankShard:
    """The rows of a checkpoint that this rank writes, copied into host memory; pinned if there is a GPU.

    The ranks of rank 0's machine write, because two machines may lose each other's pages of a file. With
    SHARDING, a rank writes those that it holds, up to the blocks that are hashed; those of other machines are
    sent. Otherwise the ranks divide the rows.

    `shards` ranks hold one copy of the model; hashed blocks have a multiple of `block_multiple` rows.
    """

    @collective
    def __init__(self, ranks: Ranks, shards: int, block_multiple: int, warn: Warn):
        self.ranks, self.block_multiple, self.warn = ranks, block_multiple, once(warn)
        local = ranks.broadcast(min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), ranks.world_size))
        copies, writers = max(1, local // shards), min(shards, local)
        copy, shard = divmod(ranks.rank, shards)
        self.parts = copies * writers
        group = range(writers) if copy < copies else ()
        # The parts that the ranks of this rank's shard group write; -1 for none.
        self.parts_of_group = [rank * copies + copy if rank in group else -1 for rank in range(shards)]
        self.part = self.parts_of_group[shard]
        self.tensors: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.kept: dict[str, Tensor] = {}  # memory for copies, allocated once
        self.copied: dict[str, Tensor] = {}
        self.more_rows: Mapping[str, Tensor] = {}  # that follow these tensors in a file

    def span(self, name: str, part: int) -> tuple[int, int]:
        count = self.tensors[name][2]
        rows = count + len(self.more_rows.get(name, ()))
        span = rows_of_part(rows, self.block_multiple, part, self.parts) if part >= 0 else (0, 0)
        return min(span[0], count), min(span[1], count)

    def use(self, tensors: Mapping[str, tuple[Tensor, Tensor, int]]) -> dict[str, LazyTensor]:
        """Return tensors that read what was last copied of them.

        Args:
            tensors: this rank's rows by name, the parameter that they are divided like, and the number of
                rows that are saved.
        """
        self.tensors, self.copied = dict(tensors), {}
        return {name: LazyTensor((count, *like.shape[1:]) if like.ndim else (), rows.dtype,
                                 partial(self._read, name), name)
                for name, (rows, like, count) in tensors.items()}

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        copied, first = self.copied[name], self.span(name, self.part)[0]
        rows = copied[start - first:stop - first] if copied.ndim else copied
        assert not rows.ndim or len(rows) == stop - start, f"{name}: another rank has rows {start} to {stop}"
        return rows

    @collective
    def allocate(self) -> bool:
        """Allocate memory for copies; if there is too little, warn once and return False. Rank 0 decides."""
        new = self.tensors.keys() - self.kept.keys()
        pinned = self.ranks.device.type == "cuda"
        sizes = [like.numel() * rows.itemsize for rows, like, _ in map(self.tensors.get, new)]
        # The parts of a tensor are about equal.
        needed = sum(self.parts * pinned_bytes(size // self.parts) if pinned else size for size in sizes)
        free = free_host_memory()
        fits = self.ranks.broadcast(not new or needed + SPARE_MEMORY <= free)
        try:
            for name in new if fits else ():
                self.kept[name] = self._empty(name, pinned)
                tick()
        except RuntimeError:  # the memory cannot be pinned
            fits = False
        if self.ranks.all_agree(fits):
            return True
        self.kept.clear()
        if torch.cuda.is_initialized():  # torch keeps what was pinned
            torch._C._host_emptyCache()
        self.warn("ASYNC_SAVE: training stops while checkpoints are written, because a copy of the state "
                  f"needs {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB is free")
        return False

    def _empty(self, name: str, pinned: bool = False) -> Tensor:
        start, stop = self.span(name, self.part)
        rows, like, _ = self.tensors[name]
        shape = (stop - start, *like.shape[1:]) if like.ndim else ()
        return torch.empty(shape, dtype=rows.dtype, pin_memory=pinned)

    @collective
    def copy(self, *names: str) -> None:
        """Copy this rank's share of these tensors, and forget the copies of others."""
        self.copied = {}
        for name in names:
            rows, like, count = self.tensors[name]
            copied = self.kept[name] if name in self.kept else self._empty(name)
            if rows.ndim:
                most_rows = max(1, BLOCK_BYTES * count // max(1, like.numel() * rows.itemsize))
                # If every rank holds all rows, each only takes its own.
                parts, place = [self.part] if rows is like else self.parts_of_group, 0
                for piece in send_rows(rows, like, [self.span(name, part) for part in parts], most_rows):
                    copied[place:place + len(piece)].copy_(piece, non_blocking=True)
                    place += len(piece)
            else:
                copied.copy_(rows, non_blocking=True)
            self.copied[name] = copied
            tick()
        if self.ranks.device.type != "cpu":
            torch.get_device_module(self.ranks.device).synchronize()


@dataclass
class PendingSave:
    """A checkpoint that is being written, in a thread of each writing rank or when it is completed."""

    step: int
    started: float  # by time.perf_counter
    shard: RankShard
    files: Mapping[str, TensorFile]
    write_others: Callable[[Path], object]  # writes the other files, on rank 0
    details: Mapping[str, Any]  # of the manifest
    folder: Optional[Path] = None  # its final path when the threads were started
    temporary: Optional[Path] = None
    thread: Optional[Background] = None
    blocked: float = 0.0  # seconds in which training stopped for it

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part, or failed."""
        return self.thread is None or not self.thread.is_alive()

    @collective
    def begin(self, folder: Path, warn: Warn) -> None:
        size = sum(file.nbytes for file in self.files.values())
        self.temporary = Path(self.shard.ranks.broadcast(self.shard.ranks.on_rank0(lambda: str(store.retrying(
            lambda: store.start_writing(folder, self.files, size), warn)))))

    @collective
    def start(self, folder: Path, warn: Warn) -> None:
        """Write the copies in threads, which call no collective."""
        self.folder = folder
        self.begin(folder, warn)
        if self.shard.part >= 0:
            self.thread = Background(lambda warn: store.retrying(partial(self.write, folder), warn))

    def write(self, folder: Path) -> dict[str, list[str]]:
        """Write and sync this rank's part; return the hashes of its blocks of each tensor, by file.

        `folder` is the final path, for errors. Unless everything was copied before, this is collective.
        """
        part, parts, error = self.shard.part, self.shard.parts, None
        hashes: dict[str, list[str]] = {name: [] for name in self.files}
        for name, file in self.files.items():
            for key, tensor in file.tensors.items():
                if not self.folder:
                    self.shard.copy(tensor.source)  # even after an error, because it is collective
                try:
                    if part >= 0 and error is None:
                        hashes[name].append(file.write_rows(self.temporary / name, key, part, parts))
                except Exception as failure:
                    error = failure
        with disk_errors(folder, needed_bytes=sum(file.nbytes for file in self.files.values())):
            if error:
                raise error
            for name in self.files if part >= 0 else ():
                sync(self.temporary / name)
            if part == 0:
                self.write_others(self.temporary)
                # Room for the manifest, so that `finish` succeeds even if the disk fills meanwhile.
                (self.temporary / MANIFEST).write_bytes(bytes(store.MOST_MANIFEST_BYTES))
                sync(self.temporary / MANIFEST)
        return hashes

    @collective
    def complete(self, folder: Path, warn: Warn) -> None:
        ranks = self.shard.ranks
        try:
            if self.folder:
                written = ranks.raise_on_all(lambda: self.thread.result(warn) if self.thread else {})
            else:
                self.begin(folder, warn)
                written = store.retrying(lambda: ranks.raise_on_all(lambda: self.write(folder)), warn)
            parts = sorted(each for each in ranks.all_gather_json([self.shard.part, written]) if each[0] >= 0)
            hashed = {name: file.entry(hashes[name] for _, hashes in parts)
                      for name, file in self.files.items()}
            ranks.on_rank0(lambda: store.finish_writing(self.temporary, folder, self.details, hashed, warn))
        except Exception:
            self.remove()
            raise

    def remove(self) -> None:
        if self.shard.ranks.is_rank0 and self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)
