"""Train on data that is still being prepared (PREPARE_AHEAD); extensions/preparation.py prepares it.

Rows are read shard by shard, shuffled within each, so that the order does not depend on how much is prepared.
Once the set is complete, another pass can follow. The rows of text are those of the whole set. Chats are
packed into rows with those that end in the same shard, and of those held out, as many are packed as fill
VALIDATION_ROWS.
"""

import hashlib
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Optional

import numpy as np

import dataloaders
from common.activity import phase, tick
from common.errors import CheckpointError, DataError, SettingsError
from common.text import counted
from config import KIND_OF_STAGE, KINDS, Config
from data_pipeline import shards
from data_pipeline.examples import ExampleSet
from data_pipeline.mixture import is_mixture
from data_pipeline.prepare import describe_counts, read_prepared
from dataloaders import Batch, ExampleRows, Mixing, Rows, TokenRows, cache_of, check_rows, pack, permute
from extensions import preparation
from extensions.report.console import times_read
from parallel.ranks import collective
from run.extensions import Extension
from run.run import Inputs, Run, save_checkpoint
from tokenizer import SUPPRESSED

REPORT_SECONDS = 30.0


class AheadRows(dataloaders.SourceRows):
    """Rows of a set of which shards may still be prepared, and their order, in place of a `Mixing`.

    Shards are opened when they are needed. The training loop and the loader's thread both use it.
    """

    def __init__(self, config: Config, tokenizer, verify: str):
        self.config, self.tokenizer, self.verify = config, tokenizer, verify
        self.lock, self.folder, self.opened = threading.RLock(), folder_of(config, tokenizer), ()
        self.look()
        self.fingerprint = self.hashes[0]
        if self.is_complete:
            check_rows(config, config.data_path, "train", len(self), f"its {self.content} fill")
        self.has(config.rows_read)

    example_set, shortened = None, ""
    content = property(lambda self: f"{self.prepared.tokens:,} tokens")
    row_tokens = property(lambda self: self.config.max_seq_len)
    sizes = property(lambda self: (len(self),))
    is_complete = property(lambda self: self.prepared.is_complete)
    entries = property(lambda self: self.prepared.manifest.splits["train"].shards)

    def __len__(self) -> int:
        return self.ends[-1]

    def __call__(self, indices: np.ndarray) -> Batch:
        return self.rows(indices)

    def describe(self) -> str:
        return self.content + self.shortened + ", and more are being prepared" * (not self.is_complete)

    def look(self) -> None:
        """Learn of new shards."""
        with self.lock:
            # Otherwise a preparation failed, whose shards are still there.
            if prepared := preparation.look(self.folder):
                self.prepared = prepared
                self.count([*accumulate(entry.tokens for entry in self.entries)])

    def count(self, token_ends: list[int]) -> None:
        """Set the number of rows up to the end of each finished shard, and the hash of its content."""
        self.ends = [preparation.rows_in(tokens, self.row_tokens) for tokens in token_ends]
        self.hashes = [entry.sha256 for entry in self.entries]

    def rows_of(self, token_set: shards.TokenSet) -> TokenRows | Rows:
        """Return the rows of the opened shards."""
        start_id = token_set.document_start_id
        return TokenRows(token_set, self.row_tokens, start_id if self.config.document_mask else None)

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
                opened = tokens_of(manifest, opened, self.tokenizer)
                check_finished(opened, self.config, self.verify)
                self.opened = (*self.opened, *opened.shards)
                shards.allow_open_files(len(self.opened), self.folder)
                self.token_set = replace(opened, shards=self.opened)
                self.rows = self.rows_of(self.token_set)
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


