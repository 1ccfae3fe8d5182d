"""A checkpoint that the ranks of rank 0's machine write together, each its share of the rows.

With ASYNC_SAVE, each rank copies its share into host memory, and a thread writes the copy while training
continues. Otherwise, training stops while the ranks read and write one tensor after another.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from checkpoint import huggingface, store
from checkpoint.manifest import MANIFEST, rows_of_part
from checkpoint.tensors import LazyTensor, TensorFile, lazy
from common.activity import Background, tick
from common.files import disk_errors, free_host_memory, sync
from common.text import once
from model import Transformer, padded
from parallel.fsdp import is_divided, send_rows
from parallel.ranks import Ranks, collective

GIB = 2**30
SPARE_MEMORY = 1 * GIB  # of the host, which copies leave free
Warn = Callable[[str], None]


def pinned_bytes(size: int) -> int:
    """Return the host memory for `size` pinned bytes, which torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def saved_rows(name: str, tensor: Tensor, model: Transformer) -> int:
    """Return the rows of a parameter, or of its optimizer state, without those of padded ids."""
    if huggingface.is_vocabulary(name) and tensor.shape[:1] == (padded(model.vocab_size),):
        return model.vocab_size
    return tensor.shape[0] if tensor.shape else 1


def restore_padding(tensors: Mapping[str, LazyTensor], model: Transformer) -> dict[str, LazyTensor]:
    """Return a saved optimizer state with rows of zeros for padded ids, which get no gradient."""
    rows = padded(model.vocab_size)
    return {name: tensor.padded(rows) if huggingface.is_vocabulary(name) and tensor.shape else tensor
            for name, tensor in tensors.items()}


