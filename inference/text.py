"""From text to a prompt and from tokens to text: streams, models with a tokenizer, conversations, files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

from common.errors import DataError
from common.files import plain
from data_pipeline.chats import check_turns, messages_in, text_in, with_system
from data_pipeline.sources import flaw_of
from data_pipeline.templates import ChatFormat, Messages, TemplateFormat, load_chat_format
from model import Transformer
from tokenizer import CHAT_TEMPLATE

# Tokens that are decoded at once. The last four bytes decide how a byte is read in UTF-8, and the first token
# of a text may lose its space: a window of a few tokens gives what the whole text gives.
WINDOW = 16
UNKNOWN = "\ufffd"  # what bytes that are not, or not yet, UTF-8 decode to


class TextStream:
    """Turns new tokens into text, up to the first stop string.

    All pieces together are `tokenizer.decode` of all tokens, cut before the stop string. Text that may still
    change is held back: incomplete UTF-8, and what may begin a stop string. A token's cost does not grow with
    the text.

    Args:
        stop: strings that end the text, which they do not belong to; the first that is complete counts.
        after: the tokens of the text that is continued. Without them some tokenizers take the space off the
            first word.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), after: Sequence[int] = ()):
        assert all(stop), "an empty string would stop everything"
        self._tokenizer, self._stop = tokenizer, stop
        self.stopped = False  # a stop string was found: what follows is dropped
        first = max(0, len(after) - WINDOW // 2)
        while first and after[first] in tokenizer.byte_fallback_ids:
            first -= 1
        self._window = list(after[first:])  # the newest tokens
        self._read = len(tokenizer.decode(self._window))  # the characters of the window's text that are done
        self._held = ""  # which may begin a stop string

    def add(self, token: int) -> str:
        """Return the text that is certain with this token and was not before."""
        self._window.append(int(token))
        # How a run of these decodes depends on its last one.
        if self.stopped or token in self._tokenizer.byte_fallback_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text) - text.endswith(UNKNOWN)
        piece, unread = text[self._read:certain], len(text) - max(certain, self._read)
        if len(self._window) > WINDOW:
            del self._window[:-WINDOW // 2]
            text = self._tokenizer.decode(self._window)
        self._read = len(text) - unread
        return self._until_stop(piece)

    def finish(self) -> str:
        """Return the rest, at the end of the tokens."""
        text = self._until_stop(self._tokenizer.decode(self._window)[self._read:])
        rest, self._held = self._held, ""
        return text + rest

    def _until_stop(self, piece: str) -> str:
        """Return the text before a stop string, without what may begin one."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped, self._held = bool(found), ""
        if found:
            return text[:min(found)[1]]
        held = max((length for stop in self._stop for length in range(1, len(stop))
                    if text.endswith(stop[:length])), default=0)
        self._held = text[len(text) - held:]
        return text[:len(text) - held]


class Prompt(NamedTuple):
    """What a model continues."""

    ids: Sequence[int]
    stop_ids: frozenset[int]  # that end the continuation
    after: Sequence[int] = ()  # the tokens of the text that is continued; none before an answer in a chat


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    ids = [tokenizer.document_start_id, *tokenizer.encode(text)]
    return Prompt(ids, frozenset((tokenizer.eos_id, tokenizer.document_start_id)), ids)


@dataclass
class LanguageModel:
    """A model with its tokenizer."""

    name: str  # as the user named it
    model: Transformer
    tokenizer: Any
    context_length: int  # in tokens, that it was trained on
    pretrained_only: bool = False  # it has seen no chats, whatever template its tokenizer has
    prompts: Sequence[str] = ()  # a few from its training data, to try
    chat_format: Optional[ChatFormat | TemplateFormat] = field(init=False, default=None)
    why_no_chat: str = field(init=False, default="")  # why it only continues texts

    def __post_init__(self):
        if self.pretrained_only:
            self.why_no_chat = "it was only pretrained, not trained on chats"
        # Llama 3's format would fit the tokenizer of its base model too, which has no template.
        elif getattr(self.tokenizer, "chat_template", CHAT_TEMPLATE) is None:
            self.why_no_chat = "its tokenizer has no chat template"
        else:
            try:
                self.chat_format = load_chat_format(self.tokenizer)
            except DataError as error:
                self.why_no_chat = str(error)

    def text_prompt(self, text: str) -> Prompt:
        return text_prompt(self.tokenizer, text)

    def chat_prompt(self, messages: Messages) -> Prompt:
        if self.chat_format is None:
            raise DataError(f"{self.name} cannot chat, it continues text: {self.why_no_chat}")
        return Prompt(self.chat_format.encode_prompt(messages), self.chat_format.stop_ids)


@dataclass
class Turn:
    """What the user wrote, and what the model answered."""

    words: str
    answer: str = ""  # a turn without one is left out of what follows
    ended: bool = False  # by the model; not by a limit, a stop string or the user


@dataclass
class Conversation:
    """Turns with a model.

    A model that answers no chats continues one text, to which both write in turns. Where the model ends it,
    the next turn begins a new one.
    """

    model: LanguageModel
    system: str = ""  # the system prompt, of a model that answers chats
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0  # for which the context has no room: the oldest turns, or tokens of a text

    def prompt(self, room: int) -> Prompt:
        """Return what the model continues to answer the last turn.

        The oldest turns are left out, but not the system prompt, until the prompt and `room` new tokens fit
        into the context; of a text, its beginning.
        """
        most, last = self.model.context_length - room, len(self.turns) - 1
        if self.model.chat_format is None:
            ids, stop_ids, _ = self.model.text_prompt(self._texts()[-1])
            self.left_out = max(0, len(ids) - most)
            ids = [*ids[:1], *ids[1 + self.left_out:]]
            return Prompt(ids, stop_ids, ids)
        self.left_out = min(self.left_out, last)
        while True:
            prompt = self.model.chat_prompt(self._messages(self.turns[self.left_out:]))
            if len(prompt.ids) <= most:
                return prompt
            if self.left_out == last:
                raise DataError(f"that is too long: {len(prompt.ids):,} tokens with the system prompt and "
                                f"the chat's format; the context has room for {most:,} and an answer")
            self.left_out += 1

    def records(self) -> list[dict[str, Any]]:
        """Return it as records for training: a chat for `load_instruct_dataset.py`, or texts."""
        if self.model.chat_format is None:
            return [{"text": text} for text in self._texts() if text]
        messages = self._messages([turn for turn in self.turns if turn.answer.strip()])
        return [{"messages": messages}] if messages[-1:] and messages[-1]["role"] == "assistant" else []

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            if turn.answer.strip() or turn is turns[-1]:
                messages.append({"role": "user", "content": turn.words})
            if turn.answer.strip():
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _texts(self) -> list[str]:
        texts, ended = [""], False
        for turn in self.turns:
            if ended:
                texts.append("")
            between = " " if texts[-1][-1:].strip() and turn.words[:1].strip() else ""
            texts[-1] += between + turn.words + turn.answer
            ended = turn.ended
        return texts


class FilePrompt(NamedTuple):
    """One line of a file of prompts."""

    where: str  # file:line
    line: int
    content: str | Messages  # a text to continue, or a chat that ends in the user's message


def read_prompts(name: str, chat: bool = False, system_prompt: str = "") -> list[FilePrompt]:
    """Return the prompts of a file, or of stdin if its name is `-`. Empty lines are skipped.

    A .jsonl file, and what begins with `{` on stdin, has a JSON object in each line: {"prompt": text} or
    {"messages": [...]}. Any other file has a text in each line.

    Args:
        chat: a text is the user's message in a separate chat.
        system_prompt: of chats that have none.
    """
    try:
        if name == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(name, "rb", opener=plain) as file:
                content = file.read()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"--prompts {name} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        line = content[:error.start].count(b"\n") + 1
        raise DataError(f"{name}:{line}: is not UTF-8; convert the file") from error
    filled = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise DataError(f"--prompts {name} has no prompts; write one per line")
    is_json = Path(name).suffix == ".jsonl" if name != "-" else filled[0][1].lstrip().startswith("{")
    prompts = []
    for number, line in filled:
        where = f"{'stdin' if name == '-' else name}:{number}"
        try:
            found = _prompt_in(line) if is_json else line
            if chat and isinstance(found, str):
                found = [{"role": "user", "content": text_in("prompt", found)}]
            if not isinstance(found, str):
                found = check_turns(with_system(found, system_prompt), "user")
        except DataError as error:
            raise DataError(f"{where}: {error}; correct the line") from error
        prompts.append(FilePrompt(where, number, found))
    return prompts


def _prompt_in(line: str) -> str | Messages:
    """Return the prompt or the messages of a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise DataError('expected an object with "prompt" or "messages"')
    if "messages" in record:
        return messages_in("messages", record["messages"])
    if flaw := flaw_of(record["prompt"]):
        raise DataError(f"prompt {flaw}")
    return record["prompt"]
