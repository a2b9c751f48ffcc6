"""Working memory as a record, and the pools that it makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import records
from penstock.errors import PlanError
from penstock.plan.budget import Budget
from penstock.plan.buffers import (
    ALLOCATOR_PAGES,
    BufferPool,
    arguments_nbytes,
    pipe_lanes,
    pipe_nbytes,
    planned_room,
)
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.planner import QUICK, find_plan
from penstock.planner.candidate import Location
from penstock.roles import EXTENT
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB, round_up
from tests.support.machines import machine
from tests.support.models import llama, model, work
from tests.support.schedule_checker import WHOLE, all_on, evaluator_for

MODEL = llama("tiny", 256, 1024, 2, 256, 64, 8192, False)

MEMORY = WorkingMemory(
    parts=(
        PartMemory(name="embed", forward=5 * KiB, backward=7 * KiB),
        PartMemory(name="layer", forward=9 * KiB + 1, backward=8 * KiB),
    ),
    inputs=100,
    arguments=1000,
    origin="traced",
)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    records.save(MEMORY, tmp_path / "memory.json")

    assert records.load(WorkingMemory, tmp_path / "memory.json", error=PlanError) == MEMORY


def test_the_largest_part_decides_in_whole_pages() -> None:
    assert MEMORY.largest.name == "layer"
    assert MEMORY.peak == 12 * KiB


@pytest.mark.parametrize("field", ["forward", "backward"])
def test_a_part_with_negative_bytes_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=f"{field}: must be 0 or more"):
        PartMemory(**({"name": "layer", "forward": 0, "backward": 0} | {field: -1}))


def test_the_batch_stays_for_the_step_and_arguments_for_a_round() -> None:
    workload = work(MODEL, 64, 8, micro_batch=1)

    # 8 micro-batches: 800 B of inputs, and 8,000 B or 2,000 B of arguments.
    assert arguments_nbytes(workload, 1, MEMORY) == 12 * KiB
    assert arguments_nbytes(workload, 4, MEMORY) == 4 * KiB


def test_a_plan_needs_what_its_source_says() -> None:
    workload = work(MODEL, 64, 8)
    budget = Budget(hbm=40 * GiB, dram=100 * GiB)
    pools = {}
    for size in (GiB, 3 * GiB):
        parts = (PartMemory(name="layer", forward=0, backward=size),)
        memory = WorkingMemory(parts=parts)
        result = find_plan(
            MODEL, workload, budget, machine(), effort=QUICK, source=lambda *_, m=memory: m
        )
        assert result is not None
        assert result.memory == memory
        pools[size] = {p.what: p.nbytes for p in result.plan.pools}["working memory"]
    assert pools == {GiB: GiB, 3 * GiB: 3 * GiB}


def test_the_estimate_counts_four_bytes_per_value_in_fp32() -> None:
    narrow, wide = (
        estimate_working_memory(MODEL, work(MODEL, 64, 8, dtype=dtype))
        for dtype in ("bf16", "fp32")
    )

    for one, other in zip(narrow.parts[:2], wide.parts[:2], strict=True):
        assert (other.forward, other.backward) == (2 * one.forward, 2 * one.backward)
    assert wide.arguments == 2 * narrow.arguments
    assert wide.inputs == narrow.inputs


MEASURED = Path(__file__).parents[2] / "bench/results/block_memory_h200_2026-11-15.json"
MODELS = {"3B": model("qwen2.5-3b"), "8B": model("llama-3.1-8b")}


@pytest.mark.parametrize(
    "case",
    json.loads(MEASURED.read_text())["layers"],
    ids=lambda case: f"{case['size']}, {case['sequences']} x {case['context']}",
)
def test_the_estimate_agrees_with_what_layers_needed_on_a_gpu(case: dict[str, Any]) -> None:
    """Gradients of weights are left out: the measured layers had theirs before."""
    inventory = MODELS[case["size"]]
    whole = work(inventory, case["context"], case["sequences"], micro_batch=case["sequences"])
    workload = replace(whole, numerics=replace(whole.numerics, mlp_tile=1 << 20))

    layer = estimate_working_memory(inventory, workload).parts[1]

    gradients = 2 * inventory.layers[0].parameters(True)
    assert layer.forward == pytest.approx(case["forward_peak"], rel=0.01)
    assert layer.backward - gradients == pytest.approx(case["recompute_backward_peak"], rel=0.01)


def test_the_room_for_working_memory_is_what_its_pools_have_besides_whole_pages() -> None:
    pools = [
        BufferPool(tier=Tier.HBM, what="working memory", nbytes=5 * MiB),
        BufferPool(tier=Tier.HBM, what="allocator slack", nbytes=ALLOCATOR_PAGES + KiB),
        BufferPool(tier=Tier.HBM, what="weight slots", nbytes=7 * MiB),
    ]

    assert planned_room(pools) == (5 * MiB, KiB)
    assert planned_room(pools[2:]) == (0, 0)


@pytest.mark.parametrize(
    ("piece", "context", "half"),
    [
        # A block of this model has 590,336 parameters: its gradient is larger than a piece.
        (1 << 16, 128, 128 * KiB),
        (WHOLE, 128, 36 * 64 * KiB + 64 * KiB),
        (WHOLE, 16384, 8 * MiB),
        (WHOLE, 1 << 20, 16 * MiB),
    ],
)
def test_a_pipe_is_as_large_as_what_passes_through_it_and_never_larger_than_a_piece(
    piece: int, context: int, half: int
) -> None:
    evaluator = evaluator_for(2, tied=True, piece=piece)
    placement = evaluator.placement(all_on(evaluator, Location.NVME))
    workload = replace(evaluator.workload, context=context)

    assert pipe_nbytes(evaluator.inventory, workload, placement) == 2 * half


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_on_a_disk_are_read_back_only_to_add_to_them(dtype: str) -> None:
    """In fp32, a gradient of one round is stored like a sum, but nothing is added to it."""
    evaluator = evaluator_for(2, tied=False, piece=4096)
    placement = evaluator.placement(all_on(evaluator, Location.NVME))
    once = replace(evaluator.workload, dtype=dtype, accumulate=False)

    assert "fetch" not in pipe_lanes(once, placement)
    assert "fetch" in pipe_lanes(replace(once, accumulate=True), placement)
    assert "fetch" in pipe_lanes(once, replace(placement, rounds=2))


@pytest.mark.parametrize(
    ("activation", "gradient", "lanes"),
    [
        (Location.NVME, Location.NVME, ("drain inputs", "fetch inputs", "drain")),
        (Location.NVME, Location.DRAM, ("drain inputs", "fetch inputs")),
        (Location.DRAM, Location.NVME, ("drain",)),
        (Location.DRAM, Location.DRAM, ()),
    ],
)
def test_a_plan_has_one_pipe_per_lane_to_nvme(
    activation: Location, gradient: Location, lanes: tuple[str, ...]
) -> None:
    evaluator = evaluator_for(2, tied=True)
    candidate = all_on(evaluator, Location.DRAM)
    layers = {
        i: at._replace(activation=activation, gradient=gradient)
        for i, at in enumerate(candidate.locations)
        if at.activation
    }
    candidate = candidate.moved(layers)
    placement = evaluator.placement(candidate)
    pools = {pool.what: pool.nbytes for pool in evaluator.pools(candidate)}

    assert pipe_lanes(evaluator.workload, placement) == lanes
    one = pipe_nbytes(evaluator.inventory, evaluator.workload, placement)
    assert pools.get("NVMe pipes", 0) == len(lanes) * one


@pytest.mark.parametrize(("kernel", "logit"), [("torch", 12), ("fused", 2)])
def test_the_estimate_of_the_head_is_for_the_logits_of_one_chunk(kernel: str, logit: int) -> None:
    whole = work(MODEL, 4096, 1, micro_batch=1)
    numerics = replace(whole.numerics, loss_kernel=kernel)  # type: ignore[arg-type]

    def head(chunk: int) -> int:
        workload = replace(whole, numerics=replace(numerics, loss_chunk=chunk))
        return estimate_working_memory(MODEL, workload).parts[-1].forward

    assert head(128) == 128 * (MODEL.vocabulary * logit + 4 * MODEL.hidden)
    assert head(256) == 2 * head(128)
    assert head(1 << 20) == head(4096)


def test_the_estimate_counts_every_part_to_the_byte() -> None:
    """Two rotary tables of 128 values, ids, targets and positions, and what a layer computes."""
    whole = work(MODEL, 64, 2, micro_batch=2)
    workload = replace(whole, numerics=replace(whole.numerics, mlp_tile=32))
    memory = estimate_working_memory(MODEL, workload)
    tokens, layer = 128, MODEL.layers[0]
    attention = layer.query_width + layer.key_value_width

    assert memory.arguments == round_up(2 * 2 * 128 * tokens, EXTENT)
    assert memory.inputs == round_up((3 * 8 + 2 * 4) * tokens, EXTENT)
    embedding, body, head = memory.parts
    assert embedding.forward == 2 * tokens * MODEL.hidden
    assert embedding.backward == 2 * MODEL.vocabulary * MODEL.hidden
    assert body.forward == 2 * (2 * MODEL.hidden * tokens + 3 * layer.mlp_width * 32)
    backward = (9 * MODEL.hidden + attention) * tokens + 6 * layer.mlp_width * 32
    assert body.backward == 2 * (backward + layer.parameters(True))
    per_value = 6 if workload.has_head_sum else 2
    assert head.backward == head.forward + per_value * MODEL.vocabulary * MODEL.hidden
    names = [block.name for block in MODEL.blocks]
    assert [part.name for part in memory.parts] == [names[0], names[1], names[-1]]
