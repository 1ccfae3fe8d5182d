"""Prepared data as scripts/inspect_data.py shows it: counts, lengths, repeats, and the first rows of a run."""

import hashlib
import os
import textwrap
from collections.abc import Callable, Iterator
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

LONGEST = 1 << 20  # tokens; longer documents are counted together
MOST_HASHES = 1 << 22  # kept to find repeated documents
COLUMNS, BAR_COLUMNS = 80, 34
SHOWN_DOCUMENTS, SHOWN_IDS = 4, 10
STAGES = {"documents": "pretrain", "chats": "sft", "pairs": "dpo"}
# Returns where documents begin in a block of ids, given the block's position.
Cuts = Callable[[int, np.ndarray], np.ndarray]


@dataclass
class RepeatCounter:
    """Counts repeated documents by 64-bit hashes of their tokens.

    Beyond MOST_HASHES different hashes it keeps half of all hash values, then a quarter, and so on. Copies of
    a document share a hash, so the share of repeats in this sample estimates that of the whole.
    """

    halvings: int = 0
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # different ones, ascending
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of documents with each
    waiting: list[int] = field(default_factory=list)

    def add(self, digest: bytes) -> None:
        self.waiting.append(int.from_bytes(digest, "little"))
        if len(self.waiting) >= MOST_HASHES // 4:
            self.settle()

    def settle(self) -> None:
        """Count the hashes that `add` has collected."""
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
        """Share of the documents that repeat an earlier one."""
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
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
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


def begins_with(document_start_id: int) -> Cuts:
    """Documents of text begin with this id."""
    return lambda position, ids: np.flatnonzero(ids == document_start_id)


def begins_at(starts: np.ndarray) -> Cuts:
    """Examples begin at these ascending positions."""
    def cuts(position: int, ids: np.ndarray) -> np.ndarray:
        first, last = np.searchsorted(starts, (position, position + len(ids)))
        return starts[first:last] - position
    return cuts


def measure(token_set: TokenSet, cuts: Cuts) -> Statistics:
    """Count the documents or examples of a split in one pass; one may lie in several blocks."""
    found = Statistics(np.zeros(token_set.vocab_size, np.int64), np.zeros(LONGEST + 1, np.int64), 0,
                       RepeatCounter())
    position, length, hasher = 0, 0, hashlib.blake2b(digest_size=8)

    def end_document() -> None:
        found.lengths[min(length, LONGEST)] += 1
        found.longest = max(found.longest, length)
        found.repeats.add(hasher.digest())

    with tqdm(total=token_set.tokens, unit="tok", unit_scale=True, desc="Reading", delay=2, leave=False,
              disable=None) as bar:
        for ids in token_set.blocks():
            counts = np.bincount(ids)
            found.id_counts[:len(counts)] += counts
            for index, piece in enumerate(np.split(ids, cuts(position, ids))):
                if index and length:  # a document begins here
                    end_document()
                    length, hasher = 0, hashlib.blake2b(digest_size=8)
                length += len(piece)
                hasher.update(piece)
            position += len(ids)
            bar.update(len(ids))
    if length:
        end_document()
    found.repeats.settle()
    return found


