"""Reasoning and tool calls in an answer.

Hermes and Qwen write `<tool_call>{...}</tool_call>`, Mistral `[TOOL_CALLS][{...}]`, and Llama 3 JSON alone.
"""

import json
import re
from typing import Any
from uuid import uuid4

from common.errors import DataError
from data_pipeline.templates import CALL_TRIAL, ChatFormat
from inference.generate import TextChunk

THINK, THOUGHT = "<think>", "</think>"
BEGIN, END, LIST = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"


def beginnings(word: str) -> str:
    return "|".join(re.escape(word[:size]) for size in range(len(word)))


# Of each form: a whole call, and text at the end of an answer that may become one.
FORMS = {form: tuple(re.compile(pattern, re.DOTALL) for pattern in patterns) for form, patterns in {
    "tags": (rf"{BEGIN}(.*?){END}\s*", rf"\s*({BEGIN}.*|{beginnings(BEGIN)})\Z"),
    "list": (rf"{re.escape(LIST)}\s*(\[.*\])\s*\Z", rf"\s*({re.escape(LIST)}.*|{beginnings(LIST)})\Z"),
    "json": (r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", r"\A\s*(?:(?:<\|python_tag\|>|\{).*)?\Z"),
    "none": (r"(?!)", r"(?!)")}.items()}


def read_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in a text, as in OpenAI's API; none if it is anything else."""
    try:
        written = json.loads(text)
        calls = [(call["name"], call.get("parameters", call.get("arguments")))
                 for call in (written if isinstance(written, list) else [written])]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls):
        return []
    return [{"id": uuid4().hex[:9], "type": "function",  # Mistral's templates accept only ids of nine letters
             "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
            for name, arguments in calls]


def form_of_calls(chat_format: ChatFormat) -> str:
    """Return the form in which a chat format writes calls, found by writing one; "none" for all others."""
    try:
        has_calls = {"tools", "tool_calls"} <= chat_format.fields
        ids = chat_format.encode_chat(CALL_TRIAL[:2])[-1][0] if has_calls else []
    except DataError:
        ids = []
    written = chat_format.tokenizer.decode(ids)
    if (match := re.search(r"\[TOOL_CALLS\]\s*(\[.*\])", written, re.DOTALL)) and read_calls(match[1]):
        return "list"
    match = re.search(rf"({BEGIN}\s*)?(?<!\[)(\{{.*\}})", written, re.DOTALL)
    return ("tags" if match[1] else "json") if match and read_calls(match[2]) else "none"


class ReasoningReader:
    """Separates the reasoning at the beginning of a streamed answer, and holds back what may be a tag.

    Args:
        place: "start", "inside" the tags if the prompt opens them, or "content" if there are none.
    """

    def __init__(self, place: str):
        self._place, self._held = place, ""

    def add(self, chunk: TextChunk) -> tuple[TextChunk, str]:
        """Return a chunk without reasoning, and its reasoning."""
        text, reasoning, is_last = self._held + chunk.text, "", chunk.finish_reason is not None
        if self._place == "start" and (begun := text.lstrip()).startswith(THINK):
            self._place, text = "inside", begun.removeprefix(THINK)
        elif self._place == "start" and (is_last or not THINK.startswith(begun)):
            self._place = "content"
        if self._place == "inside":
            reasoning, tag, text = text.partition(THOUGHT)
            sizes = (size for size in range(len(THOUGHT)) if reasoning.endswith(THOUGHT[:size]))
            end = len(reasoning) - (0 if tag or is_last else max(sizes))
            reasoning, text = reasoning[:end], reasoning[end:] + text
            self._place = "content" if tag else "inside"
        self._held, text = ("", text) if is_last or self._place == "content" else (text, "")
        return chunk._replace(text=text), reasoning


class CallReader:
    """Separates calls from a streamed answer, and holds back text that may become one."""

    def __init__(self, form: str):
        self._form, self._held, self._count = form, "", 0

    def add(self, chunk: TextChunk) -> tuple[TextChunk, list[dict[str, Any]]]:
        """Return a chunk without calls, and the calls that it completes."""
        held, text, calls, (whole, begun) = self._held + chunk.text, "", [], FORMS[self._form]
        while (END in held if self._form == "tags" else chunk.finish_reason) and (
                match := whole.search(held)):
            found = read_calls(match[1])
            text += held[:match.start()].rstrip() if found else held[:match.end()]
            held = held[match.end():]
            calls += [{"index": index, **call} for index, call in enumerate(found, self._count + len(calls))]
        match = None if chunk.finish_reason else begun.search(held)
        end = match.start() if match else len(held)
        text, self._held, self._count = text + held[:end], held[end:], self._count + len(calls)
        if self._form == "json" and text:  # the answer is words
            self._form = "none"
        reason = "tool_calls" if chunk.finish_reason == "stop" and self._count else chunk.finish_reason
        return chunk._replace(text=text, finish_reason=reason), calls
