"""One decision about the memory node of host staging, which everything that needs it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.machine.machine import Machine, MemoryNode
from penstock.plan.build_schedule import step_schedule
from penstock.plan.plan import Plan
from penstock.plan.staging import choose_staging_node
from penstock.plan.traffic import step_traffic
from penstock.planner.candidate import Location
from penstock.planner.cost import Rates, estimate
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.tiers import Tier
from penstock.units import MiB
from tests.support.machines import machine
from tests.support.schedule_checker import all_on, evaluator_for

DISTANCES = {0: {0: 10, 1: 21, 2: 17}, 1: {0: 21, 1: 10, 2: 14}, 2: {0: 17, 1: 14, 2: 10}}


def two_sockets(gpu_node: int | None, kinds: tuple[str, ...] = ("dram", "dram", "cxl")) -> Machine:
    """Return a machine with three memory nodes, whose GPU is next to one of them."""
    box = machine(cards=2)
    nodes: list[MemoryNode] = []
    for node, kind in zip(box.nodes, kinds, strict=True):
        distances = DISTANCES[node.id]
        nodes.append(replace(node, kind=kind, distances=distances))  # type: ignore[arg-type]
    return replace(box, nodes=tuple(nodes), gpus=(replace(box.gpus[0], node=gpu_node),))


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (two_sockets(0), 0),
        (two_sockets(1), 1),
        (two_sockets(2), 1),  # the GPU is next to CXL memory, which is nearer to node 1
        (two_sockets(None), 0),
        (two_sockets(0, ("cxl", "cxl", "dram")), 2),  # node 0 has no DRAM
        (replace(two_sockets(None, ("cxl", "dram", "dram")), gpus=(), transfers=()), 1),
    ],
)
def test_staging_is_on_the_dram_node_nearest_to_the_gpu(box: Machine, expected: int) -> None:
    assert choose_staging_node(box) == expected


def plan_on(box: Machine, location: Location) -> tuple[Plan, PlanEvaluator]:
    """Return a plan that stores everything in one location."""
    evaluator = replace(evaluator_for(3, tied=False), machine=box)
    return plan_result(evaluator, all_on(evaluator, location)).plan, evaluator


@pytest.mark.parametrize("location", [Location.NVME, Location.DRAM])
def test_plan_traffic_and_cost_name_the_same_node(location: Location) -> None:
    plan, evaluator = plan_on(two_sockets(1), location)
    placement, model = plan.placement, evaluator.inventory

    assert placement.staging_node == placement.host_node == evaluator.rates.staging_node == 1
    if location is Location.NVME:  # nothing is stored in DRAM, so all of its traffic is staging's
        moved = step_traffic(model, plan.workload, placement, step_schedule(model, placement))
        assert {link for link in moved if link.startswith("node")} == {"node1"}
        cost = estimate(model, plan.workload, placement, Rates.of(two_sockets(0)))
        assert "memory@1" in cost.busy
        assert "memory@0" not in cost.busy


def test_the_capacity_check_counts_host_buffers_on_their_node() -> None:
    box = two_sockets(1)
    plan, _ = plan_on(box, Location.NVME)
    assert plan.pool_nbytes(Tier.DRAM) > MiB
    small = [replace(node, capacity=MiB) for node in box.nodes]

    plan.check(replace(box, nodes=(small[0], box.nodes[1], small[2])))
    with pytest.raises(PlanError, match=r"^node 1: needs .* but node 1 has 1\.00 MiB"):
        plan.check(replace(box, nodes=(box.nodes[0], small[1], box.nodes[2])))


def test_a_plan_of_an_earlier_version_keeps_its_node(tmp_path: Path) -> None:
    for location, node in ((Location.DRAM, 0), (Location.NVME, None)):
        plan, evaluator = plan_on(two_sockets(1), location)
        text = json.loads(saved(plan, tmp_path).read_text())
        del text["placement"]["staging_node"]
        (tmp_path / "old.json").write_text(json.dumps(text))
        old = Plan.load(tmp_path / "old.json")

        assert old.placement.staging_node is None
        assert old.placement.host_node == node
        model, schedule = evaluator.inventory, step_schedule(evaluator.inventory, old.placement)
        moved = step_traffic(model, old.workload, old.placement, schedule)
        assert any(link.startswith("node") for link in moved) is (node is not None)
        old.check(two_sockets(1))


def saved(plan: Plan, directory: Path) -> Path:
    plan.save(directory / "plan.json")
    return directory / "plan.json"
