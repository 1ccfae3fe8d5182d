"""Preparation in the background of training (PREPARE_AHEAD), and what it has finished. Without torch.

A set that training reads has its final name from the start, and a journal that lists its finished shards. A
manifest takes the journal's place when the set is complete.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from pydantic import ValidationError

from common.errors import DataError, SettingsError, run_script
from common.files import read_json, read_text
from common.text import ROOT, is_url
from config import KIND_OF_STAGE, Config
from data_pipeline import shards
from data_pipeline.examples import ExampleSet, examples_of
from data_pipeline.prepare import JOURNAL, progress_bar
from data_pipeline.shards import MANIFEST, MIXTURE, Manifest, TokenSet, first_fault
from data_pipeline.source_files import format_of, local_files, source_of
from data_preparation_utils import NAMES
from extensions.preparation_flags import prepare_from_flags
from extensions.report.data import holder_runs

POLL_SECONDS = 0.5
NICENESS = 10  # of the preparation, once training takes precedence
WORK = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from extensions.preparation import work; work()"


def is_source(kind: str, path: str) -> bool:
    """Return whether a data setting is an unprepared source: neither a prepared set nor a missing path."""
    if os.path.isdir(path):
        inside = [name for depth in ("*", "*/*") for name in glob(os.path.join(escape(path), depth))]
        if any(name.endswith((MANIFEST, MIXTURE, ".bin", ".npy")) for name in inside):
            return False
    names = [] if is_url(path) else local_files(path, defaultdict(list))
    if not names and source_of(path, NAMES[kind]).name:  # a hub name or a missing path
        owner, _, name = path.partition("/")
        return path in NAMES[kind] or bool(name) and not os.path.exists(owner)
    return is_url(path) or any(format_of(name)[0] for name in names)


class Prepared(NamedTuple):
    """What is on disk of a set."""

    folder: Path
    manifest: Manifest  # of the finished shards
    written: dict[str, int]  # the ids of each stream, such as "train-segments", also in unfinished shards
    is_complete: bool

    @property
    def tokens(self) -> int:
        return self.manifest.splits["train"].tokens


def look(folder: Path) -> Optional[Prepared]:
    """Return what is on disk of a set; None before its first shard."""
    for name in (MANIFEST, JOURNAL, MANIFEST):  # the set may become complete between two of them
        try:
            content = read_json(folder / name)
            streams = {**content["splits"], **{f"{split}-segments": stream["segments"] for split, stream in
                                               content["splits"].items() if "segments" in stream}}
            written = {stream: listed["tokens"] for stream, listed in streams.items()}
            for listed in streams.values():
                listed["tokens"] = sum(shard["tokens"] for shard in listed["shards"])
            return Prepared(folder, Manifest.model_validate(content), written, name == MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = first_fault(error) if isinstance(error, ValidationError) else error
            raise DataError(f"{folder / name}: is damaged: {reason}; delete {folder} and start again"
                            ) from error
    return None


@dataclass(frozen=True)
class StartOfShard(shards.Shard):
    """The first ids of a shard that is still being written, in memory."""

    ids: Optional[np.ndarray] = None

    def read(self, start: int, count: int, file: Optional[shards.WatchedFile] = None) -> np.ndarray:
        return self.ids[start:start + count]


def shards_of(prepared: Prepared, split: str, segments: bool = False, most: float = math.inf
              ) -> list[shards.Shard]:
    """Return the shards of a stream, and of an unfinished one its ids so far, up to `most` of the stream."""
    folder, manifest, files = prepared.folder, prepared.manifest, []
    if prepared.is_complete or manifest.splits[split].shards:
        files = shards.prepared_shards(folder, manifest, split, segments)
    name = f"{split}-segments" if segments else split
    unfinished = int(min(most, prepared.written[name])) - sum(shard.tokens for shard in files)
    if unfinished > 0:
        path, dtype = folder / f"{name}-{len(files):05d}.bin", "uint32" if segments else manifest.dtype
        ids = np.fromfile(path, np.dtype(dtype).newbyteorder("<"), unfinished, offset=shards.HEADER_BYTES)
        if len(ids) < unfinished:
            raise DataError(f"{path}: is shorter than its journal records; delete {folder} and start again")
        files.append(StartOfShard(path, dtype, shards.HEADER_BYTES, unfinished, ids=ids))
    return files


def segments_of(prepared: Prepared, split: str) -> TokenSet:
    """Return the segments of the examples on disk of a split."""
    return TokenSet(tuple(shards_of(prepared, split, segments=True)), prepared.folder.name)


def examples_in(prepared: Prepared, split: str, segments: TokenSet, known: int = 0, start: int = 0
                ) -> ExampleSet:
    """Return the examples with these segments after `known` ones, from token `start` on, without tokens."""
    new = segments.read(known, segments.tokens - known)
    return examples_of(prepared.folder, split, prepared.manifest.kind, new.copy(), start)


def slots_of(examples: ExampleSet, row_tokens: int) -> np.ndarray:
    """Return how many tokens of a row each chat takes; 0 if it keeps no target there, and is left out."""
    lengths = np.minimum(np.diff(examples.starts), row_tokens + 1)
    return np.where(examples.first_targets <= row_tokens, lengths - 1, 0)


def rows_in(tokens: int, row_tokens: int) -> int:
    """Return the number of rows whose tokens, with the last target, are all there."""
    return max(0, (tokens - 1) // row_tokens)


def least_rows(prepared: Prepared, split: str, row_tokens: int) -> int:
    """Return how many rows the finished shards of training, or all held-out tokens, fill at least."""
    tokens = prepared.tokens if split == "train" else prepared.written.get(split, 0)
    if prepared.manifest.kind == "documents" or not tokens:
        return rows_in(tokens, row_tokens)
    examples = examples_in(prepared, split, segments_of(prepared, split))
    return int(slots_of(examples, row_tokens)[examples.starts[1:] <= tokens].sum()) // row_tokens


def lacking(folder: Path, config: Config) -> str:
    """Return what training still needs of a set to start; "" if nothing.

    These are the rows of a step, and those of validation, which must not change during the run.
    """
    prepared = look(folder)
    if prepared and prepared.is_complete:
        return ""
    if not prepared or least_rows(prepared, "train", config.max_seq_len) < config.rows_read:
        return "shards with the rows of a step"
    validates = config.validate_every and not config.validation_data_path
    held_out = least_rows(prepared, "validation", config.max_seq_len) if validates else 0
    if validates and held_out < config.validation_rows:
        return f"VALIDATION_ROWS={config.validation_rows} held-out rows ({held_out} so far)"
    return ""


def start(argv: Sequence[str], config: Config) -> Path:
    """Prepare what the flags describe in the background; return its folder once training can start."""
    if config.validation_fraction == 0 and config.validate_every and not config.validation_data_path:
        raise SettingsError("VALIDATION_FRACTION=0 holds nothing out; set VALIDATE_EVERY=0")
    if any(flag.startswith("--mix=") for flag in argv):
        raise SettingsError("PREPARE_AHEAD=true does not work with --mix; remove one of them")
    kind = KIND_OF_STAGE[config.training_stage]
    folder = prepare_from_flags(kind, [*argv], only_plan=True)
    if (folder / MANIFEST).is_file():
        return folder
    # The process has its input from the file that names it: so `holder_runs` knows whether it runs.
    with open(beside(folder, "holder"), "w") as holder, open(beside(folder, "log"), "w") as log:
        child = subprocess.Popen([sys.executable, "-c", WORK, str(os.getpid()), kind, *argv], stdin=holder,
                                 stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        holder.write(f"process {child.pid} on {socket.gethostname()}")
    with progress_bar(unit="B", leave=False) as bar:
        while True:
            ended = child.poll() is not None
            if not (needed := lacking(folder, config)):
                with suppress(OSError):  # it may have ended
                    os.setpriority(os.PRIO_PGRP, child.pid, NICENESS)
                return folder
            if ended:
                raise DataError(why_ended(folder))
            bar.set_description(f"Preparing {needed}", refresh=False)
            bar.update(sum(path.stat().st_size for path in folder.glob("train-*.bin")) - bar.n)
            time.sleep(POLL_SECONDS)


def work() -> None:
    """Prepare what the flags describe, in a process that ends with its parent."""
    parent, kind, *argv = sys.argv[1:]

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    run_script(lambda: prepare_from_flags(kind, argv))


def beside(folder: Path, name: str) -> Path:
    """Return a file of this machine's preparation of a set."""
    return folder.with_name(f".{folder.name}.{socket.gethostname()}.{name}")


def why_ended(folder: Path) -> str:
    """Return why no process prepares a set that is not complete; "" while one does, or if it is complete."""
    holders = (beside(folder, "holder"), folder.with_name(f".{folder.name}.lock"))
    runs = not os.path.isdir("/proc") or any(holder_runs(each) is not False for each in holders)
    if runs or (folder / MANIFEST).is_file():
        return ""
    with suppress(OSError):
        before, _, error = f"\n{read_text(beside(folder, 'log'))}".rpartition("\nerror: ")
        if before:
            return error.strip()
        return (f"the preparation of {folder} ended without reporting a reason (killed, or out of memory?); "
                f"its output is in {beside(folder, 'log')}; start again to continue it")
    return f"{folder}: is not complete, and no process prepares it; start ./paddock train with its source"
