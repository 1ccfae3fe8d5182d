"""The chat page: one HTML document that asks nobody but the server that it came from for anything.

The web application of a model or several: a chat page, and OpenAI's API."""

import os
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from common.errors import SettingsError, requires_package
from common.http_server import KEY_VARIABLE, is_loopback, listen
from common.text import print_safely, print_traceback, show
from inference.text import LanguageModel
from report.page import csp_hash, fill_template, join_assets
from serving.batcher import Batcher, is_out_of_memory
from serving.guard import ApiError

ASSETS = Path(__file__).parent / "assets"
STYLE = join_assets("base.css", ASSETS / "chat.css")
SCRIPT = join_assets("elements.js", ASSETS / "chat.js")
# Trusted types forbid the page to set text as HTML, should its script ever try.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {csp_hash(SCRIPT)}; style-src {csp_hash(STYLE)}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'")


def page_html() -> str:
    """Return the page; it is sent with CONTENT_SECURITY_POLICY."""
    return fill_template(join_assets(ASSETS / "chat.html"), {"style": STYLE, "script": SCRIPT})


@dataclass(frozen=True)
class ServeOptions:
    """Where to serve, to whom, and how much at once."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = a free one
    api_key: Optional[str] = None
    concurrency: int = 8  # prompts that a model continues at once
    queue: int = 64  # prompts of a model that wait; more are refused
    context_length: int = 8192  # the most tokens of a prompt with its continuation, if the model has as many
    max_tokens: int = 4096  # the most tokens of a continuation
    timeout_seconds: float = 600  # the longest time for a request, waiting included


def make_app(models: Sequence[LanguageModel], options: ServeOptions):
    """Return the web application (starlette's), with a thread for each model."""
    with requires_package("starlette", "--serve"):
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, Response
        from starlette.routing import Route

        from serving.api import Api
        from serving.guard import Guard, as_response

    names = [model.name for model in models]
    if len({*names}) < len(names):
        raise SettingsError(f"{names[-1]} is named twice; name two different models")
    batchers = {model.name: start_batcher(model, options) for model in models}

    @asynccontextmanager
    async def lifespan(_) -> AsyncIterator[None]:
        yield
        for batcher in batchers.values():
            batcher.stop()

    async def page(request: Request) -> Response:
        return HTMLResponse(page_html(), headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # of the router
            error = ApiError(error.status_code, f"there is no {request.method} {request.url.path} here",
                             headers=error.headers)
        return as_response(error)

    async def fail(request: Request, error: Exception) -> Response:
        print_traceback(type(error), error, error.__traceback__)
        return as_response(ApiError(500, f"the server failed ({type(error).__name__}); its output says more"))

    api = Api(batchers, options.max_tokens, options.timeout_seconds)
    routes = [Route("/", page), Route("/health", api.health), Route("/v1/models", api.models),
              Route("/v1/models/{name:path}", api.model),
              Route("/v1/chat/completions", api.chat, methods=["POST"]),
              Route("/v1/completions", api.complete, methods=["POST"])]
    guard = Middleware(Guard, options.host, options.api_key, options.timeout_seconds)
    app = Starlette(routes=routes, middleware=[guard], lifespan=lifespan,
                    exception_handlers={ApiError: refuse, HTTPException: refuse, Exception: fail})
    app.router.redirect_slashes = False
    app.state.batchers = [*batchers.values()]
    return app


def start_batcher(model: LanguageModel, options: ServeOptions) -> Batcher:
    """Return a model's batcher, which has continued a token."""
    length = min(model.context_length, options.context_length)
    try:
        return Batcher(model, options.concurrency, options.queue, length)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(f"too little memory for {options.concurrency} answers of {length} tokens at once "
                            f"by {model.name}; lower --concurrency or --context-length") from error


def serve(models: Iterable[LanguageModel], options: ServeOptions) -> None:
    """Serve models until Ctrl-C, and print where.

    Args:
        models: are asked for when the address is known to be free, as to open one can take minutes.
    """
    check(options)
    with requires_package("uvicorn", "--serve"):
        from serving.guard import Server
    try:
        with listen(options.host, options.port) as listening:
            app = make_app([*models], options)
            server = Server(app, lambda: [batcher.stop() for batcher in app.state.batchers])
            show(f"http://{address(listening)}/  (Ctrl-C ends it)")
            server.run(sockets=[listening])
    except KeyboardInterrupt:
        # Python's own way to end would abort in a thread that is within torch.
        print_safely("\nStopped.", sys.stderr)
        os._exit(130)


def check(options: ServeOptions) -> None:
    """Refuse a server that others could use."""
    key = options.api_key
    if not key and not is_loopback(options.host):
        raise SettingsError(f"--host {options.host} lets other machines in, so it needs a key; set the "
                            f"environment variable {KEY_VARIABLE}, which clients then send as their API key")
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError(f"{KEY_VARIABLE} cannot be sent in a header; use letters, digits and punctuation")


def address(listening: socket.socket) -> str:
    """Return where a server is reached, as in a URL."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
