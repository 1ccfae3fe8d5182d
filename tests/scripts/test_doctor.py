"""scripts/doctor.py: a line for each part of the machine, and for what is wrong, how to mend it."""

from pathlib import Path

import pytest

from scripts import doctor as script
from scripts import environment

GPU = {"torch": ["2.13.0"], "cuda": ["13.0"], "gpu": ["H100 (80 GiB)"], "nccl": ["2.29.3"]}
ON_CPU = {"torch": ["2.13.0+cpu"], "cuda": [""]}


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.setattr(script, "has_driver", lambda: False)
    return script


def of(findings) -> dict[str, tuple[str, str]]:
    return {finding.subject: (finding.state, finding.text) for finding in findings}


@pytest.mark.parametrize(("found", "failure", "driver", "subject", "state", "output"), [
    (GPU, "", True, "GPU", "ok", "1: H100 (80 GiB)"), (ON_CPU, "", False, "GPU", "-", "training runs on the CPU"),
    (ON_CPU, "", True, "GPU", "FAIL", "pip uninstall torch, then bash scripts/setup.sh"),
    ({**GPU, "gpu": [], "nccl": []}, "", True, "GPU", "FAIL", "CUDA 13.0"),
    ({**GPU, "gpu": ["A", "A"], "nccl": []}, "", True, "NCCL", "FAIL", "CUDA build"),
    ({**GPU, "gpu": ["V100 (32 GiB)"], "capability": ["7 0"], "architectures": ["sm_75 sm_90"]}, "", True, "GPU", "FAIL",
     "V100 (32 GiB): this torch has no kernels for its compute capability 7.0, only for sm_75 sm_90"),
    ({}, "OSError: libcudart.so", True, "torch", "FAIL", "libcudart.so); run: bash scripts/setup.sh"),
])
def test_torch_and_gpus(found, failure, driver, subject, state, output, doctor, monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda: (found, failure))
    monkeypatch.setattr(doctor, "has_driver", lambda: driver)
    findings = of(doctor.check_torch())
    assert findings[subject][0] == state and output in findings[subject][1]


# Packages whose installation was interrupted


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """The packages of an environment: torch, which needs sympy, and a stranger; requirements.txt names torch."""
    folder = tmp_path / "lib" / "python3" / "site-packages"
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(folder))
    for name, needs, listed in (("torch", "Requires-Dist: SymPy>=1\nRequires-Dist: stranger; extra == 'x'\n", ["../../../bin/torchrun", "torch/lib/libtorch.so"]),
                                ("sympy", "", []), ("stranger", "", [])):
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n{needs}\nDescription\n")
        (info / "INSTALLER").write_text("pip\n")
        files = [f"{name}/__init__.py", f"{name}/nn.py", f"{name}/tests/test_nn.py", f"{name}/nn.h", *listed]
        (info / "RECORD").write_text("".join(f"{file},sha256=x,2\n" for file in files) + f"{name}/__pycache__/nn.pyc,,\n{info.name}/RECORD,,\n")
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("\n\n")
    (tmp_path / "requirements.txt").write_text("torch==1.0\n")
    return folder


def found(site: Path, whole: bool) -> dict[str, str]:
    return {each.name: each.why for each in environment.damaged([site.parents[2] / "requirements.txt"], whole)}


@pytest.mark.parametrize(("lost", "name", "output", "at_once"), [
    ("torch-1.0.dist-info/INSTALLER", "torch", "torch-1.0.dist-info/INSTALLER is missing", True),
    ("sympy-1.0.dist-info/RECORD", "sympy", "sympy-1.0.dist-info/RECORD is missing", True),
    ("../../../bin/torchrun", "torch", "bin/torchrun is missing", True), ("torch/lib/libtorch.so", "torch", "torch/lib/libtorch.so is missing", True),
    ("torch/__init__.py", "torch", "torch/__init__.py is missing", True), ("sympy/nn.py", "sympy", "sympy/nn.py is missing", False)])
def test_an_interrupted_installation_is_found(lost, name, output, at_once, site):
    assert found(site, False) == found(site, True) == {}
    (site / lost).unlink()
    assert found(site, True) == {name: output} and found(site, False) == ({name: output} if at_once else {})
