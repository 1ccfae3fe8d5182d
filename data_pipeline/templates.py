"""Encode chats with the chat template of a tokenizer, or in Llama 3's format.

A chat is a list of {"role", "content"}; an assistant's message may also have `reasoning_content` and
`tool_calls`. Its ids are divided into *segments*, each a target or not. Targets are the assistant's answers,
reasoning and calls, with the control token that ends the turn.
"""

import datetime
import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, Optional

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError
from tokenizer import CHAT_TEMPLATE, BaseTokenizer

Messages = list[dict[str, Any]]
Options = Optional[Mapping[str, Any]]  # variables of a template, such as `tools` and `enable_thinking`
Segments = list[tuple[list[int], bool]]

TEMPLATE_VERSION = 2  # part of the hash: increase it when the ids or segments of a template's chats change
# What a chat may have besides role and content, if the template has a variable of this name.
FIELDS = ("tools", "tool_calls", "reasoning_content")

PRIVATE_USE = range(0xE000, 0xF900)
THINK_TAG = re.compile("</?think>")
MARK_NAMES = ("paddock_generation_begins", "paddock_generation_ends")  # variables of a template
TODAY = datetime.date(2024, 7, 26)  # the date that Llama 3's templates default to
# A trial chat for every template; two turns show whether an earlier rendering is a prefix of a later one.
TRIAL = [{"role": role, "content": f"{role} says {number}"}
         for number in (1, 2) for role in ("user", "assistant")]
SYSTEM_TRIAL = {"role": "system", "content": "system says"}
CALL_TRIAL = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]},
    {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "tool says"}]


