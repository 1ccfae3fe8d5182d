"""Prepare a set: turn a source into token shards and a manifest, on all cores, resuming after interruptions.

The content of a set is a `DataKind`: documents (here), chats or preference pairs (chats.py). One process
reads the source and sends chunks of items to workers. Their tokens are written in the order of the chunks, so
that the number of workers does not matter. A killed preparation continues from its journal of what is on
disk.
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, chain, islice
from math import ceil, sqrt
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from common.errors import DataError, PaddockError, SettingsError
from common.files import FileLock, disk_errors, json_sha256, read_json, sync_folder, write_json
from common.text import counted, is_url, percent, show, without_passwords
from data_pipeline import filters
from data_pipeline.remote_data import say_once
from data_pipeline.shards import HEADER_BYTES, MANIFEST, SplitWriter, Tokens, dtype_for, source_of
from data_pipeline.source_files import Source, format_of, identify
from data_pipeline.sources import LISTED_BAD_RECORDS, Document, Position, Reading, read_texts
from data_pipeline.templates import text_tokenizer
from data_pipeline.workers import (
    HELD_OUT,
    LARGE_SET_FRACTION,
    SPLITS,
    TOKENIZERS,
    ChunkTokens,
    DataKind,
    PreparationOptions,
    WorkerSpec,
    coverage_of,
    open_workers,
    position_of,
    worker_tokenizer,
)
from parallel.process import cores
from tokenizer import Tokenizer

# Part of the key: increase it when tokens or files differ for the same text. RULES is not: it is the version
# of the split and the labels, which a set of an earlier version keeps, so that its runs resume.
CODE_VERSION, RULES = 1, 3
CHUNK_CHARACTERS = 1_000_000
# Up to so many workers are threads if they only tokenize with tiktoken, which lets other threads run. More
# would wait for each other, and other work, such as rendering chats, does not let others run.
MAX_THREADS = 4
JOURNAL, KNOWN_HASHES = "journal.json", ".known-files.json"
EXAMPLE_SEARCH_TOKENS, EXAMPLE_TOKENS = 1_000_000, 256
LOCK_POLL_SECONDS = 0.2
# The number of items from which on a set is large. If the hashes hold out none or all of fewer than
# FEW_DOCUMENTS, the last TAIL of each document is held out.
SMALL_SET, FEW_DOCUMENTS, TAIL = 4000, 20, 0.1
VERDICT = 10  # held-out examples from which a report says whether a run learned
# Items of a set that are read ahead, and so many answers to one prompt always stay together.
COUNTED, MOST_ANSWERS = 10_000, 16
SHOWN_LEFT_OUT, SHOWN_FIELDS = 20, 10


class PreparationPlan(NamedTuple):
    """Everything that determines the content of a prepared set."""

    kind: DataKind
    inputs: list[Source]  # the source, and any evaluation items to compare with
    identities: list[dict]  # of the inputs
    tokenizer: Any
    options: PreparationOptions

    @property
    def settings(self) -> dict:
        options = self.options
        compared = {"decontaminate": filters.OVERLAP_WORDS, "filters_version": filters.FILTERS_VERSION}
        compared = compared if options.decontaminate else {}
        # Seed, stop and weights are left over from sets with several sources, and keep keys unchanged.
        return {"code_version": CODE_VERSION, "shard_tokens": options.shard_tokens,
                "validation_fraction": options.validation_fraction, "max_documents": options.max_documents,
                "seed": 0, "stop": "first_exhausted", "weights": [1.0], **self.kind.settings, **compared}

    @property
    def key(self) -> str:
        """The set's folder name: a hash of its source, tokenizer and settings."""
        return json_sha256([self.identities, self.tokenizer.sha256, self.settings])[:16]

    @property
    def dtype(self) -> str:
        return dtype_for(self.tokenizer.vocab_size)

    @property
    def source(self) -> dict:
        source = {name: without_passwords(value) for name, value in asdict(self.inputs[0]).items() if value}
        return {"sources": [source | {"identity": self.identities[0]}]}

    @property
    def head(self) -> dict:
        """The fields of the manifest that are known from the start; the journal has them too."""
        kind, tokenizer = self.kind.name, self.tokenizer
        return {"format": 1, **({"kind": kind} if kind else {}), "dtype": self.dtype,
                "vocab_size": tokenizer.vocab_size, "tokenizer_sha256": tokenizer.sha256,
                "tokenizer": without_passwords(self.options.tokenizer_path),
                "document_start_id": tokenizer.document_start_id, "special_ids": tokenizer.special_ids}


