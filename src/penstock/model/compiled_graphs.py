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


@dataclass(frozen=True, slots=True)
class TrainingGraphs:
    """The graphs of a function that is differentiated."""

    forward: GraphModule
    """Returns the function's output, followed by what is saved for backward."""
    backward: GraphModule
    """Takes what is saved, by the names of the forward graph, and the output's gradient."""


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


def inference_peak(graph: GraphModule) -> int:
    """Return the most bytes alive while a graph runs, beyond its inputs."""
    return graph_use(graph).peak


def training_peak(graphs: TrainingGraphs) -> int:
    """Return the most bytes alive while a function is computed and differentiated."""
    forward = graph_use(graphs.forward)
    out, *saved = forward.outputs
    buffers: dict[str, Buffer] = {}
    for node, buffer in zip(_outputs(graphs.forward)[1:], saved, strict=True):
        if buffer is not None and isinstance(node, Node):
            buffers[node.name] = buffer
    placeholders = [node for node in graphs.backward.graph.nodes if node.op == "placeholder"]
    inputs = {i: buffers[n.name] for i, n in enumerate(placeholders) if n.name in buffers}
    # The caller holds the output until backward has ended. It counts once if it is saved as well.
    inputs = {i: buffer for i, buffer in inputs.items() if buffer is not out}
    backward = graph_use(graphs.backward, inputs).peak
    return max(forward.peak, backward + (out.nbytes if out is not None else 0))


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
