"""The manifest of a checkpoint: size and hash of each file. Needs only the standard library.

A safetensors file has the SHA-256 of its header (with the 8 bytes of its length) and of a tree.
`block_rows` divides each tensor into blocks of rows, for any number of writers. The hash of a tensor is the
SHA-256 of those of its blocks, and the tree's is the SHA-256 of those of the tensors, in the order of the
file and as hexadecimal text. Other files have one SHA-256.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from common.errors import CheckpointError
from common.files import LARGEST_TEXT, plain, read_plain, sha256
from common.text import command

MANIFEST = "MANIFEST.json"
FORMAT = 2
BLOCKS = 64  # of a tensor
MOST_THREADS = 8  # that hash a file
# torch's names of dtypes and those of safetensors, widest first: the order of tensors in a file.
DTYPES = {"int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "bfloat16": "BF16",
          "float16": "F16", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
CARD = "README.md"  # not listed, so that the user may edit it
GONE = "is gone: it was pruned or deleted in the meantime; start again, or choose another"


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the exact content of a manifest's file, which includes its own hash."""
    content = json.dumps(manifest, indent=1, sort_keys=True)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": sha256}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest_bytes(folder: Path) -> bytes:
    """Return the content of a checkpoint's manifest, verified by its own hash, but not its files."""
    path = Path(folder) / MANIFEST
    try:
        content = read_plain(path)
    except FileNotFoundError as error:
        problem = GONE if not os.path.isdir(folder) else (
            f"has no {MANIFEST}: it is not a Paddock checkpoint, or it is incomplete; import other models "
            f"with {command('scripts/import_checkpoint.py')}")
        raise CheckpointError(f"{folder} {problem}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        manifest = json.loads(content)
        intact = manifest_bytes({key: value for key, value in manifest.items() if key != "sha256"}) == content
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged; use another checkpoint")
    if isinstance(number := manifest.get("format"), int) and number != FORMAT:
        raise CheckpointError(f"{path} has format {number}, but this version reads format {FORMAT}; use the "
                              "version of Paddock that wrote it")
    return content


def block_rows(rows: int, multiple: int) -> int:
    """Return the rows of each hashed block of a tensor with so many rows: a multiple, of head_dim perhaps."""
    return max(1, -(-rows // (BLOCKS * multiple))) * multiple


def rows_of_part(rows: int, multiple: int, part: int, parts: int) -> tuple[int, int]:
    """Return start and end of the rows, in whole blocks, that one of several ranks writes or reads."""
    share, block = -(-rows // parts), block_rows(rows, multiple)
    return min(rows, -(-part * share // block) * block), min(rows, -(-(part + 1) * share // block) * block)


def tree_hash(tensors: Iterable[str]) -> str:
    """Return the hash of a file from the joined hashes of each tensor's blocks."""
    joined = "".join(hashlib.sha256(blocks.encode()).hexdigest() for blocks in tensors)
    return hashlib.sha256(joined.encode()).hexdigest()


def fault_of(folder: Path, name: str, expected: Mapping[str, Any],
             advance: Callable[[int], object] = lambda count: None) -> Optional[str]:
    """Describe the fault of a file that a manifest lists; None if it is intact. Threads hash its tensors."""
    path, threads = folder / name, min(MOST_THREADS, os.cpu_count() or 1)
    home = Path(os.path.realpath(folder))
    if home.parent.name == "snapshots":  # of the hub's cache: its files are links into that of the model
        home = home.parents[1]
    if ".." in Path(name).parts or not Path(os.path.realpath(path)).is_relative_to(home):
        return f"{folder / MANIFEST} lists a file outside its folder: {name!r} (put a copy of it there)"

    def hashes_of(part: int) -> list[str]:
        """Return the joined hashes of one part's blocks of each tensor."""
        hashes, multiple = [], expected["block_multiple"]
        with open(path, "rb", opener=plain) as file:
            for offset, rows, row_bytes in tensors:
                start, stop = rows_of_part(rows, multiple, part, threads)
                block = block_rows(rows, multiple)
                file.seek(offset + start * row_bytes)
                hashes.append("".join(sha256(file, advance, (min(first + block, stop) - first) * row_bytes)
                                      for first in range(start, stop, block)))
        return hashes

    try:
        with open(path, "rb", opener=plain) as file:
            if (size := os.fstat(file.fileno()).st_size) != expected["size"]:
                return f"{path} is damaged: it has {size:,} bytes instead of {expected['size']:,}"
            if not (tree := expected.get("tree")):
                intact = sha256(file, advance) == expected["sha256"]
                return None if intact else f"{path} is damaged: its SHA-256 has changed"
            header = file.read(8)
            header += file.read(min(int.from_bytes(header, "little"), LARGEST_TEXT))
        if hashlib.sha256(header).hexdigest() != expected["header"]:
            return f"{path} is damaged: the SHA-256 of its header has changed"
        tensors = [*tensors_in(header, size)]
        from concurrent.futures import ThreadPoolExecutor  # takes 8 ms

        with ThreadPoolExecutor(threads) as pool:
            parts = [*pool.map(hashes_of, range(threads))]
        intact = tree_hash(map("".join, zip(*parts))) == tree
        return None if intact else f"{path} is damaged: its SHA-256 has changed"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return f"{path} is damaged: its header is not that of a safetensors file"


def tensors_in(header: bytes, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield offset, rows and bytes per row of each tensor of a file that they must fill."""
    tensors = [entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"]
    end = 0
    for entry in sorted(tensors, key=lambda entry: entry["data_offsets"]):
        start, rows = end, entry["shape"][0] if entry["shape"] else 1
        begin, end = entry["data_offsets"]
        if begin != start or rows < 0 or (end - start) % max(1, rows):
            raise ValueError
        yield len(header) + start, rows, (end - start) // max(1, rows)
    if len(header) + end != size:
        raise ValueError
