"""Answer sample prompts during training, with the current weights."""

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
"""Minimum size of the KV cache. Small models have gradient buffers that are smaller than this."""

MOST_CONCURRENT = 8
"""Maximum number of prompts answered concurrently."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Prompts to answer at each evaluation."""

    requests: tuple[Request, ...]
    tokenizer: Any
    context: int
    """Maximum number of tokens in a prompt and its answer."""

    def generate(self, engine: Engine, nbytes: int) -> Iterator[dict[str, Any]]:
        """Answer each prompt with the engine's current weights, and yield complete answers.

        Weight buffers and KV cache use `nbytes` of device memory, which the engine lends from its
        gradient buffers, so that sampling stays within the budget of training. Prompts that do not
        fit concurrently are answered one after the other.
        """
        from penstock.generate.generator import Generator
        from penstock.generate.streamed_forward import engine_forward

        texts: dict[str | int, str] = {}
        with engine_forward(engine) as forward:
            budget = max(LEAST_CACHE, nbytes - forward.weights.nbytes)
            most = min(MOST_CONCURRENT, len(self.requests))
            with Generator(
                forward, budget=budget, max_batch=most, max_context=self.context,
                tokenizer=self.tokenizer,
            ) as generator:  # fmt: skip
                for piece in generator.run(self.requests):
                    texts[piece.request] = texts.get(piece.request, "") + piece.text
                    if piece.finished is not None:
                        yield self._answer(piece, texts[piece.request])

    def _answer(self, piece: Any, text: str) -> dict[str, Any]:
        given = self.requests[piece.request].prompt
        prompt = given if isinstance(given, str) else self.tokenizer.decode(given)
        error = None if piece.error is None else str(piece.error)
        return {"prompt": prompt, "text": text, "finished": piece.finished, "error": error}


def load_samples(settings: Settings, tokenizer: Any) -> Samples | None:
    """Read and check the sample prompts, if the settings name a file of them."""
    chosen = settings.evaluation
    if chosen.sample_prompts is None:
        return None
    from penstock.generate.prompts import Prompts
    from penstock.generate.requests import Request

    defaults = Request(prompt="-", max_new=chosen.sample_new, seed=settings.schedule.seed)
    requests = Prompts(tokenizer, defaults).from_file(Path(chosen.sample_prompts))
    numbered = tuple(replace(request, id=number) for number, request in enumerate(requests))
    return Samples(numbered, tokenizer, settings.data.chosen_context + chosen.sample_new)
