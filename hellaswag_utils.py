"""HellaSwag: which of four endings does the model find likeliest? Scored as lm-evaluation-harness does (its `hellaswag`, 0-shot).

What to expect, in percent, on the 10,042 items of the validation set:

    model          acc    acc_norm
    guessing       25.0   25.0
    GPT-2 124M     28.9   31.1       Source: karpathy/build-nanogpt, hellaswag.py
    GPT-2 1.5B     40.0   50.9       Source: the same
    Llama 3.2 1B          64.3       Source: an evaluation of TorchTitan's models after pytorch/torchtitan#1210
    Llama 3.1 8B   60.1   78.9       Source: PsycheFoundation/psyche, shared/eval/src/tasks/hellaswag.rs

acc takes the ending of the highest log-probability, acc_norm of the highest per character of its text. The harness reads `ctx_a`
and `ctx_b` and begins the latter with a capital; a file that has only `ctx` is read as it stands, so its score differs a little.

Shapes: B items, T tokens of an item, M tokens of all endings in a batch.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.errors import DataError
from data_pipeline.sources import flaw_of
from fused.chunked_head import IGNORE_INDEX
from model import SHARED_PREFIX, Transformer

ENDINGS = 4
LINE_BYTES, FILE_BYTES = 1 << 20, 1 << 30  # that one may have when it is unpacked; HellaSwag's have 3 kB and 13 MB


class Item(NamedTuple):
    """One question as the harness words it; `where` is its file:line."""

    where: str
    context: str
    endings: list[str]
    label: int


class Task(NamedTuple):
    """An item in tokens: the context once, then each ending as a document of its own that sees it."""

    tokens_T: Tensor
    documents_T: Tensor
    targets_T: Tensor  # the endings' tokens, shifted; IGNORE_INDEX elsewhere
    ending_tokens: list[int]
    ending_characters: list[int]
    label: int


class Counts(NamedTuple):
    """Right answers among n items. Counts of several batches or ranks add up."""

    correct: int = 0
    correct_norm: int = 0
    n: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + theirs for mine, theirs in zip(self, other)))

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    @property
    def accuracy_norm(self) -> float:
        return self.correct_norm / self.n

    @property
    def standard_error(self) -> float:
        """Of `accuracy`: the sample's standard deviation over the root of n."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.n - 1))


# ---------------------------------------------------------------------------------------------------------------- the items


def read_items(path: str | Path) -> list[Item]:
    """All items of a .jsonl or .jsonl.gz file in HellaSwag's schema.

    Raises:
        DataError: the file cannot be read, holds no item, or a line of it is none; names file:line.
    """
    items = []
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise DataError(f"HELLASWAG_PATH={path} is no file; get one with scripts/load_hellaswag_dataset.py")
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as lines:
            room = FILE_BYTES
            for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES + 1), b""), start=1):
                room -= len(line)
                if len(line) > LINE_BYTES or room < 0:
                    what = "a line of more than 1 MiB" if len(line) > LINE_BYTES else "more than 1 GiB"
                    raise DataError(f"{path}:{number}: unpacked there is {what}, so it is not HellaSwag; get it with "
                                    "scripts/load_hellaswag_dataset.py")
                if line.strip():
                    items.append(parse_item(line, f"{path}:{number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"HELLASWAG_PATH={path} cannot be read: {error}; "
                        "get it with scripts/load_hellaswag_dataset.py") from error
    if not items:
        raise DataError(f"HELLASWAG_PATH={path} holds no items; get them with scripts/load_hellaswag_dataset.py")
    return items


def parse_item(line: bytes, where: str) -> Item:
    """One line of the file as an item, worded as the harness does.

    Raises:
        DataError: it is not in HellaSwag's schema.
    """
    def unlike(what: str) -> DataError:
        return DataError(f"{where}: {what}; mend the line, or leave it out")

    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise unlike(f"not a line of JSON: {error}") from error
    if not isinstance(record, dict):
        raise unlike(f"expected an object in HellaSwag's schema, got {type(record).__name__}")

    def text(key: str, default: Any = None) -> str:
        value = record.get(key, default)
        if flaw := flaw_of(value):
            raise unlike(f"{key!r} {flaw}")
        return value

    context = f"{text('ctx_a')} {text('ctx_b', '').capitalize()}" if "ctx_a" in record else text("ctx")
    endings, label = record.get("endings"), record.get("label")
    if not isinstance(endings, list) or len(endings) != ENDINGS or any(map(flaw_of, endings)):
        raise unlike(f"'endings' must be {ENDINGS} texts, got {endings!r:.60}")
    if str(label) not in map(str, range(ENDINGS)):
        raise DataError(f"{where}: 'label' must be 0 to {ENDINGS - 1}, got {label!r:.60}; the test split has no labels, "
                        "use the validation split")
    endings = [cleaned(ending) for ending in endings]
    if not all(endings):
        raise unlike(f"ending {endings.index('')} is empty")
    return Item(where, cleaned(f"{text('activity_label')}: {context}"), endings, int(label))


def cleaned(text: str) -> str:
    """Without WikiHow's bracketed marks. Source: lm-evaluation-harness, lm_eval/tasks/hellaswag/utils.py."""
    without_marks = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return without_marks.replace("  ", " ")


# --------------------------------------------------------------------------------------------------------------- the tokens


def encode_pair(tokenizer, context: str, ending: str) -> tuple[list[int], list[int]]:
    """The ids of the context with the document's start in front, and of the ending with its leading space.

    What the ending adds to the ids of the context, so a token that would span the border counts as the ending's.
    Source: lm-evaluation-harness, `_encode_pair`.
    """
    context_ids = tokenizer.encode(context.rstrip())
    whole_ids = tokenizer.encode(f"{context} {ending}")
    return [tokenizer.document_start_id, *context_ids], whole_ids[len(context_ids):]


def prepare_tasks(items: Sequence[Item], tokenizer, max_seq_len: int) -> list[Task]:
    """The items in tokens, in their order. A context that is too long loses its beginning.

    Raises:
        DataError: an ending alone is longer than MAX_SEQ_LEN.
    """
    return [prepare_task(item, tokenizer, max_seq_len) for item in items]


def prepare_task(item: Item, tokenizer, max_seq_len: int) -> Task:
    """One item in tokens. Raises DataError as `prepare_tasks`."""
    pairs = [encode_pair(tokenizer, item.context, ending) for ending in item.endings]
    context, endings = pairs[0][0], [ending for _, ending in pairs]
    longest = max(map(len, endings))
    if longest > max_seq_len:
        raise DataError(f"{item.where}: an ending of {longest} tokens does not fit into MAX_SEQ_LEN={max_seq_len}; "
                        "raise it, or leave the item out")
    if not all(endings):
        raise DataError(f"{item.where}: the tokenizer gives ending {[len(ending) for ending in endings].index(0)} no token")
    # An ending's first token is predicted by the context's last, which is therefore the first of each ending's document.
    prefix, heads = context[:-1], [context[-1:]] * ENDINGS
    if len(context) + longest - 1 > max_seq_len:
        # Each ending keeps as much of the context as fits beside it, so they share nothing.
        prefix, heads = [], [context[-(max_seq_len + 1 - len(ending)):] for ending in endings]
    tokens, targets, documents = list(prefix), [IGNORE_INDEX] * len(prefix), [SHARED_PREFIX] * len(prefix)
    for number, (head, ending) in enumerate(zip(heads, endings), start=SHARED_PREFIX + 1):
        tokens += head + ending[:-1]
        targets += [IGNORE_INDEX] * (len(head) - 1) + ending
        documents += [number] * (len(head) + len(ending) - 1)
    as_int32 = (torch.tensor(values, dtype=torch.int32) for values in (tokens, documents, targets))
    return Task(*as_int32, [len(ending) for ending in endings], [len(ending) for ending in item.endings], item.label)


# --------------------------------------------------------------------------------------------------------------- the scores


def batches_of(tasks: Sequence[Task], batch_tokens: int) -> list[list[Task]]:
    """All tasks, longest first, in batches that have at most `batch_tokens` tokens with their padding, or one task."""
    batches: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: len(task.tokens_T), reverse=True):
        if batches and len(batches[-1][0].tokens_T) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(task)
        else:
            batches.append([task])
    return batches


