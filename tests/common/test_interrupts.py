"""Ctrl-C and SIGTERM: one line and exit code 130 or 143, whatever a command does at that time."""

import os
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT

from common import interrupts
from common.errors import SettingsError, run_script


@pytest.fixture
def command(monkeypatch):
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(ROOT / "scripts" / "runs.py"), raising=False)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(interrupts, "received", [])
    monkeypatch.setattr(interrupts, "is_reporting", True)
    monkeypatch.setenv(interrupts.PARENT, "1")  # restored at the end
    interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("becomes", [None, ImportError, SettingsError])
def test_a_running_command_ends_with_a_line_whatever_the_interruption_becomes(number, code, becomes, command, capfd):
    cleaned = []

    def main() -> None:
        try:
            signal.raise_signal(number)
            signal.raise_signal(number)  # as `timeout` sends it
        except BaseException:
            if becomes:
                raise becomes("partially initialized") from None
            raise
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        run_script(main, "Stopped. Run it again.")
    assert ended.value.code == code and cleaned and capfd.readouterr().err == "Stopped. Run it again.\n"


def test_a_second_signal_later_and_one_before_the_start_exit_at_once(command, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(interrupts, "sentence", "Running.")
    interrupts.received.append((signal.SIGINT, time.monotonic() - 2))
    signal.raise_signal(signal.SIGTERM)
    assert left == [130] and capfd.readouterr().err == "Running.\n"
    interrupts.received.clear()
    monkeypatch.setattr(interrupts, "sentence", "")
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert left == [130, 143] and capfd.readouterr().err == "Stopped.\n"


def stopped(script, number: signal.Signals, environ: dict) -> subprocess.Popen:
    """Start a script, and send it a signal; signals are blocked until its first import, as ./paddock starts a script."""
    interrupts.hold()
    process = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ | environ)
    process.send_signal(number)
    interrupts.hold(False)
    return process


def test_every_command_handles_signals_from_its_first_import_on():
    scripts = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py"))]
    ends = [(stopped(script, interrupts.SIGNALS[place % 2], {}), (130, 143)[place % 2], "Stopped.\n")
            for place, script in enumerate(path for path in scripts if "__main__" in path.read_text())]
    # One that another command started leaves the line to it, and one of several ranks on a machine to the first.
    torchrun = {"TORCHELASTIC_ERROR_FILE": "error.json"}
    ends += [(stopped(ROOT / "scripts" / "runs.py", signal.SIGINT, environ), 130, output) for environ, output in (
        ({interrupts.PARENT: str(os.getpid())}, ""), ({interrupts.PARENT: "1"}, "Stopped.\n"), ({"LOCAL_RANK": "1"}, "Stopped.\n"),
        ({"LOCAL_RANK": "1"} | torchrun, ""), ({interrupts.PARENT: str(os.getpid()), "LOCAL_RANK": "0"} | torchrun, "Stopped.\n"))]
    for process, code, output in ends:
        assert (process.communicate()[1], process.returncode) == (output, code), process.args
