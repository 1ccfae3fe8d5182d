"""Reads chats and preference pairs, in any of the common formats, as lists of messages.

A message is {"role", "content"} with the roles system, user and assistant. A chat is at most one system
message, then turns of user and assistant; the assistant's is the last.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from common.errors import DataError
from common.text import command
from data_pipeline.readers import Reading, columns_of, contents_of, flaw_of
from data_pipeline.sources import Source, read_records

Messages = list[dict[str, str]]

CHAT_SHORTCUTS = {
    "ultrachat": Source(name="HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "tulu-3": Source(name="allenai/tulu-3-sft-mixture"),
    "alpaca": Source(name="tatsu-lab/alpaca"),
}
PAIR_SHORTCUTS = {
    "ultrafeedback": Source(name="HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
    "hh-rlhf": Source(name="Anthropic/hh-rlhf"),
}
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
         "model": "assistant"}
TEXT_PARTS = ("text", "input_text", "output_text")  # of OpenAI's chat completions, and of its responses
TOOLS, REASONING = ("tools", "functions"), ("reasoning_content", "reasoning", "thinking")
UNPAIRED = ("has a label of its own (prompt, completion, label), and training on unpaired labels is not "
            "supported; give ")
# Anthropic's format of a dialog in one text.
SPOKEN_TURN = re.compile(r"\n\n(Human|Assistant):")
# Where a prompt may end within the beginning that two texts share, the best place first.
PROMPT_ENDS = (re.compile(r"\n"), re.compile(r"(?<=[.?!:])\s"), re.compile(r"\s"))


class Chat(NamedTuple):
    """A dialog whose last message is the assistant's."""

    where: str
    messages: Messages


class Pair(NamedTuple):
    """A dialog whose last message is the user's, and two answers, of which the first was preferred."""

    where: str
    prompt: Messages
    chosen: str
    rejected: str


def read_chats(source: Source, reading: Reading) -> Iterator[Chat]:
    """Yield the chats of a source; refuse records that are not chats."""
    return _read(source, reading, chats_of)


def read_pairs(source: Source, reading: Reading) -> Iterator[Pair]:
    """Yield the preference pairs of a source; refuse records that are not pairs."""
    return _read(source, reading, lambda where, record: [pair_of(where, record)])


def _read(source: Source, reading: Reading, parse: Callable[[str, dict], list]) -> Iterator:
    # Without a column's name a Parquet file gives all its columns.
    for where, record in read_records(replace(source, column=""), reading):
        try:
            examples = parse(where, record)
        except DataError as error:
            reading.refuse(where, str(error))
            continue
        reading.dropped.update(dropped_from(record))
        yield from examples


