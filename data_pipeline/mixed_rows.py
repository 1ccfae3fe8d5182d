"""The rows of a mixture of prepared sets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.batch import Batch, join
from data_pipeline.mixture import Mixture, source_facts
from data_pipeline.row_order import Mixing


@dataclass(frozen=True)
class MixedRows:
    """The rows of a mixture: those of its sources, numbered one source after the other.

    Called with indices, it gives a batch.

    Args:
        parts: the rows of each source; None: it is not read.
        chosen: the only rows to read, in this order; None: all of them.
    """

    folder: Path
    mixture: Mixture
    parts: tuple[Any, ...]  # TokenRows or ExampleRows, also with stored outputs
    mixing: Mixing
    fingerprint: str
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return sum(self.mixing.sizes) if self.chosen is None else len(self.chosen)

    def describe(self) -> str:
        """Return a description of the rows for the user."""
        if self.chosen is None:
            tokens = sum(part.token_set.tokens for part in self.parts)
            return f"{tokens:,} tokens in a mixture of {len(self.parts)} sources"
        last = self.mixture.weights[-1]
        missing = [source.label for source, part, weight in zip(self.mixture.sources, self.parts, last)
                   if weight and part is None]
        return f"{len(self):,} rows" + (f" (none of {', '.join(missing)})" if missing else "")

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row, and its index within that source's rows."""
        indices = indices if self.chosen is None else self.chosen[indices]
        ends = np.cumsum(self.mixing.sizes)
        sources = np.searchsorted(ends, indices, side="right")
        return sources, indices - (ends - self.mixing.sizes)[sources]

    def facts(self, rows: int) -> list[dict[str, Any]]:
        """Return `source_facts` with the exact shares of a run of so many rows, and its passes over each."""
        taken = self.mixing.taken(np.array([rows]))[:, 0].tolist()
        return [fact | {"share": own / max(1, rows), "passes": own / size} for fact, own, size in
                zip(source_facts(self.folder, self.mixture), taken, self.mixing.sizes)]

    def __call__(self, indices: np.ndarray) -> Batch:
        sources, within = self.locate(indices)
        places = [np.flatnonzero(sources == source) for source in np.unique(sources)]
        batches = [self.parts[sources[own[0]]](within[own]) for own in places]
        return batches[0] if len(batches) == 1 else join(batches, np.argsort(np.concatenate(places)))


def parts_of(rows) -> tuple:
    """Return the rows of each source of a mixture; of other data the rows themselves."""
    return rows.parts if isinstance(rows, MixedRows) else (rows,)


def map_parts(rows, change: Callable[[Any, int], Any]):
    """Return the rows with those of each source changed, given them and the source's number."""
    if isinstance(rows, MixedRows):
        parts = (part and change(part, number) for number, part in enumerate(rows.parts))
        return replace(rows, parts=tuple(parts))
    return change(rows, 0)
