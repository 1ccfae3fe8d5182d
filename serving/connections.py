"""uvicorn's server and connections, with the limits that it leaves out."""

from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 20.0  # for the headers of a request
CONNECTIONS = 256
GRACE_SECONDS = 1


class Connection(H11Protocol):
    """A connection that is cut if no request comes; the application finds it in the scope's state."""

    def __init__(self, config, server_state, app_state, _loop=None):
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        # Uvicorn sets no limit to the time that a request's headers may take.
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.abort)
        self._requests = 0  # two, where one follows before the last word on the one before

    def request_began(self) -> None:
        """Wait no longer for a request."""
        self._requests += 1
        self._deadline.cancel()

    def request_ended(self) -> None:
        """Wait for the next request."""
        self._requests -= 1
        if not self._requests:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.abort)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the time limit."""
        self._deadline.cancel()
        super().connection_lost(error)

    def abort(self) -> None:
        """Cut the connection, also if the client reads nothing."""
        self.transport.abort()


class Server(uvicorn.Server):
    """A server that tells its application at once when it is to end."""

    def __init__(self, app, on_end: Callable[[], None]):
        # Without log_config=None, uvicorn would close the log handlers of all other packages.
        super().__init__(uvicorn.Config(
            app, http=Connection, ws="none", lifespan="on", log_config=None, log_level="critical",
            proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS))
        self.on_end = on_end

    def handle_exit(self, sig, frame) -> None:
        """End at a signal."""
        self.on_end()
        super().handle_exit(sig, frame)
