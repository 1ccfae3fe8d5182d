"""Kinds of data, and the worker processes that tokenize them in chunks."""

import json
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Library

from common.errors import DataError, PaddockError
from data_pipeline.shards import Tokens
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading
from tokenizer import OTHER_CHARACTERS, Tokenizer, load_tokenizer

SPLITS = ("train", "validation")
# The share of all hashes that is held out, by small sets and large ones alike, so that no set trains on what
# another one holds out. Large sets validate on the lowest LARGE_SET_FRACTION, and leave out the rest.
HELD_OUT, LARGE_SET_FRACTION = 0.05, 0.005

# in_order(function, chunks) yields (function(items), more) for each chunk (items, more) in order; a few
# chunks per worker are in progress.
InOrder = Callable[[Callable[[list], Any], Iterable[tuple]], Iterator[tuple]]


@dataclass(frozen=True)
class PreparationOptions:
    """Options of a preparation."""

    tokenizer_path: str
    tokenizer_backend: str
    shard_tokens: int  # tokens in a full shard
    validation_fraction: float | None  # held-out share of items, by hash of their text; None = HELD_OUT
    workers: int = 0  # tokenizing processes, which do not affect the result; 0 = one per core
    max_documents: int = 0  # use only the first documents or examples; 0 = all
    on_bad_record: str = "fail"  # or "skip": count and list unusable records
    system_prompt: str = ""  # for chats and pairs without a system message; "" = none
    decontaminate: str = ""  # path of evaluation items: drop documents that share a 13-word span
    journal_seconds: float = 10.0  # between entries of the journal
    ahead: bool = False  # training reads finished shards while others are prepared (PREPARE_AHEAD)
    only_plan: bool = False  # find out the set's folder, and prepare nothing


class WorkerSpec(NamedTuple):
    """Everything that a worker needs for tokenizing."""

    options: PreparationOptions
    tokenizer_sha256: str
    dtype: str  # of the ids
    validation_fraction: float
    common: frozenset[float]  # positions of the keys of too many items
    reserved: float = 0.0  # items at lower positions are not trained on

    def key_of(self, item: Any) -> str:
        """Return the text that determines the item's split."""
        is_common = self.common and position_of(item.split_key) in self.common
        return item.whole_key if is_common else item.split_key

    def split_of(self, item: Any) -> str:
        return split_of(self.key_of(item), self.validation_fraction, self.reserved)


class ChunkTokens(NamedTuple):
    """The result of tokenizing a chunk."""

    splits: dict[str, Tokens]
    refused: list[tuple[str, str]]  # (where, reason) of unusable items
    removed: Sequence[str] = ()  # descriptions of those that share text with evaluation items
    reserved: int = 0  # items in no split
    lost: Mapping[str, int] = {}  # characters that the vocabulary lacks


class DataKind(NamedTuple):
    """The content of a set, and how its items are read and tokenized."""

    name: str  # the manifest's "kind"; "" = documents
    read: Callable[[Source, Reading], Iterator]  # yields the items of a source, such as `Document`
    tokenize: Callable[[WorkerSpec, list], ChunkTokens]  # runs in a worker
    decode: Callable[[Path, dict, Any, str], list[str]]  # like `prepare.decode_documents`
    settings: dict  # other settings that affect the tokens, for the key


def position_of(text: str) -> float:
    """Return a number from 0 to 1 by a text's hash; texts with the lowest are held out."""
    return int.from_bytes(sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64


def split_of(text: str, validation_fraction: float, reserved: float = 0.0) -> str:
    """Return the split of a text by its hash; "" if the text is reserved for validation in other sets."""
    position = position_of(text)
    return "validation" if position < validation_fraction else "" if position < reserved else "train"


class Coverage:
    """Finds the characters that a tokenizer loses, other than by its declared normalizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.normalize, self.is_complete = tokenizer, str, True
        self.characters: frozenset[str] | None = None  # of a tokenizer that refuses all others
        if isinstance(tokenizer, Tokenizer):  # which has all bytes
            return
        loaded = Library.from_str(tokenizer.tokenizer_json)
        model = json.loads(tokenizer.tokenizer_json)["model"]
        if loaded.normalizer:
            self.normalize = loaded.normalizer.normalize_str
        unknown = model.get("unk_token")
        self.unknown_id = model.get("unk_id") if unknown is None else loaded.token_to_id(unknown)
        if model["type"] == "WordLevel" and self.unknown_id is None:
            self.characters = frozenset("".join(model["vocab"]))
            return
        # Together, these characters have every byte of UTF-8, so nothing is lost if none of them is.
        self.is_complete = False
        probes = map(chr, [*range(1, 0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x10000)])
        self.is_complete = not any(map(self.lost, zip(probes)))

    def refusal(self, text: str) -> str:
        """Return why the tokenizer refuses a text; "" if it does not."""
        unknown = set(self.normalize(text)) - self.characters if self.characters else ()
        return f"{min(unknown)!r} is not in the vocabulary; {OTHER_CHARACTERS}" if unknown else ""

    def lost(self, texts: Iterable[str]) -> Counter[str]:
        """Return the characters that vanish or become the unknown token. Spaces do not count."""
        lost: Counter[str] = Counter()
        for text in () if self.is_complete else texts:
            ids = self.tokenizer.encode(text)
            kept = Counter(self.tokenizer.decode([token for token in ids if token != self.unknown_id]))
            if Counter(text) - kept:
                lost += Counter(self.normalize(text)) - kept
        return Counter({name: count for name, count in lost.items() if name not in " \u2581"})


coverage_of = lru_cache(maxsize=2)(Coverage)
TOKENIZERS: dict[str, Any] = {}  # of this process, by hash


def worker_tokenizer(spec: WorkerSpec):
    """Return the tokenizer of a worker process, which loads it once."""
    if spec.tokenizer_sha256 not in TOKENIZERS:
        tokenizer = load_tokenizer(spec.options.tokenizer_path, spec.options.tokenizer_backend)
        if tokenizer.sha256 != spec.tokenizer_sha256:
            raise DataError(f"{spec.options.tokenizer_path} changed while it was used; start again")
        TOKENIZERS[tokenizer.sha256] = tokenizer
    return TOKENIZERS[spec.tokenizer_sha256]


@contextmanager
def open_workers(workers: int, are_threads: bool) -> Iterator[InOrder]:
    """A `with` block with workers; yields an `InOrder`. Processes are spawned, without locks and torch."""
    if workers == 1:
        yield lambda function, chunks: ((function(items), more) for items, more in chunks)
        return
    pool: Executor = ThreadPoolExecutor(workers) if are_threads else ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=exit_with_parent)

    def in_order(function: Callable[[list], Any], chunks: Iterable[tuple]) -> Iterator[tuple]:
        pending: deque = deque()
        try:
            for items, more in chunks:
                # Workers that start here inherit the blocked Ctrl-C, which only this process handles.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    pending.append((pool.submit(function, items), more))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                if len(pending) > 2 * workers:
                    future, more = pending.popleft()
                    yield future.result(), more
            for future, more in pending:
                yield future.result(), more
        except BrokenProcessPool as error:
            raise PaddockError("a worker process was killed, perhaps because memory ran out; set "
                               f"PREPARATION_WORKERS={workers // 2} and start again to continue"
                               ) from error

    try:
        yield in_order
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def exit_with_parent() -> None:
    """Make a worker exit when its parent process ends, even by kill -9."""
    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
