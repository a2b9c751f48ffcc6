"""Random order that is the same on every machine and with every version of numpy.

numpy may change the random numbers of a seed, which would break the resumption of a run. So the
order is a sort by a hash of each index, and the hash is implemented here.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_STEP = np.array([0x9E3779B97F4A7C15], np.uint64)
_FIRST = np.array([0xBF58476D1CE4E5B9], np.uint64)
_SECOND = np.array([0x94D049BB133111EB], np.uint64)


def hash_values(values: Words, *keys: int) -> Words:
    """Return a 64-bit hash of each value and the keys. Every bit depends on every bit of them."""
    key = np.zeros(1, np.uint64)
    for part in keys:
        key = _scramble(key + np.array([part % 2**64], np.uint64))
    return _scramble(values + key)


def shuffled_indices(count: int, *keys: int) -> Ints:
    """Return the numbers below `count` in an order that depends only on the keys."""
    return np.argsort(hash_values(np.arange(count, dtype=np.uint64), *keys), kind="stable")


def _scramble(words: Words) -> Words:
    """Apply the finalizer of splitmix64. Array arithmetic wraps around without a warning."""
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