def tokenize_documents(spec: WorkerSpec, documents: list[Document]) -> ChunkTokens:
    """Return the documents of each split as a flat array of ids, in order, and the rejected ones."""
    tokenizer = text_tokenizer(worker_tokenizer(spec))
    coverage, refused = coverage_of(tokenizer), []
    texts: dict[str, list[str]] = {split: [] for split in (*SPLITS, "")}
    for document in documents:
        if reason := coverage.refusal(document.text):
            refused.append((document.where, reason))
        else:
            texts[document.split or spec.split_of(document)].append(document.text)
    return ChunkTokens({split: Tokens(np.array(tokenizer.document_ids(texts[split]), spec.dtype),
                                      len(texts[split])) for split in SPLITS}, refused,
                       reserved=len(texts[""]), lost=coverage.lost(chain(*map(texts.get, SPLITS))))


def decode_documents(folder: Path, splits: dict, tokenizer, dtype: str) -> list[str]:
    """Return the beginnings of the first three training documents, decoded from the first shard."""
    path = folder / splits["train"]["shards"][0]["file"]
    ids = np.fromfile(path, np.dtype(dtype).newbyteorder("<"), EXAMPLE_SEARCH_TOKENS, offset=HEADER_BYTES)
    starts = np.flatnonzero(ids == tokenizer.document_start_id)
    return [tokenizer.decode(ids[start:min(end, start + EXAMPLE_TOKENS)].tolist())
            for start, end in zip(starts[:3], [*starts[1:], len(ids)])]


DOCUMENTS = DataKind("", read_texts, tokenize_documents, decode_documents, {})


class SplitPlan(NamedTuple):
    """Which items are held out."""

    fraction: float | None = 0.0  # those whose keys have lower positions; None = the end of each document
    common: list[float] = []  # positions of keys of too many items (see WorkerSpec)
    reserved: float = 0.0  # of those with lower positions, none is trained on


def plan_split(kind: DataKind, items: Iterable, requested: float | None) -> SplitPlan:
    """Plan the split from the first items.

    If the keys hold out nothing, or far from the fraction, some are common: those of all items, or of more
    than people collect answers to one prompt, and so many that one key more or less would change what is
    held out by an eighth.
    """
    if requested == 0:
        return SplitPlan()
    fraction = HELD_OUT if requested is None else requested
    is_open = kind.name or requested is None  # whether the number of different keys matters
    most, keys = COUNTED if is_open else min(SMALL_SET, ceil(FEW_DOCUMENTS / requested)), []
    different: set[float] = set()
    for item in islice(items, most):
        keys.append((position_of(item.split_key), kind.name and position_of(item.whole_key)))
        different.add(keys[-1][0])
        if not kind.name and len(different) == SMALL_SET:
            break
    target = fraction * len(keys)
    counts, limit = Counter(key for key, _ in keys), max(MOST_ANSWERS, target / 8)
    held_out = sum(count for key, count in counts.items() if key < fraction)
    common = {key for key, count in counts.items() if count > limit or count == len(keys)}
    if not kind.name or held_out and not is_far(held_out, target):
        common = set()
    keys = [whole if key in common else key for key, whole in keys]
    in_order = sorted(Counter(keys).items())
    if requested is None and len(in_order) >= SMALL_SET:
        return SplitPlan(LARGE_SET_FRACTION, [*common], HELD_OUT)
    few = requested is None and len(in_order) < FEW_DOCUMENTS and not kind.name
    if few and not 0 < sum(key < fraction for key, _ in in_order) < len(in_order):
        fraction = None
    elif len(keys) < most and in_order and in_order[0][0] >= fraction:  # of all items, hold out at least one
        sums = [*accumulate(count for _, count in in_order)]
        cuts = [(key + after) / 2 for (key, _), (after, _) in zip(in_order, in_order[1:])]
        nearest = min(zip(sums, cuts), key=lambda each: abs(each[0] - target), default=(0, requested or 0.0))
        fraction = nearest[1]
    return SplitPlan(fraction, [*common])


