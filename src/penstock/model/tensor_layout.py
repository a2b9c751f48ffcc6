"""Describe a tensor whose elements come from other tensors, without touching any element.

transformers holds the experts of a layer in one tensor, `[experts, 2 * width, hidden]`, and files
have two matrices for each expert. A `Layout` says where every element of the one is found in the
others, so that any range of it can be read straight to its place, and in either direction.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Shape = tuple[int, ...]


class LayoutError(ValueError):
    """Tensors cannot be combined in this way, because their shapes do not fit."""


class Piece(NamedTuple):
    """Elements of a range that come from one source."""

    source: str
    first: int
    """The first element, in the flattened source."""
    strides: Shape
    """Strides in the source, in elements."""
    shape: Shape
    at: int
    """Where the first element goes, relative to the start of the range."""
    into: Shape
    """Strides in the destination, in elements."""
    slab: tuple[int, int]
    """The range of the source that has all elements of this piece, and those that other ranges need
    as well if the elements are not contiguous. It does not depend on the requested range."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous in the source and in the destination."""
        return _is_contiguous(self.shape, self.strides) and _is_contiguous(self.shape, self.into)


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangular part of a tensor that comes from one source."""

    start: Shape
    shape: Shape
    source: str
    offset: int
    """Index of its first element in the flattened source."""
    strides: Shape
    """Strides in the source."""

    @property
    def outer(self) -> int:
        """Number of leading dimensions that are outermost in the source as well.

        Whatever has another order, such as a transposed matrix, is inside these dimensions.
        """
        for dim in range(len(self.shape)):
            inner = sum((n - 1) * s for n, s in zip(self.shape[dim + 1 :], self.strides[dim + 1 :],
                                                    strict=True))  # fmt: skip
            if self.shape[dim] > 1 and self.strides[dim] <= inner:
                return dim
        return len(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor come from."""

    shape: Shape
    boxes: tuple[_Box, ...]
    _starts: list[int] = field(init=False, repr=False, compare=False)
    _longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        strides = _contiguous_strides(self.shape)
        boxes = sorted(self.boxes, key=lambda box: _dot(box.start, strides))
        object.__setattr__(self, "boxes", tuple(boxes))
        object.__setattr__(self, "_starts", [_dot(box.start, strides) for box in boxes])
        spans = (_dot([n - 1 for n in box.shape], strides) + 1 for box in boxes)
        object.__setattr__(self, "_longest", max(spans, default=0))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that the elements come from, in the order of their first element."""
        return tuple(dict.fromkeys(box.source for box in self.boxes))

    def pieces(self, low: int, high: int) -> Iterator[Piece]:
        """Yield where elements `low` to `high` of the flattened tensor come from."""
        strides = _contiguous_strides(self.shape)
        first = bisect.bisect_right(self._starts, low - self._longest)
        last = bisect.bisect_left(self._starts, high)
        boxes = self.boxes[first:last]
        for start, shape in _rectangles(self.shape, low, high):
            for box in boxes:
                yield from _intersect(box, start, shape, strides, low)


def whole(name: str, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor that is one source, unchanged."""
    shape = tuple(shape)
    return Layout(shape, (_Box((0,) * len(shape), shape, name, 0, _contiguous_strides(shape)),))


def stack(layouts: Sequence[Layout], dim: int) -> Layout:
    """Stack tensors of one shape along a new dimension, as `torch.stack` does."""
    first = layouts[0].shape
    for layout in layouts:
        if layout.shape != first:
            raise LayoutError(f"cannot stack tensors of the shapes {first} and {layout.shape}")
    boxes = (
        _Box(_insert(box.start, dim, i), _insert(box.shape, dim, 1), box.source, box.offset,
             _insert(box.strides, dim, 0))
        for i, layout in enumerate(layouts)
        for box in layout.boxes
    )  # fmt: skip
    return Layout(_insert(first, dim, len(layouts)), tuple(boxes))


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    """Concatenate tensors along a dimension, as `torch.cat` does."""
    first = layouts[0].shape
    boxes: list[_Box] = []
    at = 0
    for layout in layouts:
        if _replace(layout.shape, dim, 0) != _replace(first, dim, 0):
            raise LayoutError(
                f"cannot concatenate tensors of the shapes {first} and {layout.shape} along "
                f"dimension {dim}"
            )
        boxes += (
            _Box(_replace(box.start, dim, at + box.start[dim]), box.shape, box.source, box.offset,
                 box.strides)
            for box in layout.boxes
        )  # fmt: skip
        at += layout.shape[dim]
    return Layout(_replace(first, dim, at), tuple(boxes))


