"""Find out how GPUs reach each other: over NVLink, over PCIe, or only through host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.machine.discovery.gpus import open_nvml
from penstock.machine.machine import GpuLink, LinkKind
from penstock.machine.sysfs import System

Pair = tuple[int, int]


def find_gpu_links(system: System) -> tuple[GpuLink, ...]:
    """Return the links between all GPUs; none if the driver does not report them.

    Bandwidth is not reported. `penstock probe` measures it.
    """
    if system.root != Path("/"):  # the driver only knows the machine it runs on
        return ()
    with open_nvml() as nvml:
        return () if nvml is None else _from_driver(nvml)


def _from_driver(nvml: Any) -> tuple[GpuLink, ...]:
    try:
        cards = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        kinds = {
            (a, b): _kind(nvml, cards[a], cards[b]) for a, b in combinations(range(len(cards)), 2)
        }
    except (nvml.NVMLError, AttributeError):  # a card that cannot be read, or an old driver
        return ()
    return grouped_links(range(len(cards)), kinds)


def _kind(nvml: Any, one: Any, other: Any) -> LinkKind:
    def supports(capability: int) -> bool:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, capability)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    if supports(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        return "nvlink"
    return "pcie" if supports(nvml.NVML_P2P_CAPS_INDEX_WRITE) else "none"


def grouped_links(gpus: Sequence[int], kinds: Mapping[Pair, LinkKind]) -> tuple[GpuLink, ...]:
    """Return one link for all GPUs if all pairs are alike, else one for each pair."""
    if len(set(kinds.values())) == 1:
        return (GpuLink(gpus=tuple(gpus), kind=next(iter(kinds.values()))),)
    return tuple(GpuLink(gpus=pair, kind=kind) for pair, kind in kinds.items())
