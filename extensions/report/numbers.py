"""How results are written for people: on the terminal, on pages and on cards."""

import math
import re
from typing import Optional

METRIC_TITLES = {"acc": "accuracy", "acc_norm": "accuracy (per character)"}
# The names of control tokens in a rendered chat.
CONTROL_TOKENS = re.compile(
    r"(?:(?:<[|｜][^<>]*[|｜]>|</?s>|<[be]os>|\[/?INST\]|<(?:start|end)_of_turn>)\s*)+")
ROLE = re.compile(r"^(system|user|assistant|model|tool)\n", re.MULTILINE)  # a line before a turn
ANSWER = re.compile(r"\n(?:assistant|model)\n*$")  # begins after the prompt
SHARES = re.compile(r"(.*_)?acc(_norm)?|.*(accuracy|exact.match|rouge|bleu).*|[mh]fu\b.*", re.IGNORECASE)


def number_text(value: Optional[float], stderr: Optional[float] = None, is_share: bool = False) -> str:
    """Return a result with its standard error for people: 1.234 ± 0.012, 57.4 ± 2.1 %, 12,345, 6.2e-5.

    `measured` of extensions/report/assets/chart.js has the same rules, for pages.
    """
    if value is None or not math.isfinite(value):
        return "not finite"
    value, error = (100 * each if is_share else each for each in (value, stderr or 0.0))
    size, unit = abs(value), " %" * is_share
    if not (is_share or error) and (0 < size < 1e-3 or size >= 1e12):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+", "e")
    places = 1 if is_share else 3 if size < 100 else 1 if size < 1000 else 0
    if least := error or size:  # its first digit is shown
        places = max(places, -math.floor(math.log10(least)))
    return f"{value:,.{places}f}{f' ± {error:,.{places}f}' * bool(error)}{unit}"


def is_share(metric: str) -> bool:
    """Return whether a metric, by its name or its title, is an accuracy or a score from 0 to 1."""
    return SHARES.fullmatch(metric) is not None


def metric_title(metric: str) -> str:
    return METRIC_TITLES.get(metric) or metric.replace("_", " ")


def result_text(metric: str, value: Optional[float], stderr: Optional[float] = None) -> str:
    """Return a metric's value with its standard error; shares as percentages."""
    return number_text(value, stderr, is_share(metric))


def without_control_tokens(prompt: str) -> str:
    """Return a rendered chat with `user: ` before a turn instead of control tokens; other text as it is."""
    if (text := CONTROL_TOKENS.sub("\n", prompt)) == prompt:
        return prompt.strip("\n")
    return ROLE.sub(r"\1: ", ANSWER.sub("", text).strip("\n"))
