"""Ctrl-C and SIGTERM end a command, from its first import on, with one line and exit code 130 or 143."""

import os
import signal
import sys
import time
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 1.0  # earlier repeats do not count: `timeout` and launchers send a signal twice
PARENT = "PADDOCK_PID"  # environment variable: the process that started this command, if it is one, too
FAILED = "failed"  # a file of the launcher, beside the ranks' folders
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
received: list[tuple[int, float]] = []  # signals of this process, with their times
sentence = ""  # what a running command says when it is interrupted
# Of a command and those that it starts, the first one reports; of the ranks that a launcher starts, one.
is_reporting = (os.environ.get("LOCAL_RANK") == "0" if "TORCHELASTIC_ERROR_FILE" in os.environ
                else os.environ.get(PARENT) != str(os.getppid()))


def install() -> None:
    """Handle the signals if this process runs one of Paddock's commands, except those that it ignores."""
    script = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or os.devnull)
    if script.startswith((os.path.join(ROOT, "scripts", ""), os.path.join(ROOT, "train.py"))):
        os.environ[PARENT] = str(os.getpid())
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handle)
        # What interrupts a destructor is lost.
        sys.unraisablehook = lambda lost: leave(exit_code()) if received else sys.__unraisablehook__(lost)
        hold(False)


def hold(held: bool = True) -> None:
    """Make signals wait: a command that is started then gets them in its first import."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, SIGNALS)


def become(*command: str) -> None:
    """Run a Python script in place of this process."""
    hold()
    try:
        os.execv(sys.executable, [sys.executable, *command])
    finally:
        hold(False)


def handle(number: int, frame: Any) -> None:
    """Interrupt a running command; during its imports, and at a second signal, exit immediately."""
    received.append((number, time.monotonic()))
    caller = frame
    while caller and not caller.f_code.co_filename.startswith("<frozen importlib"):
        caller = caller.f_back
    # Packages may swallow what is raised in an import.
    if caller or not sentence or received[-1][1] - received[0][1] > REPEAT_SECONDS:
        leave(exit_code())
    if len(received) == 1:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(exit_code())


def exit_code() -> int:
    return 128 + received[0][0] if received else 0


def is_stopped_by_failure() -> bool:  # of another rank, which the launcher reports
    return os.path.exists(f"{os.path.dirname(os.environ.get('TORCHELASTIC_ERROR_FILE', ''))}/../{FAILED}")


def say() -> None:
    if is_reporting and not is_stopped_by_failure():
        os.write(2, ("\n" * os.isatty(2) + (sentence or "Stopped.") + "\n").encode())  # below "^C"


def leave(code: int) -> None:
    """Exit immediately, with a line."""
    try:
        say()
    finally:  # also if nobody reads it
        os._exit(code)
