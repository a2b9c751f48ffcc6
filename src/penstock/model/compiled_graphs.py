"""Capture the graphs that torch's compiler makes of a function, without compiling them.

The function is traced with fake tensors and divided into a forward and a backward graph as Inductor
does it: with its decompositions, and with its choice of what is saved and what is recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from penstock.model.graph_memory import Buffer, graph_use
from penstock.model.lifetimes import NEVER, Lifetime


@dataclass(frozen=True, slots=True)
class TrainingGraphs:
    """The graphs of a function that is differentiated."""

    forward: GraphModule
    """Returns the function's outputs, followed by what is saved for backward."""
    backward: GraphModule
    """Takes what is saved, by the names of the forward graph, and gradients of outputs."""


class _CapturedError(Exception):
    """Raised to leave the compiler once it has made its graphs."""


def capture_inference(function: Callable[..., torch.Tensor], arguments: Any) -> GraphModule:
    """Return the graph of a function that is not differentiated."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Sequence[Any]) -> NoReturn:
        graphs.append(graph)
        raise _CapturedError

    with torch.no_grad():
        _trace(function, arguments, fw_compiler=keep)
    return graphs[0]


def capture_training(function: Callable[..., torch.Tensor], arguments: Any) -> TrainingGraphs:
    """Return the forward and the backward graph of a function."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[TrainingGraphs] = []

    def keep(joint: GraphModule, inputs: Any, **options: Any) -> NoReturn:
        partition: Any = min_cut_rematerialization_partition
        graphs.append(TrainingGraphs(*partition(joint, inputs, compiler="inductor", **options)))
        raise _CapturedError

    with torch.enable_grad():
        _trace(function, arguments, fw_compiler=_unused, partition_fn=keep)
    return graphs[0]


def _unused(*_: Any) -> NoReturn:
    raise AssertionError("the graphs are captured before they are compiled")


def inference_lifetimes(graph: GraphModule) -> Sequence[Lifetime]:
    """Return the memory that a graph uses beyond its inputs."""
    return graph_use(graph).lifetimes


def training_lifetimes(graphs: TrainingGraphs) -> Sequence[Lifetime]:
    """Return the memory that is used to compute a function and to differentiate it."""
    forward = graph_use(graphs.forward)
    out, *saved = forward.outputs
    buffers: dict[str, Buffer] = {}
    for node, buffer in zip(_outputs(graphs.forward)[1:], saved, strict=True):
        # The caller holds the output until backward has ended, whether it is saved or not.
        if buffer is not None and buffer is not out and isinstance(node, Node):
            buffers[node.name] = buffer
    placeholders = [node for node in graphs.backward.graph.nodes if node.op == "placeholder"]
    inputs = {i: buffers[n.name] for i, n in enumerate(placeholders) if n.name in buffers}
    backward = graph_use(graphs.backward, inputs)
    return _joined(forward.lifetimes, backward.lifetimes, kept=out)


def saved_lifetimes(graphs: TrainingGraphs) -> Sequence[Lifetime]:
    """Return the memory that the forward graph uses, with no end for what is saved for backward."""
    forward = graph_use(graphs.forward)
    _, *saved = forward.outputs
    return [each._replace(end=NEVER) if each.key in saved else each for each in forward.lifetimes]


def _joined(
    forward: Sequence[Lifetime], backward: Sequence[Lifetime], kept: Buffer | None
) -> list[Lifetime]:
    """Put backward after forward. What it takes from forward continues there."""
    turn = max((each.end for each in forward), default=0)
    end = turn + max((each.end for each in backward), default=0) + 1
    continued = {each.key: turn + each.end for each in backward if each.start < 0}
    joined = [
        each._replace(end=end if each.key is kept else continued.get(each.key, each.end))
        for each in forward
    ]
    return joined + [
        each._replace(start=turn + each.start, end=turn + each.end)
        for each in backward
        if each.start >= 0
    ]


def _outputs(graph: GraphModule) -> list[Any]:
    (node,) = (node for node in graph.graph.nodes if node.op == "output")
    return list(tree_leaves(node.args))


def _trace(function: Callable[..., torch.Tensor], arguments: Any, **options: Any) -> None:
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    leaves, spec = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(*given: torch.Tensor) -> torch.Tensor:
        # Only tensors are arguments of the graph. Everything else is fixed, as in compiled code.
        replaced = iter(given)
        every = [next(replaced) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return function(*tree_unflatten(every, spec))

    traced: Any = aot_function(run, decompositions=select_decomp_table(), **options)
    with _compiling(), contextlib.suppress(_CapturedError):
        traced(*tensors)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let code that asks see that it is being compiled; it may then run other operations."""
    flags: Any = torch.compiler
    before = flags._is_compiling_flag
    flags._is_compiling_flag = True
    try:
        yield
    finally:
        flags._is_compiling_flag = before
