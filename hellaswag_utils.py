"""HellaSwag and other multiple-choice sets, scored like lm-evaluation-harness's `hellaswag` task, 0-shot.

HellaSwag asks which of four endings is most likely. Other sets (EVAL_TASKS) have the same schema with 2 to
16 endings. Percent correct on the 10,042 items of HellaSwag's validation set:

    model          acc    acc_norm
    guessing       25.0   25.0
    GPT-2 124M     28.9   31.1       Source: karpathy/build-nanogpt, hellaswag.py
    GPT-2 1.5B     40.0   50.9       Source: the same
    Llama 3.2 1B          64.3       Source: an evaluation after pytorch/torchtitan#1210
    Llama 3.1 8B   60.1   78.9       Source: PsycheFoundation/psyche, shared/eval/src/tasks/hellaswag.rs

acc picks the ending with the highest log-probability, acc_norm the highest per character.

data_pipeline/choices.py reads the items and says how they are worded. Names of control tokens are tokens.

Shape suffixes: N items, B items of a batch, E endings, T tokens of an item, M ending tokens of a batch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from checkpoint.schema import error_of_share
from common.errors import DataError
from common.files import json_sha256
from common.text import counted
from config import Config, EvalTask
from data_pipeline.choices import MOST_ENDINGS, Item, read_items
from data_pipeline.templates import encode_rendered
from model import Transformer, evaluation_mode
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX


class Task(NamedTuple):
    """A tokenized item: a shared context, then each ending as a document that attends to it."""

    tokens_T: Tensor
    documents_T: Tensor
    targets_T: Tensor  # the endings' tokens, shifted; IGNORE_INDEX elsewhere
    ending_tokens: list[int]
    ending_characters: list[int]
    label: int
    is_cut: bool  # the context was too long


class ChoiceSet(NamedTuple):
    """A multiple-choice set, ready for scoring."""

    name: str  # metric prefix
    title: str  # console name
    tasks: list[Task]
    chance: float  # expected accuracy of random guessing
    sha256: str  # hash of the items' wording and order
    notes: Sequence[str] = ()  # sentences about what is not scored as it is written

    def metrics(self, correct_N2: np.ndarray) -> dict[str, float]:
        """Return the metrics of all answers. The standard error is for acc."""
        n = len(correct_N2)
        acc, acc_norm = (int(right) / n for right in correct_N2.sum(axis=0))
        error = error_of_share(acc, n)
        values = {"acc": acc, "acc_norm": acc_norm, "n": n, "stderr": error, "chance": self.chance}
        return {f"{self.name}_{metric}": value for metric, value in values.items()}


def read_choice_set(named: EvalTask, tokenizer, config: Config) -> ChoiceSet:
    """Return the first HELLASWAG_EXAMPLES items of a file, tokenized."""
    items = read_items(named.path, named.setting)[:config.hellaswag_examples or None]
    chance = sum(1 / len(item.endings) for item in items) / len(items)
    tasks = [prepare_task(item, tokenizer, config.max_seq_len) for item in items]
    counts, notes = Counter(name for item in items for name in item.unused), []
    if unused := ", ".join(f"{name} ({count:,})" for name, count in counts.items()):
        belongs = "; HellaSwag itself belongs in HELLASWAG_PATH" if counts["activity_label"] else ""
        notes.append(f"has fields that are not scored: {unused}{belongs}")
    if any(item.is_question for item in items):
        notes.append("has questions with choices; each choice is scored after 'Question: ...\\nAnswer:'")
    notes += filter(None, [items[0].about_labels])
    if cut := sum(task.is_cut for task in tasks):
        notes.append(f"has {cut:,} of {counted(len(tasks), 'context')} that lose their beginning, since they "
                     f"do not fit into {config.max_seq_len:,} tokens")
    return ChoiceSet(named.name, named.title, tasks, chance, json_sha256([item[1:4] for item in items]),
                     [f"{named.setting}{named.path} {note}" for note in notes])


def prepare_task(item: Item, tokenizer, max_seq_len: int) -> Task:
    """Tokenize an item. A context that is too long loses its beginning."""
    # Equal endings have one score, and only the first of them can be the answer, as with argmax.
    different, first = [*dict.fromkeys(item.endings)], item.endings.index(item.endings[item.label])
    label = -1 if first < item.label else len({*item.endings[:first]})
    # A token that spans the border belongs to the ending. Source: lm-evaluation-harness, `_encode_pair`.
    context_ids, *endings = (encode_rendered(tokenizer, text)[0] for text in (
        item.context.rstrip(), *(f"{item.context} {ending}" for ending in different)))
    endings = [ids[len(context_ids):] for ids in endings]
    if (longest := max(map(len, endings))) > max_seq_len:
        raise DataError(f"{item.where}: an ending of {longest} tokens does not fit into "
                        f"MAX_SEQ_LEN={max_seq_len}; raise it, or remove the item")
    if not all(endings):
        raise DataError(f"{item.where}: ending {endings.index([])} has no tokens; remove the item")
    # The context's last token predicts each ending's first token, so each ending's document starts with it.
    # Like lm-evaluation-harness: with a start token if the tokenizer adds it, or if the context is empty
    start = [tokenizer.document_start_id]
    context = start * (tokenizer.adds_start and context_ids[:1] != start or not context_ids) + context_ids
    prefix, heads = context[:-1], [context[-1:]] * len(endings)
    if is_cut := len(context) + longest - 1 > max_seq_len:
        # Each ending keeps as much context as fits, so there is no shared prefix.
        prefix, heads = [], [context[-(max_seq_len + 1 - len(ending)):] for ending in endings]

    # The row: the shared prefix, then the endings
    tokens, targets, documents = list(prefix), [IGNORE_INDEX] * len(prefix), [SHARED_PREFIX] * len(prefix)
    for number, (head, ending) in enumerate(zip(heads, endings), start=SHARED_PREFIX + 1):
        tokens += head + ending[:-1]
        targets += [IGNORE_INDEX] * (len(head) - 1) + ending
        documents += [number] * (len(head) + len(ending) - 1)
    as_int32 = (torch.tensor(values, dtype=torch.int32) for values in (tokens, documents, targets))
    return Task(*as_int32, [*map(len, endings)], [*map(len, different)], label, is_cut)


def batches_of(tasks: Sequence[Task], batch_tokens: int) -> list[list[int]]:
    """Group task indices, longest first, into batches of one task or at most `batch_tokens` padded tokens."""
    lengths = [len(task.tokens_T) for task in tasks]
    batches: list[list[int]] = []
    for index in sorted(range(len(tasks)), key=lengths.__getitem__, reverse=True):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def ending_logprobs(model: Transformer, batch: Sequence[Task], device: torch.device) -> np.ndarray:
    """Return the log-probability of each ending in nats, (B, E) float64, padded with -inf."""
    pad = partial(pad_sequence, batch_first=True)
    tokens_BT = pad([task.tokens_T for task in batch]).long().to(device)
    targets_BT = pad([task.targets_T for task in batch], padding_value=IGNORE_INDEX).long()
    # On the CPU, so that the model can look for a shared prefix without a device sync
    document_ids_BT = pad([task.documents_T for task in batch], padding_value=MOST_ENDINGS + 1)
    is_target_BT = targets_BT != IGNORE_INDEX
    index_M = is_target_BT.flatten().nonzero().flatten().to(device)
    hidden_MD = model(tokens_BT, document_ids_BT=document_ids_BT, target_index_M=index_M, mode="hidden")
    logprob_M = model.logprobs(hidden_MD, targets_BT[is_target_BT].to(device)).cpu().double().numpy()
    lengths = np.array([length for task in batch for length in task.ending_tokens])
    return by_item(np.add.reduceat(logprob_M, lengths.cumsum() - lengths), batch, -np.inf)


def by_item(values: np.ndarray | list, batch: Sequence[Task], fill: float) -> np.ndarray:
    """Reshape a flat list of values per ending to (B, E), padded with `fill`."""
    counts_B = np.array([len(task.ending_tokens) for task in batch])
    values_BE = np.full((len(batch), counts_B.max()), fill)
    values_BE[np.arange(counts_B.max()) < counts_B[:, None]] = values
    return values_BE


def evaluate_batches(model: Transformer, tasks: Sequence[Task], *, rank: int = 0, world_size: int = 1,
                     device: torch.device, batch_tokens: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield one rank's batches: task indices, and (B, 2) bool: whether each answer is correct by
    log-probability, and by log-probability per character. Results do not depend on the number of ranks.

    Every rank yields equally often, so the caller may communicate in between; some results may be empty.
    """
    batches = batches_of(tasks, batch_tokens)
    with evaluation_mode(model):
        for number in range(rank, -(-len(batches) // world_size) * world_size, world_size):
            indices = batches[min(number, len(batches) - 1)]
            batch = [tasks[index] for index in indices]
            logprobs_BE = ending_logprobs(model, batch, device)
            characters_BE = by_item([length for task in batch for length in task.ending_characters], batch, 1)
            correct_B2 = np.stack([scores_BE.argmax(axis=1) == [task.label for task in batch]
                                   for scores_BE in (logprobs_BE, logprobs_BE / characters_BE)], axis=1)
            yield (indices, correct_B2) if number < len(batches) else ([], correct_B2[:0])
