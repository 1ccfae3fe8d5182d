"""Describe prepared data: counts, lengths, repeats, and the first rows that a run reads."""

import hashlib
import os
import re
import textwrap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import extensions.prompts  # noqa: F401 (registers its rows)
from common.errors import DataError, PaddockError, SettingsError
from common.files import disk_errors
from common.text import command, counted, percent, printable
from config import STAGE_OF_KIND, Config
from data_pipeline.examples import show_segment
from data_pipeline.mixture import describe_sources, is_mixture, read_mixture, source_table
from data_pipeline.prepare import describe_counts, names_of_sources, read_prepared
from data_pipeline.shards import MANIFEST, MIXTURE, TokenizerInfo, TokenSet, prepared_folder
from dataloaders import Rows, open_mixture, open_set
from extensions.exclude import digest_of, exclude
from extensions.settings import selector_of
from model_kernels.head import IGNORE_INDEX
from tokenizer import load_tokenizer

LONGEST = 1 << 20  # tokens; longer documents are counted together
MOST_HASHES = 1 << 24  # for detecting repeated documents: 128 MiB
COLUMNS, BAR_COLUMNS = 80, 34
SHOWN_DOCUMENTS, SHOWN_IDS = 4, 10


class RepeatCounter:
    """Counts repeated documents by 64-bit hashes of their tokens.

    Beyond MOST_HASHES documents it samples half of all hash values, then a quarter, and so on. A sample
    contains all or none of a document's copies, so its share of repeats estimates the total share.
    """

    def __init__(self):
        self.halvings, self.hashes = 0, array("Q")

    def add(self, digest: bytes) -> None:
        """Count a document by 8 bytes of its hash."""
        value = int.from_bytes(digest, "little")
        if value % (1 << self.halvings) == 0:
            self.hashes.append(value)
        if len(self.hashes) > MOST_HASHES:
            self.halvings += 1
            hashes = np.array(self.hashes)
            self.hashes = array("Q", hashes[hashes % (1 << self.halvings) == 0].tobytes())

    @property
    def share(self) -> float:
        return 1 - len(np.unique(self.hashes)) / max(1, len(self.hashes))


def measure(token_set: TokenSet, starts: np.ndarray | None, max_seq_len: int) -> tuple[dict, np.ndarray]:
    """Measure a split in one pass and constant memory; return statistics as JSON, and counts of token ids.

    `starts` has the ascending positions of examples. Documents (None) start with document_start_id.
    """
    id_counts = np.zeros(token_set.vocab_size, np.int64)
    lengths = np.zeros(LONGEST + 1, np.int64)  # documents by length; the last entry includes longer ones
    repeats, longest = RepeatCounter(), 0
    position, length, hasher = 0, 0, hashlib.blake2b(digest_size=8)  # of the current document

    def end_document() -> None:
        nonlocal longest
        lengths[min(length, LONGEST)] += 1
        longest = max(longest, length)
        repeats.add(hasher.digest())

    with tqdm(total=token_set.tokens, unit="tok", unit_scale=True, desc="Reading", delay=2, leave=False,
              disable=None) as bar:
        for ids in token_set.blocks():
            bar.update(len(ids))
            counts = np.bincount(ids)
            id_counts[:len(counts)] += counts
            if starts is None:
                cuts = np.flatnonzero(ids == token_set.document_start_id)
            else:
                first, last = np.searchsorted(starts, (position, position + len(ids)))
                cuts = starts[first:last] - position
            for number, piece in enumerate(np.split(ids, cuts)):
                if number and length:  # a document starts here
                    end_document()
                    length, hasher = 0, hashlib.blake2b(digest_size=8)
                length += len(piece)
                hasher.update(piece)
            position += len(ids)
    if length:
        end_document()

    # (shortest length, documents) for each range between powers of two.
    edges = [0, *(1 << bit for bit in range(1, LONGEST.bit_length()))]
    in_ranges = np.add.reduceat(lengths, edges).tolist()
    used = [number for number, count in enumerate(in_ranges) if count]
    # Quantiles of the lengths, and the documents and tokens that fit a row.
    documents, tokens = int(lengths.sum()), int(id_counts.sum())
    median, p90, p99 = np.searchsorted(np.cumsum(lengths), np.array([0.5, 0.9, 0.99]) * documents).tolist()
    upto = lengths[:min(max_seq_len, LONGEST - 1) + 1]
    tokens_upto = int((upto * np.arange(len(upto))).sum())
    return {"documents": documents, "tokens": tokens, "median": median, "p90": p90, "p99": p99,
            "longest": longest, "histogram": list(zip(edges, in_ranges))[used[0]:used[-1] + 1],
            "repeated": round(repeats.share * documents), "repeated_is_estimate": repeats.halvings > 0,
            "max_seq_len": max_seq_len, "longer": 1 - int(upto.sum()) / max(1, documents),
            "tokens_in_longer": 1 - tokens_upto / max(1, tokens)}, id_counts


