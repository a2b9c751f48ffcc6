"""Continuous batching: requests join and leave the batch at every step.

Prompts are read in chunks while other sequences decode, so that a long prompt delays them little.
What a request samples does not depend on which others run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from penstock.errors import PenstockError
from penstock.generate.forward import Forward, ForwardPass, ResidentForward, default_chunks
from penstock.generate.requests import (
    FinishReason,
    NonFiniteLogitsError,
    PromptTooLongError,
    Request,
    RequestError,
    TokenChunk,
)
from penstock.generate.sampling import Sampler, sample_tokens
from penstock.generate.scheduler import ActiveRequest, Scheduler
from penstock.generate.text_stream import TextStream
from penstock.kv.cache import VirtualCache
from penstock.model.rotary import shortest_switch

SWITCH = (
    ". From this length on, the model rotates keys with other frequencies (longrope), which those "
    "in the cache do not have; use model.generate() with one of transformers' own caches"
)

PEAK_INTERVAL = 256
"""Number of steps between counts of the cache's pages. With many pages, counting takes as long as
several tokens. Pages are also counted whenever a sequence ends, so that peaks are seen."""


@dataclass(slots=True)
class GenerationCounts:
    """Counters of a generator's work so far."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens that were not computed, because another request had the same beginning."""
    made_tokens: int = 0
    """Number of tokens generated."""
    steps: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    """How often a sequence was moved to host memory."""
    peak_bytes: int = 0
    """Most bytes that the cache had mapped, including pages ahead of need and kept for reuse."""
    peak_needed_bytes: int = 0
    """Most bytes that tokens needed."""
    peak_waste_bytes: int = 0
    """Bytes without a token in the pages that held those tokens."""

    @property
    def tokens_per_second(self) -> float:
        return self.made_tokens / self.seconds if self.seconds else 0.0

    @property
    def waste(self) -> float:
        """Share of the pages in use at the peak that held no token."""
        held = self.peak_needed_bytes + self.peak_waste_bytes
        return self.peak_waste_bytes / held if held else 0.0


