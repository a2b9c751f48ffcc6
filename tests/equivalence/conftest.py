"""Fixtures of the equivalence suite."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _in_one_order(one_thread: None) -> None:
    """Run torch in one thread, since every test compares bits."""
