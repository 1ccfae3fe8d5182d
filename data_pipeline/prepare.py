"""Text becomes token shards and a manifest: once, by all cores, the same bytes whatever their number or how often it was killed.

What is prepared is a `Kind`: documents for pretraining are one, chats and preference pairs (example_preparation.py) are others.
One process reads the sources and hands chunks of items to workers; what they return is written in the order of the chunks.
A journal says how much of that is safely on disk, so that a preparation that was killed goes on from there.
"""

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from common.errors import DataError, PaddockError, SettingsError
from common.files import sync_folder, write_json
from common.text import is_url, show, without_passwords
from data_pipeline.mixes import Mix, draw, fraction_read, mix_of, pinned
from data_pipeline.shard_reader import HEADER_BYTES, MANIFEST, dtype_for
from data_pipeline.shard_writer import SplitWriter, Tokens, locked, naming_disk_errors, read_json
from data_pipeline.sources import Reading, Source, identify, kind_of, read_texts
from tokenizer import load_tokenizer

# Part of the cache key: raise it when the same text would give other tokens, or the same tokens other files.
CODE_VERSION = 1
SPLITS = ("train", "validation")
CHUNK_CHARACTERS = 1_000_000
# A list of ids becomes an array three times as fast as it becomes a numpy array.
TYPECODES = {"uint16": "H", "uint32": "I"}
JOURNAL_SECONDS = 10.0
JOURNAL = "journal.json"
EXAMPLE_SEARCH_TOKENS = 1_000_000
EXAMPLE_TOKENS = 256
KNOWN_FILES = ".known-files.json"


