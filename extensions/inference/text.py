"""Text to prompts and tokens to text: streams, models with a tokenizer, conversations, prompt files."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from tokenizers import Tokenizer as Library

from common.errors import DataError, unreadable
from common.files import advice_on_encoding, check_start, plain
from data_pipeline.chats import messages_in, text_in, with_system
from data_pipeline.source_files import Source, format_of
from data_pipeline.sources import Reading, flaw_of, read_records
from data_pipeline.templates import ChatFormat, Messages, Options, encode_rendered, load_chat_format
from extensions.inference.engine import Engine, Request, Sampling, Score
from model import Transformer
from tokenizer import CHAT_TEMPLATE, Tokenizer

# Tokens decoded together. UTF-8 depends on at most four bytes, and the first token of a text may lose its
# space, so a window of a few tokens decodes like the whole text.
WINDOW = 16
UNKNOWN = "\ufffd"  # replaces invalid or incomplete UTF-8


@lru_cache(maxsize=8)
def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens of single bytes, such as `<0x41>`, whose runs decode together, to text or U+FFFD."""
    loaded = None if isinstance(tokenizer, Tokenizer) else Library.from_str(tokenizer.tokenizer_json)
    if not loaded or "ByteFallback" not in repr(loaded.decoder):
        return frozenset()
    return frozenset(number for token, number in loaded.get_vocab().items()
                     if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token))


class TextStream:
    """Decodes a stream of tokens, up to the stop string that is complete first.

    The pieces add up to `tokenizer.decode` of all tokens, cut before the stop string. Text that may still
    change is held back: incomplete UTF-8, and a possible beginning of a stop string. A token always costs
    the same. Without the tokens before the stream, `prefix`, some tokenizers drop the first word's space.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prefix: Sequence[int] = ()):
        assert all(stop), "an empty stop string would end every text"
        self._tokenizer, self._stop = tokenizer, stop
        self.stopped = False  # True after a stop string: later tokens are dropped
        first = max(0, len(prefix) - WINDOW // 2)
        while first and prefix[first] in byte_tokens(tokenizer):
            first -= 1
        self._window = list(prefix[first:])  # the newest tokens
        self._returned = len(tokenizer.decode(self._window))  # characters of the window already returned
        self._held_back = ""  # a possible beginning of a stop string

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        self._window.append(int(token))
        # Byte tokens decode as a group, when the group ends.
        if self.stopped or token in byte_tokens(self._tokenizer):
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text) - text.endswith(UNKNOWN)
        piece, rest = text[self._returned:certain], len(text) - max(certain, self._returned)
        if len(self._window) > WINDOW:
            del self._window[:-WINDOW // 2]
            text = self._tokenizer.decode(self._window)
        self._returned = len(text) - rest
        return self._until_stop(piece)

    def finish(self) -> str:
        text = self._until_stop(self._tokenizer.decode(self._window)[self._returned:])
        rest, self._held_back = self._held_back, ""
        return text + rest

    def _until_stop(self, piece: str) -> str:
        """Return the text before a stop string, and hold back a possible beginning of one."""
        if self.stopped:
            return ""
        text = self._held_back + piece
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped, self._held_back = bool(matches), ""
        if matches:
            return text[:min(matches)[1]]
        partial = max((length for stop in self._stop for length in range(1, len(stop))
                    if text.endswith(stop[:length])), default=0)
        self._held_back = text[len(text) - partial:]
        return text[:len(text) - partial]


class Prompt(NamedTuple):
    """The input of a completion."""

    ids: Sequence[int]
    stop_ids: frozenset[int]  # tokens that end the completion
    prefix: Sequence[int] = ()  # of a text, the tokens that its completion is decoded after; empty for chats


def text_prompt(tokenizer: Any, text: str | Sequence[int], parse_special: bool = False) -> Prompt:
    """Return the prompt of a text, or of its ids.

    Args:
        parse_special: names of control tokens in the text mean these tokens, as in llama.cpp.
    """
    start = tokenizer.document_start_id
    if isinstance(text, str):
        ids = encode_rendered(tokenizer, text)[0] if parse_special else tokenizer.encode(text)
        ids = ids if ids[:1] == [start] else [start, *ids]
    else:
        ids = text
    return Prompt(ids, tokenizer.stop_ids | {start}, ids)


def note_of_controls(tokenizer: Any, texts: Iterable[str], advice: str) -> str:
    """Return a sentence if texts have names of control tokens, which are encoded as text; else ""."""
    names = [*dict.fromkeys(match[0].strip() for text in texts
                            for match in tokenizer.control_pattern.finditer(text))]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} in the prompt is encoded as text, not as a control token{advice}"


class TextChunk(NamedTuple):
    """A piece of a streamed completion."""

    index: int  # position of the prompt
    text: str
    tokens: int  # length of the completion so far
    finish_reason: str | None  # "stop" or "length" in the last chunk, else None
    scores: Sequence[Score] = ()  # log-probabilities of its tokens, if requested


def next_chunk(index: int, request: Request, stream: TextStream) -> TextChunk:
    """Return what the engine's last step added to a request, as text."""
    is_token = request.finish_reason != "stop"
    text = stream.add(request.output_ids[-1]) if is_token else ""
    if request.finish_reason:
        text += stream.finish()
    reason = "stop" if stream.stopped else request.finish_reason
    return TextChunk(index, text, len(request.output_ids), reason, request.scores[-1:] if is_token else ())


