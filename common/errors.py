"""The mistakes that a user can mend, each with the exit code that tells a launcher what happened."""

import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Optional, TextIO

EXIT_UNREAD = 141  # as a shell tells of a process that SIGPIPE has ended


def without_passwords(text: str) -> str:
    """The same without what URLs in it may keep secret: user and password, and what follows a question mark."""
    # With one slash too, as a path has it that was no URL for whoever took it.
    text = re.sub(r"(:/{1,2})[^\s/?#'\"]*@", r"\1***@", text)
    return re.sub(r"(:/{1,2}[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


# What a terminal obeys, or shows as another line or in another order: controls but the tab, ends of lines, marks of direction.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The same as one line that a terminal shows and does not obey: control characters become their escapes, as `\\x1b`."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def is_url(text: str) -> bool:
    """Whether a path is a URL; with one slash too, which a mistyped or normalised one has."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None


class PaddockError(Exception):
    """A sentence for the user, or several: what was got, what was expected, what to change. Passwords in URLs are not shown, and
    control characters as their escapes."""

    exit_code = 1
    shared = False  # every rank raises the same, so one of a machine is to tell it

    def __init__(self, *sentences: str):
        super().__init__("\n".join(printable(without_passwords(sentence)) for sentence in sentences))


class SettingsError(PaddockError):
    """A setting is unknown, malformed, or cannot go with the others."""

    exit_code = 2


class DataError(PaddockError):
    """A data, evaluation or tokenizer file cannot be used."""

    exit_code = 3


class NonFiniteError(PaddockError):
    """A loss or gradient stopped being a number."""

    exit_code = 4
    shared = True


class CheckpointError(PaddockError):
    """A checkpoint cannot be written, found, verified or used."""

    exit_code = 5


class LossSpikeError(PaddockError):
    """A loss lies far above the recent ones, and LOSS_SPIKE_POLICY=stop."""

    exit_code = 4
    shared = True


class DriftError(PaddockError):
    """The ranks' replicas of the model, which must be equal, are not."""

    shared = True


class HangError(PaddockError):
    """A rank did not move for DISTRIBUTED_TIMEOUT seconds."""

    exit_code = 6


@contextmanager
def needing(package: str, what: str) -> Iterator[None]:
    """A `with` block that imports a package which nothing but `what` needs.

    Raises:
        SettingsError: it is not installed; says how to.
    """
    try:
        yield
    except ImportError as error:
        raise SettingsError(f"{what} needs the package {package}: pip install {package} ({error})") from error


def local_path(text: str) -> Path:
    """A path on this machine, as the type of a script's flag. Raises SettingsError for a URL."""
    if is_url(text):
        raise SettingsError(f"{text} is a URL, and it must be a path on this machine; mount what is there, or copy it")
    return Path(text)


def print_safely(text: str, stream: TextIO) -> Optional[OSError]:
    """Write a line, or several, at once; returns why that could not be: the stream is a file on a full disk, or a pipe that
    nobody reads. Control characters are shown as their escapes.

    From then on the stream leads nowhere, so that neither later lines nor the end of the process, which flushes it, fail too.
    """
    try:
        # print writes the two apart, and lines of several ranks would glue
        stream.write("\n".join(map(printable, text.split("\n"))) + "\n")
        stream.flush()
    except OSError as error:
        lead_nowhere(stream)
        return error
    return None


def print_traceback(*failure) -> None:
    """`sys.excepthook` of a program of ours: the traceback, with control characters as their escapes."""
    print_safely("".join(traceback.format_exception(*failure)).rstrip("\n"), sys.stderr)


def show(*lines: str) -> None:
    """Print lines at once, with control characters as their escapes."""
    print("\n".join(map(printable, lines)), flush=True)


def lead_nowhere(stream: TextIO) -> None:
    """Drop what is written to a stream from now on, and what it still holds."""
    with suppress(OSError, ValueError):  # a stream with no file behind it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def write_whole_lines() -> None:
    """From now on a printed line is one write, also of a traceback and under `python -u`, as torchrun starts its ranks."""
    sys.excepthook = print_traceback
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)


def drop_unread_streams() -> bool:
    """Lead the standard streams nowhere that are pipes without a reader; whether there is one."""
    unread = [stream for stream in (sys.stdout, sys.stderr) if is_unread(stream)]
    for stream in unread:
        lead_nowhere(stream)
    return bool(unread)


def is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any more."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    return False


@contextmanager
def ending_with_reader() -> Iterator[None]:
    """A `with` block that prints. Where nobody reads on (`| head`), the process ends without a word, as SIGPIPE ends others; a
    failure's exit code is kept."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where it can still be caught
    except BrokenPipeError as error:
        if not drop_unread_streams():
            raise
        raise SystemExit(getattr(error.__context__, "code", None) or EXIT_UNREAD) from None


def run_script(main: Callable[[], object], when_interrupted: str = "Stopped.") -> None:
    """Run a script's main; a user's mistake, or Ctrl-C, ends the process with one line and an exit code."""
    sys.excepthook = print_traceback
    with ending_with_reader():
        try:
            main()
        except PaddockError as error:
            print_safely(f"error: {error}", sys.stderr)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            print_safely(f"\n{when_interrupted}", sys.stderr)
            raise SystemExit(130) from None
