"""The mistakes that a user can mend, each with the exit code that tells a launcher what happened."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Optional, TextIO


def without_passwords(text: str) -> str:
    """The same without what URLs in it may keep secret: user and password, and what follows a question mark."""
    # With one slash too, as a path has it that was no URL for whoever took it.
    text = re.sub(r"(:/{1,2})[^\s/?#'\"]*@", r"\1***@", text)
    return re.sub(r"(:/{1,2}[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


class PaddockError(Exception):
    """One sentence for the user: what was got, what was expected, what to change. Passwords in URLs are not shown."""

    exit_code = 1
    told_by_main = False  # on ranks other than 0, when rank 0 raised it for all

    def __init__(self, text: str = ""):
        super().__init__(without_passwords(text))


class SettingsError(PaddockError):
    """A setting is unknown, malformed, or cannot go with the others."""

    exit_code = 2


class DataError(PaddockError):
    """A data, evaluation or tokenizer file cannot be used."""

    exit_code = 3


class NonFiniteError(PaddockError):
    """A loss or gradient stopped being a number."""

    exit_code = 4


class CheckpointError(PaddockError):
    """A checkpoint cannot be written, found, verified or used."""

    exit_code = 5


class LossSpikeError(PaddockError):
    """A loss lies far above the recent ones, and LOSS_SPIKE_POLICY=stop."""

    exit_code = 4


class DriftError(PaddockError):
    """The ranks' replicas of the model, which must be equal, are not."""


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


def tell(text: str, stream: TextIO) -> Optional[OSError]:
    """Print a line at once; returns why that could not be: the stream is a file on a full disk, or a pipe that nobody reads.

    From then on the stream leads nowhere, so that neither later lines nor the end of the process, which flushes it, fail too.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        with suppress(OSError, ValueError):  # a stream with no file behind it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    return None


def run_script(main: Callable[[], object], when_interrupted: str = "Stopped.") -> None:
    """Run a script's main; a user's mistake, or Ctrl-C, ends the process with one line and an exit code."""
    try:
        main()
    except PaddockError as error:
        tell(f"error: {error}", sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"\n{when_interrupted}", file=sys.stderr)
        raise SystemExit(130) from None
