"""A job listens only at the given address, and on loopback unless other machines must connect."""

import errno
import os

import pytest
from commands import listening

from parallel import process
from parallel.process import LOOPBACK, interface_towards, listen_at, loopback_interface, restrict_interface


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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_interface_that_leads_to_an_address_is_found(address):
    try:
        listen_at([address], 0).close()
    except OSError:
        pytest.skip("this machine has no such address")
    assert interface_towards(address) == loopback_interface()
