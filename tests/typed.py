"""The commands that documents, pages, help texts and the code show, as typed; and a parser of each one's flags."""

import ast
import importlib
import inspect
import io
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import ROOT

from common import interrupts
from common.command_line import CommandParser
from common.errors import SettingsError
from common.text import COMMANDS
from config import KIND_OF_STAGE, KINDS
from data_preparation_utils import FlagParser, flag_parser, used_settings
from plan.layers import read_flags
from scripts.launch import make_parser
from scripts.main import SCRIPTS
from scripts.prepare import SCRIPTS as PREPARATIONS

DOCUMENTS = [page for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]) if page.name not in ("log.md", "CHANGELOG.md")]
CODE = [path for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]) if path.relative_to(ROOT).parts[0] not in ("tests", "docs", "build")]
TEXTS = [*sorted((ROOT / "extensions").rglob("*.html")), *sorted((ROOT / "extensions").rglob("*.jinja")),
         *(path for path in sorted((ROOT / "extensions").rglob("*.js")) if "umd" not in path.name)]
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
STARTS = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:\./paddock [a-z]|(?:\.venv/bin/)?python (?:-m pytest|\S+\.py)|bash scripts/|(?:\.venv/bin/)?torchrun )")
PLACEHOLDER = re.compile("(invalid choice: |invalid int value: |expected a number.* not )'[A-Z]+'")
HIDDEN = "1"  # stands for what is computed when a line is printed; a number is a valid text


class Typed(NamedTuple):
    """A command, and where it is shown."""

    where: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def in_document(page: Path, only_blocks: bool = False) -> Iterator[Typed]:
    """The lines of code blocks, joined where they continue and without shell variables; and code in the text."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    of_recipes = [f"--{added.replace('_', '-')} " for added in re.findall(r"^\+    (\w+): .* = (?:safe|curve|fixed)\(", text, re.MULTILINE)]
    for block in (block for language, block in BLOCK.findall(text) if language in ("", "bash", "sh", "console")):
        block = re.sub(r"\\\n *", "", re.sub(r"<<'?(\w+)'?.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE))
        variables = dict(re.findall(r'^ *(\w+)="(.*?)"(?= *(?:#|$))', block, re.MULTILINE))
        for line in map(str.strip, block.splitlines()):
            for variable in [*variables] * 2:  # one may contain another
                line = line.replace(f"${variable}", variables[variable])
            for part in re.findall(rf"(?:^|&& )({STARTS.pattern}.*?)(?= && |$)", line):
                if not any(flag in part for flag in of_recipes):
                    yield Typed(name, part.removesuffix(" ..."))
    for code in () if only_blocks else re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
        is_ours = "paddock" in code or page.name != "coming-from.md"  # which shows commands of other trainers
        if STARTS.match(code) and "--" in code and is_ours:  # not only a command's name
            yield Typed(name, code.partition(" && ")[0].removesuffix(" ..."))


def in_page(path: Path) -> Iterator[Typed]:
    """What a page or a model card shows; a function's parameters have the values of its calls."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    for line in re.findall(r"\./paddock [a-z-]+(?= )[^`<\n]*(?:`[^`\n]*`[^`<\n]*)*", text):
        line = re.sub(r"\$\{source \? ` --\$\{setting\} .*?` : \"\"\}", " --${setting} 'runs/chat'", line)
        calls = re.findall(r'exportAs\("(\w+)", "(\w+)", "([\w-]+)"', text) if "${kind}" in line else [("", "", "")]
        line = re.sub(r"\{\{.*?\"(\w+)\" if .*? else \"(\w+)\" \}\}", r"\1", line)
        for file, kind, setting in calls:
            shown = line.replace("${kind}", kind).replace("${name}", f"{file}.jsonl").replace("${setting}", setting)
            yield Typed(name, re.sub(r"`.*|\{\{.*?\}\}", "", shown))


