"""Decide which requests run in the next step, and which wait.

Older requests have priority. A sequence that lacks memory takes it from those admitted after it,
youngest first. These move to host memory and come back when another sequence has ended. So the
oldest sequence always continues, and every sequence ends: no two of them can preempt each other
forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.generate.requests import NoRoomError, QueueFullError, Request
from penstock.generate.sampling import Sampler
from penstock.generate.text_stream import TextStream
from penstock.kv.errors import CacheFull, NoSlot

MIN_SHARED_TOKENS = 32
"""Number of tokens that two prompts must have in common for sharing to be worth the remapping."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that waits or runs."""

    name: str | int
    """The request's id."""
    request: Request
    tokens: list[int]
    """The prompt, and the tokens generated so far."""
    sampler: Sampler
    stop_tokens: frozenset[int]
    text: TextStream | None
    prompt: int = field(init=False)
    """Number of tokens in the prompt."""
    sequence: Any = None
    """The request's sequence in the cache, once it is admitted."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def computed(self) -> int:
        """Number of tokens whose keys and values are in the cache."""
        return 0 if self.sequence is None else int(self.sequence.length)

    @property
    def pending(self) -> int:
        """Number of tokens that the model has yet to read: one, once the prompt is read."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt


Failure = tuple[ActiveRequest, PenstockError]
"""A request that cannot continue, and why."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step."""

    groups: Sequence[tuple[int, Sequence[ActiveRequest]]]
    """Requests that read the same number of tokens, and so run together, after that number."""
    failed: Sequence[Failure]