@dataclass
class TextGenerator:
    """Streams completions as text."""

    model: Transformer
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()  # stop strings
    batch_size: int = 8  # prompts that run concurrently

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[TextChunk]:
        """Yield the chunks of all completions. The last chunk of each has a finish reason."""
        if not prompts or self.max_new_tokens == 0:
            yield from (TextChunk(index, "", 0, "length") for index in range(len(prompts)))
            return
        length = max(len(prompt.ids) for prompt in prompts) + self.max_new_tokens
        engine = Engine(self.model, min(self.batch_size, len(prompts)), length)
        requests = engine.add_all([prompt[:2] for prompt in prompts], self.max_new_tokens, self.sampling)
        streams = {request: (index, TextStream(self.tokenizer, self.stop, prompts[index].prefix))
                   for index, request in enumerate(requests)}
        while not engine.idle:
            for request in engine.step():
                index, stream = streams[request]
                chunk = next_chunk(index, request, stream)
                if chunk.finish_reason:
                    engine.cancel(request)
                yield chunk


@dataclass
class LanguageModel:
    """A model with its tokenizer."""

    name: str  # as given by the user
    model: Transformer
    tokenizer: Any
    context_length: int  # in tokens, as trained
    pretrained_only: bool = False  # not trained on chats, even if its tokenizer has a chat template
    prompts: Sequence[str] = ()  # examples from its training data
    chat_format: Optional[ChatFormat] = field(init=False, default=None)
    no_chat_reason: str = field(init=False, default="")  # empty if the model can chat

    def __post_init__(self):
        if self.pretrained_only:
            self.no_chat_reason = "it was only pretrained, not trained on chats"
        # The tokenizer of a Llama 3 base model has the chat tokens, but no template.
        elif getattr(self.tokenizer, "chat_template", CHAT_TEMPLATE) is None:
            self.no_chat_reason = "its tokenizer has no chat template"
        else:
            try:
                self.chat_format = load_chat_format(self.tokenizer)
                self.tokenizer = self.chat_format.tokenizer  # its control tokens are also those of texts
            except DataError as error:
                self.no_chat_reason = str(error)

    def text_prompt(self, text: str | Sequence[int], parse_special: bool = False) -> Prompt:
        return text_prompt(self.tokenizer, text, parse_special)

    def chat_prompt(self, messages: Messages, options: Options = None) -> Prompt:
        if self.chat_format is None:
            raise DataError(f"{self.name} cannot chat: {self.no_chat_reason}")
        if "tool_calls" not in self.chat_format.fields and any(
                message["role"] == "tool" or "tool_calls" in message for message in messages):
            raise DataError(f"{self.name} cannot read tool calls: its chat template has none")
        return Prompt(self.chat_format.encode_prompt(messages, options), self.chat_format.stop_ids)


@dataclass
class Turn:
    """A user message and the model's answer."""

    user_text: str
    answer: str = ""  # a turn without an answer is omitted from later prompts
    is_complete: bool = False  # the model ended it, not a limit, a stop string or the user


