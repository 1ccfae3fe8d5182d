"""The live page of a run: on loopback only, read only, brought up to date by server-sent events."""

import asyncio
import threading
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.errors import CheckpointError
from common.http_server import HEADERS, listen
from common.text import show
from report.page import Report, as_text, render

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]  # any other name may be a site's that leads here (DNS rebinding)
POLL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
MOST_RAW = 2000  # points of each curve for a part of the axis


class Live:
    """The newest data of a report, made again only when a file of its runs has changed."""

    def __init__(self, report: Report):
        self.report, self.lock = report, threading.Lock()
        self.data, self.signature, self.version = report.data(live=True), report.signature(), 1

    def current(self) -> tuple[int, dict]:
        """A number that grows with each change, and the data."""
        with self.lock:
            signature = self.report.signature()
            if signature != self.signature:
                self.signature = signature
                try:
                    self.report.read()
                    self.data, self.version = self.report.data(live=True), self.version + 1
                except CheckpointError:  # a file is moved or locked; the page keeps what it has
                    self.signature = ()
            return self.version, self.data

    async def page(self, request: Request) -> Response:
        """Answer with the page."""
        _, data = await asyncio.to_thread(self.current)
        return HTMLResponse(render(data, live=True), headers=HEADERS)

    async def points(self, request: Request) -> Response:
        """Answer with the curves of some steps of a run, in more detail than the page has."""
        try:
            run, low, high = (int(request.query_params[name]) for name in ("run", "low", "high"))
            reader = self.report.runs[run]
        except (KeyError, ValueError, IndexError):
            return Response(status_code=400)
        curves = await asyncio.to_thread(reader.range, low, high, MOST_RAW)
        return JSONResponse(curves, headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Answer with the page's data, now and whenever it changes."""
        async def stream() -> AsyncIterator[str]:
            sent, quiet = 0, 0.0
            while True:
                version, data = await asyncio.to_thread(self.current)
                if version != sent:
                    yield f"event: data\ndata: {as_text(data)}\n\n"
                    sent, quiet = version, 0.0
                elif quiet >= KEEP_ALIVE_SECONDS:
                    yield ": nothing new\n\n"
                    quiet = 0.0
                await asyncio.sleep(POLL_SECONDS)
                quiet += POLL_SECONDS

        content = stream() if request.method == "GET" else iter(())
        return StreamingResponse(content, media_type="text/event-stream", headers=HEADERS)


def serve(report: Report, port: int) -> None:
    """Serve the page on a port (0: any free one) until Ctrl-C, and print its address."""
    live = Live(report)
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    app = Starlette(routes=[Route("/", live.page), Route("/events", live.events),
                            Route("/points", live.points)], middleware=[hosts])
    app.router.redirect_slashes = False
    with listen(HOST, port) as listening:
        # Without a time for graceful endings: an open stream of events would hold up Ctrl-C.
        server = uvicorn.Server(uvicorn.Config(
            app, log_config=None, log_level="critical", timeout_graceful_shutdown=0))
        show(f"http://{HOST}:{listening.getsockname()[1]}/  (Ctrl-C stops it)")
        server.run(sockets=[listening])
