"""Held-out prompts with their answers, as they are stored in prepared chats and preference pairs."""

from typing import NamedTuple

import numpy as np

from common.errors import DataError
from data_pipeline.mixed_rows import MixedRows
from data_pipeline.packed_rows import LENGTH_SHIFT, TARGET, ExampleRows


class HeldOut(NamedTuple):
    """A prompt and its answer, in tokens: the last answer of a chat, or the chosen one of a pair."""

    prompt: list[int]  # with the answer's header
    answer: list[int]  # without the end of turn


def read_held_out(rows: ExampleRows | MixedRows, count: int) -> list[HeldOut]:
    """Return so many examples at most, from the first row on; without chats that are longer than a row.

    Raises:
        DataError: no example fits into a row.
    """
    found: list[HeldOut] = []
    for row in range(len(rows)):
        part, within = rows, row
        if isinstance(rows, MixedRows):
            source, within = (int(place[0]) for place in rows.locate(np.array([row])))
            part = rows.parts[source]
        for example in part.examples_in(within).tolist():
            ids, segments = part.example_set.read(example)
            ends, targets = np.cumsum(segments >> LENGTH_SHIFT), np.flatnonzero(segments & TARGET)
            answer = targets[0 if part.example_set.kind == "pairs" else -1]
            start, end = ends[answer - 1:answer + 1].tolist()
            if end <= part.row_tokens + 1:
                found.append(HeldOut(ids[:start].tolist(), ids[start:end - 1].tolist()))
            if len(found) == count:
                return found
    if not found:
        raise DataError("no held-out chat fits into a row; raise MAX_SEQ_LEN, or set GENERATION_EVAL_EVERY=0")
    return found