def is_far(held_out: int, target: float) -> bool:
    """Return whether so many held-out items are neither near the target nor within chance (two sigma)."""
    return not target / 2 <= held_out <= 2 * target and abs(held_out - target) > 2 * sqrt(target)


def cut_tails(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the training part of each document, and its end, cut at a line's end near the last tenth."""
    for where, text, _ in documents:
        start, end = round(len(text) * (1 - 2 * TAIL)), round(len(text) * (1 - TAIL))
        borders = [text.rfind(border, start, end) + len(border) for border in ("\n\n", "\n")
                   if border in text[start:end]]
        cut = borders[0] if borders else end
        for piece, split in ((text[:cut], "train"), (text[cut:], "validation")):
            if piece and not piece.isspace():
                yield Document(where, piece, split)


def prepare(kind: DataKind, source: Source, tokenizer, output_dir: Path, options: PreparationOptions) -> Path:
    """Prepare a set unless it exists; return its folder. `tokenizer` is the one in `options`, loaded."""
    # The output must not become part of the source.
    is_local = source.path and not is_url(source.path)
    if is_local and Path(realpath(output_dir)).is_relative_to(realpath(source.path)):
        raise SettingsError(f"--output {output_dir} is inside the source {source.path}, and would be read as "
                            "part of it next time; choose another folder")
    if dropout := getattr(tokenizer, "dropout", None):
        say_once(f"{options.tokenizer_path}: its dropout of {dropout:g} is off, as tokens must not be random")
    # The key names the folder. The first process to get the lock builds it.
    items = [Source(path=options.decontaminate, split="", column="")] if options.decontaminate else []
    inputs = [source, *items]
    with disk_errors(output_dir, DataError, "choose another --output"):
        output_dir.mkdir(parents=True, exist_ok=True)
        plan = PreparationPlan(kind, inputs, identify_all(inputs, output_dir), tokenizer, options)
        folder = output_dir / plan.key
        if options.only_plan:
            return folder
        if not (folder / MANIFEST).is_file():
            with wait_for_lock(output_dir / f".{plan.key}.lock"):
                if not (folder / MANIFEST).is_file():
                    build(plan, folder)
    # It may have been prepared with --on-bad-record skip.
    skipped = read_own_json(folder / MANIFEST)["skipped"]
    advice = f"{folder} lacks such records: correct them, or use --on-bad-record skip"
    Reading(options.on_bad_record == "skip", advice, **skipped).settle()
    return folder


def build(plan: PreparationPlan, folder: Path) -> None:
    """Prepare a set in a temporary folder, and rename it to `folder` when it is complete.

    If training reads it meanwhile, it has that name from the start: only its manifest makes a set complete.
    """
    temporary, ahead = folder.with_name(f"tmp-{folder.name}"), plan.options.ahead
    if ahead and temporary.exists() and not folder.exists():
        temporary.rename(folder)
    working = folder if ahead or folder.exists() else temporary
    try:
        prepared = write_shards(plan, working)
    except PaddockError:
        if not (working / JOURNAL).is_file():  # nothing to continue from
            shutil.rmtree(working, ignore_errors=True)
        raise
    if identify_all(plan.inputs, folder.parent) != plan.identities:
        (working / JOURNAL).unlink(missing_ok=True)  # the next preparation starts from the beginning
        if not ahead:  # otherwise training goes on to the end of what it has
            shutil.rmtree(working)
        raise DataError("a source changed while it was read; start again when it no longer changes")
    write_json(working / MANIFEST, {
        **plan.head, **prepared, "source": plan.source, "settings": plan.settings,
        "examples": plan.kind.decode(working, prepared["splits"], plan.tokenizer, plan.dtype)})
    if working != folder:
        working.rename(folder)
    sync_folder(folder.parent)
    # Including temporary files left by a kill.
    for path in folder.glob(f"{JOURNAL}*"):
        path.unlink(missing_ok=True)


def identify_all(sources: Sequence[Source], output_dir: Path) -> list[dict]:
    """Return the identity of each source; hashes of local files are stored for the next call."""
    known = read_own_json(output_dir / KNOWN_HASHES)
    before = json.dumps(known)
    with progress_bar(desc="Hashing the sources", unit="B", delay=1, leave=False) as bar:
        identities = [identify(source, known, bar.update) for source in sources]
    if json.dumps(known) != before:
        write_json(output_dir / KNOWN_HASHES, known)
    return identities


def read_journal(plan: PreparationPlan, folder: Path) -> dict:
    """Return the journal of a preparation that this version began, or an empty one."""
    journal = read_own_json(folder / JOURNAL)
    if journal.get("rules") == RULES:
        return journal
    if journal and folder.name == plan.key:  # by PREPARE_AHEAD: a run may have read its shards
        raise DataError(f"{folder}: an earlier version, which held out other items, began this preparation; "
                        "finish it with that version, and then resume its runs with this one, or delete the "
                        "folder, and start runs with another RUN_NAME")
    if journal:
        show("Starting from the beginning: an earlier version, which held out other items, began it")
    return {"chunks": 0, "splits": {}}


def write_shards(plan: PreparationPlan, folder: Path) -> dict:
    """Write all shards into `folder`, continuing from its journal; return the manifest's counts."""
    kind, options, skip_bad = plan.kind, plan.options, plan.options.on_bad_record == "skip"
    journal = read_journal(plan, folder)
    if not journal["chunks"] and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)

    reading = Reading(skip_bad)
    refused = Reading(skip_bad, **journal.get("refused", {}))  # records rejected by workers
    refused.lost = Counter(refused.lost)
    chunks, split_plan = read_chunks(plan, reading, journal)
    fraction = split_plan.fraction
    removed = journal.get("removed", {})
    filters.evaluation_items.cache_clear()  # since this process read them, they may have changed
    if options.decontaminate and not removed:
        items = filters.evaluation_items(options.decontaminate)
        removed = {"overlaps": {"count": 0, "listed": [], "items": items.count, "short": items.short}}
    spec = WorkerSpec(options, plan.tokenizer.sha256, plan.dtype, fraction or 0.0,
                      frozenset(split_plan.common), split_plan.reserved)
    # Tokens are written in order. Regularly they are synced, and the journal records the position.
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(SplitWriter(
            folder, split, options.shard_tokens, plan.dtype, has_segments=bool(kind.name),
            done=journal["splits"].get(split)))) for split in SPLITS}
        tokens_before = sum(writer.tokens for writer in writers.values())
        if journal["chunks"]:
            show(f"Continuing after the {tokens_before:,} tokens that are on disk")
        workers = options.workers or cores()
        only_tokenize = not kind.name and not options.decontaminate and isinstance(plan.tokenizer, Tokenizer)
        TOKENIZERS.clear()
        TOKENIZERS[spec.tokenizer_sha256] = plan.tokenizer
        in_order = stack.enter_context(open_workers(workers, only_tokenize and workers <= MAX_THREADS))
        tokenize = partial(filters.tokenize_filtered, kind.tokenize, spec)
        results = stack.enter_context(closing(in_order(tokenize, chunks)))
        bar = stack.enter_context(progress_bar(desc="Preparing", unit="tok", initial=tokens_before))
        last_sync, listed = time.monotonic(), len(writers["train"].shards)
        for chunks_done, (tokenized, chunk_end) in enumerate(results, journal["chunks"] + 1):
            for counts in removed.values():
                counts["count"] += len(tokenized.removed)
                counts["listed"] += tokenized.removed[:LISTED_BAD_RECORDS - len(counts["listed"])]
            for where, reason in tokenized.refused:
                refused.refuse(where, reason)
                reading.failed = refused.failed
            refused.lost.update(tokenized.lost)
            refused.reserved += tokenized.reserved
            if options.ahead and reading.failed:
                break  # training must not read what follows a bad record
            for split, writer in writers.items():
                writer.write(tokenized.splits[split])
            if chunk_end.fraction:
                tokens = sum(writer.tokens for writer in writers.values())
                bar.total = round(tokens / min(chunk_end.fraction, 1.0))
            bar.update(sum(len(tokens.ids) for tokens in tokenized.splits.values()))
            finished = len(writers["train"].shards)
            if finished > listed or time.monotonic() - last_sync >= options.journal_seconds:
                splits = {split: writer.sync() for split, writer in writers.items()}
                # Documents whose ends are held out have no position.
                end = {} if fraction is None else {"end": {**chunk_end._asdict(), "split": split_plan}}
                write_json(folder / JOURNAL, {
                    **plan.head, "source": plan.source, "settings": plan.settings, "chunks": chunks_done,
                    "splits": splits, "removed": removed, **end, "refused": refused.counts, "rules": RULES})
                last_sync, listed = time.monotonic(), finished
        splits = {split: writer.sync(finish=True) for split, writer in writers.items()}
        bar.total = bar.n
    # Combine what the reader and the workers skipped.
    skipped = {"empty": reading.empty, "bad": reading.bad + refused.bad,
               "bad_records": reading.bad_records + refused.bad_records}
    skipped |= {name: dict(counts) for name, counts in (
        ("bad_kinds", reading.bad_kinds | refused.bad_kinds), ("dropped", reading.dropped),
        ("literals", reading.literals), ("lost", refused.lost)) if counts}
    Reading(skip_bad, reading.advice, **skipped).settle()
    if not splits["train"]["documents"]:
        raise nothing_to_train_on(plan, splits["validation"]["documents"], skipped, removed)
    return {"splits": splits, "skipped": skipped, "rules": RULES,
            **({"removed": removed} if removed else {}),
            **({"reserved": refused.reserved} if split_plan.reserved else {}),
            **({"cut_from_each": TAIL} if fraction is None else
               {"held_out": fraction} if fraction != options.validation_fraction else {}),
            **({"common_openings": len(split_plan.common)} if split_plan.common else {})}


