"""The saved result of `penstock probe`, and how it is combined with the current machine.

Speeds are measured once and cached. Free memory and the list of devices are read again for every
plan and run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.machine.machine import Gpu, Machine, MemoryNode

SAME_MEMORY = 0.02
"""Relative difference in a node's capacity that still counts as the same memory.

The kernel reserves a slightly different amount at each boot."""


def cache_path() -> Path:
    """Return the path of this machine's saved probe."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "penstock" / "machine.json"


def save_probe(machine: Machine) -> str:
    """Save a probe for later plans and runs on this machine.

    Returns a sentence that says where it was saved, or why it could not be saved.
    """
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except (OSError, PenstockError) as error:
        return f"not saved for plans and runs on this machine: {path}: {error}"
    return f"saved in {path} for plans and runs on this machine"


def merge_probe(found: Machine, path: Path | None = None) -> tuple[Machine, str]:
    """Add the speeds of the saved probe to `found`, and return it with a note for the user.

    A probe of another machine, a damaged file, and a probe without measurements are ignored.
    """
    path = path or cache_path()
    if not path.is_file():
        return found, ""
    try:
        probed = Machine.load(path)
    except PenstockError as error:
        return found, f"The saved probe is ignored: {error}"
    if not any(node.rates for node in probed.nodes):
        return found, ""
    if not same_machine(found, probed):
        return found, (
            f"The saved probe {path} is ignored: it was measured on another machine. "
            f"Run `penstock probe` again."
        )
    return _merge(found, probed), f"Using the speeds measured by `penstock probe` ({path})."


def same_machine(one: Machine, other: Machine) -> bool:
    """Return whether both have the same processors, memory and GPUs."""
    if one.cpu.model != other.cpu.model or len(one.nodes) != len(other.nodes):
        return False
    if [_gpu_identity(gpu) for gpu in one.gpus] != [_gpu_identity(gpu) for gpu in other.gpus]:
        return False
    return all(map(_same_node, one.nodes, other.nodes))


def _gpu_identity(gpu: Gpu) -> tuple[int, str, str]:
    return gpu.index, gpu.name, gpu.uuid


def _same_node(one: MemoryNode, other: MemoryNode) -> bool:
    similar = abs(one.capacity - other.capacity) <= SAME_MEMORY * max(one.capacity, other.capacity)
    return (one.id, one.kind) == (other.id, other.kind) and similar


def _merge(found: Machine, probed: Machine) -> Machine:
    nodes = tuple(
        replace(node, latency=old.latency, rates=old.rates)
        for node, old in zip(found.nodes, probed.nodes, strict=True)
    )
    gpus = tuple(
        replace(old, free=gpu.free, memory=gpu.memory, node=gpu.node)
        for gpu, old in zip(found.gpus, probed.gpus, strict=True)
    )
    known = {storage.path for storage in found.storage}
    # The free space at the time of the probe is out of date.
    storage = tuple(replace(s, free=None) for s in probed.storage if s.path not in known)
    return replace(
        found,
        nodes=nodes,
        gpus=gpus,
        node_copies=probed.node_copies,
        transfers=probed.transfers,
        storage=(*found.storage, *storage),
    )
