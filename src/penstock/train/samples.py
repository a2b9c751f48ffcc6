"""What the model answers while it is trained. Room: show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.settings import Settings
from penstock.units import MiB

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.generate.requests import Request

LEAST_CACHE = 64 * MiB
"""Where a model's gradient buffers are less than this, as those of small models are."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Prompts, ready."""

    requests: tuple[Request, ...]
    tokenizer: Any
    context: int

    def answers(self, engine: Engine, room: int) -> Iterator[dict[str, Any]]:
        """One for each prompt, as the engine's weights are now, whole ones only. Slots and cache
        take `room` bytes of the device, which the engine lends, so that the budget of training
        holds; what does not fit at once is answered in turn."""
        from penstock.generate.generator import Generator
        from penstock.generate.streamed_forward import engine_forward

        told: dict[str | int, str] = {}
        with engine_forward(engine) as forward:
            budget = max(LEAST_CACHE, room - forward.weights.nbytes)
            most = min(8, len(self.requests))
            with Generator(
                forward, budget=budget, max_batch=most, max_context=self.context,
                tokenizer=self.tokenizer,
            ) as generator:  # fmt: skip
                for piece in generator.run(self.requests):
                    told[piece.request] = told.get(piece.request, "") + piece.text
                    if piece.finished is not None:
                        yield self._answer(piece, told[piece.request])

    def _answer(self, piece: Any, text: str) -> dict[str, Any]:
        asked = self.requests[piece.request].prompt
        prompt = asked if isinstance(asked, str) else self.tokenizer.decode(asked)
        error = None if piece.error is None else str(piece.error)
        return {"prompt": prompt, "text": text, "finished": piece.finished, "error": error}


def find_samples(settings: Settings, tokenizer: Any) -> Samples | None:
    """Read and checked before the first step."""
    if settings.evaluation.sample_prompts is None:
        return None
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Request

    defaults = Request(
        prompt="-", max_new=settings.evaluation.sample_new, seed=settings.schedule.seed
    )
    asked = Prompts(tokenizer, defaults).from_file(Path(settings.evaluation.sample_prompts))
    numbered = tuple(replace(request, id=at) for at, request in enumerate(asked))
    return Samples(numbered, tokenizer, settings.data.context + settings.evaluation.sample_new)
