"""Checkpoints on disk: a crash at any instant leaves a good one, and nothing is parsed before it is verified.

A checkpoint is a folder `step-00000200`. It is written as `tmp-...`, gets a MANIFEST.json with the size and
SHA-256 of every file except README.md, which the user may edit, and only then its name. Deleting begins with
renaming to `trash-...`. No pickles.
"""

import errno
import json
import math
import os
import re
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from torch import Tensor

from checkpoint.huggingface import hub_model, is_model_name
from checkpoint.schema import CARD, FORMAT, GONE, MANIFEST, read_manifest, read_state_file, sealed, verify
from checkpoint.tensors import LazyTensor, open_tensors, write_tensors
from common import __version__
from common.errors import CheckpointError
from common.files import sha256, sync, sync_folder
from common.text import command, print_safely, printable
from parallel.fsdp import RowServer
from parallel.ranks import Ranks

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"

# `replaced-` is a checkpoint whose step is being saved again; it stays good until the new one has its name.
CHECKPOINT_NAME = re.compile(r"(?:replaced-)?step-\d{8,}")

# What a network disk reports while it is unavailable. A full or read-only disk is an error at once.
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN,
                    errno.EHOSTDOWN, errno.ENETUNREACH}
RETRY_SECONDS = (1.0, 5.0, 25.0)
Warn = Callable[[str], None]


def warn_on_console(text: str) -> None:
    """Print a warning; used before a run has its log."""
    print_safely(f"warning: {printable(text)}", sys.stderr)


class Contents(NamedTuple):
    """What a checkpoint holds."""

    step: int
    write_model: Callable[[Path], None]  # writes the model's files into a folder; called on rank 0
    state: Mapping[str, Any]  # JSON-like; its `val_loss`, if any, decides what KEEP_BEST keeps
    optimizer: Mapping[str, Tensor | LazyTensor]
    model_bytes: int = 0  # that `write_model` will write, to find a full disk beforehand
    server: Optional[RowServer] = None  # from which these tensors come, if the model is sharded


def save(checkpoints_dir: Path, contents: Contents, ranks: Ranks, warn: Warn = warn_on_console) -> Path:
    """Write the checkpoint of a step, replacing one of the same step, and return its folder.

    Rank 0 writes. Collective: every rank must call it.
    """
    optimizer_bytes = sum(tensor.nbytes for tensor in contents.optimizer.values())

    def write(folder: Path) -> None:
        contents.write_model(folder)
        write_tensors(folder / OPTIMIZER, contents.optimizer)
        (folder / STATE).write_text(json.dumps(contents.state, indent=1) + "\n", encoding="utf-8")

    folder, val_loss = Path(checkpoints_dir) / f"step-{contents.step:08d}", contents.state.get("val_loss")
    measured = isinstance(val_loss, (int, float)) and math.isfinite(val_loss)
    facts = {"step": contents.step, "world_size": ranks.world_size,
             "val_loss": float(val_loss) if measured else None}
    needed_bytes = contents.model_bytes + optimizer_bytes
    (contents.server or ranks).on_rank0(
        lambda: publish(folder, write, facts, needed_bytes, optimizer_bytes, warn))
    return folder


def publish(folder: Path, write_files: Callable[[Path], None], facts: Mapping[str, Any],
            needed_bytes: int = 0, largest_file_bytes: int = 0, warn: Warn = warn_on_console) -> None:
    """Write a folder with its manifest, all or nothing, replacing one of the same name.

    If a network disk fails for a moment, everything is written again after RETRY_SECONDS: data written before
    a failed fsync may be lost even if a second fsync succeeds.
    """
    folder = Path(folder).absolute()
    for seconds in (*RETRY_SECONDS, None):
        try:
            check_writable(folder.parent, needed_bytes, largest_file_bytes)
            return _publish_once(folder, write_files, facts, needed_bytes, warn)
        except CheckpointError as error:
            if seconds is None or _error_number(error.__cause__) not in TRANSIENT_ERRORS:
                raise
            warn(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)


def _publish_once(folder: Path, write_files: Callable[[Path], None], facts: Mapping[str, Any],
                  needed_bytes: int, warn: Warn) -> None:
    temporary = folder.with_name(f"tmp-{folder.name.removeprefix('step-')}-{os.getpid()}")
    replaced = folder.with_name(f"replaced-{folder.name}")
    try:
        # The files, then the manifest, all brought to the disk.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_files(temporary)
        names = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
        files = {name: {"size": (temporary / name).stat().st_size, "sha256": _sync_and_hash(temporary / name)}
                 for name in names}
        files.pop(CARD, None)
        written = 1 + max((manifest["written"] for _, manifest in _newest_first(folder.parent)[0]), default=0)
        manifest = {"format": FORMAT, "paddock": __version__, **facts, "written": written, "files": files}
        (temporary / MANIFEST).write_bytes(sealed(manifest))
        _sync_and_hash(temporary / MANIFEST)
        for inner in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            sync_folder(inner)

        # Its name. A crash between the two renames leaves the one that it replaces under `replaced-`.
        if os.path.lexists(folder):
            if os.path.lexists(replaced):
                _remove(replaced, warn)
            os.rename(folder, replaced)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # Rust's tokenizers report a full disk as a bare Exception; everything else is a bug, and stays one.
        if not isinstance(error, OSError) and type(error) is not Exception:
            raise
        raise CheckpointError(f"{folder} could not be written: {error}; "
                              f"{_space(folder.parent, needed_bytes)}") from error
    if os.path.lexists(replaced):
        _remove(replaced, warn)


