"""Encodes chats: in Llama 3's own format, or with the chat template of a Hugging Face tokenizer.

A chat is a list of {"role", "content"}. Its ids are cut into *segments*, each marked as target or not:
targets are the assistant's answers with the control token that ends the turn.
"""

import hashlib
import json
import re
import resource
import signal
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError
from tokenizer import CHAT_TEMPLATE, HuggingFaceTokenizer, Tokenizer

Messages = Sequence[Mapping[str, str]]
Segments = list[tuple[list[int], bool]]

# Limits of one rendering: seconds of this process's CPU time, memory, and characters, so many times those of
# the chat and so many more.
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10, 1 << 30
TEMPLATE_GROWTH, TEMPLATE_CHARACTERS = 10, 1 << 20
PRIVATE_USE = range(0xE000, 0xF900)
# The first chat for a template: two turns show whether an earlier rendering is the beginning of a later one.
TRIAL = [{"role": role, "content": f"{role} says {number}"}
         for number in (1, 2) for role in ("user", "assistant")]


class ChatFormat:
    """Llama 3's chat format, token for token as Meta's reference; control tokens in messages stay text.

    Source: ChatFormat in github.com/meta-llama/llama3 (llama/tokenizer.py).
    """

    def __init__(self, tokenizer: Tokenizer | HuggingFaceTokenizer):
        needed = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        missing = [name for name in needed if name not in tokenizer.special_ids]
        if missing:
            raise DataError(f"Llama 3's chat format needs {' '.join(missing)}, which the tokenizer lacks; "
                            "set TOKENIZER_PATH to one that has them, or put a chat_template.jinja beside "
                            "the tokenizer.json")
        self.tokenizer = tokenizer
        self.end_of_turn_id = tokenizer.special_ids["<|eot_id|>"]
        self.stop_ids = frozenset((self.end_of_turn_id, tokenizer.eos_id))

    @property
    def sha256(self) -> str:
        """Hex digest of all that decides an id, besides the tokenizer."""
        return hashlib.sha256(b"Llama 3").hexdigest()

    def encode_header(self, role: str) -> list[int]:
        """Return the ids before a message of this role."""
        special = self.tokenizer.special_ids
        return [special["<|start_header_id|>"], *self.tokenizer.encode(role), special["<|end_header_id|>"],
                *self.tokenizer.encode("\n\n")]

    def encode_words(self, content: str) -> list[int]:
        """Return the ids of a message's content, stripped, with the end of turn."""
        return [*self.tokenizer.encode(content.strip()), self.end_of_turn_id]

    def encode_prompt(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a dialog with its bos and a generation prompt: the header of an answer."""
        ids = [self.tokenizer.special_ids["<|begin_of_text|>"]]
        for message in messages:
            ids += [*self.encode_header(message["role"]), *self.encode_words(message["content"])]
        return ids + self.encode_header("assistant") if add_generation_prompt else ids

    def render_prompt(self, messages: Messages) -> Callable[[], list[int]]:
        """Return the function that encodes the prompt, for any thread."""
        return partial(self.encode_prompt, messages)

    def encode_chat(self, messages: Messages) -> Segments:
        """Return the segments of a dialog up to its last answer's end of turn; every second is a target."""
        segments, ids = [], [self.tokenizer.special_ids["<|begin_of_text|>"]]
        for message in messages:
            ids += self.encode_header(message["role"])
            if message["role"] == "assistant":
                segments += [(ids, False), (self.encode_words(message["content"]), True)]
                ids = []
            else:
                ids += self.encode_words(message["content"])
        return segments

    def encode_answer(self, messages: Messages, answer: str) -> list[int]:
        """Return the ids of an answer with its end of turn, as they follow `encode_prompt(messages)`."""
        return self.encode_words(answer)


class TemplateFormat:
    """A Hugging Face chat template, rendered in jinja2's sandbox; control tokens in messages stay text.

    The ids are those of transformers' apply_chat_template, with two exceptions: a control token's name in a
    message is encoded as text; and there is no `strftime_now`, so that the same chats are the same tokens on
    every day (a template with a default date uses that, another cannot be used).
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self.tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[GenerationTag, loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_template_error
        try:
            with limited():
                self._template = environment.from_string(tokenizer.chat_template)
        except Exception as error:  # jinja2 evaluates constants here, so it can be any
            raise DataError(f"the tokenizer's chat template cannot be read: {_reason(error)}; correct its "
                            "chat_template.jinja") from error
        longest_first = sorted(tokenizer.special_tokens, key=lambda token: -len(token["content"]))
        if not longest_first or len(longest_first[-1]["content"]) < 2:
            raise DataError("the chat template cannot be used: its tokenizer needs control tokens, of two "
                            "characters or more")
        self._control = re.compile("|".join(control_pattern(token) for token in longest_first))
        names = "|".join(re.escape(token["content"]) for token in longest_first)
        self._controls_of_neutral_words = lru_cache(maxsize=1024)(self._render_controls)
        self._literal_start = re.compile(f"(?=(?:{names}))(.)", re.DOTALL)
        self.end_of_turn_id = self._find_end_of_turn()
        self.stop_ids = frozenset((self.end_of_turn_id, tokenizer.eos_id))

    def _find_end_of_turn(self) -> int:
        """Return the control token that ends the assistant's turns in a trial chat."""
        self.end_of_turn_id = None
        try:
            ends = {ids[-1] for ids, is_target in self.encode_chat(TRIAL) if is_target}
            if len(ends) > 1:
                raise DataError(f"it ends turns in any of {self.tokenizer.decode(sorted(ends))}")
            if not ends <= {self.tokenizer.eot_id, self.tokenizer.eos_id}:
                # A saved folder takes its stop tokens from there.
                raise DataError(f"it ends the assistant's turns in {self.tokenizer.decode(ends)}; name that "
                                "as eot_token in the tokenizer_config.json beside its tokenizer.json")
        except DataError as error:
            raise DataError(f"the tokenizer's chat template cannot be used for training: {error}; put "
                            "another chat_template.jinja beside its tokenizer.json") from error
        return ends.pop()

    @property
    def sha256(self) -> str:
        """Hex digest of all that decides an id, besides the tokenizer."""
        content = json.dumps([self.tokenizer.chat_template, self.tokenizer.control_tokens])
        return hashlib.sha256(content.encode()).hexdigest()

    def encode_chat(self, messages: Messages) -> Segments:
        """Return the segments of a dialog up to its last answer's end of turn; every second is a target."""
        messages, mark = self._hide_literals(messages)
        rendered, cuts = self._render_words(messages, False), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], True)
                if not rendered.startswith(before):
                    raise DataError("its rendering up to an answer is not how the whole begins, so training "
                                    "and generation would differ")
                cuts += [len(before), self._end_of_answer(rendered, len(before), message["content"])]
        parts = self._encode_parts(rendered[:cuts[-1]] if cuts else "", cuts, mark)
        return [(ids, number % 2 == 1) for number, ids in enumerate(parts[:-1])]

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the ids of a dialog with a generation prompt."""
        return self.render_prompt(messages)()

    def render_prompt(self, messages: Messages) -> Callable[[], list[int]]:
        """Render a dialog with a generation prompt; return the function that encodes it, for any thread."""
        messages, mark = self._hide_literals(messages)
        rendered = self._render_words(messages, True)
        return lambda: self._encode_parts(rendered, [], mark)[0]

    def encode_answer(self, messages: Messages, answer: str) -> list[int]:
        """Return the ids of an answer with its end of turn, as they follow `encode_prompt(messages)`."""
        return self.encode_chat([*messages, {"role": "assistant", "content": answer}])[-1][0]

    def _hide_literals(self, messages: Messages) -> tuple[list[dict[str, str]], str]:
        """Return the messages with a mark in every control token's name, and that unique mark."""
        used = {character for message in messages for text in message.values() for character in text}
        mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if mark is None:
            raise DataError("it has all private-use characters from U+E000 to U+F8FF, but one must be left "
                            "to mark text; leave one out")
        return [{key: self._literal_start.sub(rf"\1{mark}", text) for key, text in message.items()}
                for message in messages], mark

    def _render_words(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the rendering, whose control tokens must be those of neutral words in place of each message.

        A template that rewrites messages (`lower`, `replace`, `split`) can make a control token of text.
        """
        rendered = self._render(messages, add_generation_prompt)
        neutral = tuple((message["role"], "words" if message["content"].strip() else message["content"][:1])
                        for message in messages)
        expected = self._controls_of_neutral_words(neutral, add_generation_prompt)
        found = self._controls_in(rendered)
        if found != expected:
            more, fewer = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
            raise DataError("the chat template rewrites its text so that other control tokens result than "
                            f"from plain words ({' '.join(sorted(more | fewer)) or 'in another order'}); "
                            "leave that text out, or correct the template")
        return rendered

    def _controls_in(self, rendered: str) -> list[str]:
        return [found[0].strip() for found in self._control.finditer(rendered)]

    def _render_controls(self, words: tuple[tuple[str, str], ...], add_generation_prompt: bool) -> list[str]:
        messages = [{"role": role, "content": content} for role, content in words]
        return self._controls_in(self._render(messages, add_generation_prompt))

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        room = TEMPLATE_CHARACTERS + TEMPLATE_GROWTH * sum(len(message["content"]) for message in messages)
        pieces = []
        try:
            with limited():
                for piece in self._template.generate(messages=messages, tools=None, documents=None,
                                                     add_generation_prompt=add_generation_prompt,
                                                     **self.tokenizer.control_tokens):
                    pieces.append(piece)
                    room -= len(piece)
                    if room < 0:
                        raise TemplateError("it writes far more than the chat holds")
        except Exception as error:  # a template raises whatever Python's operators raise
            raise DataError(f"the chat template refuses it: {_reason(error)}") from error
        return "".join(pieces)

    def _end_of_answer(self, rendered: str, start: int, content: str) -> int:
        """Return where the control token ends that follows an answer."""
        found = self._control.search(rendered, start)
        if found is None:
            raise DataError("the chat template ends an answer in no control token, so a model could not "
                            "learn where to stop")
        words = rendered[start:found.start()]
        if words.strip() != content.strip():
            raise DataError("the chat template writes something else than the assistant's words between the "
                            f"header of the answer and the end of the turn: {words[:80]!r}")
        token = self.tokenizer.special_ids[found[0].strip()]
        if self.end_of_turn_id not in (None, token):
            raise DataError(f"the chat template ends this answer in {found[0]}, others in another token")
        return found.end()

    def _encode_parts(self, rendered: str, cuts: Sequence[int], mark: str) -> list[list[int]]:
        """Return the ids of a rendering's parts between ascending cuts: one part more than there are cuts.

        Control tokens separate the text: each stretch between two of them is encoded as a whole, so a cut
        within it must be between two of its tokens.
        """
        parts: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
        start = 0
        for control in (*self._control.finditer(rendered), None):
            end = control.start() if control else len(rendered)
            ids, done = self._encode_text(rendered, start, end, mark), 0
            for part, cut in enumerate(cuts):
                if start < cut < end:
                    head = self._encode_text(rendered, start, cut, mark)
                    if ids[:len(head)] != head:
                        raise DataError(_straddles(rendered, cut))
                    parts[part] += ids[done:len(head)]
                    done = len(head)
                elif control and end < cut < control.end():
                    raise DataError(_straddles(rendered, cut))
            parts[bisect_left(cuts, end)] += ids[done:]
            if control:
                start = control.end()
                parts[bisect_left(cuts, start)].append(self.tokenizer.special_ids[control[0].strip()])
        return parts

    def _encode_text(self, rendered: str, start: int, end: int, mark: str) -> list[int]:
        encode = self.tokenizer.encode_further if start else self.tokenizer.encode
        return encode(rendered[start:end].replace(mark, "")) if start < end else []


class GenerationTag(Extension):
    """`{% generation %}`, with which some templates mark the answers; only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        """Return the enclosed statements."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time (in the main thread) and memory (on Linux) of the `with` block, which runs a template.
    """
    def stop(*_) -> None:
        raise TemplateError(f"it takes more than {TEMPLATE_SECONDS} s")

    timed, status = threading.current_thread() is threading.main_thread(), Path("/proc/self/statm")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if timed:
        handler = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        if status.exists():
            in_use = int(status.read_text().split()[0]) * resource.getpagesize()
            allowed = [limit for limit in limits if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min([in_use + TEMPLATE_BYTES, *allowed]), limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)


def _reason(error: Exception) -> str:
    """Return why a template could not be rendered."""
    if isinstance(error, MemoryError):
        return f"it takes more than {TEMPLATE_BYTES >> 30} GiB of memory"
    return str(error) or type(error).__name__


def to_json(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """The filter `tojson` as templates expect it; jinja2's own escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_template_error(message: str) -> None:
    """The function `raise_exception` of templates."""
    raise TemplateError(message)


def control_pattern(token: Mapping) -> str:
    """Return the pattern of a control token, with the spaces around it that it absorbs."""
    before, after = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return before + re.escape(token["content"]) + after


def _straddles(rendered: str, cut: int) -> str:
    """Return the message for a cut inside a token."""
    return (f"a token straddles the border between {rendered[max(0, cut - 20):cut]!r} and the answer "
            f"{rendered[cut:cut + 20]!r}; the answer must begin otherwise")


def load_chat_format(tokenizer: Tokenizer | HuggingFaceTokenizer) -> ChatFormat | TemplateFormat:
    """Return the chat format of a tokenizer: its own template, or Llama 3's format if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return ChatFormat(tokenizer) if template in (None, CHAT_TEMPLATE) else TemplateFormat(tokenizer)
