"""Every command explains itself in 80 columns, says its version, and does nothing else then."""

import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from commands import ROOT

from common import __version__
from common.command_line import HELP_COLUMNS
from common.text import COMMANDS
from parallel.process import STOP_SIGNALS

PYTHON = [path for path in sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts").glob("[dg]*/*.py")]) if "\nif __name__ ==" in path.read_text()
          and path.name != "main.py"]  # which is ./paddock: test_paddock.py
TRAIN = ROOT / "train.py"


def files() -> set[tuple]:
    """Everything that a command might write into, with the time of files; python's own __pycache__ comes and goes."""
    return {(str(path), path.is_file() and path.stat().st_mtime_ns) for folder in ROOT.glob("[!.]*") for path in (folder, *folder.glob("*"))
            if "__pycache__" not in str(path)}


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a Python script in this process; returns its exit code and what it printed."""
    environ, path = dict(os.environ), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.syspath_prepend(ROOT / "scripts")  # as python does with a script's folder

    def run(script: Path, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *flags])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path


@pytest.mark.parametrize("script", [TRAIN, *PYTHON], ids=lambda path: path.name)
def test_a_script_prints_its_help_and_version(script, run):
    before = files()
    code, text = run(script, "--help")
    assert code == 0 and "usage:" in text and "--version" in text
    name = str(script.relative_to(ROOT))
    assert f"./paddock {COMMANDS[name]}" in text if name in COMMANDS else script.name in text or name == "train.py"
    assert not (name in COMMANDS and f"python {name}" in text), "one way to start"
    assert [line for line in text.splitlines() if len(line) > HELP_COLUMNS] == []
    assert run(script, "--version") == (0, f"Paddock {__version__}\n")
    assert files() == before
