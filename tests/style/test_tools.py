"""What linters and readers of the documents find: shell scripts are clean, links lead somewhere, workflows run what exists."""

import re
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


def test_planted_faults_fit_the_code_and_name_tests_that_exist():
    """Not that the tests see them, which takes `python tests/mutations.py --known` many minutes."""
    for fault in mutations.known_faults(ROOT):
        for test in fault.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert all(f"def {name}(" in text for name in names), test
