"""Checkpoints on disk: written so that a crash at any instant leaves a good one, and verified before anything is parsed.

A checkpoint is a folder `step-00000200`. It is written as `tmp-...`, gets a MANIFEST.json with the size and SHA-256 of
every file, and only then its name. What is to go is renamed to `trash-...` before it is deleted. Nothing is pickled.
"""

import errno
import hashlib
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
from typing import Any, Optional

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from checkpoint.schema import FORMAT, GONE, NEWER, Manifest, parsed, read_state_file
from checkpoint.tensor_files import write_tensors
from common.errors import CheckpointError
from common.files import leads_outside, plain, read_plain, sha256, sync, sync_folder
from common.text import print_safely, printable
from parallel.collectives import Ranks

PADDOCK_VERSION = "0.1"
MANIFEST = "MANIFEST.json"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"

# `replaced-` is a checkpoint whose step is being saved anew; it is a good one until the new one has its name.
CHECKPOINT_NAME = re.compile(r"(?:replaced-)?step-\d{8,}")

# What a disk behind a network reports while it is away. One that is full or read-only stays so, and is told at once.
PASSING_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENETUNREACH}
RETRY_SECONDS = (1.0, 5.0, 25.0)
Warn = Callable[[str], None]


def warn_on_console(text: str) -> None:
    """A warning, where there is no run's log to take it."""
    print_safely(f"warning: {printable(text)}", sys.stderr)


def save(checkpoints_dir: Path, step: int, ranks: Ranks, write_files: Callable[[Path], None], state: Mapping[str, Any],
         optimizer_tensors: Mapping[str, Tensor], weight_bytes: int = 0, warn: Warn = warn_on_console) -> Path:
    """Publish the checkpoint of a step, replacing one of the same step, and return its folder.

    Rank 0 writes. Collective: every rank must call it.

    Args:
        write_files: writes the model folder's files into the folder that it is given; called on rank 0.
        state: the trainer's state, JSON-like; its `val_loss`, if any, decides what KEEP_BEST keeps.
        weight_bytes: what `write_files` will write, to find a full disk before writing.
    Raises:
        CheckpointError: it could not be written; the earlier checkpoints are as they were.
    """
    optimizer_bytes = sum(tensor.nbytes for tensor in optimizer_tensors.values())

    def write(folder: Path) -> None:
        write_files(folder)
        write_tensors(folder / OPTIMIZER, optimizer_tensors)
        (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    folder = Path(checkpoints_dir) / f"step-{step:08d}"
    facts = {"step": step, "world_size": ranks.world_size, "val_loss": _finite(state.get("val_loss"))}
    ranks.on_rank0(lambda: publish(folder, write, facts, weight_bytes + optimizer_bytes, optimizer_bytes, warn))
    return folder


def publish(folder: Path, write_files: Callable[[Path], None], facts: Mapping[str, Any], needed_bytes: int = 0,
            largest_file_bytes: int = 0, warn: Warn = warn_on_console) -> None:
    """Write a folder with its manifest so that it appears whole or not at all, in place of one of the same name.

    Where a network disk fails for a moment everything is written again, after RETRY_SECONDS: what was written before a failed
    fsync may be lost even if a second one succeeds.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    for seconds in (*RETRY_SECONDS, None):
        try:
            return _publish_once(Path(folder).absolute(), write_files, facts, needed_bytes, largest_file_bytes, warn)
        except CheckpointError as error:
            if seconds is None or _error_number(error.__cause__) not in PASSING_ERRORS:
                raise
            warn(f"{error}; it is tried again in {seconds:g} s")
            time.sleep(seconds)


def _publish_once(folder: Path, write_files: Callable[[Path], None], facts: Mapping[str, Any], needed_bytes: int,
                  largest_file_bytes: int, warn: Warn) -> None:
    temporary = folder.with_name(f"tmp-{folder.name.removeprefix('step-')}-{os.getpid()}")
    replaced = folder.with_name(f"replaced-{folder.name}")
    check_writable(folder.parent, needed_bytes, largest_file_bytes)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_files(temporary)
        files = {name: {"size": (temporary / name).stat().st_size, "sha256": _sync_and_hash(temporary / name)}
                 for name in sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())}
        written = 1 + max((manifest["written"] for _, manifest in _by_age(folder.parent)[0]), default=0)
        manifest = {"format": FORMAT, "paddock": PADDOCK_VERSION, **facts, "written": written, "files": files}
        (temporary / MANIFEST).write_bytes(_sealed(manifest))
        _sync_and_hash(temporary / MANIFEST)
        for inner in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            sync_folder(inner)
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
        raise CheckpointError(f"{folder} could not be written: {error}; {_space(folder.parent, needed_bytes)}") from error
    if os.path.lexists(replaced):
        _remove(replaced, warn)


def _error_number(error: Optional[BaseException]) -> Optional[int]:
    in_text = re.search(r"\b(?:code:|os error) (\d+)", str(error))
    return getattr(error, "errno", None) or (int(in_text[1]) if in_text else None)  # what is written in Rust has it in the text


def check_writable(folder: Path, needed_bytes: int, largest_file_bytes: int = 0) -> None:
    """Make the folder, and see that so many bytes can be written into it.

    Raises:
        CheckpointError: they cannot; it names the folder, the bytes needed and the bytes free.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"tmp-probe-{os.getpid()}"
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to: {error}; set OUTPUT_DIR to a folder that can "
                              f"({_space(folder, needed_bytes)})") from error
    check_room(folder, needed_bytes, largest_file_bytes)


