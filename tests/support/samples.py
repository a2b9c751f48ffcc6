"""Choose which values of a parameter `make test` runs; `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Mark every value that is not in `kept` as long."""
    values = list(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"no such value: {missing}"
    return [v if v in kept else pytest.param(v, marks=pytest.mark.long) for v in values]
