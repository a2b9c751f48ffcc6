"""Storage, the GPU and its driver, and the torch that drives it. Room: show."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from penstock import _native
from penstock.doctor.findings import Finding, fine
from penstock.machine.discovery.gpus import PCI, link_generation, open_nvml, pci_gpus
from penstock.machine.sysfs import System
from penstock.storage.engines import choose_engine
from penstock.units import GiB, format_bytes

_OLDEST_TORCH = (2, 6)
_ROOMY = 10 * GiB


def check_io_uring(system: System) -> Finding:
    """Which storage engine runs here, and if it is not this one, why."""
    choice = choose_engine(system=system)
    if choice.refusal is None:
        return fine("io_uring", f"works: {choice.reason}, and storage uses it")
    return Finding(
        check="io_uring",
        status="warn",
        found=f"{choice.refusal.why}; storage uses {choice.name}",
        mend=choice.refusal.mend,
        why="Storage falls back to threads: the same results, with more CPU time for each request.",
    )


def check_free_space(_: System) -> Finding:
    places: dict[Path, None] = {}
    missing = []
    for what, find in (("temporary", tempfile.gettempdir), ("current", os.getcwd)):
        try:
            places[Path(find()).resolve()] = None
        except OSError as failed:  # a read-only root, a directory deleted under us
            missing.append(f"no {what} directory ({failed.strerror})")
    free = {place: _free(place) for place in places}
    texts = [f"{place} {format_bytes(nbytes)} free" for place, nbytes in free.items()]
    found = ", ".join(texts + missing)
    if not missing and min(free.values()) >= _ROOMY:
        return fine("free space", found)
    return Finding(
        check="free space",
        status="warn",
        found=found,
        why="Checkpoints and the NVMe tier are written whole beside what is there already.",
        mend="make room, set TMPDIR, `cd` to a directory that is there, or name a path on a larger "
        "disk for the NVMe tier; `df -h` lists them",
    )


def check_shared_memory(system: System) -> Finding:
    try:
        space = os.statvfs(system.root / "dev/shm")
    except OSError:
        nbytes = 0
    else:
        nbytes = space.f_blocks * space.f_frsize
    found = f"/dev/shm {format_bytes(nbytes)}" if nbytes else "no /dev/shm"
    if nbytes >= GiB:
        return fine("shared memory", found)
    return Finding(
        check="shared memory",
        status="warn",
        found=found,
        why="torch's data loader workers hand batches over there and die of SIGBUS when it is full",
        mend="`docker run --shm-size=8g ...`, or `sudo mount -o remount,size=8G /dev/shm`",
    )


def check_driver(system: System) -> Finding:
    count = _native.cuda_devices()
    if count:
        return fine("cuda driver", f"{count} GPU{'s' if count > 1 else ''}")
    reason = _native.cuda_why_none()
    cards = pci_gpus(system)
    if cards:
        return Finding(
            check="cuda driver",
            status="bad",
            found=f"{reason}, yet a GPU is on the bus at {', '.join(cards)}",
            why="Without the driver the GPU cannot be used, and memory cannot be pinned for it.",
            mend="install NVIDIA's driver and see that `nvidia-smi` runs; in a container "
            "`docker run --gpus all ...`",
        )
    return Finding(
        check="cuda driver",
        status="note",
        found=f"no GPU: {reason}",
        why="Placement, planning and tests work; training at speed does not.",
        mend="nothing on a machine without a GPU; to plan for another see docs/machine-file.md",
    )


def check_torch(_: System) -> Finding:
    torch = _torch()
    if torch is None:
        return Finding(
            check="torch",
            status="bad",
            found="torch cannot be imported",
            why="Tensors are torch's; only planning works without it.",
            mend="`pip install torch`, and see that `python -c 'import torch'` says nothing",
        )
    built_for = f"CUDA {torch.version.cuda}" if _cuda(torch) else "CPU only"
    found = f"torch {torch.__version__}, {built_for}"
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        return Finding(
            check="torch",
            status="bad",
            found=found,
            why="Penstock uses hooks that came with torch 2.6.",
            mend="`pip install --upgrade 'torch>=2.6'`",
        )
    if not _native.cuda_devices() or _available(torch):
        return fine("torch", found)
    return Finding(
        check="torch",
        status="bad",
        found=f"{found}: it does not see the GPU",
        why="The driver has a GPU, but this torch computes on the CPU.",
        mend="install a torch built for CUDA, https://pytorch.org/get-started/locally, and look "
        "at CUDA_VISIBLE_DEVICES",
    )


def check_cuda_versions(_: System) -> Finding:
    torch, driver = _torch(), _driver_cuda()
    needs = _cuda(torch) if torch is not None else None
    if needs is None or driver is None:
        return fine("cuda versions", "no driver and CUDA build of torch to compare")
    found = f"driver up to CUDA {driver[0]}.{driver[1]}, torch built for {needs[0]}.{needs[1]}"
    if driver[0] >= needs[0]:  # within one major version newer builds run on older drivers
        return fine("cuda versions", found)
    return Finding(
        check="cuda versions",
        status="bad",
        found=found,
        why="A driver does not run programs built for a later major version of CUDA.",
        mend=f"update the driver, or install a torch built for CUDA {driver[0]}: "
        f"https://pytorch.org/get-started/previous-versions",
    )


def check_pcie_links(system: System) -> Finding:
    cards = pci_gpus(system)
    if not cards:
        return fine("pcie links", "no GPU on the bus")
    links = {card: _link(system, card) for card in cards}
    narrow = [card for card, (_, width, _, most) in links.items() if width < most]
    slow = [card for card, (speed, _, fastest, _) in links.items() if speed < fastest]
    found = ", ".join(
        f"{card} gen {speed} x{width} of gen {fastest} x{most}"
        for card, (speed, width, fastest, most) in links.items()
    )
    if narrow:
        return Finding(
            check="pcie links",
            status="warn",
            found=found,
            why="Every streamed byte crosses this link, so a step takes longer in proportion.",
            mend="move the card to a full slot or reseat it: "
            f"`sudo lspci -vv -s {narrow[0]} | grep Lnk` shows what it got",
        )
    if slow:
        return Finding(
            check="pcie links",
            status="note",
            found=found,
            why="An idle link slows down to save power; one that stays slow slows every step.",
            mend=f"look again under load: `sudo lspci -vv -s {slow[0]} | grep LnkSta`",
        )
    return fine("pcie links", found)


def _link(system: System, card: str) -> tuple[int, int, int, int]:
    """Speed and width now, and at most; what the kernel cannot tell counts as full."""
    fastest = link_generation(system.text(f"{PCI}/{card}/max_link_speed")) or 0
    speed = link_generation(system.text(f"{PCI}/{card}/current_link_speed")) or fastest
    most = system.number(f"{PCI}/{card}/max_link_width") or 0
    width = system.number(f"{PCI}/{card}/current_link_width") or most
    return speed, width, fastest, most


def _free(place: Path) -> int:
    try:
        space = os.statvfs(place)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def _torch() -> Any:
    # Intel's library in it looks for its files from there, and calls exit() if it cannot.
    if "torch" not in sys.modules and not _has_directory():
        gone = "the current directory is gone, where importing torch ends the process"
        raise FileNotFoundError(errno.ENOENT, gone)
    try:
        import torch
    except (ImportError, OSError):  # OSError: a shared library it needs is missing
        return None
    return torch


def _has_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _cuda(torch: Any) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    return (int(match[1]), int(match[2])) if match else None


def _available(torch: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what the finding is about to say
        return bool(torch.cuda.is_available())


def _driver_cuda() -> tuple[int, int] | None:
    with open_nvml() as nvml:
        if nvml is None:
            return None
        try:
            version = int(nvml.nvmlSystemGetCudaDriverVersion())
        except nvml.NVMLError:
            return None
    return version // 1000, version % 1000 // 10
