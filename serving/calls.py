"""Tool calls in an answer.

Hermes and Qwen write `<tool_call>{...}</tool_call>`, Mistral `[TOOL_CALLS][{...}]`, and Llama 3 JSON alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from common.errors import DataError
from data_pipeline.templates import ChatFormat, TemplateFormat
from inference.generate import TextChunk

BEGIN, END, LIST = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"


def beginnings(word: str) -> str:
    return "|".join(re.escape(word[:size]) for size in range(len(word)))


# Of each form: a whole call, and text at the end of an answer that may become one.
FORMS = {form: tuple(re.compile(pattern, re.DOTALL) for pattern in patterns) for form, patterns in {
    "tags": (rf"{BEGIN}(.*?){END}\s*", rf"\s*({BEGIN}.*|{beginnings(BEGIN)})\Z"),
    "list": (rf"{re.escape(LIST)}\s*(\[.*\])\s*\Z", rf"\s*({re.escape(LIST)}.*|{beginnings(LIST)})\Z"),
    "json": (r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", r"\A\s*(?:(?:<\|python_tag\|>|\{).*)?\Z"),
    "none": (r"(?!)", r"(?!)")}.items()}
TRIAL = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]}]


def read_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in a text, as in OpenAI's API; none if it is anything else."""
    calls = []
    try:
        written = json.loads(text)
        for call in written if isinstance(written, list) else [written]:
            name, arguments = call["name"], call.get("parameters", call.get("arguments"))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return []
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            # Mistral's templates accept only ids of nine letters or digits.
            calls.append({"id": uuid4().hex[:9], "type": "function", "function": function})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return calls


def begin_call(form: str, tokenizer: Any) -> list[int]:
    """Return the ids before the JSON of a call."""
    control, text = {"tags": (BEGIN, "\n"), "list": (LIST, "["), "json": ("", "")}[form]
    known = tokenizer.special_ids.get(control)
    ids = tokenizer.encode(control, is_first=False) if known is None else [known]
    return [*ids, *tokenizer.encode(text, is_first=False)]


def schema_of_call(form: str, tools: Sequence[Mapping[str, Any]], choice: Any) -> dict[str, Any]:
    """Return the schema of a call. Raises DataError.

    Args:
        choice: "required" for any of the tools, or {"type": "function", "function": {"name": ...}}.
    """
    key, calls, names = "parameters" if form == "json" else "arguments", [], []
    try:
        wanted = None if choice == "required" else choice["function"]["name"]
        for function in (tool["function"] for tool in tools):
            names.append(function["name"])
            if wanted in (None, names[-1]):
                arguments = function.get("parameters", {"type": "object"})
                properties = {"name": {"const": names[-1]}, key: arguments}
                calls.append({"type": "object", "properties": properties, "required": ["name", key],
                              "additionalProperties": False})
    except (LookupError, TypeError) as error:
        raise DataError("a function is named as {\"type\": \"function\", \"function\": {\"name\": ...}}"
                        ) from error
    if not calls:
        raise DataError(f"the named function is not one of those in `tools`: {', '.join(names) or 'none'}")
    return {"anyOf": calls}


def form_of_calls(chat_format: ChatFormat | TemplateFormat) -> str:
    """Return the form in which a chat format writes calls, found by writing one; "none" for all others."""
    try:
        ids = chat_format.encode_chat(TRIAL)[-1][0] if {"tools", "tool_calls"} <= chat_format.fields else []
    except DataError:
        ids = []
    written = chat_format.tokenizer.decode(ids)
    if (match := re.search(r"\[TOOL_CALLS\]\s*(\[.*\])", written, re.DOTALL)) and read_calls(match[1]):
        return "list"
    match = re.search(rf"({BEGIN}\s*)?(?<!\[)(\{{.*\}})", written, re.DOTALL)
    return ("tags" if match[1] else "json") if match and read_calls(match[2]) else "none"


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
