"""The contract between a process and the launcher that started it: exit with it, and report why.

Needs no torch.
"""

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SECOND_SIGNAL_SECONDS = 1.0  # an earlier one is the same: torchrun forwards what the terminal sent already
EXIT_PREEMPTED = 143
# Environment variables of the processes that scripts/launch.py starts.
LAUNCHER_PID = "PADDOCK_LAUNCHER_PID"
JOB_TOKEN = "PADDOCK_JOB_TOKEN"  # the secret that signs the ranks' statuses; empty across machines
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's launchers expect a process to report its error
JOINED = "joined"  # a file beside a rank's error file: the rank has something to save
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def stop_signals() -> list[signal.Signals]:
    """Return the signals that mean "save and exit"; without SIGHUP if nohup has made this process ignore
    it."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def open_missing_streams() -> None:
    """Open /dev/null for each closed standard stream, whose descriptor a later file would get otherwise."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def exit_at_signals() -> None:
    """Make a stop signal exit at once with EXIT_PREEMPTED, while there is nothing to save."""
    for number in stop_signals():
        signal.signal(number, lambda *_: os._exit(EXIT_PREEMPTED))


def exit_with_launcher() -> None:
    """Ask Linux to send this process a TERM, at which it saves and exits, when its launcher dies."""
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)


def mark_joined() -> None:
    """Tell the launcher that this process has something to save from now on."""
    if os.environ.get(ERROR_FILE):
        with suppress(OSError):  # a full disk is reported when something is saved
            Path(os.environ[ERROR_FILE]).with_name(JOINED).touch()


def write_error_file(code: int, sentence: str = "", trace: str = "", is_secondary: bool = False) -> bool:
    """Report why this process ends, in the format of torch's launchers.

    Args:
        sentence: what went wrong.
        trace: details beside the sentence: a traceback or a table.
        is_secondary: the cause is on another rank.
    Returns:
        Whether scripts/launch.py will print the sentence.
    """
    if not os.environ.get(ERROR_FILE):
        return False
    path, now = Path(os.environ[ERROR_FILE]), time.time()
    message = {"message": sentence, "errorCode": code, "is_secondary": is_secondary, "at": now,
               "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))}}
    temporary = path.with_suffix(".tmp")
    with suppress(OSError):  # on a full disk the exit code still says something
        path.parent.mkdir(parents=True, exist_ok=True)  # a user may have deleted it
        temporary.write_text(json.dumps({"message": message}), encoding="utf-8")
        temporary.replace(path)
    return LAUNCHER_PID in os.environ and path.exists()


@contextmanager
def first_on_machine() -> Iterator[bool]:
    """A `with` block for what every rank of this machine would print; yields True in the first to enter.

    The others wait until that one has left, so that none exits before all is printed: torchrun ends all ranks
    at the first exit. They share a lock file in the folder that torch's launchers make for each attempt;
    without such a launcher LOCAL_RANK 0 is the first.
    """
    first, file = os.environ.get("LOCAL_RANK", "0") == "0", None
    with ExitStack() as stack:
        if os.environ.get(ERROR_FILE):
            first = True  # also if the file cannot be opened: rather twice than never
            with suppress(OSError):
                path = Path(os.environ[ERROR_FILE]).parent.with_name("told")
                file = stack.enter_context(open(path, "ab", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX)
                first = os.fstat(file.fileno()).st_size == 0
        yield first
        if first and file:
            with suppress(OSError):
                file.write(b"told")