def split_of(text: str, validation_fraction: float) -> str:
    """The split that a document belongs to, by nothing but its text."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return SPLITS[int.from_bytes(digest[:8], "big") < int(validation_fraction * 2**64)]


class Chunk(NamedTuple):
    """Items that one worker tokenises at a time."""

    items: list
    fraction: float | None  # of the sources' bytes that was read when the chunk was full


def cut_chunks(items: Iterable, characters_of: Callable[[Any], int], fraction: Callable[[], float | None]) -> Iterator[Chunk]:
    """Items in chunks of about CHUNK_CHARACTERS."""
    chunk, characters = [], 0
    for item in items:
        chunk.append(item)
        characters += characters_of(item)
        if characters >= CHUNK_CHARACTERS:
            yield Chunk(chunk, fraction())
            chunk, characters = [], 0
    if chunk:
        yield Chunk(chunk, fraction())


class Encoding(NamedTuple):
    """What a worker needs to know."""

    tokenizer_path: str
    tokenizer_backend: str
    tokenizer_sha256: str
    dtype: str
    validation_fraction: float


@lru_cache(maxsize=1)
def worker_tokenizer(encoding: Encoding):
    """The tokenizer of a worker process, loaded once."""
    tokenizer = load_tokenizer(encoding.tokenizer_path, encoding.tokenizer_backend)
    if tokenizer.sha256 != encoding.tokenizer_sha256:
        raise DataError(f"{encoding.tokenizer_path} changed while it was used; start again")
    return tokenizer


class Tokenized(NamedTuple):
    """What a worker made of a chunk."""

    splits: dict[str, Tokens]
    refused: list[tuple[str, str]]  # (where, reason) of items that cannot be used


class Kind(NamedTuple):
    """What a set is made of, and how."""

    name: str  # "" = documents, else the manifest's "kind"
    read: Callable[[Source, Reading], Iterator]  # the items of a source
    characters: Callable[[Any], int]  # of an item
    tokenize: Callable[[Encoding, list], Tokenized]  # in a worker
    decode: Callable[[Path, dict, Any, str], list[str]]  # three examples for people's eyes, as `decoded_examples`
    settings: dict  # what decides the tokens besides; part of the cache key


def tokenize_chunk(encoding: Encoding, texts: list[str]) -> Tokenized:
    """The documents of each split as one flat array of ids, in order."""
    tokenizer = worker_tokenizer(encoding)
    ids = {split: array(TYPECODES[encoding.dtype]) for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    for text in texts:
        split = split_of(text, encoding.validation_fraction)
        ids[split].fromlist(tokenizer.encode_document(text))
        documents[split] += 1
    return Tokenized({split: Tokens(np.frombuffer(ids[split], encoding.dtype), documents[split]) for split in SPLITS}, [])


def end_with_parent() -> None:
    """Let a worker end when the process that started it is gone, even by kill -9."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def interrupts_held_back():
    """Hold Ctrl-C back. A process that is started meanwhile never sees it: only the parent decides what it means."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tokenize_in_order(tokenize: Callable[[list], Tokenized], chunks: Iterable[Chunk],
                      workers: int) -> Iterator[tuple[Tokenized, Chunk]]:
    """Each chunk's tokens in the order of the chunks, with a few chunks a worker under way.

    Workers are spawned, not forked, so they hold neither this process's lock nor its torch.
    """
    if workers == 1:
        yield from ((tokenize(chunk.items), chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
    pending: deque = deque()
    try:
        for chunk in chunks:
            with interrupts_held_back():
                pending.append((pool.submit(tokenize, chunk.items), chunk))
            if len(pending) > 2 * workers:
                future, done = pending.popleft()
                yield future.result(), done
        while pending:
            future, done = pending.popleft()
            yield future.result(), done
    except BrokenProcessPool as error:
        raise PaddockError(f"a tokenising process was killed, perhaps for want of memory; set "
                           f"PREPARATION_WORKERS={workers // 2} and start again, it goes on where it was") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def progress_bar(**options) -> tqdm:
    """A bar with rate and ETA, in a log file too."""
    bar = tqdm(unit_scale=True, dynamic_ncols=True, **options)
    if not bar.fp.isatty():
        bar.mininterval = 30  # a log file wants a line now and then
    return bar


def prepare_pretrain(source: str | Source | Mix, tokenizer_path: str, tokenizer_backend: str, output_dir: str | Path, *,
                     shard_tokens: int, validation_fraction: float, workers: int = 0, max_documents: int = 0,
                     on_bad_record: str = "fail", journal_seconds: float = JOURNAL_SECONDS) -> Path:
    """Prepare a set of token shards, or find that it was prepared before; returns its folder.

    Args:
        source: a path, URL, glob or hub name; a Source; or a weighted Mix of them.
        shard_tokens: tokens in a shard.
        validation_fraction: share of documents held out, chosen by the hash of their text.
        workers: processes that tokenise; 0 = one per core. The result does not depend on it.
        max_documents: the first so many documents only; 0 = all.
        on_bad_record: "fail", or "skip" to count and list records that cannot be used.
    Raises:
        DataError: a source, record or tokenizer cannot be used, or the disk refuses.
        SettingsError: a number is out of range.
    """
    documents = Kind("", read_texts, len, tokenize_chunk, decoded_examples, {})
    return prepare(documents, source, load_tokenizer(tokenizer_path, tokenizer_backend), tokenizer_path, tokenizer_backend,
                   output_dir, shard_tokens=shard_tokens, validation_fraction=validation_fraction, workers=workers,
                   max_documents=max_documents, on_bad_record=on_bad_record, journal_seconds=journal_seconds)


def prepare(kind: Kind, source: str | Source | Mix, tokenizer, tokenizer_path: str, tokenizer_backend: str,
            output_dir: str | Path, *, shard_tokens: int, validation_fraction: float, workers: int, max_documents: int,
            on_bad_record: str, journal_seconds: float = JOURNAL_SECONDS) -> Path:
    """Prepare a set of any kind, or find that it was prepared before; returns its folder.

    Args and Raises: as `prepare_pretrain`.
    """
    if not 1 <= shard_tokens < 2**31:
        raise SettingsError(f"SHARD_TOKENS={shard_tokens} must be at least 1 and below 2^31, what a shard's header can count")
    if not 0 <= validation_fraction < 1:
        raise SettingsError(f"VALIDATION_FRACTION={validation_fraction} must be at least 0 and below 1")
    if on_bad_record not in ("fail", "skip"):
        raise SettingsError(f"--on-bad-record {on_bad_record}: must be fail or skip")
    output_dir = Path(output_dir)
    with naming_disk_errors(output_dir):
        mix = mix_of(source)
        for part in mix.sources:
            if part.path and not is_url(part.path) and Path(realpath(output_dir)).is_relative_to(realpath(part.path)):
                raise SettingsError(f"--output {output_dir} lies within the source {part.path}, and would be read as a part of "
                                    "it the next time; choose a folder elsewhere")
        output_dir.mkdir(parents=True, exist_ok=True)
        identities = identify_all(mix, output_dir)
        settings = {"code_version": CODE_VERSION, "shard_tokens": shard_tokens, "validation_fraction": validation_fraction,
                    "max_documents": max_documents, "seed": mix.seed, "stop": mix.stop,
                    "weights": [part.weight for part in mix.sources], **kind.settings}
        key = hashlib.sha256(json.dumps([identities, tokenizer.sha256, settings], sort_keys=True).encode()).hexdigest()[:16]
        folder, working = output_dir / key, output_dir / f"tmp-{key}"
        if not (folder / MANIFEST).is_file():
            with locked(output_dir / f".{key}.lock"):
                if not (folder / MANIFEST).is_file():
                    encoding = Encoding(tokenizer_path, tokenizer_backend, tokenizer.sha256, dtype_for(tokenizer.vocab_size),
                                        validation_fraction)
                    try:
                        prepared = write_shards(kind, pinned(mix, identities), encoding, working, shard_tokens, max_documents,
                                                on_bad_record, workers or core_count(), journal_seconds)
                    except PaddockError:
                        if not (working / JOURNAL).is_file():  # there is nothing to go on from
                            shutil.rmtree(working, ignore_errors=True)
                        raise
                    if identify_all(mix, output_dir) != identities:
                        shutil.rmtree(working)
                        raise DataError("a source changed while it was read; start again when nothing writes to it")
                    publish(kind, working, folder, prepared, tokenizer, mix, identities, settings)
    if on_bad_record == "fail" and (bad := read_json(folder / MANIFEST)["skipped"]["bad_records"]):
        raise DataError(f"{bad[0]}; {folder} was prepared without such records: mend them, or accept it with "
                        "--on-bad-record skip")
    return folder


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def identify_all(mix: Mix, output_dir: Path) -> list[dict]:
    """The identity of each source. Hashes of local files are remembered, so that a second call need not read them."""
    known = read_json(output_dir / KNOWN_FILES)
    before = json.dumps(known)
    with progress_bar(desc="Hashing the sources", unit="B", delay=1, leave=False) as bar:
        identities = [identify(source, known, bar.update) for source in mix.sources]
    if json.dumps(known) != before:
        write_json(output_dir / KNOWN_FILES, known)
    return identities


def write_shards(kind: Kind, mix: Mix, encoding: Encoding, folder: Path, shard_tokens: int, max_documents: int,
                 on_bad_record: str, workers: int, journal_seconds: float) -> dict:
    """Write all shards into `folder`, going on from its journal where there is one; returns splits and skipped counts."""
    journal = read_json(folder / JOURNAL) or {"chunks": 0, "splits": {}}
    if not journal["chunks"] and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    readings = [Reading(skip_bad=on_bad_record == "skip") for _ in mix.sources]
    refused = Reading(skip_bad=on_bad_record == "skip", **journal.get("refused", {}))  # by workers: it is not read again
    items = draw(mix, [kind.read(source, reading) for source, reading in zip(mix.sources, readings)])
    chunks = cut_chunks(islice(items, max_documents or None), kind.characters, partial(fraction_read, mix, readings))
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(SplitWriter(folder, split, shard_tokens, encoding.dtype, bool(kind.name),
                                                                  journal["splits"].get(split)))) for split in SPLITS}
        tokens_before = sum(writer.ids.tokens for writer in writers.values())
        if journal["chunks"]:
            show(f"Going on behind the {tokens_before:,} tokens that are safely on disk")
        results = stack.enter_context(closing(tokenize_in_order(
            partial(kind.tokenize, encoding), islice(chunks, journal["chunks"], None), workers)))
        bar = stack.enter_context(progress_bar(desc="Preparing", unit="tok", initial=tokens_before))
        last_sync = time.monotonic()
        for chunks_done, (tokenized, chunk) in enumerate(results, journal["chunks"] + 1):
            for where, reason in tokenized.refused:
                refused.refuse(where, reason)
            for split, writer in writers.items():
                writer.write(tokenized.splits[split])
            if chunk.fraction:
                bar.total = round(sum(writer.ids.tokens for writer in writers.values()) / min(chunk.fraction, 1.0))
            bar.update(sum(len(tokens.ids) for tokens in tokenized.splits.values()))
            if time.monotonic() - last_sync >= journal_seconds:
                splits = {split: writer.sync() for split, writer in writers.items()}
                write_json(folder / JOURNAL, {"chunks": chunks_done, "splits": splits,
                                                 "refused": {"bad": refused.bad, "bad_records": refused.bad_records}})
                last_sync = time.monotonic()
        splits = {split: writer.sync(finish=True) for split, writer in writers.items()}
    readings.append(refused)
    skipped = {"empty": sum(reading.empty for reading in readings), "bad": sum(reading.bad for reading in readings),
               "bad_records": [where for reading in readings for where in reading.bad_records]}
    if not splits["train"]["documents"]:
        sources = ", ".join(without_passwords(source.path) or source.name for source in mix.sources)
        held_out, one = splits["validation"]["documents"], "example" if kind.name else "document"
        gone = {"fell into validation": held_out, "were empty": skipped["empty"], "were bad": skipped["bad"]}
        why = ", ".join(f"{count:,} {what}" for what, count in gone.items() if count) or "the source is empty"
        bad = f" ({skipped['bad_records'][0]})" if skipped["bad"] else ""
        more = how_to_have_more(kind.name, [source.path for source in mix.sources])
        more = f"lower VALIDATION_FRACTION (0 holds nothing out), or {more}" if held_out else more
        raise DataError(f"{sources}: no {one} is left to train on: {why}{bad}; {more}")
    return {"splits": splits, "skipped": skipped}


def how_to_have_more(kind: str | None, paths: Iterable[str]) -> str:
    """What to do where there are too few documents, or examples of a kind: a file of plain text can be cut into more."""
    is_text = not kind and any(kind_of(path)[0] == "text" for path in paths)
    return f"give more {'examples' if kind else 'documents'}" + (", or cut the text into more (--documents)" if is_text else "")


def publish(kind: Kind, working: Path, folder: Path, prepared: dict, tokenizer, mix: Mix, identities: list[dict],
            settings: dict) -> None:
    """Write the manifest and give the whole folder its name."""
    dtype = dtype_for(tokenizer.vocab_size)
    sources = [{name: value for name, value in asdict(source).items() if value != ""} | {"identity": identity}
               | ({"path": without_passwords(source.path)} if source.path else {})
               for source, identity in zip(mix.sources, identities)]
    write_json(working / MANIFEST, {
        "format": 1, **({"kind": kind.name} if kind.name else {}), "dtype": dtype,
        "vocab_size": tokenizer.vocab_size, "tokenizer_sha256": tokenizer.sha256,
        "document_start_id": tokenizer.document_start_id, "special_ids": tokenizer.special_ids, **prepared,
        "source": {"sources": sources, "seed": mix.seed, "stop": mix.stop}, "settings": settings,
        "examples": kind.decode(working, prepared["splits"], tokenizer, dtype)})
    working.rename(folder)
    sync_folder(folder.parent)
    (folder / JOURNAL).unlink(missing_ok=True)


def decoded_examples(folder: Path, splits: dict, tokenizer, dtype: str) -> list[str]:
    """The beginnings of the first three training documents, decoded from the first shard's ids."""
    path = folder / splits["train"]["shards"][0]["file"]
    ids = np.fromfile(path, np.dtype(dtype).newbyteorder("<"), count=EXAMPLE_SEARCH_TOKENS, offset=HEADER_BYTES)
    starts = np.flatnonzero(ids == tokenizer.document_start_id)
    ends = [*starts[1:], len(ids)]
    return [tokenizer.decode(ids[start:min(end, start + EXAMPLE_TOKENS)].tolist()) for start, end in zip(starts[:3], ends)]


