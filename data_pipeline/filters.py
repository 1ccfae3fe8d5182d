"""Filters for preparation: near-duplicates of earlier documents, and documents with evaluation items.

Both compare runs of words, without punctuation and letter case. Workers examine the texts. Decisions that
depend on earlier documents are made in one process, in order, so that the number of workers does not matter.
"""

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from hashlib import shake_128
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from common.errors import DataError
from data_pipeline.sources import LISTED_BAD_RECORDS, Reading, Source, read_records, type_name
from data_pipeline.workers import InOrder, PreparationOptions

# Part of the key: increase it when a filter removes different documents than before.
FILTERS_VERSION = 1
SIMILAR_WORDS = 5  # as in FineWeb (arXiv:2406.17557)
OVERLAP_WORDS = 13  # as in GPT-3 (arXiv:2005.14165, appendix C) and lm-evaluation-harness
# Chinese and Japanese have no spaces between words: each character counts as a word.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")

HASHES = 128  # per signature
SEEDS = np.frombuffer(shake_128(b"near-duplicates").digest(8 * HASHES), "<u8") | np.uint64(1)
BLOCK = 1024  # runs of words hashed at once: 1 MiB
BAND_RECALL = 0.95  # minimum recall for pairs exactly at the threshold
WAYS = 8  # documents per set of the table
SIGNATURES = "signatures.bin"
REASONS = {"near_duplicates": "that nearly duplicate an earlier one",
           "overlaps": "that share text with evaluation items"}


class Passed(NamedTuple):
    """The state after a chunk: where it ends, and the filters' results."""

    end: Any  # passed on from the chunk
    removed: list[tuple[str, str]]  # reason and description of each removed document
    signatures: int  # number of signatures of kept documents so far


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; a text without words is one word."""
    return WORD.findall(text.casefold()) or [text.strip()]


def hashes_of_runs(words: list[str], length: int) -> np.ndarray:
    """Return a uint64 hash for each run of `length` words; empty if there are fewer words."""
    count = len(words) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    encoded = (word.encode("utf-8", "surrogatepass") for word in words)
    numbers = np.fromiter(map(crc32, encoded), np.uint64, len(words))
    hashes = np.zeros(count, np.uint64)
    for place in range(length):
        hashes = (hashes + numbers[place:place + count]) * SEEDS[0]
        hashes ^= hashes >> np.uint64(29)
    return hashes


def signature_of(words: list[str]) -> np.ndarray:
    """Return the MinHash of a text's 5-word runs, one byte of each of HASHES minima.

    On average, two signatures share J + (1 - J) / 256 of their bytes, where J is the Jaccard similarity of
    their sets of runs. Source: b-bit minwise hashing, arXiv:0910.3349.
    """
    runs = hashes_of_runs(words, min(SIMILAR_WORDS, len(words)))
    minima = np.full(HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(runs), BLOCK):
        np.minimum(minima, (SEEDS[:, None] * runs[start:start + BLOCK]).min(axis=1), out=minima)
    return (minima >> np.uint64(32)).astype(np.uint8)


class NearDuplicates:
    """Signatures of kept documents, and a table for finding those similar to a new one.

    Each band of a signature selects a set of the table, which lists up to WAYS documents; their signatures
    are then compared as a whole. Only the signatures are stored on disk; the table follows from them.
    """

    def __init__(self, similarity: float, signatures: np.ndarray = np.empty((0, HASHES), np.uint8)):
        # The longest bands that find at least BAND_RECALL of the pairs exactly at the threshold.
        self.rows = max(rows for rows in range(1, HASHES + 1)
                        if 1 - (1 - similarity ** rows) ** (HASHES // rows) >= BAND_RECALL)
        self.bands = HASHES // self.rows
        # Number of equal bytes at the threshold, some of them by chance.
        self.least_equal = HASHES * (similarity + (1 - similarity) / 256)
        self.count = len(signatures)
        self.signatures = np.empty((max(1024, 2 * self.count), HASHES), np.uint8)
        self.signatures[:self.count] = signatures
        self._build_table()

    def _build_table(self) -> None:
        """Build a table with all documents that is a quarter to half full."""
        self.sets = 1 << max(8, (2 * self.count // WAYS).bit_length())
        self.table = np.zeros((self.bands, self.sets, WAYS), np.uint32)  # document numbers from 1; 0 = free
        for band in range(self.bands):
            band_bytes = self.signatures[:self.count, band * self.rows:(band + 1) * self.rows]
            chosen = self._sets_of(band_bytes)
            order = np.argsort(chosen, kind="stable")
            chosen = chosen[order]
            way = np.arange(self.count) - np.searchsorted(chosen, chosen)
            fits = way < WAYS
            self.table[band, chosen[fits], way[fits]] = order[fits] + 1

    def _sets_of(self, bands: np.ndarray) -> np.ndarray:
        hashes = np.zeros(len(bands), np.uint64)
        for row in range(self.rows):
            hashes = (hashes + bands[:, row]) * SEEDS[0]
            hashes ^= hashes >> np.uint64(29)
        return (hashes & np.uint64(self.sets - 1)).astype(np.int64)

    def add(self, signature: np.ndarray) -> float | None:
        """Add a document; if an earlier one reaches the threshold, return the highest similarity instead."""
        chosen = self._sets_of(signature[:self.bands * self.rows].reshape(self.bands, self.rows))
        listed = self.table[np.arange(self.bands), chosen]
        candidates = listed[listed > 0]
        if len(candidates):
            equal = (self.signatures[candidates - 1] == signature).sum(axis=1).max()
            if equal >= self.least_equal:
                return float((equal / HASHES - 1 / 256) / (1 - 1 / 256))
        # It is new: add it at the first free place of each set.
        if self.count == len(self.signatures):
            self.signatures = np.concatenate([self.signatures, np.empty_like(self.signatures)])
        self.signatures[self.count] = signature
        self.count += 1
        way = (listed > 0).sum(axis=1)
        fits = np.flatnonzero(way < WAYS)
        self.table[fits, chosen[fits], way[fits]] = self.count
        if 2 * self.count >= self.sets * WAYS:
            self._build_table()
        return None


class EvaluationItems:
    """All 13-word runs of evaluation items."""

    def __init__(self, path: str):
        self.texts, self.places, hashes = [], [], []
        reading = Reading(advice="correct it, or leave it out")
        for where, record in read_records(Source(path=path, split="", column=""), reading):
            if bad := next((name for name, value in record.items() if isinstance(value, Exception)), None):
                reading.refuse(where, f"column {bad!r} is {type_name(record[bad])}")
            for words in map(words_of, texts_of_item(record)):
                if len(words) >= OVERLAP_WORDS:
                    self.texts.append(f" {' '.join(words)} ")
                    self.places.append(where)
                    hashes.append(hashes_of_runs(words, OVERLAP_WORDS))
        if not hashes:
            raise DataError(f"--decontaminate {path}: no item has a text with {OVERLAP_WORDS} words, "
                            "the length that is compared; use another file")
        self.hashes, first = np.unique(np.concatenate(hashes), return_index=True)
        ends = np.cumsum([*map(len, hashes)])
        self.text_of = np.searchsorted(ends, first, side="right").astype(np.int32)

    def overlap(self, words: list[str]) -> str | None:
        """Return the first 13-word run that a text shares with an item, and the item's place, or None."""
        hashes = hashes_of_runs(words, OVERLAP_WORDS)
        index = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        for start in np.flatnonzero(self.hashes[index] == hashes):
            run, item = " ".join(words[start:start + OVERLAP_WORDS]), self.text_of[index[start]]
            if f" {run} " in self.texts[item]:  # not a hash collision
                return f"{run!r} is in {self.places[item]}"
        return None


