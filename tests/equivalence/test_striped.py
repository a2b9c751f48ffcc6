"""States striped over CXL nodes, in a virtual machine that has them, give the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.engine import Engine
from penstock.machine.discovery import discover
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.plan.seats import seat_ranks
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.roles import Role
from penstock.units import GiB
from tests.equivalence.runs import DRAM, OPTIMIZER, Setup, Way, differing, follow, train
from tests.support import engines
from tests.support.ranks import on_each_rank

pytestmark = pytest.mark.vm

WIDE = {"vocab_size": 40000}
"""A vocabulary so large that the embedding's moments span several stripes."""

WORK = {"batch": 3, "micro_batch": 2, "context": 4}
"""Few tokens: the machine is emulated, and each token has a logit per vocabulary entry."""

STRIPED = (
    Way("states over DRAM and CXL", ("dmdd",)),
    Way("all on CXL", ("cccc",)),
    Way("states over all nodes, weights on CXL, two rounds", ("cmcd", "dccc"), {"rounds": 2}),
)


def test_states_striped_over_cxl_nodes_give_the_same_bits(tmp_path: Path) -> None:
    setup = Setup.of("llama", config=WIDE, **WORK)
    expected = train(setup, DRAM, tmp_path, steps=2)

    for way in STRIPED:
        found = train(setup, way, tmp_path, steps=2)
        assert found.losses == expected.losses, way.name
        assert differing(found.state, expected.state) == [], way.name


def test_results_of_attention_on_cxl_nodes_give_the_same_bits(tmp_path: Path) -> None:
    setup = Setup.of("llama", config=WIDE, **WORK, attention="varlen")
    way = Way("results of attention on CXL", ("dddc", "cmcd"), {"attention": "cdc"})

    found, expected = (train(setup, each, tmp_path, steps=2) for each in (way, DRAM))

    assert found.losses == expected.losses
    assert differing(found.state, expected.state) == []


def test_striped_states_are_on_the_nodes_of_the_plan(tmp_path: Path) -> None:
    setup = Setup.of("llama", config=WIDE, **WORK)
    cards = {node.id for node in discover().cxl_nodes}
    assert len(cards) > 1
    with setup.engine(STRIPED[0], tmp_path) as engine:
        home = engine.plan.placement.blocks[0].home(Role.FIRST)
        assert home is not None
        planned = {share.node for share in home.shares}
        data = engine._memory.tiers.data(0, Role.FIRST)

        found = {node for node, pages in ps.where(data).pages.items() if pages}

        assert planned & cards
        assert found == planned


def seated_plan(setup: Setup) -> Plan:
    """Return a plan for two ranks of this machine that stores everything on CXL cards.

    The ranks have the seats that the planner gives them.
    """
    machine = cpu_machine(discover())
    shared = replace(setup.work, world=2)
    budget = Budget(hbm=8 * GiB, dram=8 * GiB, cxl=GiB)
    evaluator = PlanEvaluator(
        setup.model, shared, machine, budget, piece_elements=1 << 26, unbounded=True,
        seats=seat_ranks(machine, 2), transport="collective",
    )  # fmt: skip
    last = len(setup.model.blocks) - 1
    place = Location.CXL
    rows = [
        BlockLocations(place, place, place, place if 0 < i < last else None)
        for i in range(last + 1)
    ]
    return plan_result(evaluator, Candidate(tuple(rows))).plan


def nodes_of(engine: Engine) -> set[int]:
    """Return the nodes on which the kernel counts pages of what an engine stores."""
    tiers, found = engine._memory.tiers, set()
    for index, block in enumerate(engine.plan.placement.blocks):
        for home in block.homes:
            if home.nbytes:
                data = tiers.data(index, home.role)
                found |= {node for node, pages in ps.where(data).pages.items() if pages}
    return found


def test_two_ranks_have_a_card_each_and_the_bits_of_one(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=4, micro_batch=2, context=4)
    expected = train(setup, DRAM, tmp_path, steps=2)
    plan = seated_plan(setup)
    cards = sorted(node.id for node in discover().cxl_nodes)
    assert [seat.nodes for seat in plan.seats] == [(0, card) for card in cards]
    group = ThreadRanks(2)
    ranks = [
        engines.make_engine(
            setup.config, plan, setup.model, setup.source, optimizer=OPTIMIZER, ranks=each
        )
        for each in group.transports
    ]
    try:
        for rank, engine in enumerate(ranks):
            assert nodes_of(engine) == {cards[rank]}, f"rank {rank}"
        found = on_each_rank(group, lambda each: follow(ranks[each.rank], setup.batches(2)))
    finally:
        for engine in ranks:
            engine.close()
    assert found == [(expected.losses, expected.norms)] * 2
