"""Rewards: functions reward(prompt, answer, record) -> float, which run in a separate process (`serve`).

A function can name the columns that it reads in its attribute `columns`; the start of a run looks for them.

That process imports only the standard library, so it starts fast, and a user's module may have any name.
"""

import importlib
import inspect
import json
import math
import os
import queue
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Mapping
from ctypes import c_float
from fractions import Fraction
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any

Reward = Callable[[str, str, Mapping[str, Any]], float]


class Misunderstood(float):
    """The reward 0 of an answer whose value is not understood; such answers are counted."""


class Percent(Fraction):
    """A value that was written as a percentage, which people also write without the sign: 60 % is 60, too."""


BEGINS_THOUGHTS = re.compile(r"<think(?:ing)?>|\[THINK\]")
ENDS_THOUGHTS = re.compile(r"</think(?:ing)?>|\[/THINK\]")
# How text, Markdown and LaTeX write numbers, and what replaces it, in this order.
NOTATIONS = tuple((re.compile(pattern), replacement) for pattern, replacement in (
    (r"[\uff01-\uff5e\uffe0-\uffe6]+", lambda found: unicodedata.normalize("NFKC", found[0])),  # wide forms
    ("\u066b", "."), ("\u066c", ","), ("\u066a", "%"),  # Arabic
    (r"(?<=[^\W\d_A-\u03ff])(?=[-\u2212]?\d)", " "),  # after letters other than Latin and Greek ones
    (r"[⁰¹²³⁴-⁹⁻]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}"),
    (r"[¼-¾⅐-⅞]", lambda found: f" {unicodedata.normalize('NFKC', found[0])}"), ("\u2044", "/"),
    (r"[\u2012\u2013\u2212\ufe63]", "-"), (r"\{,\}|,\\!", ","),
    (r"(?<=\d)['’_](?=\d{3}(?!\d))", ","),
    (r"\\[,;: ()\[\]]|[~\u00a0\u2009\u202f]", " "), (r"\\([%{}])", r"\1"),
    (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!|\\?[$€£¥]", ""),
    (r"\^\s*\{?\s*\\circ\s*\}?|°", " "), (r"\\(?:times|cdot)(?![A-Za-z])|[×·]", "*"),
    (r"\\div(?![A-Za-z])|÷", "/"),
    (r"\\(?:text|math|mbox|operatorname)[a-z]*\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:approx|equiv|implies|[Rr]ightarrow|to|therefore|q?quad)(?![A-Za-z])|≈", "="),
    (r"([A-Za-z])\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)", r"\1")))  # the exponent of a unit
DIGITS = (r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?!\.?\d)"
          r"(?:[eE][-+]?\d{1,3}(?!\w))?")
AMOUNT = rf"(?:-\s*)?(?:«-?\d+;\d+»|{DIGITS})"  # « » enclose what was computed
ARGUMENT = rf"(?:\{{\s*({AMOUNT})\s*\}}|(\d))"  # of a LaTeX command
# Fractions, mixed numbers, ratios and powers: replaced by their value, the innermost first.
COMPUTED = tuple((re.compile(pattern), is_power) for pattern, is_power in (
    (rf"(?<![\w.])({DIGITS})\s*[*x]\s*(10)\s*\^\s*(?:\{{\s*(-?\d{{1,3}})\s*\}}|(-?\d{{1,3}}))(?!\d)", True),
    (rf"(?<![\w.])({DIGITS})\s*\^\s*(?:\{{\s*(-?\d{{1,3}})\s*\}}|(-?\d{{1,3}}))(?!\d)", True),
    (rf"(?:(?<![\w.,])(\d+)\s*)?\\[dtc]?frac\s*{ARGUMENT}\s*{ARGUMENT}", False),
    (r"(?<![\w.,/])(\d+) +(\d+)\s*/\s*(\d+)(?![\d.,]*/)(?!\w)", False),
    (rf"(?<![\w.,/])({DIGITS})\s*/\s*({DIGITS})(?![\d.]*\s*/)", False)))
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "千": 3, "万": 4, "萬": 4,
          "亿": 8, "億": 8, "천": 3, "만": 4, "억": 8}
