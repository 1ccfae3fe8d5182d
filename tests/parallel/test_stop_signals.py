"""A stop signal is answered at once, once on each machine, and truly; ranks find each other's addresses."""

import errno
import os
import signal
import threading

import pytest
from commands import listening
from factories import run_ranks

from common.activity import ACTIVITY
from parallel import process, ranks
from parallel.process import LOOPBACK, listen_at, loopback_interface, restrict_interface
from parallel.ranks import Interrupted, StopSignals, meeting


def answers(capfd, *numbers: signal.Signals) -> tuple[StopSignals, str]:
    """Send signals to this process within a `with` block; returns the block's object, and what was printed."""
    capfd.readouterr()
    with StopSignals() as signals:
        for number in numbers:
            os.kill(os.getpid(), number)
    for thread in threading.enumerate():
        if thread.name == "signals":
            thread.join(10)
            assert not thread.is_alive()
    return signals, capfd.readouterr().err


@pytest.mark.parametrize(("number", "phase", "output"), [
    (signal.SIGINT, "backward", "Ctrl-C: finishing step 7, then saving; repeat to exit without saving\n"),
    (signal.SIGTERM, "data", "SIGTERM: finishing step 7, then saving; repeat to exit without saving\n"),
    (signal.SIGUSR1, "validation", "SIGUSR1: saving after at most one more step; repeat to exit without saving\n"),
    (signal.SIGTERM, "save", "SIGTERM: saving after at most one more step; repeat to exit without saving\n"),
    (signal.SIGTERM, "reference", "SIGTERM: stopping before the first step; repeat to exit immediately\n"),
    (signal.SIGINT, "the end", "Ctrl-C: everything is saved; closing the logs; repeat to exit immediately\n")])
def test_a_signal_is_answered_with_a_line_at_once(number, phase, output, capfd, monkeypatch):
    monkeypatch.setattr(ACTIVITY, "phase", phase)
    monkeypatch.setattr(ACTIVITY, "step", 7)
    before = [signal.getsignal(each) for each in process.stop_signals()], signal.set_wakeup_fd(-1)
    signals, printed = answers(capfd, number, signal.SIGTERM)
    assert printed == output and signals.received == number, "the second one came within a second, and is the same"
    assert ([signal.getsignal(each) for each in process.stop_signals()], signal.set_wakeup_fd(-1)) == before
    monkeypatch.setenv("LOCAL_RANK", "1")
    signals, printed = answers(capfd, number)
    assert (signals.received, printed) == (number, "")


def stop_in_the_plan() -> None:
    def decide():
        raise Interrupted

    with pytest.raises(Interrupted), meeting(decide):
        pass


def test_a_stop_before_the_plan_is_complete_stops_all_ranks(tmp_path):
    run_ranks(stop_in_the_plan, world_size=2, folder=tmp_path)


def test_one_address_is_listened_at_and_the_first_that_can_be_had():
    with listen_at(["192.0.2.254", *LOOPBACK], 0) as first:  # of no machine, but of documents
        host, port = first.getsockname()[:2]
        assert host in LOOPBACK
        places = [(str(address), number) for address, number in listening(os.getpid())]
        assert (host, port) in places and port not in [number for address, number in places if address not in LOOPBACK]
        with pytest.raises(OSError) as taken:
            listen_at([host], port)
        assert taken.value.errno == errno.EADDRINUSE


def test_ranks_of_one_machine_keep_to_loopback_and_others_to_the_way_to_the_first(monkeypatch):
    def interfaces(host, one_machine, **said):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, said.get(name, ""))
            if name not in said:
                monkeypatch.delenv(name)
        restrict_interface(host, one_machine)
        return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")

    loopback = loopback_interface()
    assert interfaces("node-0", True) == interfaces("127.0.0.1", False) == (loopback, f"={loopback}")
    assert interfaces("127.0.0.1", True, NCCL_SOCKET_IFNAME="eth7") == (loopback, "eth7"), "what the user says stays"
    for host in ("localhost", "0.0.0.0", "nowhere.invalid"):
        assert interfaces(host, False) == (None, None), "where others would be shut out"
    monkeypatch.setattr(process, "interface_towards", lambda host: "eth1")
    assert interfaces("10.0.0.1", False) == ("eth1", "=eth1")


def test_a_second_signal_leaves_although_the_main_thread_never_returns_to_python(capfd, monkeypatch):
    left, at = [], iter([0.0, 2.0])
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(ranks.time, "monotonic", lambda: next(at, 9.0))
    monkeypatch.setattr(StopSignals, "_handle", lambda *_: None)
    answers(capfd, signal.SIGTERM, signal.SIGINT)
    assert left == [128 + signal.SIGINT]
