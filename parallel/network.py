"""Where a job listens: on one machine at loopback alone, across machines at MASTER_ADDR and on the interface that leads there.

What torch opens by itself listens everywhere, and it trusts whoever comes.
"""

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Optional

LOOPBACK = ("127.0.0.1", "::1")  # the second where there is no IPv4
NAME_SECONDS = 25.0  # that a name may be unknown: a cluster's own names come after the machine that bears them
SIOCGIFADDR = 0x8915  # of linux/sockios.h


def listen_at(hosts: Sequence[str], port: int, patience: float = NAME_SECONDS) -> socket.socket:
    """A socket that listens at one address of this machine, the first of some that can be had.

    Args:
        port: 0 for any that is free.
        patience: seconds to wait for a name that is not known.
    Raises:
        OSError: there is none: taken, not this machine's, unknown.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            found = [each for host in hosts for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            break
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    failures = []
    for family, *_, address in found:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            failures.append(error)
    raise failures[-1]


def keep_to_interface(master_addr: str, one_machine: bool) -> None:
    """Have gloo and nccl, in this process, listen on one interface: loopback for ranks that are all on one machine, else the one
    that leads to MASTER_ADDR. What the user has said stays."""
    if one_machine or master_addr in LOOPBACK:
        interface = loopback_interface()
    else:
        interface = interface_towards(master_addr)
        if interface == loopback_interface():  # a name that this machine has for itself; others could not come
            interface = None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # that one, and not all whose names begin so


def loopback_interface() -> Optional[str]:
    """The name of the interface that no other machine can reach."""
    return next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)


def interface_towards(host: str) -> Optional[str]:
    """The interface that holds the route to a host, or None where that is not to be found out. Nothing is sent."""
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
        return next((name for name, address in interface_addresses() if address == own), None)
    return None


def interface_addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of this machine: the first IPv4 address of each, and all of IPv6 (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(reply[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
