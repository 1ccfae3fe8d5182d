"""What a prepared set or mixture is: counts, lengths and repeats, and the first rows that a run reads."""

import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import DataError, PaddockError, SettingsError
from common.text import command, printable
from config import Config
from data_pipeline.batch import Batch
from data_pipeline.manifest import MANIFEST, MIXTURE
from data_pipeline.mixed_rows import MixedRows
from data_pipeline.mixture import describe_sources, is_mixture, read_mixture, source_facts
from data_pipeline.packed_rows import ExampleRows
from data_pipeline.prepare import describe_counts, names_of_sources, read_prepared
from data_pipeline.row_order import rows_at
from data_pipeline.shard_reader import TokenizerFacts, prepared_folder
from data_pipeline.statistics import begins_at, begins_with, measure
from data_pipeline.tokenize_chats import show_segment
from dataloaders import Rows, open_mixture, open_set
from fused.chunked_head import IGNORE_INDEX
from tokenizer import load_tokenizer

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
        """Return what is known of the data, as JSON; reads the whole training split, except of a mixture.

        Raises:
            DataError: the data is damaged, or its files have changed.
        """
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
    """Open prepared data, a mixture, or token files of others.

    Raises:
        DataError: there is none in the folder.
        SettingsError: token files of others need TOKENIZER_PATH.
    """
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
