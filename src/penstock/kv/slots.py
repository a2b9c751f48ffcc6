"""Slots and the sequences in them. Room: hold. Values only: who changes them holds the keeper's
lock."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.kv.address_space import Page


@dataclass(eq=False, slots=True)
class Slot:
    """A row of the range: where one sequence may lie."""

    index: int
    pages: list[Page] = field(default_factory=list)
    """Mapped one behind the other from the row's start. Without a sequence they are kept for the
    next one."""

    blanks: int = 0
    """Behind `pages`, how many times the one blank page is mapped so that padding can be read."""

    sequence: Sequence | None = None

    growing: bool = False
    """The background thread is mapping one page behind `pages`; wait before touching the slot."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's tokens. It is in a slot, or away in host memory, or finished."""

    length: int = 0
    """Tokens that are there."""

    prepared: int = 0
    """Tokens up to which the model may write; never below `length`."""

    lookahead: int = 0
    """Tokens that the last `prepare` asked for: as many are mapped ahead of the next one."""

    _slot: Slot | None = None
    _saved: torch.Tensor | None = None
    _finished: bool = False

    @property
    def slot(self) -> int | None:
        """The row it lies in now. `rows` may move it."""
        return None if self._slot is None else self._slot.index

    @property
    def resident(self) -> bool:
        """False while its tokens are in host memory, and after `finish`."""
        return self._slot is not None

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def room(self) -> int:
        """Tokens that may be written now."""
        return self.prepared - self.length

    def __repr__(self) -> str:
        where = "finished" if self._finished else f"slot {self.slot}" if self._slot else "away"
        return f"Sequence({self.length} tokens, {where})"
