"""What can be asked: OpenAI's API, as far as it is supported."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from serving.errors import ApiError

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


def parse(schema: type[AnyAsked], body: bytes) -> AnyAsked:
    """Return the request in a body.

    Raises:
        ApiError: it is none; the first field that is wrong is named.
    """
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

