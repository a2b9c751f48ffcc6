"""Interpret the conversions that transformers applies to weights, as layouts of tensors.

For many model families, transformers lists operations that turn the tensors of published files into
those of the model, such as "stack the matrices of all experts, then concatenate gate and up". They
are carried out here on layouts, so that files are read in bounded memory, and the reverse gives the
tensors of the files back. An operation that is not known is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.model import tensor_layout
from penstock.model.tensor_layout import Layout, LayoutError, Shape

Streams = list[list[Layout]]
"""For each pattern of names, its tensors; several for a pattern with one tensor per expert."""


class UnknownOperationError(UnsupportedModelError):
    """transformers converts a tensor with an operation that Penstock does not know."""

    def __init__(self, operation: str, tensor: str) -> None:
        self.operation, self.tensor = operation, tensor
        super().__init__(
            f"transformers converts the tensor {tensor[:120]} with {operation} when it loads the "
            f"model, which Penstock cannot do while it streams the files. Load the model with "
            f"transformers, save it with save_pretrained(save_original_format=False), and train "
            f"that directory"
        )


@dataclass(frozen=True, slots=True)
class _Context:
    """What an operation needs to know in addition to its inputs."""

    outputs: int
    """Number of patterns of the names that the conversion leads to."""
    shapes: Sequence[Shape]
    """Shapes of the results, if they are tensors of the model."""
    config: Any


def _merge(operation: Any, streams: Streams, context: _Context) -> Streams:
    return [[tensor_layout.stack(each, operation.dim)] for each in streams]


def _unmerge(operation: Any, streams: Streams, context: _Context) -> Streams:
    return [tensor_layout.unstack(_only([each]), operation.dim) for each in streams]


def _concatenate(operation: Any, streams: Streams, context: _Context) -> Streams:
    tensors = [layout for each in streams for layout in each]
    return [[tensor_layout.concatenate(tensors, operation.dim)]]


def _chunk(operation: Any, streams: Streams, context: _Context) -> Streams:
    field = getattr(operation, "num_shards_attribute", None)
    if field is not None:  # the names of one pattern, with a number in each
        count = int(getattr(context.config.get_text_config(), field))
        return [tensor_layout.chunk(_only(streams), count, operation.dim)]
    parts = tensor_layout.chunk(_only(streams), context.outputs, operation.dim)
    return [[part] for part in parts]


def _split(operation: Any, streams: Streams, context: _Context) -> Streams:
    sizes = [shape[operation.dim] for shape in context.shapes]
    return [[part] for part in tensor_layout.split(_only(streams), sizes, operation.dim)]


def _transpose(operation: Any, streams: Streams, context: _Context) -> Streams:
    layout = _only(streams)
    count = len(layout.shape)
    dims = [dim % count for dim in (operation.dim0, operation.dim1)]
    return [[tensor_layout.transpose(layout, *dims)]]


_OPERATIONS: Mapping[str, Callable[[Any, Streams, _Context], Streams]] = {
    "MergeModulelist": _merge,
    "SplitModulelist": _unmerge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
}
"""The operations by their class names: versions of transformers differ in which of them exist."""


def _only(streams: Streams) -> Layout:
    """Return the only tensor of the inputs."""
    tensors = [layout for each in streams for layout in each]
    if len(tensors) != 1:
        raise LayoutError(f"expected one tensor, got {len(tensors)}")
    return tensors[0]


def check_operations(operations: Sequence[Any], tensor: str) -> None:
    """Raise UnknownOperationError if an operation is not known; `tensor` is for the message."""
    for operation in operations:
        name = type(operation).__name__
        # Which way to transpose would depend on the shape, and a square matrix has only one.
        if getattr(operation, "check_dims", False):
            raise UnknownOperationError(f"{name}(check_dims=True)", tensor)
        if name not in _OPERATIONS or min(getattr(operation, "dim", 0), 0) < 0:
            raise UnknownOperationError(name, tensor)


def convert(
    operations: Sequence[Any],
    streams: Streams,
    *,
    outputs: int,
    config: Any,
    shapes: Sequence[Shape] = (),
) -> Streams:
    """Carry out the operations of a conversion.

    Raises LayoutError if the shapes do not fit.

    Args:
        operations: What transformers lists, in its order; see `check_operations`.
        streams: The inputs, in the order of the patterns of their names.
        outputs: Number of patterns of the names of the results.
        config: The config of the model.
        shapes: Shapes of the results, if they are tensors of the model.
    """
    context = _Context(outputs, shapes, config)
    for operation in operations:
        try:
            streams = _OPERATIONS[type(operation).__name__](operation, streams, context)
        except IndexError:  # an operation on a dimension that a tensor does not have
            raise LayoutError(f"a tensor has too few dimensions for {operation!r}") from None
    return streams


def reverse_operations(operations: Sequence[Any]) -> list[Any]:
    """Return the operations that undo a conversion."""
    return [operation.reverse_op for operation in reversed(operations)]


def number_of(name: str, pattern: str) -> int:
    """Return the number of an expert in the name of a tensor, such as 17 in `experts.17.w1.weight`.

    `pattern` is the pattern of transformers that the name matches. 0 if it has no number.
    """
    found = _find_number(name, pattern)
    return int(found.group("number")) if found else 0


def with_number(name: str, pattern: str, number: int) -> str:
    """Return the name of the same tensor of another expert."""
    found = _find_number(name, pattern)
    if found is None:
        return name
    return f"{name[: found.start('number')]}{number}{name[found.end('number') :]}"


def _find_number(name: str, pattern: str) -> re.Match[str] | None:
    if "*" not in pattern:
        return None
    found = re.search(pattern.replace("*", r"(?P<number>\d+)", 1), name)
    # The part of the name that the pattern describes may have been renamed before.
    return found or re.search(r"(?P<number>\d+)(?=\.\D+$)", name)
