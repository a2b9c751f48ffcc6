"""Memory budgets: how much of each tier a plan may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import PlanError
from penstock.machine.machine import Figure, Machine, MemoryNode, StoragePath, StorageRate
from penstock.records import Bytes
from penstock.tiers import Tier
from penstock.units import GiB, MiB, format_bytes, parse_bytes, parse_memory

HBM_RESERVE = 0.02
"""Fraction of the GPU's memory that an `auto` budget leaves for the display and other programs."""

HOST_RESERVE = GiB
"""Bytes of DRAM that an `auto` budget leaves to the system and other programs, in addition to
`HOST_SHARE`. What Penstock's own process needs is not part of it: see `process_memory`."""

HOST_SHARE = 0.05
"""Fraction of DRAM that an `auto` budget leaves free, in addition to `HOST_RESERVE`."""

GPU_PROCESS = 5 * GiB // 2
"""Host memory of the process on a machine with a GPU where it was not measured. Runs of 3 B
parameters on an H200 took 1.4 to 2.4 GiB in addition to their plan: the rows `fast`, `curve`,
`disk` and `moments` of `bench/results/engine_*.json`."""

CPU_PROCESS = 3 * GiB // 4
"""The same without a GPU: 0.4 GiB for Python with PyTorch's CPU build and transformers, and 0.2 GiB
by which a run may exceed that (tests/faults/test_engine_bounded.py)."""

CPU_SHARE = 0.25
"""Fraction of free DRAM that an `auto` budget uses as device memory on a machine without a GPU."""

HOST_GRAIN = 1 / 64
"""Fraction of DRAM to which an `auto` budget rounds the free memory down. Free memory changes all
the time; with a coarse grain, `penstock plan` and a `penstock train` after it mostly get the same
budget, and so the same plan."""

HBM_GRAIN = 64 * MiB
"""Bytes to which an `auto` budget rounds the free memory of a GPU down, for the same reason."""

ASSUMED_DRIVE: Mapping[Literal["read", "write"], float] = {"read": 5.0e9, "write": 3.0e9}
"""Bytes per second assumed for an unmeasured drive: a PCIe 4.0 drive, below its data sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathBudget:
    """How much of one directory or device a plan may use."""

    path: str
    """The directory or device."""

    nbytes: Bytes
    """Budget in bytes."""

    def __post_init__(self) -> None:
        _check_not_negative("nvme", self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The maximum that each tier may hold at any time."""

    hbm: Bytes
    """GPU memory budget in bytes. It includes the CUDA context."""

    dram: Bytes
    """DRAM budget in bytes."""

    cxl: Bytes = 0
    """CXL memory budget in bytes."""

    nvme: tuple[PathBudget, ...] = ()
    """Budget of each directory or device."""

    def __post_init__(self) -> None:
        for name in ("hbm", "dram", "cxl"):
            _check_not_negative(name, getattr(self, name))
        paths = [path.path for path in self.nvme]
        if len(set(paths)) < len(paths):
            raise PlanError("nvme", f"names a path twice: {', '.join(paths)}")

    def of(self, tier: Tier) -> int:
        """Return the budget of a tier in bytes; for NVMe, the sum over all paths."""
        if tier is Tier.NVME:
            return sum(path.nbytes for path in self.nvme)
        return int(getattr(self, tier.value))

    def changed(self, tier: Tier, nbytes: int) -> Budget:
        """Return a copy with another budget for one tier. Paths keep their proportions."""
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
    machine: Machine, *, hbm: str | int = "auto", dram: str | int = "auto",
    cxl: str | int = "auto", nvme: tuple[str, ...] = (), ranks: int = 1,
) -> Budget:  # fmt: skip
    """Parse budgets such as `40GiB`, `auto`, 4096 or, for NVMe, `/mnt/nvme:400GiB`.

    The HBM budget is for each of the `ranks` on the machine, and the others are for all of them. On
    a machine without a GPU, the HBM budget is a part of DRAM, so an `auto` DRAM budget does not
    include it. A limit on the process's memory bounds the sum of what is on all nodes. Raises
    PlanError naming the tier.
    """
    hbm_nbytes = _parse_size("hbm", hbm, auto_hbm(machine, ranks))
    in_host = 0 if machine.gpus else ranks * hbm_nbytes
    dram_nbytes = _parse_size("dram", dram, max(0, auto_dram(machine, ranks) - in_host))
    free_cxl = _free_memory(machine.cxl_nodes)
    if (limited := _free_below_limit(machine, ranks)) is not None:
        free_cxl = max(0, min(free_cxl, limited - in_host - dram_nbytes))
    return Budget(
        hbm=hbm_nbytes,
        dram=dram_nbytes,
        cxl=_parse_size("cxl", cxl, free_cxl),
        nvme=tuple(_parse_path_budget(machine, text) for text in nvme),
    )


