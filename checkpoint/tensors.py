"""Read and write safetensors files, tensor by tensor and by rows."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint import manifest
from checkpoint.manifest import GONE, block_rows, rows_of_part, tree_hash
from checkpoint.store import OPTIMIZER, has_file
from common.activity import tick
from common.errors import CheckpointError, unreadable
from common.files import BLOCK_BYTES, plain

DTYPES = {getattr(torch, name): code for name, code in manifest.DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand, by rows. A scalar has one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]  # returns rows start..stop, perhaps as a view

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def full(self) -> Tensor:
        return self.read(0, self.rows)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield spans that cover all rows, each of at most BLOCK_BYTES or one row."""
        step = max(1, BLOCK_BYTES * self.rows // max(1, self.nbytes))
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def equals(self, other: "LazyTensor") -> bool:
        return self.shape == other.shape and all(torch.equal(self.read(*span), other.read(*span))
                                                 for span in self.spans())

    def first_rows(self, rows: int) -> "LazyTensor":
        return replace(self, shape=(min(rows, self.rows), *self.shape[1:]))

    def resized(self, rows: int) -> "LazyTensor":
        """Return a matrix with so many rows; those beyond its last are the mean of all that it has."""
        if rows <= self.rows:
            return self.first_rows(rows)

        @cache
        def mean() -> Tensor:
            # NumPy adds row by row; the order of torch's sum depends on the number of threads.
            sums = (self.read(*span).float().numpy().sum(axis=0, dtype="float64") for span in self.spans())
            return (torch.from_numpy(sum(sums)) / self.rows).to(self.dtype)

        return self.followed_by(rows - self.rows, lambda start, stop: mean().expand(stop - start, -1))

    def padded(self, rows: int) -> "LazyTensor":
        """Return the tensor padded with zeros to at least `rows` rows."""
        return self if rows <= self.rows else self.followed_by(
            rows - self.rows, lambda start, stop: torch.zeros(stop - start, *self.shape[1:]))

    def with_rows(self, rows: Tensor, first: int = 0) -> "LazyTensor":
        """Return the tensor with these rows from row `first` on; others, of another rank, cannot be read."""
        def read(start: int, stop: int) -> Tensor:
            part = rows[start - first:stop - first] if rows.ndim else rows
            assert start == stop or not rows.ndim or first <= start and len(part) == stop - start
            return part

        return replace(self, read=read)

    def followed_by(self, rows: int, read_more: Callable[[int, int], Tensor]) -> "LazyTensor":
        """Return the tensor with more rows at its end."""
        def read(start: int, stop: int) -> Tensor:
            stored = self.read(min(start, self.rows), min(stop, self.rows))
            more = read_more(max(start - self.rows, 0), max(stop - self.rows, 0))
            return torch.cat([stored, more.to(stored)])

        return replace(self, shape=(self.rows + rows, *self.shape[1:]), read=read)


def lazy(tensor: Tensor | LazyTensor) -> LazyTensor:
    """Wrap a tensor in a LazyTensor that reads views of it."""
    if isinstance(tensor, LazyTensor):
        return tensor
    tensor = tensor.detach()
    return LazyTensor(tuple(tensor.shape), tensor.dtype,
                      lambda start, stop: tensor[start:stop] if tensor.ndim else tensor)


def read_all(tensors: Mapping[str, LazyTensor]) -> dict[str, Tensor]:
    return {name: tensor.full() for name, tensor in tensors.items()}


class TensorFile:
    """A safetensors file to write, by rows and by one or several ranks.

    The bytes equal those of safetensors.torch.save_file, which copies all GPU tensors to the host at once,
    and does not tick, which tells a slow disk from a hang. Hashed blocks have k * `block_multiple` rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor | LazyTensor],
                 metadata: Optional[Mapping[str, str]] = None, block_multiple: int = 1):
        ordered = sorted(tensors.items(), key=lambda item: ([*DTYPES].index(item[1].dtype), item[0]))
        header, end = ({"__metadata__": dict(metadata)} if metadata else {}), 0
        for name, tensor in ordered:
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                            "data_offsets": [end, end := end + tensor.nbytes]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes, self.block_multiple = len(self.header) + end, block_multiple
        self.tensors = {name: lazy(tensor) for name, tensor in ordered}
        self.offsets = {name: len(self.header) + header[name]["data_offsets"][0] for name in self.tensors}

    def create(self, path: Path) -> None:
        with open(path, "wb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)

    def write_rows(self, path: Path, name: str, tensor: LazyTensor, part: int = 0, parts: int = 1) -> str:
        """Write this part's rows of a tensor to their place; return the joined hashes of its blocks."""
        hashes = ""
        start, stop = rows_of_part(tensor.rows, self.block_multiple, part, parts)
        row_bytes = tensor.nbytes // max(1, tensor.rows)
        block = block_rows(tensor.rows, self.block_multiple)
        step = max(1, BLOCK_BYTES // max(1, block * row_bytes)) * block
        with open(path, "r+b") if start < stop else nullcontext() as file:
            for first in range(start, stop, step):
                rows = tensor.read(first, min(first + step, stop)).cpu().contiguous()
                data = memoryview(rows.flatten().view(torch.uint8).numpy())
                del rows  # before more are read
                file.seek(self.offsets[name] + first * row_bytes)
                file.write(data)
                for place in range(0, min(step, stop - first), block):
                    rows_of_block = data[place * row_bytes:(place + block) * row_bytes]
                    hashes += hashlib.sha256(rows_of_block).hexdigest()
                del data, rows_of_block
                tick()
        return hashes

    def entry(self, parts: Iterable[Sequence[str]]) -> dict[str, Any]:
        """Return the fields in a manifest, without the size, from each part's hashes of the tensors."""
        return {"header": hashlib.sha256(self.header).hexdigest(), "block_multiple": self.block_multiple,
                "tree": tree_hash(map("".join, zip(*parts)))}


def write_files(folder: Path, files: Mapping[str, TensorFile]) -> dict[str, dict[str, Any]]:
    """Write safetensors files; return their fields in a manifest, without the size."""
    for name, file in files.items():
        file.create(folder / name)
    return {name: file.entry([[file.write_rows(folder / name, *item) for item in file.tensors.items()]])
            for name, file in files.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor | LazyTensor],
                  metadata: Optional[Mapping[str, str]] = None) -> None:
    write_files(path.parent, {path.name: TensorFile(tensors, metadata)})


def open_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return a safetensors file's tensors, which are read on the CPU.

    They are views of the mapped file, which stays mapped as long as they exist.
    """
    def in_file(name: str) -> LazyTensor:
        rows = file.get_slice(name)
        shape = tuple(rows.get_shape())

        def read(start: int, stop: int) -> Tensor:
            # Reopened each time: while a mapped file is open, all that was read from it counts as memory.
            with _opened(path, version) as (file, _):
                tick()
                return file.get_slice(name)[start:stop] if shape else file.get_tensor(name)

        return LazyTensor(shape, (rows[:0] if shape else file.get_tensor(name)).dtype, read)

    with _opened(path) as (file, version):
        return {name: in_file(name) for name in file.offset_keys()}


def read_optimizer(folder: Path) -> dict[str, LazyTensor]:
    path = Path(folder) / OPTIMIZER
    return open_tensors(path) if has_file(path) else {}


@contextmanager
def _opened(path: Path, known: Optional[tuple] = None) -> Iterator[tuple[safe_open, tuple]]:
    """Yield the open file and a version that changes when the file is replaced, and must equal `known`."""
    try:
        with open(path, "rb", opener=plain) as file:  # rejects a pipe, on which safetensors would block
            status = os.fstat(file.fileno())
        version = status.st_ino, status.st_size, status.st_mtime_ns
        if known not in (None, version):
            raise FileNotFoundError
        with safe_open(path, "pt") as tensors:
            yield tensors, version
    except (OSError, SafetensorError) as error:
        is_gone = known is not None and isinstance(error, FileNotFoundError)
        reason = GONE if is_gone else unreadable(error, "copy or download it again")
        raise CheckpointError(f"{path} {reason}") from error