class Scheduler:
    """Keeps the queue of requests and the cache's sequences.

    `chunks` are the numbers of prompt tokens that a step reads while other sequences decode, and
    while none does. `queue` is the maximum number of waiting requests.
    """

    def __init__(self, cache: Any, *, max_batch: int, chunks: tuple[int, int], queue: int) -> None:
        self.cache, self.max_batch = cache, max_batch
        self.chunks, self.queue = chunks, queue
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        """Requests whose sequences are in the cache, oldest first."""
        self.preempted: list[ActiveRequest] = []
        """Requests whose sequences are in host memory, oldest first."""
        self.preemptions = 0
        self.shared_tokens = 0
        self._crowded = False
        """Whether a sequence lacked memory in the last step."""
        self._ended = False
        """Whether a sequence has ended since the last attempt to restore one."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self.waiting or self.running or self.preempted)

    @property
    def full(self) -> bool:
        """Whether submit() would refuse a request."""
        return len(self.waiting) >= self.queue

    def submit(self, active: ActiveRequest) -> None:
        """Put a request into the queue."""
        if self.full:
            raise QueueFullError(active.name, self.queue)
        self.waiting.append(active)

    def plan_step(self) -> StepPlan:
        """Decide what the next step computes, and prepare the cache for it."""
        failed = [*self._restore(), *self._admit()]
        wants = self._collect_wants()
        self._crowded = False
        try:
            self.cache.prepare([(active.sequence, count) for active, count in wants])
        except CacheFull:
            wants, lacking = self._prepare_by_age(wants)
            failed += lacking
        groups: dict[int, list[ActiveRequest]] = {}
        for active, count in wants:
            groups.setdefault(count, []).append(active)
        # In the order of slots, so that the cache has to move as few rows as possible.
        ordered = [
            (count, sorted(members, key=lambda active: int(active.sequence.slot)))
            for count, members in sorted(groups.items())
        ]
        return StepPlan(ordered, failed)

    def retire(self, active: ActiveRequest) -> None:
        """End a request; its pages become available to others."""
        for requests in (self.running, self.preempted):
            if active in requests:
                requests.remove(active)
        if active.sequence is not None:
            self.cache.finish(active.sequence)
        self._ended = True

    def clear(self) -> None:
        """Drop all requests."""
        self.waiting.clear()
        for active in [*self.running, *self.preempted]:
            self.retire(active)

    # Admitting

    def _restore(self) -> list[Failure]:
        """Restore preempted sequences, oldest first.

        Only after a sequence has ended: there was no room before, and one that is restored too
        early is the first to be preempted again.
        """
        failed: list[Failure] = []
        if not (self._ended or not self.running):
            return failed
        while self.preempted and len(self.running) < self.max_batch:
            try:
                self.cache.restore(self.preempted[0].sequence)
            except (CacheFull, NoSlot) as error:
                if self.running:
                    break
                # Alone, and still no room: the budget has become smaller.
                failed.append((self.preempted.pop(0), error))
            else:
                self.running.append(self.preempted.pop(0))
        self._ended = False
        return failed

    def _admit(self) -> list[Failure]:
        passed_over: list[ActiveRequest] = []
        failed: list[Failure] = []
        while self.waiting and not (self.preempted or self._crowded):
            if len(self.running) >= self.max_batch:
                break
            active = self.waiting.popleft()
            donor, shared, later = self._find_prefix(active.tokens)
            if later >= MIN_SHARED_TOKENS and later > shared:
                passed_over.append(active)  # its beginning is being computed: worth waiting for
                continue
            try:
                prefix = (donor.sequence, shared) if donor is not None else None
                active.sequence = self.cache.admit(prefix=prefix)
            except (CacheFull, NoSlot) as error:
                if not self.running:  # no sequence could end and make room
                    failed.append((active, error))
                    continue
                passed_over.append(active)
                break
            self.shared_tokens += shared
            self.running.append(active)
        self.waiting.extendleft(reversed(passed_over))
        return failed

    def _find_prefix(self, tokens: Sequence[int]) -> tuple[ActiveRequest | None, int, int]:
        """Find the running request that shares the longest beginning with a prompt.

        Returns the request, how many tokens can be shared now, and how many could be once they are
        computed. The last token of a prompt is never shared: computing it gives the scores.
        """
        wanted = np.asarray(tokens[:-1])
        best, most, later = None, 0, 0
        for active in self.running:
            other = np.asarray(active.tokens[: len(wanted)])
            same = wanted[: len(other)] == other
            common = len(same) if same.all() else int(same.argmin())
            later = max(later, common)
            if (now := min(common, active.computed)) > most:
                best, most = active, now
        if most < MIN_SHARED_TOKENS:
            return None, 0, later
        return best, most, later

    # Making room

    def _collect_wants(self) -> list[tuple[ActiveRequest, int]]:
        """Return how many tokens each request reads in this step.

        One token for each that decodes and, in addition, a chunk of prompts, oldest first.
        """
        with_others, alone = self.chunks
        decoding = any(active.pending == 1 for active in self.running)
        left, wants = with_others if decoding else alone, []
        for active in self.running:
            count = active.pending
            if count > 1:
                count = min(count, left)
                left -= count
            if count:
                wants.append((active, count))
        return wants

    def _prepare_by_age(
        self, wants: Sequence[tuple[ActiveRequest, int]]
    ) -> tuple[list[tuple[ActiveRequest, int]], list[Failure]]:
        """Prepare as many requests as there is room for, oldest first."""
        ready: list[tuple[ActiveRequest, int]] = []
        failed: list[Failure] = []
        for active, count in wants:
            if active not in self.running:
                continue  # it was preempted for an older one
            lacking = self._make_room(active, count)
            if lacking is None:
                ready.append((active, count))
            elif active is self.running[0] and len(self.running) == 1:
                budget = int(self.cache.budget)
                tokens = active.computed + count
                failed.append(
                    (active, NoRoomError(active.name, tokens=tokens, wanted=lacking, budget=budget))
                )
            else:
                self._crowded = True
        return ready, failed

    def _make_room(self, active: ActiveRequest, count: int) -> int | None:
        """Prepare a request, preempting younger ones if needed.

        Returns None, or how many bytes are missing after all younger ones were preempted.
        """
        while True:
            try:
                self.cache.prepare([(active.sequence, count)])
                return None
            except CacheFull as error:
                youngest = self.running[-1]
                if youngest is active:
                    return int(error.wanted * error.page_nbytes)
                self._preempt(youngest)

    def _preempt(self, active: ActiveRequest) -> None:
        self.cache.preempt(active.sequence)
        self.running.remove(active)
        # At the front: the youngest is preempted first, so that the oldest is restored first.
        self.preempted.insert(0, active)
        self.preemptions += 1
