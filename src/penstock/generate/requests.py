"""Requests to a generator, the tokens it returns, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PenstockError
from penstock.units import format_bytes

FinishReason = Literal["stop", "length", "context", "error"]
"""Why a request ended: a stop token or text, its `max_new`, the maximum context, or an error."""


class GenerationError(PenstockError):
    """Base class of errors about requests, and about models that a generator cannot use."""


class RequestError(GenerationError, ValueError):
    """A request has an invalid field."""

    def __init__(self, name: object, field: str, rule: str, got: object) -> None:
        self.request, self.field, self.got = name, field, got
        super().__init__(f"request {name}: {field} {rule}, got {got}")


class PromptTooLongError(GenerationError, ValueError):
    """The prompt leaves no room for a single token of the answer."""

    def __init__(
        self, name: object, *, wanted: int, limit: int, whose: str, reason: str = ""
    ) -> None:
        self.request, self.wanted, self.limit = name, wanted, limit
        super().__init__(
            f"request {name}: the prompt has {wanted:,} tokens, but the {whose} supports "
            f"{limit:,}, including at least one for the answer; shorten the prompt"
            + ("" if whose == "model" else ", or set a larger max_context")
            + reason
        )


class QueueFullError(GenerationError):
    """The queue of waiting requests is full."""

    def __init__(self, name: object, limit: int) -> None:
        self.request, self.limit = name, limit
        super().__init__(
            f"request {name} was refused, because {limit:,} requests are waiting already; call "
            f"step() until some have started, or create the generator with a larger queue="
        )


class NonFiniteLogitsError(GenerationError):
    """The model computed scores that are infinite or not a number."""

    def __init__(self, name: object, position: int) -> None:
        self.request, self.position = name, position
        super().__init__(
            f"request {name}: the model's scores for token {position:,} are not finite; its "
            f"weights are damaged, or its dtype has too small a range (try --dtype fp32)"
        )


class NoRoomError(GenerationError, MemoryError):
    """The whole cache is too small for one sequence."""

    def __init__(self, name: object, *, tokens: int, wanted: int, budget: int) -> None:
        self.request, self.tokens, self.wanted, self.budget = name, tokens, wanted, budget
        super().__init__(
            f"request {name}: at {tokens:,} tokens it needs {format_bytes(wanted)} more, but the "
            f"cache's whole budget is {format_bytes(budget)}; raise --hbm, or shorten the prompt"
        )


class UnfitModelError(GenerationError):
    """Penstock cannot replace the model's attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt, and how to continue it."""

    prompt: str | Sequence[int]
    """Text, if the generator has a tokenizer, or tokens."""
    id: str | int | None = None
    """Identifies the request in the chunks it gets; by default its number."""
    max_new: int = 512
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """Sampling temperature. 0 always takes the most likely token."""
    top_k: int = 0
    """Sample among this many of the most likely tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the most likely tokens whose probabilities add up to this."""
    seed: int | None = None
    """Random seed of this request; by default derived from the generator's seed and the request's
    number. Samples do not depend on other requests in the batch."""
    stop: Sequence[str] = ()
    """Texts that end the answer. They are not part of it."""
    stop_tokens: Sequence[int] | None = None
    """Tokens that end the answer; by default the model's."""

    def check(self, name: object) -> None:
        """Raise RequestError if a field is invalid."""
        rules = (
            ("prompt", len(self.prompt) > 0, "must not be empty", self.prompt),
            ("max_new", self.max_new >= 1, "must be 1 or more", self.max_new),
            ("temperature", 0 <= self.temperature < 1e4, "must be 0 or more", self.temperature),
            ("top_k", self.top_k >= 0, "must be 0 or more", self.top_k),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1", self.top_p),
            ("stop", all(self.stop), "must not contain an empty text", list(self.stop)),
        )
        for field, valid, rule, got in rules:
            if not valid:
                raise RequestError(name, field, rule, got)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """The part of an answer that a request gets in one step."""

    request: str | int
    """The request's id."""
    tokens: tuple[int, ...] = ()
    """The new tokens."""
    text: str = ""
    """The text that can no longer change; empty without a tokenizer."""
    finished: FinishReason | None = None
    """Why the request ended; set in its last chunk."""
    error: PenstockError | None = None
    """The error, if the request failed."""
