"""Exceptions about training data that a user can fix: a file, a line, a tokenizer, a cache."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError

SHOWN = 3
"""Number of problems that a message quotes, each with a line that has it. It counts the rest."""


class DataError(PenstockError):
    """Data that cannot be used for training."""


class SourceError(DataError):
    """A file or dataset that does not exist or has an unsupported format."""

    def __init__(self, source: str, problem: str) -> None:
        self.source, self.problem = source, problem
        super().__init__(f"{source}: {problem}")


class BadRecordError(DataError):
    """A record that is not a valid example. The reader adds the file and line number."""


class BadLinesError(DataError):
    """Lines that are not valid examples, with their file and line number."""

    def __init__(self, lines: Sequence[str], count: int) -> None:
        self.lines, self.count = tuple(lines), count
        groups = _by_problem(self.lines)
        shown = "".join(f"\n  {text}" for text, _ in groups[:SHOWN])
        rest = count - sum(number for _, number in groups[:SHOWN])
        more = f"\n  and {rest} more" if rest else ""
        noun = "line is" if count == 1 else "lines are"
        super().__init__(
            f"{count} {noun} not usable:{shown}{more}\n"
            f"Fix them, or pass --skip-bad-lines to train on the others"
        )


class EmptyDataError(DataError):
    """The data contains nothing to train on."""


class TokenizerError(DataError):
    """A tokenizer that is missing, or lacks something that the data needs."""


class NoChatTemplateError(TokenizerError):
    """The data contains chats, but the tokenizer has no chat template."""

    def __init__(self, tokenizer: str, where: str) -> None:
        self.tokenizer, self.where = tokenizer, where
        super().__init__(
            f"{where} is a chat, but {tokenizer} has no chat template. Use the tokenizer of the "
            f"instruction-tuned model, put its chat_template.jinja next to tokenizer.json, or "
            f"read other columns, such as --columns prompt=instruction,completion=output"
        )


class MaskError(BadRecordError):
    """A chat in which the assistant's turns cannot be located with certainty."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"the assistant's turns cannot be located: {problem}. Enclose the assistant's turns in "
            f"the chat template with {{% generation %}} and {{% endgeneration %}}"
        )


class CacheError(DataError):
    """A token cache that cannot be written, or that is damaged."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class NoCacheError(CacheError):
    """The directory of token caches cannot be created or written. Nothing was tokenized yet."""


class PositionError(DataError, ValueError):
    """A saved data position that belongs to other data or settings."""

    def __init__(self, field: str, *, saved: object, here: object) -> None:
        self.field, self.saved, self.here = field, saved, here
        super().__init__(
            f"the saved data position is for {field} {saved}, but this run has {here}; "
            f"resume with the same data and settings, or start from scratch"
        )


def _by_problem(lines: Sequence[str]) -> list[tuple[str, int]]:
    """Return one text for all lines with the same problem, and the number of these lines."""
    numbers: dict[str, int] = {}
    first: dict[str, str] = {}
    for line in lines:
        problem = line.partition(": ")[2]
        first.setdefault(problem, line)
        numbers[problem] = numbers.get(problem, 0) + 1
    return [
        (first[problem] + (f" (also {number - 1} other lines)" if number > 1 else ""), number)
        for problem, number in numbers.items()
    ]
