"""Measure copies between memory nodes and GPUs. torch is imported only when it is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine.machine import Direction, Figure, Gpu, Transfer
from penstock.memory.arena import Arena
from penstock.memory.placement import Node
from penstock.probe.measurement import Effort, Progress, measure_rate
from penstock.units import GiB, MiB, format_bytes

if TYPE_CHECKING:
    import torch

DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "both")

MAX_COPIES = 4096
"""Maximum number of copies in one run.

They are issued back to back, so that a run measures the link and not the calls."""

MAX_STREAMS = 4
"""Maximum number of streams for each direction."""

MAX_SLOTS = 64
"""Maximum number of parts of a buffer that copies rotate over."""


class Copier(Protocol):
    """Copies between buffers on both sides of a link. Tests replace it with a simulated link."""

    max_nbytes: int
    """Maximum size of a copy, for each GPU and direction."""

    def seconds(self, copy: Copy, count: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A figure to measure."""

    direction: Direction
    """`h2d`, `d2h` or `both`."""

    gpus: tuple[int, ...]
    """Indices of the GPUs that copy concurrently."""

    nbytes: int
    """Size of one copy."""

    streams: int
    """Number of streams for each direction and GPU."""

    @property
    def all_bytes(self) -> int:
        """Bytes of one copy on every GPU, in each direction."""
        return self.nbytes * len(self.gpus) * (2 if self.direction == "both" else 1)

    def __str__(self) -> str:
        gpus = ", ".join(map(str, self.gpus))
        streams = f"{self.streams} stream{'s' if self.streams != 1 else ''}"
        return f"GPU {gpus}: {self.direction}, {format_bytes(self.nbytes)}, {streams}"


def sizes(*, quick: bool) -> tuple[int, ...]:
    """Return the sizes of copies to measure."""
    return (MiB, 16 * MiB, 256 * MiB) if quick else tuple(MiB << k for k in (0, 2, 4, 6, 8, 10))


def copies(gpus: tuple[int, ...], lengths: Sequence[int], streams: Sequence[int]) -> list[Copy]:
    """Return the figures to measure for a node and a set of GPUs."""
    return [
        Copy(direction=direction, gpus=gpus, nbytes=nbytes, streams=count)
        for direction in DIRECTIONS
        for count in streams
        for nbytes in lengths
    ]


def plan(gpus: Sequence[int], host_bytes: int, *, quick: bool) -> list[list[Copy]]:
    """Return the figures in groups: each GPU alone, then all concurrently.

    The last group uses the largest copies that fit in `host_bytes`.
    """
    streams = (1, 2) if quick else (1, MAX_STREAMS)
    lengths = sizes(quick=quick)
    groups = [copies((gpu,), lengths, streams) for gpu in gpus]
    if len(gpus) > 1:
        fitting = [n for n in lengths if 2 * n * len(gpus) <= host_bytes]
        groups.append(copies(tuple(gpus), fitting[-1:], (1,)))
    return groups


def probe_group(
    node: int, group: Sequence[Copy], copier: Copier, effort: Effort, progress: Progress
) -> Iterator[Transfer]:
    """Measure a group of copies, and yield the results."""
    for copy in group:
        what = f"node {node} and {copy}"
        figure = progress.measure(what, partial(_rate, copier, copy, effort))
        if figure is not None:
            yield Transfer(
                direction=copy.direction,
                gpus=copy.gpus,
                node=node,
                nbytes=copy.nbytes,
                streams=copy.streams,
                bytes_per_second=figure,
            )


