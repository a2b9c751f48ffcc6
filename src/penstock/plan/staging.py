"""Decide on which memory node the host buffers between NVMe and the rest are allocated."""

from __future__ import annotations

from penstock.machine.machine import Machine


def choose_staging_node(machine: Machine) -> int:
    """Return the DRAM node nearest to the first GPU; without a GPU, the first DRAM node.

    All staged bytes that the GPU uses cross its link, so the buffers belong next to it, whether or
    not the plan stores anything else there. A plan records the node (`Placement.staging_node`), and
    the engine, the capacity check, the traffic and the cost model read it from there.
    """
    dram = [node.id for node in machine.dram_nodes]
    gpu_node = machine.gpus[0].node if machine.gpus else None
    if gpu_node is None:
        return dram[0]
    if gpu_node in dram:
        return gpu_node
    distances = machine.node(gpu_node).distances
    return min(dram, key=lambda node: (distances.get(node, float("inf")), node))
