"""Prompts for `penstock generate`, from the command line or a file. Room: show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.generate.requests import Request


class PromptError(PenstockError):
    """A prompt that cannot be used, and where it is."""

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "max_new": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int,),
    "stop": (list,),
}
"""What a line may say beside its prompt."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """How text becomes a request."""

    tokenizer: Any
    defaults: Request
    """Whatever a line does not say."""
    chat: bool = False
    """Every prompt is a user's turn."""

    def of_text(self, text: str, where: str = "--prompt") -> Request:
        if self.chat:
            return self.of_turns([{"role": "user", "content": text}], where)
        if not text:
            raise PromptError(where, "is empty")
        return replace(self.defaults, prompt=text)

    def of_turns(self, turns: Any, where: str) -> Request:
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError(
                where,
                "is a chat, and the model's tokenizer has no chat template; give the text as the "
                'model knows it: without --chat, as {"prompt": ...}',
            )
        try:
            found = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as wrong:  # templates are programs: they raise what they like
            raise PromptError(where, f"the chat template refuses it: {wrong}") from wrong
        return replace(self.defaults, prompt=list(found["input_ids"]))

    def of_file(self, path: Path) -> Iterator[Request]:
        """One request for each line that is not empty, in their order. Checked before any runs."""
        return iter([self._of_line(line, where) for where, line in read_lines(path)])

    def _of_line(self, line: Mapping[str, Any], where: str) -> Request:
        if ("prompt" in line) == ("messages" in line):
            raise PromptError(where, 'must have either "prompt" or "messages"')
        if "messages" in line:
            request = self.of_turns(line["messages"], where)
        elif isinstance(line["prompt"], str):
            request = self.of_text(line["prompt"], where)
        else:
            raise PromptError(where, f'"prompt" must be text, got {line["prompt"]!r}')
        told = {name: value for name, value in line.items() if name in _KINDS}
        for name, value in told.items():
            kinds = _KINDS[name]
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise PromptError(where, f'"{name}" must be {kinds[-1].__name__}, got {value!r}')
        return replace(request, **told)


def read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line of a JSON lines file, and where it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PromptError(str(path), "is not UTF-8 text") from None
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        found, where = True, f"{path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as wrong:
            raise PromptError(where, f"is not JSON ({wrong})") from None
        if not isinstance(value, dict):
            raise PromptError(where, 'must be an object such as {"prompt": "..."}')
        yield where, value
    if not found:
        raise PromptError(str(path), "holds no prompts")
