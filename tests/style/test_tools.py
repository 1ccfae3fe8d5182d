"""What linters and readers of the documents find: shell scripts are clean, links lead somewhere, workflows run what exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import mutations
import pytest
from commands import ROOT, tracked

from config import Config

# A block of code, and code in a line, in which brackets are no links.
CODE = re.compile(r"^(```.*?^```|~~~.*?^~~~)|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def is_shell(path: Path) -> bool:
    with open(path, "rb") as file:
        return path.suffix in (".sh", ".bash") or re.match(rb"#!.*\b(ba)?sh\b", file.readline()) is not None


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (requirements-dev.txt)")
    scripts = [path for path in tracked() if is_shell(path)]
    assert {"paddock", "setup.sh", "completion.bash", "run", "slurm.sh"} <= {path.name for path in scripts}
    done = subprocess.run([program, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_links_between_documents_lead_to_files():
    """`mkdocs build --strict` checks the anchors."""
    links = [(page, link) for page in tracked() if page.suffix == ".md"
             for link in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", CODE.sub("", page.read_text(encoding="utf-8")))]
    assert len(links) > 100 and [each for each in links if not (each[0].parent / each[1]).exists()] == []


def test_planted_faults_fit_the_code_and_name_tests_that_exist():
    """Not that the tests see them, which takes `python tests/mutations.py --known` many minutes."""
    for fault in mutations.known_faults(ROOT):
        for test in fault.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert all(f"def {name}(" in text for name in names), test


SHELL_LINE = re.compile(r"^( *)!(.*)$")


def completed(folder: Path, *lines: str) -> list[set[str]]:
    """What bash offers at the end of each command line; a last blank begins a new word."""
    calls = "".join(f"complete_words {' '.join(map(shlex.quote, line.split(' ')))}\n" for line in lines)
    script = ("source scripts/completion.bash\ncomplete_words() { COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)); _paddock; "
              f"echo \"${{COMPREPLY[*]}}\"; }}\ncd {shlex.quote(str(folder))}\n{calls}")
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_every_setting_value_and_preset_is_completed():
    flags = {f"--{name.replace('_', '-')}" for name in Config.model_fields}
    presets = {path.stem for path in (ROOT / "plan" / "presets").glob("*.env")}
    choices = {name: get_args(field.annotation) if get_origin(field.annotation) is Literal else ("true", "false")
               for name, field in Config.model_fields.items()
               if get_origin(field.annotation) is Literal or field.annotation is bool}
    offered, script, named, joined, *values = completed(
        ROOT, "python train.py --", "torchrun --nproc-per-node 2 train.py --preset sa", "bash scripts/run.sh --preset sample,de",
        "python train.py --optimizer = mu", *(f"python train.py --{name.replace('_', '-')} " for name in choices))
    assert offered == flags | {"--check", "--config", "--env-file", "--help", "--version"}
    assert script == {name for name in presets if name.startswith("sa")} and named == {"sample,debug"} and joined == {"muon"}
    assert {name: tuple(sorted(found)) for name, found in zip(choices, values)} == {
        name: tuple(sorted(words)) for name, words in choices.items()}


def cells() -> list[str]:
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "strip the notebook's outputs"
    return ["".join(cell["source"]) for cell in code]


def as_script(source: str) -> str:
    """A cell as plain Python: its `!` lines, in which {name} is a variable, become calls of the shell."""
    return "\n".join(SHELL_LINE.sub(lambda line: f"{line[1]}shell(f{line[2]!r})", line) for line in source.split("\n"))


@pytest.mark.slow
def test_the_notebook_goes_from_text_to_chat(tmp_path):
    """In a copy, with fewer steps: every cell runs, and what it says at the end is an answer."""
    subprocess.run(f"git ls-files -z | xargs -0 cp --parents -t {shlex.quote(str(tmp_path))}", shell=True, cwd=ROOT, check=True)
    few = [source.replace("400", "100").replace("200", "100").replace("20_000", "4_000").replace("8_000", "2_000") for source in cells()]
    (tmp_path / "docs" / "tour.py").write_text(
        "import subprocess\n\ndef shell(command):\n    subprocess.run(command, shell=True, check=True)\n\n"
        + "\n".join(map(as_script, few)))
    result = subprocess.run([sys.executable, "-u", "tour.py"], cwd=tmp_path / "docs", capture_output=True, text=True,
                            env={**os.environ, "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    *_, last = result.stdout.split("(right: ")
    assert result.stdout.count("(right: ") == 3 and last.rpartition("?\n")[2].strip(), "an answer after the last question"
