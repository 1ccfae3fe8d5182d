"""The manifest of a checkpoint: the size and SHA-256 of each file. Needs only the standard library."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from common.errors import CheckpointError
from common.files import leads_outside, plain, read_plain, sha256
from common.text import command

MANIFEST = "MANIFEST.json"
FORMAT = 1
CARD = "README.md"  # not listed, so that the user may edit it
GONE = "is gone: it was pruned or deleted in the meantime; start again, or choose another"
NEWER = "it was written by a newer Paddock; use that version"


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the exact bytes of a valid manifest, which include its own hash."""
    content = json.dumps(manifest, indent=1, sort_keys=True)
    seal = hashlib.sha256(content.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": seal}, indent=1, sort_keys=True) + "\n").encode()


def read_sealed(folder: Path) -> bytes:
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
        intact = sealed({key: value for key, value in manifest.items() if key != "sha256"}) == content
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged; use another checkpoint")
    if isinstance(number := manifest.get("format"), int) and number > FORMAT:
        raise CheckpointError(f"{path} has format {number}, but this version reads {FORMAT}: {NEWER}")
    return content


def fault_of(folder: Path, name: str, expected: Mapping[str, Any],
             advance: Callable[[int], object] = lambda count: None) -> Optional[str]:
    """Describe the fault of a file that a manifest lists; None if it is intact.

    `advance` is called with the size of each hashed block.
    """
    path = folder / name
    if leads_outside(name, folder):
        return f"{folder / MANIFEST} lists a file outside its folder: {name!r} (put a copy of it there)"
    try:
        with open(path, "rb", opener=plain) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["size"]:
                return f"{path} is damaged: it has {size:,} bytes instead of {expected['size']:,}"
            intact = sha256(file, advance) == expected["sha256"]
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None if intact else f"{path} is damaged: its SHA-256 has changed"