@torch.no_grad()
def ending_logprobs(model: Transformer, batch: Sequence[Task], device: torch.device) -> np.ndarray:
    """(B, 4) float64, the summed log-probability of each ending in nats."""
    tokens_BT = pad_sequence([task.tokens_T for task in batch], batch_first=True).long().to(device)
    targets_BT = pad_sequence([task.targets_T for task in batch], batch_first=True, padding_value=IGNORE_INDEX).long()
    # They stay on the CPU, where the model sees without waiting for the device that there is a shared prefix.
    document_ids_BT = pad_sequence([task.documents_T for task in batch], batch_first=True, padding_value=ENDINGS + 1)
    is_target_BT = targets_BT != IGNORE_INDEX
    hidden_MD = model.hidden(tokens_BT, document_ids_BT)[is_target_BT.to(device)]
    logprob_M = model.logprobs(hidden_MD, targets_BT[is_target_BT].to(device)).double().cpu().numpy()
    lengths = np.array([length for task in batch for length in task.ending_tokens])
    return np.add.reduceat(logprob_M, lengths.cumsum() - lengths).reshape(len(batch), ENDINGS)


def count_correct(batch: Sequence[Task], logprobs_B4: np.ndarray) -> Counts:
    """How many of the batch's items are answered rightly."""
    labels_B = np.array([task.label for task in batch])
    characters_B4 = np.array([task.ending_characters for task in batch])
    return Counts(int((logprobs_B4.argmax(axis=1) == labels_B).sum()),
                  int(((logprobs_B4 / characters_B4).argmax(axis=1) == labels_B).sum()), len(batch))


def evaluate_batches(model: Transformer, tasks: Sequence[Task], *, rank: int = 0, world_size: int = 1, device: torch.device,
                     batch_tokens: int) -> Iterator[Counts]:
    """Yield one rank's counts batch by batch; the sum over all ranks is the same, to the bit, for any number of them.

    Every rank makes equally many forwards and yields, so the caller may communicate between them. The batches do not depend on
    the number of ranks; where they do not divide evenly, some ranks score the last one again and count nothing.
    """
    batches = batches_of(tasks, batch_tokens)
    was_training = model.training
    model.eval()
    try:
        for index in range(rank, -(-len(batches) // world_size) * world_size, world_size):
            batch = batches[min(index, len(batches) - 1)]
            counts = count_correct(batch, ending_logprobs(model, batch, device))
            yield counts if index < len(batches) else Counts()
    finally:
        model.train(was_training)


def evaluate(model: Transformer, tasks: Sequence[Task], *, rank: int = 0, world_size: int = 1, device: torch.device,
             batch_tokens: int) -> Counts:
    """One rank's counts over all of its batches."""
    parts = evaluate_batches(model, tasks, rank=rank, world_size=world_size, device=device, batch_tokens=batch_tokens)
    return sum(parts, Counts())
