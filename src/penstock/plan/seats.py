"""Seats: which GPU, memory nodes, CPUs and storage paths of a machine each rank uses.

A plan places the data of one rank. The seats say where the others have theirs: where the placement
names the third node of the first seat, every rank uses the third node of its own seat. All machines
of a run are alike, so a plan has one seat for each rank of a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import PlanError
from penstock.machine.machine import Machine, MemoryNode
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.placement import BlockPlacement, Home, Placement, Share
from penstock.plan.staging import nearest_dram_node

ALIKE = 0.05
"""Relative difference in capacity up to which two CXL cards count as alike: the kernel keeps a few
percent of each for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What one rank of a machine uses."""

    gpu: int | None = None
    """Index of its GPU in the machine file; None if the CPU computes."""

    nodes: tuple[int, ...] = ()
    """Its memory nodes. The first one is nearest to its GPU."""

    cpus: tuple[int, ...] = ()
    """CPUs of its optimizer sweep; empty for any."""

    paths: tuple[str, ...] = ()
    """Directories and devices of its NVMe store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks of a plan, and which of them share a node or a drive."""

    world: int = 1
    """Number of ranks on all machines."""

    seats: tuple[Seat, ...] = ()
    """One for each rank of a machine. Without seats, all ranks are on one machine and share
    everything but their GPUs."""

    @property
    def local(self) -> int:
        """Number of ranks on each machine."""
        return len(self.seats) or self.world

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.world // self.local

    def on_node(self, node: int) -> int:
        """Return how many ranks of a machine use a memory node."""
        return sum(node in seat.nodes for seat in self.seats) if self.seats else self.world

    def on_path(self, path: str) -> int:
        """Return how many ranks of a machine have a store on a path."""
        return sum(path in seat.paths for seat in self.seats) if self.seats else self.world

    def of_node(self, node: int) -> tuple[int, ...]:
        """Return the node of each rank of a machine that the placement names as `node`."""
        if not self.seats or node not in self.seats[0].nodes:
            return (node,) * self.local
        at = self.seats[0].nodes.index(node)
        return tuple(seat.nodes[at] for seat in self.seats)

    def node_capacity(self, machine: Machine, node: int) -> int:
        """Return how much of a node each rank can have; of several nodes, the least."""
        capacities = (machine.node(id).capacity // self.on_node(id) for id in self.of_node(node))
        return machine.node(node).capacity if not self.seats else min(capacities)

    def nodes(self, nodes: Iterable[MemoryNode]) -> list[MemoryNode]:
        """Return those of the nodes that the first rank uses."""
        return [node for node in nodes if not self.seats or node.id in self.seats[0].nodes]


ALONE = Ranks()
"""The ranks of a plan for one GPU."""


def seat_ranks(machine: Machine, world: int, paths: Sequence[str] = ()) -> tuple[Seat, ...]:
    """Seat the ranks of one machine; return no seats for a single rank.

    Each rank uses the DRAM of its GPU's socket if all sockets have equally many GPUs, and otherwise
    its part of every node. CXL cards are dealt to the ranks if each gets equally many, all of them
    alike; otherwise every rank has a part of each card. Directories are for all ranks, and a raw
    device is for one of them. Raises PlanError if the machine has too few GPUs or devices.
    """
    if world == 1:
        return ()
    ranks, rest = divmod(world, machine.machines)
    if rest:
        raise PlanError(
            "machines", f"is {machine.machines}, which must divide the number of ranks, {world}"
        )
    gpus = machine.gpus[:ranks]
    if machine.gpus and len(gpus) < ranks:
        raise PlanError(
            "gpus",
            f"is {ranks}, but {machine.name or 'this machine'} has {len(gpus)}; use as many or "
            f"fewer",
        )
    near = _nearest_nodes(machine, ranks)
    dram = _dram_nodes(machine, near)
    cxl = _cards(machine, near)
    cpus = _cpus(machine, near if len(dram[0]) == 1 else None, ranks)
    drives = _paths(paths, ranks)
    return tuple(
        Seat(
            gpu=gpus[rank].index if gpus else None,
            nodes=dram[rank] + cxl[rank],
            cpus=cpus[rank],
            paths=drives[rank],
        )
        for rank in range(ranks)
    )


def _nearest_nodes(machine: Machine, ranks: int) -> list[int]:
    """Return the DRAM node nearest to each rank's GPU; without GPUs, deal the nodes in turn."""
    if machine.gpus:
        return [nearest_dram_node(machine, gpu) for gpu in machine.gpus[:ranks]]
    dram = [node.id for node in machine.dram_nodes]
    return [dram[rank * len(dram) // ranks] for rank in range(ranks)]


def _dram_nodes(machine: Machine, near: Sequence[int]) -> list[tuple[int, ...]]:
    nodes = [node.id for node in machine.dram_nodes]
    counts = Counter(near)
    if all(counts[node] == len(near) // len(nodes) for node in nodes) and len(near) >= len(nodes):
        return [(node,) for node in near]
    first = near[0]  # the staging node of the plan, and so of all ranks
    return [(first, *(node for node in nodes if node != first))] * len(near)


def _cards(machine: Machine, near: Sequence[int]) -> list[tuple[int, ...]]:
    """Deal the CXL cards to the ranks, the nearest first, or let all ranks share all of them."""
    cards = list(machine.cxl_nodes)
    ranks = len(near)
    sizes = [card.capacity for card in cards]
    if not cards or len(cards) % ranks or max(sizes) - min(sizes) > ALIKE * max(sizes):
        return [tuple(card.id for card in cards)] * ranks
    dealt: list[list[int]] = [[] for _ in near]
    for _ in range(len(cards) // ranks):
        for rank, node in enumerate(near):
            distances = machine.node(node).distances
            card = min(cards, key=lambda card: (distances.get(card.id, 0), card.id))
            dealt[rank].append(card.id)
            cards.remove(card)
    return [tuple(each) for each in dealt]


def _cpus(machine: Machine, near: Sequence[int] | None, ranks: int) -> list[tuple[int, ...]]:
    """Divide the CPUs of each node, or all of them, among the ranks there."""
    every = [cpu for node in machine.dram_nodes for cpu in node.cpus]
    threads = max(1, len(every) // machine.cpu.cores) if machine.cpu.cores else 1
    if near is None:
        return [_part(every, threads, rank, ranks) for rank in range(ranks)]
    seen: Counter[int] = Counter()
    parts = []
    for node in near:
        of = near.count(node)
        parts.append(_part(machine.node(node).cpus, threads, seen[node], of))
        seen[node] += 1
    return parts


def _part(cpus: Sequence[int], threads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return a rank's part of the CPUs of a node, or all of them if there are too few.

    Kernels number the first hardware thread of every core before the second ones. A part has the
    same cores of each such run, so that two ranks do not share a core.
    """
    cores = len(cpus) // threads
    if cores < ranks:
        return tuple(cpus)
    first, last = rank * cores // ranks, (rank + 1) * cores // ranks
    runs = [cpus[k * cores : (k + 1) * cores] for k in range(threads)]
    return tuple(cpu for run in runs for cpu in run[first:last])


def _paths(paths: Sequence[str], ranks: int) -> list[tuple[str, ...]]:
    devices = [path for path in paths if is_device(path)]
    shared = tuple(path for path in paths if not is_device(path))
    rest = len(devices) % ranks
    if rest:
        raise PlanError(
            "nvme",
            f"has {len(devices)} raw devices for {ranks} ranks on a machine, and each device "
            f"belongs to one rank; give as many for each rank, or directories",
        )
    return [shared + tuple(devices[rank::ranks]) for rank in range(ranks)]


def is_device(path: str) -> bool:
    """Return whether a path names a raw block device, which one store uses as a whole."""
    return path.startswith("/dev/") and not path.startswith("/dev/shm")


def rank_budget(budget: Budget, seats: Sequence[Seat]) -> Budget:
    """Return each rank's part of a machine's budgets. HBM is per GPU already."""
    if not seats:
        return budget
    limits = {path.path: path.nbytes for path in budget.nvme}
    users = Counter(path for seat in seats for path in seat.paths)
    parts = (
        PathBudget(path=own[0], nbytes=min(limits[path] // users[path] for path in own))
        for own in zip(*(seat.paths for seat in seats), strict=True)
    )
    return replace(
        budget, dram=budget.dram // len(seats), cxl=budget.cxl // len(seats), nvme=tuple(parts)
    )


def seated_placement(placement: Placement, first: Seat, seat: Seat) -> Placement:
    """Return the placement of the first seat on the nodes and paths of another one."""
    nodes = dict(zip(first.nodes, seat.nodes, strict=True))
    paths = dict(zip(first.paths, seat.paths, strict=True))

    def share(old: Share) -> Share:
        node = None if old.node is None else nodes.get(old.node, old.node)
        return replace(old, node=node, path=paths.get(old.path, old.path))

    def home(old: Home) -> Home:
        return replace(old, shares=tuple(map(share, old.shares)))

    def block(old: BlockPlacement) -> BlockPlacement:
        return replace(old, homes=tuple(map(home, old.homes)))

    staging = placement.staging_node
    return replace(
        placement,
        staging_node=None if staging is None else nodes.get(staging, staging),
        blocks=tuple(map(block, placement.blocks)),
    )


def seated_budget(budget: Budget, first: Seat, seat: Seat) -> Budget:
    """Return the budget of the first seat for the paths of another one."""
    paths = dict(zip(first.paths, seat.paths, strict=True))
    nvme = tuple(replace(each, path=paths.get(each.path, each.path)) for each in budget.nvme)
    return replace(budget, nvme=nvme)
