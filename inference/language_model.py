"""A model with its tokenizer, as what answers texts and chats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Optional

from common.errors import DataError
from data_pipeline.chat_templates import ChatFormat, Messages, TemplateFormat, load_chat_format
from model import Transformer
from tokenizer import CHAT_TEMPLATE


class Prompt(NamedTuple):
    """What a model continues."""

    ids: Sequence[int]
    stop_ids: frozenset[int]  # that end the continuation
    after: Sequence[int] = ()  # the tokens of the text that is continued; none before an answer in a chat


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    """The prompt that continues a text."""
    ids = [tokenizer.document_start_id, *tokenizer.encode(text)]
    return Prompt(ids, frozenset((tokenizer.eos_id, tokenizer.document_start_id)), ids)


@dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer."""

    name: str  # as it was named by the user
    model: Transformer
    tokenizer: Any
    context_length: int  # in tokens, that it was trained on
    pretrained_only: bool = False  # it has seen no chats, whatever template its tokenizer has

    @cached_property
    def _chat(self) -> ChatFormat | TemplateFormat | DataError:
        if self.pretrained_only:
            return DataError("it was pretrained only, and has seen no chats")
        # Llama 3's format would fit the tokenizer of its base model too, which has no template.
        if getattr(self.tokenizer, "chat_template", CHAT_TEMPLATE) is None:
            return DataError("its tokenizer has no chat template")
        try:
            return load_chat_format(self.tokenizer)
        except DataError as error:
            return error

    @property
    def chat_format(self) -> Optional[ChatFormat | TemplateFormat]:
        """How it writes chats; None if it only continues texts, for the reason `why_no_chat`."""
        return None if isinstance(self._chat, DataError) else self._chat

    @property
    def why_no_chat(self) -> str:
        """Why it only continues texts; empty if it answers chats."""
        return str(self._chat) if isinstance(self._chat, DataError) else ""

    def text_prompt(self, text: str) -> Prompt:
        """The prompt that continues a text."""
        return text_prompt(self.tokenizer, text)

    def chat_prompt(self, messages: Messages) -> Prompt:
        """The prompt that answers a chat."""
        return self.render_chat(messages)()

    def render_chat(self, messages: Messages) -> Callable[[], Prompt]:
        """Render a chat; return the function that encodes it as a prompt, for any thread."""
        if self.chat_format is None:
            raise DataError(f"{self.name} answers no chats, it continues texts: {self.why_no_chat}")
        encode = self.chat_format.render_prompt(messages)
        return lambda: Prompt(encode(), self.chat_format.stop_ids)
