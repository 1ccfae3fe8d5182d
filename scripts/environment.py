"""Find packages whose installation was interrupted or damaged. Needs no packages.

    python scripts/environment.py --whole requirements.txt
    python scripts/environment.py --repair requirements.txt

Packages that the requirements files name, and those that they need, are compared with the list of their files
that the installer wrote (RECORD). Each start of ./paddock checks only a few files of each package; all are
checked with --whole, and after an import has failed. --repair removes the metadata of damaged packages, so
that the installer installs them again. It takes the lock in descriptor 9, if that is open, and leaves it to
the calling script.
"""

import csv
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, run_script  # noqa: E402
from common.text import print_safely  # noqa: E402

LOCK = 9  # the file descriptor that scripts/setup.sh opens
STAMPS = ".paddock-*"  # of requirements that scripts/setup.sh has installed
SEPARATORS = re.compile("[-_.]+")
CHECKED = re.compile(r"\.(py|so(\.\d+)*|dylib)$|^\.\./\.\./\.\./bin/")  # slim images lack headers and tests:
REQUIRES = re.compile(r"^Requires-Dist: ([\w.-]+)(.*)", re.MULTILINE)
VERBATIM = ("pip", "uv")  # these installers do not change files
MODULE = re.compile(r"([A-Za-z]\w*)(/__init__\.py|\.py)$")
IMPORT_SECONDS = 120  # from a cold disk
# Prints a line for each module that cannot be imported.
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(name, f"{type(error).__name__}: {error}".splitlines()[0], sep="\\t", flush=True)
"""
OPTIONAL = re.compile(r"(^|/)(tests?|testing)/")


class Damaged(NamedTuple):
    name: str
    metadata: Path  # the package's .dist-info folder
    why: str


def plain_name(name: str) -> str:
    return SEPARATORS.sub("-", name).lower()


def required(path: Path) -> list[str]:
    """Return the names of the packages in a requirements file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [match[0] for match in (re.match(r"[A-Za-z][\w.-]*", line) for line in lines) if match]


def installed() -> dict[str, list[Path]]:
    """Return the .dist-info folders of this environment by package, without those it inherits."""
    found: dict[str, list[Path]] = {}
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for info in Path(place).glob("*.dist-info"):
            found.setdefault(plain_name(info.stem.partition("-")[0]), []).append(info)
    return found


def needed(names: Sequence[str], infos: dict[str, list[Path]]) -> set[str]:
    """Return these packages and what they need, as far as it is installed."""
    found, left = set(), [*map(plain_name, names)]
    while left:
        name = left.pop()
        if name in found or name not in infos:
            continue
        found.add(name)
        for info in infos[name]:
            try:
                text = (info / "METADATA").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            left += [plain_name(match[1]) for match in REQUIRES.finditer(text) if "extra ==" not in match[2]]
    return found


def fault(info: Path, whole: bool) -> str:
    """Return what is wrong with an installed package, or ""."""
    for name in ("METADATA", "RECORD", "INSTALLER"):  # an installer writes the last two at its end
        if not (info / name).is_file():
            return f"{info.name}/{name} is missing"
    lines = (info / "RECORD").read_text(encoding="utf-8").splitlines()
    if not whole:  # parsing all of them would take a tenth of a second
        lines = [line for line in lines if line.startswith("../") or "/__init__.py," in line or ".so" in line]
    place = os.path.join(info.parent, "")
    verbatim = whole and (info / "INSTALLER").read_text(encoding="utf-8").strip() in VERBATIM
    for name, _, size in (row for row in csv.reader(lines) if len(row) == 3):
        if not CHECKED.search(name) or OPTIONAL.search(name):
            continue
        try:
            on_disk = os.stat(place + name).st_size
        except OSError:
            return f"{name.removeprefix('../../../')} is missing"
        # Libraries may be stripped, conda writes paths into files, and users patch them for a while.
        is_same = on_disk == int(size or on_disk) or not verbatim or not name.endswith(".py")
        if not is_same or size and int(size) and not on_disk:
            return f"{name} has {on_disk:,} bytes instead of {int(size):,}"
    return ""


def damaged(files: Sequence[Path], whole: bool) -> Iterator[Damaged]:
    """Yield the damaged packages among those that the requirements files need, and pip."""
    infos = installed()
    faults = {info: why for each in infos.values() for info in each if (why := fault(info, whole))}
    if not faults:
        return
    for name in sorted(needed(["pip", *(name for file in files for name in required(file))], infos)):
        for info in infos[name]:
            if info in faults:
                yield Damaged(name, info, faults[info])


def not_importable(files: Sequence[Path]) -> dict[str, str]:
    """Return why modules of the packages in requirements files cannot be imported, in a separate process."""
    infos, names = installed(), []
    for name in (plain_name(name) for file in files for name in required(file)):
        for info in infos.get(name, ()):
            with suppress(OSError):
                lines = (info / "RECORD").read_text(encoding="utf-8").splitlines()
                matches = [MODULE.match(line.partition(",")[0]) for line in lines]
                names += [match[1] for match in matches if match]
    try:
        done = subprocess.run([sys.executable, "-c", IMPORT, *names], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"packages": f"importing them took more than {IMPORT_SECONDS} s"}
    failures = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    if done.returncode and not failures:
        return {"packages": f"importing them ended with exit code {done.returncode}"}
    return failures


def take_lock() -> None:
    """Wait until no other set-up of this environment is at work: to this one, its packages look damaged."""
    with suppress(OSError):  # the file could not be opened, or its file system has no locks
        for _ in range(20):  # another command that only looks is done within a second
            with suppress(BlockingIOError):
                return fcntl.flock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.1)
        print_safely(f"Waiting for another set-up of {sys.prefix} ...", sys.stderr)
        fcntl.flock(LOCK, fcntl.LOCK_EX)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="requirements files")
    parser.add_argument("--whole", action="store_true", help="check every file of the packages")
    parser.add_argument("--repair", action="store_true", help="prepare damaged packages for installation")
    parser.add_argument("--imports", action="store_true", help="also import the packages in the files")
    args = parser.parse_args()
    if args.repair:
        take_lock()
    prefix, stamps = Path(sys.prefix), [*Path(sys.prefix).glob(STAMPS)]
    found = [*damaged(args.files, args.whole or not stamps)]
    if not args.repair:
        faults = {each.name: each.why for each in found}
        faults |= not_importable(args.files) if args.imports else {}
        if faults:
            with suppress(OSError):
                for stamp in stamps:  # the next start checks everything, and repairs
                    stamp.unlink()
            raise PaddockError(f"{prefix} is damaged: " + "; ".join(map(": ".join, faults.items())))
        return
    if found:
        names = ", ".join(f"{each.name} ({each.why})" for each in found)
        print_safely(f"Repairing {prefix}, which was damaged or interrupted: {names}", sys.stderr)
        for each in found:
            shutil.rmtree(each.metadata)
        for stamp in stamps:
            stamp.unlink()
        if any(each.name == "pip" for each in found):
            subprocess.run([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    run_script(main)
