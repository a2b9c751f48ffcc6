"""What a checkpoint records about how its result was computed, and what differs now.

`Engine.write` and `penstock train` save this record, and both kinds of resume compare with it, so
that they say the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.errors import StateError
from penstock.checkpoint.training_state import STATE, Software, TrainingState
from penstock.errors import EngineStateError
from penstock.plan.workload import Numerics, Workload
from penstock.records import from_json, to_json


class NotBitIdenticalWarning(UserWarning):
    """A resumed run will not have the bits of an uninterrupted one. The message says why."""


def result_record(workload: Workload, *, on_gpu: bool, self_checked: bool) -> dict[str, Any]:
    """Return what can change the result of an engine, as plain JSON for a checkpoint."""
    return {
        "workload": to_json(workload.numerics),
        "settings": {"clip": workload.clip or 0.0},
        # The number of CPU threads decides how sums on the CPU are split.
        "threads": None if on_gpu else torch.get_num_threads(),
        "tf32": uses_tf32() if on_gpu and workload.dtype == "fp32" else None,
        "self_checked": self_checked,
    }


def uses_tf32() -> bool:
    """Return whether torch multiplies fp32 matrices as TF32, because the program asked for it."""
    products: Any = torch.backends.cuda.matmul
    # Versions of torch with the newer name refuse to read the older one after it was set.
    precision = getattr(products, "fp32_precision", None)
    return bool(products.allow_tf32 if precision is None else precision == "tf32")


def was_self_checked(folder: Path) -> bool:
    """Return whether the run that wrote a checkpoint had passed the self-check.

    Earlier versions had no self-check of the engine, and did not record one: a resumed run says
    only whether it was switched off.
    """
    if not (folder / STATE).exists():
        return True
    saved: Any = TrainingState.load(folder).numerics
    return not (isinstance(saved, Mapping) and saved.get("self_checked") is False)


def find_differences(folder: Path, workload: Workload, *, on_gpu: bool) -> list[str]:
    """Describe what differs from the engine that wrote a checkpoint and can change the result.

    What an earlier version did not record is taken to be the same.
    """
    if not (folder / STATE).exists():
        return []  # version 1 of `Engine.write` recorded nothing
    try:
        state = TrainingState.load(folder)
    except StateError as wrong:
        raise EngineStateError(wrong.field, wrong.problem, where=wrong.where) from None
    known = state.software != Software()
    software = state.software.differences(Software.here(gpu=on_gpu)) if known else ()
    saved: Any = state.numerics if isinstance(state.numerics, Mapping) else {}
    return [*software, *_changed(saved, workload, on_gpu, str(folder / STATE))]


def _changed(saved: Mapping[str, Any], workload: Workload, on_gpu: bool, where: str) -> list[str]:
    now = result_record(workload, on_gpu=on_gpu, self_checked=True)  # which changes no result
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    settings = saved.get("settings")
    if isinstance(settings, Mapping) and "clip" in settings:
        before["clip"], after["clip"] = settings["clip"], now["settings"]["clip"]
    if saved.get("workload") is not None:
        was = from_json(Numerics, saved["workload"], where=where, error=EngineStateError)
        before |= _values(was)
        after |= _values(workload.numerics)
    found = [f"{n} was {before[n]} and is {after[n]}" for n in before if before[n] != after[n]]
    threads = (saved.get("threads"), now["threads"])
    if None not in threads and threads[0] != threads[1]:
        found.append(f"torch's number of threads was {threads[0]} and is {threads[1]}")
    tf32 = (saved.get("tf32"), now["tf32"])
    if tf32 in ((True, False), (False, True)):
        was_tf32, is_tf32 = ("TF32" if each else "IEEE fp32" for each in tf32)
        found.append(f"matrix products were {was_tf32} and are {is_tf32}")
    return found


def _values(numerics: Numerics) -> dict[str, Any]:
    return {f.name: getattr(numerics, f.name) for f in fields(numerics)}


def describe_differences(found: Sequence[str]) -> str:
    """Say in one sentence why a resumed run differs from an uninterrupted one."""
    return f"no longer bit-identical because {'; '.join(found)}"


def warn_of_differences(found: Sequence[str]) -> None:
    """Warn the caller of `Engine.read`."""
    warnings.warn(describe_differences(found), NotBitIdenticalWarning, stacklevel=3)
