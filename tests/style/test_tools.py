"""What linters and readers of the documents find: shell scripts are clean, links lead somewhere, workflows run what exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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


def completed(*lines: str) -> list[set[str]]:
    """What bash offers at the end of each command line; a last blank begins a new word."""
    calls = "".join(f"complete_words {' '.join(map(shlex.quote, line.split(' ')))}\n" for line in lines)
    script = ("source scripts/completion.bash\ncomplete_words() { COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)); _paddock; "
              f"echo \"${{COMPREPLY[*]}}\"; }}\n{calls}")
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_every_setting_value_and_preset_is_completed():
    flags = {f"--{name.replace('_', '-')}" for name in Config.model_fields}
    presets = {path.stem for path in (ROOT / "plan" / "presets").glob("sa*.env")}
    offered, script, named, joined, value = completed(
        "python train.py --", "torchrun --nproc-per-node 2 train.py --preset sa", "bash scripts/run.sh --preset sample,de",
        "python train.py --optimizer = mu", "python train.py --compile ")
    assert offered == flags | {"--check", "--config", "--env-file", "--help", "--version"}
    assert script == presets and named == {"sample,debug"} and joined == {"muon"} and value == {"true", "false"}


@pytest.mark.slow
def test_the_notebook_goes_from_text_to_chat(tmp_path):
    """In a copy, with fewer steps: every cell runs, and what it says at the end is an answer."""
    subprocess.run(f"git ls-files -z | xargs -0 cp --parents -t {shlex.quote(str(tmp_path))}", shell=True, cwd=ROOT, check=True)
    cells = [cell for cell in json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "strip the notebook's outputs"
    code = "\n".join("".join(cell["source"]) for cell in cells)
    for many, few in (("400", "100"), ("200", "100"), ("20_000", "4_000"), ("8_000", "2_000")):
        code = code.replace(many, few)
    code = re.sub("^( *)!(.*)$", lambda line: f"{line[1]}shell(f{line[2]!r})", code, flags=re.MULTILINE)  # {name} is a variable there
    (tmp_path / "docs" / "tour.py").write_text(
        f"import subprocess\n\ndef shell(command):\n    subprocess.run(command, shell=True, check=True)\n\n{code}")
    result = subprocess.run([sys.executable, "-u", "tour.py"], cwd=tmp_path / "docs", capture_output=True, text=True,
                            env={**os.environ, "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    *_, last = result.stdout.split("(right: ")
    assert result.stdout.count("(right: ") == 3 and last.rpartition("?\n")[2].strip(), "an answer after the last question"
