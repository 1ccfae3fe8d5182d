"""What the documents or examples of a prepared set are like, counted in one pass and in constant memory.

What a prepared set or mixture is: counts, lengths and repeats, and the first rows that a run reads."""

import hashlib
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.errors import DataError, PaddockError, SettingsError
from common.text import command, printable
from config import Config
from data_pipeline.chats import show_segment
from data_pipeline.mixture import describe_sources, is_mixture, read_mixture, source_facts
from data_pipeline.prepare import describe_counts, names_of_sources, read_prepared
from data_pipeline.row_order import rows_at
from data_pipeline.shards import MANIFEST, MIXTURE, TokenizerFacts, TokenSet, prepared_folder
from dataloaders import Batch, ExampleRows, MixedRows, Rows, open_mixture, open_set
from fused.head import IGNORE_INDEX
from tokenizer import load_tokenizer

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
    """Count the documents or examples of a split."""
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


COLUMNS, BAR_COLUMNS = 80, 34
SHOWN_DOCUMENTS, SHOWN_IDS = 4, 10
STAGES = {"documents": "pretrain", "chats": "sft", "pairs": "dpo"}


@dataclass
class DataReport:
    """A folder of prepared data, opened as a run would.

    Args:
        manifest: of the set, or of a mixture's first set; empty for token files of others.
        tokenizer: None if the one that the data was made with is not at hand.
    """

    folder: Path
    manifest: dict[str, Any]
    config: Config
    tokenizer: Any

    @property
    def known(self) -> Any:
        """What is known of the tokenizer: itself, or what the manifest says of it."""
        if self.tokenizer:
            return self.tokenizer
        return TokenizerFacts(self.manifest["vocab_size"], None, self.manifest["document_start_id"])

    @property
    def rows(self) -> Rows:
        """The rows of the training split."""
        if is_mixture(self.folder):
            return open_mixture(self.config, self.folder, "train", self.known, "never")
        return open_set(self.config, self.folder, "train", self.known, "never")

    def facts(self) -> dict[str, Any]:
        """Return what is known of the data, as JSON; reads the whole training split, except of a mixture."""
        facts = {"folder": str(self.folder)}
        if is_mixture(self.folder):
            return facts | {"sources": source_facts(self.folder, read_mixture(self.folder))}
        names = ("kind", "tokenizer", "tokenizer_sha256", "vocab_size", "splits", "skipped", "removed")
        facts |= {name: self.manifest[name] for name in names if name in self.manifest}
        facts["made_from"] = names_of_sources(self.manifest) if self.manifest else [str(self.folder)]
        rows, length = self.rows, self.config.max_seq_len
        is_text = not isinstance(rows, ExampleRows)
        cuts = (begins_with(rows.token_set.document_start_id) if is_text else
                begins_at(rows.example_set.starts))
        found = measure(rows.token_set, cuts)
        longer, tokens_in_longer = found.longer(length)
        facts |= {"documents": found.documents, "tokens": found.tokens, **found.facts(),
                  "max_seq_len": length, "longer": longer, "tokens_in_longer": tokens_in_longer,
                  "rows": len(rows), "in_rows": rows.describe()}
        if not is_text:
            facts |= {"truncated": rows.truncated, "left_out": rows.left_out, "fill": rows.fill}
        if lengths := getattr(self.tokenizer, "byte_lengths", None):
            facts["bytes_per_token"] = found.bytes_per_token(lengths)
        return facts

    def describe(self, facts: dict[str, Any]) -> list[str]:
        """Return the lines that show `facts`."""
        if "sources" in facts:
            mixture = read_mixture(self.folder)
            return [f"{self.folder}: a mixture of {len(mixture.sources)} sources",
                    *(f"  {line}" for line in describe_sources(mixture, facts["sources"])),
                    *(f"  {source['source']}: python scripts/inspect_data.py {source['set']}"
                      for source in facts["sources"])]
        items = facts.get("kind", "documents")
        lines = [f"{self.folder}: {items}, made from {', '.join(facts['made_from'])}"]
        if self.manifest:
            name = facts.get("tokenizer") or (self.config.tokenizer_path if self.tokenizer else "unknown")
            lines.append(f"tokenizer: {name}, {facts['vocab_size']:,} ids, SHA-256 "
                         f"{facts['tokenizer_sha256'][:12]}")
            lines += describe_counts(self.folder, self.manifest)
        else:
            lines.append(f"train: {facts['tokens']:,} tokens in {facts['documents']:,} documents")
        if "bytes_per_token" in facts:
            lines.append(f"bytes a token: {facts['bytes_per_token']:.2f}")
        repeated = f"{'about ' if facts['repeated_is_estimate'] else ''}{facts['repeated']:,} {items}"
        share = facts["repeated"] / max(1, facts["documents"])
        lines += [f"repeated: {repeated} ({share:.2%}) are copies of an earlier one",
                  f"lengths: median {facts['median']:,}, 90 % up to {facts['p90']:,}, 99 % up to "
                  f"{facts['p99']:,}, longest {facts['longest']:,} tokens",
                  *bars(facts["histogram"], facts["documents"])]
        return [part for line in [*lines, fits(facts, items)]
                for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]

    def describe_rows(self, count: int) -> Iterator[str]:
        """Yield the lines that show the first rows of a run, with ⟦ ⟧ around what has a label."""
        rows = self.rows
        if not self.tokenizer:
            yield "rows: not shown, because TOKENIZER_PATH does not name the tokenizer of the data"
            return
        if not len(rows):
            yield f"rows: none, because the data is shorter than MAX_SEQ_LEN={self.config.max_seq_len}"
            return
        positions, seed = np.arange(min(count, len(rows))), self.config.seed
        order = (rows.mixing.rows_at(positions, seed) if isinstance(rows, MixedRows) else
                 rows_at(positions, len(rows), seed))
        for number, row in enumerate(order.reshape(-1, 1), 1):
            part, name = rows, ""
            if isinstance(rows, MixedRows):
                (source,), _ = rows.locate(row)
                part, name = rows.parts[source], f" from {rows.mixture.sources[source].label}"
            title = f"row {row[0]:,}{name}, number {number} of the run"
            yield from self._describe_row(title, part, rows(row))

    def _describe_row(self, title: str, part: Rows, batch: Batch) -> Iterator[str]:
        targets_T, tokens_T = batch.targets_BT[0], batch.tokens_BT[0]
        documents_T = batch.document_ids_BT
        documents_T = torch.ones_like(tokens_T) if documents_T is None else documents_T[0]
        borders = [0, *(torch.diff(documents_T).nonzero().flatten() + 1).tolist(), len(tokens_T)]
        labels = int((targets_T != IGNORE_INDEX).sum())
        yield f"{title}: {len(tokens_T):,} slots, {labels:,} labels"
        is_pair = isinstance(part, ExampleRows) and part.example_set.kind == "pairs"
        for number, (first, last) in enumerate(zip(borders, borders[1:]), 1):
            if number > SHOWN_DOCUMENTS and last < len(tokens_T):
                continue
            own = targets_T[first:last] != IGNORE_INDEX
            name = f"document {number}"
            if is_pair:
                name = f"pair {(number + 1) // 2}, {'chosen' if number % 2 else 'rejected'}"
            if isinstance(part, ExampleRows) and not own.any():
                yield f"  padding: slots {first}-{last - 1}"
                continue
            yield (f"  {name}: slots {first}-{last - 1}, positions 0-{last - first - 1}, "
                   f"{int(own.sum()):,} labels")
            yield from self._describe_document(tokens_T[first:last].tolist(), targets_T[first:last].tolist())
            if number == SHOWN_DOCUMENTS and number < len(borders) - 2:
                yield f"  ... {len(borders) - 2 - number} more"

    def _describe_document(self, tokens: list[int], targets: list[int]) -> Iterator[str]:
        """Yield the ids and the text of a document: its first token, and what follows each of its tokens."""
        following = [(token if target == IGNORE_INDEX else target, target != IGNORE_INDEX)
                     for token, target in zip([*tokens[1:], 0], targets)]
        if not following[-1][1]:  # nothing follows the last token that the model should predict
            following.pop()
        shown = " ".join(map(str, tokens[:SHOWN_IDS])) + (" ..." if len(tokens) > SHOWN_IDS else "")
        yield from wrapped(f"ids: {shown}")
        text = ""
        for is_label, run in groupby([(tokens[0], False), *following], key=lambda pair: pair[1]):
            text += show_segment([token for token, _ in run], is_label, self.tokenizer)
        for line in text.split("\n"):
            yield from wrapped(line)


