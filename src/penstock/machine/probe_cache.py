"""The saved result of `penstock probe`, and how it is combined with the current machine.

Speeds are measured once and cached. Free memory and the list of devices are read again for every
plan and run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.machine.machine import Gpu, Machine, MemoryNode, StoragePath
from penstock.machine.user_cache import cache_directory

SAME_SIZE = 0.02
"""Relative difference in capacity that still counts as the same memory or drive.

The kernel reserves a slightly different amount of memory at each boot."""


def cache_path() -> Path:
    """Return the path of this machine's saved probe."""
    return cache_directory() / "machine.json"


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


def probed_paths(path: Path | None = None) -> tuple[str, ...]:
    """Return the storage paths in the saved probe; none if it is missing or damaged."""
    path = path or cache_path()
    if not path.is_file():
        return ()
    try:
        return tuple(storage.path for storage in Machine.load(path).storage)
    except PenstockError:
        return ()


def merge_probe(found: Machine, path: Path | None = None) -> tuple[Machine, str]:
    """Add the speeds of the saved probe to `found`, and return it with a note for the user.

    A probe of another machine, a damaged file, and a probe without measurements are ignored. So are
    the speeds of a storage path that is now on another drive.
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
    storage, replaced = _merge_storage(found, probed)
    note = f"Using the speeds measured by `penstock probe` ({path})."
    if replaced:
        note += (
            f" Its speeds of {', '.join(replaced)} are ignored: they were measured on another "
            f"drive. Run `penstock probe --storage` again."
        )
    return replace(_merge(found, probed), storage=storage), note


def same_machine(one: Machine, other: Machine) -> bool:
    """Return whether both have the same processors, memory and GPUs.

    `one` may have fewer nodes: a control group can confine a process to some of them.
    """
    if one.cpu.model != other.cpu.model:
        return False
    if [_gpu_identity(gpu) for gpu in one.gpus] != [_gpu_identity(gpu) for gpu in other.gpus]:
        return False
    nodes = {node.id: node for node in other.nodes}
    return all(node.id in nodes and _same_node(node, nodes[node.id]) for node in one.nodes)


def _gpu_identity(gpu: Gpu) -> tuple[int, str, str]:
    return gpu.index, gpu.name, gpu.uuid


def _same_node(one: MemoryNode, other: MemoryNode) -> bool:
    same_kind = (one.id, one.kind) == (other.id, other.kind)
    return same_kind and _similar(one.capacity, other.capacity)


def _merge(found: Machine, probed: Machine) -> Machine:
    """Add the speeds of nodes, GPUs, their links and transfers; everything else is as found now."""
    nodes = tuple(
        replace(node, latency=probed.node(node.id).latency, rates=probed.node(node.id).rates)
        for node in found.nodes
    )
    ids = {node.id for node in nodes}
    gpus = tuple(
        replace(gpu, **{name: getattr(old, name) for name in _GPU_SPEEDS})
        for gpu, old in zip(found.gpus, probed.gpus, strict=True)
    )
    return replace(
        found,
        nodes=nodes,
        gpus=gpus,
        node_copies=tuple(c for c in probed.node_copies if {c.source, c.target} <= ids),
        transfers=tuple(transfer for transfer in probed.transfers if transfer.node in ids),
        gpu_links=probed.gpu_links or found.gpu_links,
        process_memory=probed.process_memory,
    )


_GPU_SPEEDS = (
    *("matmul_flops", "block_flops", "compiled_flops", "attention_flops", "memory_bandwidth"),
)


def _merge_storage(
    found: Machine, probed: Machine
) -> tuple[tuple[StoragePath, ...], tuple[str, ...]]:
    """Return the storage with its speeds, and the paths that are now on another drive."""
    measured = {storage.path: storage for storage in probed.storage if storage.rates}
    merged, replaced = [], []
    for storage in found.storage:
        old = measured.get(storage.path)
        if old is not None and _same_drive(storage, old):
            storage = replace(storage, rates=old.rates, rated_writes=old.rated_writes)
        elif old is not None:
            replaced.append(storage.path)
        merged.append(storage)
    return tuple(merged), tuple(replaced)


def _same_drive(one: StoragePath, other: StoragePath) -> bool:
    """Compare what stays the same across boots; the name of the device may change."""
    same_kind = (one.model, one.file_system) == (other.model, other.file_system)
    return same_kind and _similar(one.capacity or 0, other.capacity or 0)


def _similar(one: int, other: int) -> bool:
    return abs(one - other) <= SAME_SIZE * max(one, other)
