"""The optimizer sweep on the CPU: `start(...)` returns a `SweepTicket` to wait for.

A job updates a list of segments. Each is a range of one tensor's elements with the constants of its
group, so one job can contain several tensors, with and without weight decay. All inputs are checked
before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim.formats import BLOCK, num_blocks, rest_dtype
from penstock.optim.norms import GradStats, read_stats
from penstock.optim.rules import NUM_MOMENTS, Coefficients, RuleName
from penstock.optim.thread_pool import Pool, default_pool

LEAF = _native.SWEEP_LEAF
"""A tensor may be split into segments at multiples of this many elements."""

_GRAD = {
    torch.bfloat16: _native.GradType.bf16,
    torch.float16: _native.GradType.fp16,
    torch.float32: _native.GradType.fp32,
}
_MASTER = {
    torch.bfloat16: _native.MasterType.split,
    torch.float32: _native.MasterType.single,
    torch.float16: _native.MasterType.half,
}
_MOMENTS = {
    torch.float32: _native.MomentType.fp32,
    torch.bfloat16: _native.MomentType.bf16,
    torch.uint8: _native.MomentType.int8,
}
_RULE = {
    "adamw": _native.Rule.adamw,
    "sgd": _native.Rule.sgd,
    "lion": _native.Rule.lion,
}


Part = Literal["all", "weights", "moments"]
"""What a sweep updates. Of AdamW, a sweep over the weights and a later one over the moments, with
the same gradient and coefficients, give the bits of one sweep over all."""

_PART = {
    "all": _native.SweepPart.all,
    "weights": _native.SweepPart.weights,
    "moments": _native.SweepPart.moments,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A range of one tensor's elements.

    Except for the bases, all tensors have the same number of elements. All are contiguous.
    """

    name: str
    """Name for messages."""
    by: Coefficients
    """Constants of the step: what the sweep updates the elements by."""
    grad: torch.Tensor
    """Gradient: bf16, fp16 or fp32."""
    weight: torch.Tensor
    """Weight: bf16, fp16 or fp32. A sweep over moments needs only its type: it may have no
    elements, and then no rest."""
    rest: torch.Tensor | None = None
    """Rest of the master weight: the int16 remainder for bf16, the fp32 master for fp16, or
    None."""
    first: torch.Tensor | None = None
    """First moment, or its 8-bit codes. Only SGD without momentum has none."""
    second: torch.Tensor | None = None
    """Second moment of AdamW, in the same format as the first."""
    first_base: torch.Tensor | None = None
    """Bases of 8-bit codes: one int16 for every `BLOCK` elements."""
    second_base: torch.Tensor | None = None
    """Bases of the second moment's codes."""
    first_index: int = 0
    """Index in the tensor of the first element of the range: a multiple of `LEAF`."""
    key: int = 0
    """`rules.draw_key(seed, step, tensor_id)`: the key of stochastic rounding."""


Constants = tuple[Coefficients, int]
"""What differs from step to step: the coefficients of a segment, and its key."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Formats that all segments of a job share, because one kernel processes them all."""

    rule: RuleName
    grad: _native.GradType
    master: _native.MasterType
    moments: _native.MomentType


class SweepTicket:
    """A sweep on the CPU that has been started (a `penstock.ticket.Ticket`).

    The sweep may still wait for its turn: the pool runs jobs in the order of their start. The
    ticket keeps the tensors alive until somebody has seen the sweep finish, and no longer: tickets
    can outlive the engine's memory, for example in the traceback of an error.
    """

    def __init__(
        self,
        job: _native.SweepJob,
        segments: Sequence[Segment],
        stats: bool,
        *,
        reports: bool = True,
    ) -> None:
        self._job, self._has_stats, self._reports = job, stats, reports
        self._segments: tuple[Segment, ...] | None = tuple(segments)
        self._refused: tuple[str, int] | None = None

    def done(self) -> bool:
        return self._job.done

    @property
    def began(self) -> float:
        """Time at which the threads began, by `time.perf_counter`. Valid once finished."""
        return self._job.began

    @property
    def ended(self) -> float:
        """Time at which the last element was written, like `began`. Valid once finished."""
        return self._job.ended

    def wait(self) -> GradStats | None:
        """Block until everything is written; return the gradients' stats if they were requested.

        Raises NonFiniteMasterError if an element was refused.
        """
        self.settle()
        if self._refused is not None:
            raise NonFiniteMasterError(*self._refused)
        return read_stats(self._job) if self._has_stats else None

    def settle(self) -> None:
        # Several threads may get here. Each works on its own reference to the segments and finds
        # the same refused element, so it does not matter which of them clears the field first.
        segments = self._segments
        if segments is None:
            return
        self._job.wait()
        if self._reports and (bad := self._job.bad_master) is not None:
            segment = segments[bad[0]]
            self._refused = segment.name, segment.first_index + bad[1]
        self._segments = None


