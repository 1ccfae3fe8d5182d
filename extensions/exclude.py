"""EXCLUDE_DATA: a run without some documents, chats, pairs or prompts, and with everything else unchanged.

Excluded examples stay in their rows, so that the order, the positions, dropout and the initial weights are
those of a run with them. But none of their tokens is a target, and no other example attends to them.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from common.activity import tick
from common.errors import CheckpointError, DataError
from common.text import counted
from config import Config
from data_pipeline.examples import kind_of_examples
from data_pipeline.prepare import DOCUMENTS, cut_tails, read_prepared
from data_pipeline.shards import dtype_for
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading
from data_pipeline.workers import TOKENIZERS, PreparationOptions, WorkerSpec
from dataloaders import Batch, Rows, SourceRows, WrappedRows
from extensions.report.numbers import number_text
from extensions.settings import Selector, read_selectors
from model_kernels.head import IGNORE_INDEX
from run.extensions import Extension
from run.run import Inputs


@dataclass
class Examples:
    """The documents, chats, pairs or prompts of a source of the training split."""

    rows: SourceRows
    label: str  # of the source in a mixture
    tokenizer: Any

    def __post_init__(self):
        if self.rows.example_set:
            self.starts_E = self.rows.example_set.starts
            return
        first, starts = 0, [np.zeros(1, np.int64)]  # the first token always starts a document
        for ids in self.rows.token_set.blocks():
            tick()
            starts.append(first + np.flatnonzero(ids == self.rows.token_set.document_start_id))
            first += len(ids)
        self.starts_E = np.unique(np.concatenate([*starts, [first]]))

    def __len__(self) -> int:
        return len(self.starts_E) - 1

    def ids(self, example: int) -> np.ndarray:
        start, end = self.starts_E[example:example + 2].tolist()
        return self.rows.token_set.read(start, end - start)

    def text(self, example: int) -> str:
        """Return an example as text without control tokens, of a prompt without its record."""
        example_set, ids = self.rows.example_set, self.ids(example)
        if example_set and example_set.kind == "prompts":
            ids = ids[:example_set.first_targets[example]]
        return self.tokenizer.control_pattern.sub("\n", self.tokenizer.decode(ids.tolist())).strip()

    def in_rows(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the examples of each row, in order."""
        for row in indices.tolist():
            if self.rows.example_set:
                yield self.rows.examples_in(row)
                continue
            first = row * self.rows.row_tokens
            first, last = np.searchsorted(self.starts_E, (first, first + self.rows.row_tokens), "right") - 1
            yield np.arange(first, last + 1)

    def hits(self, selectors: Sequence[Selector], counts: Counter) -> np.ndarray:
        """Return which examples (E,) the selectors name, and count those of each selector."""
        wanted, patterns = defaultdict(set), {}
        places = {value for kind, value in selectors if kind in ("line", "source")} - {self.label}
        named = hashes_at(self.rows.token_set.folder, places, self.tokenizer) if places else {}
        hit_E = np.zeros(len(self), bool)
        for selector in selectors:
            kind, value = selector
            if kind == "find":
                patterns[selector] = re.compile(value)
            elif kind == "source" and value == self.label:
                hit_E[:] = True
                counts[selector] += len(self)
            for digest in {value} if kind == "hash" else named.get(value, ()):
                wanted[digest].add(selector)
        for example in range(len(self) if wanted or patterns else 0):
            tick()
            found = {*wanted.get(digest_of(self.ids(example)), ())} if wanted else set()
            text = self.text(example) if patterns else ""
            found |= {selector for selector, pattern in patterns.items() if pattern.search(text)}
            counts.update(found)
            hit_E[example] |= bool(found)
        return hit_E


def digest_of(ids: np.ndarray) -> str:
    """Return the hash of an example's stored tokens, by which EXCLUDE_DATA can name it."""
    return hashlib.blake2b(np.ascontiguousarray(ids), digest_size=8).hexdigest()


def hashes_at(folder: Path, places: Iterable[str], tokenizer: Any) -> dict[str, set[str]]:
    """Return the hashes of the records at each file:line or of a whole file, from a set's source."""
    manifest, found = read_prepared(folder), defaultdict(set)
    options = PreparationOptions(manifest.get("tokenizer", ""), "auto", 1, 0.0,
                                 system_prompt=manifest["settings"].get("system_prompt", ""))
    kind = kind_of_examples(manifest["kind"], tokenizer, options.system_prompt
                            ) if "kind" in manifest else DOCUMENTS
    spec = WorkerSpec(options, tokenizer.sha256, dtype_for(tokenizer.vocab_size), 0.0, frozenset())
    TOKENIZERS[tokenizer.sha256] = tokenizer
    source, names = manifest["source"]["sources"][0], {field.name for field in fields(Source)}
    source = Source(**{name: value for name, value in source.items() if name in names})
    for item in kind.read(source, Reading(skip_bad=True)):
        tick()
        if named := {item.where, item.where.rpartition(":")[0]} & {*places}:
            pieces = [*cut_tails([item])] if "cut_from_each" in manifest else [item]
            ids = kind.tokenize(spec, pieces).splits["train"].ids
            for place in named:
                found[place].add(digest_of(ids))
    return found


