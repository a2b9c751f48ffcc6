"""Working memory that was measured or traced before, in the user's cache.

An entry is a JSON file under a key that contains everything on which working memory depends.
Reading it needs no torch, so that `penstock plan` stays fast.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from penstock import records
from penstock.machine.user_cache import cache_directory, code_fingerprint, load_entry, save_entry
from penstock.model.adapters import Adapter
from penstock.model.inventory import Inventory
from penstock.plan.working_memory import MemoryOrigin, WorkingMemory
from penstock.plan.workload import Workload

PACKAGES = ("torch", "triton", "transformers", "peft")
"""Packages whose version may change how much memory a step needs."""

_NOT_SHAPE = ("transformers_version", "torch_dtype", "dtype", "attn_implementation", "use_cache")
"""Fields of a config that do not describe the model, or that Penstock sets itself."""


def memory_key(
    config: Any, inventory: Inventory, workload: Workload, gpu: str, adapter: Adapter | None = None
) -> str:
    """Return the key of a model kind with a workload on a GPU, named as the driver names it.

    The number of sequences per step is part of it only as far as it decides whether the head has a
    sum of its own. A last, smaller micro-batch needs less than the others.
    """
    fields = {
        name: value
        for name, value in json.loads(json.dumps(config.to_dict(), default=str)).items()
        if not name.startswith("_") and name not in _NOT_SHAPE
    }
    parts = {
        "config": fields,
        "class": inventory.architecture,  # a live model may have a class of its own
        "tensors": inventory.fingerprint,
        "context": workload.context,
        "dtype": workload.dtype,
        "numerics": records.to_json(workload.numerics),
        "head_sum": workload.has_head_sum,  # only in steps of several micro-batches
        "gpu": gpu,
        "code": code_fingerprint(),
        "adapter": None if adapter is None else adapter.key,
        "versions": {name: _version(name) for name in PACKAGES},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_memory(key: str, origin: MemoryOrigin) -> WorkingMemory | None:
    """Return an entry, or None if there is none, it is damaged, or others could have written it."""
    memory = load_entry(WorkingMemory, _path(key, origin))
    return memory if memory is not None and memory.origin == origin else None


def save_memory(key: str, memory: WorkingMemory) -> None:
    """Write an entry that only this user can read and write; without success if that fails."""
    save_entry(memory, _path(key, memory.origin))


def keep_measured(key: str, measured: WorkingMemory) -> WorkingMemory:
    """Save what was measured, unless an earlier measurement says the same; return the one to use.

    Figures differ by a little from run to run. With the earlier ones, the next plan is the same.
    """
    earlier = load_memory(key, "measured")
    if earlier is not None and earlier.covers(measured):
        return earlier
    save_memory(key, measured)
    return measured


def _path(key: str, origin: MemoryOrigin) -> Path:
    return cache_directory() / "working_memory" / f"{origin}-{key}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
