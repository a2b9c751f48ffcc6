"""What the tests of the probe share."""

from __future__ import annotations

import pytest

from penstock.probe import process
from penstock.units import GiB

PROCESS = 2 * GiB


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading PyTorch in a child takes seconds; test_process.py does it once."""
    monkeypatch.setattr(process, "measure_process", lambda *, gpu: PROCESS)