def check_budget_texts(
    *,
    hbm: str | int = "auto",
    dram: str | int = "auto",
    cxl: str | int = "auto",
    nvme: tuple[str, ...] = (),
) -> None:
    """Check the spelling of budgets, for which no machine is needed. Raises PlanError."""
    for name, text in (("hbm", hbm), ("dram", dram), ("cxl", cxl)):
        _parse_size(name, text, 0)
    for text in nvme:
        _parse_size("nvme", _checked_path_budget(text)[1], 0)


def auto_hbm(machine: Machine, ranks: int = 1) -> int:
    """Return the free memory of a GPU less a reserve; without a GPU, a share of DRAM.

    All ranks follow one plan, so the GPU with the least free memory decides.
    """
    if not machine.gpus:
        return int(CPU_SHARE * auto_dram(machine, ranks)) // ranks
    sizes: list[int] = []
    for gpu in machine.gpus:
        if gpu.memory is not None and len(sizes) < ranks:
            free = gpu.memory if gpu.free is None else _round_down(gpu.free, HBM_GRAIN)
            sizes.append(max(0, free - int(HBM_RESERVE * gpu.memory)))
    return min(sizes, default=0)


def auto_dram(machine: Machine, ranks: int = 1) -> int:
    """Return the free memory of all nodes with CPUs, or below a limit, less a reserve."""
    nodes = machine.dram_nodes
    # A budget covers what Penstock allocates for the model. The process itself is outside every
    # budget, so `auto` must leave room for it, and does so exactly once, here. Where a part of the
    # process is already resident when free memory is read, that part is missing from it too; the
    # error is on the safe side, and at most the size of Python with PyTorch.
    reserve = HOST_RESERVE + int(HOST_SHARE * sum(node.capacity for node in nodes))
    free = max(0, _free_memory(nodes) - reserve - ranks * process_memory(machine))
    limited = _free_below_limit(machine, ranks)
    return free if limited is None else min(free, limited)


def _free_below_limit(machine: Machine, ranks: int = 1) -> int | None:
    """Return what budgets may use below the limit on the process's memory; None without a limit.

    The reserve is for the page cache and the kernel's own memory, which count as well. There is
    none for other programs: they have their own limits.
    """
    limit = machine.memory_limit
    if limit is None:
        return None
    left = _round_down(limit.left, max(1, int(HOST_GRAIN * limit.nbytes)))
    return max(0, left - int(HOST_SHARE * limit.nbytes) - ranks * process_memory(machine))


def describe_limit(machine: Machine) -> str:
    """Return a sentence about the limit on the process's memory if it bounds budgets; else ""."""
    limit, limited = machine.memory_limit, _free_below_limit(machine)
    if limit is None or limited is None or limited > auto_dram(machine):
        return ""
    return (
        f"Memory limit of this process: {format_bytes(limit.nbytes)} ({limit.name}). Budgets in "
        f"host memory can use {format_bytes(limited)} of it; the process itself needs about "
        f"{format_bytes(process_memory(machine))}."
    )


def process_memory(machine: Machine) -> int:
    """Return the host memory that Penstock's process needs outside the budgets."""
    if machine.process_memory is not None:
        return machine.process_memory
    return GPU_PROCESS if machine.gpus else CPU_PROCESS


def _free_memory(nodes: Sequence[MemoryNode]) -> int:
    """Return the free memory of the nodes, rounded down if it is not a stated capacity."""
    free = sum(node.capacity if node.free is None else node.free for node in nodes)
    if all(node.free is None for node in nodes):
        return free
    return _round_down(free, int(HOST_GRAIN * sum(node.capacity for node in nodes)))


def _round_down(nbytes: int, unit: int) -> int:
    return nbytes // unit * unit


