"""Plans count the bytes of quantized weights as they are stored, fetched and dequantized."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import WorkloadError
from penstock.machine.presets import preset
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.packed_weights import PackedLayout, Quantization, scratch_nbytes
from penstock.plan.budget import Budget
from penstock.plan.buffers import dequantized_nbytes
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import Traffic
from penstock.plan.workload import Numerics, Workload
from penstock.planner import make_plan
from penstock.planner.cost.compute import ComputeTime
from penstock.roles import Role
from penstock.units import GiB, round_up

WIDE, NARROW = (2048, 1024), (8, 1024)


def tensors(path: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(name=f"{path}.up.weight", shape=WIDE, trainable=False, linear=True),
        TensorSpec(name=f"{path}.down.weight", shape=WIDE[::-1], trainable=False, linear=True),
        TensorSpec(name=f"{path}.norm.weight", shape=(1024,), trainable=False),
        TensorSpec(name=f"{path}.lora_A.weight", shape=NARROW),
        TensorSpec(name=f"{path}.lora_B.weight", shape=(2048, 8)),
    )


def make_inventory(layers: int = 4) -> Inventory:
    table = TensorSpec(name="embed.weight", shape=(1000, 1024), trainable=False)
    head = TensorSpec(name="head.weight", shape=(1000, 1024), trainable=False, linear=True)
    return Inventory(
        model="m",
        hidden=1024,
        vocabulary=1000,
        blocks=(
            Block(name="embed", kind="embedding", tensors=(table,)),
            *(
                Block(
                    name=f"layers.{i}", kind="layer", tensors=tensors(f"layers.{i}"),
                    matmul_elements=4 << 20, query_width=1024, key_value_width=2048,
                    mlp_width=2048,
                )
                for i in range(layers)
            ),
            Block(name="head", kind="head", tensors=(head,), matmul_elements=1000 * 1024),
        ),
    )  # fmt: skip


def workload(quantize: Quantization | None, **changes: object) -> Workload:
    numerics = Numerics(micro_batch=1, loss_chunk=512, mlp_tile=4096, quantize=quantize)
    fields = {"context": 512, "batch": 2, "numerics": numerics} | changes
    return Workload(**fields)  # type: ignore[arg-type]


def test_frozen_linear_weights_of_layers_are_stored_as_packed_bytes() -> None:
    stored = workload("nf4").stored(make_inventory())
    layer = stored.blocks[1]
    assert [t.name for t in layer.quantized] == ["layers.0.up.weight", "layers.0.down.weight"]
    packed = round_up(PackedLayout(2 << 20).nbytes // 2, 256)
    assert layer.flat_elements(False) == 2 * packed + 1024
    assert layer.parameters(False) == (4 << 20) + 1024, "weights, however they are stored"
    assert not stored.blocks[0].quantized
    assert not stored.blocks[-1].quantized
    assert workload("nf4").stored(stored) is stored
    assert workload(None).stored(make_inventory()) == make_inventory()
    assert stored.fingerprint == make_inventory().fingerprint


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_packed_bytes(world: int) -> None:
    work = workload("nf4", world=world, batch=6, numerics=replace(
        workload("nf4").numerics, head_sum="micro"))  # fmt: skip
    layer = work.stored(make_inventory()).blocks[1]
    assert layer.flat_elements(False) == world * layer.shard_elements(False)
    offsets = layer.offsets(False).values()
    assert all(offset % (256 if world == 1 else 4096) == 0 for offset in offsets)


def test_plans_fetch_packed_bytes_and_have_memory_for_one_dequantized_layer() -> None:
    machine, inventory = preset("desktop-24gb"), make_inventory()
    budget = Budget(hbm=2 * GiB, dram=4 * GiB, cxl=0, nvme=())
    plans = {
        quantize: make_plan(inventory, workload(quantize), budget, machine).plan
        for quantize in (None, "nf4")
    }
    pools = {pool.what: pool.nbytes for pool in plans["nf4"].pools}
    weights, scratch = 2 * (4 << 20), round_up(scratch_nbytes(2 << 20), 4096)
    assert pools["dequantized weights"] == weights + scratch
    assert "dequantized weights" not in {pool.what for pool in plans[None].pools}
    stored = workload("nf4").stored(inventory)
    assert sum(dequantized_nbytes(stored, workload("nf4").formats())) == weights + scratch
    for plan in plans.values():
        plan.check_model(inventory)


def test_a_fetch_moves_the_packed_bytes() -> None:
    machine, inventory = preset("desktop-24gb"), make_inventory()
    budget = Budget(hbm=2 * GiB, dram=4 * GiB, cxl=0, nvme=())
    moved = {}
    for quantize in (None, "nf4"):
        work = workload(quantize)
        plan = make_plan(inventory, work, budget, machine).plan
        traffic = Traffic.of(inventory, work, plan.placement)
        fetch = Operation(Verb.FETCH, 1, (Role.WEIGHT,), "forward")
        (moved[quantize],) = traffic._copied_nbytes(fetch, ())
    assert moved["nf4"] < 0.3 * moved[None]


def test_dequantizing_takes_time_in_every_round_that_computes() -> None:
    from penstock.planner.cost.rates import Rates

    machine, inventory = preset("desktop-24gb"), make_inventory()
    rates = Rates.of(machine, "fp32", dtype="bf16", compiled=False)
    forward = Operation(Verb.FORWARD, 1, (), "forward")
    budget = Budget(hbm=2 * GiB, dram=4 * GiB, cxl=0, nvme=())
    placement = make_plan(inventory, workload(None), budget, machine).plan.placement
    seconds = {}
    for quantize in (None, "nf4", "int4"):
        work = workload(quantize)
        times = ComputeTime(work.stored(inventory), work, placement, rates)
        seconds[quantize] = times.seconds(forward)
    assert seconds["nf4"] == seconds["int4"] > seconds[None]


def test_quantizing_what_is_trained_is_refused() -> None:
    inventory = make_inventory()
    trained = replace(
        inventory,
        blocks=tuple(
            replace(block, tensors=tuple(replace(t, trainable=True) for t in block.tensors))
            for block in inventory.blocks
        ),
    )
    workload("nf4").check(inventory)
    with pytest.raises(WorkloadError, match="weights that are trained cannot be quantized"):
        workload("nf4").check(trained)
