"""Puts faults into a copy of the code, one at a time, and shows which of them no test sees.

    python tests/mutations.py --known [--only WORD]      faults that tests have seen before: tests/faults.json
    python tests/mutations.py --number 60 [--seed 7] [--only learn/]     faults made from the code's syntax

Exits with 1 unless every known fault is seen. Faults that are made are drawn at random from lines that a test
enters. Those that survive are only listed, because some change nothing. Which tests enter a line is measured
first, by a run of all tests with coverage.
"""

import argparse
import ast
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import NamedTuple

import coverage

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "faults.json"  # name, file, old text, new text, and tests of which one must fail
NOT_DRAWN = ("tests/", "scripts/")
FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")  # written by pytest: the ids of the tests that failed
TIMEOUT = 300  # seconds for the tests of one fault
MOST_TESTS = 25  # for a fault that is made: those that enter the fewest lines


class Fault(NamedTuple):
    """The text of a file without and with a fault, and the tests that should see it."""

    name: str
    file: str
    text: str
    changed: str
    tests: list[str]


# ----------------------------------------------------------------------------------------- known faults


def known_fault(tree: Path, name: str, file: str, old: str, new: str, tests: list[str]) -> Fault:
    """The old text must occur exactly once; white space may differ."""
    text, pattern = (tree / file).read_text(encoding="utf-8"), r"\s+".join(map(re.escape, old.split()))
    if (count := len(re.findall(pattern, text))) != 1:
        raise ValueError(f"{name}: {file} has {old!r} {count} times; correct it in {KNOWN}")
    changed = re.sub(pattern, lambda _: new, text)
    compile(changed, file, "exec")  # a fault is wrong code, not a syntax error
    return Fault(name, file, text, changed, tests)


def known_faults(tree: Path, only: str = "") -> list[Fault]:
    entries = json.loads(KNOWN.read_text(encoding="utf-8"))
    return [known_fault(tree, *entry) for entry in entries if only in entry[0] or only in entry[1]]


# ------------------------------------------------------------------------------------------ made faults

COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
            ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Texts for people, and types: other tests look at these, or none should.
PASSED_OVER = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
FIELDS_PASSED_OVER = ("annotation", "returns", "decorator_list", "type_params")
TOLD = re.compile(r"(.*\.)?(info|warn|show|print|print_safely|tick)$")


def changed(node: ast.AST, **fields) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def without_each(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """The node without one of the elements of a field that is a list."""
    values = getattr(node, field)
    for place in range(len(values)):
        yield changed(node, **{field: values[:place] + values[place + 1:]})


def other_expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of an expression."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            ops = [*node.ops[:place], COMPARED[type(operator)](), *node.ops[place + 1:]]
            yield changed(node, ops=ops)
    elif isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
        if type(node.op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(node.op)]())
        if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
            yield changed(node, left=node.right, right=node.left)
    elif isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield from (each if len(each.values) > 1 else each.values[0] for each in without_each(node, "values"))
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield ast.Constant(2 * node.value)
    elif isinstance(node, ast.Call):
        yield from other_calls(node)
    elif hasattr(node, "generators"):
        for place, generator in enumerate(node.generators):
            for fewer in without_each(generator, "ifs"):
                others = [*node.generators[:place], fewer, *node.generators[place + 1:]]
                yield changed(node, generators=others)


def other_calls(node: ast.Call) -> Iterator[ast.AST]:
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr in OPPOSITES:
        yield changed(node, func=changed(called, attr=OPPOSITES[called.attr]))
    elif isinstance(called, ast.Name) and called.id in OPPOSITES:
        yield changed(node, func=ast.Name(OPPOSITES[called.id]))
    yield from without_each(node, "keywords")
    for place in range(len(node.args) - 1):
        args = [*node.args]
        args[place:place + 2] = reversed(args[place:place + 2])
        yield changed(node, args=args)
    if len(node.args) > 1:
        yield changed(node, args=node.args[:-1])


def other_statements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a statement."""
    if isinstance(node, ast.Return) and node.value:
        yield ast.Return()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name):
        yield ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield from (ast.Pass(), ast.Assign([node.target], node.value))


def is_passed_over(node: ast.AST) -> bool:
    """Whether it is no syntax, or text for people."""
    call = node.value if isinstance(node, ast.Expr) else node
    is_told = isinstance(call, ast.Call) and TOLD.match(ast.unparse(call.func))
    return not isinstance(node, ast.AST) or isinstance(node, PASSED_OVER) or bool(is_told)


def alternatives(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each node with each of its faults."""
    for field, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            if is_passed_over(node) or field in FIELDS_PASSED_OVER:
                continue
            make = other_statements if isinstance(node, ast.stmt) else other_expressions
            others = [*make(node)]
            if field == "test":
                others += [ast.UnaryOp(ast.Not(), node), ast.Constant(True), ast.Constant(False)]
            yield from ((node, other) for other in others)
            yield from alternatives(node)


def made_faults(file: str, text: str) -> list[Fault]:
    """Every fault of a file, without its tests."""
    starts, content, found = [0], text.encode(), []
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, other in alternatives(ast.parse(text)):
        if not hasattr(node, "col_offset"):
            continue
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        old, new = content[first:last].decode(), ast.unparse(ast.fix_missing_locations(other))
        name = f"{file}:{node.lineno}: {' '.join(old.split())[:70]} -> {new[:70]}"
        if isinstance(node, ast.expr):
            new = f"({new})"
        found.append(Fault(name, file, text, f"{content[:first].decode()}{new}{content[last:].decode()}", []))
    return found