def read_chunks(plan: PreparationPlan, reading: Reading, journal: dict) -> tuple[Iterator, SplitPlan]:
    """Return the chunks that are not in the journal (see `cut_chunks`), and the plan of the split."""
    kind, options = plan.kind, plan.options
    source = replace(plan.inputs[0], revision=plan.identities[0].get("revision", plan.inputs[0].revision))
    least = 2 if kind.name else 1  # unpaired answers are compared with others of their chunk

    def read(reading: Reading, done: int = 0) -> Iterator:
        most = options.max_documents
        items = islice(kind.read(source, reading), most - done if most else None)
        return count_literals(items, plan.tokenizer, reading)

    if "split" in (end := journal.get("end", {})):  # read the last item of the last chunk again, and go on
        reading.start = Position(*end["position"])
        next(items := read(reading, end["items"] - 1))
        vars(reading).update(end["counts"], **{name: Counter(end["counts"].get(name, ()))
                                               for name in ("dropped", "literals")})
        return cut_chunks(items, reading, end["items"], least), SplitPlan(*end["split"])
    plan_of_split = plan_split(kind, read(Reading(True)), options.validation_fraction)
    items = cut_tails(read(reading)) if plan_of_split.fraction is None else read(reading)
    # Finished chunks of a source without positions are read again, but not tokenized.
    return islice(cut_chunks(items, reading, 0, least), journal["chunks"], None), plan_of_split


