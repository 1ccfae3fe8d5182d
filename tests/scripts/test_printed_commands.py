"""What a command recommends works in a shell in which nothing is activated; without the packages, it is how to get them."""

import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from commands import BARE, ROOT

SCRIPTS = [path for path in (ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py")))
           if "\nif __name__ ==" in path.read_text()
           and path.name not in ("verify_checkpoint.py", "benchmark_serving.py")]  # which need the standard library alone


def run_bare(line: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run a line in a new shell without environment variables, a terminal or an input."""
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=BARE, stdin=subprocess.DEVNULL, text=True, capture_output=True)


@pytest.fixture(autouse=True)
def nothing_is_active(monkeypatch):
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PADDOCK_COMMAND"):
        monkeypatch.delenv(name, raising=False)


def test_what_the_end_of_a_run_recommends_works_there(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_run(MAX_STEPS=2, SAMPLE_EVERY=0).trained()
    lines = dict(re.findall(r"^\[CPU0\] (report|use it|resume) +(.+)$", capsys.readouterr().out, re.MULTILINE))
    assert lines.keys() == {"report", "use it", "resume"}
    for line in lines.values():
        done = run_bare(line, tmp_path)
        assert done.returncode == 0 and "rror" not in done.stderr, (line, done.stderr)


@pytest.mark.parametrize("called", ["./paddock", "../clone/paddock", "/a b/paddock", "paddock"])
def test_a_command_begins_as_the_user_called_the_last_one(called, tmp_path):
    """Through the shell script and the list of commands, from any folder."""
    program = tmp_path / "program.py"
    program.write_text("from common.text import PROGRAM, command\nprint(command('scripts/report.py', 'a b'), '|', PROGRAM)")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, text=True, check=True, capture_output=True,
                          env=BARE | {"PYTHONPATH": str(ROOT), "PADDOCK_COMMAND": f"{shlex.quote(called)} train"})
    assert done.stdout == f"{shlex.quote(called)} report 'a b' | {shlex.quote(called)}\n"


# Without the packages


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A copy of the code without an environment, and in `bare` a Python without packages."""
    folder = tmp_path_factory.mktemp("clone")
    subprocess.run(f"git ls-files -z -co --exclude-standard | tar --null -T - -c | tar -x -C {shlex.quote(str(folder))}", shell=True,
                   cwd=ROOT, check=True)
    venv.create(folder / "bare", with_pip=False)
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_without_packages_a_script_prints_the_setup_command(script, empty):
    name = script.relative_to(ROOT)
    done = run_bare(f"bare/bin/python {name}", empty)
    assert "Traceback" not in done.stderr + done.stdout
    explained = re.fullmatch(r"error: \S+/bare/bin/python lacks the package \w+; set up the environment with: bash scripts/setup.sh\n",
                             done.stderr)
    if explained:
        assert done.returncode == 2
    else:  # a mistake in its flags is found first
        assert re.search("usage:|not installed|FAILED|needs", done.stderr + done.stdout)
