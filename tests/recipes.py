"""Applies a recipe of docs/recipes.md to this working tree; imports nothing that must be installed.

    python tests/recipes.py biases
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def changes_of(title: str) -> list[tuple[str, str, str]]:
    """The (path, old text, new text) of each change in the one recipe whose heading contains the title."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    section, = (section for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:] if title in section.splitlines()[0])
    changes = []
    for diff in re.findall(r"^```diff\n--- (.*?)^```", section, re.DOTALL | re.MULTILINE):
        path, *parts = re.split(r"\n@@.*\n", diff)
        for lines in ([line or " " for line in part.splitlines()] for part in parts):
            assert all(line[0] in " +-" for line in lines), lines
            changes.append((path, *("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))))
    return changes


def apply(changes: list[tuple[str, str, str]], folder: Path) -> None:
    """Replace each old text, which stands once in its file, by the new one."""
    for path, old, new in changes:
        code = (folder / path).read_text(encoding="utf-8")
        assert code.count(old) == 1, f"{path} has these lines {code.count(old)} times, expected once; correct the recipe:\n{old}"
        (folder / path).write_text(code.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    apply(changes_of(" ".join(sys.argv[1:])), ROOT)