def count_literals(items: Iterable, tokenizer: Any, reading: Reading) -> Iterator:
    """Yield the items; count those with the name of a control token, which is encoded as text."""
    starts = {name[:2] for name in tokenizer.special_ids}  # these are found faster than the names
    for item in items:
        text = item.text
        if any(start in text for start in starts) and (found := tokenizer.control_pattern.search(text)):
            reading.literals[found[0].strip()] += 1
        yield item


def nothing_to_train_on(plan: PreparationPlan, held_out: int, skipped: dict, removed: dict) -> DataError:
    """Return the error for a set without training documents, with the reasons and the remedy."""
    source, kind = plan.inputs[0], plan.kind.name
    counts = {"in validation": held_out, "empty": skipped["empty"], "bad": skipped["bad"],
              "removed": sum(each["count"] for each in removed.values())}
    why = ", ".join(f"{count:,} {verb}" for verb, count in counts.items() if count) or "the source is empty"
    bad = f" ({skipped['bad_records'][0]})" if skipped["bad"] else ""
    lower = "lower VALIDATION_FRACTION (0 holds nothing out), or " * bool(held_out)
    lower = "correct the bad ones, or " * bool(skipped["bad"]) + lower
    name, item = without_passwords(source.path) or source.name, "example" if kind else "document"
    return DataError(f"{name}: no {item} is left to train on: {why}{bad}; {lower}"
                     f"{how_to_get_more(kind, [source.path])}")


