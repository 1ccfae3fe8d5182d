"""Count what a reader of the code meets: in a start, a step and a save of a run of two steps, and in the core's source.

    python tests/phases.py                   the table, with the bound of each row and the goal
    python tests/phases.py --list start      the functions that a phase enters with EXTENSIONS=; --all: by default
    python tests/phases.py --list climbs     the calls in a start that go to a higher layer
    python tests/phases.py --list extensions the functions of extensions/ that a run enters with EXTENSIONS=

A process trains two steps of --preset sample,debug on tiny data while `sys.setprofile` notes every function
of the project that is entered. Lambdas, comprehensions, module bodies and installed packages do not count.
The whole run also has what its imports enter, and class bodies; there, methods of one name in a file are one.
tests/style/test_architecture.py fails above the bounds. When names move, adapt WRAPPED and AGREEMENTS.
"""

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "style"))

# (module, function, phase while it runs): the innermost counts.
WRAPPED = (("train", "main", "start"), ("train", "train_loop", "step"), ("train", "evaluate", "evaluation"),
           ("train", "save_checkpoint", "save"), ("train", "finish_saving", "save"), ("run.run", "finish_saving", "save"))
PHASES = ("start", "step", "save", "evaluation", "end")  # the imports come before them
AGREEMENTS = re.compile(r"\.(raise_on_all|gather_or_raise|on_rank0|broadcast|all_gather_json|all_agree)\(")


class Bound(NamedTuple):
    """The largest numbers of today, by default and with EXTENSIONS=, and the goal."""

    default: Optional[int]
    alone: Optional[int]
    goal: Optional[int] = None  # with EXTENSIONS=, but of the rows of the run by default


# A change that lowers a number lowers its bound.
BOUNDS = {
    "functions entered by a start": Bound(357, 282, 150),
    "files entered by a start": Bound(55, 36, 22),
    "functions entered by a step": Bound(201, 151, 100),
    "files entered by a step": Bound(27, 20, 15),
    "functions entered by a save": Bound(167, 107, 70),
    "files entered by a save": Bound(33, 18, 12),
    "functions entered by the run": Bound(954, 648, 600),
    "files entered by the run": Bound(90, 60, 60),
    "functions entered by the run, core": Bound(675, 638, 430),
    "files entered by the run, core": Bound(60, 58, 40),
    "classes that a step touches": Bound(46, 36, 20),
    "calls in a start to a higher layer": Bound(21, 5, 5),
    "functions of extensions/ entered": Bound(None, 0, 0),
    "agreements of ranks in the core": Bound(None, 24, 25),
    "agreements of ranks in the file with most": Bound(None, 7),
    "settings": Bound(None, 174),
    "rules that exclude combinations": Bound(None, 54, 55)}


# ------------------------------------------------------------------------------ in the process that trains


class Recorder:
    """Notes the functions that each phase enters, on all threads, and the start's calls to other files."""

    def __init__(self):
        self.phase = "imports"
        self.entered: dict[str, set[tuple[str, str]]] = {phase: set() for phase in ("imports", *PHASES)}
        self.calls: set[tuple[str, str, str, str]] = set()
        self.places: dict[CodeType, Optional[tuple[str, str]]] = {}

    def place_of(self, code: CodeType) -> Optional[tuple[str, str]]:
        """(file, qualified name) of a function, lambda or class body of the project; None for other code."""
        if code not in self.places:
            path, name = Path(code.co_filename), None
            if path.is_relative_to(ROOT) and not path.relative_to(ROOT).parts[0].startswith((".", "tests")):
                is_lambda = code.co_name == "<lambda>"
                name = f"lambda of line {code.co_firstlineno}" if is_lambda else definitions(path).get((code.co_name, code.co_firstlineno))
            self.places[code] = (str(path.relative_to(ROOT)), name) if name else None
        return self.places[code]

    def hook(self, frame: FrameType, event: str, _argument: Any) -> None:
        """The profile function of all threads."""
        if event != "call" or (place := self.place_of(frame.f_code)) is None:
            return
        phase = getattr(threading.current_thread(), "started_in", self.phase)
        is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS  # a class body is not
        if frame.f_code.co_name != "<lambda>":
            self.entered[phase if is_function else "imports"].add(place)
        if phase == "start" and is_function:
            caller = frame.f_back
            while caller and self.place_of(caller.f_code) is None:
                caller = caller.f_back
            if caller and (called_by := self.place_of(caller.f_code))[0] != place[0]:
                self.calls.add((*called_by, *place))

    def within(self, phase: str, function: Callable) -> Callable:
        """`function`, which is a phase of its own; after the steps, the start is the end."""
        @functools.wraps(function)
        def wrapper(*arguments, **named):
            before, self.phase = self.phase, phase
            try:
                return function(*arguments, **named)
            finally:
                self.phase = before if before != "start" else "end"

        return wrapper


