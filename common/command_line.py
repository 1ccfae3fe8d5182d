"""Command-line parsing shared by all scripts: --version, and --help in 80 columns."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby, takewhile

from common import __version__
from common.text import COMMANDS, PROGRAM, suggestion

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
            "infer": "generate", "plot": "report"}


class CommandParser(argparse.ArgumentParser):
    """A parser for a script's flags, with --version; --help starts with the script's docstring."""

    def __init__(self, description: str, epilog: str = "", **options):
        script = "scripts/" + re.match(r"(?:.*/scripts/|.*/)(.*)", os.path.abspath(sys.argv[0]))[1]
        program = f"{PROGRAM} {COMMANDS[script]}" if script in COMMANDS else f"python {script}"
        options["prog"] = os.environ.get("PADDOCK_COMMAND") or options.get("prog", program)
        super().__init__(description=description, epilog=epilog, formatter_class=HelpFormatter, **options)
        self.add_argument("--version", action="version", version=VERSION, help="show the version and exit")

    def parse_known_args(self, args=None, namespace=None):
        """Like argparse, but never read `-hf-token` as -h, nor only the last of two lists."""
        given = set()
        for argument in takewhile(lambda each: each != "--", sys.argv[1:] if args is None else args):
            name = argument.partition("=")[0]
            if argument.startswith("-h") and argument != "-h":
                self.error(f"{name}: flag names start with two dashes")
            if name in given and "," in str(self._option_string_actions[name].metavar):
                self.error(f"{name} is given twice; join its values with commas")
            given |= {name} & self._option_string_actions.keys()
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
