"""A measured number with its spread, and the checks that measured values share. Room: measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from penstock.errors import MachineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured quantity and its spread. In a file a plain number will do: it has no spread."""

    median: float
    """The middle of the samples, in the unit that the field holding the figure names."""

    low: float
    """The lowest sample."""

    high: float
    """The highest sample."""

    samples: int = 0
    """How many times it was measured. 0: stated by someone, not measured."""

    def __post_init__(self) -> None:
        check_above_zero(self, "median", "low", "high")
        check_at_least(self, 0, "samples")
        if not self.low <= self.median <= self.high:
            raise MachineError(
                "median", f"must lie from low {self.low} to high {self.high}, got {self.median}"
            )

    @classmethod
    def from_number(cls, value: float) -> Figure:
        return cls(median=value, low=value, high=value)


# Checks that several parts share. An absent value passes; NaN does not.


def check_above_zero(part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not 0 < value < float("inf"):
            raise MachineError(name, f"must be above 0, got {value}")


def check_at_least(part: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            raise MachineError(name, f"must be {least} or more, got {value}")


def check_no_more_than(part: object, name: str, limit: str) -> None:
    value, most = getattr(part, name), getattr(part, limit)
    if value is not None and most is not None and value > most:
        raise MachineError(name, f"must be no more than {limit}, which is {most}, got {value}")


def check_one_of(part: object, name: str, choices: object) -> None:
    if getattr(part, name) not in get_args(choices):
        wanted = " or ".join(f'"{choice}"' for choice in get_args(choices))
        raise MachineError(name, f'must be {wanted}, got "{getattr(part, name)}"')
