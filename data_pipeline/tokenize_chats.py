"""Tokenizes chats and preference pairs: their ids, and the segments of them that have a loss.

An example is a run of tokens that is cut into segments. A segment is one uint32 in a second stream beside the
tokens: `length << 2 | last << 1 | target`. The segments of a chat alternate between context and target; a
pair has three: the prompt, which is stored once, and the two answers.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain, cycle
from pathlib import Path

import numpy as np

from common.errors import DataError
from data_pipeline.chat_records import (
    CHAT_SHORTCUTS,
    PAIR_SHORTCUTS,
    Chat,
    Pair,
    read_chats,
    read_pairs,
    with_system,
)
from data_pipeline.chat_templates import ChatFormat, Segments, TemplateFormat, load_chat_format
from data_pipeline.prepare import SPLITS, Encoding, Kind, Tokenized, split_of, worker_tokenizer
from data_pipeline.shard_reader import HEADER_BYTES
from data_pipeline.shard_writer import Tokens

# Part of the key: raise it when the same record would give other tokens or segments, or another split.
EXAMPLES_VERSION = 2
READERS = {"chats": read_chats, "pairs": read_pairs}
SHORTCUTS = {"chats": CHAT_SHORTCUTS, "pairs": PAIR_SHORTCUTS}
SHOWN_TOKENS = 64  # at either end of a segment
SHOWN_SEGMENTS = 64


def kind_of_examples(kind: str, tokenizer, system_prompt: str) -> Kind:
    """Return what `prepare` needs to know of chats or pairs.

    Raises:
        DataError: the tokenizer has no chat format.
    """
    sha256 = load_chat_format(tokenizer).sha256
    tokenize, decode = partial(tokenize_examples, sha256), partial(decode_examples, kind)
    return Kind(kind, READERS[kind], count_characters, text_of, tokenize, decode,
                {"kind": kind, "chat_format_sha256": sha256, "system_prompt": system_prompt,
                 "examples_version": EXAMPLES_VERSION})


def count_characters(example: Chat | Pair) -> int:
    """Return the number of characters in an example's messages."""
    if isinstance(example, Chat):
        return sum(len(message["content"]) for message in example.messages)
    prompt = sum(len(message["content"]) for message in example.prompt)
    return prompt + len(example.chosen) + len(example.rejected)


def text_of(example: Chat | Pair) -> str:
    """Return all messages of an example as one text."""
    if isinstance(example, Chat):
        return "\n".join(message["content"] for message in example.messages)
    prompt = [message["content"] for message in example.prompt]
    return "\n".join([*prompt, example.chosen, example.rejected])


def split_key(example: Chat | Pair) -> str:
    """Return the text that decides the split of an example: the user's first message, normalized.

    So all chats and pairs that begin with the same request are in one split, and no stage trains on an answer
    to a held-out request. A system message does not count, because SYSTEM_PROMPT may have added it. White
    space, letter case and Unicode forms do not count, because chat formats and tokenizers may remove them:
    what gives the same tokens must give the same key.
    """
    messages = example.messages if isinstance(example, Chat) else example.prompt
    request = next(message["content"] for message in messages if message["role"] == "user")
    return " ".join(unicodedata.normalize("NFKC", request).casefold().split())


@lru_cache(maxsize=1)
def worker_chat_format(encoding: Encoding, sha256: str) -> ChatFormat | TemplateFormat:
    """Return the chat format of a worker process, made once."""
    chat_format = load_chat_format(worker_tokenizer(encoding))
    if chat_format.sha256 != sha256:
        raise DataError(f"{encoding.options.tokenizer_path}: its chat template changed while it was used; "
                        "start again")
    return chat_format


def tokenize_examples(format_sha256: str, encoding: Encoding, examples: Sequence[Chat | Pair]) -> Tokenized:
    """Return the examples of each split as flat arrays of ids and segments, and the refused examples.

    Raises:
        DataError: the labels of an example are wrong, which is not the record's fault.
    """
    chat_format = worker_chat_format(encoding, format_sha256)
    kept: dict[str, list[Segments]] = {split: [] for split in SPLITS}
    refused = []
    for example in examples:
        try:
            segments = segments_of(example, chat_format, encoding.options.system_prompt)
        except DataError as error:
            refused.append((example.where, str(error)))
            continue
        if fault := label_fault(example, segments, chat_format):
            raise DataError(f"{example.where}: its labels are wrong, and a model would learn them: {fault}; "
                            "use another chat template or tokenizer")
        kept[split_of(split_key(example), encoding.options.validation_fraction)].append(segments)
    return Tokenized({split: flatten(chosen, encoding.dtype) for split, chosen in kept.items()}, refused)


