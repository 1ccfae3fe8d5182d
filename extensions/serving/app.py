"""The web application: a chat page without third-party requests, and OpenAI's API for one or more models."""

import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from common import interrupts
from common.errors import SettingsError
from common.text import counted, print_traceback, show
from extensions.http_server import KEY_VARIABLE, listen
from extensions.inference.text import LanguageModel
from extensions.report.page import csp_hash, distinct_names, fill_template, join_assets
from extensions.serving.api import Api
from extensions.serving.batcher import Batcher, is_out_of_memory
from extensions.serving.guard import ApiError, Guard
from parallel.process import is_loopback

ASSETS = Path(__file__).parent / "assets"
STYLE = join_assets("base.css", ASSETS / "chat.css")
# marked 18.2.1 (`lib/marked.umd.js` of the npm package `marked`, unmodified, MIT): 53 kB, no dependencies.
# The page builds elements from its lexer's token tree; its HTML renderer is not used.
SCRIPT = join_assets("elements.js", *(
    ASSETS / f"{name}.js" for name in ("conversations", "markdown", "chat", "marked.umd")))
# Trusted types prevent the page's script from inserting text as HTML.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {csp_hash(SCRIPT)}; style-src {csp_hash(STYLE)}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'")
PAGE = fill_template(join_assets(ASSETS / "chat.html"), {"style": STYLE, "script": SCRIPT})
CONNECTIONS = 256
GRACE_SECONDS = 1


@dataclass(frozen=True)
class ServeOptions:
    """The address, API key and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free port
    api_key: Optional[str] = None
    concurrency: int = 8  # prompts per model that run concurrently
    queue: int = 64  # waiting prompts per model; further ones are rejected
    context_length: int = 8192  # limit on prompt and completion together, capped by the model's context
    max_tokens: int = 4096  # limit on a completion
    timeout_seconds: float = 600  # time limit of a request, including its wait


async def show_page(request: Request) -> Response:
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})


async def refuse(request: Request, error: Exception) -> Response:
    """Convert an error of the API or the router, or an unexpected one, to a response."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"there is no endpoint {request.method} {request.url.path}",
                         headers=error.headers)
    elif not isinstance(error, ApiError):
        print_traceback(type(error), error, error.__traceback__)
        error = ApiError(500, f"the server failed ({type(error).__name__}); see its output")
    return error.response()


def make_app(models: Sequence[LanguageModel], options: ServeOptions) -> Starlette:
    """Create the web application and a thread for each model."""
    batchers: dict[str, Batcher] = {}
    if len({model.name for model in models}) < len(models):
        raise SettingsError(f"{models[0].name} is named twice; name different models")
    paths = [Path(model.name).expanduser().absolute() for model in models]
    names = [path.parents[1].with_name(f"{path.parents[1].name}@{path.name}")
             if path.parent.name == "checkpoints" else path for path in paths]  # RUN@STEP for a checkpoint
    for model, name in zip(models, distinct_names(names) if names else ()):
        length = min(model.context_length, options.context_length)
        try:
            batchers[name] = Batcher(model, options.concurrency, options.queue, length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise SettingsError(f"{model.name} lacks memory for {counted(options.concurrency, 'answer')} of "
                                f"{length} tokens; lower --concurrency or --context-length") from error

    @asynccontextmanager
    async def lifespan(_) -> AsyncIterator[None]:
        yield
        for batcher in batchers.values():
            batcher.stop()

    api = Api(batchers, options.max_tokens, options.timeout_seconds)
    routes = [Route("/", show_page), Route("/health", api.health), Route("/v1/models", api.models),
              Route("/v1/models/{name:path}", api.model),
              Route("/v1/chat/completions", api.chat, methods=["POST"]),
              Route("/v1/completions", api.complete, methods=["POST"])]
    # Without an API key, reject other names than this machine's (DNS rebinding).
    is_open = not options.api_key and is_loopback(options.host)
    hosts = {"localhost", "127.0.0.1", "[::1]", options.host} if is_open else None
    middleware = [Middleware(Guard, options.api_key, hosts)]
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan,
                    exception_handlers={ApiError: refuse, HTTPException: refuse, Exception: refuse})
    app.router.redirect_slashes = False
    app.state.batchers = [*batchers.values()]
    return app


class Server(uvicorn.Server):
    """A server that ends open streams with an error event when a signal arrives."""

    def __init__(self, app: Starlette):
        # Without log_config=None, uvicorn would close the log handlers of all other packages.
        super().__init__(uvicorn.Config(
            app, http="h11", ws="none", lifespan="on", log_config=None, log_level="critical",
            proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS))

    def handle_exit(self, sig, frame) -> None:
        for batcher in self.config.app.state.batchers:
            batcher.stop()
        super().handle_exit(sig, frame)


def serve(models: Iterable[LanguageModel], options: ServeOptions) -> None:
    """Print the address and serve models until Ctrl-C. Opening them can take minutes."""
    key = options.api_key
    if not key and not is_loopback(options.host):
        raise SettingsError(f"--host {options.host} accepts other machines and requires an API key; set "
                            f"{KEY_VARIABLE} in the environment, and send the same key from clients")
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError(f"{KEY_VARIABLE} cannot be sent in a header; use letters, digits and punctuation")
    try:
        with listen(options.host, options.port) as listening:
            app = make_app([*models], options)
            host, port = listening.getsockname()[:2]
            if host in ("0.0.0.0", "::"):
                host = socket.gethostname()
            show(f"http://{f'[{host}]' if ':' in host else host}:{port}/  (Ctrl-C stops it)")
            Server(app).run(sockets=[listening])
    except (KeyboardInterrupt, SystemExit):
        interrupts.leave(interrupts.exit_code() or 130)  # a normal exit would abort while a thread runs torch
