"""Tool calls in an answer: Hermes' and Qwen's `<tool_call>{...}</tool_call>`, or Llama 3's JSON alone."""

import json
import re
from typing import Any, Optional
from uuid import uuid4

from common.errors import DataError
from data_pipeline.templates import ChatFormat, TemplateFormat
from inference.generate import TextChunk

BEGIN, END = "<tool_call>", "</tool_call>"
# Of each form: a whole call, and text at the end of an answer that may become one.
FORMS = {form: tuple(re.compile(pattern, re.DOTALL) for pattern in patterns) for form, patterns in {
    "tags": (rf"{BEGIN}(.*?){END}\s*",
             rf"\s*({BEGIN}.*|{'|'.join(BEGIN[:size] for size in range(len(BEGIN)))})\Z"),
    "json": (r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", r"\A\s*(?:(?:<\|python_tag\|>|\{).*)?\Z"),
    "none": (r"(?!)", r"(?!)")}.items()}
TRIAL = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]}]


def read_call(text: str) -> Optional[dict[str, Any]]:
    """Return the call in a text, as in OpenAI's API; None if it is not one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("parameters", call.get("arguments"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"id": f"call_{uuid4().hex}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def form_of_calls(chat_format: ChatFormat | TemplateFormat) -> str:
    """Return the form in which a chat format writes calls, found by writing one; "none" for all others."""
    try:
        ids = chat_format.encode_chat(TRIAL)[-1][0] if {"tools", "tool_calls"} <= chat_format.fields else []
    except DataError:
        ids = []
    match = re.search(rf"({BEGIN}\s*)?(?<!\[)(\{{.*\}})", chat_format.tokenizer.decode(ids), re.DOTALL)
    return ("tags" if match[1] else "json") if match and read_call(match[2]) else "none"


class CallReader:
    """Separates calls from a streamed answer, and holds back text that may become one."""

    def __init__(self, form: str):
        self._form, self._held, self._count = form, "", 0

    def add(self, chunk: TextChunk) -> tuple[TextChunk, list[dict[str, Any]]]:
        """Return a chunk without calls, and the calls that it completes."""
        held, text, calls, (whole, begun) = self._held + chunk.text, "", [], FORMS[self._form]
        while (END in held if self._form == "tags" else chunk.finish_reason) and (
                match := whole.search(held)):
            call = read_call(match[1])
            text += held[:match.start()].rstrip() if call else held[:match.end()]
            held = held[match.end():]
            calls += [{"index": self._count + len(calls), **call}] if call else []
        match = None if chunk.finish_reason else begun.search(held)
        end = match.start() if match else len(held)
        text, self._held, self._count = text + held[:end], held[end:], self._count + len(calls)
        if self._form == "json" and text:  # the answer is words
            self._form = "none"
        reason = "tool_calls" if chunk.finish_reason == "stop" and self._count else chunk.finish_reason
        return chunk._replace(text=text, finish_reason=reason), calls
