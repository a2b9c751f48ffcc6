"""The CXL-aware greedy placement of arXiv 2507.03305, reconstructed from its published code.

It visits the classes of tensors, latency-critical classes first, with a budget of local memory. A
class that fits is placed in local memory. The first class that does not fit is interleaved in equal
parts over local memory and every CXL card, and the rest is striped over the cards in equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.errors import PlanError
from penstock.plan.placement import Home, Placement, Share, stripe
from penstock.planner.candidate import Candidate
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import format_bytes

PRIORITY = (
    ("momentum", "variance", "master gradient", "master"),
    ("weight",),
    ("activation",),
    ("gradient",),
)


def latency_first(
    nbytes: Mapping[str, int], *, local: int, local_budget: int, cards: Sequence[int],
    card_budget: int,
) -> dict[str, list[tuple[int, float]]]:  # fmt: skip
    """Return, for each class, the nodes that hold it and the fraction on each."""
    homes: dict[str, list[tuple[int, float]]] = {}
    near, far = local_budget, card_budget
    for name in (name for level in PRIORITY for name in level if name in nbytes):
        wanted = nbytes[name]
        if wanted <= near:
            homes[name] = [(local, 1.0)]
            near -= wanted
            continue
        nodes = [local, *cards] if near > 0 else list(cards)
        homes[name] = [(node, 1 / len(nodes)) for node in nodes]
        here = min(near, wanted // (1 + len(cards))) if near > 0 else 0
        near -= here
        far -= wanted - here
        if far < 0:
            raise PlanError("cxl", f"is {format_bytes(card_budget)}, too little for {name}")
    return homes


OUR_ROLES = {
    Role.FIRST: "momentum",
    Role.SECOND: "variance",
    Role.GRADIENT: "master gradient",
    Role.MASTER: "master",
    Role.WEIGHT: "weight",
    Role.ACTIVATION: "activation",
}
"""The greedy's class for each of Penstock's roles. Penstock has no second, 16-bit gradient."""


def latency_first_placement(evaluator: PlanEvaluator, candidate: Candidate) -> Placement:
    """Place Penstock's roles as the greedy would, with everything else as in `candidate`.

    The machine's first DRAM node is the local one. Only the placement differs from Penstock's plan.
    """
    ours = evaluator.placement(candidate)
    totals: Counter[str] = Counter()
    for block in ours.blocks:
        for home in block.homes:
            totals[OUR_ROLES[home.role]] += home.nbytes
    homes = latency_first(
        totals,
        local=evaluator.machine.dram_nodes[0].id,
        local_budget=evaluator.budget.of(Tier.DRAM),
        cards=[node.id for node in evaluator.machine.cxl_nodes],
        card_budget=evaluator.budget.of(Tier.CXL),
    )
    kinds = {node.id: node.tier for node in evaluator.machine.nodes}

    def placed(home: Home) -> Home:
        parts = homes[OUR_ROLES[home.role]]
        places = [(Share(tier=kinds[n], nbytes=0, node=n), part) for n, part in parts]
        return Home(role=home.role, shares=stripe(home.nbytes, places))

    blocks = (
        replace(block, homes=tuple(map(placed, block.homes)), sweep="cpu") for block in ours.blocks
    )
    return replace(ours, blocks=tuple(blocks))
