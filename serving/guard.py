"""What a client is told when its request cannot be answered.

What a request must fulfil before it is looked at: where it comes from, what it may, how large it is.

uvicorn's server and connections, with the limits that it leaves out."""

import asyncio
import hmac
import socket
from collections.abc import Callable, Mapping
from typing import Any, Optional

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.http_server import HEADERS, is_ip, is_loopback

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error"}


class ApiError(Exception):
    """A request's error, in OpenAI's schema.

    Args:
        param: the field of the request that it is about.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(self, status: int, message: str, param: Optional[str] = None, code: Optional[str] = None,
                 headers: Optional[dict[str, str]] = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        # OpenAI's client repeats what failed on the server, and this would fail again.
        final = {"x-should-retry": "false"} if status in (500, 504) else {}
        self.headers = final | (headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as the client gets it."""
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


OPEN_PATHS = ("/", "/health")  # without a key
BODY_BYTES = 1 << 20
BODY_SECONDS = 30.0
SENDING_SECONDS = 10.0  # for the end of an answer after its time is over


class Guard:
    """The outermost layer of the application.

    Args:
        host: where the server listens.
        key: what every request must have as its bearer token, if any.
        seconds: the longest time for a request.
    """

    def __init__(self, app: ASGIApp, host: str, key: Optional[str], seconds: float):
        self.app, self.host, self.key, self.seconds = app, host, key, seconds
        self.is_public = not is_loopback(host)
        self.names = {"localhost", "127.0.0.1", "::1", host.lower()}
        if self.is_public:
            self.names |= {own := socket.gethostname().lower(), f"{own}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(HEADERS)
            await send(message)

        # Given by `connections.Connection`; a test client has none.
        connection = scope.get("state", {}).get("connection")
        if connection:
            connection.request_began()
        try:
            self.check(scope["method"], scope["path"], Headers(scope=scope))
            await self.answer(scope, await read_body(receive), receive, send_with_headers)
        except ApiError as error:
            await as_response(error)(scope, receive, send_with_headers)
        finally:
            if connection:
                connection.request_ended()

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Refuse what comes from elsewhere, has no key or is no JSON.

        Raises:
            ApiError: it is refused.
        """
        host = headers.get("host", "")
        if not self.is_own(host):
            raise ApiError(403, f"the Host {host!r} is not this server; use its address")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise ApiError(403, f"pages of {origin} may not use this server")
        if self.key and path not in OPEN_PATHS and not has_key(headers, self.key):
            raise ApiError(401, "this server needs its API key, as in 'Authorization: Bearer KEY'",
                           code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise ApiError(415, "the body must be JSON; set Content-Type: application/json")
        if int(headers.get("content-length", "0")) > BODY_BYTES:
            raise too_large()

    def is_own(self, host: str) -> bool:
        """Whether a Host header is this server; another may be a site's that leads here (DNS rebinding)."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        return name in self.names or self.is_public and is_ip(name)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer, as long as the client is there and there is time."""
        gone = asyncio.ensure_future(disconnected(receive))

        async def receive_body() -> Message:
            return {"type": "http.request", "body": body}

        answering = asyncio.ensure_future(self.app(scope, receive_body, send))
        try:
            await asyncio.wait({gone, answering}, timeout=self.seconds + SENDING_SECONDS,
                               return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            if not gone.done() and (connection := scope.get("state", {}).get("connection")):
                connection.abort()  # the client reads nothing
        finally:
            for task in (gone, answering):
                task.cancel()
            await asyncio.wait({gone, answering})


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is too large, or does not come.
    """
    async def collect() -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body")
            if len(body) > BODY_BYTES:
                raise too_large()
        return bytes(body)

    try:
        return await asyncio.wait_for(collect(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive in {BODY_SECONDS:g} s") from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def too_large() -> ApiError:
    """The error of a body that is too large."""
    return ApiError(413, f"the body is larger than {BODY_BYTES} bytes")


def has_key(headers: Mapping[str, str], key: str) -> bool:
    """Whether a request has the key, compared in constant time."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode(), key.encode()) and scheme.lower() == "bearer"


def as_response(error: ApiError) -> JSONResponse:
    """The response to a request that failed."""
    return JSONResponse(error.body, error.status, headers=HEADERS | error.headers)


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
