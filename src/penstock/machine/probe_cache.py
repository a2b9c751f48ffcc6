"""What `penstock probe` kept of this machine. Room: measure.

A probe is taken once; what is free, and what is there, is looked at anew with every run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.machine.machine import Gpu, Machine, MemoryNode

SAME_MEMORY = 0.02
"""By how much a node's capacity may differ from boot to boot: the kernel keeps some for itself."""


def cache_path() -> Path:
    """Where a probe of this machine is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "penstock" / "machine.json"


def save_probe(machine: Machine) -> str:
    """Keep a probe for plans and runs on this machine; says where, or why not."""
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except (OSError, PenstockError) as refused:
        return f"not kept for plans and runs on this machine: {path}: {refused}"
    return f"kept in {path} for plans and runs on this machine"


def merge_probe(found: Machine, path: Path | None = None) -> tuple[Machine, str]:
    """The machine with the speeds of the kept probe, and what to say about it. A file of another
    machine, a damaged one, and one that measured nothing are left alone."""
    path = path or cache_path()
    if not path.is_file():
        return found, ""
    try:
        probed = Machine.load(path)
    except PenstockError as wrong:
        return found, f"{path} is not used: {wrong}"
    if not any(node.rates for node in probed.nodes):
        return found, ""
    if not same_machine(found, probed):
        return found, f"{path} is not used: it is of another machine; `penstock probe` again."
    return _merged(found, probed), f"Speeds of this machine are as probed ({path})."


def same_machine(one: Machine, other: Machine) -> bool:
    """The same processors, memory and GPUs."""
    if one.cpu.model != other.cpu.model or len(one.nodes) != len(other.nodes):
        return False
    if [_card(gpu) for gpu in one.gpus] != [_card(gpu) for gpu in other.gpus]:
        return False
    return all(map(_same_node, one.nodes, other.nodes))


def _card(gpu: Gpu) -> tuple[int, str, str]:
    return gpu.index, gpu.name, gpu.uuid


def _same_node(one: MemoryNode, other: MemoryNode) -> bool:
    near = abs(one.capacity - other.capacity) <= SAME_MEMORY * max(one.capacity, other.capacity)
    return (one.id, one.kind) == (other.id, other.kind) and near


def _merged(found: Machine, probed: Machine) -> Machine:
    nodes = tuple(
        replace(node, latency=old.latency, rates=old.rates)
        for node, old in zip(found.nodes, probed.nodes, strict=True)
    )
    gpus = tuple(
        replace(old, free=gpu.free, memory=gpu.memory, node=gpu.node)
        for gpu, old in zip(found.gpus, probed.gpus, strict=True)
    )
    known = {storage.path for storage in found.storage}
    # How much is free there now is not what it was.
    storage = tuple(replace(s, free=None) for s in probed.storage if s.path not in known)
    return replace(
        found,
        nodes=nodes,
        gpus=gpus,
        node_copies=probed.node_copies,
        transfers=probed.transfers,
        storage=(*found.storage, *storage),
    )
