"""Measure copies from GPU to GPU. torch is imported only when it is needed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ProbeError
from penstock.machine.machine import Figure, GpuLink
from penstock.probe.measurement import Effort, Progress, measure_rate
from penstock.units import MiB, format_bytes

if TYPE_CHECKING:
    import torch

NBYTES = 64 * MiB
"""Size of one copy: about a layer's shard of weights."""

MAX_COPIES = 4096
"""Maximum number of copies in one run, which are issued back to back."""


class PeerCopier(Protocol):
    """Copies between GPUs. Tests replace it with simulated links."""

    def seconds(self, count: int) -> float:
        """Let each GPU send `count` times `NBYTES` to the next one; return the seconds."""


def figures(links: Sequence[GpuLink]) -> int:
    """Return the number of figures to measure: links without peer access have none."""
    return sum(link.kind != "none" for link in links)


def probe_link(
    link: GpuLink, copier: PeerCopier, effort: Effort, progress: Progress
) -> GpuLink:  # fmt: skip
    """Return the link with its measured rate, or as it was if that failed."""
    rate = progress.measure(describe(link), partial(_rate, copier, effort))
    return link if rate is None else dataclasses.replace(link, bytes_per_second=rate)


def describe(link: GpuLink) -> str:
    """Name a link in messages."""
    return f"GPU {', '.join(map(str, link.gpus))}: copies to each other over {link.kind}"


def _rate(copier: PeerCopier, effort: Effort) -> Figure:
    return measure_rate(
        lambda nbytes: copier.seconds(nbytes // NBYTES),
        effort,
        unit=NBYTES,
        limit=NBYTES * MAX_COPIES,
    )


class TorchPeerCopier:
    """Each GPU sends to the next one, and the last to the first, all at the same time.

    This is how collective operations use the links: every GPU sends and receives as much.
    """

    def __init__(self, gpus: Sequence[int], ordinals: Mapping[int, int]) -> None:
        import torch

        if hidden := [index for index in gpus if index not in ordinals]:
            raise ProbeError(
                f"CUDA does not list GPU {hidden[0]} in this process; check CUDA_VISIBLE_DEVICES"
            )
        self._ordinals = [ordinals[index] for index in gpus]
        free = min(torch.cuda.mem_get_info(ordinal)[0] for ordinal in self._ordinals)
        if free < 4 * NBYTES:
            raise ProbeError(
                f"a copy needs {format_bytes(2 * NBYTES)} on each GPU, and only "
                f"{format_bytes(free)} is free; free some GPU memory and probe again"
            )
        self._steps = [
            self._step(source, target)
            for source, target in zip(
                self._ordinals, self._ordinals[1:] + self._ordinals[:1], strict=True
            )
        ]

    def _step(
        self, source: int, target: int
    ) -> tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]:
        import torch

        sent = torch.empty(NBYTES, dtype=torch.uint8, device=torch.device("cuda", source))
        received = torch.empty(NBYTES, dtype=torch.uint8, device=torch.device("cuda", target))
        # A copy between devices runs on the stream of its source.
        return torch.cuda.Stream(sent.device), received, sent  # type: ignore[no-untyped-call]

    def seconds(self, count: int) -> float:
        """Issue all copies without waiting, and return the seconds."""
        import torch

        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            for stream, received, sent in self._steps:
                with torch.cuda.stream(stream):
                    received.copy_(sent, non_blocking=True)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        import torch

        for ordinal in self._ordinals:
            torch.cuda.synchronize(ordinal)