@dataclass
class DataReport:
    """A folder of prepared data, opened as a run opens it."""

    folder: Path
    manifest: dict[str, Any]  # of the set, or of a mixture's first set; empty for foreign token files
    config: Config
    tokenizer: Any  # None if the data's tokenizer is not available

    @cached_property
    def rows(self) -> Rows:  # of the training split
        tokenizer = self.tokenizer or TokenizerInfo(self.manifest["vocab_size"], None,
                                                     self.manifest["document_start_id"])
        given = self.config, self.folder, "train", tokenizer, "never"
        return open_mixture(*given) if is_mixture(self.folder) else Rows.of(open_set(*given))

    def facts(self) -> dict[str, Any]:
        """Return statistics of the data as JSON. Reads the training split, unless the data is a mixture."""
        facts = {"folder": str(self.folder)}
        if is_mixture(self.folder):
            return facts | {"sources": source_table(read_mixture(self.folder))}
        names = ("kind", "tokenizer", "tokenizer_sha256", "vocab_size", "splits", "skipped", "removed")
        facts |= {name: self.manifest[name] for name in names if name in self.manifest}
        facts["made_from"] = names_of_sources(self.manifest) if self.manifest else [str(self.folder)]
        [rows] = self.rows.sources
        measured, id_counts = measure(rows.token_set, rows.example_set and rows.example_set.starts,
                                      self.config.max_seq_len)
        facts |= measured | {"rows": len(rows), "in_rows": rows.describe()}
        if rows.example_set:
            facts |= {"truncated": rows.truncated, "left_out": rows.left_out, "fill": rows.fill}
        if lengths := getattr(self.tokenizer, "byte_lengths", None):
            facts["bytes_per_token"] = float(id_counts @ np.array(lengths)) / max(1, measured["tokens"])
        return facts

    def describe(self, facts: dict[str, Any]) -> list[str]:
        """Return the lines that show `facts`."""
        if "sources" in facts:
            mixture = read_mixture(self.folder)
            return [f"{self.folder}: a mixture of {counted(len(mixture.sources), 'source')}",
                    *(f"  {line}" for line in describe_sources(mixture, facts["sources"])),
                    *(f"  {source['source']}: {command('scripts/inspect_data.py', Path(source['set']))}"
                      for source in facts["sources"])]
        items, documents = facts.get("kind", "documents"), facts["documents"]
        lines = [f"{self.folder}: {items}, made from {', '.join(facts['made_from'])}"]
        if self.manifest:
            name = facts.get("tokenizer") or (self.config.tokenizer_path if self.tokenizer else "unknown")
            lines.append(f"tokenizer: {name}, {facts['vocab_size']:,} ids, SHA-256 "
                         f"{facts['tokenizer_sha256'][:12]}")
            lines += describe_counts(self.folder, self.manifest)
        else:
            lines.append(f"train: {facts['tokens']:,} tokens in {counted(documents, 'document')}")
        if "bytes_per_token" in facts:
            lines.append(f"bytes per token: {facts['bytes_per_token']:.2f}")
        about, share = "about " * facts["repeated_is_estimate"], facts["repeated"] / max(1, documents)
        lines += [f"repeated: {about}{counted(facts['repeated'], items[:-1])} ({percent(share, 2)})",
                  f"lengths: median {facts['median']:,}, 90 % up to {facts['p90']:,}, 99 % up to "
                  f"{facts['p99']:,}, longest {facts['longest']:,} tokens"]
        most = max(count for _, count in facts["histogram"])
        for first, count in facts["histogram"]:
            last = f"{2 * max(1, first) - 1:,}"
            bar = "█" * round(BAR_COLUMNS * count / most) or "▏" * bool(count)
            lines.append(f"  {first:>9,} - {last:<9} {bar:<{BAR_COLUMNS}} {count:>12,} "
                         f"{percent(count / documents, 2):>8}")
        # What MAX_SEQ_LEN does to the documents or examples.
        if items == "documents":
            fits = (f"{counted(facts['rows'], 'row')}; {percent(facts['longer'], 2)} of the documents, with "
                    f"{percent(facts['tokens_in_longer'], 2)} of the tokens, are longer than a row, so they "
                    "are cut")
        else:
            cut, left_out = (facts[name] / max(1, documents) for name in ("truncated", "left_out"))
            fits = f"{facts['in_rows']}; {percent(cut, 2)} are cut, {percent(left_out, 2)} are left out"
        lines.append(f"at MAX_SEQ_LEN={facts['max_seq_len']}: {fits}")
        return [piece for line in lines for piece in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]

    def describe_rows(self, count: int) -> Iterator[str]:
        """Yield the lines that show the first rows of a run, with ⟦ ⟧ around labels."""
        rows = self.rows
        if not self.tokenizer:
            yield "rows: not shown, because TOKENIZER_PATH does not name the tokenizer of the data"
            return
        if not len(rows):
            yield f"rows: none, because the data is shorter than MAX_SEQ_LEN={self.config.max_seq_len}"
            return
        order = rows.mixing.rows_at(np.arange(min(count, len(rows))), self.config.row_seed)
        for number, row in enumerate(order.reshape(-1, 1), 1):
            yield from self.describe_row(rows, row, f", number {number} of the run")

    def find(self, pattern: str, output: Path) -> Iterator[str]:
        """Write a file for EXCLUDE_DATA that names the examples with a pattern; yield lines on them."""
        selector = selector_of(f"find {pattern}", "--find")
        if not self.tokenizer:
            raise SettingsError(f"{self.folder}: set TOKENIZER_PATH to the data's tokenizer, to find texts")
        if output.exists():
            raise SettingsError(f"{output} exists; choose another file with --exclude")
        excluded = exclude(self.rows, self.tokenizer, [selector])
        lines = [f"hash {digest_of(source.ids(number))}" for source, number in excluded.examples()]
        if not lines:
            raise DataError(f"{self.folder}: nothing has the pattern {pattern!r}, so nothing is written")
        with disk_errors(output, DataError, "choose another file with --exclude"):
            comment = f"# {printable(pattern)} in {self.folder}"
            output.write_text("\n".join([comment, *dict.fromkeys(lines), ""]))
        yield f"{self.folder}: {excluded.describe()} have this pattern"
        for source, number in islice(excluded.examples(), SHOWN_DOCUMENTS):
            text = source.text(number)
            start = text.rfind(" ", 0, max(0, re.search(pattern, text).start() - COLUMNS)) + 1
            yield textwrap.shorten(printable(text[start:]), 2 * COLUMNS, placeholder=" ...")
        yield f"Train without them: EXCLUDE_DATA={output}"

    def describe_row(self, rows: Rows, row: np.ndarray, note: str = "") -> Iterator[str]:
        """Yield the lines that show a row, of shape (1,)."""
        batch, (place, *_), name = rows(row), rows.locate(row)[0], ""
        source = rows.sources[place]
        if rows.mixture:
            name = f" from {rows.mixture.sources[place].label}"
        targets_T, tokens_T = batch.targets_BT[0], batch.tokens_BT[0]
        documents_T = batch.document_ids_BT
        documents_T = torch.ones_like(tokens_T) if documents_T is None else documents_T[0]
        end = int(batch.stored.get("prompt_B1", len(tokens_T)))  # without the padding after a prompt
        borders = [0, *(torch.diff(documents_T).nonzero().flatten() + 1).tolist(), end]
        labels = int((targets_T != IGNORE_INDEX).sum())
        yield f"row {row[0]:,}{name}{note}: {len(tokens_T):,} slots, {counted(labels, 'label')}"
        has_examples = source.example_set is not None and source.example_set.kind != "prompts"
        for number, (first, last) in enumerate(zip(borders, borders[1:]), 1):
            if number > SHOWN_DOCUMENTS and last < len(tokens_T):
                continue
            tokens, targets = tokens_T[first:last].tolist(), targets_T[first:last].tolist()
            labels = sum(target != IGNORE_INDEX for target in targets)
            if has_examples and not labels:
                yield f"  padding: slots {first}-{last - 1}"
                continue
            name = f"document {number}"
            if has_examples and source.example_set.kind == "pairs":
                name = f"pair {(number + 1) // 2}, {'chosen' if number % 2 else 'rejected'}"
            yield (f"  {name}: slots {first}-{last - 1}, positions 0-{last - first - 1}, "
                   f"{counted(labels, 'label')}")
            # Show the ids, and the text: the first token, then the token after each one.
            shown = " ".join(map(str, tokens[:SHOWN_IDS])) + (" ..." if len(tokens) > SHOWN_IDS else "")
            following = [(token if target == IGNORE_INDEX else target, target != IGNORE_INDEX)
                         for token, target in zip([*tokens[1:], 0], targets)]
            if not following[-1][1]:  # the model predicts nothing after the last token
                following.pop()
            runs = groupby([(tokens[0], False), *following], key=lambda pair: pair[1])
            text = "".join(show_segment([token for token, _ in run], is_label, self.tokenizer)
                           for is_label, run in runs)
            for line in [f"ids: {shown}", *text.split("\n")]:
                yield from textwrap.wrap(printable(line), COLUMNS, initial_indent="    ",
                                         subsequent_indent="    ", drop_whitespace=False) or ["    "]
            if number == SHOWN_DOCUMENTS and number < len(borders) - 2:
                yield f"  ... {len(borders) - 2 - number} more"


