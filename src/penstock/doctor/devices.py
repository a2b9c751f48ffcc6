"""Checks of storage, the GPU and its driver, and torch."""

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
from penstock.doctor.findings import Finding, ok
from penstock.machine.discovery.gpus import PCI, link_generation, open_nvml, pci_gpus
from penstock.machine.sysfs import System
from penstock.storage.engines import choose_engine
from penstock.units import GiB, format_bytes

_OLDEST_TORCH = (2, 6)
_ENOUGH_SPACE = 10 * GiB


def check_io_uring(system: System) -> Finding:
    """Check which storage engine is used and, if it is not io_uring, why."""
    choice = choose_engine(system=system)
    if choice.refusal is None:
        return ok("io_uring", f"works: {choice.reason}, and storage uses it")
    return Finding(
        check="io_uring",
        status="warn",
        found=f"{choice.refusal.why}; storage uses {choice.name}",
        fix=choice.refusal.fix,
        why="Storage falls back to threads: the results are the same, but each request needs more "
        "CPU time.",
    )


def check_free_space(_: System) -> Finding:
    """Check the free space in the temporary and the current directory."""
    directories: dict[Path, None] = {}
    missing = []
    for what, find in (("temporary", tempfile.gettempdir), ("current", os.getcwd)):
        try:
            directories[Path(find()).resolve()] = None
        except OSError as error:  # a read-only root, or a deleted current directory
            missing.append(f"no {what} directory ({error.strerror})")
    free = {directory: _free_bytes(directory) for directory in directories}
    texts = [f"{directory} {format_bytes(nbytes)} free" for directory, nbytes in free.items()]
    found = ", ".join(texts + missing)
    if not missing and min(free.values()) >= _ENOUGH_SPACE:
        return ok("free space", found)
    return Finding(
        check="free space",
        status="warn",
        found=found,
        why="Checkpoints and the NVMe tier need space in addition to the files that exist already.",
        fix="delete files, set TMPDIR, `cd` to a directory that exists, or choose a path on a "
        "larger disk for the NVMe tier; `df -h` lists the disks",
    )


def check_shared_memory(system: System) -> Finding:
    """Check the size of /dev/shm."""
    try:
        space = os.statvfs(system.root / "dev/shm")
    except OSError:
        nbytes = 0
    else:
        nbytes = space.f_blocks * space.f_frsize
    found = f"/dev/shm {format_bytes(nbytes)}" if nbytes else "no /dev/shm"
    if nbytes >= GiB:
        return ok("shared memory", found)
    return Finding(
        check="shared memory",
        status="warn",
        found=found,
        why="Workers of torch's DataLoader pass batches through it and die of SIGBUS if it is "
        "full.",
        fix="`docker run --shm-size=8g ...`, or `sudo mount -o remount,size=8G /dev/shm`",
    )


def check_driver(system: System) -> Finding:
    """Check that the CUDA driver reports a GPU."""
    count = _native.cuda_devices()
    if count:
        return ok("cuda driver", f"{count} GPU{'s' if count > 1 else ''}")
    reason = _native.cuda_why_none()
    cards = pci_gpus(system)
    if cards:
        return Finding(
            check="cuda driver",
            status="bad",
            found=f"{reason}, but there is a GPU on the PCI bus at {', '.join(cards)}",
            why="Without the driver, the GPU cannot be used and memory cannot be pinned for it.",
            fix="install the NVIDIA driver and check that `nvidia-smi` runs; in a container, "
            "`docker run --gpus all ...`",
        )
    return Finding(
        check="cuda driver",
        status="note",
        found=f"no GPU: {reason}",
        why="Placement, planning and tests work, but training on the CPU is slow.",
        fix="nothing if the machine has no GPU; to plan for another machine, see "
        "docs/machine-file.md",
    )


