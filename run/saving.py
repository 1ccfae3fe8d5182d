"""A checkpoint that is being written, and copies of a run's state in host memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from checkpoint import store
from checkpoint.tensors import LazyTensor
from common.errors import CheckpointError
from common.files import free_host_memory
from common.heartbeat import HEARTBEAT, Background
from parallel.fsdp import RowServer

GIB = 2**30
SPARE_MEMORY = 1 * GIB  # of the host, which copies leave free


class HostCopies:
    """Copies of tensors in host memory, which is allocated once; pinned if there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers, self.is_told = device, dict[str, Tensor](), False

    def shortage(self, tensors: Mapping[str, LazyTensor]) -> str:
        """Allocate memory for the tensors; if there is too little, return how much is missing."""
        new = {name: tensor for name, tensor in tensors.items() if name not in self.buffers}
        needed, free = sum(tensor.nbytes for tensor in new.values()), free_host_memory()
        try:
            if not new or needed + SPARE_MEMORY <= free:
                for name, tensor in new.items():
                    self.buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype,
                                                     pin_memory=self.device.type == "cuda")
                    HEARTBEAT.beat()
                return ""
        except RuntimeError:  # the memory cannot be pinned
            self.buffers.clear()
        return f"a copy of the state needs {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB is free"

    def fill(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Copy tensors for which there is room."""
        for name, tensor in tensors.items():
            self.buffers[name].copy_(tensor.whole(), non_blocking=True)
            HEARTBEAT.beat()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Saving:
    """A checkpoint that is being written, in a thread of rank 0 or when it is completed."""

    step: int
    started: float  # by time.perf_counter
    server: RowServer  # of the tensors
    write: Callable[[Path, store.Warn], Path]  # given its final path; returns its temporary one
    folder: Optional[Path] = None  # its final path when the thread was started
    thread: Optional[Background] = None
    blocked: float = 0.0  # seconds in which training stopped for it

    def start(self) -> None:
        """Write it in a thread, which calls no collective."""
        store.make_parent(self.folder)
        self.thread = Background(partial(self.write, self.folder))

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part, or failed."""
        return self.thread is None or not self.thread.is_alive()

    def complete(self, folder: Path, warn: store.Warn) -> None:
        """Wait until it is written, and put it in place."""
        try:
            temporary = folder.with_name(self.thread.result(warn).name) if self.thread else None
        except CheckpointError:
            if folder == self.folder:  # else the run's folder was renamed
                raise
            temporary = None
        if temporary is None:
            store.make_parent(folder)
            temporary = self.write(folder, warn)
        store.put_in_place(temporary, folder, warn)
