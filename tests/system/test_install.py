"""pyproject.toml packs the whole tree as one package, MANIFEST.in the clone, and an installed paddock trains in an empty folder."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

from common import __version__

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")
NOT_PACKED = ("tests/", "docs/", "scripts/gpu/null/", ".")  # folders, and hidden files
OF_A_CLONE = {"paddock", "pyproject.toml", "MANIFEST.in", "mkdocs.yml", "Dockerfile", "CITATION.cff", "LICENSE"}  # and *.md, *.sh, *.bash, clusters' *.yaml


def cloned_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return {*listed.splitlines()}


def packed_files() -> set[str]:
    """The files of the tree that an installed Paddock needs."""
    return {name for name in cloned_files() if not name.startswith(NOT_PACKED) and name not in OF_A_CLONE
            and not name.endswith((".md", ".sh", ".bash", ".yaml"))}


def test_pyproject_names_all_that_is_needed_and_the_requirements_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = project["tool"]["setuptools"]
    packed = {path for package in tools["packages"] for folder in [ROOT.joinpath(*package.split(".")[1:])]
              for pattern in ("*.py", *tools["package-data"].get(package, ())) for path in folder.glob(pattern)}
    files = packed_files()
    assert {str(path.relative_to(ROOT)) for path in packed} >= files and {"config.py", "plan/presets/sample.env"} <= files
    assert all(package.split(".")[0] == "paddock" for package in tools["packages"])
    assert tools["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}, "one list of requirements"
    assert tools["dynamic"]["version"] == {"attr": "paddock.common.__version__"}
    assert not {"dependencies", "version", "optional-dependencies"} & project["project"].keys()


def test_the_citation_and_the_changelog_have_the_version_of_the_code():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## (\S+) - ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited[1] == newest[1] == __version__


def build(kind: str, tree: Path, output: Path) -> Path:
    """Build the "wheel" or the "sdist" of a tree."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    output.mkdir()
    subprocess.run([sys.executable, "-c", code, output], cwd=tree, check=True, capture_output=True)
    built, = output.iterdir()
    assert built.name.startswith(f"paddock-{__version__}")
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@pytest.mark.slow
def test_an_installed_paddock_trains_in_an_empty_folder(tmp_path):
    """The sdist has the clone's files, and its wheel is the clone's."""
    tree, env = tmp_path / "tree", {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    for name in cloned_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    sdist = build("sdist", tree, tmp_path / "sdist")
    with tarfile.open(sdist) as packed:
        names = {member.name.partition("/")[2] for member in packed if member.isfile()}
        packed.extractall(tmp_path / "unpacked", filter="data")
    assert {name for name in names if not name.startswith("paddock.egg-info/")} - {"PKG-INFO", "setup.cfg"} == cloned_files()
    wheel = build("wheel", tree, tmp_path / "wheel")
    packed = contents(wheel)
    assert contents(build("wheel", *(tmp_path / "unpacked").iterdir(), tmp_path / "wheel of the sdist")) == packed
    assert {name for name in packed if ".dist-info/" not in name} == {f"paddock/{name}" for name in packed_files()}

    venv.create(tmp_path / "venv", with_pip=False)
    site, = (tmp_path / "venv").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "pip", "--python", tmp_path / "venv", "install", "-q", "--no-deps", "--no-index", wheel],
                   check=True, env=env)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"paddock"}
    (site / "packages.pth").write_text(next(path for path in sys.path if Path(path, "torch").is_dir()))
    (empty := tmp_path / "an empty folder").mkdir()

    def paddock(*words: str) -> str:
        done = subprocess.run([tmp_path / "venv" / "bin" / "paddock", *words], cwd=empty, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert paddock("--help").startswith("usage: paddock COMMAND") and paddock("--version") == f"Paddock {__version__}\n"
    assert "usage: paddock generate" in paddock("generate", "--help")
    paddock("check", "--preset", "llama3-8b", "--device-memory", "80", "--world-size", "8")
    paddock("demo", "--max-steps", "2", "--run-name", "first")
    assert (empty / "runs/first/metrics.jsonl").is_file() and (empty / "data/sample/pretrain").is_dir()
