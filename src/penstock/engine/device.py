"""What computes: a GPU, or the CPU in its place. Room: move.

Work is issued on lanes. On a GPU a lane is a stream, and what is issued may still be under way when
the call returns; on the CPU it is done by then. A mark stands for all that was issued on a lane up
to it: another lane waits for it without stopping the host, `settle` stops the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from penstock.errors import DeviceMemoryError, NonFiniteMasterError
from penstock.model import autograd_warmup
from penstock.optim import device_norms, device_sweep, sweep
from penstock.optim.norms import GradStats
from penstock.optim.rules import RuleName
from penstock.optim.sweep import Segment
from penstock.optim.threads import Pool
from penstock.ticket import Ticket


class Mark(Protocol):
    """Something issued."""

    def settle(self) -> None:
        """Wait on the host until it is done. Raises what went wrong with it."""


class Moment:
    """Work of the host's own, done by the time the mark was made."""

    __slots__ = ("at",)

    def __init__(self, at: float | None = None) -> None:
        self.at = time.perf_counter() if at is None else at

    def settle(self) -> None:
        return


class StatsTicket(Protocol):
    """Norm and overflow, being found."""

    def wait(self) -> GradStats: ...


class Device(Protocol):
    """The few things the engine asks of whatever computes."""

    where: torch.device
    pinned: bool
    """Whether host memory must be registered for copies to be fast."""

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        """Bytes of its own memory."""

    def returned(self, nbytes: int) -> None:
        """So many bytes that `empty` gave are no longer used: others may have them now."""

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        """What is issued inside goes on that lane."""

    def mark(self) -> Mark:
        """After all that was issued on the current lane."""

    def wait(self, mark: Mark) -> None:
        """What is issued next on the current lane comes after it."""

    def seconds(self, origin: Mark, mark: Mark) -> float:
        """From one mark to another, both settled."""

    def clock(self, origin: Mark) -> float:
        """When an origin was made, by the host's `time.perf_counter`."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """On the current lane."""

    def start_stats(self, grads: Sequence[torch.Tensor]) -> StatsTicket:
        """Norm and overflow of gradients in its memory."""

    def sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> Mark:
        """Step over states in its memory."""

    def limit(self, nbytes: int | None) -> None:
        """Let torch have no more than this in all; None: as much as there is."""

    def settle(self) -> None:
        """Wait for everything, on every lane."""

    def seed(self, value: int) -> None:
        """What its random numbers follow from next."""

    def peak_nbytes(self) -> int:
        """The most of its memory that this process has held, as far as torch knows."""


class CpuDevice:
    """The CPU: its `hbm` is host memory, and everything is done when it is issued."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.pinned = False
        self._taken = 0

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        self._taken += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def returned(self, nbytes: int) -> None:
        self._taken -= nbytes

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        return Moment()

    def wait(self, mark: Mark) -> None:
        mark.settle()

    def seconds(self, origin: Mark, mark: Mark) -> float:
        assert isinstance(origin, Moment)
        assert isinstance(mark, Moment)
        return mark.at - origin.at

    def clock(self, origin: Mark) -> float:
        assert isinstance(origin, Moment)
        return origin.at

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def start_stats(self, grads: Sequence[torch.Tensor]) -> StatsTicket:
        return _Found(sweep.grad_stats(grads))

    def sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> Mark:
        ticket = sweep.start(rule, segments, pool=pool)
        with contextlib.suppress(NonFiniteMasterError):  # which `settle` tells
            ticket.wait()
        return SweepMark(ticket)

    def limit(self, nbytes: int | None) -> None:
        """The kernel's own limits are what binds host memory."""

    def settle(self) -> None:
        return

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def peak_nbytes(self) -> int:
        return self._taken


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self, index: int = 0) -> None:
        self.where = torch.device("cuda", index)
        self.pinned = True
        self._streams: dict[str, Any] = {}
        autograd_warmup.warm_up_autograd(self.where)

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.where)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self.where)
            raise DeviceMemoryError(what, wanted=nbytes, free=free, total=total) from None

    def returned(self, nbytes: int) -> None:
        """Torch would keep them for itself."""
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        if name not in self._streams:
            make: Any = torch.cuda.Stream
            self._streams[name] = make(self.where)
        with torch.cuda.device(self.where), torch.cuda.stream(self._streams[name]):
            yield

    def mark(self) -> Mark:
        make: Any = torch.cuda.Event
        # Whoever waits for it sleeps: by default it would keep a core busy that sweeps could use.
        event = make(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.where))
        return _Event(event)

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, _Event):
            stream: Any = torch.cuda.current_stream(self.where)
            stream.wait_event(mark.event)
        else:
            mark.settle()

    def seconds(self, origin: Mark, mark: Mark) -> float:
        """The host's clock and the GPU's agree at the origin, when nothing was under way."""
        assert isinstance(origin, _Event)
        if isinstance(mark, Moment):
            return mark.at - origin.host
        assert isinstance(mark, _Event)
        return float(origin.event.elapsed_time(mark.event)) / 1e3

    def clock(self, origin: Mark) -> float:
        assert isinstance(origin, _Event)
        return origin.host

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def start_stats(self, grads: Sequence[torch.Tensor]) -> StatsTicket:
        return device_norms.start_stats(grads)

    def sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> Mark:
        return SweepMark(device_sweep.start(rule, segments))

    def limit(self, nbytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.where).total_memory
        share = 1.0 if nbytes is None else min(1.0, max(nbytes, 1) / total)
        torch.cuda.set_per_process_memory_fraction(share, self.where)

    def settle(self) -> None:
        torch.cuda.synchronize(self.where)

    def seed(self, value: int) -> None:
        torch.cuda.manual_seed(value)

    def peak_nbytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.where))


class _Event:
    def __init__(self, event: Any) -> None:
        self.event = event
        self.host = time.perf_counter()

    def settle(self) -> None:
        self.event.synchronize()


class _Found:
    def __init__(self, stats: GradStats) -> None:
        self._stats = stats

    def wait(self) -> GradStats:
        return self._stats


class SweepMark:
    """A sweep under way; `settle` raises NonFiniteMasterError where an element was refused."""

    def __init__(self, ticket: Ticket[object]) -> None:
        self._ticket = ticket

    def settle(self) -> None:
        self._ticket.wait()


def pick_device(name: str | None = None) -> Device:
    """`cpu`, `cuda` or `cuda:1`; the first GPU if there is one and nothing is said."""
    wanted = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda":
        return CudaDevice(wanted.index or 0)
    return CpuDevice()
