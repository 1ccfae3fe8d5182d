"""A server of the API that writes what a test tells it to, in a thread: for the page and nothing else."""

import asyncio
import json
import socket
import threading
import time
from typing import Optional

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from extensions.serving.app import CONTENT_SECURITY_POLICY, PAGE


def model(name: str) -> dict:
    return {"id": name, "object": "model", "created": 0, "owned_by": "paddock", "chat": True, "context_length": 2048,
            "parameters": 134_515_008, "max_tokens": 2047, "prompts": [], "source": "runs/it's"}


class StubServer:
    """What it answers is set by its attributes, at any time; `reset` sets them back."""

    def __init__(self):
        self.port, self.server, self.thread = 0, None, None
        self.reset()

    def reset(self) -> None:
        self.models = [model("sft")]
        self.pieces: list[str] = ["Hello", ", ", "world"]
        self.hold_at: Optional[int] = None  # wait before this piece until it is None
        self.drops = False  # the connection ends after the pieces
        self.refuses: Optional[int] = None  # the status of an error instead of an answer
        self.requests: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/", lambda request: HTMLResponse(PAGE, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})),
            Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": self.models})),
            Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        if self.refuses:
            error = {"message": f"refused with {self.refuses}", "type": "error", "param": None, "code": None}
            return JSONResponse({"error": error}, self.refuses)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def held(self, index: int) -> None:
        while self.hold_at is not None and self.hold_at <= index:
            await asyncio.sleep(0.01)

    async def stream(self):
        def event(**parts) -> str:
            return f"data: {json.dumps(parts)}\n\n"

        yield event(choices=[{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}])
        for index, piece in enumerate(self.pieces):
            await self.held(index)
            yield event(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        await self.held(len(self.pieces))
        if self.drops:
            raise ConnectionAbortedError
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        count = len(self.pieces)
        yield event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count})
        yield "data: [DONE]\n\n"

    def start(self) -> None:
        """Serve; after the first time, at the same port as before."""
        config = uvicorn.Config(self.app(), port=self.port, log_config=None, log_level="critical", lifespan="off")
        self.server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def crash(self) -> None:
        """End as a killed process does: every connection is closed at once."""
        self.server.force_exit = self.server.should_exit = True
        for connection in list(self.server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        self.thread.join()
