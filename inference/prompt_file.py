"""Prompts from a file: a text in each line, or a JSON object with a prompt or messages."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from common.files import plain
from data_pipeline.chat_records import Messages, check_turns, messages_in, text_in, with_system
from data_pipeline.readers import flaw_of

STDIN = "-"


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
        chat: a text is the user's message in a chat of its own.
        system_prompt: of chats that have none.
    Raises:
        DataError: the file cannot be read, or a line cannot be used, which the message names.
    """
    try:
        content = sys.stdin.buffer.read() if name == STDIN else _read(Path(name))
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"--prompts {name} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        line = content[:error.start].count(b"\n") + 1
        raise DataError(f"{name}:{line}: is not UTF-8; convert the file") from error
    filled = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise DataError(f"--prompts {name} has no prompts; write one in each line")
    is_json = Path(name).suffix == ".jsonl" if name != STDIN else filled[0][1].lstrip().startswith("{")
    prompts = []
    for number, line in filled:
        where = f"{'stdin' if name == STDIN else name}:{number}"
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


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=plain) as file:
        return file.read()


def _prompt_in(line: str) -> str | Messages:
    """Return the prompt or the messages of a JSON object. Raises DataError: it is none, or has neither."""
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