class PreparedSweep:
    """Segments that were checked once, and are swept at every step with other constants.

    Making and checking segments takes longer than starting a sweep over them, and the threads that
    launch kernels wait for the interpreter meanwhile.
    """

    def __init__(self, rule: RuleName, segments: Sequence[Segment]) -> None:
        self.rule, self.segments = rule, tuple(segments)
        if not segments:
            return
        kind = _check_all(rule, segments)
        self._code = _RULE[rule], kind.grad, kind.master, kind.moments
        native = [_to_native(s, (s.by, s.key)) for s in segments]
        if (hit := _native.sweep_overlap(native, *self._code)) is not None:
            raise SweepInputError(
                f"{hit[1]} of {segments[hit[0]].name}",
                f"shares memory with {hit[3]} of {segments[hit[2]].name}; each needs its own "
                f"memory",
            )

    def start(
        self,
        constants: Sequence[Constants] | None = None,
        *,
        pool: Pool | None = None,
        stats: bool = False,
        isa: str = "",
        independent: bool = False,
        part: Part = "all",
        after_refusal: bool = False,
    ) -> SweepTicket:
        """Start one step as `start` does, by default with the constants of the segments."""
        pool = default_pool() if pool is None else pool
        if not self.segments:
            return SweepTicket(pool.native.stats([], _native.GradType.bf16), (), stats)
        if constants is None:
            constants = [(s.by, s.key) for s in self.segments]
        if part != "all":
            _check_part(self.rule, self.segments, constants, part)
        if part != "moments" or after_refusal:
            _check_weights(self.segments)
        which = _PART[part]
        if part == "moments" and after_refusal:
            which = _native.SweepPart.checked
        native = [_to_native(s, c) for s, c in zip(self.segments, constants, strict=True)]
        job = pool.native.sweep(native, *self._code, stats, isa, beside=independent, part=which)
        # A sweep over moments refuses nothing: the one over the weights has reported what it
        # refused.
        return SweepTicket(job, self.segments, stats, reports=part != "moments")


def start(
    rule: RuleName,
    segments: Sequence[Segment],
    *,
    pool: Pool | None = None,
    stats: bool = False,
    isa: str = "",
    independent: bool = False,
    part: Part = "all",
    after_refusal: bool = False,
) -> SweepTicket:
    """Start one step. With `stats`, also compute the gradients' norm, without extra traffic.

    The pool runs sweeps in the order of their start. An `independent` sweep shares no tensor with
    any unfinished sweep, so threads that are idle at the end of the previous one begin with it.

    The caller checks whether gradients are finite, with `grad_stats` or on the GPU. Here, an
    infinity counts as the largest usable gradient. An element whose weight would not be finite
    keeps its state, and `wait` reports it.

    With a `part`, only the weights and masters are updated, or only the moments. The latter does
    not read the weights. Pass `after_refusal` if the sweep over the weights refused an element:
    then it does, to find these elements again and leave their moments as they are.
    """
    return PreparedSweep(rule, segments).start(
        pool=pool, stats=stats, isa=isa, independent=independent, part=part,
        after_refusal=after_refusal,
    )  # fmt: skip


def grad_stats(
    grads: torch.Tensor | Sequence[torch.Tensor], *, pool: Pool | None = None, isa: str = ""
) -> GradStats:
    """Read gradients once: sum of squares, largest magnitude and first non-finite element."""
    tensors = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    pool = default_pool() if pool is None else pool
    total = GradStats(0, 0.0, None)
    names = [f"gradient {i}" for i in range(len(tensors))]
    for tensor, name in zip(tensors, names, strict=True):
        _check_tensor(name, tensor, None, tuple(_GRAD))
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        job = pool.native.stats([_grad_only(tensors[i]) for i in indices], _GRAD[dtype], isa)
        job.wait()
        stats = read_stats(job)
        bad = stats.first_bad
        here = None if bad is None else (indices[bad[0]], bad[1])
        earlier = min((b for b in (total.first_bad, here) if b is not None), default=None)
        both = total + stats
        total = GradStats(both.units, both.max_abs, earlier)
    return total


# Checks. A job starts only after all of its inputs were checked.


def _check_all(rule: RuleName, segments: Sequence[Segment]) -> _Kind:
    if rule not in _RULE:
        raise SweepInputError("rule", f"must be one of {', '.join(_RULE)}, got {rule!r}")
    kinds = [_check(rule, s) for s in segments]
    for kind, segment in zip(kinds, segments, strict=True):
        if kind != kinds[0]:
            raise SweepInputError(
                segment.name,
                f"has another format than {segments[0].name}: gradient {segment.grad.dtype} and "
                f"{segments[0].grad.dtype}, weight {segment.weight.dtype} and "
                f"{segments[0].weight.dtype}; all segments of a job must have the same format",
            )
    return kinds[0]


