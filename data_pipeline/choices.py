"""Read multiple-choice items: HellaSwag's, and those of other sets in its schema or that of ARC and MMLU.

The wording of HellaSwag (HELLASWAG_PATH) is that of the harness: the activity, then `ctx_a` and a capitalized
`ctx_b` (or `ctx` alone, which changes scores slightly), without WikiHow's markup. The text of other sets
(EVAL_TASKS) is scored as it is written: `ctx`, a space, and the ending. A `question` with `choices` has the
wording of the harness's tasks arc_easy and mmlu_continuation.
"""

import math
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError, unreadable
from common.files import plain
from common.text import command
from data_pipeline.chats import json_in
from data_pipeline.sources import Reading, columns_of, flaw_of, read_file

MOST_ENDINGS = 16
FROM_ONE = "has labels that count from 1"
NO_FIRST = ("has no item whose right answer is the first; if its labels count from 1, subtract 1 from each, "
            "since they are read as counting from 0")
UNLIKELY = 0.01
HELLASWAG = "HELLASWAG_PATH="  # only its items are cleaned, and they are checked more strictly


class Item(NamedTuple):
    """A question as it is scored."""

    where: str  # file:line
    context: str
    endings: list[str]
    label: int
    is_numbered: bool  # the label is a number, not a letter or a name
    unused: tuple[str, ...] = ()  # fields of the record that are not scored; none for HellaSwag
    about_labels: str = ""  # what is said of the labels of the whole file
    is_question: bool = False  # the record has a question and choices instead of a context and endings


def read_items(path: str | Path, setting: str = HELLASWAG) -> list[Item]:
    """Read all items of a file in any format of `data_pipeline.sources`; errors name the `setting`."""
    def advice() -> str:
        if setting == HELLASWAG:
            return f"get it with {command('scripts/load_hellaswag_dataset.py')}"
        return "name a file in HellaSwag's schema"

    try:
        with open(path, "rb", opener=plain):
            records = read_file(str(path), Reading(advice="correct the record, or remove it"))
            items = [parse_item(record, where, setting == HELLASWAG) for where, record in records]
    except OSError as error:
        raise DataError(f"{setting}{path} {unreadable(error, advice())}") from error
    if not items:
        raise DataError(f"{setting}{path} contains no items; {advice()}")
    about, numbered = "", [item for item in items if item.is_numbered]
    has_zero, is_mixed = not all(item.label for item in numbered), 0 < len(numbered) < len(items)
    if last := next((item for item in numbered if item.label == len(item.endings)), None):
        if has_zero:
            raise DataError(f"{last.where}: its label is {last.label}, but it must be 0 to {last.label - 1}, "
                            "since the file has labels that are 0; correct it")
    if last or (is_mixed and not has_zero):
        about = FROM_ONE
        items = [item._replace(label=item.label - item.is_numbered) for item in items]
    elif numbered and not has_zero and (
            math.prod(1 - 1 / len(item.endings) for item in numbered) < UNLIKELY):
        about = NO_FIRST
    about += " (others are letters)" * bool(is_mixed and about)
    return [item._replace(about_labels=about) for item in items]


