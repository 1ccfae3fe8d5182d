"""Chats and preference pairs in the shapes that data sets have, told by their columns and brought to one: lists of messages.

A message is {"role", "content"} with the roles system, user and assistant. A chat is at most one system
message, then turns of user and assistant, who answers last.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from common.errors import DataError
from data_pipeline.sources import Reading, Source, flaw_of, read_records

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
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "model": "assistant"}
CHAT_SHAPES = "messages, conversations, instruction and output, or prompt and completion"
# Anthropic's way of writing a dialog as one text.
SPOKEN_TURN = re.compile(r"\n\n(Human|Assistant):")
# Where a prompt may end within what two texts share, the best place first.
PROMPT_ENDS = (re.compile(r"\n"), re.compile(r"(?<=[.?!:])\s"), re.compile(r"\s"))


class Chat(NamedTuple):
    """A dialog that ends in the assistant's words."""

    where: str
    messages: Messages


class Pair(NamedTuple):
    """A dialog that waits for the assistant, and two answers of which one was preferred."""

    where: str
    prompt: Messages
    chosen: str
    rejected: str


def read_chats(source: Source, reading: Reading) -> Iterator[Chat]:
    """The chats of a source; a record that is none is refused."""
    return _read(source, reading, chats_of)


def read_pairs(source: Source, reading: Reading) -> Iterator[Pair]:
    """The preference pairs of a source; a record that is none is refused."""
    return _read(source, reading, lambda where, record: [pair_of(where, record)])


def _read(source: Source, reading: Reading, parse: Callable[[str, dict], list]) -> Iterator:
    # No column is named, so that a Parquet file gives all of them.
    for where, record in read_records(replace(source, column=""), reading):
        try:
            examples = parse(where, record)
        except DataError as error:
            reading.refuse(where, str(error))
            continue
        yield from examples


def chats_of(where: str, record: Mapping[str, Any]) -> list[Chat]:
    """The chats in a record: one, or as many as an instruction has instances.

    Raises:
        DataError: the record cannot be used, with the reason.
    """
    filled = {name for name, value in record.items() if value is not None}
    if "messages" in filled:
        dialogs = [messages_in("messages", record["messages"])]
    elif "conversations" in filled:
        dialogs = [messages_in("conversations", record["conversations"])]
    elif "instruction" in filled and "instances" in filled:
        dialogs = [instruction_in({**record, **instance}) for instance in instances_in(record["instances"])]
    elif {"instruction", "output"} <= filled:
        dialogs = [instruction_in(record)]
    elif {"prompt", "completion"} <= filled:
        if "label" in filled:
            raise DataError("is labelled good or bad by itself (prompt, completion, label), and learning "
                            "from unpaired labels is not supported; give the good ones without the label")
        dialogs = [[*messages_in("prompt", record["prompt"], "user"),
                    *messages_in("completion", record["completion"], "assistant")]]
    elif {"chosen", "rejected"} <= filled:
        raise DataError("is a preference, not a chat; prepare it with scripts/load_dpo_dataset.py")
    else:
        raise DataError(f"is no chat: it has {columns_of(record)}, expected {CHAT_SHAPES}")
    return [Chat(where, in_order(with_system(dialog, record.get("system")), "assistant")) for dialog in dialogs]


