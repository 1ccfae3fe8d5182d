"""Read chats, preference pairs and prompts in all common formats.

A message is {"role", "content"}, with the roles system, user, assistant and tool. A chat is an optional
system message, followed by alternating messages of user and assistant; the last one is the assistant's. After
an assistant's message with `tool_calls`, the results follow as messages of the tool, and the next answer. An
answer with `train` = False is context, not a target.
"""

import datetime
import decimal
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from common.errors import DataError
from common.text import command, counted
from data_pipeline import sources
from data_pipeline.source_files import Source
from data_pipeline.sources import columns_of, contents_of, flaw_of, identity_of, texts_in, type_name
from data_pipeline.templates import Messages, is_target

SHORTCUTS = {
    "chats": {"ultrachat": Source(name="HuggingFaceH4/ultrachat_200k", split="train_sft"),
              "tulu-3": Source(name="allenai/tulu-3-sft-mixture"),
              "alpaca": Source(name="tatsu-lab/alpaca")},
    "pairs": {"ultrafeedback": Source(name="HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
              "hh-rlhf": Source(name="Anthropic/hh-rlhf")},
    "prompts": {"gsm8k": Source(name="openai/gsm8k", config="main")},
}
CALL_ROLES = ("function_call", "tool_call")  # an assistant's message whose content is calls, as JSON
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         **dict.fromkeys(("assistant", "gpt", "model", *CALL_ROLES), "assistant"),
         **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), "tool")}
TEXT_PARTS = ("text", "input_text", "output_text")  # of OpenAI's chat completions, and of its responses
TOOLS, REASONING = ("tools", "functions"), ("reasoning_content", "reasoning", "thinking")
# Marks of a turn, and whether a true one says that the turn is a target.
MARKS = {**dict.fromkeys(("weight", "loss", "loss_weight", "loss_scale", "loss_mask", "train", "trainable",
                          "training", "train_on_turn", "learn"), True), "masked": False}
# A message with another such field is refused, also in camelCase, and a record with a list of such marks.
OTHER_MARK = re.compile("(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
                        "(?i:loss|train|mask|weight|exclud|includ|ignor|skip|supervis)")
CONTENTS = ("content", "value", "text", "output", "result", "response", "parts")
ARGUMENTS = ("args", "input", "inputs", "kwargs", "params")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
# In a text: where one of the record's belongs, such as <image>, <image 1> or <|image_pad|>.
MEDIA_PLACE = re.compile(r"<\|?(image|audio|video)[ _]?\w*\|?>|\[IMG\]")
# Columns with the request, and formats of chats by request and answer; both best first.
REQUESTS = ("prompt", "instruction", "question", "messages", "conversations")
LABELS = ("label", "kto_tag")  # whether an answer is good, as TRL and LLaMA-Factory call it
CHATS = (("messages", ""), ("conversations", ""), ("instruction", "instances"), ("instruction", "output"),
         ("prompt", "completion"), ("question", "answer"))
# The fields that are used: of all records, besides a request, of messages by role, and of what is in them.
# Others are dropped and counted by name; null means missing. MARKS are used in messages, and as a list in a
# record. Chats use an answer too, pairs two or a label. Prompts keep the whole record, texts use one column.
FIELDS: dict[str, frozenset[str]] = {level: frozenset(names.split()) for level, names in {
    "record": f"system chat_template_kwargs {' '.join(TOOLS)}", "prompt": "history", "question": "history",
    "instruction": "input history", "messages": "", "conversations": "", "instances[]": "input output",
    "system": "name", "user": "name", "tool": "name tool_call_id",
    "assistant": f"name tool_calls function_call {' '.join(REASONING)}", "content[]": "type text",
    "tool_calls[]": "id type function", "tool_calls[].function": "name arguments parameters"}.items()}
