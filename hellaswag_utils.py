"""HellaSwag: which of four endings is most likely? Scored like lm-evaluation-harness's `hellaswag`, 0-shot.

Percent on the 10,042 items of the validation set:

    model          acc    acc_norm
    guessing       25.0   25.0
    GPT-2 124M     28.9   31.1       Source: karpathy/build-nanogpt, hellaswag.py
    GPT-2 1.5B     40.0   50.9       Source: the same
    Llama 3.2 1B          64.3       Source: an evaluation after pytorch/torchtitan#1210
    Llama 3.1 8B   60.1   78.9       Source: PsycheFoundation/psyche, shared/eval/src/tasks/hellaswag.rs

acc takes the ending with the highest log-probability, acc_norm the highest per character. The harness reads
`ctx_a` and `ctx_b` and capitalizes the latter; `ctx` alone is read unchanged, so the score differs a little.

Shape suffixes: B items, T tokens of an item, M tokens of all endings in a batch.
"""

import gzip
import json
import math
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
from common.files import plain
from data_pipeline.readers import flaw_of
from fused.chunked_head import IGNORE_INDEX
from model import SHARED_PREFIX, Transformer

ENDINGS = 4
LINE_BYTES, FILE_BYTES = 1 << 20, 1 << 30  # limits, unpacked; HellaSwag's have 3 kB and 13 MB
GET_IT = "get it with scripts/load_hellaswag_dataset.py"


class Item(NamedTuple):
    """A question in the harness's wording."""

    where: str  # file:line
    context: str
    endings: list[str]
    label: int


class Task(NamedTuple):
    """An item in tokens: the context once, then each ending as a document that attends to it."""

    tokens_T: Tensor
    documents_T: Tensor
    targets_T: Tensor  # the endings' tokens, shifted; IGNORE_INDEX elsewhere
    ending_tokens: list[int]
    ending_characters: list[int]
    label: int


class Counts(NamedTuple):
    """Correct answers among n items. Counts of batches and ranks can be added."""

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
        """Of `accuracy`: the sample's standard deviation divided by the square root of n."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.n - 1))


# ------------------------------------------------------------------------------------------- items


def read_items(path: str | Path) -> list[Item]:
    """Return all items of a .jsonl or .jsonl.gz file in HellaSwag's schema.

    Raises:
        DataError: the file cannot be read, has no items, or a line that is not an item; names file:line.
    """
    items, left = [], FILE_BYTES
    try:
        with open(path, "rb", opener=plain) as file:
            lines = gzip.open(file) if str(path).endswith(".gz") else file
            for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES + 1), b""), start=1):
                left -= len(line)
                if len(line) > LINE_BYTES or left < 0:
                    what = "a line of more than 1 MiB" if len(line) > LINE_BYTES else "more than 1 GiB"
                    raise DataError(f"{path}:{number}: it holds {what}, so it is not HellaSwag; {GET_IT}")
                if line.strip():
                    items.append(parse_item(line, f"{path}:{number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"HELLASWAG_PATH={path} cannot be read: {error}; {GET_IT}") from error
    if not items:
        raise DataError(f"HELLASWAG_PATH={path} holds no items; {GET_IT}")
    return items


def parse_item(line: bytes, where: str) -> Item:
    """Return a line of the file as an item, worded as the harness does.

    Raises:
        DataError: it is not in HellaSwag's schema.
    """
    def invalid(what: str) -> DataError:
        return DataError(f"{where}: {what}; correct the line, or remove it")

    def text(key: str, default: Any = None) -> str:
        value = record.get(key, default)
        if flaw := flaw_of(value):
            raise invalid(f"{key!r} {flaw}")
        return value

    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise invalid(f"not a line of JSON: {error}") from error
    if not isinstance(record, dict):
        raise invalid(f"expected an object in HellaSwag's schema, got {type(record).__name__}")

    context = f"{text('ctx_a')} {text('ctx_b', '').capitalize()}" if "ctx_a" in record else text("ctx")
    endings, label = record.get("endings"), record.get("label")
    if not isinstance(endings, list) or len(endings) != ENDINGS or any(map(flaw_of, endings)):
        raise invalid(f"'endings' must be {ENDINGS} texts, got {endings!r:.60}")
    if str(label) not in map(str, range(ENDINGS)):
        raise DataError(f"{where}: 'label' must be 0 to {ENDINGS - 1}, got {label!r:.60}; use the validation "
                        "split, as the test split has no labels")
    endings = [clean(ending) for ending in endings]
    if not all(endings):
        raise invalid(f"ending {endings.index('')} is empty")
    return Item(where, clean(f"{text('activity_label')}: {context}"), endings, int(label))


def clean(text: str) -> str:
    """Remove WikiHow's bracketed marks. Source: lm-evaluation-harness, lm_eval/tasks/hellaswag/utils.py."""
    without_marks = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return without_marks.replace("  ", " ")


# ------------------------------------------------------------------------------------------ tokens