def wrapped(text: str) -> list[str]:
    """Return a line of text, control characters escaped, as lines of at most COLUMNS with an indent."""
    return textwrap.wrap(printable(text), COLUMNS, initial_indent="    ", subsequent_indent="    ",
                         drop_whitespace=False) or ["    "]


def bars(histogram: list[tuple[int, int]], documents: int) -> list[str]:
    """Return a histogram of lengths as lines."""
    most, lines = max(count for _, count in histogram), []
    for first, count in histogram:
        last = f"{2 * max(1, first) - 1:,}"
        bar = "█" * round(BAR_COLUMNS * count / most) or "▏" * bool(count)
        lines.append(f"  {first:>9,} - {last:<9} {bar:<{BAR_COLUMNS}} {count:>12,} {count / documents:>7.2%}")
    return lines


def fits(facts: dict[str, Any], items: str) -> str:
    """Return what MAX_SEQ_LEN does to the documents or examples."""
    at = f"at MAX_SEQ_LEN={facts['max_seq_len']}"
    if items == "documents":
        return (f"{at}: {facts['rows']:,} rows; {facts['longer']:.2%} of the documents, with "
                f"{facts['tokens_in_longer']:.2%} of the tokens, are longer than a row, so they are cut")
    share = {name: facts[name] / max(1, facts["documents"]) for name in ("truncated", "left_out")}
    return f"{at}: {facts['in_rows']}; {share['truncated']:.2%} are cut, {share['left_out']:.2%} are left out"