def pair_of(where: str, record: Mapping[str, Any]) -> Pair:
    """The preference in a record.

    Raises:
        DataError: the record cannot be used, with the reason.
    """
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if missing and {"completion", "label"} <= set(record):
        raise DataError("is labelled good or bad by itself (prompt, completion, label), and learning from "
                        "unpaired labels is not supported; give pairs of a chosen and a rejected answer")
    if missing:
        raise DataError(f"has no {' and no '.join(missing)}: it has {columns_of(record)}, expected chosen "
                        "and rejected, with or without a prompt")
    prompt = prompt_in(record)
    chosen, rejected = (spoken_turns(record[name]) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is text and the other a dialog; expected the same of both")
    if isinstance(chosen, str):
        if prompt is None:
            shared, chosen, rejected = split_texts(text_in("chosen", chosen), text_in("rejected", rejected))
            prompt = [{"role": "user", "content": shared}]
    else:
        before, chosen, rejected = split_dialogs(messages_in("chosen", chosen), messages_in("rejected", rejected))
        if prompt and before and prompt[-1] not in before:
            raise DataError("its prompt is not in the messages of chosen and rejected; leave one of them out")
        prompt = before or prompt
    prompt = in_order(with_system(prompt or [], record.get("system")), "user")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        text_in(name, answer)
    if chosen.strip() == rejected.strip():
        raise DataError("chosen and rejected are equal")
    return Pair(where, prompt, chosen, rejected)


def prompt_in(record: Mapping[str, Any]) -> Messages | None:
    """The messages that come before both answers, None where the record leaves it to what these share."""
    if record.get("prompt") is not None:
        prompt = spoken_turns(record["prompt"])
        if prompt != record["prompt"] and not prompt[-1]["content"].strip():
            prompt = prompt[:-1]  # its last line says no more than that the assistant is asked
        return messages_in("prompt", prompt, "user")
    if record.get("instruction") is not None:
        return [user_asks(record)]
    if record.get("question") is not None:
        return messages_in("question", record["question"], "user")
    return None


def messages_in(name: str, value: Any, role: str = "") -> Messages:
    """The messages in a column, {"role", "content"} or ShareGPT's {"from", "value"}; a text is one of the given role.

    Raises:
        DataError: it holds something else.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": text_in(name, value)}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{name} is {'null' if value is None else type(value).__name__}, expected a list of messages"
                        + (" or text" if role else ""))
    return [message_in(f"{name}[{number}]", message) for number, message in enumerate(value)]


def message_in(name: str, message: Any) -> dict[str, str]:
    """One message, by whatever names its role and content go.

    Raises:
        DataError: it is none, its role is unknown, or its content is no text.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{name} is {'null' if message is None else type(message).__name__}, expected a message")
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
        raise DataError(f"{name} is marked as not to be learned (weight, train), which is not supported; leave the mark out")
    content = message[content_name]
    if ROLES[role] == "system" and is_blank(content):
        return {"role": "system", "content": ""}
    return {"role": ROLES[role], "content": text_in(f"{name}.{content_name}", content)}


def instruction_in(record: Mapping[str, Any]) -> Messages:
    """Alpaca's instruction, with the input below it where there is one, and its output."""
    return [user_asks(record), {"role": "assistant", "content": text_in("output", record.get("output"))}]


def user_asks(record: Mapping[str, Any]) -> dict[str, str]:
    """The message of a user who gives an instruction and perhaps an input to it."""
    instruction, more = text_in("instruction", record["instruction"]), record.get("input")
    return {"role": "user", "content": instruction if is_blank(more) else instruction + "\n\n" + text_in("input", more)}


def instances_in(value: Any) -> list[Mapping[str, Any]]:
    """The instances of an instruction, as Alpaca's seed tasks have them: each an input and an output."""
    if not isinstance(value, list) or not value or not all(isinstance(instance, Mapping) for instance in value):
        raise DataError('instances is not a list of {"input", "output"}')
    return value


def spoken_turns(value: Any) -> Any:
    """The messages of a dialog that is written as one text, beginning in `Human:`; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("Human:"):
        return value
    parts = SPOKEN_TURN.split("\n\n" + value.lstrip())[1:]
    return [{"role": "user" if speaker == "Human" else "assistant", "content": words.strip()}
            for speaker, words in zip(parts[::2], parts[1::2])]


def text_in(name: str, value: Any) -> str:
    """A text that is sound and says something.

    Raises:
        DataError: it is not.
    """
    flaw = flaw_of(value) or ("" if value.strip() else "is empty")
    if flaw:
        raise DataError(f"{name} {flaw}")
    return value


def columns_of(record: Mapping[str, Any]) -> str:
    """The names of a record's columns, for a complaint."""
    names = [f"{name!r:.40} (null)" if value is None else f"{name!r:.40}" for name, value in record.items()]
    return ", ".join(names[:20] + ["..."] * (len(names) > 20)) or "no columns"


def is_blank(text: Any) -> bool:
    """Whether a value that may be left out says nothing."""
    return text is None or isinstance(text, str) and not text.strip()


def with_system(messages: Messages, system_prompt: Any) -> Messages:
    """The messages with a system message in front, unless they have one or there is nothing to say."""
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"]:
            return messages
        messages = messages[1:]
    return messages if is_blank(system_prompt) else [{"role": "system", "content": text_in("system", system_prompt)}, *messages]


def in_order(messages: Messages, last: str) -> Messages:
    """The messages, if system comes first or not at all, user and assistant take turns, and the right one ends.

    Raises:
        DataError: it is otherwise.
    """
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise DataError("has no messages" if not messages else "has nothing but a system message")
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            raise DataError(f"message {number + 1 + len(messages) - len(turns)} is the {message['role']}'s, "
                            f"expected the {expected}'s: after one system message at most, user and assistant take turns")
    if turns[-1]["role"] != last:
        if last == "assistant":
            raise DataError("has no assistant turn" if len(turns) == 1 else
                            "ends in a user's message, which nobody answers; leave it out")
        raise DataError("its prompt ends in an assistant's message, expected a user's")
    return messages


def split_dialogs(chosen: Messages, rejected: Messages) -> tuple[Messages, str, str]:
    """What two dialogs share, and the answers in which they end.

    Raises:
        DataError: they differ in more than the last message, or this is not the assistant's.
    """
    if not chosen or not rejected:
        raise DataError(f"{'rejected' if chosen else 'chosen'} has no messages")
    if chosen[:-1] != rejected[:-1]:
        raise DataError("chosen and rejected differ before their last message, so they are no answers to one prompt")
    if (chosen[-1]["role"], rejected[-1]["role"]) != ("assistant", "assistant"):
        raise DataError("chosen and rejected must end in an assistant's message")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The beginning that two texts share, as their prompt, and how they go on.

    The prompt ends where a line ends, else a sentence, else a word; never within one.

    Raises:
        DataError: they share no beginning that could be one.
    """
    shared = os.path.commonprefix([chosen, rejected])
    for end in PROMPT_ENDS:
        for place in reversed([found.start() for found in end.finditer(shared)]):
            parts = shared[:place], chosen[place:].strip(), rejected[place:].strip()
            if all(part.strip() for part in parts):
                return parts
    raise DataError("has no prompt, and chosen and rejected share no beginning that could be it; name the column prompt")