def with_paths(machine: Machine, budget: Budget) -> tuple[Machine, str]:
    """Add the budget's unmeasured paths to the machine.

    An unmeasured path is assumed to be as fast as the first measured one, or else as fast as
    `ASSUMED_DRIVE`. Returns the machine and a sentence about the assumption; the sentence is empty
    if all paths are measured.
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
    like = measured.path if measured else "a PCIe 4.0 drive"
    added = (replace(known.get(path, StoragePath(path=path)), rates=rates) for path in new)
    others = (storage for storage in machine.storage if storage.path not in new)
    note = (
        f"{', '.join(new)}: not measured, assumed to be as fast as {like}. "
        f"Run `penstock probe --storage` to measure."
    )
    return replace(machine, storage=(*others, *added)), note


def tier_capacity(machine: Machine, budget: Budget, tier: Tier) -> int | None:
    """Return the bytes of a tier that a process can have; None if the machine file does not say."""
    match tier:
        case Tier.HBM if machine.gpus:
            return machine.gpus[0].memory
        case Tier.HBM | Tier.DRAM:  # without a GPU, part of DRAM serves as HBM
            return _within_limit(machine, sum(node.capacity for node in machine.dram_nodes))
        case Tier.CXL:
            return _within_limit(machine, sum(node.capacity for node in machine.cxl_nodes))
    paths = {path.path for path in budget.nvme} or {s.path for s in machine.storage[:1]}
    sizes = [s.capacity if s.free is None else s.free for s in machine.storage if s.path in paths]
    return None if None in sizes or not sizes else sum(size or 0 for size in sizes)


def _within_limit(machine: Machine, nbytes: int) -> int:
    return nbytes if machine.memory_limit is None else min(nbytes, machine.memory_limit.nbytes)


def with_budget_memory(machine: Machine, budget: Budget) -> tuple[Machine, tuple[str, ...]]:
    """Return a machine like this one that has the memory of the budget.

    Also returns a sentence for each tier where the machine has less than the budget.
    """
    remarks = []
    for tier in (Tier.HBM, Tier.DRAM, Tier.CXL):
        capacity, wanted = tier_capacity(machine, budget, tier), budget.of(tier)
        if capacity is None or wanted <= capacity:
            continue
        machine = _enlarge(machine, tier, wanted)
        remarks.append(
            f"{machine.name or 'the machine'} has {format_bytes(capacity)} of {tier.value}: this "
            f"plan is for a machine like it with {format_bytes(wanted)}."
        )
    return machine, tuple(remarks)


def with_gpus(machine: Machine, count: int) -> tuple[Machine, str]:
    """Return a machine like this one that has `count` GPUs, or more, and a sentence if it has less.

    More GPUs are like the first one, and dealt to the sockets in turn.
    """
    gpus = machine.gpus
    if not gpus or len(gpus) >= count:
        return machine, ""
    first, unused = gpus[0], max(gpu.index for gpu in gpus) + 1
    nodes = [node.id for node in machine.dram_nodes]
    added = tuple(
        replace(first, index=unused + k, uuid="", node=nodes[(len(gpus) + k) % len(nodes)])
        for k in range(count - len(gpus))
    )
    remark = (
        f"{machine.name or 'the machine'} has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: this "
        f"plan is for a machine like it with {count}, which reach each other through host memory."
    )
    return replace(machine, gpus=(*gpus, *added), gpu_links=()), remark


def check_budget_memory(machine: Machine, budget: Budget) -> None:
    """Raise PlanError if a budget is larger than what the machine has."""
    for tier in (Tier.HBM, Tier.DRAM, Tier.CXL):
        capacity, wanted = tier_capacity(machine, budget, tier), budget.of(tier)
        if capacity is not None and wanted > capacity:
            limit = machine.memory_limit
            if limit is not None and capacity == limit.nbytes:
                raise PlanError(
                    tier.value,
                    f"is {format_bytes(wanted)}, and the memory limit of this process is "
                    f"{format_bytes(capacity)} ({limit.name}); use auto or less than that, or "
                    f"raise the limit",
                )
            if not capacity:
                raise PlanError(
                    tier.value,
                    f"is {format_bytes(wanted)}, but this machine has no {tier.value.upper()} "
                    f"memory; leave --{tier.value} out",
                )
            raise PlanError(
                tier.value,
                f"is {format_bytes(wanted)}, and this machine has {format_bytes(capacity)}; use "
                f"auto or at most that. To plan for a larger machine, name one that `penstock "
                f"machines` lists with `penstock plan --machine`",
            )


def _enlarge(machine: Machine, tier: Tier, nbytes: int) -> Machine:
    """Return the machine with more memory in one tier; nodes keep their proportions."""
    if tier is Tier.HBM and machine.gpus:
        return replace(machine, gpus=tuple(replace(gpu, memory=nbytes) for gpu in machine.gpus))
    nodes = machine.cxl_nodes if tier is Tier.CXL else machine.dram_nodes
    if not nodes:
        raise PlanError(
            tier.value,
            f"is {format_bytes(nbytes)}, but {machine.name or 'the machine'} has no "
            f"{tier.value.upper()} memory; leave --{tier.value} out, or plan for a machine that "
            f"has it (`penstock machines` lists them)",
        )
    if tier is not Tier.CXL:
        nbytes += process_memory(machine)  # outside of every budget
    total = sum(node.capacity for node in nodes)
    machine = replace(machine, memory_limit=None)
    if nbytes <= total:  # only the limit was too low
        return machine
    ids = {node.id for node in nodes}
    larger = tuple(
        replace(node, capacity=-(-node.capacity * nbytes // total)) if node.id in ids else node
        for node in machine.nodes
    )
    return replace(machine, nodes=larger)


def check_paths(machine: Machine, budget: Budget) -> None:
    """Raise PlanError unless the machine lists every path of the budget."""
    known = [storage.path for storage in machine.storage]
    for path in budget.nvme:
        if path.path not in known:
            listed = ", ".join(known) or "none"
            raise PlanError("nvme", f"{path.path} is not in the machine's storage ({listed})")


def split_path_budget(text: str) -> tuple[str, str]:
    """Split `/mnt/nvme:400GiB` into path and size; `/mnt/nvme` means all that is free there.

    The path is "" for a size alone.
    """
    path, colon, size = text.rpartition(":")
    if colon:
        return path, size
    return ("", text) if _is_size(text) else (text, "auto")


def _is_size(text: str) -> bool:
    if text.strip().lower() == "auto":
        return True
    try:
        parse_bytes(text)
    except ValueError:
        return False
    return True


def _checked_path_budget(text: str) -> tuple[str, str]:
    """Split `/mnt/nvme:400GiB` into path and size; raise PlanError if the size is not one."""
    path, size = split_path_budget(text)
    if not _is_size(size) and not size.strip().startswith("-"):
        raise PlanError("nvme", f"must be PATH or PATH:SIZE, such as /mnt/nvme:400GiB, got {text}")
    return path, size


def _parse_path_budget(machine: Machine, text: str) -> PathBudget:
    """Parse `/mnt/nvme:400GiB`, `/mnt/nvme`, or `400GiB` on the machine's first path."""
    path, size = _checked_path_budget(text)
    if not path:
        if not machine.storage:
            raise PlanError("nvme", f'must name a path, such as "/mnt/nvme:{size}"')
        path = machine.storage[0].path
    known = {s.path: s for s in machine.storage}.get(path)
    free = (known.free if known.free is not None else known.capacity) if known else None
    if free is None and size.strip().lower() == "auto":
        raise PlanError(
            "nvme",
            f"must say how much of {path} to use, such as --nvme {path}:400GiB: how much is free "
            f"there on {machine.name or 'this machine'} is not known. To take what is free here, "
            f"plan for this machine: `penstock plan --machine this`",
        )
    return PathBudget(path=path, nbytes=_parse_size("nvme", size, free))


def _parse_size(name: str, size: str | int, auto: int | None) -> int:
    """Return the bytes of a size such as `16GiB`, `auto` or 4096. Raises PlanError."""
    text = size.strip().lower() if isinstance(size, str) else ""
    if text == "auto":
        if auto is None:
            raise PlanError(
                name, "cannot be auto: the machine file does not state how much is free"
            )
        return auto
    if text.startswith("-"):
        raise PlanError(name, f"must be 0 or more, got {size}")
    try:
        nbytes = parse_memory(size)
    except ValueError as wrong:
        raise PlanError(name, str(wrong)) from None
    _check_not_negative(name, nbytes)
    return nbytes


def _check_not_negative(name: str, nbytes: int) -> None:
    if nbytes < 0:
        raise PlanError(name, f"must be 0 or more, got {nbytes}")
