"""Which code steps states in GPU memory: Triton's kernels, or plain torch. Room: update.

Where Triton is missing, `reference` itself runs on the GPU: each of torch's operations rounds once,
so its bits are the same, but it is slow and takes temporaries.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from penstock.errors import SweepInputError
from penstock.optim.formats import num_blocks
from penstock.optim.rules import NUM_MOMENTS, RuleName
from penstock.optim.sweep import LEAF, Segment

Engine = Literal["triton", "torch"]

T = TypeVar("T")


class DeviceTicket(Generic[T]):
    """Kernels queued on the current CUDA stream (a `penstock.ticket.Ticket`).

    `read` computes the result from what the kernels wrote, or raises. The ticket keeps `tensors`
    alive: the caching allocator could otherwise give their memory to another stream while the
    kernels still use it.
    """

    def __init__(self, device: torch.device, tensors: object, read: Callable[[], T]) -> None:
        self._tensors, self._read = tensors, read
        self._event = record(device)

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> T:
        if self._event is not None:
            self._event.synchronize()
        return self._read()

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken CUDA context runs nothing any more
            if self._event is not None:
                self._event.synchronize()


@functools.cache
def kernels(module: str) -> Any:
    """A module of kernels, or None where Triton is not there."""
    try:
        return importlib.import_module(f"penstock.optim.{module}")
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] != "triton":
            raise
        return None


def pick(wanted: Engine | None = None) -> Engine:
    """The engine that runs: the one wanted, else Triton where it can be imported."""
    found: Engine = "torch" if kernels("device_kernels") is None else "triton"
    if wanted == "triton" and found != "triton":
        raise SweepInputError("engine", "'triton' cannot be imported here; pip install triton")
    if wanted not in (None, "triton", "torch"):
        raise SweepInputError("engine", f"is 'triton' or 'torch', not {wanted!r}")
    return found if wanted is None else wanted


def interpreted() -> bool:
    """Triton's own interpreter runs kernels on host tensors: for tests, on machines with no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def record(device: torch.device) -> Any:
    """An event on the current stream; on the host there is nothing to wait for: None."""
    cuda: Any = torch.cuda  # whose events have no types
    return cuda.current_stream(device).record_event() if device.type == "cuda" else None


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as int16: the kernels convert them themselves."""
    plain = tensor.detach()
    return plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain


# --------
# What a step on the GPU refuses, before a byte changes. Room: update.

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
_REST = {torch.bfloat16: (torch.int16,), torch.float16: (torch.float32,), torch.float32: ()}

_Dtypes = tuple[torch.dtype, ...]


def check_segments(rule: RuleName, segments: Sequence[Segment]) -> None:
    """Raise SweepInputError unless every segment is whole, on one device and in its own memory."""
    if rule not in NUM_MOMENTS:
        raise SweepInputError("rule", f"is one of {', '.join(NUM_MOMENTS)}, not {rule!r}")
    device = segments[0].grad.device
    for segment in segments:
        _check_segment(rule, segment, device)
    _check_apart(segments)


def check_tensor(name: str, tensor: torch.Tensor, dtypes: _Dtypes, device: torch.device) -> None:
    kind = "cpu" if interpreted() else "cuda"
    if tensor.device.type != kind or tensor.layout != torch.strided:
        raise SweepInputError(
            name, f"is {tensor.layout} on {tensor.device}; it must be a dense {kind} tensor"
        )
    if tensor.device != device:
        raise SweepInputError(name, f"is on {tensor.device} where others are on {device}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise SweepInputError(name, f"is {tensor.dtype}; {wanted} is needed")
    if not tensor.is_contiguous():
        raise SweepInputError(
            name, f"is not contiguous (strides {tensor.stride()}); pass it .contiguous()"
        )


def buffers(s: Segment) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each role with its tensor, the gradient aside."""
    for role in ("weight", "rest", "first", "second", "first_base", "second_base"):
        yield role, getattr(s, role)


def _check_segment(rule: RuleName, s: Segment, device: torch.device) -> None:
    n = s.grad.numel()
    check_tensor(f"grad of {s.name}", s.grad, FLOATS, device)
    check_tensor(f"weight of {s.name}", s.weight, FLOATS, device)
    for role, tensor in buffers(s):
        dtypes = _wanted(rule, s, role)
        name = f"{role} of {s.name}"
        if tensor is None and dtypes:
            raise SweepInputError(name, "is missing")
        if tensor is not None and not dtypes:
            raise SweepInputError(name, "has no use in this format; leave it out")
        if tensor is None:
            continue
        check_tensor(name, tensor, dtypes, device)
        numel = num_blocks(n) if role.endswith("_base") else n
        if tensor.numel() != numel:
            raise SweepInputError(name, f"has {tensor.numel()} elements where {numel} are needed")
    if s.first_index < 0 or s.first_index % LEAF:
        raise SweepInputError(
            s.name, f"begins at element {s.first_index}, which is no multiple of {LEAF}"
        )


def _wanted(rule: RuleName, s: Segment, role: str) -> _Dtypes:
    """The types a role may have; none if it must be empty."""
    if role == "weight":
        return FLOATS
    if role == "rest":
        return _REST[s.weight.dtype]
    if role.startswith("second") and NUM_MOMENTS[rule] < 2:
        return ()
    if role == "first":
        return () if s.first is None and rule == "sgd" else _MOMENTS
    stored = None if s.first is None else s.first.dtype
    if role == "second":
        return () if stored is None else (stored,)
    return (torch.int16,) if stored == torch.uint8 else ()


def _check_apart(segments: Sequence[Segment]) -> None:
    """What is written shares memory with nothing. Gradients are only read, and may be shared."""
    ranges = []
    for s in segments:
        for role, tensor in (("grad", s.grad), *buffers(s)):
            if tensor is not None and tensor.numel():
                at = tensor.data_ptr()
                ranges.append((at, at + tensor.nbytes, f"{role} of {s.name}", role != "grad"))
    far = far_written = (0, 0, "", False)
    for one in sorted(ranges):
        begin, _, name, written = one
        other = far if written else far_written
        if begin < other[1]:
            raise SweepInputError(name, f"shares memory with {other[2]}; each needs its own")
        far = max(far, one, key=lambda r: r[1])
        if written:
            far_written = one
