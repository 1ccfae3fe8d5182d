"""Verify copies of checkpoints: does every file have the size and SHA-256 that MANIFEST.json lists?

    ./paddock verify runs/first
    ./paddock verify copies/step-00000200 --model-only

For a run, all checkpoints are verified. A copy can be verified with the folder and Python's standard library
alone: no run, no packages, no GPU. If the run is beside it, its ledger is also compared with the digest in
the model card.
Exit codes: 0 intact, 5 damaged, incomplete, or nothing to compare with.
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
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint.manifest import CARD, MANIFEST, fault_of, read_sealed
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, run_script
from common.files import plain, read_plain
from common.text import printable, show

PROGRESS_SECONDS = 1
# What only resuming needs.
OF_TRAINING = ("optimizer.safetensors", "trainer_state.json")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints that a path means: itself, or those of a run, oldest first."""
    if not folder.is_dir() and len(folder.parts) == 1 and not folder.name.startswith("step-"):
        with suppress(ImportError):  # a run's name, where the packages that read OUTPUT_DIR are installed
            from settings.load import find_run

            folder = find_run(str(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the path of a checkpoint, or of a run")
    if (folder / MANIFEST).exists():
        return [folder]
    found = sorted(place for inner in (folder, folder / "checkpoints") for place in inner.glob("step-*"))
    if not found:
        kind = "is a model that Paddock did not write" if (folder / "config.json").exists() else "holds none"
        raise CheckpointError(f"{folder} has no {MANIFEST}, so there is nothing to compare with: it {kind}. "
                              "Copy the checkpoint again with all of its files")
    return found


def verify(folder: Path, model_only: bool) -> bool:
    """Print a line for each file of a checkpoint, and one for the whole; return whether it is intact."""
    manifest = json.loads(read_sealed(folder))
    files = {name: entry for name, entry in manifest["files"].items()
             if not (model_only and name in OF_TRAINING)}
    show(f"{folder}:")
    faults = {}
    for name, expected in sorted(files.items()):
        fault = faults[name] = fault_of(folder, name, expected, progress(name, expected["size"]))
        show(f"  {'ok' if fault is None else 'BAD':4} {name}  {expected['size']:,} bytes"
             + (f": {fault.removeprefix(f'{folder / name} ')}" if fault else ""))
    bad = [name for name, fault in faults.items() if fault]
    of_model = [name for name in bad if name not in OF_TRAINING]
    if bad and not of_model:
        show("The model's files are intact, but files needed for resuming are not (--model-only skips them).")
    show(described(manifest, folder))
    same = ledger_is_same(folder, manifest["step"])
    if same is not None:
        show(f"  {'ok' if same else 'BAD':4} ledger.jsonl of the run, which "
             f"{'matches' if same else 'differs from'} the model card")
    show(f"{folder} {'is intact' if not bad and same is not False else 'is NOT intact'}.")
    return not bad and same is not False


def progress(name: str, size: int) -> Callable[[int], None]:
    """Return a function that takes the bytes of each hashed block, and shows the share on a terminal."""
    done, shown = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if sys.stderr.isatty() and time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"  {printable(name)}: {done / size:.0%}", end="\r", file=sys.stderr, flush=True)

    return advance


def card_facts(folder: Path) -> dict[str, str]:
    """Return the texts and numbers in the metadata of the model card; {} if there is none."""
    try:
        card = read_plain(folder / CARD).decode(errors="replace")
    except OSError:
        return {}
    block = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    lines = re.findall(r"^ *(\w+): (.+)$", block[0] if block else "", re.MULTILINE)
    return {name: value.strip("'\"") for name, value in lines}


def described(manifest: dict[str, Any], folder: Path) -> str:
    """Return what manifest and card tell of a checkpoint, on one line."""
    card, loss = card_facts(folder), manifest.get("val_loss")
    facts = {"step": f"{manifest['step']:,}", "tokens": card.get("tokens"), "license": card.get("license"),
             "base": card.get("base_model"), "validation loss": None if loss is None else f"{loss:.4f}",
             "Paddock": card.get("version")}
    return "  " + ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def ledger_is_same(folder: Path, step: int) -> Optional[bool]:
    """Return whether the run's ledger has the digest in the card; None if one of them is not here."""
    wanted = card_facts(folder).get("ledger_sha256")
    checkpoints = folder.absolute().parent
    ledger = checkpoints.parent / "ledger.jsonl"
    if not wanted or checkpoints.name != "checkpoints" or not ledger.is_file():
        return None
    digest = hashlib.sha256()
    try:
        with open(ledger, "rb", opener=plain) as file:
            for line in file:
                if step_of(line) <= step:
                    digest.update(line)
    except OSError as error:
        raise CheckpointError(f"{ledger} cannot be read: {error}; check this path") from error
    return digest.hexdigest() == wanted


def step_of(line: bytes) -> float:
    """Return the step of a line of the ledger; infinity if it is unreadable or incomplete."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("folders", nargs="+", type=local_path, metavar="FOLDER",
                        help="a checkpoint, adapters, a merged or imported model, or a run")
    parser.add_argument("--model-only", action="store_true",
                        help="skip files that only resuming needs: optimizer.safetensors, trainer_state.json")
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
        raise CheckpointError(f"{len(damaged)} of {count} damaged: {', '.join(damaged)}; copy the "
                              "files marked BAD again from an intact copy")


if __name__ == "__main__":
    run_script(main)
