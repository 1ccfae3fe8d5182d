"""Answers in the shapes of OpenAI's API: whole, or as a stream of server-sent events."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Optional
from uuid import uuid4

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serving.batcher import Answer
from serving.errors import ApiError
from serving.schema import Asked


@dataclass(frozen=True)
class Shape:
    """How an endpoint answers."""

    prefix: str  # of ids
    whole: str  # the object's name
    chunk: str  # the name of an object of a stream
    content: Callable[[str, bool], dict]  # a choice's own fields, of its text and whether it is streamed
    opening: Optional[dict] = None  # the fields of a stream's first choice


def chat_content(text: str, streamed: bool) -> dict:
    """The own fields of a chat's choice."""
    if streamed:
        return {"delta": {"content": text} if text else {}}
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


CHAT = Shape("chatcmpl", "chat.completion", "chat.completion.chunk", chat_content,
             {"delta": {"role": "assistant", "content": ""}})
COMPLETION = Shape("cmpl", "text_completion", "text_completion", lambda text, streamed: {"text": text})


class Reply(Response):
    """The response of an answer; what is not finished when it ends is cancelled."""

    def __init__(self, answer: Answer, shape: Shape, asked: Asked):
        self.answer, self.shape, self.asked = answer, shape, asked
        self.id, self.created = f"{shape.prefix}-{uuid4().hex}", int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self.answer:
            if not self.asked.stream:
                return await JSONResponse(await self.whole())(scope, receive, send)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self.events():
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(),
                            "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def whole(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: it cannot be finished.
        """
        texts, reasons = [""] * len(self.answer.jobs), [""] * len(self.answer.jobs)
        async for piece in self.answer.pieces():
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.finish_reason
        choices = [choice(index, reason, self.shape.content(text, False))
                   for index, (text, reason) in enumerate(zip(texts, reasons))]
        return self.object(self.shape.whole, choices) | {"usage": self.answer.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of a stream's events; an error ends it."""
        try:
            async for content in self.chunks():
                yield json.dumps(content, ensure_ascii=False)
        except ApiError as error:
            yield json.dumps(error.body)
        else:
            yield "[DONE]"

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream.

        Raises:
            ApiError: it cannot be finished.
        """
        if self.shape.opening:
            yield self.object(self.shape.chunk, [choice(0, None, self.shape.opening)])
        async for piece in self.answer.pieces():
            if piece.text or piece.finish_reason:
                content = self.shape.content(piece.text, True)
                yield self.object(self.shape.chunk, [choice(piece.index, piece.finish_reason, content)])
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            yield self.object(self.shape.chunk, []) | {"usage": self.answer.usage()}

    def object(self, name: str, choices: list[dict]) -> dict[str, Any]:
        """An object of the API."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model,
                "choices": choices}


def choice(index: int, reason: Optional[str], content: dict) -> dict[str, Any]:
    """An object's choice."""
    return {"index": index, "finish_reason": reason, "logprobs": None, **content}
