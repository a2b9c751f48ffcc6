"""What all tests of failures need."""

from __future__ import annotations

import pytest

from tests.faults.engine_runs import note_threads


@pytest.fixture(autouse=True)
def _threads_of_this_test() -> None:
    note_threads()
