"""Serve a live report on loopback, read-only, updated by server-sent events."""

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
from common.text import show
from extensions.http_server import HEADERS, listen
from extensions.report.page import Report, as_text, render

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]  # reject other names, because of DNS rebinding
POLL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
MOST_RAW = 2000  # points per curve in a zoomed range


class Live:
    """The latest data of a report, rebuilt only when a run's file changes."""

    def __init__(self, report: Report):
        self.report, self.lock = report, threading.Lock()
        self.data, self.signature, self.version = report.data(live=True), report.signature(), 1

    def current(self) -> tuple[int, dict]:
        """Return a version number that grows with each change, and the data."""
        with self.lock:
            signature = self.report.signature()
            if signature != self.signature:
                self.signature = signature
                try:
                    self.report.read()
                    self.data, self.version = self.report.data(live=True), self.version + 1
                except CheckpointError:  # a file is moved or locked: keep the previous data
                    self.signature = ()
            return self.version, self.data

    async def page(self, request: Request) -> Response:
        _, data = await asyncio.to_thread(self.current)
        return HTMLResponse(render(data, live=True), headers=HEADERS)

    async def points(self, request: Request) -> Response:
        """Return the curves for a range of steps, in more detail than the page contains."""
        run, low, high = request.path_params.values()
        if run >= len(self.report.runs):
            return Response(status_code=404)

        def read() -> dict:
            with self.lock:
                return self.report.runs[run].range(low, high, MOST_RAW)

        return JSONResponse(await asyncio.to_thread(read), headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Stream the page's data now and after every change."""
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
                            Route("/points/{run:int}/{low:int}/{high:int}", live.points)], middleware=[hosts])
    app.router.redirect_slashes = False
    with listen(HOST, port) as listening:
        # No graceful shutdown: an open event stream would delay Ctrl-C.
        server = uvicorn.Server(uvicorn.Config(
            app, log_config=None, log_level="critical", timeout_graceful_shutdown=0))
        show(f"http://{HOST}:{listening.getsockname()[1]}/  (Ctrl-C stops it)")
        server.run(sockets=[listening])