def check_torch(_: System) -> Finding:
    """Check that torch can be imported, is recent enough and finds the GPU."""
    torch = _import_torch()
    if torch is None:
        return Finding(
            check="torch",
            status="bad",
            found="torch cannot be imported",
            why="Without torch, only planning works.",
            fix="`pip install torch`, and check that `python -c 'import torch'` prints no error",
        )
    built_for = f"CUDA {torch.version.cuda}" if _cuda_version(torch) else "CPU only"
    found = f"torch {torch.__version__}, {built_for}"
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        return Finding(
            check="torch",
            status="bad",
            found=found,
            why="Penstock uses hooks that were introduced in torch 2.6.",
            fix="`pip install --upgrade 'torch>=2.6'`",
        )
    if not _native.cuda_devices() or _cuda_is_available(torch):
        return ok("torch", found)
    return Finding(
        check="torch",
        status="bad",
        found=f"{found}: it does not find the GPU",
        why="The driver reports a GPU, but this torch can only use the CPU.",
        fix="install a torch built for CUDA, https://pytorch.org/get-started/locally, and "
        "check CUDA_VISIBLE_DEVICES",
    )


def check_cuda_versions(_: System) -> Finding:
    """Check that the driver supports the CUDA version torch was built for."""
    torch, driver = _import_torch(), _driver_cuda_version()
    needs = _cuda_version(torch) if torch is not None else None
    if needs is None or driver is None:
        return ok("cuda versions", "nothing to compare without a driver and a CUDA build of torch")
    found = (
        f"the driver supports CUDA up to {driver[0]}.{driver[1]}, torch is built for "
        f"{needs[0]}.{needs[1]}"
    )
    if driver[0] >= needs[0]:  # within a major version, newer builds run on older drivers
        return ok("cuda versions", found)
    return Finding(
        check="cuda versions",
        status="bad",
        found=found,
        why="A driver cannot run programs built for a later major version of CUDA.",
        fix=f"update the driver, or install a torch built for CUDA {driver[0]}: "
        f"https://pytorch.org/get-started/previous-versions",
    )


def check_pcie_links(system: System) -> Finding:
    """Check that each GPU uses all lanes and the full speed of its PCIe link."""
    cards = pci_gpus(system)
    if not cards:
        return ok("pcie links", "no GPU on the PCI bus")
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
            why="All streamed data crosses this link, so a narrower link makes every step slower.",
            fix="move the card to a slot with more lanes, or reseat it: "
            f"`sudo lspci -vv -s {narrow[0]} | grep Lnk` shows the link",
        )
    if slow:
        return Finding(
            check="pcie links",
            status="note",
            found=found,
            why="An idle link slows down to save power. If it stays slow under load, every step "
            "is slower.",
            fix=f"check again under load: `sudo lspci -vv -s {slow[0]} | grep LnkSta`",
        )
    return ok("pcie links", found)


def _link(system: System, card: str) -> tuple[int, int, int, int]:
    """Return (speed, width, maximum speed, maximum width); unknown values count as maximal."""
    fastest = link_generation(system.text(f"{PCI}/{card}/max_link_speed")) or 0
    speed = link_generation(system.text(f"{PCI}/{card}/current_link_speed")) or fastest
    most = system.number(f"{PCI}/{card}/max_link_width") or 0
    width = system.number(f"{PCI}/{card}/current_link_width") or most
    return speed, width, fastest, most


def _free_bytes(directory: Path) -> int:
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def _import_torch() -> Any:
    # Importing torch loads an Intel library that searches the current directory and calls exit()
    # if there is none.
    if "torch" not in sys.modules and not _has_current_directory():
        reason = "the current directory was deleted, and importing torch would end the process"
        raise FileNotFoundError(errno.ENOENT, reason)
    try:
        import torch
    except (ImportError, OSError):  # OSError: a shared library is missing
        return None
    return torch


def _has_current_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _cuda_version(torch: Any) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    return (int(match[1]), int(match[2])) if match else None


def _cuda_is_available(torch: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about what the finding reports
        return bool(torch.cuda.is_available())


def _driver_cuda_version() -> tuple[int, int] | None:
    with open_nvml() as nvml:
        if nvml is None:
            return None
        try:
            version = int(nvml.nvmlSystemGetCudaDriverVersion())
        except nvml.NVMLError:
            return None
    return version // 1000, version % 1000 // 10
