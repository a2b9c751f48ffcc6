"""Interpret a record as an example: a chat, a prompt with its completion, a text, or a pair.

This module normalizes the spellings in common use. Errors name the key that is missing or has the
wrong type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.data.errors import BadRecordError, DataError

ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot"), "assistant"),
    "observation": "tool",
}
"""ShareGPT's names of roles. Other names are passed to the chat template unchanged."""

CHAT_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", *ROLES})
"""Roles by which messages are told apart from other objects in a string of JSON."""

CHATS = ("messages", "conversations", "conversation")
"""Columns that hold the messages of a chat."""

COLUMNS = (
    *("messages", "text", "prompt", "completion", "instruction", "input", "output", "system"),
    *("history", "tools", "chosen", "rejected"),
)
"""Names of columns that have a meaning."""

EXPECTED_KEYS = (
    "messages, conversations, prompt and completion, instruction and output, or text; name other "
    "columns with --columns, such as --columns prompt=question,completion=answer"
)


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


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How records become examples."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of each name in `COLUMNS`, if it has another name. Then other columns are ignored."""

    pairs: bool = False
    """Whether a record is a preference pair: two examples, the chosen and the rejected one."""

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise DataError(
                    f"--columns: {name!r} has no meaning; the names are {', '.join(COLUMNS)}"
                )

    def identity(self) -> list[object]:
        """Return values that differ if records are read differently; empty by default."""
        columns = sorted(self.columns.items())
        return [columns, self.pairs] if columns or self.pairs else []

    def examples(self, record: Mapping[str, Any]) -> tuple[Example, ...]:
        """Interpret a record by its keys. Raises BadRecordError if it is not valid."""
        if self.columns:
            record = _renamed(record, self.columns)
        return _pair(record) if self.pairs else (_example(record),)


def _renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    for column in columns.values():
        if column not in record and column != columns.get("input"):
            raise BadRecordError(
                f"has no column {column!r}; it has {_found(record)} (--columns applies to every "
                f"source)"
            )
    return {name: record[column] for name, column in columns.items() if column in record}


def _found(record: Mapping[str, Any]) -> str:
    more = ", ..." if len(record) > 8 else ""
    return (", ".join(list(record)[:8]) or "no keys") + more


def _example(record: Mapping[str, Any]) -> Example:
    for key in CHATS:
        if key in record:
            return _chat(record, key)
    if "prompt" in record and "completion" in record:
        return _completion(record)
    if "instruction" in record and "output" in record:
        return _alpaca(record)
    if "text" in record:
        return Text(_nonempty_string(record["text"], "text"))
    if "chosen" in record and "rejected" in record:
        flag = "prompt=prompt,completion" if "prompt" in record else "messages"
        raise BadRecordError(
            f"is a preference pair, which is data for penstock.data.open_pairs; to train on the "
            f"chosen answers only, pass --columns {flag}=chosen"
        )
    chat = next((key for key, value in record.items() if _is_chat(value)), None)
    if chat is not None:
        raise BadRecordError(
            f"has {_found(record)}; to train on the chats in {chat!r}, pass --columns "
            f"messages={chat}"
        )
    raise BadRecordError(f"has {_found(record)}; expected {EXPECTED_KEYS}")


def _is_chat(value: object) -> bool:
    """Return whether a column holds messages, under a name that has no meaning."""
    try:
        _messages(value, "")
    except BadRecordError:
        return False
    return True


def _pair(record: Mapping[str, Any]) -> tuple[Example, ...]:
    """Return the chosen and the rejected example. Without a prompt, both are whole chats."""
    for key in ("chosen", "rejected"):
        if key not in record:
            raise BadRecordError(f"has {_found(record)}; expected chosen and rejected")
    if "prompt" not in record:
        return _chats_with_common_prompt(record)
    return tuple(_side(record, key) for key in ("chosen", "rejected"))


