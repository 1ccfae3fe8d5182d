"""The command line of every script: --version, and --help in 80 columns."""

import argparse
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from common import __version__

HELP_COLUMNS = 80
VERSION = f"Paddock {__version__}"


def filled(text: str, width: int = HELP_COLUMNS, **indents: str) -> list[str]:
    """Return a paragraph as lines; flags and names are not broken at their hyphens."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indents)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs to HELP_COLUMNS, and leaves indented lines, as those of examples, as they are."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=HELP_COLUMNS)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return filled(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_prose, group in groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
            part = [*group]
            lines += filled(" ".join(part), width) if is_prose else part
        return "\n".join(indent + line for line in lines)


class CommandParser(argparse.ArgumentParser):
    """A parser of a script's flags, with --version; its --help begins with the script's docstring."""

    def __init__(self, description: str, epilog: str = "", **options):
        super().__init__(**{"prog": f"python scripts/{Path(sys.argv[0]).name}", "description": description,
                            "epilog": epilog, "formatter_class": HelpFormatter, **options})
        self.add_argument("--version", action="version", version=VERSION, help="show the version and exit")
