"""Slots, and the sequences in them.

These are plain values. Change them only while holding the lock of the `SequenceTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.kv.address_space import Page


@dataclass(eq=False, slots=True)
class Slot:
    """A row of the address range, which can hold one sequence."""

    index: int
    """Number of the row."""

    pages: list[Page] = field(default_factory=list)
    """Pages mapped one after the other from the row's start. A slot without a sequence keeps its
    pages for the next one."""

    blanks: int = 0
    """Number of times the blank page is mapped after `pages`, so that padding can be read."""

    sequence: Sequence | None = None
    """The sequence in the slot, if any."""

    growing: bool = False
    """Whether the background thread is mapping a page after `pages`. While it is, no other thread
    may touch the slot."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of one request: in a slot, moved to host memory, or finished."""

    length: int = 0
    """Number of tokens in the cache."""

    prepared: int = 0
    """Number of tokens up to which the model may write; never less than `length`."""

    lookahead: int = 0
    """Number of tokens that the last `prepare` asked for; as many are mapped ahead of need."""

    _slot: Slot | None = None
    _saved: torch.Tensor | None = None
    """The tokens, while they are in host memory."""
    _finished: bool = False

    @property
    def slot(self) -> int | None:
        """The row that holds the sequence now. `VirtualCache.rows` may move it."""
        return None if self._slot is None else self._slot.index

    @property
    def resident(self) -> bool:
        """Whether the sequence is in a slot: neither in host memory nor finished."""
        return self._slot is not None

    @property
    def finished(self) -> bool:
        """Whether the sequence is finished and holds no tokens any more."""
        return self._finished

    @property
    def room(self) -> int:
        """Number of tokens that may be written now."""
        return self.prepared - self.length

    def __repr__(self) -> str:
        if self._finished:
            state = "finished"
        else:
            state = f"slot {self.slot}" if self._slot else "in host memory"
        return f"Sequence({self.length} tokens, {state})"
