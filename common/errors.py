"""Errors that users can fix, with exit codes for launchers."""

import atexit
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Optional

from common import interrupts
from common.text import exit_if_unread, is_url, pip_install, print_safely, printable, without_passwords


class PaddockError(Exception):
    """Sentences for the user: the problem, the expectation, the remedy. Passwords in URLs are masked."""

    exit_code = 1
    on_all_ranks = False  # all ranks raise the same error, which one rank per machine prints
    errno: Optional[int] = None  # of the disk's error that caused it

    def __init__(self, *sentences: str):
        super().__init__("\n".join(printable(without_passwords(sentence)) for sentence in sentences))


class SettingsError(PaddockError):
    """A setting is unknown, malformed, or conflicts with others."""

    exit_code = 2


class DataError(PaddockError):
    """A data, evaluation or tokenizer file cannot be used."""

    exit_code = 3


class NonFiniteError(PaddockError):
    """A loss or gradient is NaN or infinite."""

    exit_code = 4
    on_all_ranks = True


class LossSpikeError(PaddockError):
    """The loss is far above recent ones, and LOSS_SPIKE_POLICY=stop."""

    exit_code = 4
    on_all_ranks = True


class CheckpointError(PaddockError):
    """A checkpoint cannot be written, found, verified or used."""

    exit_code = 5


class DriftError(PaddockError):
    """The model's replicas differ between ranks."""

    on_all_ranks = True


class HangError(PaddockError):
    """A rank made no progress for DISTRIBUTED_TIMEOUT seconds."""

    exit_code = 6


@contextmanager
def requires_package(package: str, feature: str) -> Iterator[None]:
    """A `with` block that imports a package; if it is missing, SettingsError contains the pip command.

    `package` may name the oldest version that works, such as "gguf>=0.18"; an older one counts as missing.
    """
    name, _, least = package.partition(">=")
    try:
        yield
        if not least:
            return
        from importlib import metadata  # takes 20 ms

        with suppress(metadata.PackageNotFoundError):  # not installed by pip
            installed = metadata.version(name)
            if [*map(int, re.findall(r"\d+", installed)[:2])] < [*map(int, re.findall(r"\d+", least))]:
                raise ImportError(f"{installed} is installed")
    except ImportError as error:
        message = f"{feature} needs the package {package}: {pip_install(package)} ({error})"
        raise SettingsError(message) from error


def unreadable(error: Exception, advice: str) -> str:
    """Return why a file cannot be read, with `advice` unless the error has its own."""
    reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return reason if getattr(error, "has_remedy", False) else f"{reason}; {advice}"


def local_path(text: str) -> Path:
    if is_url(text):
        raise SettingsError(f"{text} is a URL, but must be a path on this machine; mount it or copy it")
    return Path(text)


def leave_compilers() -> None:
    """Do not wait at exit for torch's compile workers, perhaps for 300 s: they end by themselves."""
    compilers = sys.modules.get("torch._inductor.async_compile")
    atexit.unregister(getattr(compilers, "shutdown_compile_workers", None))


def run_script(main: Callable[[], object], when_interrupted: str = "Stopped.") -> None:
    """Run a script's main; a PaddockError, Ctrl-C or SIGTERM prints a line and exits with its code."""
    with exit_if_unread():
        interrupts.sentence = when_interrupted
        try:
            main()
        except BaseException as error:
            # Whatever a signal has become: an import that it interrupts fails with any error.
            if code := interrupts.exit_code() or 130 * isinstance(error, KeyboardInterrupt):
                interrupts.say()
                raise SystemExit(code) from None
            if not isinstance(error, PaddockError):
                raise
            print_safely("error: " + str(error).replace("\n", "\n  "), sys.stderr)
            raise SystemExit(error.exit_code) from None
        finally:
            interrupts.sentence = ""
            leave_compilers()