TERM = re.compile(
    rf"(?<![\w\\.])(?P<sign>-\s*)?(?P<amount>«-?\d+;\d+»|{DIGITS})(?P<percent>\s*(?:%|per ?cent\b))?"
    rf"(?:\s*(?P<scale>{'|'.join(SCALES)})(?![A-Za-z克米瓦]))?"  # 千克 is a kilogram
    r"|(?<![\w.])\d[\d,]*(?:\.\d+){2,}|\\[A-Za-z]+|[√π∞±]|\b(?:sqrt|pi)\b"  # the rest is not rational
    rf"|[(\[{{]\s*{AMOUNT}(?:\s*,(?!\d{{3}}\b)\s*{AMOUNT})+\s*[)\]}}]")
JOINED = re.compile(r"[ {}()\[\]]*(?:[*+/^_]+| x )[ {}()\[\]]*|[,:{}]?")  # between terms of an expression
# Between the terms of a difference and the value that it equals, perhaps with a unit: 20 - 5 eggs = 15.
EQUALS, MINUS = (re.compile(rf"[ )}}\]*]*(?:[^\W\d_]+[ )}}\]*]*)?{sign}")
                 for sign in (r"\s*=[\s({\[*]*", r"-?[ ({\[*]*"))
NO_NUMBER = re.compile(r"[<>≤≥≠|]|(?<!\\)!|\d\s*_\{?\d")  # also a factorial, |x|, and another base than 10
# As GSM8K ends its solutions. Where a model runs on, the first such line is the answer.
MARKED_NUMBER = re.compile(
    rf"####[ \t]*([-\u2212$€£¥ ]*{AMOUNT}[ \t]*(?:%|[^\W\d_]+[²³]?)?\.?)[ \t]*$", re.MULTILINE)
UNITS = "mgshlLJNWVACF"  # other single letters, Latin or Greek, are variables after a number


def final_answer(text: str, prompt: str = "") -> str:
    """Return the answer in a text, which is all after its thoughts; "" if they do not end.

    The prompt may begin them, and its text includes the header of the answer. Characters are composed (NFC),
    so that two forms of one text are equal.
    """
    opening = re.search(rf"(?:{BEGINS_THOUGHTS.pattern})\s*$", prompt)
    answer = ENDS_THOUGHTS.split((opening[0] if opening else "") + text)[-1]
    return unicodedata.normalize("NFC", BEGINS_THOUGHTS.split(answer)[0]).strip()


def text_of(value: Any) -> str:
    """Return a value as text; of tables' floats, 72.0 is 72, a float32's 0.1 is 0.1, and NaN is a gap.

    Truth values are those of JSON.
    """
    if not isinstance(value, float):
        return json.dumps(value) if isinstance(value, bool) else str(value)
    if math.isnan(value):
        return ""
    if value.is_integer():
        return str(int(value))
    short = float(f"{value:.7g}")
    return str(short if c_float(short).value == value else value)


# Columns with the reference answer, best first; `reward_model.ground_truth` is verl's.
ANSWERS = ("answer", "reward_model.ground_truth", "completion", "output", "ground_truth", "solution",
           "response", "target")


def answer_column(record: Mapping[str, Any]) -> str:
    """Return the column with the reference answer of a record, or "answer" if it has none."""
    return next((name for name in ANSWERS if value_in(record, name) is not None), "answer")


def value_in(record: Any, name: str) -> Any:
    for key in name.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def with_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with the reference answer in its column `answer`, if it has one in another."""
    name = answer_column(record)
    return record if name == "answer" else {**record, "answer": value_in(record, name)}


def reference(record: Mapping[str, Any]) -> str:
    """Return the text of `record["answer"]`; ValueError if there is none, since any text contains that."""
    answer = record["answer"]
    text = "" if answer is None or isinstance(answer, (list, dict)) else final_answer(text_of(answer))
    if not text:
        raise ValueError(f"the record's answer is {answer!r:.80}, expected text or a number; correct the "
                         "record")
    return text


def exact(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer is `record["answer"]`, apart from white space around it, else 0."""
    return float(final_answer(answer, prompt) == reference(record))


