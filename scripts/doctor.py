"""Check this machine: Python, packages, torch, GPU, NCCL, compiler, memory, disk and .env.

    ./paddock doctor

Each line starts with ok, with - for a limitation, or with FAIL for a problem that you must fix. The command
works without any installed package. The exit code is 1 if a check fails, else 0.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import __version__  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.files import free_bytes, why_not_writable  # noqa: E402
from common.text import PROGRAM, counted, last_line, pip_install, show  # noqa: E402
from parallel.process import cores, why_no_kernels  # noqa: E402
from scripts.environment import damaged, not_importable  # noqa: E402

OK, LIMITS, FAIL = "ok", "-", "FAIL"
IS_CLONE = (ROOT / "scripts/setup.sh").exists()
SET_UP = "run: bash scripts/setup.sh" if IS_CLONE else "install Paddock again"
LEAST_FREE, ENOUGH_FREE = 2 * 2**30, 20 * 2**30  # bytes of the disk
LEAST_SHARED = 2**30  # bytes of /dev/shm, which NCCL uses between the GPUs of a machine
SECONDS = 120  # time limit for PROBE: importing torch from a cold disk is slow
# Runs in a separate process, because importing torch may crash.
PROBE = """
import torch
print("torch", torch.__version__)
print("cuda", torch.version.cuda or torch.version.hip or "")
for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    print("gpu", f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)")
    print("capability", gpu.major, gpu.minor)
print("architectures", *torch.cuda.get_arch_list())
if torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available():
    print("nccl", ".".join(map(str, torch.cuda.nccl.version())))
"""


class Finding(NamedTuple):
    state: str
    subject: str
    text: str


def fits(installed: str, wanted: str) -> bool:
    """Return True if a version satisfies a requirement such as ~=1.2 or >=1.7,<2."""
    try:
        from packaging.specifiers import SpecifierSet  # comes with the required packages
    except ImportError:
        return True
    return SpecifierSet(wanted).contains(installed, prereleases=True)


def requirements(name: str) -> Iterator[tuple[str, str]]:
    """Yield each package in a requirements file and the versions it may have."""
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([A-Za-z][\w.-]*)([^#;]*)", line):
            yield match[1], match[2].strip()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def has_driver() -> bool:
    return bool(shutil.which("nvidia-smi")) or os.path.exists("/proc/driver/nvidia")


def check_python() -> Finding:
    text = f"{platform.python_version()}, {sys.executable}"
    if sys.prefix == sys.base_prefix and not os.environ.get("CONDA_PREFIX"):
        advice = f"; to create .venv, {SET_UP}" * IS_CLONE
        return Finding(LIMITS, "Python", f"{text} is not in an environment{advice}")
    return Finding(OK, "Python", text)


def check_packages() -> Iterator[Finding]:
    """Check the required packages (missing, or of another version) and the optional ones."""
    needed = {name: (wanted, installed(name)) for name, wanted in requirements("requirements.txt")}
    missing = [name for name, (_, present) in needed.items() if not present]
    untested = [f"{name} {present} ({wanted})" for name, (wanted, present) in needed.items()
                if present and not fits(present, wanted)]
    if missing:
        yield Finding(FAIL, "packages", f"not installed: {', '.join(missing)}; {SET_UP}")
    if untested:
        yield Finding(LIMITS, "packages", f"untested versions: {', '.join(untested)}; {SET_UP}")
    broken = [f"{each.name} ({each.why})" for each in damaged([ROOT / "requirements.txt"], whole=True)]
    if broken:
        yield Finding(FAIL, "packages", "damaged, or their installation was interrupted: "
                      f"{', '.join(broken)}; {SET_UP}")
    if not missing + untested + broken:
        yield Finding(OK, "packages", f"all {len(needed)} packages in requirements.txt are installed")
    extras = "requirements-extras.txt" if IS_CLONE else str(ROOT / "requirements-extras.txt")
    absent = [name for name, _ in requirements("requirements-extras.txt") if not installed(name)]
    if absent and not missing:
        yield Finding(LIMITS, "extras", f"not installed: {', '.join(absent)}; for serving, plots, "
                      f"TensorBoard and text metrics, run: {pip_install('-r', extras)}")


def check_imports() -> Iterator[Finding]:
    for name, why in not_importable([ROOT / "requirements.txt"]).items():
        if name != "torch":  # which check_torch imports
            yield Finding(FAIL, name, f"cannot be imported ({why}); {SET_UP}")


def probe() -> tuple[dict[str, list[str]], str]:
    """Return the output of PROBE by name, and why it failed ("" if it did not)."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {}, f"importing it took more than {SECONDS} s"
    properties: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        properties.setdefault(name, []).append(value)
    return properties, last_line(done.stderr) if done.returncode else ""


