"""A conversation with a model: its turns, and the prompt that they make within the model's context."""

from dataclasses import dataclass, field
from typing import Any

from common.errors import DataError
from inference.language_model import LanguageModel, Prompt


@dataclass
class Turn:
    """What the user wrote, and what the model answered."""

    words: str
    answer: str = ""  # a turn without one is left out of what follows
    ended: bool = False  # by the model; not by a limit, a stop string or the user


@dataclass
class Conversation:
    """Turns with a model.

    A model that answers no chats continues one text, to which both write in turns. Where the model ends it,
    the next turn begins a new one.
    """

    model: LanguageModel
    system: str = ""  # the system prompt, of a model that answers chats
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0  # for which the context has no room: the oldest turns, or tokens of a text

    def prompt(self, room: int) -> Prompt:
        """Return what the model continues to answer the last turn.

        The oldest turns are left out, but not the system prompt, until the prompt and `room` new tokens fit
        into the context; of a text, its beginning.

        Raises:
            DataError: the last turn alone is too long, or the chat template refuses the chat.
        """
        most, last = self.model.context_length - room, len(self.turns) - 1
        if self.model.chat_format is None:
            ids, stop_ids, _ = self.model.text_prompt(self._texts()[-1])
            self.left_out = max(0, len(ids) - most)
            ids = [*ids[:1], *ids[1 + self.left_out:]]
            return Prompt(ids, stop_ids, ids)
        self.left_out = min(self.left_out, last)
        while True:
            prompt = self.model.chat_prompt(self._messages(self.turns[self.left_out:]))
            if len(prompt.ids) <= most:
                return prompt
            if self.left_out == last:
                raise DataError(f"that is too long: {len(prompt.ids):,} tokens with the system prompt and "
                                f"the chat's format; the context has room for {most:,} and an answer")
            self.left_out += 1

    def records(self) -> list[dict[str, Any]]:
        """Return it as records for training: a chat for `load_instruct_dataset.py`, or texts."""
        if self.model.chat_format is None:
            return [{"text": text} for text in self._texts() if text]
        messages = self._messages([turn for turn in self.turns if turn.answer.strip()])
        return [{"messages": messages}] if messages[-1:] and messages[-1]["role"] == "assistant" else []

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            if turn.answer.strip() or turn is turns[-1]:
                messages.append({"role": "user", "content": turn.words})
            if turn.answer.strip():
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _texts(self) -> list[str]:
        texts, ended = [""], False
        for turn in self.turns:
            if ended:
                texts.append("")
            between = " " if texts[-1][-1:].strip() and turn.words[:1].strip() else ""
            texts[-1] += between + turn.words + turn.answer
            ended = turn.ended
        return texts
