"""The device that computes: one GPU, or the CPU in its place.

The engine issues work on lanes. On a GPU every lane has a CUDA stream, and work may still be
running when the call that issued it returns. On the CPU it has finished by then, so the same engine
code runs without a GPU. `record` returns a ticket for everything issued on the current lane so far:
another lane is ordered behind that ticket without stopping the host (`order_after`), and
`Ticket.wait` stops the host.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import DeviceMemoryError
from penstock.machine.discovery.gpus import gpu_processes, own_gpu_nbytes
from penstock.machine.limits import host_memory
from penstock.machine.sysfs import System
from penstock.model import autograd_warmup
from penstock.model.storage_counter import StorageCounter
from penstock.optim import device_norms, device_sweep, sweep
from penstock.optim.device_backend import DeviceTicket
from penstock.optim.norms import GradStats
from penstock.optim.rules import RuleName
from penstock.optim.sweep import Constants, Segment
from penstock.optim.thread_pool import Pool
from penstock.ticket import Finished, Ticket


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory at one moment, in bytes."""

    allocated: int
    """In tensors of this process. Without a GPU, only what `Device.empty` allocated: torch does not
    count what it allocates on a CPU while it computes."""
    reserved: int
    """Held by torch's allocator in this process: tensors, and what it keeps for the next ones."""
    free: int
    """Free according to the driver, which counts all processes."""
    total: int
    """Size of the device's memory."""
    peak: int = 0
    """Highest value of `reserved` since `Device.reset_peak`."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Device memory that some work needed at its peak, in bytes beyond what there was before."""

    allocated: int
    """In tensors."""
    reserved: int
    """Held by torch's allocator, which had nothing unused before."""
    kept: int
    """In tensors that exist after the work."""


class DeviceSweep(Protocol):
    """An optimizer sweep over states in device memory, whose tensors were checked."""

    @property
    def segments(self) -> Sequence[Segment]: ...

    def start(self, constants: Sequence[Constants]) -> Ticket[object]:
        """Start it with the constants of each segment."""


class Device(Protocol):
    """The operations that the engine needs from the hardware that computes."""

    name: str
    """Product name, as the driver reports it."""
    torch_device: torch.device
    reserved_before: int
    """Bytes that torch had reserved when the device was opened. They are the caller's, such as a
    model that is about to be read, and no part of a plan."""
    pinned: bool
    """Whether host memory must be pinned for copies to be fast and asynchronous."""

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        """Allocate bytes of device memory; `what` names them in the error message."""

    def release(self, nbytes: int) -> None:
        """Make `nbytes` that `empty` allocated, and the caller dropped, available to others."""

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Make `name` the lane on which work inside the `with` block is issued."""

    def record(self) -> Ticket[None]:
        """Return a ticket for all work issued on the current lane so far."""

    def order_after(self, ticket: Ticket[object]) -> None:
        """Make the work issued next on the current lane start after the ticket's work."""

    def seconds_between(self, start: Ticket[object], end: Ticket[object]) -> float:
        """Return the seconds from a `record` ticket to another ticket, both finished."""

    def host_time(self, recorded: Ticket[object]) -> float:
        """Return when `record` made the ticket, by the host's `time.perf_counter`."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current lane."""

    def start_stats(self, grads: Sequence[torch.Tensor]) -> Ticket[GradStats]:
        """Start computing norm and overflow of gradients in device memory."""

    def prepare_sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> DeviceSweep:
        """Prepare an optimizer sweep over states in device memory."""

    def fetch_results(self, tickets: Iterable[Ticket[object]]) -> None:
        """Fetch what sweeps and stats report with one copy, once they have ended.

        Otherwise `wait` makes a copy for each of them.
        """

    def limit_memory(self, nbytes: int | None) -> None:
        """Let torch reserve at most `nbytes` in total; None removes the limit."""

    def memory(self) -> DeviceMemory:
        """Return how much memory is allocated, reserved and free now."""

    def measure_peak(self, work: Callable[[], None]) -> PeakMemory:
        """Run `work`, wait for it, and return how much memory it needed at its peak."""

    def reset_peak(self) -> None:
        """Let `DeviceMemory.peak` start from what is reserved now."""

    def nbytes_outside_torch(self) -> int | None:
        """Return this process's device memory that torch did not allocate; None if not reported.

        That is the CUDA context, libraries and kernels, and memory mapped by the driver's own
        calls, such as pages of a KV cache.
        """

    def other_processes(self) -> dict[str, int]:
        """Return the bytes that other processes hold on the device, if the driver reports them."""

    def synchronize(self) -> None:
        """Block until all work on every lane has finished."""

    def seed(self, value: int) -> None:
        """Seed the device's random number generator."""


