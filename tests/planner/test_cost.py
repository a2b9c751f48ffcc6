"""The cost model knows that buffers are few: nothing is timed that could not be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from penstock.engine.batches import cut_batch
from penstock.machine.presets import cpu_machine
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.schedule import Verb
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.cost import PHASES, Cost, phase_peaks
from penstock.planner.cost.compute import sequences_by_round
from penstock.planner.cost.jobs import ISSUING, LAUNCHING
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import TRAINED, Role
from penstock.tiers import Tier
from penstock.units import GiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, model, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
MODEL = llama("six", 512, 2048, 6, 512, 128, 8192, False)


def evaluator(**speeds: float) -> PlanEvaluator:
    budget = Budget(hbm=TiB, dram=TiB, nvme=NVME)
    return PlanEvaluator(
        MODEL,
        work(MODEL, 64, 8, micro_batch=2),
        machine(cards=0, **speeds),
        budget,
        piece_elements=1 << 19,
    )


def everything_at(location: Location, slots: int = 2) -> Candidate:
    layers = range(1, len(MODEL.blocks) - 1)
    locations = (
        BlockLocations(location, location, location, location if i in layers else None)
        for i in range(len(MODEL.blocks))
    )
    return Candidate(tuple(locations), slots=slots)


def most_at_once(intervals: list[tuple[float, float]]) -> int:
    moments = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    live = most = 0
    for _, change in moments:  # at one moment those that end come first
        live += change
        most = max(most, live)
    return most


def buffers(cost: Cost, taken: Verb, given: Verb, roles: tuple[Role, ...] | None) -> list:  # type: ignore[type-arg]
    """From the start of what takes one to what gives it back, in order, block by block."""
    found, open_ = [], {}
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if roles is not None and operation.roles != roles:
            continue
        piece = operation.piece if given is Verb.RELEASE else None
        key = (operation.block, piece, operation.roles)
        if operation.verb is taken:
            open_.setdefault(key, []).append(span.start)
        elif operation.verb is given:
            starts = open_.pop(key)
            found.append((starts[0], span.end))
    return found


@pytest.mark.parametrize("disk", [1e8, 1e10])
def test_no_more_pieces_are_in_staging_than_there_are_places(disk: float) -> None:
    cost = evaluator(disk=disk).cost(everything_at(Location.NVME))
    staged = buffers(cost, Verb.READ, Verb.RELEASE, None)

    assert len(staged) > 50
    assert most_at_once(staged) == 3


@pytest.mark.parametrize("slots", [2, 4])
def test_no_more_weights_are_in_hbm_than_there_are_slots(slots: int) -> None:
    # A link so fast that only the slots hold the fetches back.
    cost = evaluator(link=1e12).cost(everything_at(Location.DRAM, slots))
    weights = [
        interval
        for interval in buffers(cost, Verb.FETCH, Verb.DROP, (Role.WEIGHT,))
        if interval[1] > interval[0]
    ]

    assert most_at_once(weights) <= slots + 2  # layers, and the embedding or the head


def test_a_backward_waits_for_the_gradient_before_the_last_to_have_left() -> None:
    cost = evaluator(link=1e8).cost(everything_at(Location.DRAM))
    spans = dict(zip(cost.schedule.operations, cost.spans, strict=True))
    back = {o.block: s for o, s in spans.items() if o.verb is Verb.BACKWARD}
    out = {o.block: s for o, s in spans.items()
           if o.verb is Verb.DRAIN and o.roles == (Role.GRADIENT,)}  # fmt: skip

    for block in range(1, len(MODEL.blocks) - 3):
        assert back[block].start >= out[block + 2].end


# What is in use, phase by phase.


def phases(candidate: Candidate) -> dict[str, dict[Tier, int]]:
    table = evaluator()
    placement, schedule = table.placement(candidate), table.cost(candidate).schedule
    return phase_peaks(MODEL, table.workload, placement, schedule, table.pools(candidate))


def test_a_phase_never_uses_more_than_is_taken_and_one_of_them_nearly_all() -> None:
    table = evaluator()
    for location in (Location.HBM, Location.DRAM, Location.NVME):
        candidate = everything_at(location)
        taken = table.total_nbytes(candidate)
        found = phases(candidate)
        for tier in Tier:
            most = max(found[phase][tier] for phase in PHASES)
            assert 0.9 * taken[tier] <= most <= taken[tier]


def test_staging_is_in_use_while_sweeping_and_gradients_in_backward() -> None:
    found = phases(everything_at(Location.NVME))
    rests = evaluator().stored_nbytes(everything_at(Location.NVME))

    assert found["sweep"][Tier.DRAM] > rests[Tier.DRAM] + 3 * 12 * (1 << 18)
    # On the way back only weights pass through staging, once the last sweep is done with it.
    assert found["backward"][Tier.DRAM] < found["sweep"][Tier.DRAM]
    assert found["backward"][Tier.HBM] > found["forward"][Tier.HBM]
    assert found["backward"][Tier.NVME] == found["forward"][Tier.NVME] == rests[Tier.NVME]


@pytest.mark.parametrize("rounds", [1, 2])
def test_all_inputs_of_a_round_are_there_at_the_turn(rounds: int) -> None:
    """With one round they are where gradients were, and take nothing."""
    table = evaluator()
    found = phases(replace(everything_at(Location.DRAM), rounds=rounds))
    groups = itertools.product(range(8), ("weight", "state", "gradient"))
    rests = sum(table.group_nbytes(i, group, rounds) for i, group in groups)
    inputs = 6 * table.group_nbytes(1, "input", rounds)

    assert found["backward"][Tier.DRAM] == rests + (inputs if rounds > 1 else 0)


def test_input_bytes_of_the_issue() -> None:
    inventory = model("llama-3.1-8b")
    evaluator = PlanEvaluator(
        inventory, work(inventory, 32768, 32), machine(), Budget(hbm=TiB, dram=TiB)
    )

    assert 32 * evaluator.group_nbytes(1, "input", rounds=1) == 256 * GiB
    assert Role.INPUT not in TRAINED


# Rounds.


@pytest.mark.parametrize(("batch", "micro", "rounds", "wanted"), [
    (8, 2, 3, [4, 4, 0]),
    (10, 2, 3, [4, 4, 2]),
    (7, 2, 2, [4, 3]),
    (4, 2, 5, [2, 2, 0, 0, 0]),
    (5, 1, 1, [5]),
])  # fmt: skip
def test_rounds_are_cut_as_the_engine_cuts_them(
    batch: int, micro: int, rounds: int, wanted: list[int]
) -> None:
    asked = work(MODEL, 16, batch, micro_batch=micro)
    ids = torch.zeros((batch, 16), dtype=torch.long)
    cut = cut_batch({"input_ids": ids}, asked, rounds, torch.device("cpu"))

    assert sequences_by_round(asked, rounds) == wanted
    assert [sum(m.shape[0] for m in micros) for micros in cut.rounds] == wanted


def test_more_rounds_than_micro_batches_cost_no_more_computing() -> None:
    table = evaluator()
    most = table.workload.micro_batches
    locations = everything_at(Location.DRAM)
    few, many = (table.cost(replace(locations, rounds=n)) for n in (most, most + 3))

    assert few.busy["gpu"] * few.step_seconds == pytest.approx(many.busy["gpu"] * many.step_seconds)


def test_a_machine_however_fast_still_takes_the_hosts_time_for_every_operation() -> None:
    cost = evaluator(disk=1e15, dram=1e15, link=1e15, flops=1e18).cost(everything_at(Location.NVME))
    moved = (Verb.READ, Verb.SWEEP, Verb.WRITE)
    issued = ISSUING * sum(operation.verb in moved for operation in cost.schedule.operations)
    micro_batches, layers = 4, len(MODEL.blocks) - 2
    launched = micro_batches * layers * (LAUNCHING[Verb.FORWARD] + LAUNCHING[Verb.BACKWARD])

    assert issued + launched < cost.step_seconds < 2 * (issued + launched)
    assert cost.bound_by == "host"


def test_smaller_pieces_take_longer_where_nothing_else_does() -> None:
    whole = evaluator(disk=1e15, dram=1e15, link=1e15)
    fine = replace(whole, piece_elements=whole.piece_elements >> 2)
    locations = everything_at(Location.NVME)

    assert fine.cost(locations).step_seconds > 1.5 * whole.cost(locations).step_seconds


def test_a_cpu_launches_nothing() -> None:
    table = evaluator()
    alone = replace(table, machine=cpu_machine(table.machine)).cost(everything_at(Location.HBM))

    sweeps = len(MODEL.blocks) * ISSUING
    assert alone.busy["host"] * alone.step_seconds == pytest.approx(sweeps)
    assert alone.bound_by == "gpu"