class AheadChats(AheadRows):
    """Rows of chats. Each belongs to the shard in which it ends, and is packed with the others of that shard.

    The hash of a shard is also that of their segments, which say what is a target.
    """

    def __init__(self, config: Config, tokenizer, verify: str):
        self.parts: list[ExampleSet] = []  # of finished shards
        self.counts, self.digests = [], []  # the number of rows of each part, and the hash of its segments
        self.packed: list[ExampleRows | None] = []  # the rows of opened shards
        self.cut = self.left_out = 0
        super().__init__(config, tokenizer, verify)

    @property
    def content(self) -> str:
        return counted(sum(map(len, self.parts)), "chat")

    @property
    def shortened(self) -> str:
        cut = f", {self.cut:,} cut to MAX_SEQ_LEN={self.row_tokens}" if self.cut else ""
        return cut + (f", {self.left_out:,} too long and left out" if self.left_out else "")

    def count(self, token_ends: list[int]) -> None:
        if new := token_ends[len(self.parts):]:
            known = sum(len(part.segments) for part in self.parts)
            start = int(self.parts[-1].starts[-1]) if self.parts else 0
            segments = preparation.segments_of(self.prepared, "train")
            check_finished(segments, self.config, self.verify)
            examples = preparation.examples_in(self.prepared, "train", segments, known, start)
            first = 0
            for last in np.searchsorted(examples.starts[1:], new, side="right").tolist():
                self.add(examples.part(first, last))
                first = last
        self.ends = [*accumulate(self.counts)]
        self.hashes = [hashlib.sha256((entry.sha256 + digest).encode()).hexdigest()
                       for entry, digest in zip(self.entries, self.digests)]

    def add(self, part: ExampleSet) -> None:
        """Count the rows of the chats that end in the next shard."""
        slots = preparation.slots_of(part, self.row_tokens)
        self.parts.append(part)
        self.counts.append(len(pack(slots[slots > 0], self.row_tokens)))
        self.digests.append(hashlib.sha256(part.segments.tobytes()).hexdigest())
        self.left_out += int((slots == 0).sum())
        self.cut += int(((np.diff(part.starts) > self.row_tokens + 1) & (slots > 0)).sum())

    def rows_of(self, token_set: shards.TokenSet) -> TokenRows | Rows:
        for number in range(len(self.packed), len(token_set.shards)):
            part = replace(self.parts[number], tokens=token_set, path=token_set.shards[number].path)
            mask = self.config.document_mask
            self.packed.append(ExampleRows(part, self.row_tokens, mask) if self.counts[number] else None)
        return Rows(tuple(self.packed), Mixing(tuple(self.counts[:len(self.packed)])), self.hashes[0])


def kind_of(config: Config) -> str:
    return KIND_OF_STAGE[config.training_stage]


def folder_of(config: Config, tokenizer) -> Path:
    """Return the folder of the set that the settings name. Raises if training cannot start with it."""
    path = Path(config.data_path)
    if is_mixture(path):
        raise SettingsError(f"PREPARE_AHEAD=true does not work with {path}, a mixture; remove one of them")
    folder = shards.prepared_folder(path) or path
    if not folder.exists():
        raise DataError(f"{KINDS[kind_of(config)][0]}={path} does not exist; correct it")
    if prepared := preparation.look(folder):
        shards.check_manifest(folder, prepared.manifest, tokenizer, kind_of(config))
    if needed := preparation.lacking(folder, config):
        raise DataError(f"{folder}: training starts once it has {needed}; ./paddock train with the source "
                        "prepares it")
    return folder


def tokens_of(manifest: shards.Manifest, files: Sequence[shards.Shard], tokenizer) -> shards.TokenSet:
    """Return these shards as a sequence of tokens."""
    name = files[0].path.parent.name
    return shards.TokenSet(tuple(files), name, manifest.document_start_id, tokenizer.vocab_size)


def check_finished(token_set: shards.TokenSet, config: Config, verify: str) -> None:
    """Compare the finished shards with their hashes, as `verify_files` does."""
    if finished := tuple(shard for shard in token_set.shards if shard.sha256):
        shards.verify_files(replace(token_set, shards=finished), verify, cache_of(config))