def split(layout: Layout, sizes: Sequence[int], dim: int) -> list[Layout]:
    """Cut a tensor into parts of the given sizes along a dimension, as `torch.split` does."""
    if sum(sizes) != layout.shape[dim]:
        raise LayoutError(f"cannot cut dimension {dim} of the shape {layout.shape} into {sizes}")
    bounds = [0, *itertools.accumulate(sizes)]
    return [_narrow(layout, dim, low, high) for low, high in itertools.pairwise(bounds)]


def chunk(layout: Layout, count: int, dim: int) -> list[Layout]:
    """Cut a tensor into equal parts along a dimension."""
    size, rest = divmod(layout.shape[dim], count)
    if rest or not size:
        raise LayoutError(
            f"cannot cut dimension {dim} of the shape {layout.shape} into {count} equal parts"
        )
    return split(layout, [size] * count, dim)


def unstack(layout: Layout, dim: int) -> list[Layout]:
    """Return the slices of a tensor along a dimension, without it, as `torch.unbind` does."""
    slices = split(layout, [1] * layout.shape[dim], dim)
    return [
        Layout(
            _without(part.shape, dim),
            tuple(
                _Box(_without(box.start, dim), _without(box.shape, dim), box.source, box.offset,
                     _without(box.strides, dim))
                for box in part.boxes
            ),
        )
        for part in slices
    ]  # fmt: skip


def transpose(layout: Layout, dim0: int, dim1: int) -> Layout:
    """Exchange two dimensions."""

    def swap(values: Shape) -> Shape:
        swapped = list(values)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return tuple(swapped)

    boxes = (
        _Box(swap(box.start), swap(box.shape), box.source, box.offset, swap(box.strides))
        for box in layout.boxes
    )
    return Layout(swap(layout.shape), tuple(boxes))


def _narrow(layout: Layout, dim: int, low: int, high: int) -> Layout:
    """Return the part of a tensor from `low` to `high` along a dimension."""
    boxes = []
    for box in layout.boxes:
        start, stop = max(box.start[dim], low), min(box.start[dim] + box.shape[dim], high)
        if start < stop:
            offset = box.offset + (start - box.start[dim]) * box.strides[dim]
            boxes.append(
                _Box(_replace(box.start, dim, start - low), _replace(box.shape, dim, stop - start),
                     box.source, offset, box.strides)
            )  # fmt: skip
    return Layout(_replace(layout.shape, dim, high - low), tuple(boxes))


def _rectangles(shape: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a range of a flattened tensor into rectangles: their starts and shapes, in order."""
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    first, skip = divmod(low, inner)
    last, more = divmod(high, inner)
    if first == last:
        for start, size in _rectangles(rest, skip, more):
            yield (first, *start), (1, *size)
        return
    if skip:
        for start, size in _rectangles(rest, skip, inner):
            yield (first, *start), (1, *size)
        first += 1
    if last > first:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    for start, size in _rectangles(rest, 0, more):
        yield (last, *start), (1, *size)


def _intersect(
    box: _Box, start: Shape, shape: Shape, into: Shape, low: int
) -> Iterator[Piece]:  # fmt: skip
    """Yield the elements of a rectangle that a box has, one piece for each index of its `outer`."""
    first = tuple(map(max, box.start, start))
    stops = zip(box.start, box.shape, start, shape, strict=True)
    size = tuple(min(a + n, b + m) - f for (a, n, b, m), f in zip(stops, first, strict=True))
    if min(size, default=1) <= 0:
        return
    inside = tuple(f - a for f, a in zip(first, box.start, strict=True))
    piece = Piece(box.source, box.offset + _dot(inside, box.strides), box.strides, size,
                  _dot(first, into) - low, into, (0, 0))  # fmt: skip
    if piece.is_run:
        yield piece._replace(slab=(piece.first, piece.first + piece.elements))
        return
    outer = box.outer
    slab = 1 + _dot([n - 1 for n in box.shape[outer:]], box.strides[outer:])
    for index in itertools.product(*(range(n) for n in size[:outer])):
        begin = box.offset + _dot(index, box.strides[:outer])
        begin += _dot(inside[:outer], box.strides[:outer])
        yield Piece(
            box.source, piece.first + _dot(index, box.strides[:outer]), box.strides[outer:],
            size[outer:], piece.at + _dot(index, into[:outer]), into[outer:],
            (begin, begin + slab),
        )  # fmt: skip


def _contiguous_strides(shape: Sequence[int]) -> Shape:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def _insert(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim:])


def _replace(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: Shape, dim: int) -> Shape:
    return (*values[:dim], *values[dim + 1 :])
