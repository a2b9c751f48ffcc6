"""What ranks need to complete weights and to exchange gradients, with either transport.

With `shared`, every rank reads the other ranks' shards from host memory over its own PCIe link, and
gradients pass through host memory: out of the GPU of the sender, and into that of the owner. With
`collective`, shards move over links between GPUs and, between machines, over network cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.buffers import micro_batches_by_round
from penstock.plan.placement import Placement, Share
from penstock.plan.schedule import Operation, Verb
from penstock.plan.seats import Ranks
from penstock.plan.workload import Workload
from penstock.planner.cost.demands import Demands
from penstock.planner.cost.rates import Rates
from penstock.roles import Role
from penstock.tiers import Tier


def rank_demands(
    operation: Operation,
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    rates: Rates,
    ranks: Ranks,
) -> dict[str, float]:
    """Return the demands of a GATHER or an EXCHANGE on one of the ranks."""
    shared = placement.transport == "shared"
    if operation.verb is Verb.EXCHANGE:
        nbytes = exchanged_nbytes(operation, inventory, workload, placement)
        transfers = _Transfers(Demands(rates, ranks))
        (transfers.pass_gradients if shared else transfers.send_gradients)(nbytes)
        return transfers.demands.total()
    nbytes = gathered_nbytes(operation.block, inventory, workload, placement)
    transfers = _Transfers(Demands(rates, ranks))
    if shared:
        home = placement.blocks[operation.block].home(Role.WEIGHT)
        assert home is not None
        for share in home.shares:
            part = share.nbytes / home.nbytes * nbytes / ranks.world
            transfers.read_shards(share, part)
    else:
        transfers.gather_shards(nbytes)
    return transfers.demands.total()


def gathered_nbytes(
    block: int, inventory: Inventory, workload: Workload, placement: Placement
) -> float:
    """Return the bytes of all shards of a block's weights. Frozen ones in HBM are there already."""
    model, formats = inventory.blocks[block], workload.formats()
    resident = placement.blocks[block].all_on(Role.WEIGHT, Tier.HBM)
    elements = model.flat_elements(True) + (0 if resident else model.flat_elements(False))
    return formats.nbytes(Role.WEIGHT, elements)


def exchanged_nbytes(
    operation: Operation, inventory: Inventory, workload: Workload, placement: Placement
) -> float:
    """Return the bytes of the gradients that a rank's micro-batches of one round produce.

    The head's gradients are sums over chunks of the loss, in fp32, and it adds to a tied embedding
    as well.
    """
    block = inventory.blocks[operation.block]
    head = block.kind == "head"
    tied = inventory.blocks[0].flat_elements(True) if head and inventory.tied else 0
    width = 4 if head else workload.formats().weight_format.weight
    waves = micro_batches_by_round(workload, placement.rounds)[operation.round]
    return float(waves * width * (block.flat_elements(True) + tied))


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Adds transfers between ranks to the demands of one of them."""

    demands: Demands

    # Through the memory of one host.

    def read_shards(self, share: Share, nbytes: float) -> None:
        """Read the shards of all other ranks, of `nbytes` each, from where they are stored."""
        demands, others = self.demands, self.demands.ranks.local - 1
        staging = demands.rates.staging_node
        node = share.node
        if node is None:  # from HBM or NVMe: the owner copies it from its GPU to the others
            self._out(nbytes)
            node = staging
        demands.pcie_in(others * nbytes)
        for other in demands.ranks.of_node(node)[1:]:
            demands.seconds[f"h2d@{other}"] += nbytes / demands.rates.nodes[other].to_gpu
        # As many bytes are read of this rank's shard by the others.
        demands.memory(node, read=others * nbytes)
        self._between_sockets(node, nbytes)

    def pass_gradients(self, nbytes: float) -> None:
        """Send the other owners their parts of `nbytes`, and receive as much, through the host."""
        demands, local = self.demands, self.demands.ranks.local
        passed = nbytes * (local - 1) / local
        staging = demands.rates.staging_node
        self._out(passed)
        demands.pcie_in(passed)
        demands.seconds[f"h2d@{staging}"] += passed / demands.rates.nodes[staging].to_gpu
        demands.memory(staging, read=passed)
        self._between_sockets(staging, nbytes / local)

    def _out(self, nbytes: float) -> None:
        """Copy from the GPU to host memory."""
        demands, staging = self.demands, self.demands.rates.staging_node
        demands.pcie_out(nbytes)
        demands.seconds[f"d2h@{staging}"] += nbytes / demands.rates.nodes[staging].from_gpu
        demands.memory(staging, write=nbytes)

    def _between_sockets(self, node: int, nbytes: float) -> None:
        """Add what crosses between sockets if every rank reads `nbytes` of every other one."""
        demands = self.demands
        nodes = demands.ranks.of_node(node)
        here = nodes.count(nodes[0])
        for other in set(nodes) - {nodes[0]}:
            rate = demands.rates.sockets.get((other, nodes[0]))
            if rate is not None:
                demands.seconds["socket"] += here * nodes.count(other) * nbytes / rate

    # Between GPUs and between machines.

    def gather_shards(self, nbytes: float) -> None:
        """Receive all shards, `nbytes` together, but the rank's own.

        Each machine receives what it lacks once, and its GPUs pass it on.
        """
        ranks = self.demands.ranks
        self._peers(nbytes * (ranks.world - 1) / ranks.world if ranks.local > 1 else 0.0)
        missing = nbytes * (ranks.machines - 1) / ranks.machines
        self._network(missing / ranks.local)

    def send_gradients(self, nbytes: float) -> None:
        """Send all other owners their parts of `nbytes`, and receive as much.

        Gradients are not summed on the way, so what leaves a machine grows with its ranks.
        """
        ranks = self.demands.ranks
        self._peers(nbytes * (ranks.local - 1) / ranks.world)
        self._network(nbytes * (ranks.world - ranks.local) / ranks.world)

    def _peers(self, nbytes: float) -> None:
        """Send and receive `nbytes` over the links between the GPUs of a machine."""
        demands, rates = self.demands, self.demands.rates
        if rates.peer is not None:
            demands.seconds["peer"] += nbytes / rates.peer
        if rates.peer is None or not rates.peer_has_own_link:
            demands.pcie_out(nbytes)
            demands.pcie_in(nbytes)
        if rates.peer is None:
            demands.memory(rates.staging_node, read=nbytes, write=nbytes)

    def _network(self, nbytes: float) -> None:
        """Send and receive `nbytes` of each rank over the network."""
        demands, rates, ranks = self.demands, self.demands.rates, self.demands.ranks
        if ranks.machines == 1:
            return
        assert rates.nic is not None
        latency = (ranks.machines - 1) * rates.nic_latency
        demands.seconds["nic"] += ranks.local * nbytes / rates.nic + latency
        demands.pcie_out(nbytes)
        demands.pcie_in(nbytes)
        if not rates.nic_direct:
            demands.memory(rates.staging_node, read=nbytes, write=nbytes)
