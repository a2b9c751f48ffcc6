"""On a GPU, a step needs what its rehearsal measured, and never more than its plan."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.model_source import inspect_model
from penstock.engine.plan_choice import PlanChoice, PlanRequest, plan_request
from penstock.engine.prepare import prepare
from penstock.errors import DeviceMemoryError, InfeasibleError
from penstock.model.inventory import Inventory
from penstock.plan.buffers import BufferPool, saved_nbytes
from penstock.plan.build_schedule import step_schedule
from penstock.plan.cuda_allocator import SMALL_PAGE
from penstock.plan.lifetimes import weight_lifetimes
from penstock.plan.memory_cache import load_memory, memory_key
from penstock.plan.packing import pack
from penstock.plan.plan import Plan
from penstock.plan.working_memory import KEPT_GAPS, PartMemory, WorkingMemory
from penstock.probe.machine_choice import this_machine
from penstock.settings import Settings
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.engines import plain_model, tiny_config

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
NOTHING = WorkingMemory(
    parts=(PartMemory(name="layer", forward=0, backward=0),), libraries=0, gaps=0, context=MiB
)
"""Less working memory than any step needs."""

CONTEXT, BATCH, MICRO = 1000, 5, 2  # the last micro-batch is smaller


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch._dynamo.reset()


def settings(**more: Any) -> Settings:
    given = {"context": CONTEXT, "batch": BATCH, "micro_batch": str(MICRO)}
    return Settings.of(given | {"hbm": "6GiB", "dram": "8GiB"} | more)


def source(family: str = "llama") -> Any:
    return plain_model(tiny_config(family, **SHAPE))


def request_for(model: Any, **more: Any) -> PlanRequest:
    config, inventory = inspect_model(model, settings(**more))
    return plan_request(inventory, settings(**more), this_machine("cuda"), config=config)


def batch(packed: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, SHAPE["vocab_size"], (BATCH, CONTEXT))
    positions = torch.arange(CONTEXT) % (CONTEXT // 4 if packed else CONTEXT)
    return {"input_ids": ids, "position_ids": positions.expand(BATCH, CONTEXT).clone()}


def measured_by(engine: Engine, model: Any) -> WorkingMemory:
    found = load_memory(
        memory_key(model.config, engine.inventory, engine.workload, engine.device.name), "measured"
    )
    assert found is not None
    return found


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_steps_need_what_was_rehearsed(family: str) -> None:
    model = source(family)
    with prepare(model, settings=settings(), device="cuda") as engine:
        memory, graphs = measured_by(engine, model), compiled_graphs()
        work, plan = engine.workload, engine.plan
        rehearsed = memory.peak + work.micro_batches * memory.inputs
        rehearsed += -(-work.micro_batches // plan.placement.rounds) * memory.arguments
        rehearsed += saved_nbytes(work, plan.placement, memory)
        assert memory.saved
        most = 0
        for packed in (False, True):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.step(batch(packed))
            used = torch.cuda.max_memory_allocated() - before
            # Statistics of gradients and the loss take a few small tensors more.
            assert used <= rehearsed + 4 * MiB
            most = max(most, used)
            reserved = torch.cuda.max_memory_reserved() - engine.device.reserved_before
            assert reserved <= plan.allocator_nbytes + 22 * MiB
        kept = sum(block.kept for block in plan.placement.blocks)
        # Kept layers share memory with the parts that compute, as if each part needed the most.
        assert most >= (0.85 if kept else 0.9) * (rehearsed - kept * KEPT_GAPS)
        assert compiled_graphs() == graphs, "a step compiled something"


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_kept_layers_need_the_memory_that_was_planned_for_them(layers: int) -> None:
    """Each of them saves what its rehearsal measured, without gaps that grow with their number."""
    model = source()
    with prepare(model, settings=settings(), device="cuda") as engine:
        memory, plan = measured_by(engine, model), engine.plan
    blocks = list(plan.placement.blocks)
    assert any(block.kept for block in blocks), "the plan fills HBM with saved tensors"
    first = len(blocks) - 1 - layers
    for number, block in enumerate(blocks):
        kept = BATCH if first <= number < len(blocks) - 1 else 0
        blocks[number] = replace(block, kept=kept)
    changed = replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))
    changed = with_slots(changed, engine.inventory).with_memory(memory)
    tight = replace(changed, budget=replace(changed.budget, hbm=changed.peak(Tier.HBM)))
    with prepare(source(), plan=tight, settings=settings(), device="cuda") as again:
        for packed in (False, True, False):
            assert again.step(batch(packed)).isfinite()
        reserved = torch.cuda.max_memory_reserved() - again.device.reserved_before
        assert reserved <= tight.allocator_nbytes + 22 * MiB


def with_slots(plan: Plan, inventory: Inventory) -> Plan:
    """Return the plan with as much memory for weight slots as its schedule needs."""
    schedule = step_schedule(inventory, plan.placement)
    lifetimes = weight_lifetimes(schedule, plan.placement)
    slots = pack(lifetimes, refinements=0).nbytes
    pools = [pool for pool in plan.pools if pool.what != "weight slots"]
    new = [BufferPool(tier=Tier.HBM, what="weight slots", nbytes=slots)] if slots else []
    return replace(plan, pools=(*new, *pools))


def test_later_steps_allocate_nothing_new() -> None:
    with prepare(source(), settings=settings(), device="cuda") as engine:
        engine.step(batch())
        engine.step(batch())  # the first one with an optimizer sweep
        engine.step(batch(packed=True))
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for packed in (False, True, False):
            engine.step(batch(packed))
        gc.collect()
        assert torch.cuda.memory_allocated() == allocated
        # Small tensors of several streams are freed in any order, and may need one page more.
        assert torch.cuda.memory_reserved() <= reserved + SMALL_PAGE


def test_the_driver_reports_no_more_than_planned() -> None:
    with prepare(source(), settings=settings(), device="cuda") as engine:
        for packed in (False, True):
            engine.step(batch(packed))
        engine.evaluate([batch()])
        pools = {pool.what: pool.nbytes for pool in engine.plan.pools}
        outside = engine.device.nbytes_outside_torch()
        if outside is not None:  # None in some containers
            assert outside <= pools["CUDA context"]
        reserved = torch.cuda.max_memory_reserved() - engine.device.reserved_before
        assert reserved <= engine.plan.peak(Tier.HBM) - pools["CUDA context"]


def test_memory_comes_from_expandable_segments() -> None:
    configured = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    assert not any(os.environ.get(name) for name in configured), "unset these for the GPU tests"
    with prepare(source(), settings=settings(), device="cuda"):
        segments = torch.cuda.memory_snapshot()
        large = [s for s in segments if s["total_size"] > 64 * MiB]
        assert large
        assert all(segment["is_expandable"] for segment in large)


def test_a_plan_that_is_too_small_is_made_again_and_trains() -> None:
    model = source()
    request = request_for(model)
    hopeful = replace(request, source=lambda *_: NOTHING)
    least = _least(hopeful)
    tight = replace(hopeful, budget=replace(request.budget, hbm=least + 64 * MiB))
    choice = tight.make_plan()

    with pytest.raises(InfeasibleError) as raised:
        prepare(model, plan=choice, settings=settings(), device="cuda")

    enough = raised.value.least["hbm"]
    assert enough is not None
    assert enough > least
    exact = replace(hopeful, budget=replace(request.budget, hbm=enough))
    with prepare(source(), plan=exact.make_plan(), settings=settings(), device="cuda") as engine:
        assert engine.plan_change
        assert engine.plan.peak(Tier.HBM) <= enough
        for packed in (False, True, False):
            assert engine.step(batch(packed)).isfinite()


def _least(request: PlanRequest) -> int:
    with pytest.raises(InfeasibleError) as raised:
        replace(request, budget=replace(request.budget, hbm=MiB)).make_plan()
    least = raised.value.least["hbm"]
    assert least is not None
    return least


# Errors.


def huge(choice: PlanChoice) -> Plan:
    """Return a plan that needs more memory than any GPU has."""
    roomy = replace(choice.plan, budget=replace(choice.plan.budget, hbm=2048 * GiB))
    part = PartMemory(name="layer", forward=0, backward=1024 * GiB, saved=0)
    return roomy.with_memory(WorkingMemory(parts=(part,)))


def test_memory_that_another_process_holds_is_named_before_anything_is_allocated() -> None:
    hold = (
        "import sys, torch\n"
        "x = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.synchronize(); print('ready', flush=True); sys.stdin.read()"
    )
    model = source()
    plan = huge(request_for(model).make_plan())
    child = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = torch.cuda.memory_allocated()
        with pytest.raises(DeviceMemoryError) as raised:
            prepare(model, plan=plan, settings=settings(), device="cuda")
    finally:
        child.communicate()
    error = raised.value
    assert torch.cuda.memory_allocated() <= before + MiB
    assert error.largest is not None
    assert error.free <= error.largest < error.total + 2 * GiB
    if error.holders:  # the driver lists processes, under their numbers here or outside
        assert max(error.holders.values()) >= GiB
        assert "holds" in str(error)


def test_a_step_without_memory_is_a_penstock_error_and_can_be_repeated() -> None:
    with prepare(source(), settings=settings(), device="cuda") as engine:
        engine.step(batch())
        torch.cuda.empty_cache()
        engine.device.limit_memory(torch.cuda.memory_reserved() + MiB)
        before = torch.cuda.memory_allocated()
        with pytest.raises(DeviceMemoryError) as raised:
            engine.step(batch())
        assert raised.value.what == "a training step"
        assert raised.value.wanted
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + MiB, "the failed step leaked"
        engine.device.limit_memory(engine.device.reserved_before + engine.plan.allocator_nbytes)
        assert engine.step(batch()).isfinite()


def test_everything_is_released_after_a_failed_preparation() -> None:
    model = source()
    request = request_for(model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    small = replace(request, budget=replace(request.budget, hbm=3 * GiB))
    plan = replace(small, source=lambda *_: NOTHING).make_plan().plan
    tight = replace(plan, budget=replace(plan.budget, hbm=plan.peak(Tier.HBM)))
    with pytest.raises(Exception, match="pools: are too small"):
        prepare(model, plan=tight, settings=settings(), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    # Workspaces of cuBLAS stay for the process.
    assert torch.cuda.memory_allocated() <= before + 160 * MiB
