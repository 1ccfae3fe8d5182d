"""Where a job listens: on one machine at loopback only, across machines at MASTER_ADDR and its interface.

What torch opens by default listens on all interfaces and trusts every client.
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

LOOPBACK = ("127.0.0.1", "::1")  # the second for machines without IPv4
RESOLVE_SECONDS = 25.0  # how long a host name may be unknown: a cluster's DNS can lag behind its machines
SIOCGIFADDR = 0x8915  # of linux/sockios.h


def listen_at(hosts: Sequence[str], port: int, resolve_seconds: float = RESOLVE_SECONDS) -> socket.socket:
    """Return a socket that listens at the first of these addresses that is available on this machine.

    Args:
        port: 0 for any free one.
        resolve_seconds: how long to wait for an unknown host name.
    Raises:
        OSError: no address is available: in use, not of this machine, or unknown.
    """
    deadline = time.monotonic() + resolve_seconds
    while True:
        try:
            found = [each for host in hosts
                     for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
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


def restrict_interface(master_addr: str, one_machine: bool) -> None:
    """Make gloo and nccl of this process listen on one interface only, unless the user has named some.

    The interface is loopback if all ranks are on one machine, otherwise the one that leads to MASTER_ADDR.
    """
    if one_machine or master_addr in LOOPBACK:
        interface = loopback_interface()
    else:
        interface = interface_towards(master_addr)
        if interface == loopback_interface():  # a name of this machine for itself: no other could connect
            interface = None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it would match as a prefix


def loopback_interface() -> Optional[str]:
    """Return the name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)


def interface_towards(host: str) -> Optional[str]:
    """Return the interface that packets to a host take, or None if it cannot be found. Sends nothing."""
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
        return next((name for name, address in interface_addresses() if address == own), None)
    return None


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address): the first IPv4 address of each interface and all IPv6 addresses (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(reply[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
