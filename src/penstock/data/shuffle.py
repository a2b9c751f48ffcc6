"""Random order that is the same on every machine and with every version of numpy. Room: show.

numpy may change the stream behind a seed; a run that is resumed must not notice. So the order is a
sort by a hash of each index, and the hash is written out here.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]

_STEP = np.array([0x9E3779B97F4A7C15], np.uint64)
_FIRST = np.array([0xBF58476D1CE4E5B9], np.uint64)
_SECOND = np.array([0x94D049BB133111EB], np.uint64)


def mix(values: Words, *keys: int) -> Words:
    """A 64-bit hash of each value under the keys: every bit of it hangs on every bit of them."""
    key = np.zeros(1, np.uint64)
    for part in keys:
        key = _scramble(key + np.array([part % 2**64], np.uint64))
    return _scramble(values + key)


def shuffled(count: int, *keys: int) -> Ints:
    """The numbers below `count` in an order fixed by the keys."""
    return np.argsort(mix(np.arange(count, dtype=np.uint64), *keys), kind="stable")


def _scramble(words: Words) -> Words:
    """The finisher of splitmix64, on arrays: their arithmetic wraps around without a word."""
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