def _check_part(
    rule: RuleName, segments: Sequence[Segment], constants: Sequence[Constants], part: Part
) -> None:
    """Raise SweepInputError unless weights and moments can be updated one after the other."""
    if part not in _PART:
        raise SweepInputError("part", f"must be one of {', '.join(_PART)}, got {part!r}")
    if rule != "adamw":
        raise SweepInputError(
            "part", f"is {part!r}, but only AdamW updates weights and moments in two sweeps"
        )
    for segment, (by, _) in zip(segments, constants, strict=True):
        if by.l2:
            raise SweepInputError(
                segment.name,
                "has weight decay that is added to the gradient, so its moments depend on the "
                "weights as they were before the update; sweep all of it at once",
            )


def _check_weights(segments: Sequence[Segment]) -> None:
    """Raise SweepInputError if a segment has no weights."""
    for segment in segments:
        if segment.weight.numel() < segment.grad.numel():
            raise SweepInputError(
                f"weight of {segment.name}",
                f"has {segment.weight.numel()} elements, expected {segment.grad.numel()}: only a "
                f"sweep over moments, after one that refused nothing, needs no weights",
            )


def _check(rule: RuleName, s: Segment) -> _Kind:
    numel = s.grad.numel()
    _check_tensor(f"grad of {s.name}", s.grad, numel, tuple(_GRAD))
    has_weights = s.weight.numel() > 0 or numel == 0
    _check_tensor(f"weight of {s.name}", s.weight, numel if has_weights else 0, tuple(_MASTER))
    rest = rest_dtype(s.weight.dtype) if has_weights else None
    _check_role(s, "rest", s.rest, numel, () if rest is None else (rest,))
    moments = _native.MomentType.none
    if s.first is not None or rule != "sgd":
        _check_role(s, "first", s.first, numel, tuple(_MOMENTS))
        assert s.first is not None
        moments = _MOMENTS[s.first.dtype]
    coded = moments == _native.MomentType.int8
    two = NUM_MOMENTS[rule] == 2
    second = (s.first.dtype,) if two and s.first is not None else ()
    _check_role(s, "second", s.second, numel, second)
    blocks, base = num_blocks(numel), (torch.int16,) if coded else ()
    _check_role(s, "first_base", s.first_base, blocks, base)
    _check_role(s, "second_base", s.second_base, blocks, base if two else ())
    if s.first_index < 0 or s.first_index % LEAF:
        raise SweepInputError(
            s.name, f"begins at element {s.first_index}, which is not a multiple of {LEAF}"
        )
    return _Kind(rule, _GRAD[s.grad.dtype], _MASTER[s.weight.dtype], moments)


def _check_role(
    s: Segment, role: str, tensor: torch.Tensor | None, numel: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check one role. It is required if it has allowed types, and must be None if not."""
    if tensor is None and dtypes:
        raise SweepInputError(f"{role} of {s.name}", "is missing")
    if tensor is not None and not dtypes:
        raise SweepInputError(f"{role} of {s.name}", "is not used in this format; leave it out")
    if tensor is not None:
        _check_tensor(f"{role} of {s.name}", tensor, numel, dtypes)


def _check_tensor(
    name: str, tensor: torch.Tensor, numel: int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise SweepInputError(
            name, f"is {tensor.layout} on {tensor.device}; it must be a dense host tensor"
        )
    check_dtype_and_strides(name, tensor, dtypes)
    if numel is not None and tensor.numel() != numel:
        raise SweepInputError(name, f"has {tensor.numel()} elements, expected {numel}")


def check_dtype_and_strides(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise SweepInputError unless the tensor is contiguous and has one of the types."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise SweepInputError(name, f"is {tensor.dtype}, expected {expected}")
    if not tensor.is_contiguous():
        raise SweepInputError(
            name, f"is not contiguous (strides {tensor.stride()}); make it .contiguous()"
        )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _to_native(s: Segment, constants: Constants) -> _native.Segment:
    by, key = constants
    return _native.Segment(
        count=s.grad.numel(),
        first_index=s.first_index,
        key=key,
        grad=_address(s.grad),
        weight=_address(s.weight),
        rest=_address(s.rest),
        first=_address(s.first),
        second=_address(s.second),
        first_bases=_address(s.first_base),
        second_bases=_address(s.second_base),
        by=by.native(),
    )


_NO_STEP = Coefficients().native()


def _grad_only(grad: torch.Tensor) -> _native.Segment:
    return _native.Segment(
        count=grad.numel(),
        first_index=0,
        key=0,
        grad=grad.data_ptr(),
        weight=0,
        rest=0,
        first=0,
        second=0,
        first_bases=0,
        second_bases=0,
        by=_NO_STEP,
    )


__all__ = [
    "BLOCK", "LEAF", "Constants", "GradStats", "Pool", "PreparedSweep", "Segment", "SweepTicket",
    "grad_stats", "start",
]  # fmt: skip
