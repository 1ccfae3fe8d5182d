"""Verify that every file of a checkpoint has the size and SHA-256 listed in its MANIFEST.json.

    ./paddock verify runs/first
    ./paddock verify copies/step-00000200 --model-only

For a run, all checkpoints are verified, and its step log is compared with the digest in the model card. A
copied checkpoint can be verified alone, and without installing any package. The exit code is 0 if everything
is intact, and 5 if something is damaged, incomplete or has no manifest.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint.manifest import CARD, MANIFEST, fault_of, read_manifest_bytes
from common.command_line import CommandParser
from common.errors import CheckpointError, SettingsError, local_path, run_script
from common.files import plain, read_plain
from common.text import command, counted, percent, printable, show

PROGRESS_SECONDS = 1
RESUME_FILES = ("optimizer.safetensors", "trainer_state.json")  # needed only to resume


def checkpoints_in(folder: Path) -> list[Path]:
    """Return a checkpoint itself, or all checkpoints of a run, oldest first."""
    if not folder.is_dir() and len(folder.parts) == 1 and not folder.name.startswith("step-"):
        with suppress(ImportError):  # a run's name needs the packages that read OUTPUT_DIR
            from plan.command_line import find_run

            folder = find_run(str(folder))
    if folder.suffix == ".gguf":
        raise SettingsError(f"{folder} has no checksums to verify: its export compared it with the model; "
                            "compare a copy with it by sha256sum")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; pass a checkpoint or a run, such as "
                              f"{command('scripts/runs.py')} lists")
    if (folder / MANIFEST).exists():
        return [folder]
    checkpoints = sorted(path for inner in (folder, folder / "checkpoints") for path in inner.glob("step-*"))
    if not checkpoints:
        if (folder / "metrics.jsonl").exists():
            raise CheckpointError(f"the run {folder} has no checkpoint to verify")
        kind = ("the model was not written by Paddock" if (folder / "config.json").exists()
                else "the folder contains no checkpoint")
        raise CheckpointError(f"{folder} has no {MANIFEST} to verify: {kind}. If this is an incomplete copy, "
                              "copy the checkpoint again with all of its files")
    return checkpoints


def verify(folder: Path, model_only: bool) -> bool:
    """Print the result for each file of a checkpoint and for the whole; return True if it is intact."""
    manifest = json.loads(read_manifest_bytes(folder))
    files = {name: entry for name, entry in manifest["files"].items()
             if not (model_only and name in RESUME_FILES)}
    show(f"{folder}:")
    faults = {}
    for name, expected in sorted(files.items()):
        fault = faults[name] = fault_of(folder, name, expected, progress(name, expected["size"]))
        show(f"  {'ok' if fault is None else 'BAD':4} {name}  {expected['size']:,} bytes"
             + (f": {fault.removeprefix(f'{folder / name} ')}" if fault else ""))
    bad = [name for name, fault in faults.items() if fault]
    if bad and not {*bad} - {*RESUME_FILES}:
        show("The model's files are intact, but files needed to resume are not (--model-only skips them).")
    loss = manifest.get("val_loss")
    if manifest["step"]:  # an exported model has none
        show(f"  step {manifest['step']:,}" + (f", validation loss {loss:.3f}" if loss is not None else ""))
    same = step_log_is_same(folder, manifest["step"])
    if same is not None:
        show(f"  {'ok' if same else 'BAD':4} ledger.jsonl of the run, which "
             f"{'matches' if same else 'differs from'} the model card")
    show(f"{folder} {'is intact' if not bad and same is not False else 'is NOT intact'}.")
    return not bad and same is not False


def progress(name: str, size: int) -> Callable[[int], None]:
    """Return a function that is called with the bytes of each hashed block, and shows the progress."""
    done, shown = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if sys.stderr.isatty() and time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"  {printable(name)}: {percent(done / size, 0)}", end="\r", file=sys.stderr, flush=True)

    return advance


def step_log_is_same(folder: Path, step: int) -> Optional[bool]:
    """Return True if the run's step log has the digest in the card; None if either is missing."""
    expected, checkpoints = None, folder.absolute().parent
    with suppress(OSError):
        expected = re.search(rb"^ *ledger_sha256: '?(\w+)", read_plain(folder / CARD), re.MULTILINE)
    log = checkpoints.parent / "ledger.jsonl"
    if not expected or checkpoints.name != "checkpoints" or not log.is_file():
        return None
    digest = hashlib.sha256()
    try:
        with open(log, "rb", opener=plain) as file:
            for line in file:
                if step_of(line) <= step:
                    digest.update(line)
    except OSError as error:
        raise CheckpointError(f"{log} cannot be read: {error}; check this path") from error
    return digest.hexdigest() == expected[1].decode()


def step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("folders", nargs="+", type=local_path, metavar="FOLDER",
                        help="a checkpoint, adapters, a merged or imported model, or a run")
    parser.add_argument("--model-only", action="store_true",
                        help="skip files needed only to resume: optimizer.safetensors, trainer_state.json")
    args = parser.parse_args()
    damaged, count = [], 0
    for folder in args.folders:
        for checkpoint in checkpoints_in(folder.expanduser()):
            count += 1
            try:
                if not verify(checkpoint, args.model_only):
                    damaged.append(str(checkpoint))
            except CheckpointError as error:
                show(f"{checkpoint}: {error}")
                damaged.append(str(checkpoint))
    if damaged:
        others = "; training and other commands skip them" if len(damaged) < count else ""
        raise CheckpointError(f"damaged: {len(damaged)} of {counted(count, 'checkpoint')}: "
                              f"{', '.join(damaged)}; replace the files marked BAD from an intact "
                              f"copy{others}")


if __name__ == "__main__":
    run_script(main)
