"""Encode chats in Llama 3's format, or with the chat template of a Hugging Face tokenizer.

A chat is a list of {"role", "content"}. Its ids are divided into *segments*, each a target or not. Targets
are the assistant's answers with the control token that ends the turn.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError
from tokenizer import CHAT_TEMPLATE, HuggingFaceTokenizer, Tokenizer

Messages = list[dict[str, str]]
Segments = list[tuple[list[int], bool]]

PRIVATE_USE = range(0xE000, 0xF900)
# A trial chat for every template; two turns show whether an earlier rendering is a prefix of a later one.
TRIAL = [{"role": role, "content": f"{role} says {number}"}
         for number in (1, 2) for role in ("user", "assistant")]


class ChatFormat:
    """Llama 3's chat format; control tokens in messages stay text. Source: Meta's llama/tokenizer.py."""

    sha256 = hashlib.sha256(b"Llama 3").hexdigest()  # of everything besides the tokenizer that affects ids

    def __init__(self, tokenizer: Tokenizer | HuggingFaceTokenizer):
        needed = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        missing = [name for name in needed if name not in tokenizer.special_ids]
        if missing:
            raise DataError(f"Llama 3's chat format needs {' '.join(missing)}, which the tokenizer lacks; "
                            "set another TOKENIZER_PATH, or put a chat_template.jinja beside tokenizer.json")
        self.tokenizer = tokenizer
        self._bos_id, self._start_id, self._end_id, self.end_of_turn_id = (
            tokenizer.special_ids[name] for name in needed)
        self.stop_ids = frozenset((self.end_of_turn_id, tokenizer.eos_id))

    def _encode_header(self, role: str) -> list[int]:
        return [self._start_id, *self.tokenizer.encode(role), self._end_id, *self.tokenizer.encode("\n\n")]

    def encode_words(self, content: str) -> list[int]:
        return [*self.tokenizer.encode(content.strip()), self.end_of_turn_id]

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the ids of a dialog with bos and a generation prompt, the header of the answer."""
        ids = [self._bos_id]
        for message in messages:
            ids += [*self._encode_header(message["role"]), *self.encode_words(message["content"])]
        return ids + self._encode_header("assistant")

    def encode_chat(self, messages: Messages) -> Segments:
        """Return the segments of a dialog up to its last answer's end of turn; every second is a target."""
        segments, ids = [], [self._bos_id]
        for message in messages:
            ids += self._encode_header(message["role"])
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
    """A Hugging Face chat template, rendered in jinja2's sandbox.

    The ids equal those of transformers' apply_chat_template, but names of control tokens in a message stay
    text, and there is no `strftime_now`: templates without a default date cannot be used.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self.tokenizer = tokenizer
        # Everything besides the tokenizer that affects ids.
        content = json.dumps([tokenizer.chat_template, tokenizer.control_tokens])
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

        # Compile the template.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[GenerationTag, loopcontrols])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # without HTML escapes
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(tokenizer.chat_template)
        except Exception as error:  # any, since jinja2 evaluates constants here
            reason = str(error) or type(error).__name__
            raise DataError(f"the tokenizer's chat template cannot be read: {reason}; correct it") from error

        # Find control tokens, with the spaces that they absorb.
        longest_first = sorted(tokenizer.special_tokens, key=lambda token: -len(token["content"]))
        if not longest_first or len(longest_first[-1]["content"]) < 2:
            raise DataError("the chat template cannot be used: its tokenizer needs longer control tokens")
        names = [re.escape(token["content"]) for token in longest_first]
        self._control = re.compile("|".join(
            r"\s*" * token["lstrip"] + name + r"\s*" * token["rstrip"]
            for token, name in zip(longest_first, names)))
        self._literal_start = re.compile(f"(?=(?:{'|'.join(names)}))(.)", re.DOTALL)
        self._controls_of_neutral_words = lru_cache(maxsize=1024)(self._render_controls)

        # Find the control token that ends the assistant's turns in the trial chat.
        self.end_of_turn_id = None
        try:
            ends = {ids[-1] for ids, is_target in self.encode_chat(TRIAL) if is_target}
            if len(ends) > 1:
                raise DataError(f"it ends turns in any of {tokenizer.decode(sorted(ends))}")
            if not ends <= {tokenizer.eot_id, tokenizer.eos_id}:  # the stop tokens of saved folders
                raise DataError(f"it ends the assistant's turns in {tokenizer.decode(ends)}; name that "
                                "as eot_token in the tokenizer_config.json beside its tokenizer.json")
        except DataError as error:
            raise DataError(f"the tokenizer's chat template cannot be used for training: {error}; put "
                            "another chat_template.jinja beside its tokenizer.json") from error
        self.end_of_turn_id = ends.pop()
        self.stop_ids = frozenset((self.end_of_turn_id, tokenizer.eos_id))

    def encode_chat(self, messages: Messages) -> Segments:
        """Return the segments of a dialog up to its last answer's end of turn; every second is a target."""
        messages, mark = self._hide_literals(messages)
        rendered, cuts = self._render_words(messages, False), []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # Find the start of the answer.
            before = self._render(messages[:index], True)
            if not rendered.startswith(before):
                raise DataError("its rendering up to an answer differs from the start of the whole chat, so "
                                "training and generation would differ")
            # Find the end of the control token after it.
            end = self._control.search(rendered, len(before))
            if end is None:
                raise DataError("the chat template ends an answer in no control token: no model could stop")
            words = rendered[len(before):end.start()]
            if words.strip() != message["content"].strip():
                raise DataError("the chat template writes something else than the assistant's words between "
                                f"the header of the answer and the end of the turn: {words[:80]!r}")
            if self.end_of_turn_id not in (None, self.tokenizer.special_ids[end[0].strip()]):
                raise DataError(f"the chat template ends this answer in {end[0]}, others in another token")
            cuts += [len(before), end.end()]
        segments = self._encode_segments(rendered[:cuts[-1]] if cuts else "", cuts, mark)
        return [(ids, number % 2 == 1) for number, ids in enumerate(segments[:-1])]

    def encode_prompt(self, messages: Messages) -> list[int]:
        messages, mark = self._hide_literals(messages)
        return self._encode_segments(self._render_words(messages, True), [], mark)[0]

    def encode_answer(self, messages: Messages, answer: str) -> list[int]:
        return self.encode_chat([*messages, {"role": "assistant", "content": answer}])[-1][0]

    def _hide_literals(self, messages: Messages) -> tuple[Messages, str]:
        """Return the messages with a mark inside the names of control tokens, and this unique mark."""
        used = {character for message in messages for text in message.values() for character in text}
        mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if mark is None:
            raise DataError("it has all private-use characters from U+E000 to U+F8FF; leave one out")
        return [{key: self._literal_start.sub(rf"\1{mark}", text) for key, text in message.items()}
                for message in messages], mark

    def _render_words(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the rendering, after checking that neutral messages would have the same control tokens.

        A template that rewrites messages (`lower`, `replace`, `split`) can turn text into a control token.
        """
        rendered = self._render(messages, add_generation_prompt)
        neutral = tuple((message["role"], "words" if message["content"].strip() else message["content"][:1])
                        for message in messages)
        expected = self._controls_of_neutral_words(neutral, add_generation_prompt)
        actual = [name.strip() for name in self._control.findall(rendered)]
        if actual != expected:
            more, fewer = Counter(actual) - Counter(expected), Counter(expected) - Counter(actual)
            raise DataError("the chat template rewrites the text in a way that changes its control tokens "
                            f"({' '.join(sorted(more | fewer)) or 'in another order'}); correct the template")
        return rendered

    def _render_controls(self, words: tuple[tuple[str, str], ...], add_generation_prompt: bool) -> list[str]:
        rendered = self._render([{"role": role, "content": content} for role, content in words],
                                add_generation_prompt)
        return [name.strip() for name in self._control.findall(rendered)]

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, tools=None, documents=None,
                                         add_generation_prompt=add_generation_prompt,
                                         **self.tokenizer.control_tokens)
        except Exception as error:  # a template can raise any error of Python's operators
            raise DataError("the chat template rejects this chat: "
                            f"{str(error) or type(error).__name__}") from error

    def _encode_segments(self, rendered: str, cuts: Sequence[int], mark: str) -> list[list[int]]:
        """Return the ids of a rendering's len(cuts) + 1 segments between ascending cuts.

        Text between two control tokens is encoded as a whole, so a cut within it must be between two tokens.
        """
        def encode(start: int, end: int) -> list[int]:
            text = rendered[start:end].replace(mark, "")
            return self.tokenizer.encode(text, is_first=not start) if start < end else []

        segments: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
        start = 0
        for control in (*self._control.finditer(rendered), None):
            end = control.start() if control else len(rendered)
            ids, done = encode(start, end), 0
            for number, cut in enumerate(cuts):
                head = encode(start, cut) if start < cut < end else []
                if ids[:len(head)] != head or control and end < cut < control.end():
                    raise DataError("a token straddles the border between "
                                    f"{rendered[max(0, cut - 20):cut]!r} and the answer "
                                    f"{rendered[cut:cut + 20]!r}; the answer must begin with other text")
                if head:
                    segments[number] += ids[done:len(head)]
                    done = len(head)
            segments[bisect_left(cuts, end)] += ids[done:]
            if control:
                start = control.end()
                segments[bisect_left(cuts, start)].append(self.tokenizer.special_ids[control[0].strip()])
        return segments


class GenerationTag(Extension):
    """`{% generation %}`, which marks answers in some templates; only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def load_chat_format(tokenizer: Tokenizer | HuggingFaceTokenizer) -> ChatFormat | TemplateFormat:
    """Return a tokenizer's chat format: its template, or Llama 3's format if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return ChatFormat(tokenizer) if template in (None, CHAT_TEMPLATE) else TemplateFormat(tokenizer)