def how_to_get_more(kind: str | None, paths: Iterable[str]) -> str:
    is_text = not kind and any(format_of(path)[0] == "text" for path in paths)
    split_text = ", or split the text into more (--documents)" if is_text else ""
    return f"add more {'examples' if kind else 'documents'}{split_text}"


class ChunkEnd(NamedTuple):
    """Where a chunk ends."""

    fraction: float  # of the source that has been read; 0 = unknown
    position: Position  # where the last item begins
    items: int  # in all chunks so far
    counts: dict[str, Any]  # see Reading


def cut_chunks(items: Iterable, reading: Reading, done: int = 0, least: int = 1
               ) -> Iterator[tuple[list, ChunkEnd]]:
    """Yield chunks of about CHUNK_CHARACTERS and `least` items, and where each ends, after `done` items."""
    def end() -> ChunkEnd:
        fraction = reading.bytes_done / (reading.bytes_total or 1)
        return ChunkEnd(fraction, reading.item or reading.position, done, reading.counts)

    chunk, characters, full = [], 0, None  # a full chunk, until the next one has enough items
    try:
        for item in items:
            done += 1
            chunk.append(item)
            characters += item.characters
            if len(chunk) < least:
                continue
            if full:
                yield full
                full = None
            if characters >= CHUNK_CHARACTERS:
                full, chunk, characters = (chunk, end()), [], 0
    except DataError:
        if not (reading.failed and reading.bad):  # reported with those that workers find in the last chunks
            raise
    if full and chunk:
        yield full[0] + chunk, end()
    elif full or chunk:
        yield full or (chunk, end())


def progress_bar(**options) -> tqdm:
    """Return a progress bar that is also suitable for log files."""
    bar = tqdm(unit_scale=True, dynamic_ncols=True, **options)
    if not bar.fp.isatty():
        bar.mininterval = 30  # seconds; each update is a new line in a log file
    return bar


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait for a lock and hold it in the `with` block."""
    def warn(why: str) -> None:
        show(f"{why}; make sure that no other job prepares the same data at the same time")

    with FileLock(path) as lock:
        if holder := lock.take(warn):
            show(f"{path.parent}: {holder} is preparing the same data; waiting for it")
            while lock.take(warn):
                time.sleep(LOCK_POLL_SECONDS)
        yield


def read_own_json(path: Path) -> dict:
    """Return a JSON object written by a preparation, or {} if there is none."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is damaged: {error}; delete it and start again") from error


