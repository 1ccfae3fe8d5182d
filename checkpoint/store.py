"""Checkpoints on disk. They survive a crash at any time, and are verified before they are parsed.

A checkpoint is a folder such as `step-00000200`. It is written as `tmp-...`, then gets a MANIFEST.json with
the size and hash of every file except README.md, and is renamed last. It is renamed to `trash-...` before
it is deleted. run/run.py decides on the contents, and tensors.py writes the bytes. Needs no torch.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, TypeVar

from checkpoint.manifest import CARD, FORMAT, GONE, MANIFEST, fault_of, manifest_bytes, read_manifest_bytes
from checkpoint.model_json import hub_model, other_format, read_model_json
from checkpoint.schema import Manifest, State, parse, read_entries
from common import __version__
from common.activity import tick
from common.errors import CheckpointError, unreadable
from common.files import (
    TRANSIENT_ERRORS,
    disk_errors,
    free_bytes,
    read_json,
    read_plain,
    sha256,
    sync,
    sync_folder,
    why_not_writable,
)
from common.remote import is_hub_name
from common.text import command, counted, print_safely, printable

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"
BEST = ":best"  # behind the name of a run: not its newest checkpoint

MOST_MANIFEST_BYTES = 2**20  # 4,000 files
# `replaced-` marks a checkpoint whose step is being saved again; it stays valid until it is replaced.
CHECKPOINT_NAME = re.compile(r"(?:replaced-)?step-\d{8,}")

RETRY_SECONDS = (1.0, 5.0, 25.0)
T = TypeVar("T")
Warn = Callable[[str], None]
WriteFiles = Callable[[Path], Optional[Mapping[str, dict[str, Any]]]]


def warn_on_console(text: str) -> None:
    print_safely(f"warning: {printable(text)}", sys.stderr)


def publish(folder: Path, write_files: WriteFiles, details: Mapping[str, Any], needed_bytes: int = 0, *,
            warn: Warn = warn_on_console) -> None:
    """Write a folder with its manifest atomically, replacing one of the same name.

    `write_files` may return the manifest fields of files that it hashed while writing.
    """
    temporary = temporary_of(folder)

    def attempt() -> Mapping[str, dict[str, Any]]:
        start_writing(folder, {}, needed_bytes)
        with disk_errors(folder, needed_bytes=needed_bytes):
            return write_files(temporary) or {}

    try:
        details = {"world_size": 1, "val_loss": None, **details}
        finish_writing(temporary, folder, details, retrying(attempt, warn), warn)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_new(folder: Path) -> None:
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} already exists; choose a new folder")


def temporary_of(folder: Path) -> Path:
    return folder.with_name(f"tmp-{folder.name.removeprefix('step-')}-{os.getpid()}").absolute()


def start_writing(folder: Path, files: Mapping[str, Any], needed_bytes: int) -> Path:
    """Create the temporary folder with a file for each `TensorFile`, for ranks to fill; return its path."""
    temporary = temporary_of(folder)
    check_room(folder.parent, needed_bytes)
    with disk_errors(folder, needed_bytes=needed_bytes):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, file in files.items():
            file.create(temporary / name)
    return temporary


def finish_writing(temporary: Path, folder: Path, details: Mapping[str, Any],
                   hashed: Mapping[str, dict[str, Any]], warn: Warn) -> None:
    """Write the manifest of a complete temporary folder and rename it, replacing a folder of that name."""
    folder = Path(folder).absolute()
    replaced = folder.with_name(f"replaced-{folder.name}")

    def attempt() -> None:
        with disk_errors(folder):
            if temporary.exists():  # else it was renamed before the error
                write_manifest(temporary, details, hashed)
                # A crash between the two renames leaves the old checkpoint under `replaced-`.
                if os.path.lexists(folder):
                    if os.path.lexists(replaced):
                        _remove(replaced, warn)
                    os.rename(folder, replaced)
                os.rename(temporary, folder)
            sync_folder(folder.parent)

    retrying(attempt, warn)
    if os.path.lexists(replaced):
        _remove(replaced, warn)


def write_manifest(folder: Path, details: Mapping[str, Any], hashed: Mapping[str, dict[str, Any]]) -> None:
    """Sync a folder's files to the disk, hash those that were not, and write and sync the manifest."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        name = str(path.relative_to(folder))
        if name in (CARD, MANIFEST):
            continue
        files[name] = {"size": path.stat().st_size, **hashed.get(name, {})}
        if name not in hashed:
            with open(path, "rb") as file:
                files[name]["sha256"] = sha256(file)
    written = 1 + max((manifest["written"] for _, manifest in newest_first(folder.parent)[0]), default=0)
    manifest = {"format": FORMAT, "paddock": __version__, **details, "written": written, "files": files}
    with open(os.open(folder / MANIFEST, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.write(manifest_bytes(manifest))
        file.truncate()
    sync(folder / MANIFEST)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)


def retrying(attempt: Callable[[], T], warn: Warn) -> T:
    """Return attempt(), which is repeated after RETRY_SECONDS if a network disk fails temporarily.

    It must write everything again: what precedes a failed fsync may be lost even if a second succeeds.
    """
    for seconds in (*RETRY_SECONDS, None):
        try:
            return attempt()
        except CheckpointError as error:
            if seconds is None or error.errno not in TRANSIENT_ERRORS:
                raise
            warn(f"{error}; retrying in {seconds:g} s")
            for _ in range(round(seconds) or 1):
                time.sleep(seconds / (round(seconds) or 1))
                tick()  # waiting for the disk is not a hang


def check_room(folder: Path, needed_bytes: int, largest_file_bytes: int = 0) -> None:
    """Check that a folder, which need not exist yet, is writable, and has enough space for such files."""
    if error := why_not_writable(folder):
        raise CheckpointError(f"{folder} cannot be written to: {error}; set OUTPUT_DIR to a writable folder"
                              ) from error
    if (free := free_bytes(folder)) < needed_bytes:
        raise CheckpointError(f"{folder} has too little space for a checkpoint: {needed_bytes:,} bytes "
                              f"needed, {free:,} free; free some, set OUTPUT_DIR to another "
                              "disk, or lower KEEP_LAST")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest_file_bytes > limit:
        raise CheckpointError(f"{folder}: a file of a checkpoint needs {largest_file_bytes:,} bytes, but the "
                              f"shell allows {limit:,}; raise the limit with ulimit -f unlimited")


# ------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, verified by its own hash, without verifying the files."""
    return parse(read_manifest_bytes(folder), Manifest, Path(folder) / MANIFEST)


def verify(folder: Path, resumes: bool = True) -> dict[str, Any]:
    """Verify size and hash of a checkpoint's listed files, and return its manifest.

    The folder may be a link; links inside must stay inside. Only a run that `resumes` needs the optimizer.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        if (resumes or name != OPTIMIZER) and (fault := fault_of(folder, name, expected)):
            raise CheckpointError(f"{fault}; use another checkpoint")
    return manifest


def verify_model(folder: Path) -> None:
    """Verify a checkpoint except for its optimizer; a model without a manifest is not verified."""
    if os.path.exists(folder / MANIFEST):
        verify(folder, resumes=False)


def newest_verified(checkpoints_dir: Path, last_step: Optional[int] = None,
                    check: Callable[[Path], object] = verify, is_best: bool = False
                    ) -> tuple[Optional[Path], list[str]]:
    """Return the newest checkpoint that passes a check, and a warning for each one that was skipped.

    It is None only if there are no checkpoints (up to `last_step`). With `is_best`, the one with the lowest
    validation loss comes first, and those without one are left out.
    """
    readable, reasons = newest_first(checkpoints_dir)
    if is_best and readable:
        readable = best_first(readable)
        if not readable:
            raise CheckpointError(f"no checkpoint in {checkpoints_dir} has a validation loss, so none is the "
                                  f"best; leave out {BEST}, or name a step")
    for folder, manifest in readable:
        if last_step is not None and manifest["step"] > last_step:
            continue
        try:
            check(folder)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return folder, [f"skipping a checkpoint: {reason}" for reason in reasons]
    if reasons:
        raise CheckpointError(f"none of {counted(len(reasons), 'checkpoint')} in {checkpoints_dir} can be "
                              f"used, the first because: {reasons[0]}. Restore a good one, or start again "
                              "with RESUME=never or another RUN_NAME")
    return None, []


def refuse_lost(run_dir: Path, remedy: str) -> None:
    """Raise CheckpointError if a run that has no checkpoint saved one."""
    events = read_entries(run_dir / "events.jsonl")
    if saved := [event["checkpoint"] for event in events if event["event"] == "saved"]:
        raise CheckpointError(f"{run_dir} saved {saved[-1]}, but has no checkpoint any more. {remedy}")


def newest_first(checkpoints_dir: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """Return the checkpoints with valid manifests, newest first, and the faults of the others."""
    readable, reasons = [], []
    try:
        names = sorted(filter(CHECKPOINT_NAME.fullmatch, os.listdir(checkpoints_dir)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir} cannot be read: {error}") from error
    for folder in (Path(checkpoints_dir) / name for name in names):
        try:
            readable.append((folder, read_manifest(folder)))
        except CheckpointError as error:
            reasons.append(str(error))
    return sorted(readable, key=lambda item: item[1]["written"], reverse=True), reasons


def best_first(checkpoints: list[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints by validation loss; only those measured on the same items as the newest."""
    measured = [item for item in checkpoints if item[1]["val_loss"] is not None]
    comparable = [item for item in measured if item[1]["val_items"] in ("", measured[0][1]["val_items"])]
    return sorted(comparable, key=lambda item: item[1]["val_loss"])


def places(name: str, run_dir: Path) -> tuple[Path, ...]:
    """Return the folders that a setting may mean: a step or folder of this run, a path, another run."""
    run_dir = Path(run_dir)
    beside = () if name.startswith((".", "/", "~")) else (run_dir.parent / name,)  # ./ is a path
    return run_dir / "checkpoints" / name, run_dir / name, Path(name).expanduser(), *beside


def locate(name: str, run_dir: Path, warn: Warn = warn_on_console,
           check: Callable[[Path], object] = verify_model, only_local: bool = False) -> Path:
    """Return the folder that a setting or a script's argument names, checked if it has a manifest.

    The name is a step of this run, a run in OUTPUT_DIR, the path of a checkpoint, run or model, or a hub
    model (`owner/name`, `owner/name@revision`). For a run, the newest checkpoint that passes the check is
    returned; for RUN:best, the one with the lowest validation loss.
    """
    folders, run_dir, is_best = [], Path(run_dir), name.endswith(BEST) and not os.path.exists(name)
    name = name.removesuffix(BEST) if is_best else name
    for folder in places(name, run_dir):
        if folder.name and not os.path.isdir(folder):  # renamed by a crash while its step was saved again
            folder = folder.with_name(f"replaced-{folder.name}")
        if os.path.isdir(folder):
            folders.append(folder)
    if not folders and "/" in name and not only_local and is_hub_name(name.partition("@")[0]):
        if (folder := hub_model(name) / MANIFEST).exists():
            check(folder.parent)
        return folder.parent
    if not folders:
        if os.path.isfile(Path(name).expanduser()):
            raise CheckpointError(f"{name} is a file; name the folder of a run, a checkpoint or a Hugging "
                                  "Face model, or import a .gguf or .pth file first: "
                                  f"{command('scripts/import_checkpoint.py')} FILE FOLDER")
        raise CheckpointError(f"there is no checkpoint {name!r} in {run_dir.parent} or at that path; "
                              f"{command('scripts/runs.py')} lists the runs")
    by_path_and_name = list(places(name, run_dir)[2:])
    if len(folders) == 2 and folders == by_path_and_name and not os.path.samefile(*folders):
        raise CheckpointError(f"{name!r} is ambiguous: there are {folders[0].absolute()} and {folders[1]}; "
                              "use one of these paths")

    # Choose the newest checkpoint of a run or a folder of checkpoints.
    folder = folders[0]
    for checkpoints_dir in (folder, folder / "checkpoints"):
        newest, messages = newest_verified(checkpoints_dir, check=check, is_best=is_best)
        for message in messages:
            warn(message)
        if newest:
            return newest
    if (folder / MANIFEST).exists():
        check(folder)
        return folder
    if (folder / "log").is_dir() and (folder / "metrics.jsonl").exists():
        refuse_lost(folder, "Restore it")
        raise CheckpointError(f"the run {folder} has not saved a checkpoint yet")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(f"{folder} is neither a Paddock checkpoint (no {MANIFEST}) nor a Hugging Face "
                              f"model (no config.json){other_format(folder)}")
    if has_file(folder / STATE):
        raise CheckpointError(f"{folder} is an incomplete copy of a Paddock checkpoint (no {MANIFEST}); copy "
                              f"it again, or delete {STATE} from the copy to use its weights unverified")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Return the `schema.State`; empty for an imported model, or one of another trainer."""
    path = Path(folder) / STATE
    try:
        return parse(read_plain(path), State, path) if has_file(path) else {}
    except OSError as error:
        raise CheckpointError(f"{path} {unreadable(error, 'use another checkpoint')}") from error


def has_file(path: Path) -> bool:
    """Return whether a checkpoint has this file. Raises CheckpointError if it was deleted."""
    folder = path.parent
    if not folder.is_dir() or (not path.exists() and (folder / MANIFEST).exists()
                               and path.name in read_manifest(folder)["files"]):
        raise CheckpointError(f"{path} {GONE}")
    if path.name == STATE and path.exists() and not (folder / MANIFEST).exists():
        return "log_history" not in read_model_json(path)  # which transformers' Trainer writes
    return path.exists()


def note_need(checkpoint: Path, run_dir: Path) -> None:
    """Note beside a checkpoint that another run needs it. Retention keeps it while that run exists."""
    place = os.path.relpath(run_dir.resolve(), checkpoint.resolve().parent)
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
    note = checkpoint.parent / f"needed-{checkpoint.name}-{digest}.json"
    note.write_text(json.dumps({"run": str(run_dir.resolve()), "beside": place}) + "\n", encoding="utf-8")


def needed(checkpoints_dir: Path) -> dict[Path, str]:
    """Return the checkpoints that other runs need, each with one of these runs."""
    found = {}
    for note in checkpoints_dir.glob("needed-step-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = read_json(note)
            for place in (Path(content["run"]), checkpoints_dir / content["beside"]):
                if (place / "checkpoints").is_dir():
                    checkpoint = checkpoints_dir / note.name[len("needed-"):].rpartition("-")[0]
                    found[checkpoint.resolve()] = str(place)
    return found


def prune(checkpoints_dir: Path, keep_last: int, keep_best: int, protected: Iterable[Path] = (),
          warn: Warn = warn_on_console, keep_every: int = 0) -> list[Path]:
    """Delete old checkpoints, and return them. Rank 0 calls it under the lock, after it has written one.

    Keeps the newest `keep_last` (0 = all), the `keep_best` with the lowest validation loss, those of every
    `keep_every`-th step (0 = none), the protected ones (which the run started from), those that other runs
    need, and unreadable ones. The newest is not read again, because it was hashed while it was written.
    """
    readable, _ = newest_first(checkpoints_dir) if keep_last else ([], [])
    best = best_first(readable)[:keep_best]
    regular = [item for item in readable if keep_every and item[1]["step"] % keep_every == 0]
    kept = {folder.resolve() for folder, _ in (*readable[:keep_last], *best, *regular)}
    kept |= {Path(folder).resolve() for folder in protected} | needed(checkpoints_dir).keys()
    pruned = [folder for folder, _ in readable if folder.resolve() not in kept]
    for folder in pruned:
        _remove(folder, warn)
    return pruned


def delete_leftovers(checkpoints_dir: Path, warn: Warn = warn_on_console,
                     started_from: Optional[Path] = None) -> None:
    """Delete half-written and half-deleted folders, except `started_from`. Rank 0 calls it under the lock."""
    for replaced in sorted(checkpoints_dir.glob("replaced-step-*")):
        original = replaced.with_name(replaced.name.removeprefix("replaced-"))
        if original.exists():
            if replaced != started_from:  # else its replacement is bad
                _remove(replaced, warn)
            continue
        try:
            os.rename(replaced, original)
        except OSError as error:
            warn(f"{replaced} could not be renamed back to {original.name}: {error}")
    for left_over in sorted((*checkpoints_dir.glob("tmp-*"), *checkpoints_dir.glob("trash-*"))):
        _remove(left_over, warn)


def _remove(folder: Path, warn: Warn) -> None:
    """Rename to trash, then delete. Leftovers (NFS keeps open files) are deleted at the next start."""
    trash = folder
    try:
        if not folder.name.startswith("trash-"):
            trash = folder.with_name(f"trash-{uuid.uuid4().hex[:8]}-{folder.name}")
            os.rename(folder, trash)
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash)
        else:
            trash.unlink()  # deletes a link, not its target
    except OSError as error:
        warn(f"{folder} could not be deleted: {error}")