def dropped_from(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of each tool list and each reasoning in a record, which are not trained on."""
    yield from (name for name in TOOLS if record.get(name))
    for messages in record.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                yield from (name for name in REASONING if message.get(name))


def chats_of(where: str, record: Mapping[str, Any]) -> list[Chat]:
    """Return the chats in a record: one, or as many as an instruction has instances.

    Raises:
        DataError: the record cannot be used; the message is the reason.
    """
    # Tables have the columns of all their records, so a null column counts as missing.
    filled = {name for name, value in record.items() if value is not None}
    if "messages" in filled:
        dialogs = [messages_in("messages", record["messages"])]
    elif "conversations" in filled:
        dialogs = [messages_in("conversations", record["conversations"])]
    elif {"instruction", "instances"} <= filled:  # Alpaca's seed tasks
        instances = record["instances"]
        if not isinstance(instances, list) or not instances or not all(
                isinstance(instance, Mapping) for instance in instances):
            raise DataError('instances is not a list of {"input", "output"}')
        dialogs = [_instruction_in({**record, **instance}) for instance in instances]
    elif {"instruction", "output"} <= filled:
        dialogs = [_instruction_in(record)]
    elif {"prompt", "completion"} <= filled:
        if "label" in filled:
            raise DataError(f"{UNPAIRED}the good ones without the label")
        dialogs = [[*messages_in("prompt", record["prompt"], "user"),
                    *messages_in("completion", record["completion"], "assistant")]]
    elif {"chosen", "rejected"} <= filled:
        raise DataError("is a preference, not a chat; prepare it with "
                        f"{command('scripts/load_dpo_dataset.py')}")
    else:
        raise DataError(f"is not a chat: it has {contents_of(record)}, expected messages, conversations, "
                        "instruction and output, or prompt and completion (--map gives columns other names)")
    return [Chat(where, check_turns(with_system(dialog, record.get("system")), "assistant"))
            for dialog in dialogs]


def pair_of(where: str, record: Mapping[str, Any]) -> Pair:
    """Return the preference in a record.

    Raises:
        DataError: the record cannot be used; the message is the reason.
    """
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if missing and {"completion", "label"} <= set(record):
        raise DataError(f"{UNPAIRED}pairs of a chosen and a rejected answer")
    if missing:
        raise DataError(f"has no {' and no '.join(missing)}: it has {contents_of(record)}, expected "
                        "chosen and rejected, with or without a prompt (--map gives columns other names)")
    prompt = _prompt_in(record)
    chosen, rejected = (_spoken_turns(record[name]) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is text, the other a dialog; expected the same of both")

    # What both begin with is the prompt, or a part of it.
    if isinstance(chosen, str):
        if prompt is None:
            shared, chosen, rejected = split_texts(text_in("chosen", chosen), text_in("rejected", rejected))
            prompt = [{"role": "user", "content": shared}]
    else:
        shared, chosen, rejected = split_dialogs(messages_in("chosen", chosen),
                                                 messages_in("rejected", rejected))
        if prompt and shared and prompt[-1] not in shared:
            raise DataError("its prompt is not in the messages of chosen and rejected; leave one of them out")
        prompt = shared or prompt

    # Both answers must be usable and differ.
    prompt = check_turns(with_system(prompt or [], record.get("system")), "user")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        text_in(name, answer)
    if chosen.strip() == rejected.strip():
        raise DataError("chosen and rejected are equal")
    return Pair(where, prompt, chosen, rejected)


def _prompt_in(record: Mapping[str, Any]) -> Messages | None:
    """Return the messages before both answers, or None if the record has no column for them."""
    if record.get("prompt") is not None:
        prompt = _spoken_turns(record["prompt"])
        if prompt != record["prompt"] and not prompt[-1]["content"].strip():
            prompt = prompt[:-1]  # the line `Assistant:`, after which the answer follows
        return messages_in("prompt", prompt, "user")
    if record.get("instruction") is not None:
        return [_request_in(record)]
    if record.get("question") is not None:
        return messages_in("question", record["question"], "user")
    return None


def messages_in(name: str, value: Any, role: str = "") -> Messages:
    """Return the messages in a column: {"role", "content"} or ShareGPT's {"from", "value"}.

    Args:
        role: if given, the column may also be a text, which is one message of this role.
    Raises:
        DataError: it holds something else.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": text_in(name, value)}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        expected = "a list of messages" + (" or text" if role else "")
        raise DataError(f"{name} is {_type_of(value)}, expected {expected}")
    return [_message_in(f"{name}[{number}]", message) for number, message in enumerate(value)]


def _message_in(name: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise DataError(f"{name} is {_type_of(message)}, expected a message")
    role_name, content_name = ("from", "value") if "from" in message else ("role", "content")
    absent = [key for key in (role_name, content_name) if key not in message]
    if absent:
        raise DataError(f"{name} has no {absent[0]!r}; it has {columns_of(message)}")
    role = message[role_name]
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{name} has the role {role!r:.40}; known are {', '.join(ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise DataError(f"{name} calls a tool, which is not supported")
    if message.get("weight", 1) == 0 or message.get("train", True) is False:
        raise DataError(f"{name} is excluded from training (weight, train), which is not supported; leave "
                        "the mark out")
    content = message[content_name]
    if isinstance(content, list):
        content = _joined_parts(f"{name}.{content_name}", content)
    if ROLES[role] == "system" and _is_blank(content):
        return {"role": "system", "content": ""}
    return {"role": ROLES[role], "content": text_in(f"{name}.{content_name}", content)}


def _joined_parts(name: str, parts: list) -> str:
    """Return the text of a content that is a list of parts, as OpenAI's API takes it."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise DataError(f"{name}[{number}] is not text, its type is {kind!r:.40}; only text can be "
                            f"trained on ({', '.join(TEXT_PARTS)})")
        if flaw := flaw_of(part.get("text")):
            raise DataError(f"{name}[{number}].text {flaw}")
        texts.append(part["text"])
    return "".join(texts)


def _instruction_in(record: Mapping[str, Any]) -> Messages:
    """Return Alpaca's instruction and output as a dialog."""
    return [_request_in(record), {"role": "assistant", "content": text_in("output", record.get("output"))}]


def _request_in(record: Mapping[str, Any]) -> dict[str, str]:
    """Return Alpaca's instruction as the user's message, followed by the input if there is one."""
    content, more = text_in("instruction", record["instruction"]), record.get("input")
    if not _is_blank(more):
        content += "\n\n" + text_in("input", more)
    return {"role": "user", "content": content}


def _spoken_turns(value: Any) -> Any:
    """Return the messages of a text that begins with `Human:`, and any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("Human:"):
        return value
    parts = SPOKEN_TURN.split("\n\n" + value.lstrip())[1:]
    return [{"role": "user" if speaker == "Human" else "assistant", "content": words.strip()}
            for speaker, words in zip(parts[::2], parts[1::2])]


def text_in(name: str, value: Any) -> str:
    """Return a value that is valid text and not blank.

    Raises:
        DataError: it is not.
    """
    flaw = flaw_of(value) or ("" if value.strip() else "is empty")
    if flaw:
        raise DataError(f"{name} {flaw}")
    return value


def _type_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _is_blank(text: Any) -> bool:
    return text is None or isinstance(text, str) and not text.strip()


def with_system(messages: Messages, system_prompt: Any) -> Messages:
    """Return the messages with a system message in front, unless they have one or the prompt is blank."""
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"]:
            return messages
        messages = messages[1:]
    if _is_blank(system_prompt):
        return messages
    return [{"role": "system", "content": text_in("system", system_prompt)}, *messages]


def check_turns(messages: Messages, last: str) -> Messages:
    """Return the messages after checking their roles.

    Args:
        last: the role that the last message must have.
    Raises:
        DataError: the roles do not alternate as the module's docstring says, or the last one is another.
    """
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise DataError("has no messages" if not messages else "has nothing but a system message")
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            raise DataError(f"message {number + 1 + len(messages) - len(turns)} is the {message['role']}'s, "
                            f"expected the {expected}'s: user and assistant take turns, after at most one "
                            "system message")
    if turns[-1]["role"] != last:
        if last == "user":
            raise DataError("its prompt ends in an assistant's message, expected a user's")
        raise DataError("has no assistant turn" if len(turns) == 1 else
                        "ends in a user's message, which has no answer; leave it out")
    return messages


def split_dialogs(chosen: Messages, rejected: Messages) -> tuple[Messages, str, str]:
    """Return the messages that two dialogs share, and their answers.

    Raises:
        DataError: they differ before the last message, or a last message is not the assistant's.
    """
    if not chosen or not rejected:
        raise DataError(f"{'rejected' if chosen else 'chosen'} has no messages")
    if chosen[:-1] != rejected[:-1]:
        raise DataError("chosen and rejected differ before their last message, so they have no common prompt")
    if (chosen[-1]["role"], rejected[-1]["role"]) != ("assistant", "assistant"):
        raise DataError("chosen and rejected must end in an assistant's message")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the beginning that two texts share, which is their prompt, and their answers.

    The prompt ends at the end of a line, else of a sentence, else of a word.

    Raises:
        DataError: they share no beginning that could be a prompt.
    """
    shared = os.path.commonprefix([chosen, rejected])
    for end in PROMPT_ENDS:
        for place in reversed([found.start() for found in end.finditer(shared)]):
            parts = shared[:place], chosen[place:].strip(), rejected[place:].strip()
            if all(part.strip() for part in parts):
                return parts
    raise DataError("has no prompt, and chosen and rejected share no beginning that could be one; name the "
                    "column prompt")
