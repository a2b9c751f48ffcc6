"""How PyTorch's CUDA allocator maps memory with expandable segments.

For each stream the allocator has two address ranges, one for tensors of up to 1 MiB and one for
larger ones, and maps physical pages into them: 2 MiB in the first, 20 MiB in the second. A request
gets the smallest free range that is large enough, or new pages. A page can be unmapped once
nothing in it is in use. That happens when the allocator reaches its limit, before it gives up. So
what it reserves beyond the tensors in use are parts of pages, in the gaps between tensors.

`ExpandableSegments` repeats this for a known order of requests, so that a traced step shows how
many bytes the gaps are. It follows torch's c10/cuda/CUDACachingAllocator.cpp: `get_free_block`,
`alloc_block`, `try_allocate_expandable_block`, `release_blocks` and `unmap`. A test on a GPU
compares it with the installed torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from penstock.units import MiB, round_up

PAGE = 20 * MiB
"""Bytes that are mapped at a time for tensors of more than `SMALL`."""

SMALL_PAGE = 2 * MiB
"""Bytes that are mapped at a time for smaller tensors."""

SMALL = MiB
"""Size of the largest tensor that is served from small pages."""

ROUNDING = 512
"""Sizes are multiples of this."""

_ADDRESSES = 1 << 50
"""Bytes of address space of a range: more than any GPU has memory."""


_State = Literal["unmapped", "free", "used"]


@dataclass(slots=True)
class _Block:
    """Consecutive addresses in the same state."""

    start: int
    size: int
    state: _State

    @property
    def end(self) -> int:
        return self.start + self.size


class ExpandableSegments:
    """The address ranges of one stream, without any memory.

    Args:
        limit: Bytes that may be reserved, as set by `set_per_process_memory_fraction`; None for no
            limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._ranges = {True: _Range(SMALL_PAGE), False: _Range(PAGE)}
        self._used: dict[Hashable, tuple[bool, int, int]] = {}  # key -> small, start, size
        self.allocated = self.peak_allocated = 0
        """Bytes in use now, and the most so far."""
        self.peak_reserved = 0
        """The most bytes of mapped pages so far."""
        self.trims = 0
        """How often the limit was reached, so that unused pages were unmapped."""

    @property
    def reserved(self) -> int:
        """Bytes of mapped pages."""
        return sum(part.mapped for part in self._ranges.values())

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Serve a request. Raises MemoryError if it does not fit in the limit."""
        size = max(ROUNDING, round_up(nbytes, ROUNDING))
        small = size <= SMALL
        part = self._ranges[small]
        start = part.find_free(size)
        if start is None:
            start = self._map(part, size, small)
        part.use(start, size)
        self._used[key] = small, start, size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, key: Hashable) -> None:
        """Make the memory of a request available to later ones."""
        small, start, size = self._used.pop(key)
        self._ranges[small].free(start)
        self.allocated -= size

    def trim(self) -> None:
        """Unmap all pages without a tensor."""
        self.trims += 1
        for each in self._ranges.values():
            each.unmap_unused()

    def _map(self, part: _Range, size: int, small: bool) -> int:
        # The allocator compares the whole request with its limit, even if part of it will be served
        # from pages that are mapped already.
        request = SMALL_PAGE if small else PAGE if size < PAGE // 2 else round_up(size, SMALL_PAGE)
        if self._limit is not None and self.reserved + request > self._limit:
            self.trim()
            if self.reserved + request > self._limit:
                raise MemoryError(f"{size} B do not fit in the limit of {self._limit} B")
        return part.map(size)


class _Range:
    """One range of addresses, and the pages mapped into it."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._blocks = [_Block(0, _ADDRESSES, "unmapped")]
        self.mapped = 0

    def find_free(self, size: int) -> int | None:
        """Return the start of the free block to use: the smallest that is large enough.

        A block that unmapped addresses follow counts as large as it can become, so that it is used
        last.
        """
        found = [i for i, b in enumerate(self._blocks) if b.state == "free" and b.size >= size]
        found.sort(key=lambda i: (self._blocks[i].size, self._blocks[i].start))
        if not found:
            return None
        for here, after in itertools.pairwise(found):
            if self._expandable(after) >= self._expandable(here):
                return self._blocks[here].start
        return self._blocks[found[-1]].start

    def _expandable(self, index: int) -> int:
        block, follows = self._blocks[index], self._blocks[index + 1 : index + 2]
        return block.size + sum(b.size for b in follows if b.state == "unmapped")

    def map(self, size: int) -> int:
        """Map pages for a request at the lowest possible address; return the address."""
        start = next(start for start in self._candidates() if self._has_room(start, size))
        end = round_up(start + size, self._page)
        blocks: list[_Block] = []
        for block in self._blocks:
            low, high = max(block.start, start), min(block.end, end)
            if block.state == "unmapped" and low < high:
                blocks += _split(block, low, high, "free")
                self.mapped += high - low
            else:
                blocks.append(block)
        self._blocks = _merge(blocks)
        return start

    def _candidates(self) -> list[int]:
        """Return where new pages could begin: unmapped addresses, or the free block before."""
        starts = []
        for index, block in enumerate(self._blocks):
            if block.state == "unmapped":
                before = self._blocks[index - 1] if index else None
                joins = before is not None and before.state == "free"
                starts.append(before.start if joins and before is not None else block.start)
        return starts

    def _has_room(self, start: int, size: int) -> bool:
        used = (b for b in self._blocks if b.state == "used" and b.end > start)
        first = next(used, None)
        return first is None or first.start - start >= size

    def use(self, start: int, size: int) -> None:
        index = next(i for i, b in enumerate(self._blocks) if b.start == start)
        block = self._blocks[index]
        rest = [_Block(start + size, block.size - size, "free")] if block.size > size else []
        self._blocks[index : index + 1] = [_Block(start, size, "used"), *rest]

    def free(self, start: int) -> None:
        next(b for b in self._blocks if b.start == start and b.state == "used").state = "free"
        self._blocks = _merge(self._blocks)

    def unmap_unused(self) -> None:
        """Unmap every page that lies in a free block as a whole."""
        blocks: list[_Block] = []
        for block in self._blocks:
            low = round_up(block.start, self._page)
            high = block.end // self._page * self._page
            if block.state == "free" and low < high:
                blocks += _split(block, low, high, "unmapped")
                self.mapped -= high - low
            else:
                blocks.append(block)
        self._blocks = _merge(blocks)


def _split(block: _Block, low: int, high: int, state: _State) -> list[_Block]:
    """Give the addresses from `low` to `high` another state, and keep the rest of the block."""
    parts = [
        _Block(block.start, low - block.start, block.state),
        _Block(low, high - low, state),
        _Block(high, block.end - high, block.state),
    ]
    return [part for part in parts if part.size]


def _merge(blocks: list[_Block]) -> list[_Block]:
    merged: list[_Block] = []
    for block in blocks:
        if merged and block.state != "used" and merged[-1].state == block.state:
            merged[-1].size += block.size
        else:
            merged.append(block)
    return merged
