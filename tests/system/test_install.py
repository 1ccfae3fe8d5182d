"""pyproject.toml packs the whole tree as one package, and an installed paddock trains in an empty folder."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

from common import __version__

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")
NOT_PACKED = ("tests/", "docs/", "scripts/gpu/null/", ".")  # folders, and hidden files
OF_A_CLONE = {"paddock", "pyproject.toml", "mkdocs.yml", "Dockerfile", "CITATION.cff", "LICENSE"}  # and *.md, *.sh, *.bash, clusters' *.yaml


def packed_files() -> set[str]:
    """The files of the tree that an installed Paddock needs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\n")
    return {name for name in listed if name and not name.startswith(NOT_PACKED) and name not in OF_A_CLONE
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


@pytest.mark.slow
def test_an_installed_paddock_trains_in_an_empty_folder(tmp_path):
    tree, env = tmp_path / "tree", {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    for name in (*packed_files(), "pyproject.toml", "README.md", "LICENSE"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=tree, check=True, capture_output=True)
    wheel, = tmp_path.glob("paddock-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert names == {f"paddock/{name}" for name in packed_files()} and __version__ in wheel.name

    venv.create(tmp_path / "venv", with_pip=False)
    site, = (tmp_path / "venv").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "pip", "--python", tmp_path / "venv", "install", "-q", "--no-deps", "--no-index", wheel],
                   check=True, env=env)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"paddock"}
    (site / "packages.pth").write_text(next(path for path in sys.path if Path(path, "torch").is_dir()))
    (empty := tmp_path / "empty").mkdir()

    def paddock(*words: str) -> str:
        done = subprocess.run([tmp_path / "venv" / "bin" / "paddock", *words], cwd=empty, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert paddock("--help").startswith("usage: paddock COMMAND") and paddock("--version") == f"Paddock {__version__}\n"
    paddock("train", "--preset", "sample,debug", "--max-steps", "2", "--run-name", "first")
    assert (empty / "runs/first/metrics.jsonl").is_file() and (empty / "data/sample/pretrain").is_dir()
    assert "usage: paddock generate" in paddock("generate", "--help")
