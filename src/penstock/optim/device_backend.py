"""The backend of the optimizer sweep on the GPU: Triton kernels, or plain torch operations.

Without Triton, `reference` runs on the GPU. Each torch operation rounds once, so the bits are the
same, but it is slow and needs temporaries. This module also checks the inputs of both backends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from penstock.errors import SweepInputError
from penstock.optim.formats import num_blocks, rest_dtype
from penstock.optim.rules import NUM_MOMENTS, RuleName
from penstock.optim.sweep import LEAF, Segment, check_dtype_and_strides

Backend = Literal["triton", "torch"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)

_Dtypes = tuple[torch.dtype, ...]

T = TypeVar("T")


class DeviceTicket(Generic[T]):
    """Kernels queued on the current CUDA stream (a `penstock.ticket.Ticket`).

    `read` computes the result from the numbers that the kernels wrote, or raises. The ticket keeps
    `tensors` alive: the caching allocator could otherwise give their memory to another stream while
    the kernels still use it.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: object,
        numbers: torch.Tensor,
        read: Callable[[list[int]], T],
    ) -> None:
        self._tensors, self._numbers, self._read = tensors, numbers, read
        self._values: list[int] | None = None
        self._event = record_event(device)

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> T:
        if self._event is not None:
            self._event.synchronize()
        if self._values is None:
            self._values = self._numbers.tolist()
        return self._read(self._values)

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken CUDA context runs nothing any more
            if self._event is not None:
                self._event.synchronize()

    @staticmethod
    def fetch_all(tickets: Iterable[DeviceTicket[Any]]) -> None:
        """Copy the numbers of all tickets to the host at once, so that no `wait` has to.

        Each copy makes the host wait for the device, so a hundred of them take milliseconds.
        """
        missing = [ticket for ticket in tickets if ticket._values is None]
        for ticket in missing:
            ticket.settle()
        if len(missing) < 2:
            return
        values = torch.cat([ticket._numbers for ticket in missing]).tolist()
        for ticket in missing:
            count = ticket._numbers.numel()
            ticket._values, values = values[:count], values[count:]


@functools.cache
def load_kernels(module: str) -> Any:
    """Import a module of Triton kernels; return None if Triton is not installed."""
    try:
        return importlib.import_module(f"penstock.optim.{module}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


def choose_backend(requested: Backend | None = None) -> Backend:
    """Return the requested backend, or by default Triton if it can be imported."""
    found: Backend = "torch" if load_kernels("device_kernels") is None else "triton"
    if requested == "triton" and found != "triton":
        raise SweepInputError("backend", "'triton' cannot be imported; pip install triton")
    if requested not in (None, "triton", "torch"):
        raise SweepInputError("backend", f"must be 'triton' or 'torch', got {requested!r}")
    return found if requested is None else requested


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on host tensors, as some tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current: Triton launches kernels on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def record_event(device: torch.device) -> Any:
    """Record an event on the current stream; return None on the host, which needs none."""
    cuda: Any = torch.cuda  # its events are untyped
    return cuda.current_stream(device).record_event() if device.type == "cuda" else None


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View 16-bit floats as int16. The kernels convert them with integer arithmetic."""
    plain = tensor.detach()
    return plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain


# Checks. A step starts only after all of its inputs were checked.


def check_segments(rule: RuleName, segments: Sequence[Segment]) -> None:
    """Raise SweepInputError if a segment is incomplete, on another device, or shares memory."""
    if rule not in NUM_MOMENTS:
        raise SweepInputError("rule", f"must be one of {', '.join(NUM_MOMENTS)}, got {rule!r}")
    device = segments[0].grad.device
    for segment in segments:
        _check_segment(rule, segment, device)
    _check_no_overlap(segments)


def check_tensor(name: str, tensor: torch.Tensor, dtypes: _Dtypes, device: torch.device) -> None:
    """Raise SweepInputError unless the tensor is dense, on `device` and has one of the types."""
    kind = "cpu" if is_interpreted() else "cuda"
    if tensor.device.type != kind or tensor.layout != torch.strided:
        raise SweepInputError(
            name, f"is {tensor.layout} on {tensor.device}; it must be a dense {kind} tensor"
        )
    if tensor.device != device:
        raise SweepInputError(name, f"is on {tensor.device}, but the others are on {device}")
    check_dtype_and_strides(name, tensor, dtypes)


def buffers(s: Segment) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each role with its tensor, except for the gradient."""
    for role in ("weight", "rest", "first", "second", "first_base", "second_base"):
        yield role, getattr(s, role)


def _check_segment(rule: RuleName, s: Segment, device: torch.device) -> None:
    n = s.grad.numel()
    check_tensor(f"grad of {s.name}", s.grad, FLOATS, device)
    check_tensor(f"weight of {s.name}", s.weight, FLOATS, device)
    for role, tensor in buffers(s):
        dtypes = _expected_dtypes(rule, s, role)
        name = f"{role} of {s.name}"
        if tensor is None and dtypes:
            raise SweepInputError(name, "is missing")
        if tensor is not None and not dtypes:
            raise SweepInputError(name, "is not used in this format; leave it out")
        if tensor is None:
            continue
        check_tensor(name, tensor, dtypes, device)
        numel = num_blocks(n) if role.endswith("_base") else n
        if tensor.numel() != numel:
            raise SweepInputError(name, f"has {tensor.numel()} elements, expected {numel}")
    if s.first_index < 0 or s.first_index % LEAF:
        raise SweepInputError(
            s.name, f"begins at element {s.first_index}, which is not a multiple of {LEAF}"
        )


def _expected_dtypes(rule: RuleName, s: Segment, role: str) -> _Dtypes:
    """Return the types that a role may have; empty if it must be None."""
    if role == "weight":
        return FLOATS
    if role == "rest":
        rest = rest_dtype(s.weight.dtype)
        return () if rest is None else (rest,)
    if role.startswith("second") and NUM_MOMENTS[rule] < 2:
        return ()
    if role == "first":
        return () if s.first is None and rule == "sgd" else _MOMENTS
    stored = None if s.first is None else s.first.dtype
    if role == "second":
        return () if stored is None else (stored,)
    return (torch.int16,) if stored == torch.uint8 else ()


def _check_no_overlap(segments: Sequence[Segment]) -> None:
    """Check that no written tensor shares memory with another. Gradients are only read."""
    ranges = []
    for s in segments:
        for role, tensor in (("grad", s.grad), *buffers(s)):
            if tensor is not None and tensor.numel():
                at = tensor.data_ptr()
                ranges.append((at, at + tensor.nbytes, f"{role} of {s.name}", role != "grad"))
    # In order of address, it is enough to compare with the range that extends furthest so far.
    far = far_written = (0, 0, "", False)
    for current in sorted(ranges):
        begin, _, name, written = current
        other = far if written else far_written
        if begin < other[1]:
            raise SweepInputError(name, f"shares memory with {other[2]}; each needs its own memory")
        far = max(far, current, key=lambda r: r[1])
        if written:
            far_written = current
