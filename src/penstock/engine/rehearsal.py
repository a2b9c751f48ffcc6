"""Rehearse a step before its memory is allocated, and measure how much working memory it needs.

Every part of a step (the embedding, each kind of layer, the head with the loss) runs twice at its
real size, with the engine's own code and stand-in weights. The first run compiles layers, times
kernels and lets libraries allocate their workspaces; the second is measured. So a plan that is too
small is found before the first step, and the first step compiles nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from penstock.engine.determinism import deterministic_kernels
from penstock.engine.device import Device, PeakMemory
from penstock.engine.loss import LossFunction
from penstock.engine.step_parts import (
    EmbeddingForward,
    LayerForward,
    Phase,
    StepPart,
    example_micro_batches,
    input_nbytes,
    step_parts,
)
from penstock.model.inventory import Inventory
from penstock.model.meta_model import weight_dtype
from penstock.model.quantize import dequantize
from penstock.model.split import MicroBatch, SplitModel
from penstock.packed_weights import PackedLayout, scratch_nbytes
from penstock.plan.buffers import PlannedRoom
from penstock.plan.cuda_allocator import PAGE
from penstock.plan.working_memory import (
    COMPILER_BUFFER,
    KEPT_GAPS,
    LIBRARIES,
    PartMemory,
    WorkingMemory,
)
from penstock.plan.workload import Workload
from penstock.units import MiB

KERNELS_TO_COME = 32 * MiB
"""Bytes to add to the CUDA context for kernels that are loaded later: those of the optimizer sweep,
of gradient norms and of evaluations."""

Progress = Callable[[int, int, str], None]
"""Called with the number of parts done, the number of all parts, and a description."""


def rehearse(
    split_model: SplitModel,
    inventory: Inventory,
    workload: Workload,
    device: Device,
    *,
    limit: int | None = None,
    room: PlannedRoom | None = None,
    loss: LossFunction | None = None,
    progress: Progress | None = None,
) -> WorkingMemory:
    """Run every part of a step, and return the working memory that was measured.

    Args:
        split_model: The model. It holds no weights afterwards.
        inventory: The model's inventory.
        workload: What to train.
        device: The device that computes. It must be the engine's device: workspaces of libraries
            belong to its streams.
        limit: Bytes of device memory that the plan allows. A part that needs more runs again
            without the limit, so that the result says how much it needs.
        room: What the plan has for working memory. If the allocator reserves more than that for a
            part, the part runs again with no more, to see whether it needs it.
        loss: Loss function of the user, if any.
        progress: Called before each part.
    """
    limit = None if limit is None else device.reserved_before + limit
    before = device.memory().allocated
    measured: list[_Measured] = []
    micros = _micro_batches(inventory, workload, device.torch_device)
    inputs = max(map(input_nbytes, micros))
    parts = step_parts(split_model, inventory, workload, device, loss=loss, micros=micros)
    _dequantize_once(inventory, workload, device)
    with _random_state_kept(device):
        for number, part in enumerate(parts):
            if progress is not None:
                progress(number, len(parts), f"rehearsing {_describe(part)}")
            memory = _measure(part, device, limit, room)
            saves = isinstance(part, LayerForward) and part.saves
            measured.append(_Measured(part.name, part.phase, type(part), memory, saves))
    del part, parts, micros  # which hold tensors
    gc.collect()  # the compiler leaves cycles that do, too
    device.release(0)
    # What is left now belongs to libraries, and stays for the run. If an earlier engine of this
    # process left their workspaces, nothing was added; another process would need them.
    libraries = max(0, device.memory().allocated - before)
    # A later batch of another shape is compiled in the middle of a step.
    libraries += COMPILER_BUFFER if workload.numerics.compiled else 0
    context = device.nbytes_outside_torch()
    peak = max(each.memory.allocated for each in measured)
    reserved = max(each.memory.reserved for each in measured)
    return WorkingMemory(
        parts=_collect(measured, KEPT_GAPS if device.torch_device.type == "cuda" else 0),
        inputs=inputs,
        arguments=max(m.memory.kept for m in measured if m.kind is EmbeddingForward),
        libraries=max(libraries, LIBRARIES),
        # A part of the last page was there already, for the weights of the part.
        gaps=max(0, reserved - peak) + PAGE,
        context=context + KERNELS_TO_COME if context else None,
        origin="measured",
    )


def _dequantize_once(inventory: Inventory, workload: Workload, device: Device) -> None:
    """Dequantize a tensor, if any is quantized: that compiles the kernel, which is for all sizes.

    It is not measured, because plans have memory for it.
    """
    quantized = (tensor for block in inventory.blocks for tensor in block.quantized)
    tensor, where = next(quantized, None), device.torch_device
    if tensor is None or tensor.quantization is None:
        return
    sizes = PackedLayout(tensor.elements).nbytes, scratch_nbytes(tensor.elements)
    packed, scratch = (torch.zeros(nbytes, dtype=torch.uint8, device=where) for nbytes in sizes)
    into = torch.empty(tensor.elements, dtype=weight_dtype(workload.dtype), device=where)
    numerics = workload.numerics
    # As in a step: code is compiled again if it is called in another mode.
    with device.lane("compute"), torch.no_grad(), deterministic_kernels(numerics.deterministic):
        dequantize(packed, tensor.quantization, into, scratch, compiled=numerics.compiled)


class _Measured(NamedTuple):
    """The memory of one part, without the part, which would keep tensors alive."""

    name: str
    phase: Phase
    kind: type[StepPart]
    memory: PeakMemory
    saves: bool
    """Whether what it leaves is saved for backward."""


def _micro_batches(
    inventory: Inventory, workload: Workload, device: torch.device
) -> list[MicroBatch]:
    """Return the micro-batches to run: full ones, and the last one of a step if it is smaller.

    A smaller one needs less memory. But code is compiled for one shape, and compiling it in the
    first step would need memory that the step does not have.
    """
    micros = example_micro_batches(inventory, workload, device)
    rest = workload.batch % workload.numerics.micro_batch
    if rest and workload.numerics.compiled:
        numerics = replace(workload.numerics, micro_batch=rest)
        smaller = replace(workload, batch=rest, numerics=numerics)
        micros += example_micro_batches(inventory, smaller, device)
    return micros


def _measure(
    part: StepPart, device: Device, limit: int | None, room: PlannedRoom | None
) -> PeakMemory:  # fmt: skip
    try:
        return _measure_once(part, device, limit, room)
    except torch.OutOfMemoryError:
        if limit is None:
            raise
    # Outside of the handler, whose exception keeps the tensors of the failed run.
    return _measure_once(part, device, None, room)


def _measure_once(
    part: StepPart, device: Device, limit: int | None, room: PlannedRoom | None
) -> PeakMemory:  # fmt: skip
    device.limit_memory(limit)
    try:
        # On the lane on which the engine computes: cuBLAS has a workspace for each stream.
        with device.lane("compute"):
            part.prepare()
            part.run()
            memory = _measure_run(part, device)
            if room is None or memory.reserved <= sum(room) - PAGE:
                return memory
            # Below its limit, the allocator keeps unused pages. At the limit it unmaps them, so
            # only a run at the limit shows how many pages the part needs.
            enough = max(room.working, memory.allocated) + room.gaps
            device.release(0)
            device.limit_memory(device.memory().reserved + enough)
            with contextlib.suppress(torch.OutOfMemoryError):
                _measure_run(part, device)
                memory = replace(memory, reserved=min(memory.reserved, enough - PAGE))
            return memory
    finally:
        with contextlib.suppress(AttributeError):  # what a failed `prepare` has not made yet
            part.release()
        device.limit_memory(None)


def _measure_run(part: StepPart, device: Device) -> PeakMemory:
    part.forget()  # the measured run makes it again
    return device.measure_peak(part.run)


def _collect(measured: Sequence[_Measured], kept_gaps: int) -> tuple[PartMemory, ...]:
    peaks: dict[str, dict[str, int]] = {}
    saved: dict[str, int] = {}
    for each in measured:
        passes = peaks.setdefault(each.name, {"forward": 0, "backward": 0})
        nbytes, kept = each.memory.allocated, each.memory.kept
        if each.kind is EmbeddingForward:
            nbytes -= kept  # the arguments of layers have a pool of their own
        if each.kind is LayerForward and each.saves:
            saved[each.name] = max(saved.get(each.name, 0), kept + kept_gaps)
        passes[each.phase] = max(passes[each.phase], nbytes)
    return tuple(
        PartMemory(name=name, **passes, saved=saved.get(name)) for name, passes in peaks.items()
    )


def _describe(part: StepPart) -> str:
    packed = " of packed rows" if part.packed and isinstance(part, LayerForward) else ""
    return f"{part.phase} of {part.name}{packed}"


@contextlib.contextmanager
def _random_state_kept(device: Device) -> Iterator[None]:
    """Leave the random numbers of the user as they were: dropout draws from them."""
    on_gpu = device.torch_device.type == "cuda"
    with torch.random.fork_rng(devices=[device.torch_device] if on_gpu else []):
        yield
