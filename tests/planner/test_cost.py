"""The cost model respects the number of buffers, and counts memory, rounds and host time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.engine.batches import split_batch
from penstock.machine.presets import cpu_machine, preset
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.schedule import Operation, Verb
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.cost import PHASES, Cost, Rates, phase_peaks
from penstock.planner.cost.compute import ComputeTime, sequences_by_round, token_seconds
from penstock.planner.cost.flops import operations
from penstock.planner.cost.jobs import ISSUING, LAUNCHING
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import FillStrategy, fill
from penstock.roles import TRAINED, Role
from penstock.tiers import Tier
from penstock.units import GiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, model, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
MODEL = llama("six", 512, 2048, 6, 512, 128, 8192, False)


def make_evaluator(**speeds: float) -> PlanEvaluator:
    budget = Budget(hbm=TiB, dram=TiB, nvme=NVME)
    return PlanEvaluator(
        MODEL,
        work(MODEL, 64, 8, micro_batch=2),
        machine(cards=0, **speeds),
        budget,
        piece_elements=1 << 19,
    )


def all_at(location: Location, slots: int = 2) -> Candidate:
    layers = range(1, len(MODEL.blocks) - 1)
    locations = (
        BlockLocations(location, location, location, location if i in layers else None)
        for i in range(len(MODEL.blocks))
    )
    return Candidate(tuple(locations), slots=slots)


def most_concurrent(intervals: list[tuple[float, float]]) -> int:
    """Return the largest number of intervals that overlap."""
    moments = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    live = most = 0
    for _, change in moments:  # of events at the same time, ends come first
        live += change
        most = max(most, live)
    return most


def buffer_intervals(
    cost: Cost, acquire: Verb, release: Verb, roles: tuple[Role, ...] | None
) -> list[tuple[float, float]]:
    """Return when each buffer is in use, from the operation that acquires it to its release."""
    intervals: list[tuple[float, float]] = []
    open_since: dict[object, list[float]] = {}
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if roles is not None and operation.roles != roles:
            continue
        piece = operation.piece if release is Verb.RELEASE else None
        key = (operation.block, piece, operation.roles)
        if operation.verb is acquire:
            open_since.setdefault(key, []).append(span.start)
        elif operation.verb is release:
            starts = open_since.pop(key)
            intervals.append((starts[0], span.end))
    return intervals


@pytest.mark.parametrize("disk", [1e8, 1e10])
def test_staging_never_holds_more_than_three_pieces(disk: float) -> None:
    cost = make_evaluator(disk=disk).cost(all_at(Location.NVME))
    staged = buffer_intervals(cost, Verb.READ, Verb.RELEASE, None)

    assert len(staged) > 50
    assert most_concurrent(staged) == 3


@pytest.mark.parametrize("slots", [2, 4])
def test_hbm_never_holds_more_weights_than_slots(slots: int) -> None:
    # With a link this fast, only the number of slots limits the fetches.
    cost = make_evaluator(link=1e12).cost(all_at(Location.DRAM, slots))
    weights = [
        interval
        for interval in buffer_intervals(cost, Verb.FETCH, Verb.DROP, (Role.WEIGHT,))
        if interval[1] > interval[0]
    ]

    assert most_concurrent(weights) <= slots + 2  # plus the embedding and the head


def test_backward_waits_until_the_gradient_two_blocks_ago_has_left() -> None:
    cost = make_evaluator(link=1e8).cost(all_at(Location.DRAM))
    spans = dict(zip(cost.schedule.operations, cost.spans, strict=True))
    backwards = {o.block: s for o, s in spans.items() if o.verb is Verb.BACKWARD}
    offloads = {
        o.block: s
        for o, s in spans.items()
        if o.verb is Verb.OFFLOAD and o.roles == (Role.GRADIENT,)
    }

    for block in range(1, len(MODEL.blocks) - 3):
        assert backwards[block].start >= offloads[block + 2].end


# Memory in use in each phase.


def peaks(candidate: Candidate) -> dict[str, dict[Tier, int]]:
    evaluator = make_evaluator()
    placement, schedule = evaluator.placement(candidate), evaluator.cost(candidate).schedule
    return phase_peaks(MODEL, evaluator.workload, placement, schedule, evaluator.pools(candidate))


def test_no_phase_uses_more_than_is_allocated_and_one_uses_nearly_all() -> None:
    evaluator = make_evaluator()
    for location in (Location.HBM, Location.DRAM, Location.NVME):
        candidate = all_at(location)
        allocated = evaluator.total_nbytes(candidate)
        by_phase = peaks(candidate)
        for tier in Tier:
            most = max(by_phase[phase][tier] for phase in PHASES)
            assert 0.9 * allocated[tier] <= most <= allocated[tier]


def test_sweeps_use_staging_and_backward_uses_gradient_buffers() -> None:
    by_phase = peaks(all_at(Location.NVME))
    stored = make_evaluator().stored_nbytes(all_at(Location.NVME))

    assert by_phase["sweep"][Tier.DRAM] > stored[Tier.DRAM] + 3 * 12 * (1 << 18)
    # In backward only weights pass through staging, after the last sweep.
    assert by_phase["backward"][Tier.DRAM] < by_phase["sweep"][Tier.DRAM]
    assert by_phase["backward"][Tier.HBM] > by_phase["forward"][Tier.HBM]
    assert by_phase["backward"][Tier.NVME] == by_phase["forward"][Tier.NVME] == stored[Tier.NVME]


@pytest.mark.parametrize("rounds", [1, 2])
def test_all_activations_of_a_round_exist_when_backward_starts(rounds: int) -> None:
    """With one round they are overlaid on gradients and need no memory of their own."""
    evaluator = make_evaluator()
    by_phase = peaks(replace(all_at(Location.DRAM), rounds=rounds))
    groups = itertools.product(range(8), ("weight", "state", "gradient"))
    stored = sum(evaluator.group_nbytes(i, group, rounds) for i, group in groups)
    activations = 6 * evaluator.group_nbytes(1, "activation", rounds)

    assert by_phase["backward"][Tier.DRAM] == stored + (activations if rounds > 1 else 0)


def test_activation_bytes_of_a_large_batch() -> None:
    inventory = model("llama-3.1-8b")
    evaluator = PlanEvaluator(
        inventory, work(inventory, 32768, 32), machine(), Budget(hbm=TiB, dram=TiB)
    )

    assert 32 * evaluator.group_nbytes(1, "activation", rounds=1) == 256 * GiB
    assert Role.ACTIVATION not in TRAINED


# Rounds.


@pytest.mark.parametrize(("batch", "micro", "rounds", "wanted"), [
    (8, 2, 3, [4, 4, 0]),
    (10, 2, 3, [4, 4, 2]),
    (7, 2, 2, [4, 3]),
    (4, 2, 5, [2, 2, 0, 0, 0]),
    (5, 1, 1, [5]),
])  # fmt: skip
def test_rounds_have_the_same_sizes_as_in_the_engine(
    batch: int, micro: int, rounds: int, wanted: list[int]
) -> None:
    workload = work(MODEL, 16, batch, micro_batch=micro)
    ids = torch.zeros((batch, 16), dtype=torch.long)
    cut = split_batch({"input_ids": ids}, workload, MODEL, rounds, torch.device("cpu"))

    assert sequences_by_round(workload, rounds) == wanted
    assert [sum(m.shape[0] for m in micros) for micros in cut.rounds] == wanted


def test_more_rounds_than_micro_batches_need_no_more_compute() -> None:
    evaluator = make_evaluator()
    most = evaluator.workload.micro_batches
    candidate = all_at(Location.DRAM)
    few, many = (evaluator.cost(replace(candidate, rounds=n)) for n in (most, most + 3))

    assert few.busy["gpu"] * few.step_seconds == pytest.approx(many.busy["gpu"] * many.step_seconds)


def test_every_operation_needs_host_time_however_fast_the_machine() -> None:
    cost = make_evaluator(disk=1e15, dram=1e15, link=1e15, flops=1e18).cost(all_at(Location.NVME))
    moved = (Verb.READ, Verb.SWEEP, Verb.WRITE)
    issued = ISSUING * sum(operation.verb in moved for operation in cost.schedule.operations)
    micro_batches, layers = 4, len(MODEL.blocks) - 2
    launched = micro_batches * layers * (LAUNCHING[Verb.FORWARD] + LAUNCHING[Verb.BACKWARD])

    assert issued + launched < cost.step_seconds < 2 * (issued + launched)
    assert cost.bound_by == "host"


def test_smaller_pieces_need_more_host_time() -> None:
    whole = make_evaluator(disk=1e15, dram=1e15, link=1e15)
    fine = replace(whole, piece_elements=whole.piece_elements >> 2)
    candidate = all_at(Location.NVME)

    assert fine.cost(candidate).step_seconds > 1.5 * whole.cost(candidate).step_seconds


def test_a_machine_without_a_gpu_has_no_launch_time() -> None:
    evaluator = make_evaluator()
    alone = replace(evaluator, machine=cpu_machine(evaluator.machine)).cost(all_at(Location.HBM))

    sweeps = len(MODEL.blocks) * ISSUING
    assert alone.busy["host"] * alone.step_seconds == pytest.approx(sweeps)
    assert alone.bound_by == "gpu"


def test_queries_that_are_wider_than_the_hidden_state_take_time_of_their_own() -> None:
    """Qwen3-4B has 4,096 queries for a hidden size of 2,560."""
    narrow, wide = (
        llama(name, 2560, 9728, 2, query, 1024, 32000, True)
        for name, query in (("narrow", 2560), ("wide", 4096))
    )
    rates = Rates.of(preset("h200"), compiled=True)
    dense, attention = tuple(
        b - a
        for a, b in zip(
            operations(narrow.layers[0], 4096, Verb.FORWARD),
            operations(wide.layers[0], 4096, Verb.FORWARD),
            strict=True,
        )
    )
    products = dense / rates.block_flops + attention / rates.attention_flops

    seconds = [
        token_seconds(each, each.layers[0], 4096, Verb.FORWARD, rates) for each in (narrow, wide)
    ]

    passes = seconds[1] - seconds[0] - products
    assert passes == pytest.approx(rates.passes / 4 * 2 * (4096 - 2560) / rates.hbm)


@pytest.mark.parametrize("location", [Location.HBM, Location.DRAM, Location.NVME])
def test_two_ranks_store_half_each_and_share_the_host(location: Location) -> None:
    one = make_evaluator()
    two = PlanEvaluator(
        MODEL, replace(one.workload, world=2), one.machine, one.budget, piece_elements=1 << 19
    )
    candidate = all_at(location)
    costs = [each.cost(candidate) for each in (one, two)]
    states = [sum(each.group_nbytes(i, "state", 1) for i in range(8)) for each in (one, two)]

    assert states[0] / 2 <= states[1] < states[0] / 2 * 1.02, "half, and some padding"
    assert costs[1].step_seconds > costs[0].step_seconds / 2, "gathering and exchanging take time"
    for verb in (Verb.GATHER, Verb.EXCHANGE, Verb.MEET):
        took = [
            span.end - span.start
            for span, op in zip(costs[1].spans, costs[1].schedule.operations, strict=True)
            if op.verb is verb
        ]
        assert took
        assert min(took) > 0
    # Each rank sweeps, reads and writes half of the bytes, and both do so at the same time.
    for resource in ("sweep@0", "disk@/mnt/nvme"):
        busy = [cost.busy.get(resource, 0.0) * cost.step_seconds for cost in costs]
        assert busy[1] == pytest.approx(busy[0], rel=0.02)


def backward_seconds(tile: int, kept: int, **fields: Any) -> float:
    """Return how long backward of a layer computes 16,384 tokens, with an MLP in tiles or not."""
    model = llama("8b", 4096, 14336, 2, 4096, 1024, 32000, False)
    blocks = tuple(replace(b, **fields) if b.kind == "layer" else b for b in model.blocks)
    model = replace(model, blocks=blocks)
    workload = work(model, 4096, 4)
    workload = replace(workload, numerics=replace(workload.numerics, mlp_tile=tile))
    rates = Rates.of(preset("h200"), compiled=True)
    placed = PlanEvaluator(model, workload, preset("h200"), Budget(hbm=60 * GiB, dram=60 * GiB))
    candidate = fill(placed, FillStrategy())
    assert candidate is not None
    placement = placed.placement(candidate)
    layer = replace(placement.blocks[1], kept=kept)
    placement = replace(placement, blocks=(placement.blocks[0], layer, *placement.blocks[2:]))
    time = ComputeTime(model, workload, placement, rates)
    return time.seconds(Operation(Verb.BACKWARD, 1, (), "backward")) * rates.block_flops / 16384


def test_backward_repeats_tiles_of_an_mlp_and_not_what_no_gradient_needs() -> None:
    """In operations per token; the MLP has three matrices."""
    matrix = 2 * 4096 * 14336
    skips = {"unneeded": ("mlp", "mlp.down_proj")}
    whole, tiles = 1 << 20, 4096

    all_products = backward_seconds(whole, 0)

    assert all_products - backward_seconds(whole, 0, **skips) == pytest.approx(matrix)
    assert backward_seconds(tiles, 0) - all_products == pytest.approx(2 * matrix)
    # Recomputation skips three matrices, and backward repeats two of them tile by tile.
    assert all_products - backward_seconds(tiles, 0, **skips) == pytest.approx(matrix)
    # Of a kept layer, too.
    kept = backward_seconds(whole, 1)
    assert backward_seconds(whole, 1, **skips) == pytest.approx(kept)
    assert backward_seconds(tiles, 1, **skips) - kept == pytest.approx(2 * matrix)
    assert backward_seconds(tiles, 1) - kept == pytest.approx(2 * matrix)