def prepare_tasks(items: Sequence[Item], tokenizer, max_seq_len: int) -> list[Task]:
    """Return the items in tokens. A context that is too long loses its beginning.

    Raises:
        DataError: an ending alone is longer than MAX_SEQ_LEN, or has no tokens.
    """
    return [prepare_task(item, tokenizer, max_seq_len) for item in items]


def prepare_task(item: Item, tokenizer, max_seq_len: int) -> Task:
    """Return an item in tokens. Raises DataError like `prepare_tasks`."""
    # A token that spans the border belongs to the ending. Source: lm-evaluation-harness, `_encode_pair`.
    context_ids = tokenizer.encode(item.context.rstrip())
    endings = [tokenizer.encode(f"{item.context} {ending}")[len(context_ids):] for ending in item.endings]
    longest = max(map(len, endings))
    if longest > max_seq_len:
        raise DataError(f"{item.where}: an ending of {longest} tokens does not fit into "
                        f"MAX_SEQ_LEN={max_seq_len}; raise it, or remove the item")
    if not all(endings):
        raise DataError(f"{item.where}: ending {endings.index([])} gives no token; remove the item")
    # The context's last token predicts each ending's first, so it begins each ending's document.
    context = [tokenizer.document_start_id, *context_ids]
    prefix, heads = context[:-1], [context[-1:]] * ENDINGS
    if len(context) + longest - 1 > max_seq_len:
        # Each ending keeps as much of the context as fits beside it, so they share nothing.
        prefix, heads = [], [context[-(max_seq_len + 1 - len(ending)):] for ending in endings]

    # The row: the shared prefix, then the endings
    tokens, targets, documents = list(prefix), [IGNORE_INDEX] * len(prefix), [SHARED_PREFIX] * len(prefix)
    for number, (head, ending) in enumerate(zip(heads, endings), start=SHARED_PREFIX + 1):
        tokens += head + ending[:-1]
        targets += [IGNORE_INDEX] * (len(head) - 1) + ending
        documents += [number] * (len(head) + len(ending) - 1)
    as_int32 = (torch.tensor(values, dtype=torch.int32) for values in (tokens, documents, targets))
    return Task(*as_int32, [*map(len, endings)], [*map(len, item.endings)], item.label)


# ------------------------------------------------------------------------------------------ scores


def batches_of(tasks: Sequence[Task], batch_tokens: int) -> list[list[Task]]:
    """Return all tasks, longest first, in batches of one task or of at most `batch_tokens` padded tokens."""
    batches: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: len(task.tokens_T), reverse=True):
        if batches and len(batches[-1][0].tokens_T) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(task)
        else:
            batches.append([task])
    return batches


@torch.no_grad()
def ending_logprobs(model: Transformer, batch: Sequence[Task], device: torch.device) -> np.ndarray:
    """Return the summed log-probability of each ending in nats, (B, 4) float64."""
    pad = partial(pad_sequence, batch_first=True)
    tokens_BT = pad([task.tokens_T for task in batch]).long().to(device)
    targets_BT = pad([task.targets_T for task in batch], padding_value=IGNORE_INDEX).long()
    # On the CPU, where the model can look for a shared prefix without waiting for the device.
    document_ids_BT = pad([task.documents_T for task in batch], padding_value=ENDINGS + 1)
    is_target_BT = targets_BT != IGNORE_INDEX
    hidden_MD = model.hidden(tokens_BT, document_ids_BT)[is_target_BT.to(device)]
    logprob_M = model.logprobs(hidden_MD, targets_BT[is_target_BT].to(device)).double().cpu().numpy()
    lengths = np.array([length for task in batch for length in task.ending_tokens])
    return np.add.reduceat(logprob_M, lengths.cumsum() - lengths).reshape(len(batch), ENDINGS)



def evaluate_batches(model: Transformer, tasks: Sequence[Task], *, rank: int = 0, world_size: int = 1,
                     device: torch.device, batch_tokens: int) -> Iterator[Counts]:
    """Yield one rank's counts, batch by batch; their sum is bit-identical for any number of ranks.

    Every rank yields equally often, so the caller may communicate in between. The batches do not depend on
    the number of ranks; if they do not divide evenly, some ranks score the last one again, uncounted.
    """
    batches = batches_of(tasks, batch_tokens)
    was_training = model.training
    model.eval()
    try:
        for index in range(rank, -(-len(batches) // world_size) * world_size, world_size):
            batch = batches[min(index, len(batches) - 1)]
            logprobs_B4 = ending_logprobs(model, batch, device)
            labels_B = np.array([task.label for task in batch])
            characters_B4 = np.array([task.ending_characters for task in batch])
            correct, correct_norm = (int((scores_B4.argmax(axis=1) == labels_B).sum())
                                     for scores_B4 in (logprobs_B4, logprobs_B4 / characters_B4))
            yield Counts(correct, correct_norm, len(batch)) if index < len(batches) else Counts()
    finally:
        model.train(was_training)


def evaluate(model: Transformer, tasks: Sequence[Task], *, device: torch.device, batch_tokens: int) -> Counts:
    """Return the counts over all tasks, in one process."""
    return sum(evaluate_batches(model, tasks, device=device, batch_tokens=batch_tokens), Counts())
