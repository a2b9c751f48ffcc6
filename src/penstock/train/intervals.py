"""How often something is done: by steps or by the clock. Room: show."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.train.errors import SettingsError

_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "hour": 3600, "hours": 3600, "d": 86400}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Interval:
    """One of the two."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """After so many steps and seconds since the last time."""
        if self.steps is not None:
            return steps >= self.steps
        assert self.seconds is not None
        return seconds >= self.seconds and steps > 0


def parse_interval(text: str, field: str = "save_every") -> Interval:
    """`30min`, `90s`, `2h`, or a number of steps."""
    match = _TEXT.fullmatch(text.lower())
    if match and not match[2] and match[1].isdigit() and int(match[1]) > 0:
        return Interval(steps=int(match[1]))
    if match and match[2] in _UNITS and float(match[1]) > 0:
        return Interval(seconds=float(match[1]) * _UNITS[match[2]])
    raise SettingsError(field, f"must be a time such as 30min, 90s or 2h, or steps, got {text!r}")
