"""Fine-tune language models larger than the GPU's memory.

Public names are imported on first use: `import penstock` loads neither torch nor the native core,
so that planning works on machines without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock import generate, kv, optim
    from penstock.autograd.stream import stream
    from penstock.engine.prepare import prepare
    from penstock.errors import PenstockError
    from penstock.machine.discovery import discover
    from penstock.machine.machine import Machine
    from penstock.memory.arena import Arena
    from penstock.memory.placement import Interleave, Node, Stripe, placing
    from penstock.memory.residency import Residency
    from penstock.memory.tensors import empty, from_tensor, full, move, where, zeros
    from penstock.model.survey import survey
    from penstock.observe.observer import observe
    from penstock.plan.budget import Budget
    from penstock.plan.plan import Plan
    from penstock.plan.workload import Workload
    from penstock.planner import make_plan
    from penstock.settings import Settings
    from penstock.storage.errors import StorageError
    from penstock.storage.store import Store


__all__ = [
    # placement
    "Node",
    "Stripe",
    "Interleave",
    "placing",
    # placed tensors
    "empty",
    "zeros",
    "full",
    "from_tensor",
    "where",
    "move",
    "Residency",
    "Arena",
    # storage
    "Store",
    # optimizers
    "optim",
    # generation
    "kv",
    "generate",
    # machine
    "Machine",
    "discover",
    # planning
    "survey",
    "Workload",
    "Budget",
    "Plan",
    "make_plan",
    # training
    "prepare",
    "stream",
    "Settings",
    # profiling
    "observe",
    # exceptions
    "PenstockError",
    "StorageError",
]

_MODULES = {
    "Node": "memory.placement",
    "Stripe": "memory.placement",
    "Interleave": "memory.placement",
    "placing": "memory.placement",
    "empty": "memory.tensors",
    "zeros": "memory.tensors",
    "full": "memory.tensors",
    "from_tensor": "memory.tensors",
    "where": "memory.tensors",
    "move": "memory.tensors",
    "Residency": "memory.residency",
    "Arena": "memory.arena",
    "Store": "storage.store",
    "Machine": "machine.machine",
    "discover": "machine.discovery",
    "survey": "model.survey",
    "Workload": "plan.workload",
    "Budget": "plan.budget",
    "Plan": "plan.plan",
    "make_plan": "planner",
    "prepare": "engine.prepare",
    "stream": "autograd.stream",
    "Settings": "settings",
    "PenstockError": "errors",
    "StorageError": "storage.errors",
}

_PACKAGES = {"generate", "kv", "observe", "optim"}
"""Packages that are public names themselves. `penstock.observe` is also callable."""


def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _PACKAGES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(f"penstock.{name}")
    value = getattr(importlib.import_module(f"penstock.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