class RankShard:
    """The rows of a checkpoint that this rank writes.

    Only the ranks of rank 0's machine write, because two machines may lose each other's pages of a file. With
    SHARDING, a rank writes the rows that it holds, in whole blocks, and gets those of other machines from
    them. Otherwise, the ranks divide the rows.

    `shards` ranks hold one copy of the model; hashed blocks have a multiple of `block_multiple` rows.
    """

    def __init__(self, ranks: Ranks, shards: int, block_multiple: int, warn: Warn):
        self.ranks, self.block_multiple, self.warn = ranks, block_multiple, once(warn)
        local = ranks.on_first_machine
        copies, writers = max(1, local // shards), min(shards, local)
        copy, shard = divmod(ranks.rank, shards)
        self.parts = copies * writers
        group = range(writers) if copy < copies else ()
        # The parts that the ranks of this rank's shard group write; -1 for none.
        self.parts_of_group = [rank * copies + copy if rank in group else -1 for rank in range(shards)]
        self.part = self.parts_of_group[shard]
        self.kept: dict[str, Tensor] = {}  # memory for the copy, allocated once

    def span(self, rows: int, part: int) -> tuple[int, int]:
        return rows_of_part(rows, self.block_multiple, part, self.parts) if part >= 0 else (0, 0)

    def tensor(self, rows: Tensor, like: Tensor, count: int, more: Tensor | tuple = ()) -> LazyTensor:
        """Return a tensor that reads the current values of this rank's share, if all ranks read together.

        This rank's rows are divided like the parameter `like`; `count` of all are saved, and `more` follow.
        """
        def read(start: int, stop: int) -> Tensor:
            if not is_divided(like):
                return rows[start:stop] if rows.ndim else rows
            spans = [self.span(count + len(more), part) for part in self.parts_of_group]
            return send_rows(rows, like, [(min(first, count), min(last, count)) for first, last in spans])

        tensor = LazyTensor((count, *like.shape[1:]) if like.ndim else (), rows.dtype, read)
        return tensor.followed_by(len(more), lazy(more).read) if len(more) else tensor

    @collective
    def copy(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return copies of this rank's share, in the memory that `allocate` provides."""
        copies = {}
        for name, tensor in tensors.items():
            start, stop = self.span(tensor.rows, self.part)
            rows = self.kept[name].copy_(tensor.read(start, stop), non_blocking=True)
            copies[name] = tensor.with_rows(rows, start)
            tick()
        if self.ranks.device.type != "cpu":
            torch.get_device_module(self.ranks.device).synchronize()
        return copies

    @collective
    def allocate(self, tensors: Mapping[str, LazyTensor]) -> bool:
        """Allocate memory for copies; if there is too little, warn once and return False. Rank 0 decides."""
        if not (new := {name: tensor for name, tensor in tensors.items() if name not in self.kept}):
            return True
        pinned, sizes = self.ranks.device.type == "cuda", [tensor.nbytes for tensor in new.values()]
        # The parts of a tensor are about equal.
        needed = sum(self.parts * pinned_bytes(size // self.parts) if pinned else size for size in sizes)
        free = free_host_memory()
        fits = self.ranks.on_rank0(lambda: needed + SPARE_MEMORY <= free)
        try:
            for name, tensor in new.items() if fits else ():
                start, stop = self.span(tensor.rows, self.part)
                shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
                self.kept[name] = torch.empty(shape, dtype=tensor.dtype, pin_memory=pinned)
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


@dataclass
class PendingSave:
    """A checkpoint that is being written, in a thread of each writing rank or when it is completed."""

    step: int
    started: float  # by time.perf_counter
    shard: RankShard
    files: Mapping[str, TensorFile]
    write_others: Callable[[Path], object]  # writes the other files, on rank 0
    details: Mapping[str, Any]  # of the manifest
    folder: Path  # its final path
    temporary: Path
    is_best: bool
    in_background: bool = False
    thread: Optional[Background] = None
    blocked: float = 0.0  # seconds in which training stopped for it

    def start(self, copied_files: Mapping[str, TensorFile]) -> None:
        """Write these files, which contain copies, in a thread, which calls no collective."""
        self.files, self.in_background = copied_files, True
        if self.shard.part >= 0:
            self.thread = Background(lambda warn: store.retrying(self.write, warn))

    def write(self) -> tuple[int, dict[str, list[str]]]:
        """Write and sync this rank's part; return its number, and the hashes of each tensor's blocks by file.

        Collective unless the files contain copies: even a rank without a part reads, to send its rows.
        """
        part, parts, error = self.shard.part, self.shard.parts, None
        hashes: dict[str, list[str]] = {name: [] for name in self.files}
        for file_name, file in self.files.items():
            for name, tensor in file.tensors.items():
                start, stop = self.shard.span(tensor.rows, part)
                share = tensor.with_rows(tensor.read(start, stop), start)  # even after an error
                try:
                    if part >= 0 and error is None:
                        path = self.temporary / file_name
                        hashes[file_name].append(file.write_rows(path, name, share, part, parts))
                except Exception as failure:
                    error = failure
                del share  # before the next is read
        with disk_errors(self.folder, needed_bytes=sum(file.nbytes for file in self.files.values())):
            if error:
                raise error
            for name in self.files if part >= 0 else ():
                sync(self.temporary / name)
            if part == 0:
                self.write_others(self.temporary)
                # Room for the manifest, so that `finish_writing` succeeds even if the disk fills meanwhile.
                (self.temporary / MANIFEST).write_bytes(bytes(store.MOST_MANIFEST_BYTES))
                sync(self.temporary / MANIFEST)
        return part, hashes

    @collective
    def written(self, warn: Warn) -> dict[str, dict[str, Any]]:
        """Wait until every rank has written its part; return the files' fields in the manifest."""
        ranks = self.shard.ranks
        if self.in_background:
            parts = ranks.gather_or_raise(lambda: self.thread.result(warn) if self.thread else (-1, {}))
        else:
            parts = store.retrying(lambda: ranks.gather_or_raise(self.write), warn)
        by_part = [hashes for part, hashes in sorted(parts, key=lambda each: each[0]) if part >= 0]
        return {name: file.entry(hashes[name] for hashes in by_part) for name, file in self.files.items()}

    def remove(self) -> None:
        if self.shard.ranks.is_rank0:
            shutil.rmtree(self.temporary, ignore_errors=True)