def check_room(folder: Path, needed_bytes: int, largest_file_bytes: int = 0) -> None:
    """The same as far as it is known without touching anything; the folder need not be there yet."""
    there = next(place for place in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise CheckpointError(f"{folder} cannot be written to ({there}); set OUTPUT_DIR to a folder that can")
    if shutil.disk_usage(there).free < needed_bytes:
        raise CheckpointError(f"{folder} has too little room for a checkpoint: {_space(there, needed_bytes)}; free some, "
                              "or set OUTPUT_DIR to another disk, or a smaller KEEP_LAST")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < largest_file_bytes:
        raise CheckpointError(f"{folder}: a checkpoint has a file of {largest_file_bytes:,} bytes, and this shell allows "
                              f"{limit:,}; raise it with ulimit -f unlimited")


def _space(folder: Path, needed_bytes: int) -> str:
    try:
        free = f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        free = "an unknown number"
    return f"{needed_bytes:,} bytes needed, {free} free"


def _finite(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _sync_and_hash(path: Path) -> str:
    sync(path)
    with open(path, "rb") as file:
        return sha256(file)


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write this manifest, its own hash included: any other byte in the file is damage."""
    content = json.dumps(manifest, indent=1, sort_keys=True)
    seal = hashlib.sha256(content.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": seal}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checkpoint's manifest, itself verified; the files that it lists are not.

    Raises:
        CheckpointError: it is missing, damaged, of another format, or does not say what it must.
    """
    path = Path(folder) / MANIFEST
    try:
        content = read_plain(path)
    except FileNotFoundError as error:
        what = (f"has no {MANIFEST}: it is not a checkpoint of Paddock's, or not a whole one; a model from elsewhere is brought "
                "in with scripts/import_checkpoint.py")
        raise CheckpointError(f"{folder} {what if os.path.isdir(folder) else GONE}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        manifest = json.loads(content)
        sound = _sealed({key: value for key, value in manifest.items() if key != "sha256"}) == content
    except (ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path} is damaged; take another checkpoint")
    if isinstance(number := manifest.get("format"), int) and number > FORMAT:
        raise CheckpointError(f"{path} has format {number}, and this version reads {FORMAT}: {NEWER}, or take another")
    return parsed(content, Manifest, path)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files have the size and SHA-256 that it says. Nothing else is parsed.

    Files that the manifest does not list are ignored. The folder may be a link, but no file in it may lead out of it.
    Raises:
        CheckpointError: names the file that is missing or damaged, no file, or not in the folder.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if leads_outside(name, folder):
            raise CheckpointError(f"{folder / MANIFEST} lists a file outside its folder: {name!r}; put a copy of it "
                                  "there, or take another checkpoint")
        try:
            with open(path, "rb", opener=plain) as file:
                size = os.fstat(file.fileno()).st_size
                digest = sha256(file) if size == expected["size"] else None
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; take another checkpoint") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if digest is None:
            raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, and {expected['size']:,} were written; "
                                  "take another checkpoint")
        if digest != expected["sha256"]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of {MANIFEST}; take another checkpoint")
    return manifest


def newest_verified(checkpoints_dir: Path, last_step: Optional[int] = None) -> tuple[Optional[Path], list[str]]:
    """The checkpoint written last among those that verify, and what to warn of: each bad one and why.

    None only where there is no checkpoint at all, or none of `last_step` or an earlier one.
    Raises:
        CheckpointError: there are checkpoints, and none of them verifies.
    """
    sound, reasons = _by_age(checkpoints_dir)
    for folder, manifest in sound:
        if last_step is not None and manifest["step"] > last_step:
            continue
        try:
            verify(folder)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return folder, [f"a checkpoint is passed over: {reason}" for reason in reasons]
    if reasons:
        raise CheckpointError(f"none of the {len(reasons)} checkpoints in {checkpoints_dir} can be used, the first because: "
                              f"{reasons[0]}. Bring back a good one, or begin anew with RESUME=never or another RUN_NAME")
    return None, []


def _by_age(checkpoints_dir: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """Checkpoints whose manifest is sound, last written first, and why the others' are not."""
    sound, reasons = [], []
    for folder in _folders(checkpoints_dir):
        try:
            sound.append((folder, read_manifest(folder)))
        except CheckpointError as error:
            reasons.append(str(error))
    return sorted(sound, key=lambda item: item[1]["written"], reverse=True), reasons


def _folders(checkpoints_dir: Path) -> list[Path]:
    try:
        names = sorted((name for name in os.listdir(checkpoints_dir) if CHECKPOINT_NAME.fullmatch(name)), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir} cannot be read: {error}") from error
    return [Path(checkpoints_dir) / name for name in names]


def places(name: str, run_dir: Path) -> tuple[Path, ...]:
    """The folders that a flag may mean, the first that is there first."""
    return Path(run_dir) / "checkpoints" / name, Path(run_dir) / name, Path(name).expanduser()


def locate(name: str, run_dir: Path, warn: Warn = warn_on_console) -> Path:
    """The folder that a flag names: a step of this run, or the path of a checkpoint, of a run, or of a Hugging Face model.

    Where it names several checkpoints it is the newest that verifies; otherwise verifying is left to the caller.
    Raises:
        CheckpointError: there is none.
    """
    for place in places(name, run_dir):
        if place.name and not os.path.isdir(place):  # a crash while it was saved anew has left it under another name
            place = place.with_name(f"replaced-{place.name}")
        if not os.path.isdir(place):
            continue
        for checkpoints_dir in (place, place / "checkpoints"):
            if checkpoints_dir.is_dir() and _folders(checkpoints_dir):
                folder, messages = newest_verified(checkpoints_dir)
                for message in messages:
                    warn(message)
                return folder
        if not (place / MANIFEST).exists() and ((place / STATE).exists() or not (place / "config.json").exists()):
            raise CheckpointError(f"{place} is no checkpoint: it has no {MANIFEST}; a model from elsewhere is brought in "
                                  "with scripts/import_checkpoint.py")
        return place
    raise CheckpointError(f"there is no checkpoint {name!r}, neither in {run_dir} nor as a path of its own")


def _has(folder: Path, name: str) -> bool:
    """Whether this file is there. What is gone since the checkpoint was chosen is not taken for a model that never had it."""
    if (folder / name).exists():
        return True
    if not folder.is_dir() or ((folder / MANIFEST).exists() and name in read_manifest(folder)["files"]):
        raise CheckpointError(f"{folder / name} {GONE}")
    return False


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's state of a verified checkpoint; empty for an imported model, which has none.

    Raises:
        CheckpointError: the file is gone, or does not say what it must (`run_files.State`).
    """
    return read_state_file(Path(folder) / STATE) if _has(Path(folder), STATE) else {}


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors of a verified checkpoint, on the CPU; empty for an imported model, which has none.

    Raises:
        CheckpointError: the file is gone, or holds no safetensors.
    """
    path = Path(folder) / OPTIMIZER
    if not _has(path.parent, OPTIMIZER):
        return {}
    try:
        open(path, "rb", opener=plain).close()  # safetensors would wait for a pipe
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def prune(checkpoints_dir: Path, keep_last: int, keep_best: int, protected: Iterable[Path] = (),
          warn: Warn = warn_on_console) -> list[Path]:
    """Delete what retention does not keep, and return it. Called on rank 0, under the run's lock.

    Kept are the `keep_last` written last (0 = all), the `keep_best` of lowest validation loss, the protected ones (the
    one that the run was resumed from), and whatever cannot be read. Nothing is deleted unless the newest verifies.
    """
    if keep_last == 0:
        return []
    listed, _ = _by_age(checkpoints_dir)
    if not listed:
        return []
    try:
        verify(listed[0][0])
    except CheckpointError as error:
        warn(f"no checkpoint is deleted, because the newest is bad: {error}")
        return []
    measured = [item for item in listed if item[1]["val_loss"] is not None]
    best = sorted(measured, key=lambda item: item[1]["val_loss"])[:keep_best]
    kept = {folder.resolve() for folder, _ in (*listed[:keep_last], *best)} | {Path(folder).resolve() for folder in protected}
    doomed = [folder for folder, _ in listed if folder.resolve() not in kept]
    for folder in doomed:
        _remove(folder, warn)
    return doomed


def sweep(checkpoints_dir: Path, warn: Warn = warn_on_console, started_from: Optional[Path] = None) -> None:
    """Delete what a crash has left half-written or half-deleted, but for what the run goes on from. Called on rank 0, under the
    run's lock."""
    checkpoints_dir = Path(checkpoints_dir)
    for replaced in sorted(checkpoints_dir.glob("replaced-step-*")):
        original = replaced.with_name(replaced.name.removeprefix("replaced-"))
        if original.exists():
            if replaced != started_from:  # then the one in its place is a bad one
                _remove(replaced, warn)
            continue
        try:
            os.rename(replaced, original)
        except OSError as error:
            warn(f"{replaced} could not get back the name {original.name}: {error}")
    for left_over in sorted((*checkpoints_dir.glob("tmp-*"), *checkpoints_dir.glob("trash-*"))):
        _remove(left_over, warn)


def _remove(folder: Path, warn: Warn) -> None:
    """Rename to trash, then delete. What cannot be deleted (NFS keeps open files) is not worth a run: it is swept later."""
    trash = folder.with_name(f"trash-{uuid.uuid4().hex[:8]}-{folder.name}")
    try:
        if folder.name.startswith("trash-"):
            trash = folder
        else:
            os.rename(folder, trash)
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash)
        else:
            trash.unlink()  # a link goes, and what it leads to stays
    except OSError as error:
        warn(f"{folder} could not be deleted: {error}")