class Generator:
    """Generates text for many requests concurrently, over one cache with a fixed budget.

    A generator must be used by one thread at a time.

    Args:
        model: A transformers model, or any object that runs forward passes.
        budget: Memory of the cache, such as `"8GiB"`, or a number of bytes.
        max_batch: Maximum number of sequences that run concurrently.
        max_context: Maximum number of tokens per sequence; by default the model's.
        prefill_chunk: Number of prompt tokens that a step reads; by default chosen by device.
        queue: Maximum number of waiting requests.
        tokenizer: Needed for prompts and stops that are text, and for text in the answers.
        seed: Random seed for requests without one.
        cache: A cache to use instead of creating one.
        graphs: False disables CUDA graphs.
        compiled: Compile the layers before the first token, which takes some seconds.
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
        self.forward: Forward = (
            ResidentForward(model, graphs, compiled=compiled) if resident else model
        )
        self.tokenizer, self.seed = tokenizer, seed
        config = self.forward.config
        text = config.get_text_config()
        self.model_limit: int | None = getattr(text, "max_position_embeddings", None)
        # Keys that are in the cache would have been rotated with other frequencies.
        self._switch = shortest_switch(text)
        if self._switch is not None:
            self.model_limit = min(self._switch, self.model_limit or self._switch)
        self.vocabulary = int(text.vocab_size)
        self.cache = cache or VirtualCache(
            config,
            max_batch=max_batch,
            max_context=max_context or self.model_limit or 4096,
            budget=budget,
            device=self.forward.device,
            dtype=self.forward.dtype,
        )
        self.counts = GenerationCounts()
        self._stop_tokens = find_stop_tokens(model, config)
        defaults = default_chunks(self.forward)
        chunks = (prefill_chunk, prefill_chunk) if prefill_chunk else defaults
        self._scheduler = Scheduler(self.cache, max_batch=max_batch, chunks=chunks, queue=queue)
        self._number = 0

    def submit(self, request: Request) -> str | int:
        """Put a request into the queue, and return the id that its chunks will have.

        Raises QueueFullError if too many requests wait, and RequestError or PromptTooLongError for
        a request that can never run.
        """
        name = self._number if request.id is None else request.id
        self._scheduler.submit(self._activate(name, request))
        self._number += 1
        return name

    def step(self) -> list[TokenChunk]:
        """Read a chunk of the waiting prompts, and generate one token for every other sequence."""
        started = time.monotonic()
        plan = self._scheduler.plan_step()
        chunks = [self._fail(active, error) for active, error in plan.failed]
        passes = [self._make_pass(count, members) for count, members in plan.groups]
        results = self.forward.forward(self.cache, passes) if passes else []
        for (count, members), scores in zip(plan.groups, results, strict=True):
            chunks += self._finish_pass(count, members, scores)
        if self.counts.steps % PEAK_INTERVAL == 0:
            self._update_peak()
        self.counts.steps += 1
        self.counts.preemptions = self._scheduler.preemptions
        self.counts.shared_tokens = self._scheduler.shared_tokens
        self.counts.seconds += time.monotonic() - started
        return chunks

    def run(self, requests: Iterable[Request | None]) -> Iterator[TokenChunk]:
        """Run requests, and yield their chunks as they are generated.

        Requests are taken from the iterable as there is room for them. A None among them means that
        no more are available yet. A request that cannot run ends with a chunk that has an error;
        the others continue.
        """
        source, more = iter(requests), True
        completed = False
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
                    yield from self._try_submit(request)
                yield from self.step()
            completed = True
        finally:
            if not completed:  # Ctrl-C, an error, or a caller that stops iterating
                self._scheduler.clear()

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return self._scheduler.idle

    def close(self) -> None:
        """Release the cache's memory."""
        self._scheduler.clear()
        if isinstance(self.forward, ResidentForward):
            self.forward.close()
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Accepting requests

    @property
    def _wants_more(self) -> bool:
        waiting = len(self._scheduler.waiting)
        return not self._scheduler.full and waiting < 2 * self._scheduler.max_batch

    def _try_submit(self, request: Request) -> Iterator[TokenChunk]:
        name = self._number if request.id is None else request.id
        try:
            self.submit(request)
        except PenstockError as error:
            self._number += 1
            yield TokenChunk(request=name, finished="error", error=error)

    def _activate(self, name: str | int, request: Request) -> ActiveRequest:
        request.check(name)
        tokens = self._tokenize(name, request)
        limits = {"model": self.model_limit, "cache": self.cache.max_cache_len}
        for whose, limit in limits.items():
            if limit is not None and len(tokens) >= limit:
                reason = SWITCH if whose == "model" and limit == self._switch else ""
                raise PromptTooLongError(
                    name, wanted=len(tokens), limit=limit, whose=whose, reason=reason
                )
        self.counts.prompt_tokens += len(tokens)
        stops = request.stop_tokens
        text = TextStream(self.tokenizer, request.stop) if self.tokenizer is not None else None
        if text is None and request.stop:
            raise RequestError(name, "stop", "needs a tokenizer=", list(request.stop))
        seed = f"{self.seed} {self._number}" if request.seed is None else request.seed
        return ActiveRequest(
            name=name,
            request=request,
            tokens=tokens,
            sampler=Sampler(request.temperature, request.top_k, request.top_p, seed),
            stop_tokens=self._stop_tokens if stops is None else frozenset(stops),
            text=text,
        )

    def _tokenize(self, name: str | int, request: Request) -> list[int]:
        if isinstance(request.prompt, str):
            if self.tokenizer is None:
                raise RequestError(name, "prompt", "is text, which needs a tokenizer=", "none")
            tokens = list(self.tokenizer(request.prompt, verbose=False)["input_ids"])
        else:
            tokens = list(request.prompt)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocabulary:
                rule = f"must contain tokens from 0 to {self.vocabulary - 1}"
                raise RequestError(name, "prompt", rule, token)
        return tokens

    # Computing

    def _make_pass(self, count: int, members: Sequence[ActiveRequest]) -> ForwardPass:
        lengths = [active.computed for active in members]
        tokens = [
            active.tokens[length : length + count]
            for active, length in zip(members, lengths, strict=True)
        ]
        return ForwardPass([active.sequence for active in members], tokens, lengths)

    def _finish_pass(
        self, count: int, members: Sequence[ActiveRequest], scores: torch.Tensor
    ) -> list[TokenChunk]:
        """Advance the cache, and sample a token for each request without pending tokens."""
        self.cache.advance([(active.sequence, count) for active in members])
        ready = [row for row, active in enumerate(members) if active.pending == 0]
        if not ready:
            return []
        ready_scores = scores if len(ready) == len(members) else scores[ready]
        tokens = sample_tokens(ready_scores, [members[row].sampler for row in ready])
        return [self._extend(members[row], token) for row, token in zip(ready, tokens, strict=True)]

    def _extend(self, active: ActiveRequest, token: int | None) -> TokenChunk:
        if token is None:
            return self._fail(active, NonFiniteLogitsError(active.name, len(active.tokens)))
        active.tokens.append(token)
        self.counts.made_tokens += 1
        text, reason = "", self._finish_reason(active, token)
        if active.text is not None:
            text = active.text.push(token) if token not in active.stop_tokens else ""
            if active.text.stopped:
                reason = "stop"
            if reason is not None:
                text += active.text.finish()
        if reason is not None:
            self._update_peak()
            self._scheduler.retire(active)
        return TokenChunk(request=active.name, tokens=(token,), text=text, finished=reason)

    def _finish_reason(self, active: ActiveRequest, token: int) -> FinishReason | None:
        if token in active.stop_tokens:
            return "stop"
        if active.generated >= active.request.max_new:
            return "length"
        limit = min(self.cache.max_cache_len, self.model_limit or self.cache.max_cache_len)
        return "context" if len(active.tokens) >= limit else None

    def _fail(self, active: ActiveRequest, error: PenstockError) -> TokenChunk:
        self._scheduler.retire(active)
        rest = active.text.finish() if active.text is not None else ""
        return TokenChunk(request=active.name, text=rest, finished="error", error=error)

    def _update_peak(self) -> None:
        stats, counts = self.cache.stats, self.counts
        counts.peak_bytes = max(counts.peak_bytes, stats.mapped_bytes)
        if stats.needed_bytes > counts.peak_needed_bytes:
            counts.peak_needed_bytes = stats.needed_bytes
            counts.peak_waste_bytes = stats.waste


def find_stop_tokens(model: Any, config: Any) -> frozenset[int]:
    """Return the tokens that end an answer, according to the model's configuration."""
    tokens = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if tokens is None:
        tokens = getattr(config, "eos_token_id", None)
    if tokens is None:
        return frozenset()
    return frozenset([tokens] if isinstance(tokens, int) else tokens)
