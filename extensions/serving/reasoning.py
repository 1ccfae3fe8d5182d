"""Reasoning in an answer, which models write between <think> and </think>."""

from extensions.inference.generate import TextChunk

THINK, THOUGHT = "<think>", "</think>"


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
