"""Who runs in the next step, and who waits. Room: hold.

Age is rank. Whoever lacks room takes it from those admitted after it, youngest first; these move to
host memory and come back when something has ended. So the oldest always goes on, and everything
ends: there is no pair of sequences that could push each other out for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.generate.requests import NoRoomError, QueueFullError, Request
from penstock.generate.sampling import Draws
from penstock.generate.text_stream import TextStream
from penstock.kv.errors import CacheFull, NoSlot

SHARED = 32
"""Tokens that two prompts must have in common before sharing is worth the remapping."""


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way."""

    name: str | int
    request: Request
    tokens: list[int]
    """The prompt, and what was made of it so far."""
    draws: Draws
    stop_tokens: frozenset[int]
    text: TextStream | None
    prompt: int = field(init=False)
    """Tokens of the prompt."""
    sequence: Any = None
    """Its place in the cache, once admitted."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def done(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return 0 if self.sequence is None else int(self.sequence.length)

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to read: one, once the prompt is in."""
        return len(self.tokens) - self.done

    @property
    def made(self) -> int:
        return len(self.tokens) - self.prompt


Failure = tuple[Live, PenstockError]
"""Whose request cannot go on, and why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step computes."""

    groups: Sequence[tuple[int, Sequence[Live]]]
    """Rows that read equally many tokens run together: that many, and whose."""
    failed: Sequence[Failure]


class Scheduler:
    """Keeps the queue and the cache's sequences."""

    def __init__(self, cache: Any, *, max_batch: int, chunks: tuple[int, int], queue: int) -> None:
        self.cache, self.max_batch = cache, max_batch
        self.chunks, self.queue = chunks, queue
        """Prompt tokens of a step, beside others that decode and alone; how many may wait."""
        self.waiting: deque[Live] = deque()
        self.live: list[Live] = []
        """In the cache, oldest first."""
        self.away: list[Live] = []
        """In host memory, oldest first."""
        self.preemptions = 0
        self.shared_tokens = 0
        self._crowded = False
        """Somebody had to wait for room in the last step."""
        self._ended = False
        """Something has ended since the last one was brought back."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.live or self.away)

    @property
    def full(self) -> bool:
        """Whether submit() would refuse."""
        return len(self.waiting) >= self.queue

    def submit(self, live: Live) -> None:
        if self.full:
            raise QueueFullError(live.name, self.queue)
        self.waiting.append(live)

    def turn(self) -> Turn:
        """Decide on a step and make room for it."""
        failed = [*self._bring_back(), *self._admit()]
        wants = self._wants()
        self._crowded = False
        try:
            self.cache.prepare([(live.sequence, count) for live, count in wants])
        except CacheFull:
            wants, lacking = self._squeeze(wants)
            failed += lacking
        groups: dict[int, list[Live]] = {}
        for live, count in wants:
            groups.setdefault(count, []).append(live)
        ordered = [
            (count, sorted(members, key=lambda live: int(live.sequence.slot)))
            for count, members in sorted(groups.items())
        ]
        return Turn(ordered, failed)

    def retire(self, live: Live) -> None:
        """It has ended: its pages are free for others."""
        for held in (self.live, self.away):
            if live in held:
                held.remove(live)
        if live.sequence is not None:
            self.cache.finish(live.sequence)
        self._ended = True

    def clear(self) -> None:
        """Let everything go."""
        self.waiting.clear()
        for live in [*self.live, *self.away]:
            self.retire(live)

    # Coming.

    def _bring_back(self) -> list[Failure]:
        """Only after something has ended: there was no room before, and what comes back too early
        is the first to go again."""
        failed: list[Failure] = []
        if not (self._ended or not self.live):
            return failed
        while self.away and len(self.live) < self.max_batch:
            try:
                self.cache.restore(self.away[0].sequence)
            except (CacheFull, NoSlot) as full:
                if self.live:
                    break
                failed.append((self.away.pop(0), full))  # alone: the budget has become smaller
            else:
                self.live.append(self.away.pop(0))
        self._ended = False
        return failed

    def _admit(self) -> list[Failure]:
        passed: list[Live] = []
        failed: list[Failure] = []
        while self.waiting and not (self.away or self._crowded):
            if len(self.live) >= self.max_batch:
                break
            live = self.waiting.popleft()
            donor, shared, later = self._prefix(live.tokens)
            if later >= SHARED and later > shared:
                passed.append(live)  # its beginning is being computed: worth waiting for
                continue
            try:
                prefix = (donor.sequence, shared) if donor is not None else None
                live.sequence = self.cache.admit(prefix=prefix)
            except (CacheFull, NoSlot) as full:
                if not self.live:  # nobody's end could make room
                    failed.append((live, full))
                    continue
                passed.append(live)
                break
            self.shared_tokens += shared
            self.live.append(live)
        self.waiting.extendleft(reversed(passed))
        return failed

    def _prefix(self, tokens: Sequence[int]) -> tuple[Live | None, int, int]:
        """Whose beginning is this prompt's too, how much of it can be shared, and how much more
        could be once it is computed. One token is always left to compute: it gives the scores."""
        wanted = np.asarray(tokens[:-1])
        best, most, later = None, 0, 0
        for live in self.live:
            there = np.asarray(live.tokens[: len(wanted)])
            same = wanted[: len(there)] == there
            common = len(same) if same.all() else int(same.argmin())
            later = max(later, common)
            if (now := min(common, live.done)) > most:
                best, most = live, now
        if most < SHARED:
            return None, 0, later
        return best, most, later

    # Going.

    def _wants(self) -> list[tuple[Live, int]]:
        """One token for each that decodes; beside them, a chunk of prompts, oldest first."""
        beside, alone = self.chunks
        left, wants = beside if any(live.pending == 1 for live in self.live) else alone, []
        for live in self.live:
            count = live.pending
            if count > 1:
                count = min(count, left)
                left -= count
            if count:
                wants.append((live, count))
        return wants

    def _squeeze(
        self, wants: Sequence[tuple[Live, int]]
    ) -> tuple[list[tuple[Live, int]], list[Failure]]:
        """Room for as many as there is room for, oldest first."""
        ready: list[tuple[Live, int]] = []
        failed: list[Failure] = []
        for live, count in wants:
            if live not in self.live:
                continue  # it was sent away for an older one
            lacking = self._make_room(live, count)
            if lacking is None:
                ready.append((live, count))
            elif live is self.live[0] and len(self.live) == 1:
                budget = int(self.cache.budget)
                tokens = live.done + count
                failed.append(
                    (live, NoRoomError(live.name, tokens=tokens, wanted=lacking, budget=budget))
                )
            else:
                self._crowded = True
        return ready, failed

    def _make_room(self, live: Live, count: int) -> int | None:
        """None, or how many bytes are lacking after all younger ones are gone."""
        while True:
            try:
                self.cache.prepare([(live.sequence, count)])
                return None
            except CacheFull as full:
                youngest = self.live[-1]
                if youngest is live:
                    return int(full.wanted * full.page_nbytes)
                self._send_away(youngest)

    def _send_away(self, live: Live) -> None:
        self.cache.preempt(live.sequence)
        self.live.remove(live)
        self.away.insert(0, live)  # the youngest goes first, so that the oldest comes back first
        self.preemptions += 1
