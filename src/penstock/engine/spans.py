"""Typed views of raw bytes: the elements of one role of a block, and a block's weights.

Memory is allocated and moved as bytes. `Span` gives a range of bytes the element type of its role
(weight, master weight, moment, gradient), and `WeightSlots` turns the weights of a block on the
device into the parameters that modules compute with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from penstock.engine.dequantized_weights import DequantizedWeights
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.model.meta_model import weight_dtype
from penstock.optim.formats import rest_dtype
from penstock.roles import SCALE_BLOCK, Formats, Role

_MOMENT_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def role_dtype(role: Role, formats: Formats) -> torch.dtype:
    """Return the type in which one element of the role is stored."""
    match role:
        case Role.MASTER:
            dtype = rest_dtype(weight_dtype(formats.dtype))
            assert dtype is not None, "an fp32 weight is its own master weight"
            return dtype
        case Role.FIRST | Role.SECOND:
            return _MOMENT_DTYPE[formats.moments]
        case Role.GRADIENT if formats.wide_gradient:
            return torch.float32
        case _:
            return weight_dtype(formats.dtype)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `first` to `first + count` of one role of a block, wherever their bytes are.

    With 8-bit moments, the bases of all elements follow the elements.
    """

    role: Role
    data: torch.Tensor
    """The bytes."""
    first: int
    """Index of the first element in the block's flat buffer."""
    count: int
    """Number of elements."""
    formats: Formats

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements by their indices in the block's flat buffer, as a view."""
        dtype = role_dtype(self.role, self.formats)
        low, high = start - self.first, stop - self.first
        assert 0 <= low <= high <= self.count, (self.role, self.first, self.count, start, stop)
        return self.data[low * dtype.itemsize : high * dtype.itemsize].view(dtype)

    def bases(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the bases of those elements, as a view; None unless these are 8-bit moments."""
        if self.formats.moments != "int8" or self.role not in (Role.FIRST, Role.SECOND):
            return None
        assert (start - self.first) % SCALE_BLOCK == 0
        low = self.count + 2 * ((start - self.first) // SCALE_BLOCK)
        high = low + 2 * -(-(stop - start) // SCALE_BLOCK)
        return self.data[low:high].view(torch.int16)

    def all(self) -> torch.Tensor:
        """Return all elements, as a view."""
        return self.values(self.first, self.first + self.count)

    @property
    def nbytes(self) -> int:
        """Size of the elements and their bases in bytes."""
        return self.formats.nbytes(self.role, self.count)


class WeightSlots:
    """The pool of weight slots on the device, and the parameters that view it.

    Parameters are created once for each place in which a block ever lies, and then reused.
    """

    def __init__(
        self,
        inventory: Inventory,
        formats: Formats,
        pool: torch.Tensor,
        dequantized: DequantizedWeights,
        split: Collection[int] = (),
    ) -> None:
        self._inventory, self._formats, self._pool = inventory, formats, pool
        self.dequantized = dequantized
        self._split = frozenset(split)  # blocks whose slots have frozen weights only
        # By block and address; address -1 holds the zeros of `stand_ins`.
        self._parameters: dict[tuple[int, int], dict[str, nn.Parameter]] = {}

    def release(self) -> None:
        self._parameters.clear()
        self.dequantized.release()
        self._pool = self._pool.new_empty(0)

    def span(self, block: int, offset: int) -> Span:
        """Return the block's weights at an offset of the pool."""
        spec = self._inventory.blocks[block]
        first = spec.flat_elements(True) if block in self._split else 0
        count = spec.flat_elements(True) + spec.flat_elements(False) - first
        nbytes = count * role_dtype(Role.WEIGHT, self._formats).itemsize
        data = self._pool[offset : offset + nbytes]
        return Span(Role.WEIGHT, data, first, count, self._formats)

    def parameters(
        self, block: int, weights: Span, trained: Span | None = None
    ) -> dict[str, nn.Parameter]:
        """Return the block's parameters by name, as views of `weights`.

        Of a split block, `weights` are the frozen ones, and `trained` never moves. Quantized
        weights are dequantized first: their parameters are valid until those of another block are
        asked for.
        """
        key, spec = (block, weights.data.data_ptr()), self._inventory.blocks[block]
        if key not in self._parameters:
            views = self.dequantized.views(block)
            self._parameters[key] = view_parameters(spec, weights, trained, views)
        if spec.quantized:
            self.dequantized.update(block, _stored_bytes(spec, weights))
        return self._parameters[key]

    def stand_ins(self, block: int) -> dict[str, nn.Parameter]:
        """Return zeros of the block's shapes that take no memory.

        The backward of a linear embedding does not depend on its weights: it needs only shapes.
        """
        key = (block, -1)
        if key not in self._parameters:
            zero = torch.zeros((), dtype=role_dtype(Role.WEIGHT, self._formats)).to(
                self._pool.device
            )
            self._parameters[key] = {
                t.name: _parameter(t, zero.expand(t.shape))
                for t in self._inventory.blocks[block].tensors
            }
        return self._parameters[key]


def view_parameters(
    block: Block,
    weights: Span,
    trained: Span | None = None,
    dequantized: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, nn.Parameter]:
    """Return the parameters of a block by name, as views of its weights.

    Of a split block, `weights` are the frozen ones, and `trained` the others. The parameters of
    quantized tensors are views of `dequantized`.
    """
    parameters, dequantized = {}, dequantized or {}
    for tensor in block.tensors:
        if tensor.name in dequantized:
            flat = dequantized[tensor.name]
        else:
            stored = trained if tensor.trainable and trained is not None else weights
            flat = _stored_values(block, tensor, stored)
        parameters[tensor.name] = _parameter(tensor, flat.view(tensor.shape))
    return parameters


def _stored_bytes(block: Block, weights: Span) -> dict[str, torch.Tensor]:
    """Return the bytes of a block's quantized tensors, by name."""
    return {t.name: _stored_values(block, t, weights).view(torch.uint8) for t in block.quantized}


def _stored_values(block: Block, tensor: TensorSpec, weights: Span) -> torch.Tensor:
    # Frozen tensors follow the trainable ones.
    shift = 0 if tensor.trainable else block.flat_elements(True)
    start = shift + block.offsets(tensor.trainable)[tensor.name]
    return weights.values(start, start + tensor.stored_elements)


def _parameter(tensor: TensorSpec, data: torch.Tensor) -> nn.Parameter:
    # `.data` gives the view a version counter of its own. Views of one pool share a counter
    # otherwise, and autograd would take the arrival of one block for a change to another.
    return nn.Parameter(data.data, requires_grad=tensor.trainable)
