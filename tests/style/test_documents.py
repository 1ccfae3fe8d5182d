"""Commands that the documents name exist, and pages stay short. `mkdocs build --strict` checks that each is in the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "scripts/gpu/README.md"])


# Two pages name what was there.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")], ids=lambda page: page.name)
def test_every_command_exists(page):
    text = page.read_text(encoding="utf-8")
    for script in re.findall(r"(?:python|bash|sbatch.*|-f|launch.*) (scripts/[\w/]+\.(?:py|sh|yaml))", text):
        assert (ROOT / script).is_file(), script
    commands = {line.split()[0] for line in (ROOT / "scripts/main.py").read_text(encoding="utf-8").splitlines()
                if re.match(r"[a-z-]+( .*)? : ", line)}
    assert "train" in commands
    found = set(re.findall(r"\./paddock ([a-z]\S*)", text))
    assert {re.sub(r"\W+$", "", name) for name in found} <= commands


# Words of a page without its commands and generated tables: those of one that a reader takes in at once.
LIMITS = {"README.md": 700, "CHANGELOG.md": 300, "docs/dev/log.md": 1000, "docs/results.md": 1800, "docs/gpu.md": 600, "docs/gpus.md": 1500, "docs/reliability.md": 1500,
          "docs/architecture.md": 1800, "docs/serving.md": 1400, "docs/files.md": 1500, "docs/install.md": 400, "docs/coming-from.md": 1200, "docs/recipes.md": 1200,
          "docs/data.md": 1200, "docs/online.md": 900, "docs/evaluation.md": 900, "docs/troubleshooting.md": 800, "docs/without.md": 500}
WITH_TABLES = ("README.md", "docs/results.md")
GENERATED = ("settings.md", "starts.md", "promises.md")


def words(text: str) -> int:
    """Bars of tables are not words."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_documents_stay_short():
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES
             if page.parent.name != "api" and page.name not in GENERATED}
    assert sum(words(text) for name, text in texts.items() if re.match("README|CHANGELOG|docs", name)) <= 25_000
    read = {name: re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE) for name, text in texts.items()}
    read |= {name: re.sub(r"^<!-- (.+) -->.*?^<!-- /\1 -->", "", text, flags=re.DOTALL | re.MULTILINE)
             for name, text in read.items() if name not in WITH_TABLES}
    assert {name: count for name, limit in LIMITS.items() if (count := words(read[name])) > limit} == {}