@dataclass
class Conversation:
    """A chat with a model. With a model that cannot chat, the turns form texts, which the model ends."""

    model: LanguageModel
    system: str = ""  # system prompt; used only if the model can chat
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0  # oldest turns, or tokens of a text, that do not fit into the context

    def prompt(self, room: int) -> Prompt:
        """Return the prompt for the last turn, which leaves room for so many new tokens in the context.

        A chat drops its oldest turns but not its system prompt, and a text drops its beginning.
        """
        most, last = self.model.context_length - room, len(self.turns) - 1
        if self.model.chat_format is None:
            ids, stop_ids, _ = self.model.text_prompt(self._texts()[-1])
            self.dropped = max(0, len(ids) - most)
            ids = [*ids[:1], *ids[1 + self.dropped:]]
            return Prompt(ids, stop_ids, ids)
        self.dropped = min(self.dropped, last)
        while True:
            prompt = self.model.chat_prompt(self._messages(self.turns[self.dropped:]))
            if len(prompt.ids) <= most:
                return prompt
            if self.dropped == last:
                raise DataError(f"the message is too long: {len(prompt.ids):,} tokens with system prompt and "
                                f"chat format; the context has room for {most:,} besides the answer")
            self.dropped += 1

    def records(self) -> list[dict[str, Any]]:
        """Return training records: a chat for `load_instruct_dataset.py`, or texts."""
        if self.model.chat_format is None:
            return [{"text": text} for text in self._texts() if text]
        messages = self._messages([turn for turn in self.turns if turn.answer.strip()])
        return [{"messages": messages}] if messages[-1:] and messages[-1]["role"] == "assistant" else []

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            if turn.answer.strip() or turn is turns[-1]:
                messages.append({"role": "user", "content": turn.user_text})
            if turn.answer.strip():
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _texts(self) -> list[str]:
        texts, ended = [""], False
        for turn in self.turns:
            if ended:
                texts.append("")
            between = " " if texts[-1][-1:].strip() and turn.user_text[:1].strip() else ""
            texts[-1] += between + turn.user_text + turn.answer
            ended = turn.is_complete
        return texts


class FilePrompt(NamedTuple):
    """One line of a file of prompts."""

    where: str  # file:line
    line: int
    content: str | Messages  # a text to continue, or a chat that ends in the user's message


def read_prompts(name: str, chat: bool = False, system_prompt: str = "") -> list[FilePrompt]:
    """Return the prompts of a file, or of stdin if its name is `-`. Empty lines are skipped.

    A .jsonl file, or input on stdin that begins with `{`, has a JSON object per line: {"prompt": text} or
    {"messages": [...]}; other formats of records, such as .json and .csv, have the same columns. Any other
    file has a text per line. With `chat`, each text is a user's message.
    """
    is_table = name != "-" and not name.endswith(".jsonl") and format_of(name)[0] not in (None, "text")
    try:
        if is_table:
            records = read_records(Source(path=name, split="", column=""), Reading(advice="correct the file"))
            filled = ({column: value for column, value in record.items() if value is not None}
                      for _, record in records)
            data = "\n".join(json.dumps(record, default=str) for record in filled).encode()
        elif name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(name, "rb", opener=plain) as file:
                data = file.read()
            check_start(name, data[:4096], is_text=True)
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"--prompts {name} {unreadable(error, 'check the path')}") from error
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
        way = advice_on_encoding(data) or "correct the line"
        raise DataError(f"{name}:{line}: not valid UTF-8; {way}") from error
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {name} has no prompts; write one per line")
    is_json = numbered[0][1].lstrip().startswith("{") if name == "-" else is_table or name.endswith(".jsonl")
    prompts = []
    for number, line in numbered:
        where = f"{'stdin' if name == '-' else name}:{number}"
        try:
            content = _prompt_in(line) if is_json else line
            if chat and isinstance(content, str):
                content = [{"role": "user", "content": text_in("prompt", content)}]
            if not isinstance(content, str):  # the chat template decides which turns it accepts
                content = with_system(content, system_prompt)
                if not content or content[-1]["role"] in ("system", "assistant"):
                    raise DataError(f"ends in the {content[-1]['role']}'s message, expected a user's"
                                    if content else "has no messages")
        except DataError as error:
            raise DataError(f"{where}: {error}; correct the line") from error
        prompts.append(FilePrompt(where, number, content))
    return prompts


def _prompt_in(line: str) -> str | Messages:
    """Return the prompt or the messages in a line of JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise DataError('expected an object with "prompt" or "messages"')
    if "messages" in record:
        return messages_in("messages", record["messages"])
    if flaw := flaw_of(record["prompt"]):
        raise DataError(f"prompt {flaw}")
    return record["prompt"]
