"""OpenAI's API, as far as it is supported: what can be asked, how it is answered, and the endpoints."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal, Optional, TypeVar
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from common.errors import DataError
from inference.engine import Sampling
from inference.text import Prompt
from serving.batcher import Answer, Batcher, Job
from serving.guard import ApiError

BODY_BYTES = 1 << 20
# What changes nothing is accepted, because clients send it by default.
NEUTRAL: Mapping[str, tuple] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "store": (False,), "service_tier": ("auto", "default")}
IGNORED = {"user", "metadata", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}


class Strict(BaseModel):
    """The base: no unknown fields, no conversions; null is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}


def as_text(content: Any) -> Any:
    """Return content parts as one text; what is no list, as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise ValueError('only parts {"type": "text", "text": ...} are supported')
    return "\n".join(texts)


class Message(Strict):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(as_text)]


class StreamOptions(Strict):
    """Of a stream."""

    include_usage: bool = False


def as_list(value: Any) -> Any:
    """Return a text as the only item of a list."""
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class Asked(Strict):
    """What chats and completions have in common."""

    model: str
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    max_tokens: Optional[int] = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: Optional[int] = Field(None, ge=-2**63, lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(as_list), Field(max_length=4)] = []


class ChatAsked(Asked):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Optional[int] = Field(None, ge=1)


class CompletionAsked(Asked):
    """The body of a request to /v1/completions."""

    prompt: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]


AnyAsked = TypeVar("AnyAsked", bound=Asked)


async def read(request: Request, schema: type[AnyAsked]) -> AnyAsked:
    """Return the request in a body. Raises ApiError, which names the first field that is wrong."""
    body = bytearray()
    try:
        if int(request.headers.get("content-length", "0")) <= BODY_BYTES:
            async for block in request.stream():
                body += block
                if len(body) > BODY_BYTES:
                    break
            else:
                return parse(bytes(body), schema)
    except ClientDisconnect as error:
        raise ApiError(499, "the client has left") from error
    raise ApiError(413, f"the body is larger than {BODY_BYTES} bytes")


def parse(body: bytes, schema: type[AnyAsked]) -> AnyAsked:
    """Return the request in a body. Raises ApiError, which names the first field that is wrong."""
    try:
        content = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    content = {name: value for name, value in content.items()
               if name not in IGNORED and value not in NEUTRAL.get(name, ())}
    try:
        asked = schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{field} is not supported here", field, "unsupported_parameter") from error
        why = first["msg"].removeprefix("Value error, ")
        why = why[:1].lower() + why[1:]
        raise ApiError(400, f"{field}: {why}", field) from error
    if asked.stream_options and not asked.stream:
        raise ApiError(400, "stream_options goes with stream", "stream_options")
    return asked


class Reply(Response):
    """The response of an answer; what is not finished when it ends, or when the client leaves, is cancelled.
    """

    def __init__(self, answer: Answer, asked: Asked):
        self.answer, self.asked, self.created = answer, asked, int(time.time())
        self.is_chat = isinstance(asked, ChatAsked)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self.answer:
            watching = asyncio.ensure_future(self.end_with_client(receive))
            try:
                if not self.asked.stream:
                    return await JSONResponse(await self.whole())(scope, receive, send)
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for data in self.events():
                    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(),
                                "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                watching.cancel()

    async def end_with_client(self, receive: Receive) -> None:
        """End the answer when the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.put(ApiError(499, "the client has left"))

    async def whole(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError if it cannot be finished."""
        texts, reasons = [""] * len(self.answer.jobs), [""] * len(self.answer.jobs)
        async for part in self.answer.parts():
            texts[part.index] += part.text
            reasons[part.index] = part.finish_reason
        choices = [*map(self.choice, range(len(texts)), texts, reasons)]
        return self.object(choices) | {"usage": self.answer.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of a stream's events; an error ends it."""
        def event(choices: list[dict[str, Any]], **fields: Any) -> str:
            return json.dumps(self.object(choices) | fields, ensure_ascii=False)

        try:
            if self.is_chat:
                opening = {"role": "assistant", "content": ""}
                yield event([self.choice(0, "", None) | {"delta": opening}])
            async for part in self.answer.parts():
                if part.text or part.finish_reason:
                    yield event([self.choice(part.index, part.text, part.finish_reason)])
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                yield event([], usage=self.answer.usage())
        except ApiError as error:
            yield json.dumps(error.body)
        else:
            yield "[DONE]"

    def object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of the API: an answer, or a chunk of it."""
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if self.asked.stream else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model,
                "choices": choices}

    def choice(self, index: int, text: str, reason: Optional[str]) -> dict[str, Any]:
        """A choice of such an object."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat and self.asked.stream:
            content = {"delta": {"content": text} if text else {}}
        elif self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, "finish_reason": reason, "logprobs": None, **content}


