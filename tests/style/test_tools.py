"""What linters and readers of the documents find: shell scripts are clean, links lead somewhere, workflows run what exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import mutations
import pytest
from commands import ROOT, tracked

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
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


@cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ +(.+?) *$", CODE.sub(lambda found: "" if found[1] else found[0], page.read_text(encoding="utf-8")),
                          re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere in this repository; other sites are not asked."""
    found = []
    for target in ("".join(link) for link in LINK.findall(CODE.sub("", text))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or anchor and place.suffix == ".md" and anchor not in anchors(place):
            found.append(target)
    return found


def test_links_between_documents_lead_somewhere():
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert len(pages) > 10
    assert {str(page.relative_to(ROOT)): links for page in pages if (links := broken(page, page.read_text(encoding="utf-8")))} == {}


def test_the_nightly_workflow_runs_what_exists():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))["jobs"]["nightly"]
    matrix = job["strategy"]["matrix"]
    commands = [*matrix["what"], *(each["what"] for each in matrix["include"])]
    assert {"3.10", "3.13"} <= {*matrix["python"]}
    for command in commands:
        program, script, *_ = shlex.split(command)
        assert program in ("bash", "python") and (ROOT / script).is_file()
    last = job["steps"][-1]["run"]
    assert all((ROOT / name).is_file() for name in re.findall(r"\S+\.(?:txt|sh)", last)) and "${{ matrix.what }}" in last
    versions = {found for name in ("ci.yml", "nightly.yml") for found in
                re.findall(r"playwright~=[\d.]+", (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))}
    assert versions == {*re.findall(r"^playwright~=[\d.]+", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)}


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("suite", 3), ("tests", 5)])
def test_ci_fails_if_any_of_its_parts_does(failing, code, tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "tests", tmp_path / ".ci")
    for name, part, fails in (("scripts/gpu_suite.sh", "suite", 3), ("scripts/test.sh", "tests", 5)):
        file = tmp_path / name
        waits = "sleep 600" if failing == "tests" and part == "suite" else ":"  # the other parts end with the tests
        file.write_text(f"#!/bin/bash\necho \"{part} of $CI\"\n{waits}\nexit {fails if part == failing else 0}\n")
        file.chmod(0o755)
    (tmp_path / "scripts" / "setup.sh").write_text('activate() { echo "in $1"; }\nunshare() { false; }\n')
    done = subprocess.run(["bash", tmp_path / ".ci" / "tests", "an environment"], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done
    assert done.stdout.startswith("in an environment") and "tests of true" in done.stdout
    assert "suite of true" in done.stdout or failing == "tests"


@pytest.mark.parametrize("user", [0, 1000])
def test_ci_clones_into_a_folder_with_a_space_and_leaves_root(user, tmp_path):
    checkout, binaries = tmp_path / "checkout", tmp_path / "bin"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    (checkout / ".ci" / "tests").write_text('echo "$PWD: $*"; [ $# = 2 ] || exit 7\n')
    git = ["git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (checkout / ".ci" / "tests").write_text("exit 8  # not committed\n")
    stubs = {"id": f"[ $1 != -u ] || echo {user}", "getent": f"echo paddock-ci:x:1001:1001::{tmp_path}:/bin/sh", "chown": 'echo "chown $*"',
             "setpriv": 'echo "setpriv $1 $2"\nshift 5\nexec "$@"', "chromium": ""}
    for name, text in stubs.items():
        (binaries / name).parent.mkdir(exist_ok=True)
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(["bash", checkout / ".ci" / "run"], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "temporary")})
    assert done.returncode == 7 and "without the changes that are not committed" in done.stdout, done
    place = rf"{re.escape(str(tmp_path))}/temporary/[^/]+"
    environment = f"{tmp_path}/environment" if user == 0 else f"{checkout}/.venv"
    environment = re.escape(environment)
    told = rf"{place}/a clone/paddock: --set-up {environment}\n(.*\n)*{place}/a clone/paddock: {environment}\n"
    assert re.search(told, done.stdout), done.stdout
    assert done.stdout.count("setpriv --reuid paddock-ci\n") == (2 if user == 0 else 0)
    assert bool(re.search(f"chown -R paddock-ci: {place}\n", done.stdout)) == (user == 0)
    assert not list((tmp_path / "temporary").iterdir())


def test_planted_faults_fit_the_code_and_name_tests_that_exist():
    """Not that the tests see them, which takes `python tests/mutations.py` many minutes."""
    for fault in mutations.FAULTS:
        mutations.planted(ROOT, fault)
        for test in fault.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert all(f"def {name}(" in text for name in names), test
