"""Errors raised while recording a run or reading one back."""

from __future__ import annotations

from penstock.errors import RecordError


class ObserveError(RecordError):
    """A run directory cannot be written or read, or an option is invalid."""
