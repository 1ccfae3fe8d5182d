"""The command line of every script: --version, and --help in 80 columns."""

import argparse
import sys
import textwrap
from functools import partial
from itertools import groupby
from pathlib import Path

from common import __version__

HELP_COLUMNS = 80
VERSION = f"Paddock {__version__}"


def filled(text: str, **indents: str) -> list[str]:
    """Return a paragraph as lines of at most HELP_COLUMNS."""
    return textwrap.wrap(text, HELP_COLUMNS, break_long_words=False, break_on_hyphens=False, **indents)


def wrapped(text: str) -> str:
    """Return a text with its paragraphs wrapped to HELP_COLUMNS; indented lines stay as they are."""
    lines: list[str] = []
    for is_prose, group in groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
        part = [*group]
        lines += filled(" ".join(part)) if is_prose else part
    return "\n".join(lines)


class CommandParser(argparse.ArgumentParser):
    """A parser of a script's flags, with --version; its --help begins with the script's docstring."""

    def __init__(self, description: str, epilog: str = "", **options):
        formatter = partial(argparse.RawDescriptionHelpFormatter, width=HELP_COLUMNS, max_help_position=28)
        super().__init__(**{"prog": f"python scripts/{Path(sys.argv[0]).name}", "formatter_class": formatter,
                            "description": wrapped(description), "epilog": wrapped(epilog), **options})
        self.add_argument("--version", action="version", version=VERSION, help="show the version and exit")
