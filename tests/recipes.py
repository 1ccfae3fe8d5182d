"""Applies a recipe of docs/recipes.md, named by words of its heading, to this working tree. Needs no packages.

    python tests/recipes.py biases
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def titles_with(words: str) -> list[str]:
    """The headings of the recipes that contain the words."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    return [title for title in re.findall("^## (.*)", page, re.MULTILINE) if words.lower() in title.lower()]


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
    """Replace each old text, which stands once in its file, by the new one; change nothing if one does not. A new file has no old text."""
    files = {path: (folder / path).read_text(encoding="utf-8") if old else "" for path, old, _ in changes}
    for path, old, new in changes:
        count = files[path].count(old)
        assert count == 1, f"{path} has these lines {count} times, expected once; is the recipe already applied?\n{old}"
        files[path] = files[path].replace(old, new)
    for path, code in files.items():
        (folder / path).write_text(code, encoding="utf-8")


def main() -> None:
    words = " ".join(sys.argv[1:])
    found = titles_with("" if words in ("-h", "--help") else words)
    if len(found) == 1:
        try:
            apply(changes_of(found[0]), ROOT)
        except AssertionError as error:
            sys.exit(f"error: {error}")
        return print(f"Applied: {found[0]}. `git diff` shows the changes.")
    is_help = words in ("", "-h", "--help")
    print("\n  ".join([__doc__ if is_help else f"error: {len(found)} recipes have {words!r} in their heading; choose one:",
                       *(found or titles_with(""))]), file=sys.stdout if is_help else sys.stderr)
    sys.exit(0 if is_help else 2)


if __name__ == "__main__":
    main()
