"""Settings on the command line: --help, a run's folder by its name, and errors that end the process."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, get_args, get_origin

from common.command_line import VERSION, filled
from common.errors import PaddockError, SettingsError
from common.text import counted, exit_if_unread, print_safely, show
from config import CORE_SECTIONS, EXTENSION_SECTIONS, Config, on_resume
from parallel.process import choose_waiting, configure_allocator, first_on_machine, rank_note
from plan.derived import data_manifests
from plan.layers import PRESETS_DIR, read_env_file, read_flags
from plan.make import Plan, make_plan

HUGE_NUMEL = 2**24  # float32 numbers in 64 MiB; with fewer in the embedding, huge pages save no time
Planned = Plan | PaddockError | None  # the result of make_plan on rank 0, or its error; None elsewhere


class SettingLine(NamedTuple):
    """A setting as in --help and docs/settings.md."""

    section: str  # of the core, or the extension
    name: str
    default: str  # empty: none
    meaning: str
    on_resume: str  # safe | curve | fixed


def describe_settings() -> Iterator[SettingLine]:
    """Yield every setting, those of the core first."""
    titles = {section.__name__.removesuffix("Config"): section for section in CORE_SECTIONS}
    titles |= {f"Extension {name}": section for name, section in EXTENSION_SECTIONS.items()}
    for title, section in titles.items():
        for name, info in section.model_fields.items():
            default = "" if info.default is None else str(info.default)
            default = default.lower() if isinstance(info.default, bool) else default
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            meaning = info.description + (f" ({' | '.join(choices)})" if choices else "")
            yield SettingLine(title, name.upper(), default, meaning, on_resume(name))


def help_text(usage: str) -> str:
    """Return the text of --help: every setting with its default and meaning."""
    lines = [*filled(f"usage: {usage}", subsequent_indent="  "), "",
             *filled("Priority: defaults < .env < preset < --config < environment < flags. A preset named in "
                     ".env has lower priority than .env. The flag for MAX_STEPS is --max-steps. Variables of "
                     "libraries (HF_TOKEN, WANDB_API_KEY, NCCL_DEBUG, ...) may be in .env too."), ""]

    def add(flag: str, meaning: str) -> None:
        lines.extend(filled(meaning, initial_indent=f"  {flag:<27} ", subsequent_indent=" " * 30))

    presets = ", ".join(sorted(file.stem for file in PRESETS_DIR.glob("*.env")))
    add("--config FILE", "read settings from a JSON or YAML file (.yaml), flat or in sections")
    add("--env-file FILE", "read this file instead of .env")
    add("--check", "check settings, data, memory and time without training; exit with 0 if a run would start")
    add("--version", "show the version and exit")
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", section]
        for _, name, default, meaning, _ in settings:
            known = f": {presets}" if name == "PRESET" else ""
            add(f"--{name.lower().replace('_', '-')}",
                f"{meaning}{known} [{default.replace(',', ', ') or 'none'}]")
    return "\n".join(lines)


def find_run(name: str, argv: Sequence[str] = ()) -> Path:
    """Return a run's folder by its path, its name in OUTPUT_DIR, or one of its checkpoints."""
    if not os.path.exists((path := Path(name).expanduser()) / "config.json"):  # or it is of data
        run = Path(make_plan(argv, complete=False).config.output_dir, name)
        path = run if run.is_dir() else path
    if re.fullmatch(r"step-\d+", path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def plan_on_rank0(argv: Sequence[str], usage: str) -> Planned:
    """Return the plan on rank 0, or its error, which the other ranks will receive; None on other ranks."""
    if {"--help", "-h", "--version"} & set(argv):
        with first_on_machine() as first, exit_if_unread():
            if first:
                show(*(VERSION if "--version" in argv else help_text(usage)).split("\n"))
        raise SystemExit(0)
    env_file = Path(read_flags(argv).env_file or ".env")
    exports = read_env_file(env_file, os.environ).exports if env_file.is_file() else {}
    # One of several ranks must know where they meet.
    environ, note = {**exports, **os.environ}, rank_note()
    is_single = {environ.get(name, "0") for name in ("RANK", "LOCAL_RANK")} == {"0"} and (
        "RANK" not in environ or environ.get("WORLD_SIZE", "1") == "1")
    if note and not is_single and not all(map(environ.get, ("RANK", "MASTER_ADDR", "MASTER_PORT"))):
        exit_with(SettingsError(note))
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        export(Plan(Config(), {}, exports=exports))
        return None
    try:
        plan = make_plan(argv)
    except PaddockError as error:
        return error
    export(plan)
    return plan


def exit_with(error: PaddockError) -> NoReturn:
    """Print the errors, once per machine, and exit with the error's code."""
    lines, note = str(error).splitlines(), rank_note()
    text = [f"error: {error}", *{note} - {"", *lines}]
    if isinstance(error, SettingsError):
        text = [f"{counted(len(lines), 'error')} in the settings:", *lines, *{note} - {"", *lines}]
    if note and note not in lines and os.environ.get("LOCAL_RANK", "0") != "0":
        text = [f"Stopped by an error that the process with LOCAL_RANK=0 prints; {note}"]
    with first_on_machine() as first:
        if first:
            print_safely("\n  ".join(text), sys.stderr)
    raise SystemExit(error.exit_code)


def export(plan: Plan) -> None:
    """Set `.env`'s variables for libraries, unless the environment has them, before these are imported."""
    for name, value in plan.exports.items():
        os.environ.setdefault(name, value)
    # Huge pages pay if new memory for the vocabulary's gradients, with its page faults, dominates a step.
    # Others reuse memory, which page alignment only fragments (docs/dev/log.md).
    config = plan.config
    in_vocabulary = next((size for _, size in data_manifests(config.data_path)), 0) * config.dim
    configure_allocator(not config.start_settings and in_vocabulary > max(HUGE_NUMEL, config.matrix_count),
                        config.matrix_count > HUGE_NUMEL)
    choose_waiting()
