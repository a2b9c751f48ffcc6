"""Decide on which memory node the host buffers between NVMe and the rest are allocated."""

from __future__ import annotations

from penstock.machine.machine import Gpu, Machine


def choose_staging_node(machine: Machine) -> int:
    """Return the DRAM node nearest to the first GPU; without a GPU, the first DRAM node.

    All staged bytes that the GPU uses cross its link, so the buffers belong next to it, whether or
    not the plan stores anything else there. A plan records the node (`Placement.staging_node`), and
    the engine, the capacity check, the traffic and the cost model read it from there.
    """
    return nearest_dram_node(machine, machine.gpus[0]) if machine.gpus else machine.dram_nodes[0].id


def nearest_dram_node(machine: Machine, gpu: Gpu) -> int:
    """Return the DRAM node nearest to a GPU; the first one if the machine file does not say."""
    dram = [node.id for node in machine.dram_nodes]
    if gpu.node is None:
        return dram[0]
    if gpu.node in dram:
        return gpu.node
    distances = machine.node(gpu.node).distances
    return min(dram, key=lambda node: (distances.get(node, float("inf")), node))
