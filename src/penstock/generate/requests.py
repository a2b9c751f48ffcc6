"""What is asked of a generator, what it answers, and what it refuses. Room: hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PenstockError

Reason = Literal["stop", "length", "context", "error"]
"""Why a request ended: a stop token or text, its max_new, the cache's context, a failure."""


class GenerationError(PenstockError):
    """A request that cannot be carried out, or a generator that cannot be made."""


class RequestError(GenerationError, ValueError):
    """A request that makes no sense."""

    def __init__(self, name: object, field: str, rule: str, got: object) -> None:
        self.request, self.field, self.got = name, field, got
        super().__init__(f"request {name}: {field} {rule}, got {got}")


class PromptTooLongError(GenerationError, ValueError):
    """No room for the prompt and one token more."""

    def __init__(self, name: object, *, wanted: int, limit: int, whose: str) -> None:
        self.request, self.wanted, self.limit = name, wanted, limit
        super().__init__(
            f"request {name}: the prompt has {wanted:,} tokens, and the {whose} ends at "
            f"{limit:,}, of which one is for the answer; shorten the prompt"
            + ("" if whose == "model" else ", or ask for a longer max_context")
        )


class QueueFullError(GenerationError):
    """More requests than may wait."""

    def __init__(self, name: object, limit: int) -> None:
        self.request, self.limit = name, limit
        super().__init__(
            f"request {name} refused: {limit:,} wait already; call step() until some have begun, "
            f"or make the generator with a longer queue="
        )


class NonFiniteLogitsError(GenerationError):
    """The model's answer is not a number."""

    def __init__(self, name: object, position: int) -> None:
        self.request, self.position = name, position
        super().__init__(
            f"request {name}: the model's scores for token {position:,} are not finite; its "
            f"weights are broken, or its type is too narrow (try --dtype fp32)"
        )


class NoRoomError(GenerationError, MemoryError):
    """A sequence that the whole cache cannot hold."""

    def __init__(self, name: object, *, tokens: int, wanted: int, budget: int) -> None:
        from penstock.units import format_bytes

        self.request, self.tokens, self.wanted, self.budget = name, tokens, wanted, budget
        super().__init__(
            f"request {name}: at {tokens:,} tokens it needs {format_bytes(wanted)} more, and the "
            f"cache's whole budget is {format_bytes(budget)}; raise --hbm, or shorten the prompt"
        )


class UnfitModelError(GenerationError):
    """A model whose attention cannot be replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, and how it is to be continued."""

    prompt: str | Sequence[int]
    """Text, if the generator has a tokenizer; else tokens."""
    id: str | int | None = None
    """What its pieces are marked with; None: its number."""
    max_new: int = 512
    """Tokens to make at most."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw among so many; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest that have this share together."""
    seed: int | None = None
    """Of its own draws, whatever runs beside it; None: from the generator's seed and its number."""
    stop: Sequence[str] = ()
    """Texts that end it; they are not part of the answer."""
    stop_tokens: Sequence[int] | None = None
    """Tokens that end it; None: the model's."""

    def check(self, name: object) -> None:
        """Raise RequestError for what makes no sense."""
        rules = (
            ("prompt", len(self.prompt) > 0, "must not be empty", self.prompt),
            ("max_new", self.max_new >= 1, "must be 1 or more", self.max_new),
            ("temperature", 0 <= self.temperature < 1e4, "must be 0 or more", self.temperature),
            ("top_k", self.top_k >= 0, "must be 0 or more", self.top_k),
            ("top_p", 0 < self.top_p <= 1, "must be above 0, and 1 at most", self.top_p),
            ("stop", all(self.stop), "must hold no empty text", list(self.stop)),
        )
        for field, fine, rule, got in rules:
            if not fine:
                raise RequestError(name, field, rule, got)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a request has got in one step."""

    request: str | int
    tokens: tuple[int, ...] = ()
    text: str = ""
    """What is certain of the text by now; empty without a tokenizer."""
    finished: Reason | None = None
    """Set on the request's last piece."""
    error: PenstockError | None = None
    """Why, where it has failed."""