def parse_item(record: Mapping[str, Any], where: str, is_hellaswag: bool = True) -> Item:
    """Return the item in a record; one of HellaSwag has 4 endings, an activity and the harness's wording.

    A label that is the number of endings is right if the labels of the file count from 1.
    """
    def invalid(problem: str) -> DataError:
        return DataError(f"{where}: {problem}; correct the record, or remove it")

    def text(key: str, default: Any = None) -> str:
        value = record.get(key, default)
        if value is None and key not in record:
            other = "; name sets other than HellaSwag in EVAL_TASKS" if is_hellaswag else ""
            raise DataError(f"{where}: has no {key!r}; it has {columns_of(record)}{other}")
        if flaw := flaw_of(value):
            raise invalid(f"{key!r} {flaw}")
        return value

    # The columns: of HellaSwag, or of ARC and MMLU.
    is_question = "endings" not in record and {"question", "choices"} <= record.keys()
    if "endings" not in record and (is_hellaswag or not is_question):
        expected = "; name other sets in EVAL_TASKS" if is_hellaswag else (
            ", or question, choices and answer, as in MMLU's; write these names")
        raise DataError(f"{where}: has no 'endings'; it has {columns_of(record)}, expected ctx, endings and "
                        f"label, as in HellaSwag's file{expected}")
    ending_column, label_column = "endings", "label"
    if is_question:
        ending_column, label_column = "choices", "answerKey" if "answerKey" in record else "answer"

    # The endings
    endings, names = record[ending_column], None
    for kind in (list, dict) if isinstance(endings, str) else ():  # in CSV, a list is its JSON
        with suppress(DataError):
            endings = json_in(ending_column, endings, kind)
    if is_question and isinstance(endings, list) and all(isinstance(each, dict) for each in endings):
        endings = {key: [each.get(key) for each in endings] for key in ("text", "label")}
    if is_question and isinstance(endings, dict):  # as in ARC: {"text": [...], "label": ["A", ...]}
        endings, names = endings.get("text"), endings.get("label")
    counts, expected = (range(4, 5), "4") if is_hellaswag else (range(2, MOST_ENDINGS + 1), "2 to 16")
    if not isinstance(endings, list) or len(endings) not in counts or any(map(flaw_of, endings)) or (
            names is not None and len(names) != len(endings)):
        raise invalid(f"{ending_column!r} must be {expected} texts, got {record[ending_column]!r:.60}")

    # The label: a number, a letter, or a name in `choices`
    if label_column not in record:
        raise invalid(f"has no {label_column!r}; it has {columns_of(record)}")
    label, last = record[label_column], string.ascii_uppercase[len(endings) - 1]
    if label in (None, "", -1, "-1") or label != label:
        raise DataError(f"{where}: has no label; use the validation split, as the test split has no labels")
    labels = {**{str(number): number for number in range(len(endings) + 1)},
              **{letter: number for number, letter in enumerate(string.ascii_uppercase[:len(endings)])}}
    expected = f"0 to {len(endings) - 1} (or in the whole file 1 to {len(endings)}), or A to {last}"
    if names is not None:
        labels = {str(each).upper(): number for number, each in enumerate(names)}
        expected = f"a label of its choices, {', '.join(map(str, names))}"
    # A column of numbers with a gap has 1.0.
    if (name := str(label).strip().upper().removesuffix(".0")) not in labels:
        raise invalid(f"{label_column!r} must be {expected}, got {label!r:.60}")
    if isinstance(label, str) and label in endings and labels[name] != endings.index(label) and not names:
        raise invalid(f"{label_column!r} is {label!r}, a position and also the text of another one of "
                      f"{ending_column!r}; write the position as a letter, or as a number in JSON")

    # The text
    used = ["ctx"] if "ctx" in record or "ctx_a" not in record else ["ctx_a", *{"ctx_b"} & record.keys()]
    used = ["question"] if is_question else used
    unused = tuple(sorted(record.keys() - {*used, ending_column, label_column}))
    context = " ".join(map(text, used))
    if is_question:
        context = f"Question: {context.strip()}\nAnswer:"
    if is_hellaswag:
        if "ctx_a" in record:
            context = f"{text('ctx_a')} {text('ctx_b', '').capitalize()}"
        context, unused = clean(f"{text('activity_label')}: {context}"), ()
        endings = [*map(clean, endings)]
    if not all(endings):
        raise invalid(f"ending {endings.index('')} is empty")
    is_numbered = names is None and name.isdecimal()
    return Item(where, context, endings, labels[name], is_numbered, unused, is_question=is_question)


def clean(text: str) -> str:
    """Remove WikiHow's bracketed markup. Source: lm-evaluation-harness, lm_eval/tasks/hellaswag/utils.py."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