def open_data(folder: Path, config: Config) -> DataReport:
    """Open prepared data, a mixture, or token files of others."""
    manifest = {}
    if not is_mixture(folder):
        folder = prepared_folder(folder) or folder  # as a run opens it
    first = folder
    if is_mixture(folder):
        first = folder / read_mixture(folder).sources[0].set
    if os.path.lexists(first / MANIFEST):
        manifest = read_prepared(first)
    elif not os.path.exists(folder):
        raise DataError(f"{folder}: no such folder; "
                        f"{command('scripts/inspect_data.py', '--list')} shows those below data/")
    stage = STAGES[manifest.get("kind", "documents")]
    # Steps of one row, so that no set is too small for a step.
    changes = {"training_stage": stage, "total_batch_size": config.max_seq_len, "micro_batch_size": 1,
               "world_size": 1}
    tokenizer = find_tokenizer(manifest, config)
    if not manifest and tokenizer is None:
        raise SettingsError(f"{folder}: holds no {MANIFEST} or {MIXTURE}; if these are token files of "
                            "another trainer, set TOKENIZER_PATH to their tokenizer")
    return DataReport(folder, manifest, config.model_copy(update=changes), tokenizer)


def find_tokenizer(manifest: dict[str, Any], config: Config) -> Any:
    """Return the tokenizer of the data: TOKENIZER_PATH, or what the manifest names; None if neither is."""
    for path in filter(None, (config.tokenizer_path, manifest.get("tokenizer"))):
        backend = config.tokenizer_backend if path == config.tokenizer_path else "auto"
        try:
            tokenizer = load_tokenizer(path, backend)
        except PaddockError:
            continue
        if tokenizer.is_same(manifest.get("tokenizer_sha256", tokenizer.sha256)):
            return tokenizer
    return None
