"""The supported part of OpenAI's API: request schemas, responses and endpoints."""

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
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from common.errors import DataError
from data_pipeline.chats import messages_in, options_in, with_system
from extensions.inference.engine import Request, Sampling
from extensions.inference.text import UNKNOWN, Prompt, TextChunk, TextStream, note_of_controls
from extensions.serving.batcher import Answer, Batcher, Job
from extensions.serving.guard import ApiError

BODY_BYTES = 1 << 20
MAX_LOGPROBS = 20  # OpenAI's limit
# Values without effect count as absent: clients of OpenAI, vLLM and llama.cpp send them by default.
NEUTRAL: Mapping[str, tuple] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k", "seed", "n_predict"), (-1,)),
    **dict.fromkeys(("best_of", "repeat_penalty", "length_penalty", "typical_p", "tfs_z"), (1,)),
    **dict.fromkeys(("min_tokens", "mirostat", "top_a", "dry_multiplier", "xtc_probability"), (0,)),
    **dict.fromkeys(("echo", "store", "ignore_eos", "use_beam_search", "early_stopping",
                     "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens"), (True,)),
    **dict.fromkeys(("suffix", "stop"), ("",)),
    **dict.fromkeys(("verbosity", "reasoning_effort"), ("medium",)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "logit_bias": ({},), "modalities": (["text"],), "response_format": ({"type": "text"},),
    **dict.fromkeys(("cache_prompt", "parallel_tool_calls"), (True, False)),
    "service_tier": ("auto", "default")}
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
SERVED_BY_VLLM = {"response_format", "tools", "tool_choice", "functions", "function_call"}
THINK, THOUGHT = "<think>", "</think>"  # models write their reasoning between these
ADVICE = "; leave it out, or serve the model with vLLM, which has it"


class Strict(BaseModel):
    """Base of the schemas. Unknown fields and type conversions are errors; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}


def refuse_field(field: str) -> None:
    """Refuse an unknown field of a message. Those of its calls and content parts are ignored."""
    if field.count("[]") == 1:
        raise DataError(f"{field} is not supported")


class StreamOptions(Strict):
    """Options for streaming."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding


def as_list(value: Any) -> Any:
    """Return the texts of a list, or one text as a list, without empty ones."""
    values = [value] if isinstance(value, str) else value
    return [each for each in values if each != ""] if isinstance(values, list) else values


def as_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a completion, each a text or token ids."""
    def is_ids(each: Any) -> bool:
        return isinstance(each, list) and bool(each) and all(type(token) is int for token in each)

    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(each, str) or is_ids(each) for each in prompts):
        raise ValueError("expected a text, a list of token ids, or a list of these")
    return prompts


StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class RequestBody(Strict):
    """The fields that chats and completions share."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    max_tokens: Optional[int] = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: Optional[int] = Field(None, ge=-2**63, lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(as_list), Field(max_length=4)] = []


class ChatBody(RequestBody):
    """The body of a request to /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Optional[int] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(RequestBody):
    """The body of a request to /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(as_prompts), Field(min_length=1)]
    parse_special: bool = False
    logprobs: Annotated[Optional[int], BeforeValidator(lambda value: None if value is False else value),
                        Field(ge=0, le=MAX_LOGPROBS)] = None


AnyBody = TypeVar("AnyBody", bound=RequestBody)


async def read(request: HttpRequest, schema: type[AnyBody]) -> AnyBody:
    """Read and parse a request body. Raises ApiError, which names the first invalid field."""
    content = bytearray()
    try:
        if int(request.headers.get("content-length", "0")) <= BODY_BYTES:
            async for block in request.stream():
                content += block
                if len(content) > BODY_BYTES:
                    break
            else:
                return parse(bytes(content), schema)
    except ClientDisconnect as error:
        raise ApiError(499, "the client disconnected") from error
    raise ApiError(413, f"the body is larger than {BODY_BYTES} bytes")