def describe_counts(folder: Path, manifest: dict) -> list[str]:
    """Return lines with a prepared set's counts, and with skipped and removed records."""
    kind, splits, skipped = manifest.get("kind"), manifest["splits"], manifest["skipped"]
    noun = (kind or "documents").removesuffix("s")
    lines = []
    for name, split in splits.items():
        targets = f", {split['target_tokens']:,} of them targets," if kind else ""
        cut = manifest.get("cut_from_each") if name == "validation" else None
        lines.append(f"{name}: {counted(split['tokens'], 'token')}{targets} in "
                     f"{counted(split['documents'], noun)}, {counted(len(split['shards']), 'shard')}"
                     f"{f' (the last {percent(cut, 0)} of each document)' if cut else ''}")
    lines += [*describe_split(manifest)]
    empty = "" if kind else f"{counted(skipped['empty'], 'empty document')}, "
    if dropped := skipped.get("dropped"):
        names = [f"{name or '(unnamed)'} {counted(count, 'time')}"
                 for name, count in Counter(dropped).most_common()]
        hidden = len(names) - SHOWN_FIELDS
        more = f" and {hidden:,} more (see {folder / MANIFEST})" if hidden > 0 else ""
        lines.append(f"Dropped: {', '.join(names[:SHOWN_FIELDS])}{more}; training uses the {kind or 'text'} "
                     "without them" + " (the records of all splits)" * ("split" in dropped))
    if literals := skipped.get("literals"):
        names = [f"{name} in {counted(count, noun)}"
                 for name, count in Counter(literals).most_common(SHOWN_FIELDS)]
        lines.append(f"As text: {', '.join(names)}. Such names in a source never become control tokens; " + (
            "write turns as messages" if kind else "--documents splits at lines with one"))
    if lost := Counter(skipped.get("lost", ())):
        names = ", ".join(f"{name!r} {count:,}" for name, count in lost.most_common(SHOWN_FIELDS))
        names += ", ..." * (len(lost) > SHOWN_FIELDS)
        lines.append(f"Warning: {counted(lost.total(), 'character')} not in the vocabulary ({names}): they "
                     "are lost, or become the unknown token; use another tokenizer")
    bad = counted(skipped["bad"], "bad record")
    left_out = [(f"Skipped: {empty}{bad}", skipped["bad"], Reading(**skipped).listing())]
    left_out += [(f"Removed: {counted(removed['count'], noun)} with text of evaluation items",
                  removed["count"], removed["listed"]) for removed in manifest.get("removed", {}).values()]
    for removed in manifest.get("removed", {}).values():
        if short := removed.get("short"):
            lines.append(f"Not compared: {short:,} of {counted(removed['items'], 'evaluation item')}, whose "
                         f"texts have fewer than {filters.LEAST_WORDS} words")
    for line, number, listed in left_out:
        lines += [line, *(f"  {where}" for where in listed[:SHOWN_LEFT_OUT])]
        if number > SHOWN_LEFT_OUT:
            lines.append(f"  ... more in {folder / MANIFEST}")
    return lines


