"""Trace how much working memory a model needs, with fake tensors and without a GPU.

Every part of a step is run once by the engine's own code, with tensors that have shapes and no
data. Parts that run without compiled code are counted as they run (`StorageCounter`). Of compiled
layers, the compiler's graphs are captured, and their peak is computed (`graph_memory`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.determinism import deterministic_kernels
from penstock.engine.device import CpuDevice
from penstock.engine.step_parts import (
    EmbeddingForward,
    LayerForward,
    StepPart,
    example_micro_batches,
    input_nbytes,
    step_parts,
)
from penstock.model.adapters import Adapter
from penstock.model.compiled_graphs import (
    capture_inference,
    capture_training,
    inference_lifetimes,
    saved_lifetimes,
    training_lifetimes,
)
from penstock.model.gpu_attention import attending_as_on_gpu
from penstock.model.inventory import Inventory
from penstock.model.lifetimes import NEVER, Lifetime, Request, in_order, peak_nbytes
from penstock.model.meta_model import build_model, weight_dtype
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.storage_counter import StorageCounter
from penstock.model.varlen_attention import DocumentSpans
from penstock.plan.cuda_allocator import PAGE, ExpandableSegments
from penstock.plan.working_memory import KEPT_GAPS, PartMemory, WorkingMemory
from penstock.plan.workload import Workload

REPETITIONS = 8
"""Number of forward passes over which the gaps between saved tensors are averaged."""


def trace_working_memory(
    config: Any,
    inventory: Inventory,
    workload: Workload,
    *,
    on_gpu: bool,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> WorkingMemory:
    """Trace the working memory of a model with a workload.

    Args:
        config: The model's config.
        inventory: The model's inventory.
        workload: What to train.
        on_gpu: Whether a GPU computes: kernels may need memory of their own.
        trust_remote_code: Whether to run code from the model's repository.
        adapter: The adapter that is trained, if any.
    """
    dtype, cpu = weight_dtype(workload.dtype), torch.device("cpu")
    bare = build_model(
        config,
        dtype,
        cpu,
        own_attention=inventory.own_attention,
        trust_remote_code=trust_remote_code,
    )
    if adapter is not None:
        adapter.attach(bare)
    return trace_model(bare, inventory, workload, on_gpu=on_gpu)


def trace_model(
    bare: nn.Module, inventory: Inventory, workload: Workload, *, on_gpu: bool
) -> WorkingMemory:
    """Trace the working memory of a model without weights. Its buffers become fake tensors."""
    peaks: dict[tuple[str, str], int] = {}
    saved: dict[str, int] = {}
    # As a rehearsal on a GPU adds it: a plan from a trace has to be large enough for one.
    kept_gaps = KEPT_GAPS if on_gpu else 0
    inputs = arguments = reserved = 0
    for traced in trace_parts(bare, inventory, workload, on_gpu=on_gpu):
        part, peak = traced.part, traced.peak
        if isinstance(part, EmbeddingForward):
            # What the embedding leaves, the arguments of layers, has a pool of its own.
            arguments, peak = traced.kept, peak - traced.kept
        elif isinstance(part, LayerForward) and part.phase == "forward" and part.saves:
            saved[part.name] = max(saved.get(part.name, 0), traced.kept + kept_gaps)
        key = (part.name, part.phase)
        peaks[key] = max(peaks.get(key, 0), peak)
        inputs = max(inputs, input_nbytes(part.micro))
        reserved = max(reserved, traced.reserved)
    return WorkingMemory(
        parts=_parts(peaks, saved),
        inputs=inputs,
        arguments=arguments,
        # The first page of a part may be one that other tensors use as well.
        gaps=max(0, reserved - max(peaks.values())) + PAGE,
        origin="traced",
    )


class TracedPart(NamedTuple):
    """A part of a step, and the memory that it needs."""

    part: StepPart
    peak: int
    """The most bytes alive at any time."""
    kept: int
    """Bytes that stay alive when the part has run; of a layer, with the gaps that they leave."""
    reserved: int
    """The most bytes of pages that PyTorch's allocator maps for it on a GPU."""