def _rate(copier: Copier, copy: Copy, effort: Effort) -> Figure:
    if copy.nbytes > copier.max_nbytes:
        raise ProbeError(f"the buffers only hold {format_bytes(copier.max_nbytes)}")
    unit = copy.all_bytes
    return measure_rate(
        lambda nbytes: copier.seconds(copy, nbytes // unit),
        effort,
        unit=unit,
        limit=unit * MAX_COPIES,
    )


def cuda_ordinals(gpus: Sequence[Gpu]) -> dict[int, int]:
    """Map the index of each GPU that this process can use to its CUDA ordinal."""
    if _native.cuda_devices() == 0:
        raise ProbeError(_native.cuda_why_none())
    import torch

    if not torch.cuda.is_available():
        raise ProbeError("torch finds no CUDA device; check that it is not a CPU build")
    by_uuid = {}
    for ordinal in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(ordinal).uuid)
        by_uuid[uuid.lower().removeprefix("gpu-")] = ordinal
    known = {gpu.index: gpu.uuid.lower().removeprefix("gpu-") for gpu in gpus}
    return {index: by_uuid[uuid] for index, uuid in known.items() if uuid in by_uuid}


class TorchCopier:
    """Copies between pinned memory of one node and the same amount on each GPU."""

    def __init__(self, node: int, ordinals: Mapping[int, int], host_bytes: int) -> None:
        import torch

        free = min(torch.cuda.mem_get_info(ordinal)[0] for ordinal in ordinals.values())
        share = min(host_bytes // (2 * len(ordinals)), free // 8, GiB)
        self.max_nbytes = share // MiB * MiB
        if self.max_nbytes < MiB:
            raise ProbeError(
                f"a copy needs {format_bytes(MiB)}, and its share of the free memory is "
                f"{format_bytes(share)}; free some host or GPU memory and probe again"
            )
        self._arena = Arena(2 * self.max_nbytes * len(ordinals), Node(node), pinned=True)
        self._gpu_buffers = {
            index: _GpuBuffers(self._arena, self.max_nbytes, ordinal)
            for index, ordinal in ordinals.items()
        }

    def seconds(self, copy: Copy, count: int) -> float:
        """Issue `count` copies per GPU and direction without waiting, and return the seconds."""
        import torch

        all_buffers = [self._gpu_buffers[gpu] for gpu in copy.gpus]
        directions = ("h2d", "d2h") if copy.direction == "both" else (copy.direction,)
        rounds = [
            buffers.round(direction, copy.nbytes, copy.streams)
            for buffers in all_buffers
            for direction in directions
        ]
        before = torch.cuda.current_stream()
        for buffers in all_buffers:
            torch.cuda.synchronize(buffers.ordinal)
        start = time.perf_counter()
        try:
            for k in range(count):
                for steps in rounds:
                    stream, target, source = steps[k % len(steps)]
                    torch.cuda.set_stream(stream)
                    target.copy_(source, non_blocking=True)
            for buffers in all_buffers:
                torch.cuda.synchronize(buffers.ordinal)
            return time.perf_counter() - start
        finally:
            torch.cuda.set_stream(before)


_Step = tuple["torch.cuda.Stream", "torch.Tensor", "torch.Tensor"]


class _GpuBuffers:
    """The buffers of one GPU: a pair for each direction, so that both can run concurrently."""

    def __init__(self, arena: Arena, nbytes: int, ordinal: int) -> None:
        import torch

        self.ordinal = ordinal
        device = torch.device("cuda", ordinal)
        self._host = {d: arena.tensor(nbytes, torch.uint8) for d in ("h2d", "d2h")}
        self._device = {d: torch.empty_like(t, device=device) for d, t in self._host.items()}
        self._streams = {d: _streams(device) for d in self._host}

    def round(self, direction: str, nbytes: int, streams: int) -> list[_Step]:
        """Return (stream, target, source) steps that rotate over streams and slots.

        Rotating slots keeps a copy from finding the lines of the last one in a cache.
        """
        slots = max(1, min(MAX_SLOTS, len(self._host[direction]) // nbytes))
        turns = slots * streams if slots % streams else max(slots, streams)
        steps = []
        for k in range(turns):
            part = slice(k % slots * nbytes, (k % slots + 1) * nbytes)
            host, device = self._host[direction][part], self._device[direction][part]
            target, source = (device, host) if direction == "h2d" else (host, device)
            steps.append((self._streams[direction][k % streams], target, source))
        return steps


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    import torch

    return [torch.cuda.Stream(device) for _ in range(MAX_STREAMS)]  # type: ignore[no-untyped-call]