def parse(content: bytes, schema: type[AnyBody]) -> AnyBody:
    """Parse a request body. Raises ApiError, which names the first invalid field."""
    try:
        fields = from_json(content)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {name: value for name, value in fields.items()
              if name not in IGNORED and value not in NEUTRAL.get(name, ())}
    try:
        body = schema.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            message = f"{field} is not supported" + ADVICE * (field in SERVED_BY_VLLM)
            raise ApiError(400, message, field, "unsupported_parameter") from error
        reason = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{field}: {reason[:1].lower()}{reason[1:]}", field) from error
    if body.stream_options and body.stream_options.include_usage and not body.stream:
        raise ApiError(400, "stream_options requires stream", "stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs", "top_logprobs")
    return body


class ReasoningReader:
    """Separates the reasoning at the beginning of a streamed answer, and holds back what may be a tag.

    Args:
        place: "start", "inside" the tags if the prompt opens them, or "content" if there are none.
    """

    def __init__(self, place: str):
        self._place, self._held = place, ""

    def add(self, chunk: TextChunk) -> tuple[TextChunk, str]:
        """Return a chunk without reasoning, and its reasoning."""
        text, reasoning, is_last = self._held + chunk.text, "", chunk.finish_reason is not None
        if self._place == "start" and (begun := text.lstrip()).startswith(THINK):
            self._place, text = "inside", begun.removeprefix(THINK)
        elif self._place == "start" and (is_last or not THINK.startswith(begun)):
            self._place = "content"
        if self._place == "inside":
            reasoning, tag, text = text.partition(THOUGHT)
            sizes = (size for size in range(len(THOUGHT)) if reasoning.endswith(THOUGHT[:size]))
            end = len(reasoning) - (0 if tag or is_last else max(sizes))
            reasoning, text = reasoning[:end], reasoning[end:] + text
            self._place = "content" if tag else "inside"
        self._held, text = ("", text) if is_last or self._place == "content" else (text, "")
        return chunk._replace(text=text), reasoning