def _error_number(error: Optional[BaseException]) -> Optional[int]:
    in_text = re.search(r"\b(?:code:|os error) (\d+)", str(error))  # where Rust code puts it
    return getattr(error, "errno", None) or (int(in_text[1]) if in_text else None)


def check_writable(folder: Path, needed_bytes: int, largest_file_bytes: int = 0) -> None:
    """Create the folder and check that so many bytes can be written into it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"tmp-probe-{os.getpid()}"
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to: {error}; set OUTPUT_DIR to a writable folder "
                              f"({_space(folder, needed_bytes)})") from error
    check_room(folder, needed_bytes, largest_file_bytes)


def check_room(folder: Path, needed_bytes: int, largest_file_bytes: int = 0) -> None:
    """Check the same as far as possible without writing anything; the folder need not exist yet."""
    folder = Path(folder)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise CheckpointError(f"{folder} cannot be written to ({existing}); set OUTPUT_DIR to another folder")
    if shutil.disk_usage(existing).free < needed_bytes:
        raise CheckpointError(f"{folder} has too little room for a checkpoint: "
                              f"{_space(existing, needed_bytes)}; free some, or set OUTPUT_DIR to another "
                              "disk, or a smaller KEEP_LAST")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < largest_file_bytes:
        raise CheckpointError(f"{folder}: a checkpoint has a file of {largest_file_bytes:,} bytes, and this "
                              f"shell allows {limit:,}; raise the limit with ulimit -f unlimited")


def _space(folder: Path, needed_bytes: int) -> str:
    try:
        free = f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        free = "an unknown number"
    return f"{needed_bytes:,} bytes needed, {free} free"


def _sync_and_hash(path: Path) -> str:
    sync(path)
    with open(path, "rb") as file:
        return sha256(file)


def newest_verified(checkpoints_dir: Path,
                    last_step: Optional[int] = None) -> tuple[Optional[Path], list[str]]:
    """Return the last written checkpoint that verifies, and a warning for each bad one that was skipped.

    It is None only if there is no checkpoint at all, or none up to `last_step`.
    """
    readable, reasons = _newest_first(checkpoints_dir)
    for folder, manifest in readable:
        if last_step is not None and manifest["step"] > last_step:
            continue
        try:
            verify(folder)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return folder, [f"skipping a checkpoint: {reason}" for reason in reasons]
    if reasons:
        raise CheckpointError(f"none of the {len(reasons)} checkpoints in {checkpoints_dir} can be used, the "
                              f"first because: {reasons[0]}. Restore a good one, or begin anew with "
                              "RESUME=never or another RUN_NAME")
    return None, []


def _newest_first(checkpoints_dir: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """The checkpoints with a valid manifest, last written first, and why the others' are not valid."""
    readable, reasons = [], []
    for folder in _folders(checkpoints_dir):
        try:
            readable.append((folder, read_manifest(folder)))
        except CheckpointError as error:
            reasons.append(str(error))
    return sorted(readable, key=lambda item: item[1]["written"], reverse=True), reasons


def _folders(checkpoints_dir: Path) -> list[Path]:
    try:
        names = sorted(filter(CHECKPOINT_NAME.fullmatch, os.listdir(checkpoints_dir)), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir} cannot be read: {error}") from error
    return [Path(checkpoints_dir) / name for name in names]


def places(name: str, run_dir: Path) -> tuple[Path, ...]:
    """Return the folders that a setting may mean, in the order in which they are tried.

    A step or folder of this run, a path, or a run beside this one.
    """
    run_dir = Path(run_dir)
    beside = () if name.startswith((".", "/", "~")) else (run_dir.parent / name,)  # ./ is a path
    return run_dir / "checkpoints" / name, run_dir / name, Path(name).expanduser(), *beside


def locate(name: str, run_dir: Path, warn: Warn = warn_on_console) -> Path:
    """Return the folder that a setting or a script's argument names.

    It is a step of this run, a run of OUTPUT_DIR, the path of a checkpoint, run or model, or a model of the
    hub (`owner/name`, `owner/name@revision`). Of several checkpoints it is the newest that verifies;
    otherwise the caller verifies.
    """
    found, run_dir = [], Path(run_dir)
    for folder in places(name, run_dir):
        if folder.name and not os.path.isdir(folder):  # a crash while it was saved again renamed it
            folder = folder.with_name(f"replaced-{folder.name}")
        if os.path.isdir(folder):
            found.append(folder)
    if not found and "/" in name and is_model_name(name):
        return hub_model(name)
    if not found:
        raise CheckpointError(f"there is no checkpoint {name!r}, neither in {run_dir.parent} nor at that "
                              "path")
    by_path_and_name = list(places(name, run_dir)[2:])
    if len(found) == 2 and found == by_path_and_name and not os.path.samefile(*found):
        raise CheckpointError(f"{name!r} means both {found[0].absolute()} and {found[1]}; write one of these "
                              "paths")
    return _newest_in(found[0], warn)


