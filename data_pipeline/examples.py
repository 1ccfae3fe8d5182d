"""Tokenize chats, preference pairs and prompts with marks for the loss; open prepared ones.

The tokens of an example are divided into segments. A segment is a uint32 in a second stream beside the
tokens: its length, whether it ends the example, and whether it is a target. The segments of a chat alternate
between context and target; a pair has three: the prompt, which is stored once, and both answers. An unpaired
answer is a pair with the answer of another record in the other's place, which is not a target: second if its
own answer is good. A prompt has two: its tokens, and as a "target" its whole record, for rewards: JSON in
ASCII, one byte per id.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.text import counted
from data_pipeline.chats import Example, read_examples, said_in, with_system
from data_pipeline.shards import HEADER_BYTES, Cache, TokenizerInfo, Tokens, TokenSet, open_token_set
from data_pipeline.templates import ChatFormat, Segments, is_said, is_target, load_chat_format
from data_pipeline.workers import SPLITS, ChunkTokens, DataKind, WorkerSpec, coverage_of, worker_tokenizer

# Part of the key: increase it when tokens or segments of a record change, and earlier sets must be prepared
# again; otherwise increase RULES in prepare.py.
EXAMPLES_VERSION = 6
LENGTH_SHIFT, LAST, TARGET = 2, 2, 1  # bits of a segment
SHOWN_TOKENS, SHOWN_SEGMENTS = 64, 64  # tokens at either end of a segment


def kind_of_examples(kind: str, tokenizer, system_prompt: str) -> DataKind:
    """Return the DataKind of chats, pairs or prompts."""
    chat_format = load_chat_format(tokenizer)
    if kind != "prompts":
        chat_format.check_training()
    tools = chat_format.with_tools
    fields = {"fields": chat_format.fields, "tool_fields": tools.fields if tools else ()}
    return DataKind(kind, partial(read_examples, kind, **fields), tokenize_examples,
                    partial(decode_examples, kind),
                    {"kind": kind, "chat_format_sha256": chat_format.sha256, "system_prompt": system_prompt,
                     "examples_version": EXAMPLES_VERSION})


worker_chat_format = lru_cache(maxsize=1)(load_chat_format)  # of the tokenizer of a worker process


def tokenize_examples(spec: WorkerSpec, examples: Sequence[Example]) -> ChunkTokens:
    """Return the examples of each split as flat arrays of ids and segments, and the rejected ones."""
    chat_format = worker_chat_format(worker_tokenizer(spec))
    coverage, lost = coverage_of(chat_format.tokenizer), Counter()
    accepted: dict[str, list[Segments]] = {split: [] for split in (*SPLITS, "")}
    refused, keys = [], [spec.key_of(example) for example in examples]
    for number, example in enumerate(examples):
        try:
            messages = with_system(example.messages, spec.options.system_prompt)
            options = example.options
            if example.label is not None:
                # With another prompt, or if all are for one prompt, with another answer.
                other = _next_other(keys, number)
                if other is None:
                    other = _next_other([each.answers for each in examples], number)
                if other is None:
                    raise DataError("no record near it has another prompt or another answer to compare with")
                other = examples[other]
                pair = [(chat_format.encode_answer(messages, each.answers[0], options), each is example)
                        for each in ((example, other) if example.label else (other, example))]
                segments = [(chat_format.encode_prompt(messages, options), False), *pair]
            elif example.answers:
                chosen, rejected = (chat_format.encode_answer(messages, answer, options)
                                    for answer in example.answers)
                if chosen == rejected:
                    raise DataError("chosen and rejected have the same tokens")
                segments = [(chat_format.encode_prompt(messages, options), False), (chosen, True),
                            (rejected, True)]
            elif example.record:
                segments = [(chat_format.encode_prompt(messages, options), False),
                            ([*example.record.encode()], True)]
            else:
                segments = chat_format.encode_chat(messages, options)
            targets = example.answers or [*filter(is_target, example.messages)] * (not example.record)
            if missing := coverage.lost(chain(*map(said_in, targets))).keys() - {*"\n\r\t"}:
                raise DataError(f"its answer has {max(missing)!r}, which is not in the vocabulary, so it "
                                "would be lost or unknown; use another tokenizer")
        except DataError as error:
            refused.append((example.where, str(error)))
            continue
        checked = segments if example.label is None else [segments[0], segments[1 if example.label else 2]]
        if not example.record and (fault := _label_fault(example, checked, chat_format.of(options))):
            raise DataError(f"{example.where}: its labels are wrong, and a model would learn them: {fault}; "
                            "use another chat template or tokenizer")
        lost.update(coverage.lost(chain(*map(said_in, messages))))
        accepted[spec.split_of(example)].append(segments)

    # Convert them to ids and segments.
    splits, reserved = {}, len(accepted.pop(""))
    for split, encoded in accepted.items():
        ids = list(chain.from_iterable(segment for segments in encoded for segment, _ in segments))
        flags = [len(segment) << LENGTH_SHIFT | LAST * (number == len(segments)) | TARGET * is_target
                 for segments in encoded for number, (segment, is_target) in enumerate(segments, 1)]
        targets = sum(len(segment) for segments in encoded for segment, is_target in segments if is_target)
        splits[split] = Tokens(np.array(ids, spec.dtype), len(encoded), np.array(flags, "uint32"), targets)
    return ChunkTokens(splits, refused, reserved=reserved, lost=lost)


def _next_other(values: Sequence[Any], start: int) -> int | None:
    """Return the index of the first other value from half a list away on; None if all are equal."""
    indices = ((start + len(values) // 2 + step) % len(values) for step in range(len(values)))
    return next((index for index in indices if values[index] != values[start]), None)


def _label_fault(example: Example, segments: Segments, chat_format: ChatFormat) -> str | None:
    """Describe the fault of an example's labels; None if they are right.

    Targets must decode to the answers in order, each after some context, with its end of turn as its only
    control token.
    """
    tokenizer, is_marked = chat_format.tokenizer, chat_format.is_marked and not example.answers
    answers = example.answers or [*filter(is_target, example.messages)]
    # There must be as many targets as answers, each after some context.
    targets = [ids for ids, is_target in segments if is_target]
    if len(targets) != len(answers):
        return f"{counted(len(targets), 'run')} of targets for {counted(len(answers), 'answer')}"
    if segments[0][1] or not all(ids for ids, _ in segments):
        return "a target has no token before it"
    if not segments[-1][1]:
        return "the last tokens are not targets"
    # Each target must consist of its answer and the end of turn; marked ones may have more around them.
    specials = frozenset(tokenizer.special_ids.values())
    for ids, answer in zip(targets, answers):
        ends = [token for token in ids if token in specials] if is_marked else ids
        if ends[-1:] != [chat_format.end_of_turn_id]:
            return f"the end of the turn is not a target after {answer['content'][-40:]!r}"
        if not is_marked and not specials.isdisjoint(ids[:-1]):
            return f"a control token is a target within {tokenizer.decode(ids)[:80]!r}"
        words = tokenizer.decode(ids if is_marked else ids[:-1])
        # Some tokenizers normalize text. What else they change, a model would learn.
        normalized = {name: coverage_of(tokenizer).normalize(text) if name in ("content", "reasoning_content")
                      else text for name, text in answer.items()}
        if not is_said(words, answer, is_marked) and not is_said(words, normalized, is_marked):
            return f"the targets are {words[:80]!r}, the answer {answer['content'][:80]!r}"
    return None


def show_segment(ids: Sequence[int], is_target: bool, tokenizer) -> str:
    """Return the text of a segment, without the middle of long ones, and with ⟦ ⟧ around targets."""
    words = tokenizer.decode(ids)
    if (hidden := len(ids) - 2 * SHOWN_TOKENS) > 0:
        ends = [tokenizer.decode(end) for end in (ids[:SHOWN_TOKENS], ids[-SHOWN_TOKENS:])]
        words = f" [... {counted(hidden, 'token')} ...] ".join(ends)
    return f"⟦{words}⟧" if is_target else words


def decode_examples(kind: str, folder: Path, splits: dict, tokenizer, dtype: str) -> list[str]:
    """Return the first three training examples, decoded from the shards, with ⟦ ⟧ around targets."""
    def first_ids(shards: list[dict], dtype: str, count: int) -> list[int]:
        path = folder / shards[0]["file"]
        return np.fromfile(path, np.dtype(dtype).newbyteorder("<"), count, offset=HEADER_BYTES).tolist()

    flags = first_ids(splits["train"]["segments"]["shards"], "uint32", SHOWN_SEGMENTS)
    ids = first_ids(splits["train"]["shards"], dtype, sum(flag >> LENGTH_SHIFT for flag in flags))
    texts, segments, start = [], [], 0
    for flag in flags:
        length, is_target = flag >> LENGTH_SHIFT, bool(flag & TARGET)
        segment, start = ids[start:start + length], start + length
        if kind == "prompts" and is_target:
            segments.append(f"\nrecord: {bytes(segment).decode()}")
        else:
            segments.append(show_segment(segment, is_target, tokenizer))
        if flag & LAST and kind == "pairs":
            is_good, is_bad = (answer.startswith("⟦") for answer in segments[1:])
            names = (("chosen", "rejected") if is_good and is_bad else
                     ("good", "of another prompt") if is_good else ("of another prompt", "bad"))
            segments[1:] = [f"\n{name}: {answer}" for name, answer in zip(names, segments[1:])]
        if flag & LAST:
            texts.append("".join(segments))
            segments = []
    return (texts or ["".join(segments) + " ..."])[:3]


def describe_lengths(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return how many training examples of prepared chats or pairs each MAX_SEQ_LEN keeps whole."""
    tokenizer = TokenizerInfo(manifest["vocab_size"], None, manifest["document_start_id"])
    examples, sizes = open_example_set(folder, "train", manifest["kind"], tokenizer, "never"), [256]
    lengths = np.diff(examples.starts)
    if examples.kind == "pairs":  # the prompt with the longer answer
        lengths = lengths - (examples.segments >> LENGTH_SHIFT).reshape(-1, 3)[:, 1:].min(axis=1)
    while lengths.max() - 1 > sizes[-1]:
        sizes.append(2 * sizes[-1])
    first, *more = (f"{size} keeps {int((lengths - 1 <= size).sum()):,}" for size in sizes)
    return ", ".join([f"MAX_SEQ_LEN={first} of {len(lengths):,} {examples.kind} whole", *more])


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """One split of prepared chats, pairs or prompts: their tokens, and the segments of each example."""

    path: Path
    kind: str  # "chats", "pairs" or "prompts"
    tokens: TokenSet | None  # None while they are being prepared
    segments: np.ndarray  # uint32, of all examples
    fingerprint: str  # hash of tokens and segments, the same on every rank
    starts: np.ndarray  # int64 (examples + 1,), in tokens
    segment_starts: np.ndarray  # int64 (examples + 1,), in segments
    first_targets: np.ndarray  # int32 (examples,): tokens before the first target; the prompt of a pair
    labels: np.ndarray | None = None  # int8 (examples,), of unpaired answers: 1 = good, -1 = bad

    def __len__(self) -> int:
        return len(self.first_targets)

    @property
    def content(self) -> str:
        """What its examples are called."""
        return self.kind if self.labels is None else "rated answers"

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.starts[example:example + 2].tolist()
        first, last = self.segment_starts[example:example + 2].tolist()
        return self.tokens.read(start, end - start), self.segments[first:last]

    def part(self, first: int, last: int) -> "ExampleSet":
        """Return the examples from `first` up to `last`, without `last`."""
        ends = self.segment_starts[first:last + 1]
        return replace(self, segments=self.segments[ends[0]:ends[-1]], starts=self.starts[first:last + 1],
                       segment_starts=ends - ends[0], first_targets=self.first_targets[first:last],
                       labels=None if self.labels is None else self.labels[first:last])


