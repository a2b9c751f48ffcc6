"""A chat as the model's own template writes it, and which characters are trained. Room: show.

Two ways to find the assistant's words. Where the template marks them with `{% generation %}`, its
author has said which they are. Else the chat is written turn by turn: what the template adds after
its own invitation to answer, up to the end of that turn, is the answer. Both are checked against
the whole text; where the check fails there is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.data.errors import BadRecordError, MaskError, TokenizerError
from penstock.data.examples import Chat

_MARK = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


class ChatWriter:
    """Writes chats with one tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        try:
            self._template = str(tokenizer.get_chat_template())
        except ValueError as wrong:  # several templates, and none of them is the default
            raise TokenizerError(f"no chat template can be chosen: {wrong}") from None
        self._special = dict(tokenizer.special_tokens_map)
        self._ends = tuple(
            word for word in tokenizer.get_added_vocab() if word and word == word.strip()
        )
        self.is_marked = bool(_MARK.search(self._template))

    def write(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text, and the spans of it that are trained, in order."""
        self._check_tools(chat)
        text, marked = self._render(chat.messages, chat.tools)
        find = self._by_marks if self.is_marked else self._by_turns
        spans = find(chat, text, marked)
        if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
            raise MaskError("two of them overlap in the text")
        return text, spans

    def leaves_end_open(self, text: str, spans: Sequence[Span]) -> bool:
        """A trained turn stops just before the token that ends it, which is then not learnt."""
        return any(
            text.startswith(self._ends, end) and not text[start:end].endswith(self._ends)
            for start, end in spans
        )

    def _check_tools(self, chat: Chat) -> None:
        uses = {"tools": bool(chat.tools)}
        uses["tool_calls"] = any("tool_calls" in message for message in chat.messages)
        for key, is_used in uses.items():
            if is_used and key not in self._template:
                raise BadRecordError(f"has {key}, which the chat template does not write")

    def _by_marks(self, chat: Chat, text: str, marked: list[Span]) -> list[Span]:
        spans = [(start, end) for start, end in marked if start < end]
        speaking = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if len(spans) != len(speaking):
            raise MaskError(
                f"the template marks {len(spans)} spans for {len(speaking)} assistant's turns"
            )
        for (start, end), number in zip(spans, speaking, strict=True):
            # The last line: a template may leave out what the assistant thought before it spoke.
            lines = str(chat.messages[number].get("content", "")).strip().splitlines()
            if lines and lines[-1].strip() not in text[start:end]:
                raise MaskError(
                    f"what the template marks for message {number + 1} does not hold its words"
                )
        return [span for span, n in zip(spans, speaking, strict=True) if chat.trained[n]]

    def _by_turns(self, chat: Chat, text: str, _: list[Span]) -> list[Span]:
        spans = []
        for number, is_trained in enumerate(chat.trained):
            if is_trained:
                start, end = self._turn(chat, number, text)
                spans.append((start, self._without_tail(text, start, end)))
        return spans

    def _turn(self, chat: Chat, number: int, text: str) -> Span:
        """The span of one turn of the assistant."""
        before, _ = self._render(chat.messages[:number], chat.tools, invite=True)
        through = text
        if number + 1 < len(chat.messages):
            through, _ = self._render(chat.messages[: number + 1], chat.tools)
        if not (text.startswith(before) and through.startswith(before)):
            raise MaskError(
                f"the text before message {number + 1}, written alone, is not how the chat begins"
            )
        if text.startswith(through):
            return len(before), len(through)
        # Some templates write the last turn otherwise than those before it, with an empty place for
        # thoughts for instance. The words and what ends the turn must still be there to the letter.
        content = str(chat.messages[number].get("content", ""))
        for words in (content, content.strip()):
            _, found, ending = through[len(before) :].rpartition(words) if words else ("", "", "")
            if found and text.startswith(words + ending, len(before)):
                return len(before), len(before) + len(words) + len(ending)
        raise MaskError(f"message {number + 1} is written otherwise when other turns follow it")

    def _without_tail(self, text: str, start: int, end: int) -> int:
        """The end without blanks after an end-of-turn token: generation stops before them."""
        bare = text[start:end].rstrip()
        return start + len(bare) if bare.endswith(self._ends) else end

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, *, invite: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                return_assistant_tokens_mask=self.is_marked,
                add_generation_prompt=invite,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as refused:
            raise BadRecordError(f"the chat template refuses it: {refused}") from None
        texts, marked = found
        return str(texts[0]), [(int(start), int(end)) for start, end in marked[0]] if marked else []