class AnswerResponse(Response):
    """Sends an answer, and cancels it if the client disconnects."""

    def __init__(self, answer: Answer, body: RequestBody, model: str, place: str = "content"):
        self.answer, self.request_body, self.model = answer, body, model
        self.created = int(time.time())
        self.model_header = {MODEL_HEADER: quote(model, safe="/@")}
        self.is_chat = isinstance(body, ChatBody)
        self.readers = [ReasoningReader(place) for _ in answer.jobs]
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        self.warning = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.answer:
            watcher = asyncio.ensure_future(self.cancel_on_disconnect(receive))
            try:
                if not self.request_body.stream:
                    whole = JSONResponse(await self.whole(), headers=self.model_header)
                    return await whole(scope, receive, send)
                headers = Headers({"content-type": "text/event-stream; charset=utf-8", **self.model_header})
                await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
                async for data in self.events():
                    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(),
                                "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                watcher.cancel()

    async def cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.put(ApiError(499, "the client disconnected"))

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer. Raises ApiError if it cannot be finished."""
        whole = [TextChunk(index, "", 0, None) for index in range(len(self.answer.jobs))]
        reasoning = [""] * len(whole)
        async for chunk, thought in self.chunks():
            before = whole[chunk.index]
            whole[chunk.index] = chunk._replace(text=before.text + chunk.text,
                                               scores=[*before.scores, *chunk.scores])
            reasoning[chunk.index] += thought
        return self.object([*map(self.choice, whole, reasoning)]) | {
            "usage": self.answer.usage(self.request_body.n)}

    async def chunks(self) -> AsyncIterator[tuple[TextChunk, str]]:
        """Yield the chunks of the answer, each with its reasoning."""
        async for chunk in self.answer.chunks():
            yield self.readers[chunk.index].add(chunk)

    async def events(self) -> AsyncIterator[str]:
        def event(choices: list[dict[str, Any]], **fields: Any) -> str:
            return json.dumps(self.object(choices) | fields, ensure_ascii=False)

        try:
            for index in range(self.request_body.n if self.is_chat else 0):
                opening = {"role": "assistant", "content": ""}
                yield event([self.choice(TextChunk(index, "", 0, None)) | {"delta": opening}])
            async for chunk, reasoning in self.chunks():
                if chunk.text or chunk.finish_reason or chunk.scores or reasoning:
                    yield event([self.choice(chunk, reasoning)])
            if self.request_body.stream_options and self.request_body.stream_options.include_usage:
                yield event([], usage=self.answer.usage(self.request_body.n))
        except ApiError as error:
            yield json.dumps(error.body)
        else:
            yield "[DONE]"

    def object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if self.request_body.stream else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model,
                "choices": choices, **({"warning": self.warning} if self.warning else {})}

    def choice(self, chunk: TextChunk, reasoning: str = "") -> dict[str, Any]:
        content: dict[str, Any] = {"text": (text := chunk.text)}
        thought = {"reasoning_content": reasoning} if reasoning else {}
        if self.is_chat and self.request_body.stream:
            content = {"delta": ({"content": text} if text else {}) | thought}
        elif self.is_chat:
            content = {"message": {"role": "assistant", "content": text if text or not thought else None,
                                   "refusal": None, **thought}}
        return {"index": chunk.index, "finish_reason": chunk.finish_reason,
                "logprobs": self.logprobs(chunk) if chunk.scores else None, **content}

    def logprobs(self, chunk: TextChunk) -> dict[str, Any]:
        tokenizer = self.answer.batcher.model.tokenizer

        def entry(token: int, logprob: float) -> dict[str, Any]:
            # Decode after another token: some tokenizers drop the space before the first word.
            start = tokenizer.document_start_id
            text = tokenizer.decode([start, token])[len(tokenizer.decode([start])):]
            return {"token": text, "logprob": logprob,
                    "bytes": None if UNKNOWN in text else [*text.encode()]}

        entries = [entry(score.token, score.logprob) | {
            "top_logprobs": [entry(*likely) for likely in score.likeliest]} for score in chunk.scores]
        if self.is_chat:
            return {"content": entries, "refusal": None}
        return {"tokens": [each["token"] for each in entries],
                "token_logprobs": [each["logprob"] for each in entries],
                "top_logprobs": [{likely["token"]: likely["logprob"] for likely in each["top_logprobs"]}
                                 for each in entries]}


MODEL_HEADER = "x-paddock-model"  # the model that answered; a single model answers to any name
MIN_TEMPERATURE = 1e-6  # below this, or with such a top_p, decoding is greedy; logits would overflow


class Api:
    """The endpoints, with the limits of a completion and of a request's time."""

    def __init__(self, batchers: Mapping[str, Batcher], max_tokens: int, seconds: float):
        self.batchers, self.max_tokens, self.seconds = batchers, max_tokens, seconds
        self.started = int(time.time())

    async def health(self, request: HttpRequest) -> Response:
        if any(batcher.failed for batcher in self.batchers.values()):
            return JSONResponse({"status": "failing"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self.describe, self.batchers)]})

    async def model(self, request: HttpRequest) -> Response:
        return JSONResponse(self.describe(self.find(request.path_params["name"])))

    def describe(self, name: str) -> dict[str, Any]:
        batcher = self.batchers[name]
        return {"id": name, "object": "model", "created": self.started, "owned_by": "paddock",
                "source": batcher.model.name,
                "chat": batcher.model.chat_format is not None, "context_length": batcher.length,
                "max_tokens": min(batcher.length - 1, self.max_tokens), "prompts": batcher.model.prompts,
                "parameters": sum(parameter.numel() for parameter in batcher.model.model.parameters())}

    def find(self, name: str) -> str:
        """Return a model's id, given its id or the path on the command line; a single model has any name."""
        ids = [id for id, batcher in self.batchers.items()
               if len(self.batchers) == 1 or name in (id, batcher.model.name)]
        if not ids:
            raise ApiError(404, f"there is no model {name!r}; choose from {str([*self.batchers])[1:-1]}",
                           "model", "model_not_found")
        return ids[0]

    async def chat(self, request: HttpRequest) -> Response:
        body = await read(request, ChatBody)
        batcher = self.batchers[name := self.find(body.model)]
        if batcher.model.chat_format is None:
            reason = batcher.model.no_chat_reason
            raise ApiError(400, f"{name} cannot chat: {reason}; use /v1/completions", "model")
        batcher.check_room(body.n)
        try:
            # Clients send empty fields back, and null for an answer without words.
            messages = [{**({"content": ""} if message.get("role") == "assistant" else {}),
                         **{key: value for key, value in message.items() if value not in (None, [], {})}}
                        for message in body.messages]
            messages = messages_in("messages", messages, drop=refuse_field, may_be_blank=True)
            messages = with_system(messages, "")
            options = options_in(body.model_dump(), batcher.model.chat_format.fields)
            prompt = await asyncio.to_thread(batcher.model.chat_prompt, messages, options)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        limit = body.max_completion_tokens or body.max_tokens
        jobs = self.jobs(batcher, prompt, body, limit, "messages")
        place, tokenizer = "content", batcher.model.tokenizer
        if THINK in (tokenizer.chat_template or ""):
            place = "inside" if tokenizer.decode(prompt.ids[-8:]).rstrip().endswith(THINK) else "start"
        return AnswerResponse(batcher.submit(jobs, self.seconds), body, name, place)

    async def complete(self, request: HttpRequest) -> Response:
        body = await read(request, CompletionBody)
        batcher = self.batchers[name := self.find(body.model)]
        batcher.check_room(len(body.prompt) * body.n)
        texts, ids = ([each for each in body.prompt if isinstance(each, kind)] for kind in (str, list))
        size = batcher.model.model.vocab_size
        if unknown := [token for each in ids for token in each if not 0 <= token < size]:
            raise ApiError(400, f"prompt: {unknown[0]} is not a token id (0 to {size - 1})", "prompt")

        def encode() -> tuple[list[Prompt], str]:
            if body.parse_special:
                return [batcher.model.text_prompt(each, parse_special=True) for each in body.prompt], ""
            return [*map(batcher.model.text_prompt, body.prompt)], note_of_controls(
                batcher.model.tokenizer, texts, "; parse_special=true makes it one, or send token ids")

        prompts, warning = await asyncio.to_thread(encode)
        jobs = [job for prompt in prompts
                for job in self.jobs(batcher, prompt, body, body.max_tokens, "prompt")]
        response = AnswerResponse(batcher.submit(jobs, self.seconds), body, name)
        response.warning = warning
        return response

    def jobs(self, batcher: Batcher, prompt: Prompt, body: RequestBody, limit: Optional[int], field: str
             ) -> list[Job]:
        """Return `n` jobs for a prompt, with consecutive seeds. Raises ApiError if the prompt is too long."""
        room = batcher.length - len(prompt.ids)
        if room < 1:
            raise ApiError(400, f"{field}: the prompt has {len(prompt.ids)} tokens; the context has room for "
                                f"{batcher.length}, including at least one for the answer", field,
                           "context_length_exceeded")
        seed = secrets.randbits(32) if body.seed is None else body.seed
        is_greedy = min(body.temperature, body.top_p) < MIN_TEMPERATURE
        temperature, top_p = (0.0, 1.0) if is_greedy else (body.temperature, body.top_p)
        is_off = isinstance(body, ChatBody) and not body.logprobs
        top_logprobs = None if is_off else getattr(body, "top_logprobs", body.logprobs)
        sampling = Sampling(temperature, top_p, body.top_k, body.min_p, body.repetition_penalty,
                            seed, body.presence_penalty, body.frequency_penalty)
        return [(Request(prompt.ids, min(room, self.max_tokens, limit or room),
                         replace(sampling, seed=seed + copy), prompt.stop_ids, top_logprobs=top_logprobs),
                 TextStream(batcher.model.tokenizer, body.stop, prompt.prefix)) for copy in range(body.n)]
