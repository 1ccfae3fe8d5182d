"""The filter of preparation: removes documents that share a run of words with an evaluation item."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from zlib import crc32

import numpy as np

from common.errors import DataError
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading, identity_of, read_records, texts_in
from data_pipeline.workers import ChunkTokens, WorkerSpec

# Part of the key: increase it when a filter removes different documents than before.
FILTERS_VERSION = 3
# Runs of 13 words are compared, and shorter texts of items as a whole from 8 words on, as in GPT-3
# (arXiv:2005.14165, appendix C). Fewer words, such as an answer, are in documents by chance.
OVERLAP_WORDS, LEAST_WORDS = 13, 8
# Chinese and Japanese have no spaces between words: each character counts as a word. Thai, Lao, Burmese and
# Khmer have none either, and are divided at their vowel signs; other scripts keep these within words.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
DIVIDED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
MARKS = "".join(mark for mark in map(chr, range(0x300, 0x10000))
                if unicodedata.category(mark)[0] == "M" and not DIVIDED.match(mark))
WORD = re.compile(rf"[{UNSPACED}]|(?:[^\W_{UNSPACED}]+[{MARKS}]*)+")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with mixed bits


def words_of(text: str) -> list[str]:
    """Return the words of a text as `identity_of` writes them, without punctuation."""
    return WORD.findall(identity_of(text))


def hashes_of_runs(words: list[str], length: int) -> np.ndarray:
    """Return a uint64 hash for each run of `length` words; empty if there are fewer words."""
    count = len(words) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    encoded = (word.encode("utf-8", "surrogatepass") for word in words)
    numbers = np.fromiter(map(crc32, encoded), np.uint64, len(words))
    hashes = np.zeros(count, np.uint64)
    for offset in range(length):
        hashes = (hashes + numbers[offset:offset + count]) * MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes


class EvaluationItems:
    """All 13-word runs of evaluation items, and their shorter texts; counts the items too short for both."""

    def __init__(self, path: str):
        self.texts, self.origins, self.count, self.short = [], [], 0, 0
        hashes = defaultdict(list)  # by length of the runs: the text's number, its hashes
        reading = Reading(advice="correct it, or leave it out")
        for where, record in read_records(Source(path=path, split="", column=""), reading):
            texts = texts_in(record)
            if isinstance(record.get("ctx"), str) and isinstance(record.get("endings"), list):  # HellaSwag's
                texts = [f"{record['ctx']} {ending}" for ending in record["endings"]]
            texts = [words for words in map(words_of, texts) if len(words) >= LEAST_WORDS]
            self.count, self.short = self.count + 1, self.short + (not texts)
            for words in texts:
                length = min(len(words), OVERLAP_WORDS)
                hashes[length].append((len(self.texts), hashes_of_runs(words, length)))
                self.texts.append(f" {' '.join(words)} ")
                self.origins.append(where)
        if not hashes:
            raise DataError(f"--decontaminate {path}: no item has a text with {LEAST_WORDS} words, the least "
                            "that is compared; use another file")
        self.runs = {}  # by length: ascending hashes, and the text of each
        for length, of_texts in hashes.items():
            numbers, each = zip(*of_texts)
            unique, first = np.unique(np.concatenate(each), return_index=True)
            self.runs[length] = unique, np.repeat(np.array(numbers, np.int32), [*map(len, each)])[first]

    def overlap(self, words: list[str]) -> str | None:
        """Return the first run that a text shares with an item, and where the item is, or None."""
        for length, (known, text_of) in self.runs.items():
            hashes = hashes_of_runs(words, length)
            index = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            for start in np.flatnonzero(known[index] == hashes):
                run, item = " ".join(words[start:start + length]), text_of[index[start]]
                if f" {run} " in self.texts[item]:  # not a hash collision
                    return f"{run!r} is in {self.origins[item]}"
        return None


evaluation_items = lru_cache(maxsize=1)(EvaluationItems)


def examine(path: str, items: list) -> list[str | None]:
    """Return the overlap of each document with evaluation items. Runs in a worker."""
    return [evaluation_items(path).overlap(words_of(item.text)) for item in items]


def tokenize_filtered(tokenize: Callable[[WorkerSpec, list], ChunkTokens], spec: WorkerSpec,
                      items: list) -> ChunkTokens:
    """Return the tokens of the documents that share no text with an evaluation item. Runs in a worker."""
    if not spec.options.decontaminate:
        return tokenize(spec, items)
    overlaps = examine(spec.options.decontaminate, items)
    kept = [item for item, overlap in zip(items, overlaps) if not overlap]
    return tokenize(spec, kept)._replace(removed=[f"{item.where}: {overlap}" for item, overlap
                                                  in zip(items, overlaps) if overlap])