def tracked_files() -> list[str]:
    git = ["git", "ls-files", "-z"]
    names = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [*filter(None, names.split("\0"))]


def drawn_files() -> list[str]:
    return [name for name in tracked_files() if name.endswith(".py") and not name.startswith(NOT_DRAWN)]


# ------------------------------------------------------------------------------------ who enters a line


def pytest_runtest_logstart(nodeid: str, location) -> None:
    """As a plugin of pytest, in the run that makes the map."""
    coverage.Coverage.current().switch_context(nodeid)


def make_map(tree: Path, target: Path) -> None:
    """Run the tests in a copy with coverage, whose contexts are the tests."""
    settings = ("[run]", f"source = {tree}", "omit = */tests/*", "relative_files = True",
                f"data_file = {target}")
    (tree / "coverage.ini").write_text("\n".join(settings))
    command = [sys.executable, "-m", "coverage", "run", "--rcfile=coverage.ini", "-m", "pytest", "-q", "-p", "mutations"]
    done = subprocess.run(command, cwd=tree, env=environment(tree), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")


def draw(data: coverage.CoverageData, number: int, seed: int, only: str) -> list[Fault]:
    """Faults in lines that tests enter, with the most specific of these."""
    drawn, costs = [], Counter()
    for file in drawn_files():
        entered = data.contexts_by_lineno(file)
        costs.update(test for tests in entered.values() for test in tests)
        if only in file:
            for fault in made_faults(file, (ROOT / file).read_text(encoding="utf-8")):
                tests = entered.get(int(fault.name.split(":")[1]), [])
                drawn += [fault._replace(tests=[*filter(None, tests)])] * any(tests)
    chosen = Random(seed).sample(drawn, min(number, len(drawn)))
    return [fault._replace(tests=sorted(fault.tests, key=costs.get)[:MOST_TESTS]) for fault in chosen]


# --------------------------------------------------------------------------------------- trying faults


def environment(tree: Path) -> dict[str, str]:
    ours = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "tests")}
    return os.environ | ours


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files as they are now, with bytecode that notices a change within the same second."""
    for name in tracked_files():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    compileall = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compileall, folder], check=True)
    return folder


def failing_tests(tree: Path, tests: list[str], *flags: str) -> list[str]:
    """Run tests; return the ids of those that failed, or in parentheses what else ended them."""
    (tree / FAILED_TESTS).unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q", *flags, *tests], cwd=tree, text=True,
                               env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return [f"(no end within {TIMEOUT} s)"]
    if process.returncode == 5 or "ERROR: not found: " in output:
        raise RuntimeError(f"{tests} are no tests: {output.strip().splitlines()[-1]}")
    if process.returncode not in (0, 1):  # nothing can be imported, or a signal killed it
        return [f"(pytest ends with {process.returncode})"]
    return [*json.loads((tree / FAILED_TESTS).read_text())] if process.returncode else []


def seen_by(copies: "SimpleQueue[Path]", fault: Fault) -> tuple[list[str], float]:
    """The tests that fail with a fault in one of the copies, and the seconds that it took."""
    tree, started = copies.get(), time.monotonic()
    try:
        (tree / fault.file).write_text(fault.changed, encoding="utf-8")
        return failing_tests(tree, fault.tests, "-x"), time.monotonic() - started
    finally:
        (tree / fault.file).write_text(fault.text, encoding="utf-8")
        copies.put(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", action="store_true", help="the faults of tests/faults.json")
    parser.add_argument("--number", type=int, default=0, help="faults to make")
    today = int(time.time()) // 86_400
    parser.add_argument("--seed", type=int, default=today, help="of the drawing (default: the day)")
    parser.add_argument("--only", default="", help="only faults whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested at a time")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        trees = [copy_tree(Path(folder, str(number))) for number in range(args.jobs)]
        for tree in trees:
            copies.put(tree)
        known = made = []
        if args.known:
            known = known_faults(ROOT, args.only)
        if args.number:
            make_map(trees[0], Path(folder, "map"))
            print(f"Made the map of tests in {time.monotonic() - started:.0f} s.", flush=True)
            data = coverage.CoverageData(str(Path(folder, "map")))
            data.read()
            made = draw(data, args.number, args.seed, args.only)
        failed, survivors, wrong = set(), [], []
        faults = [*known, *made]
        for fault, (tests, seconds) in zip(faults, pool.map(lambda fault: seen_by(copies, fault), faults)):
            failed |= {test for test in tests if not test.startswith("(")}
            survivors += [fault] * (not tests)
            shown = f"seen by {', '.join(tests)}" if tests else "SURVIVES"
            print(f"{seconds:5.1f} s  {fault.name}  {shown}", flush=True)
        if failed:  # a test that fails without a fault too has not seen it
            wrong = failing_tests(trees[0], sorted(failed))
            print("".join(f"ERROR: {test} fails without a fault too\n" for test in wrong), end="")
    seconds = time.monotonic() - started
    print(f"{len(faults)} faults (seed {args.seed}), {len(survivors)} survive, {seconds:.0f} s")
    return 1 if wrong or any(fault in known for fault in survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