class CpuDevice:
    """The CPU in place of a GPU: its `hbm` tier is host memory, and every call is synchronous."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.reserved_before = 0
        self.pinned = False
        self._allocated = self._peak = 0

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, nbytes: int) -> None:
        self._allocated -= nbytes

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record(self) -> Ticket[None]:
        return Finished(None)

    def order_after(self, ticket: Ticket[object]) -> None:
        ticket.wait()

    def seconds_between(self, start: Ticket[object], end: Ticket[object]) -> float:
        assert isinstance(start, Finished)
        assert isinstance(end, Finished)
        return end.at - start.at

    def host_time(self, recorded: Ticket[object]) -> float:
        assert isinstance(recorded, Finished)
        return recorded.at

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def start_stats(self, grads: Sequence[torch.Tensor]) -> Ticket[GradStats]:
        return Finished(sweep.grad_stats(grads))

    def prepare_sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> DeviceSweep:
        return _SettledSweep(sweep.PreparedSweep(rule, segments), pool)

    def fetch_results(self, tickets: Iterable[Ticket[object]]) -> None:
        return

    def limit_memory(self, nbytes: int | None) -> None:
        """Do nothing: the OS limits host memory."""

    def memory(self) -> DeviceMemory:
        host = host_memory(System())
        return DeviceMemory(
            allocated=self._allocated,
            reserved=self._allocated,
            peak=self._peak,
            free=host.free,
            total=host.total,
        )

    def measure_peak(self, work: Callable[[], None]) -> PeakMemory:
        with StorageCounter() as counter:
            work()
        return PeakMemory(allocated=counter.peak, reserved=counter.peak, kept=counter.live())

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def nbytes_outside_torch(self) -> int | None:
        return 0

    def other_processes(self) -> dict[str, int]:
        return {}  # host memory has no such list

    def synchronize(self) -> None:
        return

    def seed(self, value: int) -> None:
        torch.manual_seed(value)


class _SettledSweep:
    """A sweep on the CPU in place of the device: it has ended when it was started."""

    def __init__(self, prepared: sweep.PreparedSweep, pool: Pool) -> None:
        self._prepared, self._pool = prepared, pool

    @property
    def segments(self) -> Sequence[Segment]:
        return self._prepared.segments

    def start(self, constants: Sequence[Constants]) -> Ticket[object]:
        ticket = self._prepared.start(constants, pool=self._pool)
        ticket.settle()  # `wait` reports a refused element
        return ticket


class CudaDevice:
    """One NVIDIA GPU. Every lane has a CUDA stream, created when it is first used."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_properties(self.torch_device).name
        torch.cuda.empty_cache()  # what torch keeps without using it belongs to no one
        self.reserved_before = torch.cuda.memory_reserved(self.torch_device)
        self.pinned = True
        self._streams: dict[str, Any] = {}
        self._events: list[Any] = []  # of tickets that nobody has any more
        autograd_warmup.warm_up_autograd(self.torch_device)

    def empty(self, nbytes: int, what: str) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError:
            now = self.memory()
            raise DeviceMemoryError(
                what, wanted=nbytes, free=now.free, total=now.total, allocated=now.allocated,
                reserved=now.reserved, holders=self.other_processes(),
            ) from None  # fmt: skip

    def release(self, nbytes: int) -> None:
        torch.cuda.empty_cache()  # the caching allocator would keep the freed bytes for itself

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        if name not in self._streams:
            make: Any = torch.cuda.Stream
            self._streams[name] = make(self.torch_device)
        # Torch's current device and stream are per thread, so every lane's thread sets its own.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._streams[name]):
            yield

    def record(self) -> Ticket[None]:
        try:
            event = self._events.pop()
        except IndexError:
            make: Any = torch.cuda.Event
            # A blocking event lets a host thread that waits for it sleep. By default the thread
            # would spin on a core that the optimizer sweep could use.
            event = make(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return _StreamTicket(event, self._events)

    def order_after(self, ticket: Ticket[object]) -> None:
        if isinstance(ticket, _StreamTicket):
            stream: Any = torch.cuda.current_stream(self.torch_device)
            stream.wait_event(ticket.event)
        else:
            # A CUDA stream cannot wait for a disk or for a sweep on the CPU, so the host does. This
            # blocks the thread of the current lane only.
            ticket.wait()

    def seconds_between(self, start: Ticket[object], end: Ticket[object]) -> float:
        assert isinstance(start, _StreamTicket)
        if isinstance(end, Finished):
            # `start` is the origin of a step. `Runner._run` synchronizes the device before it
            # records the origin, so the event completed when the host recorded it.
            return end.at - start.recorded_at
        assert isinstance(end, _StreamTicket)
        return float(start.event.elapsed_time(end.event)) / 1e3

    def host_time(self, recorded: Ticket[object]) -> float:
        assert isinstance(recorded, _StreamTicket)
        return recorded.recorded_at

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def start_stats(self, grads: Sequence[torch.Tensor]) -> Ticket[GradStats]:
        return device_norms.start_stats(grads)

    def prepare_sweep(self, rule: RuleName, segments: Sequence[Segment], pool: Pool) -> DeviceSweep:
        return device_sweep.PreparedDeviceSweep(rule, segments)

    def fetch_results(self, tickets: Iterable[Ticket[object]]) -> None:
        DeviceTicket.fetch_all(t for t in tickets if isinstance(t, DeviceTicket))

    def limit_memory(self, nbytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        share = 1.0 if nbytes is None else min(1.0, max(nbytes, 1) / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            allocated=torch.cuda.memory_allocated(self.torch_device),
            reserved=torch.cuda.memory_reserved(self.torch_device),
            peak=torch.cuda.max_memory_reserved(self.torch_device),
            free=free,
            total=total,
        )

    def measure_peak(self, work: Callable[[], None]) -> PeakMemory:
        gc.collect()  # tensors in cycles that are freed during the work would hide its own
        self.synchronize()
        torch.cuda.empty_cache()  # pages that are reserved already would hide those that are needed
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = self.memory()
        work()
        self.synchronize()
        self._drop_last_gradients()
        after = self.memory()
        return PeakMemory(
            allocated=torch.cuda.max_memory_allocated(self.torch_device) - before.allocated,
            reserved=torch.cuda.max_memory_reserved(self.torch_device) - before.reserved,
            kept=after.allocated - before.allocated,
        )

    def _drop_last_gradients(self) -> None:
        """Free the gradients that torch's backward thread still holds.

        The thread may hold the gradients of the last backward pass until the next pass begins. A
        tensor that is alive before the work and freed during it would be missing in the peak.
        """
        autograd_warmup.warm_up_autograd(self.torch_device)
        allocated, unchanged = -1, 0
        for _ in range(500):
            now = torch.cuda.memory_allocated(self.torch_device)
            unchanged = unchanged + 1 if now == allocated else 0
            if unchanged == 10:
                return
            allocated = now
            time.sleep(0.002)  # without the interpreter's lock, so that the thread can go on

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def nbytes_outside_torch(self) -> int | None:
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        reserved = self.memory().reserved
        whole = own_gpu_nbytes(f"GPU-{properties.uuid}")
        # Another thread may have made torch allocate between the two counts.
        if whole is None or reserved != self.memory().reserved:
            return None
        return max(0, whole - reserved)

    def other_processes(self) -> dict[str, int]:
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        return gpu_processes(f"GPU-{properties.uuid}")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def seed(self, value: int) -> None:
        torch.cuda.manual_seed(value)


class _StreamTicket:
    """A recorded CUDA event.

    When nobody has the ticket any more, its event is recorded again for another one: a step has
    600 of them, which the host would otherwise create and destroy. A stream that waits for an event
    waits for what was recorded when the wait was issued, so a new record does not change it.
    """

    def __init__(self, event: Any, unused: list[Any]) -> None:
        self.event, self._unused = event, unused
        self.recorded_at = time.perf_counter()

    def __del__(self) -> None:
        self._unused.append(self.event)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken CUDA context runs nothing any more
            self.event.synchronize()


def pick_device(name: str | None = None) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:1`; by default the first GPU, else the CPU."""
    wanted = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda":
        return CudaDevice(wanted.index or 0)
    return CpuDevice()
