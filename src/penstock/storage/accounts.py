"""Bytes moved, per run and per step: what a drive's life is spent on. Room: hold."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import _native


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A store's bytes since it was made."""

    capacity: int
    used: int
    read_nbytes: int
    written_nbytes: int
    requests: int
    again: int
    """Requests that were continued or retried: 0 on a healthy disk."""
    steps: int
    step_read_nbytes: int
    """Of the last step that ended."""
    step_written_nbytes: int


class Accounts:
    """What the engine counted, cut at the ends of steps."""

    def __init__(self, engine: _native.StoreEngine) -> None:
        self._engine = engine
        self._before = self._after = (0, 0)
        self._steps = 0

    def end_step(self) -> None:
        read, written, _, _ = self._engine.counters
        self._before, self._after = self._after, (read, written)
        self._steps += 1

    def read(self, *, capacity: int, used: int) -> StoreStats:
        read, written, requests, again = self._engine.counters
        return StoreStats(
            capacity=capacity,
            used=used,
            read_nbytes=read,
            written_nbytes=written,
            requests=requests,
            again=again,
            steps=self._steps,
            step_read_nbytes=self._after[0] - self._before[0],
            step_written_nbytes=self._after[1] - self._before[1],
        )