LEAST_TEMPERATURE = 1e-6  # below, the most likely token is certain, and logits would overflow


class Api:
    """The endpoints.

    Args:
        max_tokens: the most that one prompt is continued by.
        seconds: the longest time for a request.
    """

    def __init__(self, batchers: Mapping[str, Batcher], max_tokens: int, seconds: float):
        self.batchers, self.max_tokens, self.seconds = batchers, max_tokens, seconds
        self.started = int(time.time())

    async def health(self, request: Request) -> Response:
        """Say whether all models work."""
        if any(batcher.failed for batcher in self.batchers.values()):
            return JSONResponse({"status": "failing"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": [*map(self.describe, self.batchers)]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return JSONResponse(self.describe(request.path_params["name"]))

    def describe(self, name: str) -> dict[str, Any]:
        """A model as clients see it."""
        batcher = self.batcher(name)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "paddock",
                "chat": batcher.model.chat_format is not None, "context_length": batcher.length,
                "parameters": sum(parameter.numel() for parameter in batcher.model.model.parameters())}

    def batcher(self, name: str) -> Batcher:
        """The batcher of a model. Raises ApiError if there is no such model."""
        if name not in self.batchers:
            raise ApiError(404, f"there is no model {name!r} here, but {', '.join(map(repr, self.batchers))}",
                           "model", "model_not_found")
        return self.batchers[name]

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        asked = await read(request, ChatAsked)
        batcher = self.batcher(asked.model)
        if batcher.model.chat_format is None:
            raise ApiError(400, f"{asked.model} cannot answer chats: {batcher.model.why_no_chat}; use "
                                "/v1/completions", "model")
        batcher.check_room(1)
        try:
            messages = [message.model_dump() for message in asked.messages]
            prompt = await asyncio.to_thread(batcher.model.chat_prompt, messages)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        limit = asked.max_completion_tokens or asked.max_tokens
        job = self.job(batcher, prompt, asked, limit, "messages")
        return Reply(batcher.submit([job], self.seconds), asked)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        asked = await read(request, CompletionAsked)
        batcher = self.batcher(asked.model)
        batcher.check_room(len(asked.prompt))
        prompts = await asyncio.to_thread(lambda: [*map(batcher.model.text_prompt, asked.prompt)])
        jobs = [self.job(batcher, prompt, asked, asked.max_tokens, "prompt") for prompt in prompts]
        return Reply(batcher.submit(jobs, self.seconds), asked)

    def job(self, batcher: Batcher, prompt: Prompt, asked: Asked, limit: Optional[int], field: str) -> Job:
        """How to continue a prompt. Raises ApiError if it is too long."""
        room = batcher.length - len(prompt.ids)
        if room < 1:
            raise ApiError(400, f"{field}: the prompt has {len(prompt.ids)} tokens, but the context holds "
                                f"{batcher.length}, at least one of them for the answer", field,
                           "context_length_exceeded")
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        temperature = asked.temperature if asked.temperature >= LEAST_TEMPERATURE else 0.0
        sampling = Sampling(temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty,
                            seed)
        return Job(prompt, min(room, self.max_tokens, limit or room), sampling, asked.stop)
