"""Text for people: escaped control characters, closed output streams, durations."""

import os
import re
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Optional, TextIO

EXIT_UNREAD = 141  # what a shell reports for a process that SIGPIPE ended
# What changes how a terminal shows text: control characters except the tab, line ends, direction marks.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
                      r"\ud800-\udfff]")


def without_passwords(text: str) -> str:
    """Return the text with user, password and query of every URL in it replaced by ***."""
    # One slash is enough: normalising a URL as a path leaves only one.
    text = re.sub(r"(:/{1,2})[^\s/?#'\"]*@", r"\1***@", text)
    return re.sub(r"(:/{1,2}[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


def printable(text: str) -> str:
    """Return the text on one line, with control characters replaced by their escapes, such as `\\x1b`."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def is_url(text: str) -> bool:
    """Whether a path is a URL; one slash after the colon is enough, as in a mistyped one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None


def print_safely(text: str, stream: TextIO) -> Optional[OSError]:
    """Write one or several lines in a single write, with control characters escaped.

    Returns the error if that failed, as with a full disk or a pipe without a reader. The stream then leads to
    /dev/null, so that later lines, and the flush when the process ends, do not fail too.
    """
    try:
        # One write, because print() writes the line end separately and lines of several ranks would mix.
        stream.write("\n".join(map(printable, text.split("\n"))) + "\n")
        stream.flush()
    except OSError as error:
        _redirect_to_devnull(stream)
        return error
    return None


def print_traceback(*failure) -> None:
    """Print a traceback with control characters escaped; installed as `sys.excepthook`."""
    print_safely("".join(traceback.format_exception(*failure)).rstrip("\n"), sys.stderr)


def show(*lines: str) -> None:
    """Print lines to stdout in a single write, with control characters escaped."""
    print("\n".join(map(printable, lines)), flush=True)


def show_part(text: str) -> None:
    """Print a part of a text to stdout, with control characters but line ends escaped."""
    print("\n".join(map(printable, text.split("\n"))), end="", flush=True)


def _redirect_to_devnull(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def write_line_by_line() -> None:
    """Make every printed line a single write, also under `python -u`, as torchrun starts its ranks."""
    sys.excepthook = print_traceback
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)


def silence_unread_streams() -> bool:
    """Redirect stdout and stderr to /dev/null if they are pipes without a reader; whether one was."""
    unread = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
                unread.append(stream)
    for stream in unread:
        _redirect_to_devnull(stream)
    return bool(unread)


@contextmanager
def exit_if_unread() -> Iterator[None]:
    """A `with` block that prints. Without a reader (`| head`) the process exits silently with 141.

    The exit code of a failure is kept.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where the error can still be caught
    except BrokenPipeError as error:
        if not silence_unread_streams():
            raise
        raise SystemExit(getattr(error.__context__, "code", None) or EXIT_UNREAD) from None


def last_line(text: str) -> str:
    """The last line that is not empty, at most 300 characters, or that there is none."""
    return ([line for line in text.splitlines() if line.strip()] or ["it printed nothing"])[-1][:300]


def duration(seconds: float) -> str:
    """Return seconds as 5:30, or as 2:05:30 from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