def text_of(node: ast.expr) -> str:
    """A text in the code, with HIDDEN for what is inserted."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(getattr(each, "value", each) if isinstance(each, ast.FormattedValue) else each) for each in node.values)
    if isinstance(node, ast.Name) and node.id == "PROGRAM":
        return "./paddock"
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command" and text_of(node.args[0]) in COMMANDS:
        given = [text_of(each) for each in node.args[1:] if not isinstance(each, ast.Starred)]
        return " ".join(["./paddock", COMMANDS[text_of(node.args[0])], *map(shlex.quote, given)])
    return HIDDEN


def in_code(path: Path) -> Iterator[Typed]:
    """The calls of `command`, with what a sentence adds to them; and the lines of texts that begin with ./paddock."""
    name, seen = str(path.relative_to(ROOT)), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if id(node) in seen or not isinstance(node, ast.Constant | ast.JoinedStr | ast.Call):
            continue
        if isinstance(node, ast.Call):
            lines = [text_of(node)] * (getattr(node.func, "id", "") == "command")
        else:
            seen |= {id(part) for part in ast.walk(node)}
            text = re.sub(r" *\\\n *", " ", text_of(node))
            lines = [re.split(r"  +| \| ", line)[0] for line in re.findall(r"^ +((?:[A-Z_]+=\S+ )*\./paddock [a-z].*)$", text, re.MULTILINE)]
            lines = lines or re.findall(r"\./paddock [a-z]+ [^`;,()\n]*", text)
        for line in lines:
            line = " ".join(takewhile(lambda word: not re.match(r"[\[|]", word), re.sub(r"[.:]$", "", line).split(" ")))
            if " --" in line and not line.endswith("--to 1"):  # not only a command's name, or a part of it
                yield Typed(f"{name}:{node.lineno}", line)


@cache
def typed() -> tuple[Typed, ...]:
    """All commands that are shown, each once."""
    found = [each for collect, paths in ((in_document, DOCUMENTS), (in_page, TEXTS), (in_code, CODE)) for path in paths for each in collect(path)]
    return tuple({each.line: each for each in reversed(found)}.values())[::-1]


# ------------------------------------------------------------------------------------------------- the flags


class Became(BaseException):
    """A script that would run another one, or that has parsed its flags."""


def refuse_unknown(flags: list[str]) -> None:
    """Fail if these are not all flags of settings with values."""
    layer = read_flags(flags)
    assert not layer.problems and not layer.unused, layer.problems + layer.unused


def check_flags(words: list[str]) -> None:
    """Fail, or exit with argparse's error, unless a command accepts these flags; it does nothing else."""
    words = words[next(place for place, word in enumerate(words) if not re.match("[A-Z_]+=", word)):]
    if "torchrun" in words[0]:
        words = words[next((place for place, word in enumerate(words) if word.endswith(".py")), 1) - 1:]
    if words[1:3] == ["-m", "pytest"] or "torchrun" in words[0]:  # torchrun of another trainer's module
        return
    script, *fixed = [f"scripts/{SCRIPTS[words[1]][0]}", *SCRIPTS[words[1]][1:]] if words[0] == "./paddock" else words[1:2]
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            check_script(script, [*fixed, *words[2:]])
    except (SystemExit, SettingsError) as error:
        # --help exits with 0. A word in capitals stands for a value, which may be one of several, or a number.
        if getattr(error, "code", 1) != 0 and not PLACEHOLDER.search(f"{error} {stderr.getvalue()}"):
            raise AssertionError(f"{error} {stderr.getvalue()}") from error


def check_script(path: str, flags: list[str]) -> None:
    path = {"scripts/gpu_suite.sh": "scripts/gpu/suite.py"}.get(path, path)
    if path.endswith(".sh"):
        return
    assert (ROOT / path).is_file() or path == "heroes.py", path
    if path == "train.py":
        return refuse_unknown(flags)
    if path == "scripts/prepare.py" and (kind := PREPARATIONS[flags[0]]) in {f"{name}.py" for name in ("load_pretrain_dataset", "load_instruct_dataset",
                                                                                                     "load_dpo_dataset", "load_prompts_dataset")}:
        kind = next(name for name, (_, script) in KINDS.items() if script.endswith(kind))
        flags = flags[1:] if len(flags) == 1 or flags[1].startswith("-") else ["--source", *flags[1:]]
        parser = flag_parser(kind, "")
        parser.refuse_unused(flags, *used_settings(kind))
        return refuse_unknown(parser.split(flags)[1])
    if path == "scripts/prepare.py":
        return check_script(f"scripts/{PREPARATIONS[flags[0]]}", flags[1:])
    if path == "scripts/run.py":
        stage = dict(zip(flags, flags[1:])).get("--training-stage", "pretrain")
        return refuse_unknown(make_parser().parse_known_args(flag_parser(KIND_OF_STAGE[stage], "").split(flags)[1])[1])
    if path in ("tests/recipes.py", "heroes.py"):  # which have no flags
        return
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))

    def become(script: str, *further: str) -> None:
        raise Became(script, *further)

    def stop(parser: FlagParser, *_) -> None:
        raise Became()

    inside = []

    def parse_args(parser: ArgumentParser, *given) -> None:
        inside.append(parser)
        parse(parser, *given)
        stop(parser)

    def parse_known_args(parser: ArgumentParser, *given) -> tuple[Namespace, list[str]]:
        found = parse_known(parser, *given)
        if not inside:
            refuse_unknown(found[1])
            stop(parser)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(ROOT / path), *flags])
        patch.setattr(interrupts, "become", become)
        patch.setattr(FlagParser, "parse", stop)
        try:
            if not hasattr(module, "parse_args"):
                parse, parse_known = ArgumentParser.parse_args, CommandParser.parse_known_args
                patch.setattr(ArgumentParser, "parse_args", parse_args)
                if "parser.parse_known_args" in inspect.getsource(module.main):
                    patch.setattr(CommandParser, "parse_known_args", parse_known_args)
                module.main(*[flags] * path.endswith("load_hellaswag_dataset.py"))
                raise AssertionError(f"{path} did not parse its flags")
            parsed = module.parse_args()
        except Became as became:
            return became.args and check_script(str(Path(became.args[0]).relative_to(ROOT)), [*became.args[1:]])
    if isinstance(parsed, tuple) and isinstance(parsed[1], list) and path != "scripts/gpu/suite.py":
        refuse_unknown(parsed[1])