def contains(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer contains `record["answer"]`, else 0."""
    return float(reference(record) in final_answer(answer, prompt))


def regex(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the regular expression `record["pattern"]` is found in the answer, else 0."""
    return float(re.search(record["pattern"], answer) is not None)


def numeric(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer's value is exactly that of `record["answer"]`, else 0; see docs/online.md."""
    answer = final_answer(answer, prompt)
    wanted, given = final_value(text := reference(record), is_reference=True), final_value(answer)
    if wanted is None:
        raise ValueError(f"the record's answer {text[:80]!r} is not one number; correct the record, or use "
                         "REWARD=math_verify, which also compares expressions")
    return Misunderstood() if given is None else is_same(given, wanted)


def is_same(one: Fraction, other: Fraction) -> float:
    """Return 1 if values are equal, perhaps without the percent sign that one of them has, else 0."""
    with_sign, without = (one, other) if isinstance(one, Percent) else (other, one)
    is_one_sided = isinstance(with_sign, Percent) and not isinstance(without, Percent)
    return float(one == other or (is_one_sided and 100 * with_sign == without))


def math_verify(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return what `numeric` does; where one is not a number, 1 if math-verify finds them equal, else 0."""
    from math_verify import parse, verify

    answer = final_answer(answer, prompt)
    wanted, given = final_value(text := reference(record), is_reference=True), final_value(answer)
    if wanted is not None and given is not None:
        return is_same(given, wanted)
    if not (expected := parse(text) or parse(f"${text}$")):
        raise ValueError(f"math-verify finds nothing in the record's answer {text[:80]!r}")
    return float(verify(expected, parsed)) if (parsed := parse(answer)) else Misunderstood()


def length(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return the number of characters of the answer; a negative weight rewards brevity."""
    return float(len(answer))


def final_value(text: str, is_reference: bool = False) -> Fraction | None:
    """Return the number that a text gives as its answer; None if it is not understood.

    That is the only number in the last \\boxed{}, in <answer>, in the first line "#### number" or after a
    last ####; else the first one after "the answer is", continued over "="; else the last number. A
    reference has only one.
    """
    text, is_only = final_answer(text), True
    if boxed := [*re.finditer(r"\\(?:boxed|fbox)\s*", text)]:
        text = first_argument(text[boxed[-1].end():])
    elif marked := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        text = marked[-1]
    elif marked := MARKED_NUMBER.search(text) or re.search(r"####([^\n]+)\s*$", text):
        text = marked[1]
    else:
        is_only = is_reference
        cue = [*re.finditer(r"\banswer\b[^\w\n]*?(?:(?:is|are)\b(?! +not\b)|[:=])", text, re.IGNORECASE)]
        text = text[cue[-1].end():] if cue else text
    values, links = terms_in(re.sub(r"^\s*[A-Za-z]\w*(\([^()=]*\))?\s*=", "", text) if is_only else text)
    if is_only or not values:
        return values[0] if len(values) == 1 and not NO_NUMBER.search(text) else None
    if not cue:
        return values[-1]
    value = values[0]
    for link, following in takewhile(itemgetter(0), zip(links, values[1:])):
        value = following if link == "=" else None
    return value


for _function in (exact, contains, numeric, math_verify):
    _function.columns = ("answer",)
regex.columns = ("pattern",)


def first_argument(text: str) -> str:
    """Return the LaTeX argument with which a text starts, without its braces; empty if it is cut off."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index] if index else re.match(r"[^\s$]*", text)[0]
    return ""


def terms_in(text: str) -> tuple[list[Fraction | None], list[str]]:
    """Return a text's values, None for what is not a number, and "=", "-" or "" from each to the next."""
    for pattern, replacement in NOTATIONS:
        text = pattern.sub(replacement, text)
    before = ""
    while before != text:
        before = text
        for pattern, is_power in COMPUTED:
            text = pattern.sub(partial(computed, is_power=is_power), text)
    values: list[Fraction | None] = []
    links, end, was_number, scale = [], 0, True, None
    for term in TERM.finditer(text):
        gap, value = text[end:term.start()], value_of(term, text)
        is_touching = not (was_number and term["amount"]) and not gap.strip(" {}()[]*+/^_-")
        is_touching |= bool(scale) and not gap.strip(" ")  # 2 million 500 thousand
        if values and (is_touching or JOINED.fullmatch(gap)):
            values[-1] = None
            was_number &= bool(term["amount"])
        else:
            is_minus = (term["sign"] and value and value > 0) or gap.endswith("-")
            link = "=" if EQUALS.fullmatch(gap) else "-" if is_minus and MINUS.fullmatch(gap) else ""
            links += [link] if values else []
            values.append(value)
            was_number = bool(term["amount"])
        end, scale = term.end(), term["scale"]
    return values, links


def rational(amount: str) -> Fraction:
    return Fraction(re.sub("[«», ]", "", amount).replace(";", "/"))


def computed(found: re.Match, is_power: bool) -> str:
    """Return the value of a fraction, mixed number or power between « and »; unchanged without a value."""
    try:
        *others, first, last = (rational(each) for each in found.groups() if each)
        value = math.prod([*others, first ** int(last)]) if is_power else sum(others) + first / last
        return "«{};{}»".format(*value.as_integer_ratio())
    except (ValueError, ZeroDivisionError):  # also too many digits
        return found[0]


def value_of(term: re.Match, text: str) -> Fraction | None:
    """Return the value of a number of a text with its sign; None for other terms, such as 2x."""
    before, rest = text[:term.start()], text[term.end():]
    if term["amount"] is None or re.match(rf"(?![{UNITS}])[A-\u03ff](?<![\W_])(?![^\W\d_])", rest):
        return None
    try:
        value = rational(term["amount"])
    except ValueError:  # too many digits
        return None
    value *= 10 ** SCALES.get(term["scale"], 0)
    sign, last = term["sign"] or "", before.rstrip()[-1:]
    # The hyphen of a range, a difference or a list is not a minus.
    is_minus = bool(sign) and not (last.isdigit() or last in ")]}»%" and last)
    is_minus &= not (sign[1:] and (last.isalpha() or before.endswith("\n")))
    value = -value if is_minus else value
    return Percent(value, 100) if term["percent"] else value


BUILT_IN: dict[str, Reward] = {"exact": exact, "contains": contains, "regex": regex, "math": numeric,
                               "math_verify": math_verify, "length": length}


def load(name: str) -> Reward:
    """Return a built-in reward, or the function `module:function` of an importable module."""
    module, _, function = name.partition(":")
    if name == "math_verify":
        importlib.import_module(name)  # at the start of the run, not at its first answer
    reward = BUILT_IN.get(name) or getattr(importlib.import_module(module), function)
    inspect.signature(reward).bind("prompt", "answer", {})  # TypeError if it cannot be called like this
    return reward


def serve(names: list[str]) -> None:
    """Answer each line [prompt, answer, record] of stdin with a line: the rewards, or an error's text.

    After the rewards follows whether a function did not understand the answer. The first line answers the
    start with the columns that the functions declare. The process exits when stdin ends, even within a
    reward.
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
    def start() -> list[str]:
        functions.extend(map(load, names))
        return sorted({name for each in functions for name in getattr(each, "columns", ())})

    reply(start)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()

    def rewards() -> list[float | bool]:
        prompt, answer, record = json.loads(lines.get())
        returned = [function(prompt, answer, with_answer(json.loads(record))) for function in functions]
        values = [*map(float, returned)]
        if not all(map(math.isfinite, values)):
            raise ValueError(f"the values {values} are not finite")
        return [*values, any(isinstance(each, Misunderstood) for each in returned)]

    while True:
        reply(rewards)