def _newest_in(folder: Path, warn: Warn) -> Path:
    """The newest verified checkpoint of a run or of a folder of checkpoints; else the folder itself."""
    for checkpoints_dir in (folder, folder / "checkpoints"):
        if checkpoints_dir.is_dir() and _folders(checkpoints_dir):
            newest, messages = newest_verified(checkpoints_dir)
            for message in messages:
                warn(message)
            return newest
    if (folder / "log").is_dir() and (folder / "metrics.jsonl").exists():
        raise CheckpointError(f"the run {folder} has saved no checkpoint yet")
    is_model = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    if not (is_model and not (folder / STATE).exists() or (folder / MANIFEST).exists()):
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}; and no Hugging Face model: "
                              "it has no config.json. Meta's files are imported with "
                              f"{command('scripts/import_checkpoint.py', folder)} FOLDER")
    return folder


def _has(folder: Path, name: str) -> bool:
    """Whether this file exists. Raises CheckpointError if it did when the checkpoint was chosen."""
    if (folder / name).exists():
        return True
    if not folder.is_dir() or ((folder / MANIFEST).exists() and name in read_manifest(folder)["files"]):
        raise CheckpointError(f"{folder / name} {GONE}")
    return False


def read_state(folder: Path) -> dict[str, Any]:
    """Return the `schema.State`; empty for an imported model. Raises CheckpointError if it is gone."""
    return read_state_file(Path(folder) / STATE) if _has(Path(folder), STATE) else {}


def read_optimizer(folder: Path) -> dict[str, LazyTensor]:
    """Return the optimizer's tensors, on the CPU; like `read_state`."""
    return open_tensors(Path(folder) / OPTIMIZER) if _has(Path(folder), OPTIMIZER) else {}


def prune(checkpoints_dir: Path, keep_last: int, keep_best: int, protected: Iterable[Path] = (),
          warn: Warn = warn_on_console) -> list[Path]:
    """Delete the checkpoints that retention does not keep, and return them. Rank 0 calls it under the lock.

    Keeps the `keep_last` written last (0 = all), the `keep_best` of lowest validation loss, the protected
    (what the run was resumed from), and all that cannot be read. Deletes nothing unless the newest verifies.
    """
    if keep_last == 0:
        return []
    readable, _ = _newest_first(checkpoints_dir)
    if not readable:
        return []
    try:
        verify(readable[0][0])
    except CheckpointError as error:
        warn(f"no checkpoint is deleted, because the newest is bad: {error}")
        return []
    measured = [item for item in readable if item[1]["val_loss"] is not None]
    best = sorted(measured, key=lambda item: item[1]["val_loss"])[:keep_best]
    kept = {folder.resolve() for folder, _ in (*readable[:keep_last], *best)}
    kept |= {Path(folder).resolve() for folder in protected}
    pruned = [folder for folder, _ in readable if folder.resolve() not in kept]
    for folder in pruned:
        _remove(folder, warn)
    return pruned


def sweep(checkpoints_dir: Path, warn: Warn = warn_on_console, started_from: Optional[Path] = None) -> None:
    """Delete what a crash has left half-written or half-deleted. Called on rank 0, under the run's lock.

    Args:
        started_from: what the run resumes from, which stays.
    """
    checkpoints_dir = Path(checkpoints_dir)
    for replaced in sorted(checkpoints_dir.glob("replaced-step-*")):
        original = replaced.with_name(replaced.name.removeprefix("replaced-"))
        if original.exists():
            if replaced != started_from:  # otherwise the one in its place is bad
                _remove(replaced, warn)
            continue
        try:
            os.rename(replaced, original)
        except OSError as error:
            warn(f"{replaced} could not be renamed back to {original.name}: {error}")
    for left_over in sorted((*checkpoints_dir.glob("tmp-*"), *checkpoints_dir.glob("trash-*"))):
        _remove(left_over, warn)


def _remove(folder: Path, warn: Warn) -> None:
    """Rename to trash, then delete.

    What cannot be deleted (NFS keeps open files) is only warned of, and swept later.
    """
    trash = folder.with_name(f"trash-{uuid.uuid4().hex[:8]}-{folder.name}")
    try:
        if folder.name.startswith("trash-"):
            trash = folder
        else:
            os.rename(folder, trash)
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash)
        else:
            trash.unlink()  # a link is deleted, its target stays
    except OSError as error:
        warn(f"{folder} could not be deleted: {error}")
