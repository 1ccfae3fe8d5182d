"""Write what the settings say of themselves into .env.example and the README's table."""

import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import describe_settings

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- settings -->", "<!-- /settings -->"


def env_example() -> str:
    """The text of .env.example: every setting, commented out, with its default and meaning."""
    lines = ["# Copy this file to .env and uncomment what is to differ from the default. Below it lies the preset; above it lie",
             "# the environment and the flags: MAX_STEPS here is --max-steps there. An empty value counts as not given."]
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", "", f"# {section}"]
        for _, name, default, meaning, _ in settings:
            lines += ["", f"# {meaning}", f"#{name}={default}"]
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """The README's table of settings, with the markers around it."""
    lines = [BEGIN]
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", f"**{section}**", "", "| setting | default | meaning | on resume |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {f'`{default}`' if default else ''} | {cell(meaning)} | {on_resume} |"
                  for _, name, default, meaning, on_resume in settings]
    return "\n".join([*lines, "", END])


def cell(text: str) -> str:
    """Text as the cell of a Markdown table shows it."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def with_table(readme: str) -> str:
    """The README with the table as it should be."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"README.md has no {BEGIN} and {END}"
    return before + settings_table() + after


if __name__ == "__main__":
    (ROOT / ".env.example").write_text(env_example(), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
