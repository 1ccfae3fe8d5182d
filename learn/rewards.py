"""Rewards: functions reward(prompt, answer, record) -> float, which run in a separate process (`serve`).

That process imports only the standard library, so it starts fast, and a user's module may have any name.
"""

import importlib
import json
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Reward = Callable[[str, str, Mapping[str, Any]], float]
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def exact(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer is `record["answer"]`, apart from white space around it, else 0."""
    return float(answer.strip() == str(record["answer"]).strip())


def contains(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer contains `record["answer"]`, else 0."""
    return float(str(record["answer"]).strip() in answer)


def regex(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the regular expression `record["pattern"]` is found in the answer, else 0."""
    return float(re.search(record["pattern"], answer) is not None)


def numeric(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the last numbers of the answer and of `record["answer"]` are equal, else 0.

    A number in LaTeX's \\boxed{} precedes others. 0.5 equals 1/2, and 1,000 equals 1000.
    """
    if (wanted := last_number(str(record["answer"]))) is None:
        raise ValueError(f"the record's answer {str(record['answer'])[:80]!r} has no number")
    return float(last_number(answer) == wanted)


def math_verify(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if math-verify finds the answer equal to `record["answer"]`, both perhaps in LaTeX, else 0."""
    from math_verify import parse, verify

    text = str(record["answer"])
    if not (wanted := parse(text) or parse(f"${text}$")):
        raise ValueError(f"math-verify finds nothing in the record's answer {text[:80]!r}")
    return float(verify(wanted, parse(answer)))


def length(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return the number of characters of the answer; a negative weight rewards brevity."""
    return float(len(answer))


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or in its last \\boxed{}; None without one."""
    found = NUMBER.findall((BOXED.findall(text) or [text])[-1])
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except ZeroDivisionError:
        return None


BUILT_IN: dict[str, Reward] = {"exact": exact, "contains": contains, "regex": regex, "math": numeric,
                               "math_verify": math_verify, "length": length}


def load(name: str) -> Reward:
    """Return a built-in reward, or the function `module:function` of an importable module."""
    module, _, function = name.partition(":")
    if name == "math_verify":
        importlib.import_module(name)  # at the start of the run, not at its first answer
    return getattr(importlib.import_module(module), function) if function else BUILT_IN[name]


def serve(names: list[str]) -> None:
    """Answer each line [prompt, answer, record] of stdin with a line: a list of rewards, or an error's text.

    The first line answers the start. The process exits when stdin ends, even within a reward.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # functions may print

    def reply(compute: Callable[[], Any]) -> None:
        try:
            value = compute()
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    functions: list[Reward] = []
    reply(lambda: functions.extend(map(load, names)) or [])
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()

    def rewards() -> list[float]:
        prompt, answer, record = json.loads(lines.get())
        values = [float(function(prompt, answer, json.loads(record))) for function in functions]
        if not all(map(math.isfinite, values)):
            raise ValueError(f"the rewards {values} are not finite")
        return values

    while True:
        reply(rewards)
