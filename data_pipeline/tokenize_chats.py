"""Chats and preference pairs become prepared examples: tokens, and the segments of them that are learned from.

An example is a run of tokens, cut into segments. A segment is one uint32 in a stream of its own, beside the tokens':
`length << 2 | last << 1 | target`. A chat's segments alternate between what is read and what is learned; a pair has three, the
prompt, which is stored once, and the two answers.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError, SettingsError
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
from data_pipeline.mixes import Mix, mix_of
from data_pipeline.prepare import SPLITS, Encoding, Kind, Tokenized, prepare, split_of, worker_tokenizer
from data_pipeline.shard_reader import HEADER_BYTES
from data_pipeline.shard_writer import Tokens
from data_pipeline.sources import Source, source_of
from tokenizer import load_tokenizer

# Part of the cache key: raise it when the same record would give other tokens or segments, or fall into another split.
EXAMPLES_VERSION = 2
READERS = {"chats": read_chats, "pairs": read_pairs}
SHORTCUTS = {"chats": CHAT_SHORTCUTS, "pairs": PAIR_SHORTCUTS}
SHOWN_TOKENS = 64  # at either end of a segment
SHOWN_SEGMENTS = 64


class Recipe(NamedTuple):
    """What decides an example's tokens besides the tokenizer."""

    kind: str
    chat_format_sha256: str
    system_prompt: str


def prepare_examples(kind: str, source: str | Source | Mix, tokenizer_path: str, tokenizer_backend: str,
                     output_dir: str | Path, *, system_prompt: str, shard_tokens: int, validation_fraction: float,
                     workers: int = 0, max_documents: int = 0, on_bad_record: str = "fail", **options) -> Path:
    """Prepare a set of chats or pairs, or find that it was prepared before; returns its folder.

    Args:
        kind: "chats" or "pairs".
        system_prompt: put before examples that have no system message; "" = nothing is.
        validation_fraction: share of prompts whose examples are held out, chosen by `split_key`.
        max_documents: the first so many examples only; 0 = all.
        Others: as `data_preparation_utils.prepare_pretrain`.
    Raises:
        DataError: a source, record, tokenizer or chat template cannot be used, or the disk refuses.
        SettingsError: a number is out of range.
    """
    if isinstance(source, str):
        source = source_of(source, SHORTCUTS[kind])
    for part in mix_of(source).sources:
        if (part.column, part.documents) != (Source.column, Source.documents):
            raise SettingsError(f"{part.path or part.name}: column and documents go with text for pretraining; leave them out")
    tokenizer = load_tokenizer(tokenizer_path, tokenizer_backend)
    recipe = Recipe(kind, load_chat_format(tokenizer).sha256, system_prompt)
    examples = Kind(kind, READERS[kind], characters_of, partial(tokenize_examples, recipe), decoded_examples,
                    {**recipe._asdict(), "examples_version": EXAMPLES_VERSION})
    return prepare(examples, source, tokenizer, tokenizer_path, tokenizer_backend, output_dir, shard_tokens=shard_tokens,
                   validation_fraction=validation_fraction, workers=workers, max_documents=max_documents,
                   on_bad_record=on_bad_record, **options)


def characters_of(example: Chat | Pair) -> int:
    """The number of characters that are said in an example."""
    if isinstance(example, Chat):
        return sum(len(message["content"]) for message in example.messages)
    return sum(len(message["content"]) for message in example.prompt) + len(example.chosen) + len(example.rejected)


def split_key(example: Chat | Pair) -> str:
    """What decides the split of an example: the user's first message, in the form in which texts compare equal.

    All chats and pairs that begin with the same request fall on one side, so that no answer to what is held out is ever
    learned, in neither stage. Answers and later turns have no say in it; nor has a system message, which may come from
    SYSTEM_PROMPT and would part the same request. White space, letter case and Unicode's ways to write a character have none
    because formats and tokenizers strip, lower and normalise: what gives the same tokens must give the same key.
    """
    messages = example.messages if isinstance(example, Chat) else example.prompt
    asked = next(message["content"] for message in messages if message["role"] == "user")
    return " ".join(unicodedata.normalize("NFKC", asked).casefold().split())


@lru_cache(maxsize=1)
def worker_chat_format(encoding: Encoding, sha256: str) -> ChatFormat | TemplateFormat:
    """The chat format of a worker process, made once."""
    chat_format = load_chat_format(worker_tokenizer(encoding))
    if chat_format.sha256 != sha256:
        raise DataError(f"{encoding.tokenizer_path}: its chat template changed while it was used; start again")
    return chat_format


