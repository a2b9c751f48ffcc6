"""Decide where the figures of a model's working memory come from.

The order is: measured on this kind of GPU by an earlier run, traced from the model's code, and
estimated. What was measured or traced once is cached.

On a machine without a GPU, working memory is estimated. The CPU's working memory comes from the
heap of the process, which no budget limits, and tracing would take longer than a small step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from penstock.machine.machine import Machine
from penstock.model.adapters import Adapter
from penstock.model.inventory import Inventory
from penstock.model.survey_cache import loaded_config
from penstock.plan.memory_cache import load_memory, memory_key, save_memory
from penstock.plan.working_memory import WorkingMemory, WorkingMemorySource
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload

ANY_GPU = "any GPU"
"""Stands for the GPU in the key of a trace, which needs none."""


def working_memory_source(
    config: Any,
    machine: Machine,
    *,
    own_loss: bool = False,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> WorkingMemorySource:
    """Return the source for a model on a machine.

    Args:
        config: The model's config; None: working memory is estimated from the inventory alone.
        machine: The machine that trains.
        own_loss: Whether the user brings a loss function. It may need any amount of memory, so
            nothing that was measured without it is used.
        trust_remote_code: Whether to run code from the model's repository.
        adapter: The adapter that is trained, if any.
    """
    if config is None or not machine.gpus:
        return estimate_working_memory
    gpu = "" if own_loss else machine.gpus[0].name

    def find(inventory: Inventory, workload: Workload) -> WorkingMemory:
        if gpu:
            key = memory_key(config, inventory, workload, gpu, adapter)
            measured = load_memory(key, "measured")
            if measured is not None:
                return measured
        return _trace_or_estimate(config, inventory, workload, trust_remote_code, adapter)

    return _remembered(find)


def _trace_or_estimate(
    config: Any,
    inventory: Inventory,
    workload: Workload,
    trust_remote_code: bool,
    adapter: Adapter | None,
) -> WorkingMemory:
    key = memory_key(config, inventory, workload, ANY_GPU, adapter)
    # Code from a model's repository may change without its config, and is traced every time.
    traced = None if trust_remote_code else load_memory(key, "traced")
    if traced is not None:
        return traced
    # Tracing imports torch's compiler, which a plan with a cached trace does not need.
    from penstock.engine.trace_memory import trace_working_memory

    try:
        with _quiet():
            traced = trace_working_memory(
                loaded_config(config),
                inventory,
                workload,
                on_gpu=True,
                trust_remote_code=trust_remote_code,
                adapter=adapter,
            )
    except Exception as problem:
        # The model's code, or torch's compiler, may raise anything. A plan can still be made.
        reason = (str(problem).strip().splitlines() or [""])[0]
        remark = (
            f"Working memory is estimated, because the model could not be traced "
            f"({type(problem).__name__}: {reason[:200]})."
        )
        return replace(estimate_working_memory(inventory, workload), remark=remark)
    if not trust_remote_code:
        save_memory(key, traced)
    return traced


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of a trace that fails: the plan has a remark."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    # A filter, because torch sets the levels of its loggers again when it imports its compiler.
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(_: logging.LogRecord) -> bool:
    return False


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
