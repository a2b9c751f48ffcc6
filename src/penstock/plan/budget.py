"""What each tier may give. Room: decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import PlanError
from penstock.machine.machine import Figure, Machine, StoragePath, StorageRate
from penstock.records import Bytes
from penstock.tiers import Tier
from penstock.units import GiB, MiB, parse_bytes

HBM_RESERVE = 0.02
"""Of a GPU's memory, left for the display and for other programs where the budget is `auto`."""

HOST_RESERVE = 2 * GiB
"""Of DRAM, left for the system and for this program's own code and libraries, with `HOST_SHARE`."""

HOST_SHARE = 0.05

CPU_SHARE = 0.25
"""Of free DRAM, for what the CPU computes with where there is no GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathBudget:
    """What one directory or device may give."""

    path: str
    """Where."""

    nbytes: Bytes
    """How much."""

    def __post_init__(self) -> None:
        _check("nvme", self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The most each tier may hold at any moment."""

    hbm: Bytes
    """Of the GPU, the driver's own share included."""

    dram: Bytes
    """Of memory with CPUs."""

    cxl: Bytes = 0
    """Of memory without CPUs."""

    nvme: tuple[PathBudget, ...] = ()
    """Of each path."""

    def __post_init__(self) -> None:
        for name in ("hbm", "dram", "cxl"):
            _check(name, getattr(self, name))
        paths = [path.path for path in self.nvme]
        if len(set(paths)) < len(paths):
            raise PlanError("nvme", f"names a path twice: {', '.join(paths)}")

    def of(self, tier: Tier) -> int:
        if tier is Tier.NVME:
            return sum(path.nbytes for path in self.nvme)
        return int(getattr(self, tier.value))

    def changed(self, tier: Tier, nbytes: int) -> Budget:
        """The same with another size of one tier; paths keep their proportions."""
        match tier:
            case Tier.HBM:
                return replace(self, hbm=nbytes)
            case Tier.DRAM:
                return replace(self, dram=nbytes)
            case Tier.CXL:
                return replace(self, cxl=nbytes)
        total = max(self.of(tier), 1)
        parts = [PathBudget(path=p.path, nbytes=nbytes * p.nbytes // total) for p in self.nvme]
        return replace(self, nvme=tuple(parts))


def parse_budget(
    machine: Machine, *, hbm: str = "auto", dram: str = "auto", cxl: str = "auto",
    nvme: tuple[str, ...] = (),
) -> Budget:  # fmt: skip
    """A budget from what a user types. PlanError names the tier.

    Where the CPU computes, HBM is a part of DRAM: what one takes, the other does not have.
    """
    fast = _size("hbm", hbm, auto_hbm(machine))
    left = auto_dram(machine) - (0 if machine.gpus else fast)
    return Budget(
        hbm=fast,
        dram=_size("dram", dram, max(0, left)),
        cxl=_size("cxl", cxl, sum(n.capacity if n.free is None else n.free
                                  for n in machine.cxl_nodes)),
        nvme=tuple(_path_budget(machine, text) for text in nvme),
    )  # fmt: skip


def auto_hbm(machine: Machine) -> int:
    """What the first GPU has free, less the reserve; of a machine without one, a part of DRAM."""
    if not machine.gpus:
        return int(CPU_SHARE * auto_dram(machine))
    for gpu in machine.gpus:
        if gpu.memory is not None:
            free = gpu.memory if gpu.free is None else gpu.free
            return max(0, free - int(HBM_RESERVE * gpu.memory))
    return 0


def auto_dram(machine: Machine) -> int:
    """What is free on all nodes with CPUs, less the reserve."""
    nodes = machine.dram_nodes
    free = sum(node.capacity if node.free is None else node.free for node in nodes)
    reserve = HOST_RESERVE + int(HOST_SHARE * sum(node.capacity for node in nodes))
    return max(0, free - reserve)


ASSUMED_DRIVE: Mapping[Literal["read", "write"], float] = {"read": 5.0e9, "write": 3.0e9}
"""Bytes per second of a PCIe 4.0 drive, for paths that nobody measured. Data sheets say more."""


def with_paths(machine: Machine, budget: Budget) -> tuple[Machine, str]:
    """The machine with every path of the budget, and what had to be assumed for new ones.

    A path that was not measured is taken to be like the first one that was.
    """
    known = {storage.path: storage for storage in machine.storage}
    new = [p.path for p in budget.nvme if p.path not in known or not known[p.path].rates]
    if not new:
        return machine, ""
    measured = next((storage for storage in machine.storage if storage.rates), None)
    rates = measured.rates if measured else tuple(
        StorageRate(operation=operation, block=MiB, depth=16,
                    bytes_per_second=Figure(median=rate, low=rate, high=rate, samples=0))
        for operation, rate in ASSUMED_DRIVE.items()
    )  # fmt: skip
    like = f"like {measured.path}" if measured else "a PCIe 4.0 drive"
    added = (replace(known.get(path, StoragePath(path=path)), rates=rates) for path in new)
    kept = (storage for storage in machine.storage if storage.path not in new)
    told = f"{', '.join(new)}: not measured, taken to be {like}; `penstock probe --storage` tells."
    return replace(machine, storage=(*kept, *added)), told


def check_paths(machine: Machine, budget: Budget) -> None:
    """Raise PlanError unless the machine knows every path of the budget."""
    known = [storage.path for storage in machine.storage]
    for path in budget.nvme:
        if path.path not in known:
            listed = ", ".join(known) or "none"
            raise PlanError("nvme", f"{path.path} is not in the machine's storage ({listed})")


def _path_budget(machine: Machine, text: str) -> PathBudget:
    """`/mnt/nvme:400GiB`, or `400GiB` on the machine's first path."""
    path, _, size = text.rpartition(":")
    if not path:
        if not machine.storage:
            raise PlanError("nvme", f'must name a path, such as "/mnt/nvme:{text}"')
        path = machine.storage[0].path
    known = {s.path: s for s in machine.storage}.get(path)
    free = (known.free if known.free is not None else known.capacity) if known else None
    return PathBudget(path=path, nbytes=_size("nvme", size, free))


def _size(name: str, text: str, auto: int | None) -> int:
    if text.strip().lower() == "auto":
        if auto is None:
            raise PlanError(name, "cannot be auto: the machine file does not say what is free")
        return auto
    if text.strip().startswith("-"):
        raise PlanError(name, f"must be 0 or more, got {text}")
    try:
        return parse_bytes(text)
    except ValueError as wrong:
        raise PlanError(name, str(wrong)) from None


def _check(name: str, nbytes: int) -> None:
    if nbytes < 0:
        raise PlanError(name, f"must be 0 or more, got {nbytes}")
