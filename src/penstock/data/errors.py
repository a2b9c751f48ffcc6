"""What can be wrong with training data. Room: show.

Each is for the user to mend: a file, a line, a tokenizer, a cache directory.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError

SHOWN = 3
"""Bad lines that a message quotes. The rest are counted."""


class DataError(PenstockError):
    """Data that cannot be trained on as it is."""


class SourceError(DataError):
    """A file or dataset that is not there, or not of a kind that can be read."""

    def __init__(self, source: str, problem: str) -> None:
        self.source, self.problem = source, problem
        super().__init__(f"{source}: {problem}")


class BadRecordError(DataError):
    """One line that is no example. Those who read lines add where it was."""


class BadLinesError(DataError):
    """Lines that are no examples, with file and line number."""

    def __init__(self, lines: Sequence[str], count: int) -> None:
        self.lines, self.count = tuple(lines), count
        shown = "".join(f"\n  {line}" for line in self.lines[:SHOWN])
        more = f"\n  and {count - SHOWN} more" if count > SHOWN else ""
        noun = "line is" if count == 1 else "lines are"
        super().__init__(
            f"{count} {noun} not usable:{shown}{more}\n"
            f"Mend them, or pass --skip-bad-lines to train on the others"
        )


class EmptyDataError(DataError):
    """Nothing to train on is left."""


class TokenizerError(DataError):
    """A tokenizer that is missing, or lacks what the data needs."""


class NoChatTemplateError(TokenizerError):
    """Chats, and a tokenizer that does not say how to write them down."""

    def __init__(self, tokenizer: str, where: str) -> None:
        self.tokenizer, self.where = tokenizer, where
        super().__init__(
            f"{where} is a chat, but {tokenizer} has no chat template. Use the "
            f"instruction-tuned model's tokenizer, or put its chat_template.jinja next to "
            f"tokenizer.json, or write the data as prompt and completion"
        )


class MaskError(BadRecordError):
    """A chat in which the assistant's words could not be told from the rest beyond doubt."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"the assistant's turns cannot be found: {problem}. Put the chat template's assistant "
            f"turns between {{% generation %}} and {{% endgeneration %}}"
        )


class CacheError(DataError):
    """A token cache that cannot be written, or turned out damaged while it was in use."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class PositionError(DataError, ValueError):
    """A position to go on from that was saved on other data or settings."""

    def __init__(self, field: str, *, saved: object, here: object) -> None:
        self.field, self.saved, self.here = field, saved, here
        super().__init__(
            f"the saved data position is for {field} {saved}, this run has {here}; "
            f"resume with the same data and settings, or start over without the position"
        )