def trace_parts(
    bare: nn.Module, inventory: Inventory, workload: Workload, *, on_gpu: bool
) -> list[TracedPart]:
    """Trace every part of a step separately. The model's buffers become fake tensors."""
    numerics = workload.numerics
    split_model = SplitModel(
        bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled,
        noise_alpha=numerics.neftune_noise_alpha,
        recomputes=True,
    )  # fmt: skip
    micros = example_micro_batches(inventory, workload, torch.device("cpu"))
    # Tensors that are no buffers of the model, such as constants in its code, are real.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for module in (bare, *split_model.layers):
        _make_buffers_fake(module, fake)
    micros = [_make_fake(micro, fake) for micro in micros]
    attention = attending_as_on_gpu() if on_gpu else contextlib.nullcontext()
    found = []
    # As in a step: some operations need other memory if their bits must repeat.
    deterministic = deterministic_kernels(numerics.deterministic)
    with deterministic, fake, attention, _ScalarAnswers(workload.context):
        for part in step_parts(split_model, inventory, workload, CpuDevice(), micros=micros):
            with _prepared(part):
                found.append(trace_part(part, split_model, on_gpu=on_gpu))
    return found


def trace_part(part: StepPart, split_model: SplitModel, *, on_gpu: bool) -> TracedPart:
    """Trace a prepared part."""
    lifetimes = _compiled_lifetimes(part, split_model) if isinstance(part, LayerForward) else None
    if lifetimes is not None:
        requests, peak = list(in_order(lifetimes)), peak_nbytes(lifetimes)
        kept = sum(each.nbytes for each in lifetimes if each.end == NEVER)
    else:
        with StorageCounter(workspaces=on_gpu) as counter:
            part.run()
        kept, requests, peak = counter.live(), counter.requests, counter.peak
    if on_gpu and kept and isinstance(part, LayerForward):
        kept = max(kept, _reserved_each(requests))
    return TracedPart(part, peak, kept, _reserved(requests))


def _compiled_lifetimes(part: LayerForward, split_model: SplitModel) -> Sequence[Lifetime] | None:
    """Return the memory that a compiled layer uses; None if it is not compiled."""
    assert part.micro.calls is not None
    backward = part.phase == "backward"
    differentiated = backward or part.saves
    hidden = part.source.detach().requires_grad_(differentiated)
    call = split_model.compiled_call(part.index, hidden, part.micro.calls)
    if call is None:
        return None
    if not differentiated:
        return inference_lifetimes(capture_inference(*call))
    graphs = capture_training(*call)
    return training_lifetimes(graphs) if backward else saved_lifetimes(graphs)


def _reserved_each(requests: Sequence[Request]) -> int:
    """Return the bytes of pages that each repetition adds, if what is not freed stays allocated.

    Forward passes of several layers and micro-batches follow one another, and the saved tensors of
    each lie between the temporary ones of the next.
    """
    allocator, reserved = ExpandableSegments(), []
    for number in range(REPETITIONS + 1):
        for request in requests:
            if request.nbytes is None:
                allocator.free((number, request.key))
            else:
                allocator.allocate((number, request.key), request.nbytes)
        allocator.trim()
        reserved.append(allocator.reserved)
    return -(-(reserved[-1] - reserved[0]) // REPETITIONS)


def _reserved(requests: Iterable[Request]) -> int:
    """Return the bytes of pages that PyTorch's allocator maps for these requests."""
    allocator = ExpandableSegments()
    for request in requests:
        if request.nbytes is None:
            allocator.free(request.key)
        else:
            allocator.allocate(request.key, request.nbytes)
    return allocator.peak_reserved


@contextlib.contextmanager
def _prepared(part: StepPart) -> Iterator[None]:
    part.prepare()
    try:
        yield
    finally:
        part.release()


def _parts(
    peaks: Mapping[tuple[str, str], int], saved: Mapping[str, int]
) -> tuple[PartMemory, ...]:
    names = dict.fromkeys(name for name, _ in peaks)
    return tuple(
        PartMemory(
            name=name,
            forward=peaks[name, "forward"],
            backward=peaks[name, "backward"],
            saved=saved.get(name),
        )
        for name in names
    )


def _make_fake(micro: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
    bounds = micro.bounds
    if isinstance(bounds, DocumentSpans):
        bounds = DocumentSpans(fake.from_tensor(bounds.spans))
    return replace(
        micro,
        input_ids=fake.from_tensor(micro.input_ids),
        position_ids=fake.from_tensor(micro.position_ids),
        targets=fake.from_tensor(micro.targets),
        bounds=bounds,
        noise_scales=None if micro.noise_scales is None else fake.from_tensor(micro.noise_scales),
    )


def _make_buffers_fake(module: nn.Module, fake: FakeTensorMode) -> None:
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fake.from_tensor(buffer)


class _ScalarAnswers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers code that asks for a value, which a fake tensor does not have.

    Some position encodings compare the longest position with a limit. Both answers need the same
    memory, so any answer serves.
    """

    def __init__(self, context: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if dtype == torch.bool:
                return False
            return float(self._context) if dtype.is_floating_point else self._context
        return func(*args, **(kwargs or {}))
