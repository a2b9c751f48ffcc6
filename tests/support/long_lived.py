"""Keep objects that outlive a test out of later garbage collections.

A collection visits every object that is not frozen, and modules, caches and compiled graphs that a
test has brought into the process stay to its end: with them, each of the many collections of later
tests takes a tenth of a second and more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


class LongLived:
    """Collect garbage and freeze the rest after collection, and after tests with many objects."""

    def __init__(self) -> None:
        self._collections = 0

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self._collections = _collections_of_older()

    def pytest_collection_finish(self) -> None:
        self._freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        try:
            yield
        finally:
            # Fixtures of the test are gone here, so nothing of it is frozen that could be freed.
            # A test without such a collection has left too little behind to be worth one.
            if _collections_of_older() != self._collections:
                self._freeze()


def _collections_of_older() -> int:
    """Return how often Python has collected more than the youngest objects."""
    return sum(generation["collections"] for generation in gc.get_stats()[1:])