def describe_prepared(folder: Path) -> str:
    """What a prepared folder holds, for the screen: counts, what was skipped, and the examples."""
    manifest = read_json(folder / MANIFEST)
    kind, splits, skipped = manifest.get("kind"), manifest["splits"], manifest["skipped"]
    lines = []
    for name, split in splits.items():
        learned = f", {split['target_tokens']:,} of them learned from" if kind else ""
        lines.append(f"{name}: {split['tokens']:,} tokens{learned} in {split['documents']:,} {kind or 'documents'}, "
                     f"{len(split['shards'])} shards")
    if manifest["settings"]["validation_fraction"] and not splits["validation"]["documents"]:
        more = how_to_have_more(kind, [source.get("path", "") for source in manifest["source"]["sources"]])
        more = more if splits["train"]["documents"] == 1 else f"raise VALIDATION_FRACTION, or {more}"
        lines.append(f"Warning: no {'example' if kind else 'document'} fell into validation; {more}")
    lines.append(f"Skipped: {'' if kind else format(skipped['empty'], ',') + ' empty documents, '}{skipped['bad']:,} bad records")
    lines += [f"  {where}" for where in skipped["bad_records"][:20]]
    if skipped["bad"] > 20:
        lines.append(f"  ... more of them in {folder / MANIFEST}")
    for number, example in enumerate(manifest["examples"], 1):
        first, *further = (example if kind else repr(example[:300])).split("\n")
        lines += [f"Example {number}: {first}", *(f"    {line}" for line in further)]  # so that none looks like a line of ours
    return "\n".join(lines)