class ChatFormat:
    """A Hugging Face chat template, rendered in jinja2's sandbox.

    The ids equal those of transformers' apply_chat_template, but names of control tokens in a message stay
    text, and `strftime_now` gives a fixed date, so that data do not depend on the day.

    Args:
        control: names of further control tokens, which another template of the tokenizer writes.
    """

    with_tools: Optional["ChatFormat"] = None  # the format of chats with tools, if it is another one

    def __init__(self, tokenizer: BaseTokenizer, template: str, control_tokens: dict[str, str],
                 control: Collection[str] = ()):
        self._given, self._control_tokens = tokenizer, control_tokens
        # These, all other variables of the template, and `name` if it writes the names of speakers.
        self.fields = {name for name in FIELDS if re.search(rf"\b{name}\b", template)}
        self.is_marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))

        # Compile the template.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[GenerationTag, loopcontrols])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # without HTML escapes
        environment.globals.update(raise_exception=_raise_exception, strftime_now=TODAY.strftime)
        try:
            self._template = environment.from_string(template)
            self.fields |= meta.find_undeclared_variables(environment.parse(template)) - {
                "messages", "add_generation_prompt"}
        except Exception as error:  # any, since jinja2 evaluates constants here
            reason = str(error) or type(error).__name__
            raise DataError(f"the tokenizer's chat template cannot be read: {reason}; correct it") from error

        # Find out whether contents are read as text or as parts, {"type": "text", "text": ...}.
        self._reads_text, self._reads_parts = True, False
        trials = TRIAL, [{**message, "parts": [message["content"]]} for message in TRIAL]
        self._reads_text = self._shows(trials[0])
        self._reads_parts = True
        self._reads_parts = self._shows(trials[1])
        self._reads_text |= not self._reads_parts

        # Find control tokens, and everything besides the tokenizer that affects ids.
        self.more = more = self._added_tokens_around_messages() | {*control}
        self.tokenizer = tokenizer = tokenizer.with_control_tokens(more) if more else tokenizer
        content = json.dumps([template, control_tokens, TEMPLATE_VERSION, *([sorted(more)] if more else [])])
        content = "Llama 3" if template == CHAT_TEMPLATE else content
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()
        longest_first = sorted(tokenizer.special_ids, key=len, reverse=True)
        if not longest_first or len(longest_first[-1]) < 2:
            raise DataError("the chat template cannot be used: its tokenizer needs control tokens of two "
                            "characters or more")
        names, self._control = [*map(re.escape, longest_first)], tokenizer.control_pattern
        self._name = re.compile("|".join(names))
        self._literal_start = re.compile(f"(?=(?:{'|'.join(names)}))(.)", re.DOTALL)
        self._controls_of_neutral_words = lru_cache(maxsize=1024)(self._render_controls)

        with suppress(DataError):
            named = [{**message, "name": "someone"} for message in TRIAL]
            if self._render(named, False, None) != self._render(TRIAL, False, None):
                self.fields.add("name")

        # Find the control token that ends the assistant's turns in the trial chat. Some templates can write
        # prompts, but no chats to train on.
        self.end_of_turn_id, self._why_no_training = None, ""
        try:
            self.end_of_turn_id = self._end_of_trial()
        except DataError as error:
            self._why_no_training = str(error)
            with suppress(DataError):
                rest = self._render(TRIAL, False, None).rpartition(TRIAL[-1]["content"])[2]
                end = self._control.search(rest)
                self.end_of_turn_id = end and tokenizer.special_ids[end[0].strip()]

    @property
    def stop_ids(self) -> frozenset[int]:
        end = self.tokenizer.eot_id if self.end_of_turn_id is None else self.end_of_turn_id
        return self._given.stop_ids | {end} | (self.with_tools.stop_ids if self.with_tools else set())

    def of(self, options: Options) -> "ChatFormat":
        """Return the format of a chat with these options."""
        return self.with_tools if self.with_tools and (options or {}).get("tools") else self

    @property
    def all_fields(self) -> set[str]:
        return self.fields | (self.with_tools.fields if self.with_tools else set())

    def _shows(self, messages: Messages) -> bool:
        """Return whether the template writes the contents of the messages, and not a list as Python does."""
        rendered = ""
        for more in ([], [SYSTEM_TRIAL]):  # some require a system message
            with suppress(DataError):
                rendered = rendered or self._render([*more, *messages], False, None)
        return not re.search(r"""["']type["']: *["']text["']""", rendered) and all(
            message["content"] in rendered for message in messages)

    def _added_tokens_around_messages(self) -> set[str]:
        """Return the added tokens that are not special, but that the template writes around messages.

        Tags such as <think> are not among them: models write them, and transformers reads them in answers.
        """
        added = {token["content"]: token["special"] for token in self._given.added_tokens}
        names = {name for name, is_special in added.items() if not is_special and f"</{name[1:]}" not in added
                 and not (name.startswith("</") and f"<{name[2:]}" in added)}

        def written(*messages: dict[str, Any]) -> set[str]:
            text = ""
            with suppress(DataError):
                text = self._render([*messages], False, None)
            return {name for name in names if name in text}

        *calls, _ = CALL_TRIAL
        return written(*TRIAL) | written(SYSTEM_TRIAL, *TRIAL) | (written(*CALL_TRIAL) - written(*calls))

    def _end_of_trial(self) -> int:
        """Return the token that ends answers. Raises DataError if training cannot use the template."""
        try:
            chat = self.encode_chat(TRIAL)
        except DataError:
            chat = self.encode_chat([SYSTEM_TRIAL, *TRIAL])  # some require a system message
        tokenizer, targets = self.tokenizer, [ids for ids, is_target in chat if is_target]
        controls = frozenset(tokenizer.special_ids.values())
        ends = {next((token for token in reversed(ids) if token in controls), None) for ids in targets}
        if None in ends or not ends:
            raise DataError("it marks an answer without a control token that ends it")
        if len(ends) > 1:
            raise DataError(f"it ends turns in any of {tokenizer.decode(sorted(ends))}")
        return ends.pop()

    def check_training(self) -> None:
        """Raise DataError if the template can write prompts, but no chats to train on."""
        if self._why_no_training:
            raise DataError("the tokenizer's chat template cannot be used for training on answers: "
                            f"{self._why_no_training}; put another chat_template.jinja beside its "
                            "tokenizer.json")

    def encode_chat(self, messages: Messages, options: Options = None) -> Segments:
        """Return the segments of a dialog up to its last target; every second is a target.

        Targets are what the template marks with `{% generation %}`, or else the answers with their ends. Both
        without the answers that are excluded from training.
        """
        if self.of(options) is not self:
            return self.of(options).encode_chat(messages, options)
        self.check_training()
        messages, options, mark, marks = self._hide_literals(messages, options)
        rendered, cuts = self._render_words(messages, False, options, marks)
        if not self.is_marked:
            cuts = [cut for index, message in enumerate(messages) if is_target(message)
                    for cut in self._find_answer(rendered, messages, index, options)]
        elif not all(used := [is_target(message) for message in messages if message["role"] == "assistant"]):
            if len(cuts) != 2 * len(used):
                raise DataError(f"the chat template marks {len(cuts) // 2} of {len(used)} answers, so that "
                                "those excluded from training cannot be found; use another template")
            cuts = [cut for number, cut in enumerate(cuts) if used[number // 2]]
        segments = encode_rendered(self.tokenizer, rendered[:cuts[-1]] if cuts else "", cuts, mark)
        return [(ids, number % 2 == 1) for number, ids in enumerate(segments[:-1])]

    def encode_prompt(self, messages: Messages, options: Options = None) -> list[int]:
        if self.of(options) is not self:
            return self.of(options).encode_prompt(messages, options)
        messages, options, mark, _ = self._hide_literals(messages, options)
        return encode_rendered(self.tokenizer, self._render_words(messages, True, options)[0], [], mark)[0]

    def encode_answer(self, messages: Messages, answer: dict, options: Options = None) -> list[int]:
        if self.of(options) is not self:
            return self.of(options).encode_answer(messages, answer, options)
        self.check_training()
        chat = [*messages, answer]
        chat, options, mark, _ = self._hide_literals(chat, options)
        rendered, _ = self._render_words(chat, False, options)
        cuts = self._find_answer(rendered, chat, len(messages), options)
        return encode_rendered(self.tokenizer, rendered[:cuts[1]], cuts, mark)[1]

    def _find_answer(self, rendered: str, messages: Messages, index: int, options: Options) -> list[int]:
        """Return where an answer begins, and where its turn ends."""
        before = self._render(messages[:index], True, options)
        if not rendered.startswith(before):
            raise DataError("its rendering up to an answer differs from the start of the whole chat, so "
                            "training and generation would differ; use a template that writes all turns "
                            "alike, or a chat for each answer")
        # Find the end of the control token after it.
        end = self._control.search(rendered, len(before))
        if end is None:
            raise DataError("the chat template ends an answer in no control token: no model could stop")
        words = rendered[len(before):end.start()]
        if not is_said(words, messages[index]):
            raise DataError("the chat template writes something else than the assistant's words between "
                            f"the header of the answer and the end of the turn: {words[:80]!r}; if it leaves "
                            "out reasoning, use one that keeps it, or a chat for each answer")
        if self.end_of_turn_id not in (None, self.tokenizer.special_ids[end[0].strip()]):
            raise DataError(f"the chat template ends this answer in {end[0]}, others in another token")
        return [len(before), end.end()]

    def _hide_literals(self, messages: Messages, options: Options) -> tuple[Messages, Options, str, str]:
        """Return both with a mark inside the names of control tokens, this mark, and two other characters."""
        used = {*json.dumps([messages, options], ensure_ascii=False)}
        unused = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        mark, *others = [*islice(unused, 3)] or " "
        if len(others) < 2:
            raise DataError("it has all private-use characters from U+E000 to U+F8FF; leave three out")

        def hide(text: str) -> str:
            return self._literal_start.sub(rf"\1{mark}", text) if self._name.search(text) else text

        return *map_texts([messages, options], hide, hide), mark, "".join(others)

    def _render_words(self, messages: Messages, add_generation_prompt: bool, options: Options,
                      marks: str = "") -> tuple[str, list[int]]:
        """Return the rendering, and where marked answers begin and end.

        Checks that neutral messages would have the same control tokens: a template that rewrites messages
        (`lower`, `replace`, `split`) can turn text into a control token.
        """
        pieces = self._render(messages, add_generation_prompt, options, marks)
        pieces = re.split(f"[{marks}]", pieces) if marks else [pieces]
        rendered = "".join(pieces)
        # Mistral's templates accept only ids of calls with nine letters.
        neutral = [{**map_texts(message, lambda text: "textwords" if text.strip() else text[:1]),
                    "role": message["role"]} for message in messages]
        expected = self._controls_of_neutral_words(json.dumps([neutral, options]), add_generation_prompt)
        actual = [name.strip() for name in self._control.findall(rendered)]
        if actual != expected:
            more, fewer = Counter(actual) - Counter(expected), Counter(expected) - Counter(actual)
            raise DataError("the chat template rewrites the text in a way that changes its control tokens "
                            f"({' '.join(sorted(more | fewer)) or 'in another order'}); correct the template")
        return rendered, [*accumulate(map(len, pieces[:-1]))]

    def _render_controls(self, content: str, add_generation_prompt: bool) -> list[str]:
        messages, options = json.loads(content)
        rendered = self._render(messages, add_generation_prompt, options)
        return [name.strip() for name in self._control.findall(rendered)]

    def _render(self, messages: Messages, add_generation_prompt: bool, options: Options,
                marks: str = "") -> str:
        messages = [*map(self._as_template_reads, messages)]
        variables = {**self._control_tokens, "tools": None, "documents": None, **(options or {}),
                     "messages": messages, "add_generation_prompt": add_generation_prompt,
                     MARK_NAMES[0]: marks[:1], MARK_NAMES[1]: marks[1:]}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can raise any error of Python's operators
            raise DataError("the chat template rejects this chat: "
                            f"{str(error) or type(error).__name__}") from error

    def _as_template_reads(self, message: dict[str, Any]) -> dict[str, Any]:
        read = {name: value for name, value in message.items() if name != "parts"}
        if "reasoning_content" in message:  # transformers has two names of it
            read = {"thinking": message["reasoning_content"], **read}
        if self._reads_parts and ("parts" in message or not self._reads_text):
            texts = message.get("parts", [message["content"]])
            read["content"] = [{"type": "text", "text": text} for text in texts]
        return read


def encode_rendered(tokenizer: BaseTokenizer, rendered: str, cuts: Sequence[int] = (), mark: str = ""
                    ) -> list[list[int]]:
    """Return the ids of a rendering's len(cuts) + 1 segments between ascending cuts.

    Names of control tokens become these tokens, unless `mark`, which is left out, is inside them. Text
    between two control tokens is encoded as a whole, so a cut within it must be between two tokens.
    """
    def encode(start: int, end: int) -> list[int]:
        text = rendered[start:end].replace(mark, "")
        return tokenizer.encode(text, is_first=not start) if start < end else []

    segments: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
    start = 0
    for control in (*tokenizer.control_pattern.finditer(rendered), None):
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
            segments[bisect_left(cuts, start)].append(tokenizer.special_ids[control[0].strip()])
    return segments


class GenerationTag(Extension):
    """`{% generation %}`, which marks answers in some templates; puts a character before and after them."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        first, last = (nodes.Output([nodes.Name(name, "load")]) for name in MARK_NAMES)
        return nodes.Scope([first, *body, last]).set_lineno(line)


def is_target(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that is not excluded from training."""
    return message["role"] == "assistant" and message.get("train", True)


def map_texts(value: Any, change: Callable[[str], str], change_key: Callable[[str], str] = str) -> Any:
    """Return a JSON value with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_key(key): map_texts(each, change, change_key) for key, each in value.items()}
    return [map_texts(each, change, change_key) for each in value] if isinstance(value, list) else value


def is_said(words: str, message: Mapping[str, Any], partly: bool = False) -> bool:
    """Whether words are the reasoning and content of a message, then its calls; `partly`: among others.

    White space and the tags around the reasoning do not count.
    """
    words, content, reasoning = ("".join(THINK_TAG.sub("", text).split()) for text in (
        words, message["content"], message.get("reasoning_content") or ""))
    content = content if partly else reasoning + content
    start = words.find(content)
    is_in_order, rest = start == 0 or partly and start > 0, words[start + len(content):]
    for call in message.get("tool_calls") or ():
        _, name, rest = rest.partition(call["function"]["name"])
        is_in_order = is_in_order and bool(name)
    return is_in_order and (partly or not rest or bool(message.get("tool_calls")))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@lru_cache(maxsize=1)
def text_tokenizer(tokenizer: BaseTokenizer) -> BaseTokenizer:
    """Return the tokenizer of plain text, whose words never become tokens of the chat format."""
    with suppress(DataError):
        return load_chat_format(tokenizer).tokenizer
    return tokenizer


def load_chat_format(tokenizer: BaseTokenizer) -> ChatFormat:
    """Return a tokenizer's chat format: its template, or Llama 3's format if it has none.

    Like transformers, chats with tools use the template `tool_use`. If the tokenizer knows no end of turn
    of this name, it is the one that the template writes, so that saved folders name it.
    """
    template, named = tokenizer.chat_template, tokenizer.named_templates
    if template is None and named:
        raise DataError(f"the tokenizer has the chat templates {', '.join(named)}, but none is the default; "
                        "put one as chat_template.jinja beside its tokenizer.json")
    if template not in (None, CHAT_TEMPLATE):
        chat_format = ChatFormat(tokenizer, template, tokenizer.control_tokens)
        if "tool_use" in named:
            formats = [chat_format, ChatFormat(tokenizer, named["tool_use"], tokenizer.control_tokens)]
            more = formats[0].more | formats[1].more
            chat_format, chat_format.with_tools = (
                each if each.more == more else ChatFormat(tokenizer, text, tokenizer.control_tokens, more)
                for each, text in zip(formats, (template, named["tool_use"])))
            hashes = chat_format.sha256 + chat_format.with_tools.sha256
            chat_format.sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        if not {None, tokenizer.eot_id, *tokenizer.stop_ids} & {chat_format.end_of_turn_id}:
            tokenizer.eot_id = chat_format.end_of_turn_id
        return chat_format
    needed = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    if missing := [name for name in needed if name not in tokenizer.special_ids]:
        raise DataError(f"Llama 3's chat format needs {' '.join(missing)}, which the tokenizer lacks; "
                        "set another TOKENIZER_PATH, or put a chat_template.jinja beside tokenizer.json")
    return ChatFormat(tokenizer, CHAT_TEMPLATE, {"bos_token": needed[0]})
