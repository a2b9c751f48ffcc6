"""How far a probe is, and what it had to leave out. Room: measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")

OnProgress = Callable[[int, int, str], None]
"""Called with figures done, figures in all, and what is being measured now."""


class Progress:
    """Counts figures as they are taken. One that cannot be taken becomes a note, not an end."""

    def __init__(self, total: int, on_progress: OnProgress | None = None) -> None:
        self.total = total
        self.done = 0
        self.notes: list[str] = []
        self._on_progress = on_progress

    def take(self, what: str, measure: Callable[[], T]) -> T | None:
        """One figure, or None and a note."""
        self.say(what)
        result = self.attempt(what, measure)
        self.done += 1
        return result

    def attempt(self, what: str, step: Callable[[], T], *, figures: int = 0) -> T | None:
        """A step on the way to so many figures; if it fails they are all given up, with a note."""
        try:
            return step()
        # What the machine refuses: memory, files, and RuntimeError, which is how torch says it.
        except (PenstockError, OSError, MemoryError, RuntimeError) as refused:
            self.notes.append(f"{what}: not measured: {refused}")
            self.done += figures
            return None

    def say(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(self.done, self.total, what)
