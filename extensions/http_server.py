"""Shared by the project's web servers: addresses, listening sockets, and headers."""

import errno
import socket

from common.errors import SettingsError

KEY_VARIABLE = "PADDOCK_API_KEY"  # the environment variable with a server's key
# Forbid other pages to embed or read responses, and caches to store them.
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
           "Cross-Origin-Resource-Policy": "same-origin"}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 means any free one."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or error.errno < 0:  # the resolver's errors
            raise SettingsError(f"--host {host} is not an address of this machine; 0.0.0.0 listens on all of "
                                "them") from error
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise SettingsError(f"--port {port} {why}; --port 0 picks a free one") from error