def open_data(folder: Path, config: Config) -> DataReport:
    """Open prepared data, a mixture, or foreign token files."""
    if not is_mixture(folder):
        folder = prepared_folder(folder) or folder  # as a run opens it
    first = Path(read_mixture(folder).sources[0].set) if is_mixture(folder) else folder
    manifest = {}
    if os.path.lexists(first / MANIFEST):
        manifest = read_prepared(first)
    elif not os.path.exists(folder):
        raise DataError(f"{folder}: no such folder; "
                        f"{command('scripts/inspect_data.py', '--list')} lists those below data/")
    # Steps of one row, so that no set is too small for a step.
    changes = {"training_stage": STAGE_OF_KIND[manifest.get("kind", "documents")], "micro_batch_size": 1,
               "total_batch_size": config.max_seq_len, "world_size": 1}
    tokenizer = find_tokenizer(manifest, config)
    if not manifest and tokenizer is None:
        raise SettingsError(f"{folder}: contains no {MANIFEST} or {MIXTURE}; for token files of another "
                            "trainer, set TOKENIZER_PATH to their tokenizer")
    return DataReport(folder, manifest, config.model_copy(update=changes), tokenizer)


def find_tokenizer(manifest: dict[str, Any], config: Config) -> Any:
    """Return the data's tokenizer, from TOKENIZER_PATH or the manifest; None if neither is the right one."""
    for path in filter(None, (config.tokenizer_path, manifest.get("tokenizer"))):
        backend = config.tokenizer_backend if path == config.tokenizer_path else "auto"
        try:
            tokenizer = load_tokenizer(path, backend)
        except PaddockError:
            continue
        if tokenizer.is_same(manifest.get("tokenizer_sha256", tokenizer.sha256)):
            return tokenizer
    return None