def _side(record: Mapping[str, Any], key: str) -> Example:
    """Return one example of a pair with a prompt, which the messages of the answer may repeat."""
    prompt, answer = _parsed(record["prompt"]), _parsed(record[key])
    if isinstance(prompt, str | list) and isinstance(answer, list):
        before, messages = _prompt_messages(prompt), _messages(answer, key)
        # A repeated prompt may begin with a system message that the prompt does not have.
        start = int(messages[0]["role"] == "system" != before[0]["role"])
        if messages[start : start + len(before)] == before:
            whole = _with_system(record, messages)
            first = start + len(before) + len(whole) - len(messages)
            return _as_chat(whole, record.get("tools"), first=first)
    rest = {name: record[name] for name in ("system", "tools") if name in record}
    return _completion({**rest, "prompt": prompt, "completion": answer})


def _chats_with_common_prompt(record: Mapping[str, Any]) -> tuple[Example, ...]:
    chats = [_messages(record[key], key) for key in ("chosen", "rejected")]
    same = 0
    for one, other in zip(*chats, strict=False):
        if one != other:
            break
        same += 1
    sides = []
    for chat in chats:
        messages = _with_system(record, chat)
        first = same + len(messages) - len(chat)
        sides.append(_as_chat(messages, record.get("tools"), first=first))
    return tuple(sides)


def _alpaca(record: Mapping[str, Any]) -> Chat:
    """Return Alpaca's columns as a chat: the input follows the instruction on a new line."""
    parts = [_nonempty_string(record["instruction"], "instruction")]
    if record.get("input"):
        parts.append(_nonempty_string(record["input"], "input"))
    messages = []
    history = record.get("history") or []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRecordError(f"history must be a list of pairs, got {history!r:.40}")
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    messages += [
        {"role": "user", "content": "\n".join(parts)},
        {"role": "assistant", "content": _nonempty_string(record["output"], "output")},
    ]
    return _chat({**record, "messages": messages}, "messages")


def _chat(record: Mapping[str, Any], key: str) -> Chat:
    messages = _with_system(record, _messages(record[key], key))
    return _as_chat(messages, record.get("tools"), first=0)


def _with_system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the record's system message before messages that have none."""
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRecordError(f"system must be a string, got {system!r:.40}")
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _completion(record: Mapping[str, Any]) -> Chat | Completion:
    prompt, completion = _parsed(record["prompt"]), _parsed(record["completion"])
    if isinstance(prompt, str | list) and isinstance(completion, list):
        before = _with_system(record, _prompt_messages(prompt))
        messages = [*before, *_messages(completion, "completion")]
        return _as_chat(messages, record.get("tools"), first=len(before))
    if not isinstance(prompt, str):
        raise BadRecordError(
            f"prompt must be a string, or a list of messages if completion is one; "
            f"got {prompt!r:.40}"
        )
    return Completion(prompt, _nonempty_string(completion, "completion"))


def _prompt_messages(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt. A string is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _messages(prompt, "prompt")


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
    value = _json_list(value)
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{key} must be a list of messages, got {value!r:.40}")
    return [_message(item, f"message {number} of {key}") for number, item in enumerate(value, 1)]


def _parsed(value: object) -> object:
    """Return messages that a string has as JSON. Other values are returned unchanged.

    A prompt or a completion may be JSON itself, such as a list of the names in a text.
    """
    parsed = _json_list(value)
    return parsed if isinstance(parsed, list) and parsed and _is_message(parsed[0]) else value


def _json_list(value: object) -> object:
    """Return the list that a CSV file or a column of text has as JSON; other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # a text that begins with a bracket
    return value


def _is_message(item: object) -> bool:
    """Return whether an object has the keys of a message and a role that chats have."""
    if not isinstance(item, Mapping):
        return False
    role = item.get("role", item.get("from"))
    return role in CHAT_ROLES and any(key in item for key in ("content", "value", "tool_calls"))


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
