"""Command-line parsing shared by all scripts: --version, and --help in 80 columns."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import groupby, takewhile
from math import inf
from typing import Optional

from common import __version__
from common.text import COMMANDS, PROGRAM

HELP_COLUMNS = 80
VERSION = f"Paddock {__version__}"


def filled(text: str, width: int = HELP_COLUMNS, **indents: str) -> list[str]:
    """Wrap a paragraph into lines, without breaking flags and names at hyphens."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indents)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs to HELP_COLUMNS, and keeps indented lines (examples) unchanged."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=HELP_COLUMNS)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return filled(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_prose, group in groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
            paragraph = [*group]
            lines += filled(" ".join(paragraph), width) if is_prose else paragraph
        return "\n".join(indent + line for line in lines)


# Names of commands and of scripts' flags elsewhere.
SYNONYMS = {"max_tokens": "max_new_tokens", "num_predict": "max_new_tokens", "n_predict": "max_new_tokens",
            "temp": "temperature", "evaluate": "eval", "convert": "export", "tokenize": "prepare",
            "infer": "generate", "finetune": "train", "plot": "report"}
SIMILAR, SIMILAR_SHORT = 0.85, 0.8  # for difflib; one typo in a short name changes more of it


def suggestion(name: str, known: Iterable[str], same: Mapping[str, str] = {}) -> Optional[str]:
    """Return the known name that a user probably meant, or None.

    It is the name that another one in `same` stands for, or a similar one. Another number or first letter
    makes another name: fp8 and fp16, dora and lora.
    """
    candidates = {standard: standard for standard in known}
    candidates |= {alias: standard for alias, standard in same.items() if standard in candidates}
    name = re.sub("[-.]", "_", name[:60].lower().strip("-"))
    similar = {re.sub("[-.]", "_", each.lower()): each for each in candidates}
    similar = {each: original for each, original in similar.items()
               if each[:1] == name[:1] and re.findall(r"\d+", each) == re.findall(r"\d+", name)}
    best = get_close_matches(name, similar, 1, SIMILAR if len(name) > 6 else SIMILAR_SHORT)
    return candidates[similar[best[0]]] if best else None


class CommandParser(argparse.ArgumentParser):
    """A parser for a script's flags, with --version; --help starts with the script's docstring."""

    def __init__(self, description: str, epilog: str = "", **options):
        script = f"scripts/{os.path.basename(sys.argv[0])}"
        own = f"{PROGRAM} {COMMANDS[script]}" if script in COMMANDS else f"python {script}"
        options["prog"] = os.environ.get("PADDOCK_COMMAND") or options.get("prog", own)
        super().__init__(description=description, epilog=epilog, formatter_class=HelpFormatter, **options)
        self.add_argument("--version", action="version", version=VERSION, help="show the version and exit")

    def parse_known_args(self, args=None, namespace=None):
        """Like argparse, but never read `-hf-token` as -h, whatever the Python version."""
        for argument in takewhile(lambda each: each != "--", sys.argv[1:] if args is None else args):
            if argument.startswith("-h") and argument != "-h":
                self.error(f"{argument.partition('=')[0]}: flag names start with two dashes")
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        unknown = re.match("unrecognized arguments: (--[^ =]+)", message)
        names = [flag.lstrip("-").replace("-", "_") for flag in self._option_string_actions]
        guess = suggestion(unknown[1], names, SYNONYMS) if unknown else None
        super().error(message + (f"; did you mean --{guess.replace('_', '-')}?" if guess else ""))


def number(kind: type, limits: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the `type` of a flag whose value is a number that `fits`; `limits` describes the range."""
    def parse(text: str) -> float:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected a number {limits}, not {text[:80]!r}")

    return parse


TEMPERATURE = number(float, "from 0 on", lambda value: 0 <= value < inf)
SEED = number(int, "from 0 to 4,294,967,295", lambda value: 0 <= value < 2**32)


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of `extensions.inference.weights.load_to_generate`."""
    parser.add_argument("--base", metavar="MODEL", help="the adapters' base model (default: as in training)")
    parser.add_argument("--weights", choices=("fp32", "bf16", "int8"),
                        help="precision of weights and computation; int8 = weights of the blocks in 8 bits, "
                             "on a CPU (default: bf16 on a GPU, fp32 on a CPU)")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add sampling flags, named as in `extensions.inference.engine.Sampling`."""
    parser.add_argument("--temperature", type=TEMPERATURE, default=0.8, metavar="T",
                        help="0 = always the most likely token (default: %(default)s)")
    parser.add_argument("--top-p", type=number(float, "above 0 and at most 1", lambda value: 0 < value <= 1),
                        default=0.95, metavar="P",
                        help="sample from the most likely tokens of this probability (default: %(default)s)")
    parser.add_argument("--top-k", type=number(int, "from 0 on", lambda value: value >= 0), default=0,
                        metavar="K", help="sample from at most this many tokens; 0 = all (default)")
    parser.add_argument("--min-p", type=number(float, "from 0 to 1", lambda value: 0 <= value <= 1),
                        default=0.0, metavar="P",
                        help="sample from tokens of at least P times the highest probability (default: 0)")
    parser.add_argument("--repetition-penalty", type=number(float, "above 0", lambda value: 0 < value < inf),
                        default=1.0, metavar="R",
                        help="values above 1 make repeated tokens less likely (default: 1)")
