"""Text for people: what a terminal may be shown, streams that nobody reads any more, durations."""

import os
import re
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Optional, TextIO

EXIT_UNREAD = 141  # as a shell tells of a process that SIGPIPE has ended
# What a terminal obeys, or shows as another line or in another order: controls but the tab, ends of lines, marks of direction.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def without_passwords(text: str) -> str:
    """The same without what URLs in it may keep secret: user and password, and what follows a question mark."""
    # With one slash too, as a path has it that was no URL for whoever took it.
    text = re.sub(r"(:/{1,2})[^\s/?#'\"]*@", r"\1***@", text)
    return re.sub(r"(:/{1,2}[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


def printable(text: str) -> str:
    """The same as one line that a terminal shows and does not obey: control characters become their escapes, as `\\x1b`."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def is_url(text: str) -> bool:
    """Whether a path is a URL; with one slash too, which a mistyped or normalised one has."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None


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


def last_line(text: str) -> str:
    """The last line that is not empty, at most 300 characters, or that there is none."""
    return ([line for line in text.splitlines() if line.strip()] or ["it printed nothing"])[-1][:300]


def duration(seconds: float) -> str:
    """5:30, or 2:05:30 from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
