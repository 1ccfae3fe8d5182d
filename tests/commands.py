"""Real commands in processes of their own, also launchers, with a fault planted in one of their ranks."""

import contextlib
import fcntl
import ipaddress
import os
import pty
import re
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from select import select
from typing import Any, Optional

import pytest
from factories import PATIENCE, Job, TinyRun, free_port, warm

ROOT = Path(__file__).resolve().parents[1]
WORLD = 2
BARE = {"PATH": "/usr/bin:/bin"}  # the environment of a shell in which nothing is activated


@cache
def tracked() -> list[Path]:
    """The files of the project, also new ones; skips the test where git cannot tell."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


class Command:
    """A command for a run; its processes are found by the path of the run's folder in their arguments.

    Args:
        plant: "module:function" of a test module, called before anything else in the rank `planted_in`.
    """

    def __init__(self, run: TinyRun, *arguments: Any, plant: str = "", planted_in: int = 1, env: Optional[dict] = None):
        self.run, self.output = run, run.output_dir / f"command-{time.monotonic_ns()}.txt"
        run.output_dir.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **(env or {})}
        if plant:
            module, _, function = plant.partition(":")
            (run.output_dir / "sitecustomize.py").write_text(
                f"import os\nif os.environ.get('RANK') == '{planted_in}':\n    import {module}\n    {module}.{function}()\n")
            env["PYTHONPATH"] = f"{run.output_dir}{os.pathsep}{env['PYTHONPATH']}"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, env=env, stdout=output,
                                            stderr=subprocess.STDOUT, start_new_session=True)
        self.pid = self.process.pid

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def last_line(self) -> str:
        return self.text().strip().splitlines()[-1]

    def alive(self) -> list[int]:
        """The ids of its processes, without zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.run.output_dir).encode() in (folder / "cmdline").read_bytes():
                    if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(folder.name))
        return found

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until all its processes are gone; returns the exit code. What hangs is killed, and fails the test."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None or self.alive():
            if time.monotonic() > deadline:
                left = self.alive()
                self.kill()
                raise AssertionError(f"of {self.process.args}, {left} are still there:\n{self.text()}")
            time.sleep(0.05)
        return self.process.returncode

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it did not get so far:\n{self.text()}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        log = self.run.folder / "log" / "rank-0.txt"
        self.wait_for(lambda: log.exists() and f"Step [{step}/" in log.read_text())

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def python(script: Path | str, *arguments: Any, cwd: Path | str = "", env: Optional[dict] = None, stdin: str = "",
           terminal: bool = False, prepare: Callable[[], Any] = int, code: Optional[int] = None) -> subprocess.CompletedProcess:
    """Run `python script arguments` to its end in a process that is forked from one that has imported torch, which takes seconds.

    Args:
        terminal: give it a terminal, on which `stdin` is typed; `stdout` is what that shows.
        prepare: module-level function that the process calls first.
        code: assert that it ends with this exit code and without a traceback.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(os.ttyname(theirs))] * 3 if terminal else [Path(folder, name) for name in ("in", "out", "err")]
        streams[0].write_text(stdin) if not terminal else os.write(ours, stdin.encode())
        argv, shown = [str(ROOT / script), *map(str, arguments)], b""
        process = warm().Process(target=call_script, args=(argv, cwd or Path.cwd(), {**(os.environ if env is None else env)}, streams, prepare))
        process.start()
        while terminal and (process.is_alive() or select([ours], [], [], 0)[0]):
            shown += os.read(ours, 1 << 16) if select([ours], [], [], 0.05)[0] else b""
        Job([process], streams[1:]).wait()
        said = (shown.decode(), "") if terminal else [stream.read_text(errors="replace") for stream in streams[1:]]
    os.close(ours)
    os.close(theirs)
    assert code is None or process.exitcode == code and "Traceback" not in "".join(said), said
    return subprocess.CompletedProcess(argv, process.exitcode, *said)


def call_script(argv: list[str], cwd: Path, env: dict[str, str], streams: list[Path], prepare: Callable[[], Any]) -> None:
    for stream, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOCTTY), stream)
    sys.stdin, sys.stdout, sys.stderr = (open(stream, "w" if stream else "r", closefd=False) for stream in range(3))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.path = argv, [str(Path(argv[0]).parent), *sys.path]
    prepare()
    runpy.run_path(argv[0], run_name="__main__")


def listening(pid: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """The addresses and ports at which a process listens (Linux)."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    own = {found[1] for found in map(re.compile(r"socket:\[(\d+)\]").fullmatch, links) if found}
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, = fields = line.split()
            if state == "0A" and fields[9] in own:
                words, _, port = local.partition(":")  # 32-bit words in the byte order of this machine
                address = b"".join(int(words[at:at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
                places.append((ipaddress.ip_address(address), int(port, 16)))
    return places


def torchrun(run: TinyRun, *flags: str, **changes) -> Command:
    """torchrun train.py, on two ranks."""
    return Command(run, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={WORLD}", "--master-addr=127.0.0.1",
                   f"--master-port={free_port()}", *flags, ROOT / "train.py", *run.argv(**changes))


def launch(run: TinyRun, *flags: str, plant: str = "", planted_in: int = 1, env: Optional[dict] = None, **changes) -> Command:
    """scripts/launch.py, on two ranks."""
    return Command(run, "scripts/launch.py", f"--nproc-per-node={WORLD}", *flags, *run.argv(**changes), plant=plant,
                   planted_in=planted_in, env=env)


def during(module, name: str, action: Callable[[], Any], turn: int) -> pytest.MonkeyPatch:
    """Call `action` before the n-th call of `module.name`; returns the patch, which can be undone."""
    patch, original, calls = pytest.MonkeyPatch(), getattr(module, name), iter(range(1, 10**6))

    def replacement(*arguments, **keywords):
        if next(calls) == turn:
            action()
        return original(*arguments, **keywords)

    patch.setattr(module, name, replacement)
    return patch