def open_rows(config: Config, split: str, tokenizer, verify: str) -> Rows:
    """Open one split; of validation, what is held out so far, of which evaluations read the first rows."""
    is_text = kind_of(config) == "documents"
    if split == "train":
        rows = (AheadRows if is_text else AheadChats)(config, tokenizer, verify)
        return Rows((rows,), rows, rows.fingerprint)
    prepared, row_tokens = preparation.look(folder_of(config, tokenizer)), config.max_seq_len
    wanted = config.validation_rows * row_tokens
    if is_text:
        most, marks = wanted + 1, b""  # with the last target
    else:
        segments = preparation.segments_of(prepared, split)
        check_finished(segments, config, verify)
        examples = preparation.examples_in(prepared, split, segments)
        filled = np.cumsum(preparation.slots_of(examples, row_tokens))
        examples = examples.part(0, int(np.searchsorted(filled, wanted)) + 1)
        most, marks = int(examples.starts[-1]), examples.segments.tobytes()
    tokens = tokens_of(prepared.manifest, preparation.shards_of(prepared, split, most=most), tokenizer)
    check_finished(tokens, config, verify)
    read = tokens.read(0, min(most, tokens.tokens)).tobytes()
    tokens = replace(tokens, fingerprint=hashlib.sha256(read + marks).hexdigest())
    if is_text:
        start_id = tokens.document_start_id if config.document_mask else None
        rows = TokenRows(tokens, row_tokens, start_id)
    else:
        examples = replace(examples, tokens=tokens, fingerprint=tokens.fingerprint)
        rows = ExampleRows(examples, row_tokens, config.document_mask)
    check_rows(config, prepared.folder, split, len(rows), f"its {rows.content} fill")
    return Rows.of(rows)


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
        known = zip(self.read, self.rows.entries, self.rows.hashes) if self.rows else ()
        for before, entry, now in known:
            if before != now:
                raise on_all_ranks(CheckpointError(
                    f"{self.rows.folder / entry.file}: the run has read this shard with SHA-256 "
                    f"{before[:12]}, and now it has {now[:12]}, because the source has changed; "
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
            self.allow_tokens(run, needed, count)
            self.read = self.rows.hashes[:count]

    @collective
    def allow_tokens(self, run: Run, rows: int, count: int) -> None:
        """Let generation sample the control tokens of shards that are read from now on."""
        generation = run.inputs.tokenizer.generation
        unseen = {*generation.get(SUPPRESSED, ())}
        if not unseen or run.config.training_stage == "pretrain":  # text has no control tokens
            return

        def seen() -> list[int]:
            self.rows.has(rows)
            new = replace(self.rows.token_set, shards=self.rows.opened[len(self.read):count])
            return sorted(unseen.intersection(new.used_ids().tolist()))

        generation[SUPPRESSED] = sorted(unseen.difference(run.ranks.on_rank0(seen)))

    def report(self, run: Run) -> None:
        """Log the end of the preparation, and what it left out."""
        failure = preparation.why_ended(self.rows.folder)
        self.rows.look()
        self.was_reported = bool(failure) or self.rows.is_complete
        if failure:
            run.log.warn(f"{failure}. The run goes on with the {self.rows.prepared.tokens:,} tokens that are "
                         "prepared")
        elif self.rows.is_complete:
            counts = describe_counts(self.rows.folder, read_prepared(self.rows.folder))
            reads = f"{times_read(run.config, self.rows)}{self.rows.shortened}"
            for line in (f"The data is prepared; {reads}:", *counts):
                run.log.info(line)

    @collective
    def wait(self, run: Run, needed: int) -> None:
        """Wait until every rank has so many rows. If no process prepares them, save, and raise DataError."""
        ranks, says_at = run.ranks, 0.0

        def state() -> tuple[int, bool, str, list[str]]:
            # Before the last look
            failure = "" if ranks.local_rank else preparation.why_ended(self.rows.folder)
            self.rows.look()
            self.compare()
            hashes = [each[:16] for each in self.rows.hashes]
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
            time.sleep(preparation.POLL_SECONDS)


def on_all_ranks(error: DataError | CheckpointError) -> DataError | CheckpointError:
    """Return an error that one rank reports for all."""
    error.on_all_ranks = True
    return error


dataloaders.OPENERS["growing"] = open_rows
EXTENSION = PrepareAhead
