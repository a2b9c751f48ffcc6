"""This host as a training machine of its own: the CPU computes where a GPU would. Room: decide.

What is called HBM is then a share of the first node's memory, as large as the budget says. Nothing
is a CUDA context, and copies are copies within memory.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.machine import Figure, Machine, MemoryNode, MemoryRate

ASSUMED_COPY = 8e9
"""Bytes per second that a node nobody measured copies: one channel of DDR4, about. The order of
magnitude is enough where a CPU computes, because that takes most of the step."""


def cpu_machine(machine: Machine) -> Machine:
    """The same host without its GPUs, and with a rate for every node.

    How fast its cores compute is the cost model's to say (`cost.rates`), and said in what the plan
    assumed. Paths of the budget still have to be added: `budget.with_paths`.
    """
    name = f"{machine.name or 'this host'} (CPU)"
    nodes = tuple(map(_with_rates, machine.nodes))
    return replace(machine, name=name, nodes=nodes, gpus=(), transfers=())


def _with_rates(node: MemoryNode) -> MemoryNode:
    if node.rates:
        return node
    figure = Figure(median=ASSUMED_COPY, low=ASSUMED_COPY, high=ASSUMED_COPY, samples=0)
    return replace(node, rates=(MemoryRate(operation="copy", bytes_per_second=figure),))