def describe_split(manifest: dict) -> Iterator[str]:
    """Yield lines about a split that differs from others', or has much more or less than asked for."""
    kind, requested = manifest.get("kind"), manifest["settings"]["validation_fraction"]
    held_out = manifest["splits"]["validation"]["documents"]
    total = manifest["splits"]["train"]["documents"] + held_out + manifest.get("reserved", 0)
    noun, more = "example" if kind else "document", how_to_get_more(kind, names_of_sources(manifest))
    fraction = manifest.get("held_out", requested)
    if manifest.get("rules", 0) < (3 if "cut_from_each" in manifest else 2):
        yield ("Split: the one of the earlier version that prepared this set, whose labels it also has: it "
               "may train on what other sets hold out; delete its folder to prepare it again")
    elif requested == 0:
        yield f"Split: all {noun}s train, also those that other sets hold out (VALIDATION_FRACTION=0)"
    elif requested not in (None, HELD_OUT):
        yield (f"Split: {percent(requested)} of the {noun}s are held out (VALIDATION_FRACTION). Prepare sets "
               "that you mix with this one with the same setting, or they train on what is held out here")
    elif "cut_from_each" in manifest:
        yield ("Split: the end of each document is held out, because there are too few documents to hold "
               "out whole ones. Another set of the same text may train on these ends")
    elif (fraction or 0) > HELD_OUT:
        yield (f"Split: none of these {noun}s is in the {percent(HELD_OUT, 0)} that all sets hold out, so "
               f"others are held out here; another set may train on them")
    elif reserved := manifest.get("reserved"):
        yield (f"Split: {counted(reserved, noun)} left out: a large set validates on the lowest "
               f"{percent(LARGE_SET_FRACTION)} of hashes, and trains on none of the {percent(HELD_OUT, 0)} "
               "that smaller sets hold out")
    if requested is None:
        requested = min(fraction or 0, HELD_OUT) or HELD_OUT
    if (common := manifest.get("common_openings")) and total > 1:
        yield (f"Split: {counted(common, 'opening')} began too many {noun}s to stay in one split; these "
               "are split by the whole conversation")
    if requested and not held_out:
        yield (f"Warning: no {noun} fell into validation, 0 of {total:,} instead of {percent(requested)}; "
               f"{more}")
    elif manifest["settings"]["validation_fraction"] is None and total < FEW_DOCUMENTS:
        if 0 < (fraction or 0) <= HELD_OUT:
            yield (f"Split: {held_out:,} of {counted(total, noun)} in the {percent(HELD_OUT, 0)} that all "
                   "sets hold out by hash; VALIDATION_FRACTION=0 trains on all")
    elif "cut_from_each" not in manifest and is_far(held_out, requested * total):
        yield (f"Warning: {held_out:,} of {total:,} {noun}s are in validation, "
               f"{percent(held_out / total)} instead of {percent(requested)}, because equal ones"
               f"{' and those with one prompt' * bool(kind)} stay together; remove repeats, {more}, or "
               f"shuffle the source if its first {COUNTED:,} differ from the rest")
    if kind and 0 < held_out < VERDICT <= total / 2:
        share = min(0.5, 0.05 * ceil(30 * VERDICT / total))
        yield (f"Held out: {counted(held_out, noun)}, too few to tell whether a run learned; "
               f"--validation-fraction {share:.2g} holds out about {round(share * total)}")


def read_prepared(folder: Path) -> dict:
    """Return the manifest of a prepared set."""
    manifest = read_own_json(folder / MANIFEST)
    if missing := sorted({"splits", "skipped", "settings", "source", "vocab_size"} - manifest.keys()):
        raise DataError(f"{folder / MANIFEST}: has no {missing[0]!r}; prepare the data again")
    return manifest


def names_of_sources(manifest: dict) -> list[str]:
    """Return the path or name of each source; sets of old versions can have several."""
    return [source.get("path") or source["name"] for source in manifest["source"]["sources"]]


def name_set(folder: Path, source: str) -> Path:
    """Name a link to a prepared set after its source; return it, or the folder. Others' links are kept."""
    plain = source.partition("?")[0].rstrip("/") if is_url(source) else source.rstrip("/")
    while not os.path.lexists(plain) and set("*?[") & set(os.path.basename(plain)):
        plain = os.path.dirname(plain)
    stem = os.path.basename(plain).split(".")[0]
    name = re.sub(r"[^\w-]+", "-", stem).strip("-")[:60]
    if not name:
        return folder

    link = folder.with_name(name)
    if os.path.lexists(link) and (not link.is_symlink() or source_of(link) not in ((), source_of(folder))):
        link = folder.with_name(f"{name}-{folder.name[:6]}")
    if link.is_dir() and not link.samefile(folder):
        show(f"{link} now names this set. To resume a run of the earlier one, name its folder, "
             f"{link.with_name(link.resolve().name)}")
    temporary = folder.with_name(f".{link.name}.{os.getpid()}")
    try:
        temporary.symlink_to(folder.name)
        temporary.replace(link)
    except OSError:  # a file system without links
        return folder
    return link
