"""Device memory: how torch allocates it, and errors that say who holds the rest."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator

import torch

from penstock.engine.device import Device
from penstock.errors import DeviceMemoryError, MemoryLimitError
from penstock.machine.limits import memory_limit
from penstock.machine.sysfs import System
from penstock.memory.process import resident_nbytes
from penstock.plan.buffers import CONTEXT
from penstock.plan.plan import Plan
from penstock.tiers import Tier
from penstock.units import MiB, parse_bytes

PROCESS_GROWTH = 200 * MiB
"""Host memory by which a run may exceed its plan and the process as it was before
(tests/faults/test_engine_bounded.py)."""

_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ [A-Za-z]+)")
"""Size of the failed request in torch's message."""


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator serve a request of any size from memory freed by any other.

    By default it reserves a segment per request and reuses it only for similar sizes, so a step
    reserves 19 to 39 % more than it uses. An expandable segment is one address range per stream
    into which pages are mapped, and from which empty pages can be unmapped: what is wasted are
    parts of pages (see `allocator slack` in docs/planner.md).

    A user who has configured the allocator keeps that configuration. The switch concerns new
    segments only, so tensors that exist already are not touched.
    """
    if not torch.cuda.is_available():
        return
    configured = (os.environ.get(n) for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if any(configured) or torch.cuda.memory.get_allocator_backend() != "native":
        return
    # Newer versions of torch have one function for all accelerators, and warn about the other.
    for owner, name in (
        (torch._C, "_accelerator_setAllocatorSettings"),
        (torch.cuda.memory, "_set_allocator_settings"),
    ):
        set_allocator: object = getattr(owner, name, None)
        if callable(set_allocator):
            set_allocator("expandable_segments:True")
            return


def check_free_memory(device: Device, plan: Plan, allocated: int = 0) -> None:
    """Raise DeviceMemoryError if the driver has less free memory than the plan needs.

    Another process holds it then. Without this check the run would fail later, in the middle of an
    allocation or of a step. `allocated` is how much of the plan's host memory exists already.
    """
    _check_host_memory(plan, allocated)
    if device.torch_device.type != "cuda":
        return  # the HBM tier is host memory, which the OS hands out
    device.release(0)  # what torch keeps without using it is available to the plan
    now = device.memory()
    # The context exists by now, and the driver counts it as used. It grows as kernels are loaded.
    planned = sum(pool.nbytes for pool in plan.pools if pool.what == CONTEXT)
    context = min(planned, device.nbytes_outside_torch() or planned)
    wanted = plan.peak(Tier.HBM) - context
    if now.free < wanted:
        raise DeviceMemoryError(
            "the plan",
            wanted=wanted,
            free=now.free,
            total=now.total,
            allocated=now.allocated,
            reserved=now.reserved,
            holders=device.other_processes(),
            largest=now.free + context,
        )


def _check_host_memory(plan: Plan, allocated: int) -> None:
    """Raise MemoryLimitError if the run would exceed the memory limit of this process.

    A control group's limit ends in the OOM killer, in the middle of a step. Without a limit,
    memory that is short ends in a failed allocation, or in swap.
    """
    limit = memory_limit(System())
    if limit is None:
        return
    # Python and PyTorch are loaded by now, CUDA's host memory and compiled kernels may not be.
    process = resident_nbytes() - allocated
    to_come = plan.process_memory - process if plan.context_nbytes else 0
    growth = max(PROCESS_GROWTH, to_come)
    wanted = plan.host_nbytes - plan.process_memory + growth - allocated
    if wanted > limit.left:
        raise MemoryLimitError(
            wanted=wanted, free=limit.left, limit=limit.nbytes, name=limit.name,
            what="needed by the plan and the process",
        )  # fmt: skip


@contextlib.contextmanager
def explain_out_of_memory(device: Device, plan: Plan, what: str) -> Iterator[None]:
    """Replace torch's out-of-memory errors by one with the plan's numbers and who holds the rest.

    `what` names what the memory was for, such as "a training step".
    """
    try:
        yield
    except torch.OutOfMemoryError as failed:
        error = _describe(device, plan, what, failed)
        # The frames of the failed call hold its tensors. A caller that keeps the new error must not
        # keep device memory with it.
        traceback.clear_frames(failed.__traceback__)
        raise error from None


def _describe(
    device: Device, plan: Plan, what: str, failed: torch.OutOfMemoryError
) -> DeviceMemoryError:
    now = device.memory()
    wanted = _WANTED.search(str(failed))
    context = plan.budget.of(Tier.HBM) - plan.allocator_nbytes
    return DeviceMemoryError(
        what,
        wanted=parse_bytes(wanted[1]) if wanted else None,
        free=now.free,
        total=now.total,
        budget=plan.budget.of(Tier.HBM),
        allowed=device.reserved_before + plan.allocator_nbytes,
        allocated=now.allocated,
        reserved=now.reserved,
        holders=device.other_processes(),
        largest=now.free + now.reserved + context,
    )
