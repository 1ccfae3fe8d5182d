"""What a process owes to the launcher that started it: to leave with it, and to tell how it ended. Needs no torch."""

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
SECOND_SIGNAL_SECONDS = 1.0  # one that comes within is the same: torchrun hands on what the terminal has sent already
EXIT_PREEMPTED = 143
LAUNCHER_PID = "PADDOCK_LAUNCHER_PID"  # in the environment of the processes that scripts/launch.py starts
JOB_TOKEN = "PADDOCK_JOB_TOKEN"  # there too, where they are on one machine: the secret by which they know each other's words
JOINED = "joined"  # a file beside a rank's error file, from when it has something to save
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's launchers want to be told how a process ended
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def stop_signals() -> list[signal.Signals]:
    """The signals that mean "save and leave"; without SIGHUP where nohup has made this process deaf to it."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def provide_streams() -> None:
    """Have all standard streams, where whoever started this process has closed some: else a file that is opened later gets their
    place, and what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w", closefd=False), sys.stderr or open(2, "w", closefd=False)


def leave_at_signals() -> None:
    """As long as there is nothing to save, a stop signal ends this process at once, with the code of a pre-emption."""
    for number in stop_signals():
        signal.signal(number, lambda *_: os._exit(EXIT_PREEMPTED))


def end_with_launcher() -> None:
    """Have the system send this process a TERM, at which it saves and leaves, when the one that launched it dies (Linux)."""
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before it was said
            os.kill(os.getpid(), signal.SIGTERM)


def tell_joined() -> None:
    """Let the launcher know that this process now has something to save."""
    if os.environ.get(ERROR_FILE):
        with suppress(OSError):  # a disk that is full is told when something is saved
            Path(os.environ[ERROR_FILE]).with_name(JOINED).touch()


def write_error_file(code: int, sentence: str = "", trace: str = "", victim: bool = False) -> bool:
    """Leave word of how this process ends, in the form of torch's launchers; whether scripts/launch.py will say it.

    Args:
        sentence: what went wrong.
        trace: what the sentence does not tell: a traceback, a table.
        victim: another rank is the cause.
    """
    if not os.environ.get(ERROR_FILE):
        return False
    path, now = Path(os.environ[ERROR_FILE]), time.time()
    message = {"message": sentence, "errorCode": code, "victim": victim, "at": now,
               "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))}}
    unfinished = path.with_suffix(".tmp")
    with suppress(OSError):  # on a full disk the exit code still tells
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
        unfinished.replace(path)
    return LAUNCHER_PID in os.environ and path.exists()


@contextmanager
def first_here() -> Iterator[bool]:
    """A `with` block for what every rank of this machine would say, and one is to: True in the first that comes to it.

    The others enter when that one has left, so none has ended before all is said: torchrun ends all at the first end. They meet
    in the folder that a launcher of torch makes for each attempt; without one it is LOCAL_RANK 0 that speaks.
    """
    first, file = os.environ.get("LOCAL_RANK", "0") == "0", None
    with ExitStack() as stack:
        if os.environ.get(ERROR_FILE):
            first = True  # also where there can be no file: rather twice than never
            with suppress(OSError):
                file = stack.enter_context(open(Path(os.environ[ERROR_FILE]).parent.with_name("told"), "ab", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX)
                first = os.fstat(file.fileno()).st_size == 0
        yield first
        if first and file:
            with suppress(OSError):
                file.write(b"told")