def open_example_set(path: str | Path, split: str, kind: str, tokenizer: TokenizerInfo,
                     verify: str = "auto", cache: Cache = Cache()) -> ExampleSet:
    """Open one split of prepared "chats", "pairs" or "prompts"; `open_token_set` opens documents."""
    tokens = open_token_set(path, split, tokenizer, kind=kind, verify=verify, cache=cache)
    fingerprint = hashlib.sha256((tokens.fingerprint + tokens.segments.fingerprint).encode()).hexdigest()
    segments = np.concatenate([*tokens.segments.blocks()])
    examples = examples_of(path, split, kind, segments)
    if examples.starts[-1] != tokens.tokens:
        raise DataError(f"{path}: the {split} segments are {examples.starts[-1]:,} tokens long in total, but "
                        f"the shards have {tokens.tokens:,}; prepare the data again")
    return replace(examples, tokens=tokens, fingerprint=fingerprint)


def examples_of(path: str | Path, split: str, kind: str, segments: np.ndarray, start: int = 0) -> ExampleSet:
    """Return the examples that have these segments, from token `start` of a split on; without the tokens."""
    # Find the segments of each example.
    ends = np.flatnonzero(segments & LAST) + 1
    if not len(ends) or ends[-1] < len(segments):
        raise DataError(f"{path}: {split} example {len(ends):,} has no end; prepare the data again")
    segment_starts = np.concatenate([[0], ends])
    firsts, counts = segment_starts[:-1], np.diff(segment_starts)
    # A pair has three segments: prompt, chosen, rejected. If unpaired, one of the answers is not a target.
    # A chat has a target. Neither begins with a target.
    lengths, is_target = segments >> LENGTH_SHIFT, (segments & TARGET).astype(bool)
    targets = np.add.reduceat(is_target, firsts, dtype=np.int64)
    valid = (targets > 0) & ((counts == 3) | (kind != "pairs"))
    valid &= ~is_target[firsts] & (np.minimum.reduceat(lengths, firsts) > 0)
    if not valid.all():
        raise DataError(f"{path}: {split} example {int(valid.argmin()):,} does not have the segments of "
                        f"{kind}; prepare the data again")
    # Find the tokens of each example, and its first target.
    borders = np.concatenate([[start], start + np.cumsum(lengths, dtype=np.int64)])
    starts = borders[segment_starts]
    first_targets = np.minimum.reduceat(np.where(is_target, borders[:-1], borders[-1]), firsts) - starts[:-1]
    labels = None
    if kind == "pairs":
        first_targets = lengths[firsts]
        if (targets == 1).any():
            labels = np.where(is_target[firsts + 1], 1, -1).astype(np.int8)
            if (targets == 2).any():
                raise DataError(f"{path}: {split} has pairs and unpaired answers; prepare them separately")
    return ExampleSet(Path(path), kind, None, segments, "", starts, segment_starts,
                      first_targets.astype(np.int32), labels)
