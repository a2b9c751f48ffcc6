"""The peak of live bytes when Inductor runs a graph, from the graph alone.

Inductor fuses operations, so most intermediate values of a graph never exist in memory. This module
decides which do, by Inductor's own rules, and how long they live:

- Matrix products, attention and custom operations write their outputs to memory and read their
  inputs from it. Reductions write their outputs.
- A pointwise operation is computed inside the kernels that use it. It gets memory if it is an
  output or an input of an operation above, or if several kernels would repeat too much: more than
  `MOST_READS` reads or `MOST_OPERATIONS` operations.
- A view has no memory of its own.
- A pointwise result takes over the memory of a value of the same size that dies there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from penstock.model.lifetimes import Lifetime, peak_nbytes
from penstock.model.operation_workspace import operation_workspace
from penstock.model.storage_counter import GRAIN
from penstock.units import round_up

MOST_READS = 4
"""Reads of a pointwise value with several users, up to which each user computes it again."""

MOST_OPERATIONS = 30
"""Operations of such a value, up to which each user computes it again."""

MOST_FUSED_READS = 8
"""Reads of a kernel, beyond which its inputs are computed first."""

MOST_FUSED_OPERATIONS = 200
"""Operations of a kernel, beyond which its inputs are computed first."""

MOST_CONCATENATED = 8
"""Inputs of a concatenation that one kernel computes; with more, each is written in its place."""

VIEWS = frozenset((
    "view", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "t",
    "transpose", "_unsafe_view", "split", "split_with_sizes", "reshape", "as_strided", "detach",
    "diagonal", "unbind",
))  # fmt: skip

REDUCTIONS = frozenset((
    "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "argmax", "argmin", "prod",
    "any", "all", "logsumexp", "_softmax", "_log_softmax", "native_layer_norm",
    "native_layer_norm_backward", "cumsum", "_softmax_backward_data",
    "_log_softmax_backward_data",
))  # fmt: skip

POINTWISE = frozenset((
    "full", "full_like", "empty", "clone", "_to_copy", "slice_scatter", "select_scatter", "cat",
    "constant_pad_nd", "where", "arange", "scalar_tensor", "zeros", "ones", "zeros_like",
    "ones_like", "copy", "lift_fresh_copy", "embedding", "gather", "index", "repeat", "flip",
    "triu", "tril", "eye", "rand", "roll", "pow", "convert_element_type", "iota", "fma",
    "inductor_lookup_seed", "inductor_random",
))  # fmt: skip
"""Operations that are computed inside other kernels although torch does not tag them pointwise."""


@dataclass(eq=False, slots=True)
class Buffer:
    """A value that exists in memory."""

    nbytes: int
    born: int
    """Position of the node that writes it; -1 if it exists when the graph starts."""
    last: int
    """Position of the last node that reads it."""
    pointwise: bool = False
    """Whether a fused kernel writes it, which may do so in the place of an input."""


@dataclass(eq=False, slots=True)
class _Value:
    """The value of one node, or of several if views share it."""

    reads: set[Buffer]
    """Buffers that a kernel reads to compute it; only `buffer`, once it has one."""
    operations: int = 0
    buffer: Buffer | None = None
    position: int = -1
    nbytes: int = 0
    members: dict[int, _Value] = field(default_factory=dict)
    """The values of a tuple, by index."""


@dataclass(frozen=True, slots=True)
class GraphUse:
    """The memory that a graph uses."""

    lifetimes: Sequence[Lifetime]
    """Outputs and intermediate values, and the inputs that the caller asked to count."""

    outputs: Sequence[Buffer | None]
    """The buffer of each output. None for an output that is an input, or not a tensor."""

    @property
    def peak(self) -> int:
        """The most bytes alive at any time."""
        return peak_nbytes(self.lifetimes)


def graph_use(graph: GraphModule, inputs: Mapping[int, Buffer] | None = None) -> GraphUse:
    """Return the memory that a graph uses.

    `inputs` are buffers that exist only for the graph, by the number of the input: they count, and
    die after their last use. All other inputs belong to the caller, and do not count.
    """
    return _Liveness(graph, inputs or {}).use()


def tensor_nbytes(value: Any) -> int:
    """Return the bytes that a new contiguous tensor of this shape takes."""
    if not isinstance(value, torch.Tensor):
        return 0
    return round_up(value.numel() * value.element_size(), GRAIN)


class _Liveness:
    """Walks over a graph once and records buffers and their lifetimes."""

    def __init__(self, graph: GraphModule, inputs: Mapping[int, Buffer]) -> None:
        self._nodes = list(graph.graph.nodes)
        self._end = len(self._nodes)
        self._buffers: list[Buffer] = []
        self._values: dict[Node, _Value] = {}
        self._outputs: list[Buffer | None] = []
        self._given = inputs
        self._started: dict[Buffer, Buffer] = {}  # a buffer of the caller -> its life in this graph
        self._placeholders = 0

    def use(self) -> GraphUse:
        for position, node in enumerate(self._nodes):
            if node.op == "placeholder":
                self._values[node] = self._input()
            elif node.op == "get_attr":
                self._values[node] = _Value(set())
            elif node.op == "output":
                self._finish(node)
            else:
                self._values[node] = self._compute(node, position)
        return GraphUse(self._lifetimes(), self._outputs)

    def _input(self) -> _Value:
        given = self._given.get(self._placeholders)
        self._placeholders += 1
        # A buffer of the caller's, which does not count: one object stands for each of them.
        buffer = Buffer(0, -1, self._end)
        if given is not None:
            if given not in self._started:
                self._started[given] = self._add(Buffer(given.nbytes, -1, -1))
            buffer = self._started[given]
        return _Value({buffer}, buffer=buffer)

    def _finish(self, node: Node) -> None:
        outputs = []
        for leaf in tree_leaves(node.args):
            outputs.append(self._realize(self._values[leaf]) if isinstance(leaf, Node) else None)
        counted = set(self._buffers)
        for buffer in outputs:
            if buffer is not None:
                buffer.last = self._end + 1
            self._outputs.append(buffer if buffer in counted else None)

    def _compute(self, node: Node, position: int) -> _Value:
        inputs = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
        values = [self._values[each] for each in inputs]
        name = operation_name(node)
        if node.target is operator.getitem:
            index = int(node.args[1])  # type: ignore[arg-type]
            return values[0].members.get(index, values[0])
        if name in VIEWS and values:
            return values[0]
        if name == "cat" and not self._is_fused_concatenation(values):
            return self._concatenate(node, position, values)
        if is_pointwise(node):
            return self._pointwise(node, position, values)
        if name in REDUCTIONS:
            for value in values:
                self._read(value.reads, position)
            return self._made(node.meta.get("val"), position)
        return self._external(node, position, inputs, values)

    # Kinds of operations.

    def _pointwise(self, node: Node, position: int, values: Sequence[_Value]) -> _Value:
        reads, operations = _fused(values)
        if len(reads) > MOST_FUSED_READS or operations > MOST_FUSED_OPERATIONS:
            for value in values:
                if value.buffer is None and len(value.reads) > 1:
                    self._realize(value)
            reads, operations = _fused(values)
        nbytes = tensor_nbytes(node.meta.get("val"))
        value = _Value(reads, operations + 1, position=position, nbytes=nbytes)
        repeated = len(reads) > MOST_READS or operations + 1 > MOST_OPERATIONS
        if len(node.users) > 1 and repeated:
            self._realize(value)
        return value

    def _external(
        self, node: Node, position: int, inputs: Sequence[Node], values: Sequence[_Value]
    ) -> _Value:
        for value in values:
            self._read({self._realize(value)}, position)
        tensors = [v for v in (n.meta.get("val") for n in inputs) if isinstance(v, torch.Tensor)]
        workspace = operation_workspace(node.target, tensors) if _is_operation(node) else 0
        if workspace:
            self._add(Buffer(round_up(workspace, GRAIN), position, position))
        if "auto_functionalized" in str(node.target):
            return self._updated_in_place(node)
        return self._made(node.meta.get("val"), position)

    def _updated_in_place(self, node: Node) -> _Value:
        """An operation on its own inputs. The compiler makes its updates in place again."""
        bases = node.kwargs.get("_all_bases", ())
        assert isinstance(bases, Sequence)
        results = node.meta.get("val")
        count = len(results) if isinstance(results, (tuple, list)) else 1
        value = _Value(set())
        # The last results are the updated tensors.
        for offset, base in enumerate(reversed(bases)):
            value.members[count - 1 - offset] = self._values[base]  # type: ignore[index]
        return value

    def _is_fused_concatenation(self, values: Sequence[_Value]) -> bool:
        unrealized = any(value.buffer is None for value in values)
        return unrealized and len(values) <= MOST_CONCATENATED

    def _concatenate(self, node: Node, position: int, values: Sequence[_Value]) -> _Value:
        """Parts are written in their places, so the whole exists from the first part on."""
        whole = self._add(Buffer(tensor_nbytes(node.meta.get("val")), position, position))
        for value in values:
            part = value.buffer
            own = part is not None and part.born >= 0 and part.last <= part.born
            if value.buffer is None:
                whole.born = min(whole.born, value.position if value.position >= 0 else position)
                self._read(value.reads, position)
            elif own and part is not None:
                whole.born = min(whole.born, part.born)
                part.nbytes = 0
            else:
                self._read(value.reads, position)
        return _Value({whole}, buffer=whole)

    # Buffers.

    def _made(self, made: Any, position: int) -> _Value:
        """Return the value of a node that writes its outputs to memory."""
        if isinstance(made, (tuple, list)):
            members = {i: self._made(each, position) for i, each in enumerate(made)}
            return _Value(set(), members=members)
        buffer = self._add(Buffer(tensor_nbytes(made), position, position))
        return _Value({buffer}, buffer=buffer)

    def _realize(self, value: _Value) -> Buffer:
        """Give a value memory, from the position where it is computed."""
        if value.buffer is None:
            self._read(value.reads, value.position)
            new = Buffer(value.nbytes, value.position, value.position, pointwise=True)
            value.buffer = self._add(new)
            value.reads, value.operations = {value.buffer}, 0
        return value.buffer

    def _add(self, buffer: Buffer) -> Buffer:
        self._buffers.append(buffer)
        return buffer

    def _read(self, buffers: Iterable[Buffer], position: int) -> None:
        for buffer in buffers:
            buffer.last = max(buffer.last, position)

    def _lifetimes(self) -> list[Lifetime]:
        """Return how long memory is in use. What takes over memory continues its lifetime.

        The key is the caller's buffer for an input, and otherwise the last buffer in the memory.
        """
        successors = self._successors()
        given = {here: there for there, here in self._started.items()}
        followers = set(successors.values())
        lifetimes = []
        for buffer in self._buffers:
            if buffer not in followers:
                last = buffer
                while last in successors:
                    last = successors[last]
                key = given.get(buffer, last)
                lifetimes.append(Lifetime(key, buffer.nbytes, buffer.born, last.last + 1))
        return lifetimes

    def _successors(self) -> dict[Buffer, Buffer]:
        """Return the pointwise result that takes over a buffer's memory, for each that has one."""
        dying: dict[tuple[int, int], list[Buffer]] = {}
        for buffer in self._buffers:
            if buffer.born < buffer.last:
                dying.setdefault((buffer.last, buffer.nbytes), []).append(buffer)
        taken: dict[Buffer, Buffer] = {}
        for buffer in self._buffers:
            others = dying.get((buffer.born, buffer.nbytes)) if buffer.pointwise else None
            if others:
                taken[others.pop()] = buffer
        return taken


def operation_name(node: Node) -> str:
    """Return the name of an operation without its overload, or "" for any other function."""
    return str(node.target._opname) if _is_operation(node) else ""  # type: ignore[union-attr]


def is_pointwise(node: Node) -> bool:
    """Return whether a kernel that uses the node's value can compute it itself."""
    if not _is_operation(node):
        return False
    tags: Any = node.target.tags  # type: ignore[union-attr]
    return torch.Tag.pointwise in tags or operation_name(node) in POINTWISE


def _is_operation(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _fused(values: Sequence[_Value]) -> tuple[set[Buffer], int]:
    """Return the buffers that a kernel reads to compute these values, and its operations."""
    reads: set[Buffer] = set()
    for value in values:
        reads |= value.reads
    return reads, sum(value.operations for value in values)
