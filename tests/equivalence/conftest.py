"""What the equivalence suite shares."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _in_one_order(one_thread: None) -> None:
    """All of it compares bits."""