@functools.cache
def definitions(path: Path) -> dict[tuple[str, int], str]:
    """The qualified names of a file's functions and classes, by their name and first line, which may be a decorator's."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}."
                found[child.name, min(each.lineno for each in (child, *child.decorator_list))] = name[:-1]
            visit(child, name)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def trace(output: Path, argv: list[str]) -> int:
    """Train in this process, and write what each phase entered; returns the exit code."""
    recorder = Recorder()
    start = threading.Thread.start

    def start_in_phase(thread: threading.Thread) -> None:
        thread.started_in = getattr(threading.current_thread(), "started_in", recorder.phase)
        start(thread)

    threading.Thread.start = start_in_phase
    threading.setprofile(recorder.hook)
    sys.setprofile(recorder.hook)
    for module, name, phase in WRAPPED:
        owner = importlib.import_module(module)
        setattr(owner, name, recorder.within(phase, getattr(owner, name)))
    code = importlib.import_module("train").main(argv)
    sys.setprofile(None)
    threading.setprofile(None)
    output.write_text(json.dumps({**{phase: sorted(entered) for phase, entered in recorder.entered.items()},
                                  "calls": sorted(recorder.calls)}))
    return code


# -------------------------------------------------------------------------------------------- the measures


def entered_by_run(folder: Path, data: dict[str, Any], *flags: str) -> dict[str, list[tuple]]:
    """(file, function) of each phase of a run in this folder; `climbs`: the start's calls, as pairs of them."""
    from test_architecture import layers, unit_of

    folder.mkdir()
    output = folder / "entered.json"
    settings = {**data, "PRESET": "sample,debug", "DEBUG": "false", "MAX_STEPS": 2, "SAVE_EVERY": 1, "RUN_NAME": "run", "DEVICE": "cpu",
                "PRECISION": "fp32", "OUTPUT_DIR": folder}
    argv = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--trace", str(output), *argv, *flags], cwd=folder, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    entered = {phase: [*map(tuple, places)] for phase, places in json.loads(output.read_text()).items()}
    entered["climbs"] = [call for call in entered.pop("calls") if layers()[unit_of(call[2])] > layers()[unit_of(call[0])]]
    entered["extensions"] = sorted({place for phase in PHASES for place in entered[phase] if place[0].startswith("extensions/")})
    return entered


def measured_runs(folder: Path) -> tuple[dict[str, list[tuple]], dict[str, list[tuple]]]:
    """What the phases of two runs entered: by default, and with EXTENSIONS=."""
    from factories import prepare

    prepared = prepare(folder / "data", documents=2000)
    data = {"PRETRAIN_DATA_PATH": prepared.shards, "TOKENIZER_PATH": prepared.tokenizer, "HELLASWAG_PATH": prepared.items}
    return entered_by_run(folder / "default", data), entered_by_run(folder / "alone", data, "--extensions=")


def core_files() -> list[Path]:
    """The source files of the core, as in docs/architecture.md."""
    from test_architecture import NOT_CORE

    files = [path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"))]
    return [ROOT / path for path in files if path.parts[0] not in NOT_CORE]


def rule_count() -> int:
    """The sentences that functions called rules or ..._rules yield, each of which excludes a combination of settings."""
    functions = [node for file in ("config.py", "extensions/settings.py")
                 for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
                 if isinstance(node, ast.FunctionDef) and re.fullmatch("(.*_)?rules", node.name)]
    return sum(isinstance(node, ast.Yield) and node.value is not None for function in functions for node in ast.walk(function))


def counts(entered: dict[str, list[tuple]]) -> dict[str, int]:
    """The numbers of a run, by row of the table."""
    run = {(file, name.rpartition(".")[2]) for phase in ("imports", *PHASES) for file, name in entered[phase]}
    groups = {"a start": entered["start"], "a step": entered["step"], "a save": entered["save"], "the run": run,
              "the run, core": [place for place in run if not place[0].startswith(("extensions/", "scripts/"))]}
    numbers = {}
    for name, places in groups.items():
        numbers[f"functions entered by {name}"] = len({*places})
        numbers[f"files entered by {name}"] = len({file for file, _ in places})
    classes = {(file, name.split(".")[0]) for file, name in entered["step"] if name[0].isupper()}
    return {**numbers, "classes that a step touches": len(classes),
            "calls in a start to a higher layer": len(entered["climbs"]),
            "functions of extensions/ entered": len(entered["extensions"])}


def source_counts() -> dict[str, int]:
    """The numbers of the source, by row of the table."""
    from config import Config

    agreements = {path: len(AGREEMENTS.findall(path.read_text(encoding="utf-8"))) for path in core_files()}
    return {"agreements of ranks in the core": sum(agreements.values()),
            "agreements of ranks in the file with most": max(agreements.values()),
            "settings": len(Config.model_fields), "rules that exclude combinations": rule_count()}


def table(default: dict[str, list[tuple]], alone: dict[str, list[tuple]]) -> dict[str, tuple[Optional[int], int]]:
    """(by default, with EXTENSIONS=) of each row."""
    by_default, by_core = counts(default), counts(alone)
    del by_default["functions of extensions/ entered"]
    rows = {name: (by_default.get(name), number) for name, number in by_core.items()}
    return rows | {name: (None, number) for name, number in source_counts().items()}


def main() -> int:
    if sys.argv[1:2] == ["--trace"]:
        return trace(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=[*PHASES, "climbs", "extensions"], nargs="+", default=[], help="what these phases enter")
    parser.add_argument("--all", action="store_true", help="list what they enter with the default EXTENSIONS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        default, alone = measured_runs(Path(folder))
    print(f"{'':<48}{'default':>9}{'EXT.=':>9}{'bound':>12}{'goal':>7}")
    for name, (number, core_number) in table(default, alone).items():
        *bounds, goal = ("" if each is None else each for each in BOUNDS[name])
        print(f"{name:<48}{'' if number is None else number:>9}{core_number:>9}{'/'.join(map(str, bounds)):>12}{goal:>7}")
    for phase in args.list:
        print(f"\n{phase}")
        for place in (default if args.all else alone)[phase]:
            print("  " + (" ".join(place) if len(place) == 2 else f"{place[0]} {place[1]} -> {place[2]} {place[3]}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
