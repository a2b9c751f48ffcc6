"""Interpret a record as an example: a chat, a prompt with its completion, or a text.

This module normalizes the spellings in common use. Errors name the key that is missing or has the
wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.data.errors import BadRecordError

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""ShareGPT's names of roles. Other names are passed to the chat template unchanged."""

EXPECTED_KEYS = "messages, conversations, prompt and completion, or text"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and for each whether it is trained. Only the assistant's messages can be."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages with `role` and `content`, in order."""

    trained: tuple[bool, ...]
    """Whether each message is trained."""

    tools: Sequence[Any] | None = None
    """Tools for the chat template."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, which is not trained, and a completion, which is."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is trained completely."""

    text: str


Example = Chat | Completion | Text


def read_example(record: Mapping[str, Any]) -> Example:
    """Interpret a record by its keys. Raises BadRecordError if it is not a valid example."""
    for key in ("messages", "conversations"):
        if key in record:
            return _chat(record, key)
    if "prompt" in record and "completion" in record:
        return _completion(record)
    if "text" in record:
        return Text(_nonempty_string(record["text"], "text"))
    keys = ", ".join(list(record)[:8]) or "no keys"
    raise BadRecordError(f"has {keys}; expected {EXPECTED_KEYS}")


def _chat(record: Mapping[str, Any], key: str) -> Chat:
    messages = _messages(record[key], key)
    if isinstance(record.get("system"), str) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": record["system"]}, *messages]
    return _as_chat(messages, record.get("tools"), first=0)


def _completion(record: Mapping[str, Any]) -> Chat | Completion:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        messages = [*before, *_messages(completion, "completion")]
        return _as_chat(messages, record.get("tools"), first=len(before))
    if not isinstance(prompt, str):
        raise BadRecordError(
            f"prompt must be a string, or a list of messages if completion is one; "
            f"got {prompt!r:.40}"
        )
    return Completion(prompt, _nonempty_string(completion, "completion"))


def _as_chat(messages: list[dict[str, Any]], tools: object, *, first: int) -> Chat:
    trained = tuple(
        message["role"] == "assistant" and number >= first and _weight(message, number)
        for number, message in enumerate(messages)
    )
    if not any(trained):
        raise BadRecordError("has no assistant turn to train on")
    if tools and not isinstance(tools, list):
        raise BadRecordError(f"tools must be a list, got {tools!r:.40}")
    return Chat(tuple(messages), trained, tools if isinstance(tools, list) and tools else None)


def _weight(message: dict[str, Any], number: int) -> bool:
    """Return whether an assistant turn is trained: `"weight": 0` excludes it."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise BadRecordError(f"message {number + 1} has weight {weight!r}; it must be 0 or 1")
    return bool(weight)


def _messages(value: object, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{key} must be a list of messages, got {value!r:.40}")
    return [_message(item, f"message {number} of {key}") for number, item in enumerate(value, 1)]


def _message(item: object, name: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRecordError(f"{name} must be an object, got {item!r:.40}")
    message = {key: value for key, value in item.items() if value is not None}
    for sharegpt_key, key in (("from", "role"), ("value", "content")):
        if key not in message and sharegpt_key in message:
            message[key] = message.pop(sharegpt_key)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRecordError(f"{name} has no role (or from)")
    message["role"] = ROLES.get(role, role)
    if "content" in message:
        message["content"] = _content(message["content"], name)
    elif "tool_calls" not in message:
        raise BadRecordError(f"{name} has no content (or value)")
    return message


def _content(content: object, name: str) -> str:
    """Return the content as a string. A list of parts is accepted if all of them are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise BadRecordError(f"the content of {name} must be text, got {content!r:.60}")


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _nonempty_string(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"{key} must be a string, got {value!r:.40}")
    if not value.strip():
        raise BadRecordError(f"{key} is empty")
    return value
