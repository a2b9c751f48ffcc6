"""Continuous batching: requests come and go at every step. Room: hold.

Prompts are read in chunks beside the tokens that others make, so that a long prompt delays them
little; what a request draws does not depend on what ran beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from penstock.errors import PenstockError
from penstock.generate.forward import Forward, Pass, Resident, usual_chunks
from penstock.generate.requests import (
    NonFiniteLogitsError,
    Piece,
    PromptTooLongError,
    Reason,
    Request,
    RequestError,
)
from penstock.generate.sampling import Draws, pick
from penstock.generate.scheduler import Live, Scheduler
from penstock.generate.text_stream import TextStream
from penstock.kv.cache import VirtualCache

LOOK = 256
"""Steps between looks at the cache's pages, which takes as long as several tokens where there are
many. It is also looked at whenever a sequence ends, so that peaks are seen."""


@dataclass(slots=True)
class Counts:
    """What a generator has done so far."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    """Of those, not computed again: another request had the same beginning."""
    made_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    peak_bytes: int = 0
    """The most that the cache has had mapped, ahead of need and for reuse included."""
    peak_needed_bytes: int = 0
    """The most that tokens have taken."""
    peak_waste_bytes: int = 0
    """What the pages of those tokens held beside them."""

    @property
    def tokens_per_second(self) -> float:
        return self.made_tokens / self.seconds if self.seconds else 0.0

    @property
    def waste(self) -> float:
        """The share of those pages that held no token."""
        held = self.peak_needed_bytes + self.peak_waste_bytes
        return self.peak_waste_bytes / held if held else 0.0


class Generator:
    """Generates for many requests at once, over one cache of a fixed budget.

    `model` is a transformers model, or anything that carries passes out. `prefill_chunk` is how
    many prompt tokens a step reads; None: by the device. With `graphs` False tokens are made
    without CUDA graphs; with `compiled` by layers that are compiled before the first one, which
    takes some seconds. Not for several threads.
    """

    def __init__(
        self,
        model: Any,
        *,
        budget: int | str = "1GiB",
        max_batch: int = 8,
        max_context: int | None = None,
        prefill_chunk: int | None = None,
        queue: int = 1024,
        tokenizer: Any = None,
        seed: int = 0,
        cache: VirtualCache | None = None,
        graphs: bool | None = None,
        compiled: bool = False,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise RequestError("of the generator", name, "must be 1 or more", value)
        resident = isinstance(model, torch.nn.Module)
        self.forward: Forward = Resident(model, graphs, compiled=compiled) if resident else model
        self.tokenizer, self.seed = tokenizer, seed
        config = self.forward.config
        text = config.get_text_config()
        self.model_limit: int | None = getattr(text, "max_position_embeddings", None)
        self.vocabulary = int(text.vocab_size)
        self.cache = cache or VirtualCache(
            config,
            max_batch=max_batch,
            max_context=max_context or self.model_limit or 4096,
            budget=budget,
            device=self.forward.device,
            dtype=self.forward.dtype,
        )
        self.counts = Counts()
        self._stop_tokens = stop_tokens_of(model, config)
        usual = usual_chunks(self.forward)
        chunks = (prefill_chunk, prefill_chunk) if prefill_chunk else usual
        self._scheduler = Scheduler(self.cache, max_batch=max_batch, chunks=chunks, queue=queue)
        self._number = 0

    # Asking.

    def submit(self, request: Request) -> str | int:
        """Put a request into the queue; what its pieces will be marked with. Raises QueueFullError
        when too many wait, and RequestError or PromptTooLongError for what can never run."""
        name = self._number if request.id is None else request.id
        self._scheduler.submit(self._live(name, request))
        self._number += 1
        return name

    def step(self) -> list[Piece]:
        """Read a part of the prompts that wait and make one token for each that is past its own."""
        began = time.monotonic()
        turn = self._scheduler.turn()
        pieces = [self._fail(live, error) for live, error in turn.failed]
        passes = [self._pass(count, members) for count, members in turn.groups]
        found = self.forward.forward(self.cache, passes) if passes else []
        for (count, members), scores in zip(turn.groups, found, strict=True):
            pieces += self._after(count, members, scores)
        if self.counts.steps % LOOK == 0:
            self._note_peak()
        self.counts.steps += 1
        self.counts.preemptions = self._scheduler.preemptions
        self.counts.shared_tokens = self._scheduler.shared_tokens
        self.counts.seconds += time.monotonic() - began
        return pieces

    def run(self, requests: Iterable[Request | None]) -> Iterator[Piece]:
        """All of them, their pieces as they come. Requests are taken as there is room for them; a
        None among them says that no more are there yet. One that cannot run ends with a piece
        that has an error, and the others go on."""
        source, more = iter(requests), True
        ended = False
        try:
            while more or not self._scheduler.idle:
                while more and self._wants_more:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        break
                    if request is None:
                        break
                    yield from self._try(request)
                yield from self.step()
            ended = True
        finally:
            if not ended:  # Ctrl-C, an error, or a caller who has had enough
                self._scheduler.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._scheduler.idle

    def close(self) -> None:
        """Give the cache's memory back."""
        self._scheduler.clear()
        if isinstance(self.forward, Resident):
            self.forward.close()
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Coming.

    @property
    def _wants_more(self) -> bool:
        waiting = len(self._scheduler.waiting)
        return not self._scheduler.full and waiting < 2 * self._scheduler.max_batch

    def _try(self, request: Request) -> Iterator[Piece]:
        name = self._number if request.id is None else request.id
        try:
            self.submit(request)
        except PenstockError as refused:
            self._number += 1
            yield Piece(request=name, finished="error", error=refused)

    def _live(self, name: str | int, request: Request) -> Live:
        request.check(name)
        tokens = self._tokens(name, request)
        limits = {"cache": self.cache.max_cache_len, "model": self.model_limit}
        for whose, limit in limits.items():
            if limit is not None and len(tokens) >= limit:
                raise PromptTooLongError(name, wanted=len(tokens), limit=limit, whose=whose)
        self.counts.prompt_tokens += len(tokens)
        stops = request.stop_tokens
        text = TextStream(self.tokenizer, request.stop) if self.tokenizer is not None else None
        if text is None and request.stop:
            raise RequestError(name, "stop", "needs a tokenizer=", list(request.stop))
        seed = f"{self.seed} {self._number}" if request.seed is None else request.seed
        return Live(
            name=name,
            request=request,
            tokens=tokens,
            draws=Draws(request.temperature, request.top_k, request.top_p, seed),
            stop_tokens=self._stop_tokens if stops is None else frozenset(stops),
            text=text,
        )

    def _tokens(self, name: str | int, request: Request) -> list[int]:
        if isinstance(request.prompt, str):
            if self.tokenizer is None:
                raise RequestError(name, "prompt", "is text, which needs a tokenizer=", "none")
            tokens = list(self.tokenizer(request.prompt, verbose=False)["input_ids"])
        else:
            tokens = list(request.prompt)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocabulary:
                rule = f"must be tokens from 0 to below {self.vocabulary}"
                raise RequestError(name, "prompt", rule, token)
        return tokens

    # Computing.

    def _pass(self, count: int, members: Sequence[Live]) -> Pass:
        lengths = [live.done for live in members]
        tokens = [
            live.tokens[done : done + count] for live, done in zip(members, lengths, strict=True)
        ]
        return Pass([live.sequence for live in members], tokens, lengths)

    def _after(self, count: int, members: Sequence[Live], scores: torch.Tensor) -> list[Piece]:
        """Count what was read; whoever has read all of it gets a token."""
        self.cache.advance([(live.sequence, count) for live in members])
        ready = [row for row, live in enumerate(members) if live.pending == 0]
        if not ready:
            return []
        some = scores if len(ready) == len(members) else scores[ready]
        tokens = pick(some, [members[row].draws for row in ready])
        return [self._extend(members[row], token) for row, token in zip(ready, tokens, strict=True)]

    def _extend(self, live: Live, token: int | None) -> Piece:
        if token is None:
            return self._fail(live, NonFiniteLogitsError(live.name, len(live.tokens)))
        live.tokens.append(token)
        self.counts.made_tokens += 1
        text, reason = "", self._reason(live, token)
        if live.text is not None:
            text = live.text.push(token) if token not in live.stop_tokens else ""
            if live.text.stopped:
                reason = "stop"
            if reason is not None:
                text += live.text.finish()
        if reason is not None:
            self._note_peak()
            self._scheduler.retire(live)
        return Piece(request=live.name, tokens=(token,), text=text, finished=reason)

    def _reason(self, live: Live, token: int) -> Reason | None:
        if token in live.stop_tokens:
            return "stop"
        if live.made >= live.request.max_new:
            return "length"
        limit = min(self.cache.max_cache_len, self.model_limit or self.cache.max_cache_len)
        return "context" if len(live.tokens) >= limit else None

    def _fail(self, live: Live, error: PenstockError) -> Piece:
        self._scheduler.retire(live)
        rest = live.text.finish() if live.text is not None else ""
        return Piece(request=live.name, text=rest, finished="error", error=error)

    def _note_peak(self) -> None:
        stats, counts = self.cache.stats, self.counts
        counts.peak_bytes = max(counts.peak_bytes, stats.mapped_bytes)
        if stats.needed_bytes > counts.peak_needed_bytes:
            counts.peak_needed_bytes = stats.needed_bytes
            counts.peak_waste_bytes = stats.waste


def stop_tokens_of(model: Any, config: Any) -> frozenset[int]:
    """What ends an answer, by the model's own word."""
    told = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if told is None:
        told = getattr(config, "eos_token_id", None)
    if told is None:
        return frozenset()
    return frozenset([told] if isinstance(told, int) else told)
