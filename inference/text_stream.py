"""The text of tokens as they come."""

from collections.abc import Sequence
from typing import Any

# Tokens that are decoded at once. The last four bytes decide how a byte is read in UTF-8, and the first token
# of a text may lose its space: a window of a few tokens decides as the whole text does.
WINDOW = 16
UNKNOWN = "\ufffd"  # what bytes that are not, or not yet, UTF-8 decode to


class TextStream:
    """Turns new tokens into text, up to the first stop string.

    All pieces together are `tokenizer.decode` of all tokens, cut before the stop string. Text that may still
    change is held back: incomplete UTF-8, and what may begin a stop string. A token's cost does not grow with
    the text.

    Args:
        stop: strings that end the text, which they do not belong to; the first that is complete counts.
        after: the tokens of the text that is continued. Without them some tokenizers take the space off the
            first word.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), after: Sequence[int] = ()):
        assert all(stop), "an empty string would stop everything"
        self._tokenizer, self._stop = tokenizer, stop
        self.stopped = False  # a stop string was found: what follows is dropped
        first = max(0, len(after) - WINDOW // 2)
        while first and after[first] in tokenizer.byte_fallback_ids:
            first -= 1
        self._window = list(after[first:])  # the newest tokens
        self._read = len(tokenizer.decode(self._window))  # the characters of the window's text that are done
        self._held = ""  # which may begin a stop string

    def add(self, token: int) -> str:
        """Return the text that is certain with this token and was not before."""
        self._window.append(int(token))
        # How a run of these decodes depends on its last one.
        if self.stopped or token in self._tokenizer.byte_fallback_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text) - text.endswith(UNKNOWN)
        piece, unread = text[self._read:certain], len(text) - max(certain, self._read)
        if len(self._window) > WINDOW:
            del self._window[:-WINDOW // 2]
            text = self._tokenizer.decode(self._window)
        self._read = len(text) - unread
        return self._until_stop(piece)

    def finish(self) -> str:
        """Return the rest, at the end of the tokens."""
        text = self._until_stop(self._tokenizer.decode(self._window)[self._read:])
        rest, self._held = self._held, ""
        return text + rest

    def _until_stop(self, piece: str) -> str:
        """Return the text before a stop string, without what may begin one."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped, self._held = bool(found), ""
        if found:
            return text[:min(found)[1]]
        held = max((length for stop in self._stop for length in range(1, len(stop))
                    if text.endswith(stop[:length])), default=0)
        self._held = text[len(text) - held:]
        return text[:len(text) - held]