@dataclass
class DataReport:
    """A folder of prepared data, opened as a run would."""

    folder: Path
    manifest: dict[str, Any]  # of the set or a mixture's first set; empty for other trainers' token files
    config: Config
    tokenizer: Any  # None if the tokenizer of the data is not available

    @property
    def rows(self) -> Rows:
        """The rows of the training split."""
        tokenizer = self.tokenizer or TokenizerFacts(self.manifest["vocab_size"], None,
                                                     self.manifest["document_start_id"])
        open_rows = open_mixture if is_mixture(self.folder) else open_set
        return open_rows(self.config, self.folder, "train", tokenizer, "never")

    def facts(self) -> dict[str, Any]:
        """Return the output of --json; reads the whole training split, unless it is a mixture."""
        facts = {"folder": str(self.folder)}
        if is_mixture(self.folder):
            return facts | {"sources": source_facts(self.folder, read_mixture(self.folder))}
        names = ("kind", "tokenizer", "tokenizer_sha256", "vocab_size", "splits", "skipped", "removed")
        facts |= {name: self.manifest[name] for name in names if name in self.manifest}
        facts["made_from"] = names_of_sources(self.manifest) if self.manifest else [str(self.folder)]
        rows, length = self.rows, self.config.max_seq_len
        is_text = not isinstance(rows, ExampleRows)
        found = measure(rows.token_set, begins_with(rows.token_set.document_start_id) if is_text else
                        begins_at(rows.example_set.starts))
        longer, tokens_in_longer = found.longer(length)
        facts |= {"documents": found.documents, "tokens": found.tokens, "median": found.quantile(0.5),
                  "p90": found.quantile(0.9), "p99": found.quantile(0.99), "longest": found.longest,
                  "histogram": found.histogram(), "repeated": round(found.repeats.share * found.documents),
                  "repeated_is_estimate": found.repeats.halvings > 0, "max_seq_len": length,
                  "longer": longer, "tokens_in_longer": tokens_in_longer, "rows": len(rows),
                  "in_rows": rows.describe()}
        if not is_text:
            facts |= {"truncated": rows.truncated, "left_out": rows.left_out, "fill": rows.fill}
        if lengths := getattr(self.tokenizer, "byte_lengths", None):
            facts["bytes_per_token"] = float(found.id_counts @ np.array(lengths)) / max(1, found.tokens)
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
                  f"{facts['p99']:,}, longest {facts['longest']:,} tokens"]
        most = max(count for _, count in facts["histogram"])
        for first, count in facts["histogram"]:
            last, share = f"{2 * max(1, first) - 1:,}", count / facts["documents"]
            bar = "█" * round(BAR_COLUMNS * count / most) or "▏" * bool(count)
            lines.append(f"  {first:>9,} - {last:<9} {bar:<{BAR_COLUMNS}} {count:>12,} {share:>7.2%}")
        at = f"at MAX_SEQ_LEN={facts['max_seq_len']}"
        if items == "documents":
            lines.append(f"{at}: {facts['rows']:,} rows; {facts['longer']:.2%} of the documents, with "
                         f"{facts['tokens_in_longer']:.2%} of the tokens, are longer than a row, so they are "
                         "cut")
        else:
            cut, left_out = (facts[name] / max(1, facts["documents"]) for name in ("truncated", "left_out"))
            lines.append(f"{at}: {facts['in_rows']}; {cut:.2%} are cut, {left_out:.2%} are left out")
        return [part for line in lines for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]

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
            yield from describe_document(tokens_T[first:last].tolist(), targets_T[first:last].tolist(),
                                         self.tokenizer)
            if number == SHOWN_DOCUMENTS and number < len(borders) - 2:
                yield f"  ... {len(borders) - 2 - number} more"


def describe_document(tokens: list[int], targets: list[int], tokenizer: Any) -> Iterator[str]:
    """Yield the ids and the text of a document: its first token, and what follows each of its tokens."""
    following = [(token if target == IGNORE_INDEX else target, target != IGNORE_INDEX)
                 for token, target in zip([*tokens[1:], 0], targets)]
    if not following[-1][1]:  # nothing follows the last token that the model should predict
        following.pop()
    ids = " ".join(map(str, tokens[:SHOWN_IDS])) + (" ..." if len(tokens) > SHOWN_IDS else "")
    text = ""
    for is_label, run in groupby([(tokens[0], False), *following], key=lambda pair: pair[1]):
        text += show_segment([token for token, _ in run], is_label, tokenizer)
    for line in [f"ids: {ids}", *text.split("\n")]:
        yield from textwrap.wrap(printable(line), COLUMNS, initial_indent="    ", subsequent_indent="    ",
                                 drop_whitespace=False) or ["    "]


def open_data(folder: Path, config: Config) -> DataReport:
    """Open prepared data, a mixture, or token files of others."""
    manifest = {}
    if is_mixture(folder):
        first = folder / read_mixture(folder).sources[0].set
    else:
        first = folder = prepared_folder(folder) or folder  # as a run opens it
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
