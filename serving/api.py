"""OpenAI's API, as far as it is supported: what can be asked, how it is answered, and the endpoints."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Optional, TypeVar
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from common.errors import DataError
from inference.engine import Sampling
from inference.generate import Part
from inference.text import UNKNOWN, Prompt
from serving.batcher import Answer, Batcher, Job
from serving.guard import ApiError

BODY_BYTES = 1 << 20
MOST_LOGPROBS = 20  # as at OpenAI
# What changes nothing is accepted, because clients send it by default.
NEUTRAL: Mapping[str, tuple] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "tools": ([],),
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
    """Options of a stream."""

    include_usage: bool = False


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class Asked(Strict):
    """What chats and completions have in common."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    max_tokens: Optional[int] = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: Optional[int] = Field(None, ge=-2**63, lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(as_list), Field(max_length=4)] = []


class ChatAsked(Asked):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Optional[int] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)


class CompletionAsked(Asked):
    """The body of a request to /v1/completions."""

    prompt: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    logprobs: Annotated[Optional[int], BeforeValidator(lambda value: None if value is False else value),
                        Field(ge=0, le=MOST_LOGPROBS)] = None


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
    if isinstance(asked, ChatAsked) and asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs", "top_logprobs")
    return asked


class Reply(Response):
    """The response of an answer, which is cancelled if the client leaves."""

    def __init__(self, answer: Answer, asked: Asked, model: str):
        self.answer, self.asked, self.model, self.created = answer, asked, model, int(time.time())
        self.named = {MODEL_HEADER: quote(model, safe="/@")}
        self.is_chat = isinstance(asked, ChatAsked)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.answer:
            watching = asyncio.ensure_future(self.end_with_client(receive))
            try:
                if not self.asked.stream:
                    whole = JSONResponse(await self.whole(), headers=self.named)
                    return await whole(scope, receive, send)
                headers = Headers({"content-type": "text/event-stream; charset=utf-8", **self.named})
                await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
                async for data in self.events():
                    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(),
                                "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                watching.cancel()

    async def end_with_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.put(ApiError(499, "the client has left"))

    async def whole(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError if it cannot be finished."""
        whole = [Part(index, "", 0, None) for index in range(len(self.answer.jobs))]
        async for part in self.answer.parts():
            before = whole[part.index]
            whole[part.index] = part._replace(text=before.text + part.text,
                                              scores=[*before.scores, *part.scores])
        return self.object([*map(self.choice, whole)]) | {"usage": self.answer.usage(self.asked.n)}

    async def events(self) -> AsyncIterator[str]:
        def event(choices: list[dict[str, Any]], **fields: Any) -> str:
            return json.dumps(self.object(choices) | fields, ensure_ascii=False)

        try:
            for index in range(self.asked.n if self.is_chat else 0):
                opening = {"role": "assistant", "content": ""}
                yield event([self.choice(Part(index, "", 0, None)) | {"delta": opening}])
            async for part in self.answer.parts():
                if part.text or part.finish_reason or part.scores:
                    yield event([self.choice(part)])
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                yield event([], usage=self.answer.usage(self.asked.n))
        except ApiError as error:
            yield json.dumps(error.body)
        else:
            yield "[DONE]"

    def object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if self.asked.stream else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "choices": choices}

    def choice(self, part: Part) -> dict[str, Any]:
        content: dict[str, Any] = {"text": (text := part.text)}
        if self.is_chat and self.asked.stream:
            content = {"delta": {"content": text} if text else {}}
        elif self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": part.index, "finish_reason": part.finish_reason,
                "logprobs": self.logprobs(part) if part.scores else None, **content}

    def logprobs(self, part: Part) -> dict[str, Any]:
        """The log-probabilities of a part's tokens, in the format of chats or of completions."""
        tokenizer = self.answer.batcher.model.tokenizer

        def entry(token: int, logprob: float) -> dict[str, Any]:
            # After another token: some tokenizers take the space off the first word.
            start = tokenizer.document_start_id
            text = tokenizer.decode([start, token])[len(tokenizer.decode([start])):]
            return {"token": text, "logprob": logprob,
                    "bytes": None if UNKNOWN in text else [*text.encode()]}

        entries = [entry(score.token, score.logprob) | {
            "top_logprobs": [entry(*likely) for likely in score.likeliest]} for score in part.scores]
        if self.is_chat:
            return {"content": entries, "refusal": None}
        return {"tokens": [each["token"] for each in entries],
                "token_logprobs": [each["logprob"] for each in entries],
                "top_logprobs": [{likely["token"]: likely["logprob"] for likely in each["top_logprobs"]}
                                 for each in entries]}


MODEL_HEADER = "x-paddock-model"  # which model answered, as one that is alone answers to any name
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
        if any(batcher.failed for batcher in self.batchers.values()):
            return JSONResponse({"status": "failing"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self.describe, self.batchers)]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self.describe(self.find(request.path_params["name"])))

    def describe(self, name: str) -> dict[str, Any]:
        batcher = self.batchers[name]
        return {"id": name, "object": "model", "created": self.started, "owned_by": "paddock",
                "chat": batcher.model.chat_format is not None, "context_length": batcher.length,
                "max_tokens": min(batcher.length - 1, self.max_tokens), "prompts": batcher.model.prompts,
                "parameters": sum(parameter.numel() for parameter in batcher.model.model.parameters())}

    def find(self, name: str) -> str:
        """The id of a model, also by the path that was given. Raises ApiError if there is no such model."""
        ids = [id for id, batcher in self.batchers.items() if name in (id, batcher.model.name)]
        if not ids:
            raise ApiError(404, f"there is no model {name!r} here, but {', '.join(map(repr, self.batchers))}",
                           "model", "model_not_found")
        return ids[0]

    def asked_model(self, asked: Asked) -> tuple[str, Batcher]:
        """The id and the batcher of the model that answers; one that is alone answers to any name."""
        name = next(iter(self.batchers)) if len(self.batchers) == 1 else self.find(asked.model)
        return name, self.batchers[name]

    async def chat(self, request: Request) -> Response:
        asked = await read(request, ChatAsked)
        name, batcher = self.asked_model(asked)
        if batcher.model.chat_format is None:
            raise ApiError(400, f"{name} cannot answer chats: {batcher.model.why_no_chat}; use "
                                "/v1/completions", "model")
        batcher.check_room(asked.n)
        try:
            messages = [message.model_dump() for message in asked.messages]
            prompt = await asyncio.to_thread(batcher.model.chat_prompt, messages)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        limit = asked.max_completion_tokens or asked.max_tokens
        jobs = self.jobs(batcher, prompt, asked, limit, "messages")
        return Reply(batcher.submit(jobs, self.seconds), asked, name)

    async def complete(self, request: Request) -> Response:
        asked = await read(request, CompletionAsked)
        name, batcher = self.asked_model(asked)
        batcher.check_room(len(asked.prompt) * asked.n)
        prompts = await asyncio.to_thread(lambda: [*map(batcher.model.text_prompt, asked.prompt)])
        jobs = [job for prompt in prompts
                for job in self.jobs(batcher, prompt, asked, asked.max_tokens, "prompt")]
        return Reply(batcher.submit(jobs, self.seconds), asked, name)

    def jobs(self, batcher: Batcher, prompt: Prompt, asked: Asked, limit: Optional[int], field: str
             ) -> list[Job]:
        """How to continue a prompt, `n` times with seeds that count up. Raises ApiError if it is too long."""
        room = batcher.length - len(prompt.ids)
        if room < 1:
            raise ApiError(400, f"{field}: the prompt has {len(prompt.ids)} tokens, but the context holds "
                                f"{batcher.length}, at least one of them for the answer", field,
                           "context_length_exceeded")
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        temperature = asked.temperature if asked.temperature >= LEAST_TEMPERATURE else 0.0
        top = asked.logprobs
        if isinstance(asked, ChatAsked):
            top = asked.top_logprobs if asked.logprobs else None
        sampling = Sampling(temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty,
                            seed, asked.presence_penalty, asked.frequency_penalty)
        return [Job(prompt, min(room, self.max_tokens, limit or room), replace(sampling, seed=seed + copy),
                    asked.stop, top) for copy in range(asked.n)]
