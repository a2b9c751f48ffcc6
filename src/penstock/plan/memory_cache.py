"""Working memory that was measured or traced before, in the user's cache.

An entry is a JSON file under a key that contains everything on which working memory depends.
Reading it needs no torch, so that `penstock plan` stays fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import stat
from pathlib import Path
from typing import Any

from penstock import records
from penstock.errors import PenstockError, PlanError
from penstock.machine.probe_cache import cache_path
from penstock.model.inventory import Inventory
from penstock.plan.working_memory import MemoryOrigin, WorkingMemory
from penstock.plan.workload import Workload
from penstock.version import __version__

PACKAGES = ("torch", "triton", "transformers")
"""Packages whose version may change how much memory a step needs."""

_NOT_SHAPE = ("transformers_version", "torch_dtype", "dtype", "attn_implementation", "use_cache")
"""Fields of a config that do not describe the model, or that Penstock sets itself."""


def memory_key(config: Any, inventory: Inventory, workload: Workload, gpu: str) -> str:
    """Return the key of a model kind with a workload on a GPU, named as the driver names it.

    The number of sequences per step is part of it only as far as it decides whether the head has a
    sum of its own. A last, smaller micro-batch needs less than the others.
    """
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _NOT_SHAPE
    }
    parts = {
        "config": fields,
        "tensors": inventory.fingerprint,
        "context": workload.context,
        "dtype": workload.dtype,
        "numerics": records.to_json(workload.numerics),
        "head_sum": workload.has_head_sum,  # only in steps of several micro-batches
        "gpu": gpu,
        "versions": {"penstock": __version__, **{name: _version(name) for name in PACKAGES}},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_memory(key: str, origin: MemoryOrigin) -> WorkingMemory | None:
    """Return an entry, or None if there is none, it is damaged, or others could have written it."""
    path = _path(key, origin)
    try:
        if not (_is_private(path.parent) and _is_private(path)):
            return None
        memory = records.load(WorkingMemory, path, error=PlanError)
    except (OSError, PenstockError):
        return None
    return memory if memory.origin == origin else None


def save_memory(key: str, memory: WorkingMemory) -> None:
    """Write an entry that only this user can read and write; without success if that fails."""
    path = _path(key, memory.origin)
    # A cache that cannot be written must not end a run.
    with contextlib.suppress(OSError, PenstockError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        records.save(memory, path)
        path.chmod(0o600)


def _path(key: str, origin: MemoryOrigin) -> Path:
    return cache_path().parent / "working_memory" / f"{origin}-{key}.json"


def _is_private(path: Path) -> bool:
    """Return whether the path is this user's, and no one else can write to it."""
    found = path.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not others_write and not stat.S_ISLNK(found.st_mode)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
