"""What ranks need of links, host memory and the network, with either transport."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import MachineError, PlanError
from penstock.machine.machine import Figure, GpuLink, Machine, Nic, NodeCopy
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.placement import TransportName
from penstock.plan.schedule import Verb
from penstock.plan.seats import Ranks, seat_ranks
from penstock.planner import QUICK, find_plan
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.cost import Cost
from penstock.planner.cost.jobs import JobBuilder
from penstock.planner.cost.rates import NVLINK_RATE, Rates
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.transports import check_transport, usable_transports
from penstock.units import GiB
from tests.support.machines import machine
from tests.support.models import llama, work

MODEL = llama("six", 512, 2048, 6, 512, 128, 8192, False)
rate = Figure.from_number


def server(gpus: int, *, sockets: int = 1, link: str | None = "nvlink", **of: Any) -> Machine:
    """Return a machine with some GPUs, dealt to the sockets, with rates that differ."""
    box = machine(cards=0)
    nodes = tuple(replace(box.nodes[0], id=n) for n in range(sockets))
    cards = tuple(replace(box.gpus[0], index=i, node=i * sockets // gpus) for i in range(gpus))
    transfers = tuple(replace(t, node=n) for n in range(sockets) for t in box.transfers)
    links = ()
    if link is not None and gpus > 1:
        links = (
            GpuLink(gpus=tuple(range(gpus)), kind=link, bytes_per_second=rate(200e9)),  # type: ignore[arg-type]
        )
    return replace(box, nodes=nodes, gpus=cards, transfers=transfers, gpu_links=links, **of)


def evaluator(
    box: Machine, world: int, transport: TransportName | None, micro_batches: int = 1
) -> PlanEvaluator:
    workload = work(MODEL, 1024, world * micro_batches, micro_batch=1, world=world)
    drive = PathBudget(path="/mnt/nvme", nbytes=64 * GiB)
    budget = Budget(hbm=64 * GiB, dram=64 * GiB, nvme=(drive,))
    seats = seat_ranks(box, world, [drive.path])
    return PlanEvaluator(
        MODEL, workload, box, budget, piece_elements=1 << 19, seats=seats, transport=transport
    )


def streamed(location: Location = Location.DRAM, inventory: Inventory = MODEL) -> Candidate:
    last = len(inventory.blocks) - 1
    return Candidate(tuple(
        BlockLocations(location, location, location, Location.HBM if 0 < i < last else None)
        for i in range(last + 1)
    ))  # fmt: skip


def demands_by_verb(of: PlanEvaluator, candidate: Candidate, *verbs: Verb) -> Counter[str]:
    """Return the seconds of each resource that operations of some kinds need in a step."""
    cost = of.cost(candidate)
    jobs = JobBuilder(
        of.inventory, of.workload, of.placement(candidate), of.rates, of.ranks
    ).jobs(cost.schedule)  # fmt: skip
    total: Counter[str] = Counter()
    for job, operation in zip(jobs, cost.schedule.operations, strict=True):
        if operation.verb in verbs:
            total.update(job.demands)
    return total


def weight_nbytes(world: int = 4) -> float:
    """Return the bytes of weights that a step moves: forward, and backward of layers again."""
    inventory = MODEL.sharded(world)
    forward = sum(2 * block.flat_elements(True) for block in inventory.blocks)
    # The layers that are still in a slot when backward starts are not moved again.
    again = sum(2 * block.flat_elements(True) for block in inventory.layers[:-2])
    return forward + again


def gradient_nbytes(waves: int) -> float:
    inventory = MODEL.sharded(4)
    return waves * sum(
        (4 if block.kind == "head" else 2) * block.flat_elements(True) for block in inventory.blocks
    )


@pytest.mark.parametrize("waves", [1, 3])
def test_shared_memory_moves_weights_in_once_more_for_every_rank(waves: int) -> None:
    of = evaluator(server(4), 4, "shared", waves)
    rates, node = of.rates, of.rates.nodes[0]
    gathered = demands_by_verb(of, streamed(), Verb.GATHER)
    exchanged = demands_by_verb(of, streamed(), Verb.EXCHANGE)
    weights, gradients = weight_nbytes(), gradient_nbytes(waves)

    assert gathered["h2d"] * rates.h2d == pytest.approx(weights * 3 / 4)
    assert gathered["d2h"] == 0
    assert exchanged["h2d"] * rates.h2d == pytest.approx(gradients * 3 / 4)
    assert exchanged["d2h"] * rates.d2h == pytest.approx(gradients * 3 / 4)
    # All four ranks do that at the same time, and host memory is one.
    assert gathered["memory@0"] * node.total == pytest.approx(4 * weights * 3 / 4)
    assert exchanged["memory@0"] * node.total == pytest.approx(4 * 2 * gradients * 3 / 4)
    assert not {"peer", "nic", "socket"} & {*gathered, *exchanged}
    fetched = demands_by_verb(of, streamed(), Verb.FETCH)
    assert fetched["h2d"] * rates.h2d == pytest.approx(weights / 4)


@pytest.mark.parametrize(("link", "on_pcie"), [("nvlink", False), ("pcie", True)])
def test_collective_calls_use_the_links_between_gpus(link: str, on_pcie: bool) -> None:
    of = evaluator(server(4, link=link), 4, "collective", 2)
    gathered = demands_by_verb(of, streamed(), Verb.GATHER)
    exchanged = demands_by_verb(of, streamed(), Verb.EXCHANGE)

    assert gathered["peer"] * 200e9 == pytest.approx(weight_nbytes() * 3 / 4)
    assert exchanged["peer"] * 200e9 == pytest.approx(gradient_nbytes(2) * 3 / 4)
    assert gathered["memory@0"] == exchanged["memory@0"] == 0
    for demands in (gathered, exchanged):
        assert (demands["h2d"] > 0) == (demands["d2h"] > 0) == on_pcie


def test_collective_calls_without_peer_access_pass_through_host_memory() -> None:
    of = evaluator(server(2, link="none"), 2, "collective")
    gathered = demands_by_verb(of, streamed(), Verb.GATHER)
    assert gathered["peer"] == 0
    assert gathered["memory@0"] > 0
    assert gathered["h2d"] > 0


@pytest.mark.parametrize("location", [Location.HBM, Location.NVME])
def test_weights_that_are_not_in_host_memory_are_copied_out_first(location: Location) -> None:
    of = evaluator(server(2), 2, "shared")
    gathered = demands_by_verb(of, streamed(location), Verb.GATHER)
    nbytes = sum(2 * block.flat_elements(True) for block in of.inventory.blocks)
    if location is Location.NVME:  # weights in HBM are not moved again for backward
        nbytes = weight_nbytes(2)
    assert gathered["d2h"] * of.rates.d2h == pytest.approx(nbytes / 2)
    assert gathered["h2d"] * of.rates.h2d == pytest.approx(nbytes / 2)


def test_ranks_on_their_own_sockets_sweep_at_its_full_rate_and_read_across() -> None:
    links = tuple(NodeCopy(source=a, target=1 - a, bytes_per_second=rate(30e9)) for a in (0, 1))
    one = evaluator(server(4), 4, "shared")
    two = evaluator(server(4, sockets=2, node_copies=links), 4, "shared")
    sweeps = [demands_by_verb(of, streamed(), Verb.SWEEP)["sweep@0"] for of in (one, two)]
    assert sweeps[1] == pytest.approx(sweeps[0] / 2), "two ranks on each socket instead of four"

    gathered = demands_by_verb(two, streamed(), Verb.GATHER)
    # Two ranks here read the shards of the two ranks there.
    assert gathered["socket"] * 30e9 == pytest.approx(2 * 2 * weight_nbytes() / 4)
    exchanged = demands_by_verb(two, streamed(), Verb.EXCHANGE)
    assert exchanged["socket"] * 30e9 == pytest.approx(2 * 2 * gradient_nbytes(1) / 4)
    assert demands_by_verb(one, streamed(), Verb.GATHER)["socket"] == 0


def machines(count: int, gpus: int, *, direct: bool = True) -> Machine:
    nics = (
        Nic(name="a", bytes_per_second=rate(24e9), latency=rate(1e-15), direct=direct),
        Nic(name="b", bytes_per_second=rate(16e9), direct=direct),
        Nic(name="slow", bytes_per_second=rate(10e9)),
    )
    return server(gpus, machines=count, nics=nics)


@pytest.mark.parametrize(("count", "gpus"), [(4, 1), (2, 2)])
def test_machines_receive_weights_once_and_gradients_of_every_rank(count: int, gpus: int) -> None:
    of = evaluator(machines(count, gpus), 4, "collective", 2)
    assert of.rates.nic == 40e9, "cards less than half as fast are not used"
    gathered = demands_by_verb(of, streamed(), Verb.GATHER)
    exchanged = demands_by_verb(of, streamed(), Verb.EXCHANGE)
    away = (count - 1) / count
    assert gathered["nic"] * 40e9 == pytest.approx(weight_nbytes() * away)
    assert exchanged["nic"] * 40e9 == pytest.approx(gpus * gradient_nbytes(2) * away)
    assert (gathered["peer"] > 0) == (gpus > 1)
    assert gathered["memory@0"] == 0
    copied = evaluator(machines(count, gpus, direct=False), 4, "collective", 2)
    assert demands_by_verb(copied, streamed(), Verb.GATHER)["memory@0"] > 0


def test_a_network_without_a_rate_is_refused() -> None:
    box = server(1, machines=2)
    with pytest.raises(MachineError, match=r"^nics: is missing, and several machines"):
        Rates.of(box, ranks=Ranks(world=2, seats=seat_ranks(box, 2)))


def test_missing_figures_of_links_are_assumed_and_listed() -> None:
    box = server(2)
    ranks = Ranks(world=2, seats=seat_ranks(box, 2))
    unmeasured = replace(box, gpu_links=(GpuLink(gpus=(0, 1), kind="nvlink"),))
    rates = Rates.of(unmeasured, ranks=ranks)
    assert (rates.peer, rates.peer_has_own_link) == (NVLINK_RATE, True)
    assert any("GPU links: 50 GB/s" in text for text in rates.assumed)
    unknown = Rates.of(replace(box, gpu_links=()), ranks=ranks)
    assert unknown.peer is None
    assert any("through host memory only" in text for text in unknown.assumed)
    pcie = Rates.of(replace(box, gpu_links=(GpuLink(gpus=(0, 1), kind="pcie"),)), ranks=ranks)
    assert (pcie.peer, pcie.peer_has_own_link) == (25e9, False)


def test_gpus_that_share_a_node_are_no_faster_than_measured_together() -> None:
    box = server(2)
    both = replace(box.transfers[0], gpus=(0, 1), bytes_per_second=rate(30e9))
    shared = replace(box, transfers=(*box.transfers, both))
    ranks = Ranks(world=2, seats=seat_ranks(box, 2))
    assert Rates.of(box, ranks=ranks).nodes[0].to_gpu == 25e9
    assert Rates.of(shared, ranks=ranks).nodes[0].to_gpu == 15e9
    assert Rates.of(shared).nodes[0].to_gpu == 25e9, "one GPU alone"


@pytest.mark.parametrize(
    ("box", "world", "usable"),
    [
        (server(2), 1, ()),
        (server(2), 2, ("shared", "collective")),
        (server(2, link="pcie"), 2, ("shared", "collective")),
        (server(2, link="none"), 2, ("shared",)),
        (server(2, link=None), 2, ("shared",)),
        (server(2, machines=2), 4, ("collective",)),
        (replace(server(2), gpus=(), transfers=(), gpu_links=()), 2, ("collective",)),
    ],
)
def test_transports_that_ranks_can_use(box: Machine, world: int, usable: tuple[str, ...]) -> None:
    assert usable_transports(box, world) == usable


def test_shared_memory_over_several_machines_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^transport: is shared, but 2 machines share no memory"):
        check_transport(server(2, machines=2), "shared")


def planned(box: Machine, transport: TransportName | None = None) -> tuple[str | None, Cost]:
    workload = work(MODEL, 1024, 8, micro_batch=1, world=len(box.gpus))
    budget = Budget(hbm=4 * GiB, dram=8 * GiB)
    found = find_plan(MODEL, workload, budget, box, effort=QUICK, transport=transport)
    assert found is not None
    return found.plan.placement.transport, found.cost


def test_the_plan_has_the_faster_transport_unless_another_is_asked_for() -> None:
    fast = server(4)
    slow = replace(
        fast, gpu_links=(GpuLink(gpus=(0, 1, 2, 3), kind="pcie", bytes_per_second=rate(0.2e9)),)
    )
    for box, best, other in ((fast, "collective", "shared"), (slow, "shared", "collective")):
        name, cost = planned(box)
        forced, slower = planned(box, other)  # type: ignore[arg-type]
        assert (name, forced) == (best, other)
        assert cost.step_seconds < slower.step_seconds