Record, Names = Mapping[str, Any], Collection[str]
Drop = Callable[[str], Any]  # is called with the name of a field that is dropped; `str` does nothing
SPOKEN_TURN = re.compile(r"\n\n(Human|Assistant):")  # Anthropic's format of a dialog in one text
# Tables often hold messages as text: JSON, which is read, or as Python prints them, which is refused.
WRITTEN_DIALOG = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:.*\}\s*\]\s*""", re.DOTALL)
BLANK = re.compile(rf"(?:\s|{sources.INVISIBLE.pattern})*")
# Possible ends of a prompt within the common prefix of two texts, best first.
PROMPT_ENDS = (re.compile(r"\n"), re.compile(r"(?<=[.?!:])\s"), re.compile(r"\s"))


class Example(NamedTuple):
    """A chat ending in an answer, or a prompt ending in a user's message, with two answers or a record."""

    where: str
    messages: Messages
    answers: Sequence[dict[str, Any]] = ()  # messages, the preferred one first
    record: str = ""  # JSON in ASCII
    label: bool | None = None  # of an unpaired answer: whether it is good
    options: Mapping[str, Any] = {}  # variables of the chat template, such as `tools`

    @property
    def texts(self) -> list[str]:
        return [text for message in (*self.messages, *self.answers) for text in said_in(message)]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))

    @property
    def split_key(self) -> str:
        """The text whose hash determines the split: all before the first answer but the system message.

        All chats, pairs and prompts that start with the same request are in one split, so that no stage
        trains on an answer to a held-out request, whatever SYSTEM_PROMPT or one of the stages adds before it.
        """
        opening = takewhile(lambda message: message["role"] != "assistant", self.messages)
        return identity_of("\n".join(message["content"] for message in opening
                                     if message["role"] != "system"))

    @property
    def whole_key(self) -> str:
        """The key instead of `split_key` if too many examples share that: the whole conversation."""
        return identity_of(json.dumps([self.messages, self.answers, self.record], default=str))


