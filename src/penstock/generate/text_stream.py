"""Text from tokens as they come, and the texts that end it. Room: hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a tokenizer writes for a character whose last bytes are still to come."""


class TextStream:
    """The text of one answer. What could still change is held back: half a character, and what may
    turn out to be the beginning of a stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._from = 0
        """Where decoding begins: a token's text can depend on the one before it."""
        self._told = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What is certain of the text after this token."""
        self._tokens.append(token)
        before = self._decode(self._from, self._told)
        now = self._decode(self._from, len(self._tokens))
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._from, self._told = self._told, len(self._tokens)
        return self._sift(now[len(before) :])

    def finish(self) -> str:
        """What was held back; the answer has ended."""
        if self.stopped:
            return ""
        before = self._decode(self._from, self._told)
        rest = self._decode(self._from, len(self._tokens))[len(before) :]
        told = self._sift(rest)
        if not self.stopped:
            told, self._held = told + self._held, ""
        return told

    def _decode(self, low: int, high: int) -> str:
        return str(
            self._tokenizer.decode(
                self._tokens[low:high], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _sift(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may begin the stop."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
