"""Add up the seconds that an operation needs of each resource."""

from __future__ import annotations

from collections import defaultdict

from penstock.plan.placement import Share
from penstock.plan.seats import ALONE, Ranks
from penstock.planner.cost.rates import Rates
from penstock.tiers import Tier


class Demands:
    """The seconds that one rank's operation needs of each resource.

    Resources are `gpu`, `host`, `h2d`, `d2h`, `link` (both directions of PCIe together), `peer`
    (links between GPUs), `nic`, `socket` (links between sockets), and, by NUMA node or path,
    `read@`, `write@`, `memory@`, `h2d@`, `d2h@`, `sweep@`, `disk@`, `reads@` and `writes@`.

    All ranks of a machine do the same at the same time. What several of them use counts as often.
    """

    def __init__(self, rates: Rates, ranks: Ranks = ALONE) -> None:
        self.rates, self.ranks = rates, ranks
        self.seconds: dict[str, float] = defaultdict(float)

    def memory(self, node: int, *, read: float = 0.0, write: float = 0.0) -> None:
        """Add a rank's reads and writes of a memory node, in bytes."""
        rates, times = self.rates.nodes[node], self.ranks.on_node(node)
        self.seconds[f"read@{node}"] += times * read / rates.read
        self.seconds[f"write@{node}"] += times * write / rates.write
        self.seconds[f"memory@{node}"] += times * (read + write) / rates.total

    def pcie_in(self, nbytes: float) -> None:
        """Add bytes that enter the GPU over PCIe."""
        self.seconds["h2d"] += nbytes / self.rates.h2d
        self.seconds["link"] += nbytes / self.rates.both

    def pcie_out(self, nbytes: float) -> None:
        """Add bytes that leave the GPU over PCIe."""
        self.seconds["d2h"] += nbytes / self.rates.d2h
        self.seconds["link"] += nbytes / self.rates.both

    def copy_in(self, share: Share, nbytes: float) -> None:
        """Add a copy from a share to the GPU; from NVMe, through host memory."""
        if share.tier is Tier.HBM:
            return
        node = share.node
        if node is None:
            self.disk_read(share.path, nbytes)
            node = self.rates.staging_node
        self.pcie_in(nbytes)
        self.seconds[f"h2d@{node}"] += nbytes / self.rates.nodes[node].to_gpu
        self.memory(node, read=nbytes)

    def copy_out(self, share: Share, nbytes: float) -> None:
        """Add a copy from the GPU to a share; to NVMe, through host memory."""
        if share.tier is Tier.HBM:
            return
        node = share.node if share.node is not None else self.rates.staging_node
        self.pcie_out(nbytes)
        self.seconds[f"d2h@{node}"] += nbytes / self.rates.nodes[node].from_gpu
        self.memory(node, write=nbytes)
        if share.path:
            self.disk_write(share.path, nbytes)

    def disk_read(self, path: str, nbytes: float) -> None:
        """Add a read from NVMe into host memory."""
        self._disk(path, "reads", nbytes, self.rates.disks[path].read)
        self.memory(self.rates.staging_node, write=nbytes)

    def disk_write(self, path: str, nbytes: float) -> None:
        """Add a write from host memory to NVMe."""
        self._disk(path, "writes", nbytes, self.rates.disks[path].write)
        self.memory(self.rates.staging_node, read=nbytes)

    def _disk(self, path: str, direction: str, nbytes: float, alone: float) -> None:
        """Add disk traffic. Reads and writes share a drive.

        If their combined rate was measured, they share that; otherwise they take turns.
        """
        both, nbytes = self.rates.disks[path].both, nbytes * self.ranks.on_path(path)
        self.seconds[f"disk@{path}"] += nbytes / (both or alone)
        if both is not None:
            self.seconds[f"{direction}@{path}"] += nbytes / alone

    def sweep(self, share: Share, *, read: float, write: float) -> None:
        """Add a CPU sweep over bytes of one share. What is stored on NVMe is in staging by now.

        A node's rate is that of all CPUs next to it, which its ranks share.
        """
        node = share.node if share.node is not None else self.rates.staging_node
        swept = self.ranks.on_node(node) * (read + write)
        self.seconds[f"sweep@{node}"] += swept / self.rates.nodes[node].sweep
        self.memory(node, read=read, write=write)

    def total(self) -> dict[str, float]:
        """Return the seconds of each resource that is needed at all."""
        return {resource: s for resource, s in self.seconds.items() if s > 0}


def in_staging(share: Share, rates: Rates) -> Share:
    """Return where a fetch finds a weight: a read, or the sweep, has put it into staging."""
    if not share.path:
        return share
    return Share(tier=Tier.DRAM, nbytes=share.nbytes, node=rates.staging_node)
