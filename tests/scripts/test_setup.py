"""scripts/setup.sh with another torch: what it installs, and that nothing replaces that torch."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT

# A fake python that records its arguments; its torch is the version that was installed last.
PYTHON = """#!/usr/bin/env bash
echo "$@" >> "$HOME/asked"
case "$*" in
    *"import torch"*) [ -e "$HOME/torch" ] ;;
    *"import pip"*) [ -z "${NO_PIP:-}" ] ;;
    *"import version"*) cat "$HOME/torch" ;;
    *sys.prefix*) echo "$HOME" ;;
    *"install "*"torch==9.9+cpu"*) exit 1 ;;
    *"install "*torch==9.9.[0-9]+cpu*) [ -n "${CPU_BUILDS:-}" ] && echo 9.9.0+cpu > "$HOME/torch" ;;
    *"install "*"torch==9.9"*) echo 9.9.1 > "$HOME/torch" ;;
    *"install "*-r*) cp "${@: -1}" "$HOME/wanted" ;;
esac
"""


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/test.sh", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for version in ("9.9", "9.9.0"):
        folder = tmp_path / f".venv-torch-{version}" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        (folder / "activate").write_text(f'VIRTUAL_ENV="{folder.parent}"\nPATH="{folder}:$PATH"\n')
    return tmp_path


def run(project: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(["bash", project / "scripts" / "test.sh", *arguments], text=True, capture_output=True,
                          env={**clean, "HOME": str(project), **env})


@pytest.mark.parametrize(("version", "env", "installed"), [
    ("9.9.0", {"CPU_BUILDS": "yes"}, "9.9.0+cpu"), ("9.9.0", {}, "9.9.1"), ("9.9", {"CPU_BUILDS": "yes"}, "9.9.1")])
def test_the_tests_run_with_the_torch_that_is_named_and_nothing_replaces_it(version, env, installed, project):
    for _ in range(2):
        result = run(project, "--torch", version, "tests/test_model.py", "-x", **env)
        assert result.returncode == 0, result.stderr
    asked = (project / "asked").read_text().splitlines()
    assert asked[-1] == "-m pytest -n 3 --dist loadfile tests/test_model.py -x"
    wanted = (project / "wanted").read_text().split()
    assert f"torch=={installed}" in wanted and any(line.startswith("hypothesis") for line in wanted)
    assert sum(line.startswith("torch==") for line in wanted) == 1
    assert sum("-m pip install" in line and " -r " in line for line in asked) == 1, "requirements are installed once"
    assert sum("-m pip install" in line and "torch==" in line for line in asked) == 1 + (version == "9.9.0" and not env)


@pytest.mark.parametrize("arguments", [["--torch"], ["--torch", "newest"], ["--torch", "tests/test_model.py"]])
def test_anything_but_a_version_is_refused(arguments, project):
    result = run(project, *arguments)
    assert result.returncode == 2 and "expected a version such as" in result.stderr and not (project / "asked").exists()


def with_uv(project: Path, script: str) -> str:
    """The PATH with a fake uv."""
    uv = project / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f"#!/usr/bin/env bash\n{script}\n")
    uv.chmod(0o755)
    return f"{uv.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("env", [{"PADDOCK_UV": "1"}, {"NO_PIP": "yes"}])
def test_uv_installs_the_same_where_it_is_asked_for_or_made_the_environment(env, project):
    path = with_uv(project, 'echo "$@" >> "$HOME/asked-of-uv"; exec python -m "$@"')
    result = run(project, "--torch", "9.9.0", PATH=path, CPU_BUILDS="yes", **env)
    assert result.returncode == 0, result.stderr
    python = project / ".venv-torch-9.9.0" / "bin" / "python"
    for line, end in zip((project / "asked-of-uv").read_text().splitlines(), ("torch==9.9.0+cpu", ".txt"), strict=True):
        assert line.startswith(f"pip install --quiet --python {python} ") and line.endswith(end)
    assert "torch==9.9.0+cpu" in (project / "wanted").read_text().split()


def test_an_environment_that_uv_cannot_make_is_told(project):
    result = run(project, "--torch", "9.8", PATH=with_uv(project, 'echo "$@"; exit 1'), PADDOCK_UV="1")
    assert result.returncode == 1 and "install uv, or unset PADDOCK_UV" in result.stderr
    assert "venv --quiet --python >=3.10 .venv-torch-9.8" in result.stdout
