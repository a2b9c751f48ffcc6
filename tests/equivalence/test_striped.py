"""States striped over CXL nodes, in a virtual machine that has them, give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.machine.discovery import discover
from penstock.roles import Role
from tests.equivalence.runs import DRAM, Setup, Way, differing, train

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
