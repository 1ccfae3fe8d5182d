"""The endpoints of OpenAI's API, answered by batchers."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any, Optional

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from common.errors import DataError
from inference.language_model import Prompt
from inference.sampling import Sampling
from serving.batcher import Batcher, Job
from serving.errors import ApiError
from serving.replies import CHAT, COMPLETION, Reply
from serving.schema import Asked, ChatAsked, CompletionAsked, parse

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
        """What clients are told of a model."""
        batcher = self.batcher(name)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "paddock",
                "chat": batcher.model.chat_format is not None, "context_length": batcher.length,
                "parameters": sum(parameter.numel() for parameter in batcher.model.model.parameters())}

    def batcher(self, name: str) -> Batcher:
        """The batcher of a model.

        Raises:
            ApiError: there is no such model.
        """
        if name not in self.batchers:
            raise ApiError(404, f"there is no model {name!r} here, but {', '.join(map(repr, self.batchers))}",
                           "model", "model_not_found")
        return self.batchers[name]

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        asked = parse(ChatAsked, await request.body())
        batcher = self.batcher(asked.model)
        if batcher.model.chat_format is None:
            raise ApiError(400, f"{asked.model} answers no chats: {batcher.model.why_no_chat}; use "
                                "/v1/completions", "model")
        batcher.check_room(1)
        # Rendered in this thread: only in the main one can the time of a template be limited. Meanwhile the
        # process may grow by 1 GiB at most, which is more than a step of an engine takes.
        try:
            encode = batcher.model.render_chat([message.model_dump() for message in asked.messages])
            prompt = await asyncio.to_thread(encode)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        limit = asked.max_completion_tokens or asked.max_tokens
        job = self.job(batcher, prompt, asked, limit, "messages")
        return Reply(batcher.submit([job], self.seconds), CHAT, asked)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        asked = parse(CompletionAsked, await request.body())
        batcher = self.batcher(asked.model)
        batcher.check_room(len(asked.prompt))
        prompts = await asyncio.to_thread(lambda: [*map(batcher.model.text_prompt, asked.prompt)])
        jobs = [self.job(batcher, prompt, asked, asked.max_tokens, "prompt") for prompt in prompts]
        return Reply(batcher.submit(jobs, self.seconds), COMPLETION, asked)

    def job(self, batcher: Batcher, prompt: Prompt, asked: Asked, limit: Optional[int], field: str) -> Job:
        """How to continue a prompt.

        Raises:
            ApiError: it is too long.
        """
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
