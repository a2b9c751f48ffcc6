"""Decide where the figures of a model's working memory come from.

The order is: measured on this kind of GPU by an earlier run, then estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.memory_cache import load_memory, memory_key
from penstock.plan.working_memory import WorkingMemory, WorkingMemorySource
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload


def working_memory_source(
    config: Any, machine: Machine, *, own_loss: bool = False
) -> WorkingMemorySource:
    """Return the source for a model's config on a machine.

    A loss function of the user's own may need any amount of memory, so nothing that was measured
    without it is used.
    """
    gpu = machine.gpus[0].name if machine.gpus and not own_loss else ""
    return _remembered(lambda inventory, workload: _find(config, inventory, workload, gpu))


def _find(config: Any, inventory: Inventory, workload: Workload, gpu: str) -> WorkingMemory:
    if gpu and config is not None:
        measured = load_memory(memory_key(config, inventory, workload, gpu), "measured")
        if measured is not None:
            return measured
    return estimate_working_memory(inventory, workload)


def _remembered(
    find: Callable[[Inventory, Workload], WorkingMemory],
) -> WorkingMemorySource:
    """Ask only once for each workload: the planner asks for every candidate."""
    found: dict[tuple[str, Workload], WorkingMemory] = {}

    def source(inventory: Inventory, workload: Workload, /) -> WorkingMemory:
        key = inventory.fingerprint, workload
        if key not in found:
            found[key] = find(inventory, workload)
        return found[key]

    return source
