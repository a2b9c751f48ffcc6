"""Fixtures shared with the tests of the KV cache."""

from tests.kv.conftest import space

__all__ = ["space"]
