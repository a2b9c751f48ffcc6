"""What can go wrong with an observation. Room: show."""

from __future__ import annotations

from penstock.errors import RecordError


class ObserveError(RecordError):
    """A directory that no observation can be written to, or read from."""