def segments_of(example: Chat | Pair, chat_format: ChatFormat | TemplateFormat,
                system_prompt: str) -> Segments:
    """Return an example's ids as segments: (ids, whether they are targets).

    Raises:
        DataError: the format cannot write the example.
    """
    if isinstance(example, Chat):
        return chat_format.encode_chat(with_system(example.messages, system_prompt))
    prompt = with_system(example.prompt, system_prompt)
    chosen = chat_format.encode_answer(prompt, example.chosen)
    rejected = chat_format.encode_answer(prompt, example.rejected)
    if chosen == rejected:
        raise DataError("chosen and rejected have the same tokens")
    return [(chat_format.encode_prompt(prompt), False), (chosen, True), (rejected, True)]


def label_fault(example: Chat | Pair, segments: Segments,
                chat_format: ChatFormat | TemplateFormat) -> str | None:
    """Return what is wrong with an example's labels, or None if they are right.

    They are right if the targets, decoded, are the assistant's answers in order, each with its end of turn
    and no other control token, and if context comes before them.
    """
    tokenizer = chat_format.tokenizer
    if isinstance(example, Chat):
        answers = [message["content"] for message in example.messages if message["role"] == "assistant"]
    else:
        answers = [example.chosen, example.rejected]
    # As many targets as answers, each after some context.
    targets = [ids for ids, is_target in segments if is_target]
    if len(targets) != len(answers):
        return f"{len(targets)} runs of targets for {len(answers)} answers"
    if segments[0][1] or not all(ids for ids, _ in segments):
        return "nothing comes before a target"
    if not segments[-1][1]:
        return "the last tokens are not targets"
    # Each target is the words of its answer and the end of turn, nothing else.
    specials = frozenset(tokenizer.special_ids.values())
    for ids, answer in zip(targets, answers):
        if ids[-1] != chat_format.end_of_turn_id:
            return f"the end of the turn is not a target after {answer[-40:]!r}"
        if not specials.isdisjoint(ids[:-1]):
            return f"a control token is a target within {tokenizer.decode(ids)[:80]!r}"
        words = tokenizer.decode(ids[:-1]).strip()
        # Some tokenizers normalize text, so that its ids decode to something else.
        if words != answer.strip() and words != tokenizer.decode(tokenizer.encode(answer.strip())).strip():
            return f"the targets are {words[:80]!r}, the answer {answer[:80]!r}"
    return None


def flatten(examples: Sequence[Segments], dtype: str) -> Tokens:
    """Return consecutive examples as they are written."""
    ids = list(chain.from_iterable(part for segments in examples for part, _ in segments))
    flags = [len(part) << 2 | (number == len(segments)) << 1 | is_target
             for segments in examples for number, (part, is_target) in enumerate(segments, 1)]
    targets = sum(len(part) for segments in examples for part, is_target in segments if is_target)
    return Tokens(np.array(ids, dtype), len(examples), np.array(flags, "uint32"), targets)


def show_segment(ids: Sequence[int], is_target: bool, tokenizer) -> str:
    """Return the text of a segment, its middle left out if it is long, with ⟦ ⟧ around targets."""
    words = tokenizer.decode(ids)
    if (hidden := len(ids) - 2 * SHOWN_TOKENS) > 0:
        ends = [tokenizer.decode(part) for part in (ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:])]
        words = f" [... {hidden:,} tokens ...] ".join(ends)
    return f"⟦{words}⟧" if is_target else words


def decode_examples(kind: str, folder: Path, splits: dict, tokenizer, dtype: str) -> list[str]:
    """Return the first three training examples, decoded from the shards, with ⟦ ⟧ around their targets.

    The two targets of a pair begin new lines, named chosen and rejected.
    """
    def first_ids(shards: list[dict], dtype: str, count: int) -> list[int]:
        path = folder / shards[0]["file"]
        return np.fromfile(path, np.dtype(dtype).newbyteorder("<"), count, offset=HEADER_BYTES).tolist()

    train = splits["train"]
    flags = first_ids(train["segments"]["shards"], "uint32", SHOWN_SEGMENTS)
    ids = first_ids(train["shards"], dtype, sum(flag >> 2 for flag in flags))
    answers = ("\nchosen: ", "\nrejected: ") if kind == "pairs" else ("", "")
    texts, text, start, names = [], "", 0, cycle(answers)
    for flag in flags:
        segment, start = ids[start:start + (flag >> 2)], start + (flag >> 2)
        text += (next(names) if flag & 1 else "") + show_segment(segment, bool(flag & 1), tokenizer)
        if flag & 2:
            texts.append(text)
            text = ""
    return (texts or [text + " ..."])[:3]
