"""Render chats with the model's chat template, and locate the characters that are trained.

If the template marks the assistant's turns with `{% generation %}`, the marks are used. Otherwise
the chat is rendered turn by turn: the trained text is what the template adds after its generation
prompt, up to the end of that turn. Both results are checked against the complete text. If the check
fails, it is an error; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.data.errors import BadRecordError, MaskError, TokenizerError
from penstock.data.examples import Chat

_MARK = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")

_REASONING_END = "</think>"
_REASONING_START = re.compile(r"<think>\s*$")

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WrittenChat:
    """A chat as text."""

    text: str
    spans: tuple[Span, ...]
    """The trained characters, in order."""

    drops_reasoning: bool
    """Whether the template removed reasoning from a trained turn."""


class ChatWriter:
    """Renders chats with the template of one tokenizer, and locates the trained text."""

    def __init__(self, tokenizer: Any) -> None:
        try:
            self._template = str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates, none of them the default
            raise TokenizerError(f"the tokenizer has no default chat template: {error}") from None
        self._special = dict(tokenizer.special_tokens_map)
        # Any special token may end a turn: templates do not say which one does.
        self._end_tokens = tuple(
            word for word in tokenizer.get_added_vocab() if word and word == word.strip()
        )
        self.is_marked = bool(_MARK.search(self._template))

    def write(self, chat: Chat) -> WrittenChat:
        """Render a chat, and locate its trained spans."""
        self._check_tools(chat)
        text, marked = self._render(chat.messages, chat.tools)
        find = self._spans_by_marks if self.is_marked else self._spans_by_turns
        spans = find(chat, text, marked)
        if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
            raise MaskError("two of them overlap in the text")
        trained = [
            m for m, is_trained in zip(chat.messages, chat.trained, strict=True) if is_trained
        ]
        dropped = any(
            _reasoning(message) not in text[start:end]
            for message, (start, end) in zip(trained, spans, strict=True)
        )
        return WrittenChat(text, tuple(spans), dropped)

    def leaves_end_open(self, text: str, spans: Sequence[Span]) -> bool:
        """Return whether a trained span excludes the end-of-turn token that follows it."""
        return any(
            text.startswith(self._end_tokens, end)
            and not text[start:end].endswith(self._end_tokens)
            for start, end in spans
        )

    def _check_tools(self, chat: Chat) -> None:
        uses = {"tools": bool(chat.tools)}
        uses["tool_calls"] = any("tool_calls" in message for message in chat.messages)
        for key, is_used in uses.items():
            if is_used and key not in self._template:
                raise BadRecordError(f"has {key}, which the chat template does not support")

    def _spans_by_marks(self, chat: Chat, text: str, marked: list[Span]) -> list[Span]:
        spans = [(start, end) for start, end in marked if start < end]
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if len(spans) != len(turns):
            raise MaskError(
                f"the template marks {len(spans)} spans for {len(turns)} assistant turns"
            )
        for (start, end), number in zip(spans, turns, strict=True):
            # Check the last line only: a template may remove the reasoning before the answer.
            lines = str(chat.messages[number].get("content", "")).strip().splitlines()
            if lines and lines[-1].strip() not in text[start:end]:
                raise MaskError(
                    f"the span that the template marks for message {number + 1} does not "
                    f"contain its content"
                )
        return [span for span, n in zip(spans, turns, strict=True) if chat.trained[n]]

    def _spans_by_turns(self, chat: Chat, text: str, _: list[Span]) -> list[Span]:
        spans = []
        for number, is_trained in enumerate(chat.trained):
            if is_trained:
                start, end = self._locate_turn(chat, number, text)
                spans.append((start, self._strip_blanks_after_end(text, start, end)))
        return spans

    def _locate_turn(self, chat: Chat, number: int, text: str) -> Span:
        """Locate one assistant turn by rendering the chat up to it and through it."""
        before, _ = self._render(chat.messages[:number], chat.tools, generation_prompt=True)
        through = text
        if number + 1 < len(chat.messages):
            through, _ = self._render(chat.messages[: number + 1], chat.tools)
        if through.startswith(before) and not text.startswith(before):
            # The generation prompt opens a block for reasoning, and the template removes the block
            # from all turns but the last.
            before = _REASONING_START.sub("", before)
        if not (text.startswith(before) and through.startswith(before)):
            raise MaskError(
                f"the chat does not begin with the text before message {number + 1} rendered alone"
            )
        if text.startswith(through):
            return len(before), len(through)
        # Some templates render the last turn differently: only there they keep the reasoning, or
        # add an empty block for it. The answer and the end of the turn must still match exactly.
        content = str(chat.messages[number].get("content", ""))
        answer_only = content.rpartition(_REASONING_END)[2]
        for answer in (content, content.strip(), answer_only, answer_only.strip()):
            _, found, ending = through[len(before) :].rpartition(answer) if answer else ("", "", "")
            if found and text.startswith(answer + ending, len(before)):
                return len(before), len(before) + len(answer) + len(ending)
        if not answer_only.strip():  # a turn that only calls tools
            for rest in _without_reasoning(through[len(before) :]):
                if text.startswith(rest, len(before)):
                    return len(before), len(before) + len(rest)
        raise MaskError(f"message {number + 1} is rendered differently when other turns follow it")

    def _strip_blanks_after_end(self, text: str, start: int, end: int) -> int:
        """Exclude blanks after an end-of-turn token from the span: generation stops before them."""
        bare = text[start:end].rstrip()
        return start + len(bare) if bare.endswith(self._end_tokens) else end

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                return_assistant_tokens_mask=self.is_marked,
                add_generation_prompt=generation_prompt,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise BadRecordError(f"the chat template rejects it: {error}") from None
        texts, marked = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in marked[0]] if marked else []


def _without_reasoning(turn: str) -> list[str]:
    """Return what follows the reasoning of a rendered turn, with fewer and fewer leading blanks."""
    _, found, rest = turn.partition(_REASONING_END)
    bare = rest.lstrip()
    if not (found and bare):
        return []
    return [rest[start:] for start in range(len(rest) - len(bare) + 1)]


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the last line of a turn's reasoning; "" if it has none."""
    inside, end, _ = str(message.get("content", "")).rpartition(_REASONING_END)
    text = inside if end else str(message.get("reasoning_content") or message.get("thinking") or "")
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
