"""Decode tokens into text as they are generated, and detect stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""What a tokenizer returns for a character whose last bytes are still missing."""


class TextStream:
    """The text of one answer.

    Text that could still change is held back: half a character, and what may turn out to be the
    beginning of a stop text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._first = 0
        """Where decoding starts: one token early, as the text of a token can depend on the one
        before it."""
        self._decoded = 0
        """Number of tokens whose text is complete."""
        self._held = ""
        self.stopped = False
        """Whether a stop text appeared."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that can no longer change."""
        self._tokens.append(token)
        before = self._decode(self._first, self._decoded)
        now = self._decode(self._first, len(self._tokens))
        if now.endswith(INCOMPLETE) or len(now) <= len(before):
            return ""
        self._first, self._decoded = self._decoded, len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """End the answer, and return the text that was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._first, self._decoded)
        rest = self._decode(self._first, len(self._tokens))[len(before) :]
        text = self._release(rest)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, low: int, high: int) -> str:
        return str(
            self._tokenizer.decode(
                self._tokens[low:high], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, text: str) -> str:
        """Return the text before a stop, or before what may become one, and hold the rest back."""
        text = self._held + text
        stops = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if stops:
            self.stopped, self._held = True, ""
            return text[: min(stops)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may begin the stop text."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
