"""Remember how tensors are arranged in files, to write the same tensors in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.checkpoint.safetensors_header import Entry

_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class TemplateShard:
    """One file."""

    name: str
    header: bytes
    """The header as it is in the file, with its length before it."""
    entries: tuple[Entry, ...]
    """The tensors, in the order of their bytes."""


@dataclass(frozen=True, slots=True)
class ShardTemplate:
    """The files of a model."""

    shards: tuple[TemplateShard, ...]
    index: bytes
    """The index as it is on disk; empty if there is none."""

    def fits(self, tensors: Iterable[Entry]) -> bool:
        """Return whether these are the tensors of the files, in the same types and shapes.

        `start` of the tensors does not matter. Files with names of other programs never fit, nor
        do files that have a tensor twice.
        """
        own = [(e.name, e.dtype, e.shape) for shard in self.shards for e in shard.entries]
        others = {(entry.name, entry.dtype, entry.shape) for entry in tensors}
        usual = all(_NAMES.fullmatch(shard.name) for shard in self.shards)
        return usual and len(own) == len(others) and set(own) == others
