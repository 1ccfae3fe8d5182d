"""What --help and the documents say of each setting."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from common.command_line import filled
from config import SECRETS, SECTIONS, on_resume

PRESETS_DIR = Path(__file__).parent / "presets"


class SettingLine(NamedTuple):
    """What the help and the documents say of a setting."""

    section: str
    name: str
    default: str  # empty = none
    meaning: str
    on_resume: str  # safe | curve | fixed


def describe_settings() -> Iterator[SettingLine]:
    """Yield every setting, in order."""
    for section in SECTIONS:
        for name, info in section.model_fields.items():
            default = "" if info.default is None else str(info.default)
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            meaning = info.description + (f" ({' | '.join(choices)})" if choices else "")
            default = default.lower() if info.annotation is bool else default
            title = section.__name__.removesuffix("Config")
            yield SettingLine(title, name.upper(), default, meaning, on_resume(name))


def help_text(usage: str) -> str:
    """Return what --help prints: every setting with its default and meaning."""
    lines = [*filled(f"usage: {usage}", subsequent_indent="  "), "",
             *filled("Order: defaults < .env < preset < JSON < environment < flags; a preset that .env names "
                     "lies below .env. MAX_STEPS in .env is --max-steps as a flag."), ""]

    def add(flag: str, meaning: str) -> None:
        lines.extend(filled(meaning, initial_indent=f"  {flag:<27} ", subsequent_indent=" " * 30))

    presets = ", ".join(sorted(file.stem for file in PRESETS_DIR.glob("*.env")))
    add("--config FILE.json", "settings from a JSON file, flat or in sections")
    add("--env-file FILE", "settings from this file instead of .env")
    add("--check", "report everything that can be known before the run, and exit")
    add("--version", "show the version and exit")
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", section]
        for _, name, default, meaning, _ in settings:
            is_secret = name.lower() in SECRETS
            flag = f"{name} in .env" if is_secret else f"--{name.lower().replace('_', '-')}"
            known = f": {presets}" if name == "PRESET" else ""
            add(flag, f"{meaning}{known} [{default or 'none'}]")
    return "\n".join(lines)
