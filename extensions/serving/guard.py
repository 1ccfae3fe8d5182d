"""Errors in OpenAI's format, and the checks before a request is read."""

import hmac
import re
from collections.abc import Collection, Mapping
from typing import Optional

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from extensions.http_server import HEADERS, KEY_VARIABLE

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error"}
HEADER_BYTES = 16_384
PUBLIC_PATHS = ("/", "/health")  # no API key required


class ApiError(Exception):
    """An error response in OpenAI's format: the request field at fault, and a machine-readable reason."""

    def __init__(self, status: int, message: str, param: Optional[str] = None, code: Optional[str] = None,
                 headers: Optional[Mapping[str, str]] = None):
        super().__init__(message)
        self.status = status
        # OpenAI's client retries server errors by default; these would fail again.
        final = {"x-should-retry": "false"} if status in (500, 504) else {}
        self.headers = final | dict(headers or {})
        kind = "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=HEADERS | self.headers)


def is_own(origin: str, headers: Headers) -> bool:
    """Return whether an Origin is this server's own, perhaps behind a proxy.

    Browsers send Sec-Fetch-Site to https and to this machine. Pages can set neither it nor, without a
    preflight, which fails, X-Forwarded-Host.
    """
    if site := headers.get("sec-fetch-site"):
        return site == "same-origin"
    scheme, _, authority = origin.lower().partition("://")
    hosts = (headers.get(name, "").partition(",")[0].strip().lower() for name in ("host", "x-forwarded-host"))
    return scheme in ("http", "https") and authority != "" and authority in hosts


class Guard:
    """The outermost middleware: rejects cross-origin requests and requests without the API key.

    Args:
        hosts: accepted names in the Host header; None = any.
    """

    def __init__(self, app: ASGIApp, key: Optional[str], hosts: Optional[Collection[str]] = None):
        self.app, self.key, self.hosts = app, key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self.check(scope["method"], scope["path"], Headers(scope=scope))
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send_with_headers)

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise ApiError for other origins, a missing key, or a content type that HTML forms can send."""
        if sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES:
            raise ApiError(431, f"the headers are larger than {HEADER_BYTES:,} bytes")
        origin, host = headers.get("origin"), headers.get("host", "")
        name = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:]+)(:\d+)?", host.lower())
        if self.hosts is not None and (name is None or name[1] not in self.hosts):
            raise ApiError(400, f"the Host {host!r} is not a name of this machine; behind a proxy, require a "
                                f"key ({KEY_VARIABLE}), or let the proxy send Host: 127.0.0.1")
        if origin is not None and not is_own(origin, headers):
            raise ApiError(403, f"pages from {origin} may not use this server; if a proxy serves this "
                                "address, let it send Host or X-Forwarded-Host")
        if self.key and path not in PUBLIC_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(given.strip().encode(), self.key.encode())  # in constant time
            if not is_key or scheme.lower() != "bearer":
                raise ApiError(401, "this server requires its API key: 'Authorization: Bearer KEY'",
                               code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and content_type != "application/json":
            raise ApiError(415, "the body must be JSON; set Content-Type: application/json")
