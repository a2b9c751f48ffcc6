"""One optimizer step over a chunk of host memory: `start(...) -> SweepTicket`, `ticket.wait()`.

Room: update. A chunk is a row of segments, each a run of one tensor's elements with its own group's
constants, so decay and no decay, or several tensors, go in one job. Inputs are checked before a
byte changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim.formats import BLOCK, num_blocks
from penstock.optim.norms import GradStats, read_stats
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.threads import Pool, default_pool

LEAF = _native.SWEEP_LEAF
"""A tensor may be cut into chunks at multiples of this many elements."""

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
_REST = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of one tensor's elements. All tensors are contiguous, on the host, and equally long."""

    name: str
    """For messages."""
    by: Coefficients
    grad: torch.Tensor
    weight: torch.Tensor
    rest: torch.Tensor | None = None
    """bf16 weight: the int16 remainder; fp16: the fp32 master; fp32: none."""
    first: torch.Tensor | None = None
    """Moment, or its 8-bit codes. Only SGD without momentum has none."""
    second: torch.Tensor | None = None
    """AdamW's second moment, stored like the first."""
    first_base: torch.Tensor | None = None
    second_base: torch.Tensor | None = None
    """With codes: one int16 for every `BLOCK` elements."""
    first_index: int = 0
    """Where the run begins in its tensor: a multiple of `LEAF`."""
    key: int = 0
    """`rules.draw_key(seed, step, tensor_id)`: what stochastic rounding depends on."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the segments of a job share, since one kernel serves them all."""

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

    def __init__(self, job: _native.SweepJob, segments: Sequence[Segment], stats: bool) -> None:
        self._job, self._has_stats = job, stats
        self._segments: tuple[Segment, ...] | None = tuple(segments)
        self._refused: tuple[str, int] | None = None

    def done(self) -> bool:
        return self._job.done

    @property
    def began(self) -> float:
        """When the pool's threads began with it, by `time.perf_counter`. Valid once finished."""
        return self._job.began

    @property
    def ended(self) -> float:
        """When the last element was written, by `time.perf_counter`. Valid once finished."""
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
        if (bad := self._job.bad_master) is not None:
            segment = segments[bad[0]]
            self._refused = segment.name, segment.first_index + bad[1]
        self._segments = None


def start(
    rule: RuleName,
    segments: Sequence[Segment],
    *,
    pool: Pool | None = None,
    stats: bool = False,
    isa: str = "",
    independent: bool = False,
) -> SweepTicket:
    """Begin one step. With `stats`, the gradients' norm comes with it, for no extra traffic.

    The pool runs sweeps in the order of their start. An `independent` sweep shares no tensor with
    any unfinished sweep, so threads that are idle at the end of the previous one begin with it.

    Whether gradients are finite is the caller's business (`grad_stats`, or what the GPU found):
    here an infinity counts as the largest usable gradient, and an element whose weight would not be
    finite is left as it was and reported by `wait`.
    """
    pool = default_pool() if pool is None else pool
    if not segments:
        return SweepTicket(pool.native.stats([], _native.GradType.bf16), (), stats)
    kind = _check_all(rule, segments)
    native = [_to_native(s) for s in segments]
    code = _RULE[rule], kind.grad, kind.master, kind.moments
    if (hit := _native.sweep_overlap(native, *code)) is not None:
        raise SweepInputError(
            f"{hit[1]} of {segments[hit[0]].name}",
            f"shares memory with {hit[3]} of {segments[hit[2]].name}; each needs its own",
        )
    job = pool.native.sweep(native, *code, stats, isa, beside=independent)
    return SweepTicket(job, segments, stats)


def grad_stats(
    grads: torch.Tensor | Sequence[torch.Tensor], *, pool: Pool | None = None, isa: str = ""
) -> GradStats:
    """Sum of squares, largest absolute value and first non-finite element, in one read."""
    tensors = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    pool = default_pool() if pool is None else pool
    total = GradStats(0, 0.0, None)
    names = [f"gradient {i}" for i in range(len(tensors))]
    for tensor, name in zip(tensors, names, strict=True):
        _check_tensor(name, tensor, None, tuple(_GRAD))
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        job = pool.native.stats([_grad_only(tensors[i]) for i in places], _GRAD[dtype], isa)
        job.wait()
        found = read_stats(job)
        bad = found.first_bad
        here = None if bad is None else (places[bad[0]], bad[1])
        earlier = min((b for b in (total.first_bad, here) if b is not None), default=None)
        both = total + found
        total = GradStats(both.units, both.max_abs, earlier)
    return total


