"""The places that each spot stands for, and their weights in a stripe. Room: decide."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.budget import Budget
from penstock.cost import Rates
from penstock.machine import Machine
from penstock.placement_parts import Share
from penstock.planner.choice import Spot
from penstock.tiers import Tier


def places(
    machine: Machine, rates: Rates, budget: Budget
) -> Mapping[Spot, tuple[tuple[Share, float], ...]]:
    """The places of each spot, with their weights in a stripe."""
    dram = [(Share(tier=Tier.DRAM, nbytes=0, node=n.id), rates.nodes[n.id]) for n in
            machine.dram_nodes]  # fmt: skip
    cxl = [(Share(tier=Tier.CXL, nbytes=0, node=n.id), rates.nodes[n.id]) for n in
           machine.cxl_nodes]  # fmt: skip
    paths = [(Share(tier=Tier.NVME, nbytes=0, path=p.path), float(p.nbytes)) for p in budget.nvme]
    return {
        Spot.HBM: ((Share(tier=Tier.HBM, nbytes=0), 1.0),),
        Spot.DRAM: tuple((share, node.sweep) for share, node in dram),
        Spot.MIX: tuple((share, node.sweep) for share, node in [*dram, *cxl]),
        Spot.CXL: tuple((share, node.to_gpu) for share, node in cxl),
        Spot.NVME: tuple(paths),
    }
