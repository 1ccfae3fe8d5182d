"""The mistakes that a user can mend, each with the exit code that tells a launcher what happened."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.text import (
    ending_with_reader,
    is_url,
    print_safely,
    print_traceback,
    printable,
    without_passwords,
)


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
