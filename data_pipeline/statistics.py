"""What the documents or examples of a prepared set are like, counted in one pass and in constant memory."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from data_pipeline.shard_reader import TokenSet

LONGEST = 1 << 20  # tokens: longer documents are counted together
MOST_HASHES = 1 << 22  # that are kept to find repeated documents
# From the position of a block and its ids to where in it documents begin.
Cuts = Callable[[int, np.ndarray], np.ndarray]


@dataclass
class RepeatCounter:
    """Counts repeated documents by 64-bit hashes of their tokens.

    Beyond MOST_HASHES different ones it keeps a sample: half of all hash values, then a quarter, and so on.
    The copies of a document are all in the sample or all outside, so its share of repeats is the whole's.
    """

    halvings: int = 0
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # different ones, ascending
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of documents with each
    waiting: list[int] = field(default_factory=list)

    def add(self, digest: bytes) -> None:
        """Count a document, given 8 bytes of its hash."""
        self.waiting.append(int.from_bytes(digest, "little"))
        if len(self.waiting) >= MOST_HASHES // 4:
            self.settle()

    def settle(self) -> None:
        """Count what `add` has collected."""
        hashes = np.concatenate([self.hashes, np.array(self.waiting, np.uint64)])
        counts = np.concatenate([self.counts, np.ones(len(self.waiting), np.int64)])
        self.waiting = []
        while True:
            kept = hashes & np.uint64((1 << self.halvings) - 1) == 0
            self.hashes, places = np.unique(hashes[kept], return_inverse=True)
            self.counts = np.bincount(places, counts[kept]).astype(np.int64)
            if len(self.hashes) <= MOST_HASHES:
                return
            self.halvings += 1

    @property
    def share(self) -> float:
        """The share of documents that repeat an earlier one."""
        return 1 - len(self.hashes) / max(1, int(self.counts.sum()))


@dataclass
class Statistics:
    """The lengths of documents, their repeats, and how often each token id occurs."""

    id_counts: np.ndarray  # (vocabulary,) int64
    lengths: np.ndarray  # (LONGEST + 1,) int64: how many documents have each length; the last: or are longer
    longest: int
    repeats: RepeatCounter

    @property
    def documents(self) -> int:
        """The number of documents."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.id_counts.sum())

    def quantile(self, share: float) -> int:
        """Return the length that this share of the documents does not exceed."""
        return int(np.searchsorted(np.cumsum(self.lengths), share * self.documents))

    def longer(self, length: int) -> tuple[float, float]:
        """Return the share of documents that are longer, and of the tokens that are in these."""
        upto = self.lengths[:min(length, LONGEST - 1) + 1]
        tokens = int((upto * np.arange(len(upto))).sum())
        return 1 - int(upto.sum()) / max(1, self.documents), 1 - tokens / max(1, self.tokens)

    def histogram(self) -> list[tuple[int, int]]:
        """Return (shortest length, documents) of each range from a power of two to the next, without gaps."""
        edges = [0, *(1 << bit for bit in range(1, LONGEST.bit_length()))]
        counts = np.add.reduceat(self.lengths, edges).tolist()
        used = [number for number, count in enumerate(counts) if count]
        return list(zip(edges, counts))[used[0]:used[-1] + 1] if used else []

    def bytes_per_token(self, byte_lengths: Sequence[int]) -> float:
        """Return the UTF-8 bytes of text for each token, given those that each id stands for."""
        return float(self.id_counts @ np.array(byte_lengths)) / max(1, self.tokens)

    def facts(self) -> dict[str, Any]:
        """Return the lengths and repeats as JSON."""
        return {"median": self.quantile(0.5), "p90": self.quantile(0.9), "p99": self.quantile(0.99),
                "longest": self.longest, "histogram": self.histogram(),
                "repeated": round(self.repeats.share * self.documents),
                "repeated_is_estimate": self.repeats.halvings > 0}


def begins_with(document_start_id: int) -> Cuts:
    """Return where documents begin in a block of text: at this id."""
    return lambda position, ids: np.flatnonzero(ids == document_start_id)


def begins_at(starts: np.ndarray) -> Cuts:
    """Return where examples begin in a block, given the ascending positions of all."""
    def cuts(position: int, ids: np.ndarray) -> np.ndarray:
        first, last = np.searchsorted(starts, (position, position + len(ids)))
        return starts[first:last] - position
    return cuts


def measure(token_set: TokenSet, cuts: Cuts) -> Statistics:
    """Count the documents or examples of a split.

    Raises:
        DataError: an id is beyond the vocabulary, or a file has changed.
    """
    found = Statistics(np.zeros(token_set.vocab_size, np.int64), np.zeros(LONGEST + 1, np.int64), 0,
                       RepeatCounter())
    for length, digest in _documents(token_set, cuts, found.id_counts):
        found.lengths[min(length, LONGEST)] += 1
        found.longest = max(found.longest, length)
        found.repeats.add(digest)
    found.repeats.settle()
    return found


def _documents(token_set: TokenSet, cuts: Cuts, id_counts: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield length and hash of each document, however many blocks it is in, and count the ids."""
    position, length, hasher = 0, 0, hashlib.blake2b(digest_size=8)
    bar = tqdm(total=token_set.tokens, unit="tok", unit_scale=True, desc="Reading", delay=2, leave=False,
               disable=None)
    for ids in token_set.blocks():
        bar.update(len(ids))
        counts = np.bincount(ids)
        id_counts[:len(counts)] += counts
        for number, piece in enumerate(np.split(ids, cuts(position, ids))):
            if number and length:  # a document begins here
                yield length, hasher.digest()
                length, hasher = 0, hashlib.blake2b(digest_size=8)
            length += len(piece)
            hasher.update(piece)
        position += len(ids)
    bar.close()
    if length:
        yield length, hasher.digest()