@dataclass(frozen=True)
class ExcludedRows(WrappedRows):
    """Rows in which some examples are neither targets nor attended to.

    Those of pairs and prompts have `stored["kept_BP"]`: 1 for an example that counts, and 0 for others.
    """

    source: Examples
    out_E: np.ndarray

    @property
    def rows(self) -> SourceRows:
        return self.source.rows

    def __call__(self, indices: np.ndarray) -> Batch:
        rows, batch = self.rows, self.rows(indices)
        if rows.example_set is None:
            tokens_BT = indices[:, None] * rows.row_tokens + np.arange(rows.row_tokens + 1)
            out_BT = self.out_E[np.searchsorted(self.source.starts_E, tokens_BT, "right") - 1]
            out_BT = torch.from_numpy(out_BT[:, :-1] | out_BT[:, 1:])  # as an input, or as a target
        else:
            kept_BP = pad_sequence([torch.from_numpy(~self.out_E[examples]).long()
                                    for examples in self.source.in_rows(indices)], batch_first=True)
            if rows.example_set.kind != "chats":
                batch.stored["kept_BP"] = kept_BP
                return batch
            out_BT = F.pad(1 - kept_BP, (1, 1)).bool().gather(1, batch.document_ids_BT.long())
        targets_BT, target_index_M = batch.targets_BT.masked_fill(out_BT, IGNORE_INDEX), batch.target_index_M
        if target_index_M is not None:
            target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
        return replace(batch, targets_BT=targets_BT, target_index_M=target_index_M)


class Excluded(NamedTuple):
    """What a file of selectors leaves out of the training split."""

    rows: Rows  # without it, of ExcludedRows
    counts: Counter  # examples by selector

    def in_rows(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the source and the examples of each row."""
        for source, row in zip(*self.rows.locate(indices)):
            yield source, next(self.rows.sources[source].source.in_rows(np.array([row])))

    def affects(self, indices: np.ndarray) -> bool:
        return any(self.rows.sources[source].out_E[each].any() for source, each in self.in_rows(indices))

    @property
    def total(self) -> int:
        return sum(int(each.out_E.sum()) for each in self.rows.sources)

    def examples(self) -> Iterator[tuple[Examples, int]]:
        """Yield the source and the number of each example that is left out."""
        for each in self.rows.sources:
            yield from ((each.source, number) for number in np.flatnonzero(each.out_E).tolist())

    def describe(self) -> str:
        sources = self.rows.sources
        examples = sum(len(each.source) for each in sources)
        tokens = sum(int(np.diff(each.source.starts_E)[each.out_E].sum()) for each in sources)
        share = tokens / sum(each.token_set.tokens for each in sources)
        shown = number_text(share, None, True)
        return f"{self.total:,} of {counted(examples, 'example')} ({shown} of the tokens)"


def exclude(rows: Rows, tokenizer: Any, selectors: Sequence[Selector]) -> Excluded:
    """Return the rows without the examples that the selectors name."""
    counts = Counter()
    labels = iter([source.label for source in rows.mixture.sources] if rows.mixture else [""])

    def without(source: SourceRows) -> ExcludedRows:
        examples = Examples(source, next(labels), tokenizer)
        return ExcludedRows(examples, examples.hits(selectors, counts))

    return Excluded(rows.map(without), counts)


class Exclude(Extension):
    """Leaves out what EXCLUDE_DATA names; a run that resumes leaves out the same."""

    sha256 = ""

    def inputs(self, config: Config, inputs: Inputs, verify: str) -> Inputs:
        """Return the inputs without what EXCLUDE_DATA names."""
        if not config.exclude_data:
            return inputs
        selectors = read_selectors(config.exclude_data)
        excluded = exclude(inputs.rows, inputs.tokenizer, selectors)
        if missed := [" ".join(each) for each in selectors if not excluded.counts[each]]:
            more = f" and {counted(len(missed) - 1, 'other line')}" * (len(missed) > 1)
            raise DataError(f"EXCLUDE_DATA={config.exclude_data}: {missed[0]!r}{more} names nothing in the "
                            "training split, perhaps because it is held out for validation; remove it")
        digest = hashlib.sha256()
        for each in excluded.rows.sources:
            digest.update(np.packbits(each.out_E))
        self.sha256 = digest.hexdigest()
        return replace(inputs, rows=excluded.rows,
                       description=f"{inputs.description}, without {excluded.describe()}")

    def state_dict(self) -> dict[str, str]:
        return {"sha256": self.sha256} if self.sha256 else {}

    def load_state_dict(self, state: dict[str, str]) -> None:
        if state.get("sha256", self.sha256) != self.sha256:
            raise CheckpointError("EXCLUDE_DATA now names other examples than when the checkpoint was saved; "
                                  "restore its file, or start a new run with another RUN_NAME")


EXTENSION = Exclude
