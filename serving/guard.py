"""What a request must fulfil before it is looked at: where it comes from, what it may, how large it is."""

import asyncio
import hmac
import socket
from collections.abc import Mapping
from typing import Optional

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.http_server import HEADERS, is_ip, is_loopback
from serving.errors import ApiError

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