def said_in(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message that templates write: reasoning, content, and those of its calls."""
    if len(message) == 2:  # the usual case, faster
        return [message["content"]]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return texts_in([message.get("reasoning_content"), message["content"], calls])


def read_examples(kind: str, source: Source, reading: sources.Reading, fields: Names = (),
                  tool_fields: Names = ()) -> Iterator[Example]:
    """Yield the chats, preference pairs or prompts of a source; reject other records.

    `fields` are those that the chat format writes besides role and content, and `tool_fields` those of its
    format with tools, if that is another one. All fields that are not used are dropped and counted.
    """
    mapped = source.renamed.keys()
    # Without a column name, Parquet files yield all columns.
    for where, record in sources.read_records(replace(source, column=""), reading):
        dropped: list[str] = []
        record = {name: _plain_value(name, value) for name, value in record.items()}
        try:
            for name in record.keys() & MARKS.keys():
                if isinstance(record[name], (bool, int, float)) and bool(record[name]) != MARKS[name]:
                    raise DataError(f"is excluded from training by {name} = {record[name]}; leave it out")
            if kind == "chats":
                examples = chats_of(where, record, dropped.append, mapped)
            else:
                read = pair_of if kind == "pairs" else prompt_of
                examples = [read(where, record, dropped.append, mapped)]
            check_texts(options := options_in(record, {*fields, *tool_fields}, dropped.append))
            written = tool_fields if tool_fields and "tools" in options else fields
            media = [name for name in MEDIA if record.get(name)]
            if media and any(MEDIA_PLACE.search(text) for each in examples for text in each.texts):
                raise DataError(f"its text refers to its {media[0]}; only text is supported, leave it out")
            for message in (message for each in examples for message in (*each.messages, *each.answers)):
                if "tool_calls" not in written and (message.get("tool_calls") or message["role"] == "tool"):
                    raise DataError("calls a tool, and the chat format cannot write that; put a "
                                    "chat_template.jinja with tool_calls beside tokenizer.json")
                for name in ("name", "reasoning_content"):
                    if name not in written and name in message and message["role"] != "tool":
                        dropped.append(f"messages[].{name}")
                        del message[name]
                if len(message) > 2:
                    check_texts(message)
        except DataError as error:
            reading.refuse(where, str(error))
            continue
        reading.dropped.update(dropped)
        yield from (example._replace(options=options) for example in examples)


def _plain_value(name: str, value: Any) -> Any:
    """Return null for NaN, with which tables say that a value is missing, and a mark as text as its value."""
    if isinstance(value, float) and value != value:
        return None
    if name in MARKS and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value.lower())
    return value


def drop_others(values: Record, used: Names, drop: Drop, prefix: str = "") -> None:
    for name, value in values.items():
        if value is not None and name not in used:
            drop(prefix + name)


FIXED_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}


def options_in(record: Record, fields: Names, drop: Drop = str) -> dict[str, Any]:
    """Return the variables of the chat template in a record: its tools, and its chat_template_kwargs."""
    columns = [name for name in TOOLS if record.get(name) not in (None, "", "[]", [])]
    tools = json_in(columns[0], record[columns[0]], list) if columns else []
    variables = json_in("chat_template_kwargs", record.get("chat_template_kwargs") or {}, dict)
    variables = {name: value for name, value in variables.items() if value is not None}
    if fixed := sorted(FIXED_VARIABLES & variables.keys()):
        raise DataError(f"chat_template_kwargs.{fixed[0]} comes from the chat and the tokenizer; remove it")
    if "tools" not in fields or "tools" in variables:
        tools = []
    for name in columns[bool(tools):]:
        drop(name)
    drop_others(variables, fields, drop, "chat_template_kwargs.")
    if tools:
        variables["tools"] = [json_in(f"tools[{number}]", tool, dict) for number, tool in enumerate(tools)]
    return variables


def chats_of(where: str, record: Record, drop: Drop = str, mapped: Names = ()) -> list[Example]:
    """Return the chats in a record: one, or one per instance of an instruction."""
    columns = _best_of(CHATS, record, mapped)
    if not columns:
        if _is_filled(record, "chosen", "rejected"):
            raise DataError("is a preference, not a chat; prepare it with "
                            f"{command('scripts/load_dpo_dataset.py')}")
        for names in CHATS:
            if {*names} - {""} <= record.keys():
                raise DataError(f"{next(name for name in names if not _is_filled(record, name))} is null")
        raise DataError(f"is not a chat: it has {contents_of(record)}, expected messages, conversations, "
                        "instruction and output, prompt and completion, or question and answer (--map "
                        "prompt=COLUMN,completion=COLUMN says which columns these are)")
    if _is_filled(record, "label") and ("completion" in record or isinstance(record["label"], bool)) or (
            isinstance(record.get("kto_tag"), bool)):
        raise DataError("is an answer with a label, not a chat; prepare it with "
                        f"{command('scripts/load_dpo_dataset.py')}, or leave out the label")
    dialogs = _dialogs_in(record, columns, drop)
    examples = [Example(where, check_turns(dialog, "assistant")) for dialog in dialogs]
    if not all(any(map(is_target, example.messages)) for example in examples):
        raise DataError("has no target: all its answers are excluded from training by their marks "
                        f"({', '.join(MARKS)}); leave it out")
    return examples


def _is_filled(record: Record, *names: str) -> bool:
    # Tables have the columns of all records, so a null column counts as missing.
    return all(record.get(name) is not None for name in names)


def _best_of(formats: Iterable[tuple[str, ...]], record: Record, mapped: Names) -> tuple[str, ...]:
    """Return the first format whose columns a record has, of those with most columns that --map names."""
    complete = [columns for columns in formats if _is_filled(record, *filter(None, columns))]
    return max(complete, key=lambda columns: len({*columns}.intersection(mapped)), default=())


def _dialogs_in(record: Record, columns: tuple[str, ...], drop: Drop, also_used: str = "") -> list[Messages]:
    """Return the dialogs in a record that has columns of CHATS."""
    request, answer = columns
    marks = [name for name in MARKS if isinstance(record.get(name), list)]
    used, merged = {*FIELDS["record"], *FIELDS[request], *columns, *marks, also_used}, [record]
    if answer == "instances":  # of Alpaca's seed tasks
        instances = record["instances"]
        if not isinstance(instances, list) or not instances or not all(
                isinstance(instance, Mapping) for instance in instances):
            raise DataError('instances is not a list of {"input", "output"}')
        for instance in instances:
            drop_others(instance, FIELDS["instances[]"], drop, "instances[].")
        used -= {"input"} if all("input" in instance for instance in instances) else set()
        merged, answer = [{**record, "output": None, **instance} for instance in instances], "output"
    drop_others(record, used, drop)
    dialogs = []
    for one in merged:
        dialog = _request_in(request, one, drop)
        dialog += messages_in(answer, one.get(answer), "assistant", drop) if answer else []
        turns = [message["role"] == "assistant" for message in dialog]
        for name, value in one.items():
            if (name not in MARKS and isinstance(value, list) and len(value) in (len(turns), sum(turns))
                    and all(isinstance(mark, (bool, int, float)) for mark in value)):
                _refuse_other_mark(name)
        for name in marks:
            if len(one[name]) != len(dialog):
                raise DataError(f"{name} has length {len(one[name])} for {counted(len(dialog), 'message')}, "
                                "expected one for each message")
            dialog = [message if mark is None else _marked(f"message {number}", message, {name: mark})
                      for number, (message, mark) in enumerate(zip(dialog, one[name]), 1)]
        dialogs.append(_with_column(dialog, one, drop))
    return dialogs


def pair_of(where: str, record: Record, drop: Drop = str, mapped: Names = ()) -> Example:
    """Return the preference in a record."""
    missing = [name for name in ("chosen", "rejected") if not _is_filled(record, name)]
    label = next((name for name in LABELS if _is_filled(record, name)), "")
    if len(missing) == 2 and label and (columns := _best_of(CHATS, record, mapped)):
        return unpaired_of(where, record, columns, drop, label)
    if missing:
        raise DataError(f"has no {' and no '.join(missing)}: it has {contents_of(record)}, expected "
                        "chosen and rejected, with or without a prompt, or prompt, completion and label "
                        "(--map prompt=COLUMN,... says which columns these are)")
    request = "".join(_best_of(zip(REQUESTS), record, mapped))
    used = {*FIELDS["record"], *FIELDS.get(request, ()), request, "chosen", "rejected"}
    drop_others(record, used, drop)
    prompt = _unmarked(_request_in(request, record, drop)) if request else []
    chosen, rejected = (_spoken_turns(_parsed(name, record[name])) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is text, the other a dialog; expected the same kind")
    if isinstance(chosen, str) and not request:
        shared, chosen, rejected = _split_texts(text_in("chosen", chosen), text_in("rejected", rejected))
        prompt = [{"role": "user", "content": shared}]

    # The common prefix of dialogs is the prompt, or part of it.
    dialogs = [messages_in(name, value, "assistant" if isinstance(value, str) else "", drop)
               for name, value in (("chosen", chosen), ("rejected", rejected))]
    if not all(dialogs):
        raise DataError(f"{'rejected' if dialogs[0] else 'chosen'} has no messages")
    if any(dialog[-1]["role"] != "assistant" for dialog in dialogs):
        raise DataError("chosen and rejected must end in an assistant's message")
    if any(dialog[-1].get("tool_calls") for dialog in dialogs):
        raise DataError("chosen or rejected ends in a tool call; pairs compare answers in words")
    if not all(is_target(dialog[-1]) for dialog in dialogs):
        raise DataError("chosen or rejected is excluded from training by a mark; leave out the pair")
    (*context, chosen), (*other_context, rejected) = map(_unmarked, dialogs)
    if context != other_context:
        raise DataError("chosen and rejected have no common prompt: they differ before the last message")
    if request in ("messages", "conversations") and context and prompt[-1:] in ([chosen], [rejected]):
        drop(request)  # the whole chosen dialog, as in UltraFeedback
        prompt = []
    prompt = check_turns(_with_column(_joined(prompt, context), record, drop), "user")
    if chosen | {"content": chosen["content"].strip()} == rejected | {"content": rejected["content"].strip()}:
        raise DataError("chosen and rejected are equal")
    return Example(where, prompt, (chosen, rejected))


def _joined(prompt: Messages, context: Messages) -> Messages:
    """Return the prompt of a pair, given its column and the beginning of both dialogs, which may overlap."""
    if not prompt or not context or prompt[-len(context):] == context:
        return prompt or context
    system = prompt[:1] if prompt[0]["role"] == "system" != context[0]["role"] else []
    rest = prompt[len(system):]
    if rest not in [context[start:start + len(rest)] for start in range(len(context))]:
        raise DataError("its prompt is not in the messages of chosen and rejected; leave one of them out")
    return [*system, *context]


def unpaired_of(where: str, record: Record, columns: tuple[str, ...], drop: Drop, name: str) -> Example:
    """Return the answer in a record, and whether its label, in this column, calls it good."""
    label = record[name]
    with suppress(ValueError, RecursionError):  # CSV has only text
        label = json.loads(label.lower()) if isinstance(label, str) else label
    if label not in (True, False):
        raise DataError(f"has the label {label!r:.40}, expected true or false")
    dialog, *more = _dialogs_in(record, columns, drop, name)
    if more:
        raise DataError("has several instances, but one label")
    if check_turns(dialog, "assistant")[-1].get("tool_calls"):
        raise DataError("its completion is a tool call; only answers in words can have a label")
    if not is_target(dialog[-1]):
        raise DataError("its answer is excluded from training by a mark; leave it out")
    *prompt, answer = _unmarked(dialog)
    return Example(where, check_turns(prompt, "user"), (answer,), label=bool(label))


def prompt_of(where: str, record: Record, drop: Drop = str, mapped: Names = ()) -> Example:
    """Return the prompt of a record, which may end before the answer, and the whole record."""
    request = "".join(_best_of(zip(REQUESTS), record, mapped))
    if not request:
        raise DataError(f"has no prompt: it has {contents_of(record)}, expected {', '.join(REQUESTS[:-1])} "
                        f"or {REQUESTS[-1]} (--map prompt=COLUMN says which column it is)")
    prompt = _with_column(_unmarked(_request_in(request, record, drop)), record, drop)
    fields, others = [], [name for name in (*REQUESTS, "input", "history") if _is_filled(record, name)
                          and name != request and name not in FIELDS[request]]
    for name, value in record.items():
        try:
            fields.append(f"{json.dumps(name)}: {json.dumps(value, default=_plain)}")
        except (TypeError, ValueError, RecursionError):
            others.append(name)
    for name in others:
        drop(name)
    return Example(where, check_turns(prompt, "user"), record=f"{{{', '.join(fields)}}}")


def _plain(value: Any) -> str:
    """Return a value that JSON lacks as text, such as 2026-01-31."""
    if not isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        raise TypeError(type_name(value))
    if isinstance(value, decimal.Decimal) and value.is_finite() and value == int(value):
        return str(int(value))  # 72.00 is 72
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _request_in(column: str, record: Record, drop: Drop) -> Messages:
    """Return the messages in one of the columns REQUESTS, after those in `history`."""
    value = record[column]
    if column in ("messages", "conversations"):
        return messages_in(column, value, drop=drop)
    turns = []
    for number, turn in enumerate(json_in("history", record.get("history") or [], list)):
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError(f"history[{number}] is {type_name(turn)}, expected [question, answer]")
        turns += [{"role": role, "content": text_in(f"history[{number}]", text)}
                  for role, text in zip(("user", "assistant"), turn)]
    if column == "instruction":  # Alpaca's
        content, more = text_in(column, value), record.get("input")
        content += "" if _is_blank(more) else "\n\n" + text_in("input", more)
        return [*turns, {"role": "user", "content": content}]
    value = _parsed(column, value)
    spoken = _spoken_turns(value)
    if spoken is not value and not spoken[-1]["content"].strip():
        spoken = spoken[:-1]  # the line `Assistant:`, after which the answer follows
    # Earlier answers are context unless they are marked, as in TRL; those in `history` are targets.
    return turns + [{"train": False, **message} if message["role"] == "assistant" else message
                    for message in messages_in(column, spoken, "user", drop)]


def _parsed(name: str, value: Any) -> Any:
    """Return the messages, or the one message, of a text that is their JSON; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            message = json.loads(value)
            return message if message.keys() in ({"role", "content"}, {"from", "value"}) else value
    is_written = isinstance(value, str) and WRITTEN_DIALOG.fullmatch(value)
    return json_in(name, value, list) if is_written else value


def _spoken_turns(value: Any) -> Any:
    """Return the messages of a text that starts with `Human:`, and any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("Human:"):
        return value
    turns = SPOKEN_TURN.split("\n\n" + value.lstrip())[1:]
    return [{"role": "user" if speaker == "Human" else "assistant", "content": words.strip()}
            for speaker, words in zip(turns[::2], turns[1::2])]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts into their common prefix, up to the end of a line, sentence or word, and two rests."""
    shared = os.path.commonprefix([chosen, rejected])
    for end in PROMPT_ENDS:
        for cut in reversed([match.start() for match in end.finditer(shared)]):
            texts = shared[:cut], chosen[cut:].strip(), rejected[cut:].strip()
            if all(text.strip() for text in texts):
                return texts
    raise DataError("has no prompt, and chosen and rejected have no common beginning; name the column prompt")


def messages_in(name: str, value: Any, role: str = "", drop: Drop = str, may_be_blank: bool = False
                ) -> Messages:
    """Return the messages in a column. With a `role`, the column may also be a text, one message of it."""
    value = json_in(name, value, list) if isinstance(value, str) and not role else _parsed(name, value)
    if isinstance(value, str):
        return [{"role": role, "content": text_in(name, value)}]
    if isinstance(value, Mapping) and value and all(isinstance(each, list) for each in value.values()):
        if len({*map(len, value.values())}) > 1:  # a table can hold messages as an object of lists
            raise DataError(f"{name} is an object of lists of unequal lengths, expected a value a message")
        value = [dict(zip(value, each)) for each in zip(*value.values())]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        expected = "a list of messages" + (" or text" if role else "")
        raise DataError(f"{name} is {type_name(value)}, expected {expected}")
    return [_message_in(f"{name}[{number}]", message, lambda field: drop(f"{name}[].{field}"), may_be_blank)
            for number, message in enumerate(value)]


def _message_in(name: str, message: Any, drop: Drop, may_be_blank: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{name} is {type_name(message)}, expected a message")
    role_name, content_name = ("role", "content") if message.get("from") is None else ("from", "value")
    if role_name not in message:
        raise DataError(f"{name} has no {role_name!r}; it has {columns_of(message)}")
    written, content, read = message[role_name], message.get(content_name), {}
    role = ROLES.get(written) if isinstance(written, str) else None
    if role is None:
        raise DataError(f"{name} has the role {written!r:.40}; known are {', '.join(ROLES)}")
    if len(message) == 2 and isinstance(content, str) and content.strip() and written not in CALL_ROLES:
        return {"role": role, "content": text_in(f"{name}.{content_name}", content)}  # the usual case, faster
    others = [key for key in message if key not in (role_name, content_name) and key not in FIELDS[role]
              and message[key] is not None]
    marks = {key: message[key] for key in others if key in MARKS}
    for key in (key for key in others if key not in MARKS):
        _refuse_other_mark(f"{name}.{key}")
        if key in MEDIA and message[key]:
            raise DataError(f"{name} has {key}; only text is supported, leave it out")
        drop(key)
    if role == "assistant":
        # Of several fields with calls or reasoning, the first one is used.
        columns = [content_name] if written in CALL_ROLES else []
        columns += [key for key in ("tool_calls", "function_call") if message.get(key)]
        if columns:
            read["tool_calls"] = calls_in(f"{name}.{columns[0]}", message[columns[0]], drop)
        content = None if written in CALL_ROLES else content
        thoughts = [key for key in REASONING if not _is_blank(message.get(key))]
        if thoughts and isinstance(message[thoughts[0]], str):
            read["reasoning_content"] = message[thoughts.pop(0)]
        for key in (*columns[1:], *thoughts):
            drop(key)
    is_optional = read.get("tool_calls") or role in ("system", "tool")
    is_elsewhere = content is None and not {*CONTENTS}.isdisjoint(others)
    if content_name not in message and not is_optional or is_elsewhere:
        raise DataError(f"{name} has no {content_name!r}; it has {columns_of(message)}")
    if isinstance(content, list) and len(content) > 1:
        read["parts"] = [part.get("text") for part in content if isinstance(part, Mapping)]
    content = _text_of(f"{name}.{content_name}", content, drop, is_optional, may_be_blank)
    read |= {key: message.get(key) for key in ("name", "tool_call_id") if key in FIELDS[role]}
    read = {"role": role, "content": content} | {key: value for key, value in read.items() if value}
    return _marked(name, read, marks) if marks else read


def _refuse_other_mark(name: str) -> None:
    if OTHER_MARK.search(name.rpartition(".")[2]):
        raise DataError(f"{name} seems to say what is trained on; use {', '.join(MARKS)} with true or false "
                        "for the whole message, or leave it out")


def _text_of(name: str, content: Any, drop: Drop, is_optional: bool, may_be_blank: bool) -> str:
    """Return content as text. Parts in OpenAI's format are joined as by templates that read them."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise DataError(f"{name}[{number}] is not text, its type is {kind!r:.40}; only text is supported "
                            f"({', '.join(TEXT_PARTS)})")
        text_in(f"{name}[{number}].text", part.get("text"), may_be_blank=True)
        drop_others(part, FIELDS["content[]"], drop, "content[].")
    content = "".join(part["text"] for part in content) if isinstance(content, list) else content
    return "" if is_optional and _is_blank(content) else text_in(name, content, may_be_blank)


def _marked(name: str, message: dict[str, Any], marks: Record) -> dict[str, Any]:
    """Return a message with its marks, which must be true or false, as `train` = False or nothing."""
    for mark, value in marks.items():
        if isinstance(value, str) or value not in (0, 1):
            raise DataError(f"{name} has {mark} = {value!r:.40}, expected true or false (1 or 0), since "
                            "a turn is a target or not")
    train = {bool(value) == MARKS[mark] for mark, value in marks.items()}
    if len(train) > 1:
        raise DataError(f"{name} has marks that contradict each other: {', '.join(marks)}")
    if train == {True} and message["role"] != "assistant":
        raise DataError(f"{name} is marked for training ({', '.join(marks)}), but is the "
                        f"{message['role']}'s; only the assistant's can be: remove the mark")
    return message | ({"train": train == {True}} if train and message["role"] == "assistant" else {})


def _unmarked(messages: Messages) -> Messages:
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def calls_in(name: str, calls: Any, drop: Drop = str) -> list[dict[str, Any]]:
    """Return tool calls, {"type", "function": {"name", "arguments"}}, with arguments parsed from JSON."""
    read = []
    with suppress(DataError):  # a single call
        calls = [json_in(name, calls, dict)]
    for number, call in enumerate(json_in(name, calls, list)):
        where = f"{name}[{number}]"
        call = json_in(where, call, dict)
        function = json_in(where, call.get("function") or call, dict)
        nested = {} if function is call else call
        drop_others(nested, FIELDS["tool_calls[]"], drop, "tool_calls[].")
        used = FIELDS["tool_calls[].function"] if nested else FIELDS["tool_calls[].function"] | {"id", "type"}
        drop_others(function, used, drop, "tool_calls[].function.")
        if call.get("type") not in (None, "function"):
            drop("tool_calls[].type")
        if function.get("arguments") and function.get("parameters"):
            drop("tool_calls[].function.parameters")
        elif not {"arguments", "parameters"} & function.keys() and not {*ARGUMENTS}.isdisjoint(function):
            raise DataError(f"{where} has no 'arguments'; it has {columns_of(function)}")
        arguments = function.get("arguments") or function.get("parameters") or {}
        read.append({**({"id": str(call["id"])} if call.get("id") else {}), "type": "function", "function": {
            "name": text_in(f"{where}.name", function.get("name")),
            "arguments": json_in(f"{where}.arguments", arguments, dict)}})
    return read


def json_in(name: str, value: Any, expected: type) -> Any:
    """Return a list or an object, which may also be given as its JSON."""
    try:
        value = json.loads(value, object_pairs_hook=sources.unique) if isinstance(value, str) else value
    except json.JSONDecodeError:
        pass  # it is text
    except (ValueError, RecursionError) as error:  # a name that occurs twice; nested too deeply
        raise DataError(f"{name}: {error}") from error
    if not isinstance(value, expected):
        kind = {list: "a list", dict: "an object"}[expected]
        raise DataError(f"{name} is {type_name(value)}, expected {kind}, or its JSON")
    return value


def text_in(name: str, value: Any, may_be_blank: bool = False) -> str:
    """Return a value, after checking that it is valid text and not blank."""
    flaw = flaw_of(value) or ("" if may_be_blank or not BLANK.fullmatch(value) else "is empty")
    if flaw:
        raise DataError(f"{name} {flaw}")
    return value


def check_texts(values: Record) -> None:
    """Raise DataError if one of the texts in some fields, such as tools, is not valid."""
    for name, value in values.items():
        if flaw := next(filter(None, map(flaw_of, texts_in(value))), None):
            raise DataError(f"{name} {flaw}")


def _is_blank(text: Any) -> bool:
    return text is None or isinstance(text, str) and BLANK.fullmatch(text) is not None


def with_system(messages: Messages, system_prompt: Any) -> Messages:
    """Prepend a system message, unless the messages have one or the prompt is blank."""
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"]:
            return messages
        messages = messages[1:]
    if _is_blank(system_prompt):
        return messages
    return [{"role": "system", "content": text_in("system", system_prompt)}, *messages]


def _with_column(messages: Messages, record: Record, drop: Drop) -> Messages:
    """Prepend the system message of a record, unless the messages have another one."""
    system = record.get("system")
    messages = with_system(messages, system)
    if not _is_blank(system) and messages[0]["content"] != system:
        drop("system")
    return messages


def check_turns(messages: Messages, last: str) -> Messages:
    """Return the messages, after checking their roles; the last message must have the role `last`."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise DataError("has no messages" if not messages else "has only a system message")
    before, expected = "", "user"
    for number, message in enumerate(turns, 1 + len(messages) - len(turns)):
        role = message["role"]
        if role != expected and (role, before) != ("tool", "tool"):  # a call may have several results
            raise DataError(f"message {number} is the {role}'s, expected the {expected}'s: user and "
                            "assistant take turns, after at most one system message; the results of tools "
                            "follow a message with tool_calls")
        expected = "assistant" if role != "assistant" else "tool" if message.get("tool_calls") else "user"
        before = role
    if before != last and (before, last) != ("tool", "user"):
        if last == "user":
            raise DataError("its prompt ends in an assistant's message, expected a user's")
        raise DataError("has no assistant turn" if len(turns) == 1 else
                        f"ends in a {before}'s message, which has no answer; leave it out")
    return messages