def texts_of_item(record: dict) -> list[str]:
    """Return the texts of an evaluation item: context and ending for HellaSwag, else all strings."""
    if isinstance(record.get("ctx"), str) and isinstance(record.get("endings"), list):
        return [f"{record['ctx']} {ending}" for ending in record["endings"]]
    texts, values = [], list(record.values())
    while values:
        value = values.pop(0)
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | list):
            values[:0] = value.values() if isinstance(value, dict) else value
    return texts


evaluation_items = lru_cache(maxsize=1)(EvaluationItems)


def examine(options: PreparationOptions, items: list) -> tuple[np.ndarray, list[str | None]]:
    """Return the signature and the overlap with evaluation items of each document. Runs in a worker."""
    signatures = np.empty((len(items), HASHES if options.near_duplicates else 0), np.uint8)
    overlaps: list[str | None] = [None] * len(items)
    for number, item in enumerate(items):
        words = words_of(item.text)
        if options.near_duplicates:
            signatures[number] = signature_of(words)
        if options.decontaminate:
            overlaps[number] = evaluation_items(options.decontaminate).overlap(words)
    return signatures, overlaps


class Filters:
    """The filters of one preparation, which continue after `done`, the last result of `sync` or {}."""

    def __init__(self, options: PreparationOptions, folder: Path, done: dict):
        self.options, self.path = options, folder / SIGNATURES
        used = [reason for reason, is_on in zip(REASONS, (options.near_duplicates, options.decontaminate))
                if is_on]
        self.removed = done.get("removed") or {reason: {"count": 0, "listed": []} for reason in used}
        self.on_disk = done.get("signatures", 0)
        if options.near_duplicates:
            stored = np.fromfile(self.path, np.uint8, self.on_disk * HASHES) if self.on_disk else np.empty(0)
            if len(stored) < self.on_disk * HASHES:
                raise DataError(f"{self.path}: is truncated; delete {folder} and start again")
            self.seen = NearDuplicates(options.near_duplicates, stored.reshape(-1, HASHES))

    def apply(self, chunks: Iterable[tuple[list, Any]],
              in_order: InOrder) -> Iterator[tuple[list, Passed]]:
        if not self.removed:
            yield from ((items, Passed(end, [], 0)) for items, end in chunks)
            return
        with_items = ((items, (items, end)) for items, end in chunks)
        examined = in_order(partial(examine, self.options), with_items)
        for (signatures, overlaps), (items, end) in examined:
            kept, removed = [], []
            for item, signature, overlap in zip(items, signatures, overlaps):
                if overlap:
                    removed.append(("overlaps", f"{item.where}: {overlap}"))
                elif self.options.near_duplicates and (similar := self.seen.add(signature)):
                    description = f"{item.where}: {similar:.2f} similar to an earlier one"
                    removed.append(("near_duplicates", description))
                else:
                    kept.append(item)
            yield kept, Passed(end, removed, self.seen.count if self.options.near_duplicates else 0)

    def count(self, removed: list[tuple[str, str]]) -> None:
        for reason, description in removed:
            self.removed[reason]["count"] += 1
            if len(self.removed[reason]["listed"]) < LISTED_BAD_RECORDS:
                self.removed[reason]["listed"].append(description)

    def sync(self, signatures: int) -> dict:
        """Write this many signatures to disk; return the new `done`."""
        if signatures > self.on_disk:
            with open(self.path, "r+b" if self.on_disk else "wb") as file:
                file.seek(self.on_disk * HASHES)
                file.write(self.seen.signatures[self.on_disk:signatures].tobytes())
                file.flush()
                os.fsync(file.fileno())
            self.on_disk = signatures
        return {"signatures": self.on_disk, "removed": self.removed} if self.removed else {}