# Checks. All of a job's come before its start.


def _check_all(rule: RuleName, segments: Sequence[Segment]) -> _Kind:
    if rule not in _RULE:
        raise SweepInputError("rule", f"is one of {', '.join(_RULE)}, not {rule!r}")
    kinds = [_check(rule, s) for s in segments]
    for kind, segment in zip(kinds, segments, strict=True):
        if kind != kinds[0]:
            raise SweepInputError(
                segment.name,
                f"is stored otherwise than {segments[0].name}: gradient {segment.grad.dtype} and "
                f"{segments[0].grad.dtype}, weight {segment.weight.dtype} and "
                f"{segments[0].weight.dtype}; one job takes one format",
            )
    return kinds[0]


def _check(rule: RuleName, s: Segment) -> _Kind:
    numel = s.grad.numel()
    _check_tensor(f"grad of {s.name}", s.grad, numel, tuple(_GRAD))
    _check_tensor(f"weight of {s.name}", s.weight, numel, tuple(_MASTER))
    rest = _REST[s.weight.dtype]
    _check_role(s, "rest", s.rest, numel, () if rest is None else (rest,))
    moments = _native.MomentType.none
    if s.first is not None or rule != "sgd":
        _check_role(s, "first", s.first, numel, tuple(_MOMENTS))
        assert s.first is not None
        moments = _MOMENTS[s.first.dtype]
    coded = moments == _native.MomentType.int8
    second = (s.first.dtype,) if rule == "adamw" and s.first is not None else ()
    _check_role(s, "second", s.second, numel, second)
    blocks, base = num_blocks(numel), (torch.int16,) if coded else ()
    _check_role(s, "first_base", s.first_base, blocks, base)
    _check_role(s, "second_base", s.second_base, blocks, base if rule == "adamw" else ())
    if s.first_index < 0 or s.first_index % LEAF:
        raise SweepInputError(
            s.name, f"begins at element {s.first_index}, which is no multiple of {LEAF}"
        )
    return _Kind(rule, _GRAD[s.grad.dtype], _MASTER[s.weight.dtype], moments)


def _check_role(
    s: Segment, role: str, tensor: torch.Tensor | None, numel: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A role must be filled if it has types, and empty if it has none."""
    if tensor is None and dtypes:
        raise SweepInputError(f"{role} of {s.name}", "is missing")
    if tensor is not None and not dtypes:
        raise SweepInputError(f"{role} of {s.name}", "has no use in this format; leave it out")
    if tensor is not None:
        _check_tensor(f"{role} of {s.name}", tensor, numel, dtypes)


def _check_tensor(
    name: str, tensor: torch.Tensor, numel: int | None, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise SweepInputError(
            name, f"is {tensor.layout} on {tensor.device}; it must be a dense host tensor"
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise SweepInputError(name, f"is {tensor.dtype}; {wanted} is needed")
    if not tensor.is_contiguous():
        raise SweepInputError(
            name, f"is not contiguous (strides {tensor.stride()}); pass it .contiguous()"
        )
    if numel is not None and tensor.numel() != numel:
        raise SweepInputError(name, f"has {tensor.numel()} elements where {numel} are needed")


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _to_native(s: Segment) -> _native.Segment:
    return _native.Segment(
        count=s.grad.numel(),
        first_index=s.first_index,
        key=s.key,
        grad=_at(s.grad),
        weight=_at(s.weight),
        rest=_at(s.rest),
        first=_at(s.first),
        second=_at(s.second),
        first_bases=_at(s.first_base),
        second_bases=_at(s.second_base),
        by=s.by.native(),
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


__all__ = ["BLOCK", "LEAF", "GradStats", "Pool", "Segment", "SweepTicket", "grad_stats", "start"]