def tokenize_examples(recipe: Recipe, encoding: Encoding, examples: Sequence[Chat | Pair]) -> Tokenized:
    """The examples of each split as one flat array of ids and one of segments, in order; those that the format refuses apart.

    Raises:
        DataError: an example's labels are wrong, which no record is to blame for.
    """
    chat_format = worker_chat_format(encoding, recipe.chat_format_sha256)
    kept: dict[str, list[Segments]] = {split: [] for split in SPLITS}
    refused = []
    for example in examples:
        try:
            segments = segments_of(example, chat_format, recipe.system_prompt)
        except DataError as error:
            refused.append((example.where, str(error)))
            continue
        if fault := label_fault(example, segments, chat_format):
            raise DataError(f"{example.where}: its labels are wrong, and so would be what is learned from it: {fault}; "
                            "use another chat template or tokenizer")
        kept[split_of(split_key(example), encoding.validation_fraction)].append(segments)
    return Tokenized({split: flattened(chosen, encoding.dtype) for split, chosen in kept.items()}, refused)


def segments_of(example: Chat | Pair, chat_format: ChatFormat | TemplateFormat, system_prompt: str) -> Segments:
    """An example's ids, cut into what is read (False) and what is learned (True).

    Raises:
        DataError: the format cannot write it.
    """
    if isinstance(example, Chat):
        return chat_format.encode_chat(with_system(example.messages, system_prompt))
    prompt = with_system(example.prompt, system_prompt)
    chosen, rejected = (chat_format.encode_answer(prompt, answer) for answer in (example.chosen, example.rejected))
    if chosen == rejected:
        raise DataError("chosen and rejected have the same tokens")
    return [(chat_format.encode_prompt(prompt), False), (chosen, True), (rejected, True)]


def label_fault(example: Chat | Pair, segments: Segments, chat_format: ChatFormat | TemplateFormat) -> str | None:
    """What is wrong with an example's labels, None where they are right.

    Right is: the targets, decoded, are the assistant's words in their order, each with its end of turn and with no other control
    token, and something that is only read comes before them.
    """
    tokenizer = chat_format.tokenizer
    if isinstance(example, Chat):
        answers = [message["content"] for message in example.messages if message["role"] == "assistant"]
    else:
        answers = [example.chosen, example.rejected]
    targets = [ids for ids, is_target in segments if is_target]
    if len(targets) != len(answers):
        return f"{len(targets)} runs of targets for {len(answers)} answers"
    if segments[0][1] or not all(ids for ids, _ in segments):
        return "nothing comes before a target"
    if not segments[-1][1]:
        return "the last tokens are no targets"
    specials = frozenset(tokenizer.special_ids.values())
    for ids, answer in zip(targets, answers):
        if ids[-1] != chat_format.end_of_turn_id:
            return f"the end of the turn is no target behind {answer[-40:]!r}"
        if not specials.isdisjoint(ids[:-1]):
            return f"a control token is a target within {tokenizer.decode(ids)[:80]!r}"
        words = tokenizer.decode(ids[:-1]).strip()
        # Some tokenizers normalise text, so that its ids decode to something else.
        if words != answer.strip() and words != tokenizer.decode(tokenizer.encode(answer.strip())).strip():
            return f"the targets are {words[:80]!r}, the answer {answer[:80]!r}"
    return None


def flattened(examples: Sequence[Segments], dtype: str) -> Tokens:
    """Examples one after the other, as they are written."""
    ids = list(chain.from_iterable(part for segments in examples for part, _ in segments))
    flags = [len(part) << 2 | (number == len(segments)) << 1 | is_target
             for segments in examples for number, (part, is_target) in enumerate(segments, 1)]
    targets = sum(len(part) for segments in examples for part, is_target in segments if is_target)
    return Tokens(np.array(ids, dtype), len(examples), np.array(flags, "uint32"), targets)


def decoded_examples(folder: Path, splits: dict, tokenizer, dtype: str) -> list[str]:
    """The first three training examples, decoded from what was written, with ⟦ ⟧ around what is learned from."""
    train = splits["train"]
    flags = first_ids(folder / train["segments"]["shards"][0]["file"], "uint32", SHOWN_SEGMENTS)
    ids = first_ids(folder / train["shards"][0]["file"], dtype, sum(flag >> 2 for flag in flags))
    texts, text, start = [], "", 0
    for flag in flags:
        segment, start = ids[start:start + (flag >> 2)], start + (flag >> 2)
        words = abbreviated(segment, tokenizer)
        text += f"⟦{words}⟧" if flag & 1 else words
        if flag & 2:
            texts.append(text)
            text = ""
    return (texts or [text + " ..."])[:3]


def first_ids(path: Path, dtype: str, count: int) -> list[int]:
    """The first ids of a shard."""
    return np.fromfile(path, np.dtype(dtype).newbyteorder("<"), count=count, offset=HEADER_BYTES).tolist()


def abbreviated(ids: Sequence[int], tokenizer) -> str:
    """The text of some tokens, of a long run both ends."""
    if len(ids) <= 2 * SHOWN_TOKENS:
        return tokenizer.decode(ids)
    return f"{tokenizer.decode(ids[:SHOWN_TOKENS])} [... {len(ids) - 2 * SHOWN_TOKENS:,} tokens ...] " + tokenizer.decode(
        ids[-SHOWN_TOKENS:])
