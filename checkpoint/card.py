"""The text of a model card: Hugging Face's metadata block and Markdown, safe for any text, and read back."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from checkpoint.manifest import CARD
from common.files import read_plain
from common.text import printable


def code(text: Any) -> str:
    """Return a text as Markdown's inline code, which nothing in it can end."""
    line = printable(str(text))
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if not line.strip(" ") or line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def fenced(language: str, *lines: str) -> str:
    """Return lines as Markdown's block of code, which none of them can end."""
    lines = [printable(line) for line in lines]
    ticks = "`" * max(3, *(1 + len(run) for line in ("", *lines) for run in re.findall("`+", line) or [""]))
    return "\n".join([ticks + language, *lines, ticks])


def table(*rows: Sequence[str]) -> str:
    """Return rows of cells, the first of them the header, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def card_text(metadata: Mapping[str, Any], title: str, sections: Mapping[str, str]) -> str:
    """Return a card.

    Args:
        sections: Markdown by its heading; an empty heading follows the title. Empty sections are left out.
    """
    body = [f"## {heading}\n\n{text}" if heading else text for heading, text in sections.items() if text]
    stated = {name: value for name, value in metadata.items() if value not in ("", [], None)}
    block = yaml.safe_dump(stated, sort_keys=False, width=float("inf"))
    return "\n\n".join([f"---\n{block}---", f"# {code(title)}", *body]) + "\n"


def read_card(folder: Path) -> str:
    """Return the card in a folder; empty if there is none that can be read."""
    try:
        return read_plain(folder / CARD).decode(errors="replace")
    except OSError:
        return ""


def facts_of(card: str) -> dict[str, str]:
    """Return the texts and numbers in a card's metadata, those under `paddock` among them."""
    block = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # somebody else's card
        metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    own = metadata.get("paddock")
    return {name: str(value) for name, value in {**metadata, **(own if isinstance(own, dict) else {})}.items()
            if isinstance(value, (str, int, float))}


def sections_of(card: str) -> dict[str, str]:
    """Return the sections of a card by their headings."""
    parts = re.split(r"^## (.+)\n", card, flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2])}
