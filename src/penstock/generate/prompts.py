"""Read prompts for `penstock generate` from the command line or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, RecordError
from penstock.generate.requests import Request
from penstock.records import parse


class PromptError(PenstockError):
    """A prompt cannot be used; the message says where it is."""

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "max_new": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int,),
    "stop": (list,),
}
"""The options that a line may set in addition to its prompt, and their types."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes requests from text and from chats."""

    tokenizer: Any
    defaults: Request
    """The values of options that a line does not set."""
    chat: bool = False
    """Whether every prompt is a message of a user in a chat."""

    def from_text(self, text: str, where: str = "--prompt") -> Request:
        """Make a request from text; `where` is named in errors."""
        if self.chat:
            return self.from_messages([{"role": "user", "content": text}], where)
        if not text:
            raise PromptError(where, "is empty")
        return replace(self.defaults, prompt=text)

    def from_messages(self, messages: Any, where: str) -> Request:
        """Make a request from the messages of a chat, with the tokenizer's chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError(
                where,
                "is a chat, but the model's tokenizer has no chat template; write the text as the "
                'model was trained on it: without --chat, as {"prompt": ...}',
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are programs, and raise any exception
            raise PromptError(where, f"the chat template refuses it: {error}") from error
        return replace(self.defaults, prompt=list(encoded["input_ids"]))

    def from_file(self, path: Path) -> Iterator[Request]:
        """Make a request from each line that is not empty, in order.

        All lines are read and checked before the first request is returned.
        """
        return iter([self._from_line(line, where) for where, line in read_lines(path)])

    def _from_line(self, line: Mapping[str, Any], where: str) -> Request:
        if ("prompt" in line) == ("messages" in line):
            raise PromptError(where, 'must have either "prompt" or "messages"')
        if "messages" in line:
            request = self.from_messages(line["messages"], where)
        elif isinstance(line["prompt"], str):
            request = self.from_text(line["prompt"], where)
        else:
            raise PromptError(where, f'"prompt" must be text, got {line["prompt"]!r}')
        options = {name: value for name, value in line.items() if name in _OPTION_TYPES}
        for name, value in options.items():
            types = _OPTION_TYPES[name]
            if isinstance(value, bool) or not isinstance(value, types):
                raise PromptError(where, f'"{name}" must be {types[-1].__name__}, got {value!r}')
        return replace(request, **options)


def read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each object in a JSON Lines file, after its file name and line number."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PromptError(str(path), "is not UTF-8 text") from None
    empty = True
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        empty, where = False, f"{path}:{number}"
        try:
            value = parse(line)
        except RecordError as error:
            raise PromptError(where, error.problem) from None
        if not isinstance(value, dict):
            raise PromptError(where, 'must be an object such as {"prompt": "..."}')
        yield where, value
    if empty:
        raise PromptError(str(path), "contains no prompts")
