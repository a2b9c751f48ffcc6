"""Seats: which nodes, cards, CPUs and paths each rank uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.machine.machine import Cpu, Gpu, Machine, MemoryNode
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import Budget, PathBudget, parse_budget
from penstock.plan.plan import Plan
from penstock.plan.seats import Ranks, Seat, rank_budget, seat_ranks
from penstock.planner import QUICK, make_plan
from penstock.records import from_json, to_json
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.machines import machine as small_machine
from tests.support.models import llama, work

MODEL = llama("small", 1024, 4096, 4, 1024, 256, 32000, False)


def server(gpu_nodes: tuple[int, ...], *, sockets: int = 2, cards: int = 0, **of: Any) -> Machine:
    """Return a machine with 8 CPUs on each socket and cards that are near to a socket in turn."""
    nodes = [
        MemoryNode(id=n, kind="dram", capacity=64 * GiB, cpus=tuple(range(8 * n, 8 * n + 8)))
        for n in range(sockets)
    ]
    ids = range(sockets, sockets + cards)
    nodes = [
        replace(node, distances={c: 14 if c % sockets == node.id else 24 for c in ids})
        for node in nodes
    ]
    cxl = [MemoryNode(id=c, kind="cxl", capacity=128 * GiB) for c in ids]
    gpus = tuple(Gpu(index=i, node=n, memory=24 * GiB) for i, n in enumerate(gpu_nodes))
    return Machine(nodes=(*nodes, *cxl), gpus=gpus, cpu=Cpu(cores=8 * sockets), **of)


def test_one_rank_has_no_seat() -> None:
    assert seat_ranks(server((0, 1)), 1) == ()


def test_ranks_use_the_socket_of_their_gpu_and_divide_its_cpus() -> None:
    seats = seat_ranks(server((0, 0, 1, 1)), 4)
    assert [seat.gpu for seat in seats] == [0, 1, 2, 3]
    assert [seat.nodes for seat in seats] == [(0,), (0,), (1,), (1,)]
    assert [seat.cpus for seat in seats] == [
        (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15),
    ]  # fmt: skip
    ranks = Ranks(world=4, seats=seats)
    assert (ranks.on_node(0), ranks.local, ranks.machines) == (2, 4, 1)
    assert ranks.node_capacity(server((0, 0, 1, 1)), 0) == 32 * GiB


@pytest.mark.parametrize("gpu_nodes", [(0, 0), (0, 0, 0, 1), (1, 1)])
def test_ranks_share_all_nodes_if_sockets_have_unequal_numbers_of_gpus(
    gpu_nodes: tuple[int, ...],
) -> None:
    seats = seat_ranks(server(gpu_nodes), len(gpu_nodes))
    near = gpu_nodes[0]
    assert {seat.nodes for seat in seats} == {(near, 1 - near)}, "staging is next to the first GPU"
    cpus = [cpu for seat in seats for cpu in seat.cpus]
    assert sorted(cpus) == list(range(16)), "all CPUs, each once"
    assert Ranks(world=len(seats), seats=seats).on_node(0) == len(seats)


def test_hardware_threads_of_one_core_belong_to_one_rank() -> None:
    box = server((0, 0), sockets=1)
    seats = seat_ranks(replace(box, cpu=Cpu(cores=4)), 2)  # 8 CPUs: the second threads are 4 to 7
    assert [seat.cpus for seat in seats] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    crowded = seat_ranks(replace(box, gpus=tuple(Gpu(index=i) for i in range(16))), 16)
    assert {seat.cpus for seat in crowded} == {tuple(range(8))}, "fewer cores than ranks"
    unknown = replace(box, nodes=(replace(box.nodes[0], cpus=()),))
    assert [seat.cpus for seat in seat_ranks(unknown, 2)] == [(), ()]


@pytest.mark.parametrize(
    ("gpu_nodes", "cards", "nodes"),
    [
        ((0, 1), 2, [(0, 2), (1, 3)]),
        ((1, 0), 2, [(1, 3), (0, 2)]),
        ((0, 1), 4, [(0, 2, 4), (1, 3, 5)]),
        ((0, 1), 1, [(0, 2), (1, 2)]),
        ((0, 1), 3, [(0, 2, 3, 4), (1, 2, 3, 4)]),
        ((0, 0, 1, 1), 2, [(0, 2, 3), (0, 2, 3), (1, 2, 3), (1, 2, 3)]),
    ],
)
def test_each_rank_has_the_nearest_card_or_all_ranks_share_all_cards(
    gpu_nodes: tuple[int, ...], cards: int, nodes: list[tuple[int, ...]]
) -> None:
    seats = seat_ranks(server(gpu_nodes, cards=cards), len(gpu_nodes))
    assert [seat.nodes for seat in seats] == nodes


def test_cards_of_different_sizes_are_shared() -> None:
    box = server((0, 1), cards=2)
    small = replace(box.nodes[3], capacity=64 * GiB)
    seats = seat_ranks(replace(box, nodes=(*box.nodes[:3], small)), 2)
    assert [seat.nodes for seat in seats] == [(0, 2, 3), (1, 2, 3)]


def test_directories_are_for_all_ranks_and_devices_for_one() -> None:
    paths = ["/mnt/a", "/dev/nvme0n1", "/dev/nvme1n1"]
    seats = seat_ranks(server((0, 1)), 2, paths)
    assert [seat.paths for seat in seats] == [
        ("/mnt/a", "/dev/nvme0n1"), ("/mnt/a", "/dev/nvme1n1"),
    ]  # fmt: skip
    ranks = Ranks(world=2, seats=seats)
    assert (ranks.on_path("/mnt/a"), ranks.on_path("/dev/nvme0n1")) == (2, 1)
    with pytest.raises(PlanError, match=r"^nvme: has 1 raw devices for 2 ranks on a machine"):
        seat_ranks(server((0, 1)), 2, paths[:2])
    assert seat_ranks(server((0, 1)), 2, ["/dev/shm/x"])[1].paths == ("/dev/shm/x",)


def test_budgets_of_a_machine_are_divided_and_hbm_is_per_gpu() -> None:
    drives = {"/mnt/a": 100, "/dev/b": 70, "/dev/c": 60}
    whole = Budget(
        hbm=10, dram=101, cxl=50,
        nvme=tuple(PathBudget(path=path, nbytes=n) for path, n in drives.items()),
    )  # fmt: skip
    part = rank_budget(whole, seat_ranks(server((0, 1)), 2, list(drives)))
    assert (part.hbm, part.dram, part.cxl) == (10, 50, 25)
    assert {each.path: each.nbytes for each in part.nvme} == {"/mnt/a": 50, "/dev/b": 60}
    assert rank_budget(whole, ()) is whole


def test_several_machines_have_the_seats_of_one() -> None:
    box = server((0, 1), machines=3)
    seats = seat_ranks(box, 6)
    assert len(seats) == 2
    assert (Ranks(world=6, seats=seats).machines, Ranks(world=6, seats=seats).local) == (3, 2)
    with pytest.raises(PlanError, match=r"^machines: is 3, which must divide"):
        seat_ranks(box, 4)
    with pytest.raises(PlanError, match=r"^gpus: is 3, but this machine has 2"):
        seat_ranks(box, 9)


def test_ranks_without_a_gpu_divide_the_sockets() -> None:
    box = cpu_machine(server((0, 1)))
    assert [(seat.gpu, seat.nodes) for seat in seat_ranks(box, 4)] == [
        (None, (0,)), (None, (0,)), (None, (1,)), (None, (1,)),
    ]  # fmt: skip
    assert [seat.nodes for seat in seat_ranks(box, 3)] == [(0, 1)] * 3


def test_auto_budgets_leave_memory_for_every_process() -> None:
    gpus = server((0, 1))
    less = replace(gpus, gpus=(gpus.gpus[0], replace(gpus.gpus[1], free=10 * GiB)))
    one, two = parse_budget(gpus), parse_budget(less, ranks=2)
    assert one.dram - two.dram == 2560 * MiB
    assert two.hbm < 10 * GiB < one.hbm, "the GPU with the least free memory decides"
    cpu = cpu_machine(gpus)
    alone, ranks = parse_budget(cpu), parse_budget(cpu, ranks=4)
    assert 4 * ranks.hbm + ranks.dram == pytest.approx(
        alone.hbm + alone.dram - 3 * 768 * MiB, abs=4
    )


def two_cards() -> Machine:
    box = small_machine(cards=2)
    return replace(box, gpus=(box.gpus[0], replace(box.gpus[0], index=1)))


def seated_plan() -> Plan:
    """Return a plan of two ranks with a card each."""
    workload = work(MODEL, 1024, 4, micro_batch=1, world=2)
    budget = Budget(
        hbm=2400 * MiB, dram=1200 * MiB, cxl=8 * GiB,
        nvme=(PathBudget(path="/mnt/nvme", nbytes=8 * GiB),),
    )  # fmt: skip
    return make_plan(MODEL, workload, budget, two_cards(), effort=QUICK).plan


def test_each_rank_has_the_placement_of_the_first_on_its_own_card(tmp_path: Any) -> None:
    plan = seated_plan()
    assert [seat.nodes for seat in plan.seats] == [(0, 1), (0, 2)]
    assert plan.placement.transport == "shared"
    assert plan.for_rank(0) is plan
    other = plan.for_rank(1)

    def nodes(of: Plan, tier: Tier) -> set[int | None]:
        return {share.node for _, share in of._shares if share.tier is tier}

    assert plan.peak(Tier.CXL)
    assert (nodes(plan, Tier.CXL), nodes(other, Tier.CXL)) == ({1}, {2})
    assert nodes(plan, Tier.DRAM) == nodes(other, Tier.DRAM) == {0}
    for tier in Tier:
        assert (plan.peak(tier), plan.at_rest(tier)) == (other.peak(tier), other.at_rest(tier))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_machine_must_have_what_all_ranks_need_on_their_own_nodes() -> None:
    plan, box = seated_plan(), two_cards()
    plan.check(box)
    used = plan.peak(Tier.CXL)
    for node, factor, problem in ((1, 1.0, ""), (2, 0.9, "node 2"), (0, 0.0, "node 0")):
        capacity = int(factor * used) or int(1.9 * plan.peak(Tier.DRAM))
        changed = tuple(
            replace(each, capacity=capacity) if each.id == node else each for each in box.nodes
        )
        if problem:
            with pytest.raises(PlanError, match=f"^{problem}: needs "):
                plan.check(replace(box, nodes=changed))
        else:
            plan.check(replace(box, nodes=changed))


def test_a_plan_without_seats_or_transport_still_loads() -> None:
    plan = seated_plan()
    old = to_json(replace(plan, seats=()))
    assert isinstance(old, dict)
    assert "seats" not in old
    placement = old["placement"]
    assert isinstance(placement, dict)
    del placement["transport"]
    loaded = from_json(Plan, old)
    assert loaded.for_rank(1) is loaded
    assert loaded.ranks == Ranks(world=2)
    assert loaded.ranks.on_node(1) == 2, "all ranks share what the plan names"


def test_seats_that_do_not_match_the_ranks_are_rejected() -> None:
    plan = seated_plan()
    with pytest.raises(PlanError, match=r"^seats: has 3 for the ranks of a machine"):
        replace(plan, seats=(*plan.seats, plan.seats[0]))
    with pytest.raises(PlanError, match=r"^seats\[1\]\.nodes: must be as many as in seats\[0\]"):
        replace(plan, seats=(plan.seats[0], Seat(nodes=(0,), paths=plan.seats[1].paths)))
