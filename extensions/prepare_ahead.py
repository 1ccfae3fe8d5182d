"""Train on data that is still being prepared (PREPARE_AHEAD); extensions/preparation.py prepares it.

The rows are those of the whole set. They are read shard by shard, shuffled within each, so that the order
does not depend on how much is prepared. Once the set is complete, another pass can follow.
"""

import hashlib
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Optional

import numpy as np

from common.activity import phase, tick
from common.errors import CheckpointError, DataError, SettingsError
from common.text import counted
from config import Config
from data_pipeline import shards
from data_pipeline.mixture import is_mixture
from data_pipeline.prepare import describe_counts, read_prepared
from dataloaders import OPENERS, Batch, Rows, SourceRows, TokenRows, cache_of, check_rows, permute
from extensions.preparation import POLL_SECONDS, lacking, look, rows_in, why_ended
from extensions.report.console import times_read
from parallel.ranks import collective
from run.extensions import Extension
from run.run import Inputs, Run, save_checkpoint

REPORT_SECONDS = 30.0


class AheadRows(SourceRows):
    """Rows of a set of which shards may still be prepared, and their order, in place of a `Mixing`.

    Shards are opened when they are needed. The training loop and the loader's thread both use it.
    """

    def __init__(self, config: Config, tokenizer, verify: str):
        self.config, self.tokenizer, self.verify = config, tokenizer, verify
        self.lock, self.folder, self.opened = threading.RLock(), folder_of(config), ()
        self.look()
        self.fingerprint = self.entries[0].sha256
        shards.check_manifest(self.folder, self.prepared.manifest, tokenizer, "documents")
        if self.is_complete:
            check_rows(config, config.data_path, "train", len(self), f"its {self.content} fill")
        self.has(config.rows_read)

    example_set = None
    content = property(lambda self: f"{self.prepared.tokens:,} tokens")
    row_tokens = property(lambda self: self.config.max_seq_len)
    sizes = property(lambda self: (len(self),))
    token_set = property(lambda self: self.rows.token_set)
    is_complete = property(lambda self: self.prepared.is_complete)
    entries = property(lambda self: self.prepared.manifest.splits["train"].shards)

    def __len__(self) -> int:
        return self.ends[-1]

    def __call__(self, indices: np.ndarray) -> Batch:
        return self.rows(indices)

    def describe(self) -> str:
        return self.content + ", and more are being prepared" * (not self.is_complete)

    def look(self) -> None:
        """Learn of new shards."""
        with self.lock:
            if prepared := look(self.folder):  # otherwise a preparation failed, whose shards are still there
                tokens = accumulate(entry.tokens for entry in prepared.manifest.splits["train"].shards)
                self.prepared = prepared
                self.ends = [rows_in(count, self.config.max_seq_len) for count in tokens]

    def shards_with(self, rows: int) -> int:
        """Return the number of shards that hold this many rows, or all rows."""
        return bisect_left(self.ends, min(rows, len(self))) + 1

    def has(self, rows: int) -> bool:
        """Return whether the first `rows` rows of the run are on disk; open their shards."""
        with self.lock:
            if rows > len(self) and not self.is_complete:
                self.look()
            if rows > len(self) and not self.is_complete:
                return False
            if new := self.entries[len(self.opened):self.shards_with(rows)]:
                listed = shards.Split(tokens=sum(entry.tokens for entry in new), shards=new)
                manifest = self.prepared.manifest.model_copy(update={"splits": {"train": listed}})
                opened = shards.prepared_shards(self.folder, manifest, "train")
                token_set = token_rows(self.config, manifest, opened, self.tokenizer).token_set
                shards.verify_files(token_set, self.verify, cache_of(self.config))
                self.opened = (*self.opened, *opened)
                shards.allow_open_files(len(self.opened), self.folder)
                self.rows = token_rows(self.config, manifest, self.opened, self.tokenizer)
            return True

    def rows_at(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the int64 row indices at ascending positions: of each pass shard by shard, each shuffled."""
        if not self.has(int(positions[-1]) + 1):
            raise DataError(f"{self.folder}: only {len(self):,} rows are prepared; continue its preparation")
        with self.lock:
            passes, within = 0 * positions, positions
            if self.is_complete:
                passes, within = np.divmod(positions, len(self))
            parts, rows = np.searchsorted(self.ends, within, side="right"), np.empty_like(positions)
            for epoch, shard in {*zip(passes.tolist(), parts.tolist())}:
                chosen = (passes == epoch) & (parts == shard)
                first = self.ends[shard - 1] if shard else 0
                size = self.ends[shard] - first
                rows[chosen] = first + permute(within[chosen] - first, size, seed, epoch, source=shard)
            return rows


def folder_of(config: Config) -> Path:
    """Return the folder of the set that the settings name. Raises if training cannot start with it."""
    path = Path(config.data_path)
    if is_mixture(path):
        raise SettingsError(f"PREPARE_AHEAD=true does not work with {path}, a mixture; remove one of them")
    folder = shards.prepared_folder(path) or path
    if not folder.exists():
        raise DataError(f"PRETRAIN_DATA_PATH={path} does not exist; correct it")
    if needed := lacking(look(folder), config):
        raise DataError(f"{folder}: training starts once it has {needed}; ./paddock train with the source "
                        "prepares it")
    return folder


def token_rows(config: Config, manifest: shards.Manifest, files: Sequence[shards.Shard], tokenizer
               ) -> TokenRows:
    """Return the rows of these shards."""
    start_id = manifest.document_start_id
    token_set = shards.TokenSet(tuple(files), files[0].path.parent.name, start_id, tokenizer.vocab_size)
    return TokenRows(token_set, config.max_seq_len, start_id if config.document_mask else None)


@dataclass(frozen=True)
class StartOfShard(shards.Shard):
    """The first ids of a shard that is still being written, in memory."""

    ids: Optional[np.ndarray] = None

    def read(self, start: int, count: int, file: Optional[shards.WatchedFile] = None) -> np.ndarray:
        return self.ids[start:start + count]


def open_rows(config: Config, split: str, tokenizer, verify: str) -> Rows:
    """Open one split; of validation, the tokens so far, of which evaluations only read the first rows."""
    if split == "train":
        rows = AheadRows(config, tokenizer, verify)
        return Rows((rows,), rows, rows.fingerprint)
    folder = folder_of(config)
    manifest, held_out, is_complete = look(folder)
    stream, files = manifest.splits[split], []
    if is_complete or stream.shards:
        files = shards.prepared_shards(folder, manifest, split)
        token_set = token_rows(config, manifest, files, tokenizer).token_set
        shards.verify_files(token_set, verify, cache_of(config))
    wanted = config.validation_rows * config.max_seq_len + 1
    if (unfinished := min(held_out, wanted) - stream.tokens) > 0:
        path, start = folder / f"{split}-{len(files):05d}.bin", shards.HEADER_BYTES
        ids = np.fromfile(path, np.dtype(manifest.dtype).newbyteorder("<"), unfinished, offset=start)
        files.append(StartOfShard(path, manifest.dtype, start, len(ids), ids=ids))
    rows = token_rows(config, manifest, files, tokenizer)
    check_rows(config, folder, split, len(rows), f"its {rows.content} fill")
    digest = hashlib.sha256(rows.token_set.read(0, min(held_out, wanted)).tobytes()).hexdigest()
    return Rows.of(replace(rows, token_set=replace(rows.token_set, fingerprint=digest)))


class PrepareAhead(Extension):
    """Lets all ranks wait for the rows of a step, and keeps the hashes of the shards that were read."""

    def __init__(self):
        self.rows: Optional[AheadRows] = None
        self.agreed, self.all_agreed = 0, False  # rows that every rank has, and whether these are all
        self.read: list[str] = []  # hashes of shards
        self.was_reported, self.looks_at = False, 0.0

    def inputs(self, config: Config, inputs: Inputs, verify: str) -> Inputs:
        self.rows = inputs.rows.sources[0] if config.prepare_ahead else None
        self.was_reported = self.rows is None or self.rows.is_complete
        return inputs

    def state_dict(self) -> dict:
        return {"shards": self.read} if self.rows else {}

    def load_state_dict(self, state: dict) -> None:
        self.read = state.get("shards", [])
        self.compare()

    def compare(self) -> None:
        """Raise CheckpointError if a shard that the run has read is not the same any more."""
        for before, entry in zip(self.read, self.rows.entries if self.rows else ()):
            if before != entry.sha256:
                raise on_all_ranks(CheckpointError(
                    f"{self.rows.folder / entry.file}: the run has read this shard with SHA-256 "
                    f"{before[:12]}, and now it has {entry.sha256[:12]}, because the source has changed; "
                    "restore the source, or start a new run with another RUN_NAME"))

    @collective
    def step_begin(self, run: Run) -> None:
        if self.rows is None:
            return
        needed = (run.progress.step + 1) * run.config.rows_read
        if not self.was_reported and run.ranks.is_rank0 and time.monotonic() >= self.looks_at:
            self.looks_at = time.monotonic() + REPORT_SECONDS
            self.report(run)
        if needed > self.agreed and not self.all_agreed:
            with phase("data"):
                self.wait(run, needed)
        if (count := self.rows.shards_with(needed)) > len(self.read):
            self.read = [entry.sha256 for entry in self.rows.entries[:count]]

    def report(self, run: Run) -> None:
        """Log the end of the preparation, and what it left out."""
        failure = why_ended(self.rows.folder)
        self.rows.look()
        self.was_reported = bool(failure) or self.rows.is_complete
        if failure:
            run.log.warn(f"{failure}. The run goes on with the {self.rows.prepared.tokens:,} tokens that are "
                         "prepared")
        elif self.rows.is_complete:
            counts = describe_counts(self.rows.folder, read_prepared(self.rows.folder))
            for line in (f"The data is prepared; {times_read(run.config, self.rows)}:", *counts):
                run.log.info(line)

    @collective
    def wait(self, run: Run, needed: int) -> None:
        """Wait until every rank has so many rows. If no process prepares them, save, and raise DataError."""
        ranks, says_at = run.ranks, 0.0

        def state() -> tuple[int, bool, str, list[str]]:
            failure = "" if ranks.local_rank else why_ended(self.rows.folder)  # before the last look
            self.rows.look()
            self.compare()
            hashes = [entry.sha256[:16] for entry in self.rows.entries]
            return len(self.rows), self.rows.is_complete, failure, hashes

        while True:
            tick()  # waiting for data is not a hang
            gathered = ranks.gather_or_raise(state)
            counts, are_complete, failures, hashes = zip(*gathered)
            if differing := [number for number, same in enumerate(zip(*hashes)) if len({*same}) > 1]:
                raise on_all_ranks(DataError(
                    f"{self.rows.folder}: shard {differing[0]} differs between machines, because their "
                    "sources or tokenizers do; copy one source to all, and delete the other sets"))
            self.agreed, self.all_agreed = min(counts), all(are_complete)
            if needed <= self.agreed or self.all_agreed:
                return
            run.context.leave_if_stopped()
            if any(failures):
                save_checkpoint(run, wait=True)
                saved = f"Step {run.progress.step}, the last with data, is saved"
                raise on_all_ranks(DataError(max(failures), f"{saved}; the same command resumes it once the "
                                             "data can be prepared"))
            if time.monotonic() >= says_at:
                says_at = time.monotonic() + REPORT_SECONDS
                shards_there = counted(len(self.rows.entries), "shard")
                run.log.info(f"Waiting for data: step {run.progress.step + 1} needs more than "
                             f"{self.rows.prepared.tokens:,} tokens in {shards_there}")
            time.sleep(POLL_SECONDS)


def on_all_ranks(error: DataError | CheckpointError) -> DataError | CheckpointError:
    """Return an error that one rank reports for all."""
    error.on_all_ranks = True
    return error


OPENERS["growing"] = open_rows
EXTENSION = PrepareAhead