def check_torch() -> Iterator[Finding]:
    properties, failure = probe()
    if failure:
        yield Finding(FAIL, "torch", f"cannot be imported ({failure}); {SET_UP}")
        return
    torch, cuda, gpus = properties["torch"][0], properties["cuda"][0], properties.get("gpu", [])
    yield Finding(OK, "torch", f"{torch}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}")
    if gpus:
        yield Finding(OK, "GPU", f"{len(gpus)}: {', '.join(dict.fromkeys(gpus))}")
        architectures = properties.get("architectures", [""])[0].split()
        for gpu, capability in dict(zip(gpus, properties.get("capability", []))).items():
            major, minor = map(int, capability.split())
            if reason := why_no_kernels((major, minor), architectures):
                yield Finding(FAIL, "GPU", f"{gpu}: {reason}")
    elif not has_driver():
        yield Finding(LIMITS, "GPU", "no NVIDIA driver found; training runs on the CPU")
    elif not cuda:
        yield Finding(FAIL, "GPU", "an NVIDIA driver is installed, but torch is built for the CPU; run: pip "
                      f"uninstall torch, then {SET_UP.removeprefix('run: ')}")
    else:
        yield Finding(FAIL, "GPU", "torch does not see the GPU; check that nvidia-smi lists it, that the "
                      f"driver supports CUDA {cuda}, and that CUDA_VISIBLE_DEVICES does not hide it")
    if nccl := properties.get("nccl"):
        yield Finding(OK, "NCCL", nccl[0])
    elif len(gpus) > 1:
        yield Finding(FAIL, "NCCL", "missing; to train on several GPUs, install torch's CUDA build for Linux")
    else:
        yield Finding(LIMITS, "NCCL", "not needed, because there are not several GPUs")
    shared = Path("/dev/shm")
    if len(gpus) > 1 and shared.is_dir() and (free := free_bytes(shared)) < LEAST_SHARED:
        yield Finding(FAIL, "/dev/shm", f"{free / 2**20:.0f} MiB free, which is not enough for NCCL; start "
                      "the container with --ipc host")


def check_compiler() -> Finding:
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    if path := next(filter(None, (shutil.which(name) for name in names if name)), None):
        return Finding(OK, "compiler", path)
    return Finding(LIMITS, "compiler", "no C++ compiler for torch.compile; install g++, or set COMPILE=false")


def check_machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding(OK, "machine", f"{platform.system()} {platform.machine()}, {counted(cores(), 'core')}, "
                   f"{memory:.0f} GiB memory")


def check_disk() -> Finding:
    folder = Path.cwd()
    if error := why_not_writable(folder):
        return Finding(FAIL, "disk", f"{folder} is not writable ({error.strerror}); set OUTPUT_DIR")
    free = free_bytes(folder)
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < LEAST_FREE:
        return Finding(FAIL, "disk", f"{text}; free up space ({PROGRAM} runs --clean), or set OUTPUT_DIR")
    if free < ENOUGH_FREE:
        return Finding(LIMITS, "disk", f"{text}, enough for small models only ({PROGRAM} runs --clean)")
    return Finding(OK, "disk", text)


def check_settings() -> Iterator[Finding]:
    """Check `.env`, if it exists and the packages that read it are installed."""
    if not os.path.exists(".env"):
        return
    try:
        from common.errors import SettingsError
        from plan.make import make_plan
    except ImportError:
        return
    try:
        make_plan(complete=False)
        yield Finding(OK, ".env", "all settings are valid")
    except SettingsError as error:
        first, *others = str(error).splitlines()
        more = f" (and {len(others)} more)" if others else ""
        yield Finding(FAIL, ".env", f"{first}{more}; correct it, then run {PROGRAM} check")


CHECKS: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
    check_python, check_packages, check_imports, check_torch, check_compiler, check_machine, check_disk,
    check_settings)


def main() -> None:
    CommandParser(__doc__).parse_args()
    show(f"{OK:5} {'Paddock':9} {__version__}, {ROOT}")
    failed = False
    for check in CHECKS:
        findings = check()
        for finding in [findings] if isinstance(findings, Finding) else findings:
            show(f"{finding.state:5} {finding.subject:9} {finding.text}")
            failed |= finding.state == FAIL
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(main)
