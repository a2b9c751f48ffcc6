"""Plans for models with adapters: what is trained is in HBM, and frozen weights are streamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.model.inventory import Inventory, TensorSpec
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.plan import Plan
from penstock.plan.schedule import Verb
from penstock.planner import QUICK, PlanResult, make_plan
from penstock.planner.cost.flops import operations
from penstock.records import from_json, to_json
from penstock.roles import TRAINED, Role
from penstock.tiers import Tier
from penstock.units import GiB
from tests.support.machines import machine
from tests.support.models import llama, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=400 * GiB),)


def with_lora(inventory: Inventory, rank: int) -> Inventory:
    """Freeze all tensors, and add a pair of trained matrices to each matrix of a layer."""
    blocks = []
    for block in inventory.blocks:
        tensors = []
        for tensor in block.tensors:
            tensors.append(replace(tensor, trainable=False))
            if block.kind == "layer" and len(tensor.shape) == 2:
                out, into = tensor.shape
                base = tensor.name.removesuffix(".weight")
                tensors.append(TensorSpec(name=f"{base}.lora_A.weight", shape=(rank, into)))
                tensors.append(TensorSpec(name=f"{base}.lora_B.weight", shape=(out, rank)))
        blocks.append(replace(block, tensors=tuple(tensors)))
    return replace(inventory, blocks=tuple(blocks))


LORA = with_lora(llama("3b", 4096, 11008, 16, 4096, 1024, 32000, False), 16)


def planned(budget: Budget, **formats: object) -> PlanResult:
    return make_plan(LORA, work(LORA, 2048, 4, **formats), budget, machine(), effort=QUICK)


@pytest.mark.parametrize(
    ("budget", "tier"),
    [
        (Budget(hbm=7 * GiB, dram=16 * GiB), Tier.DRAM),
        (Budget(hbm=7 * GiB, dram=2 * GiB, nvme=NVME), Tier.NVME),
    ],
    ids=["DRAM", "NVMe"],
)
def test_adapters_and_their_states_are_in_hbm(budget: Budget, tier: Tier) -> None:
    result = planned(budget)
    layers = result.plan.placement.blocks[1:-1]
    streamed = [block for block in layers if block.is_split]
    assert streamed, "the weights do not fit in HBM"
    for block in layers:
        assert block.sweep == "gpu"
        for role in TRAINED:
            home = block.home(role)
            assert home is None or home.on(Tier.HBM) == home.nbytes
    assert any(block.touches(Role.FROZEN, tier) for block in streamed)
    moved = {(op.verb, op.roles) for op in result.cost.schedule.operations}
    assert (Verb.OFFLOAD, (Role.GRADIENT,)) not in moved
    assert not any(op.verb is Verb.SWEEP and not op.gpu for op in result.cost.schedule.operations)
    assert result.plan.bytes_per_parameter == pytest.approx(2.0, rel=0.1)


def test_a_plan_with_split_blocks_is_kept_by_a_file() -> None:
    plan = planned(Budget(hbm=7 * GiB, dram=16 * GiB)).plan
    again = from_json(Plan, to_json(plan), where="", error=PlanError)
    assert again == plan
    again.check_model(LORA)


def test_a_plan_whose_trained_tensors_are_not_in_hbm_is_refused() -> None:
    plan = planned(Budget(hbm=7 * GiB, dram=16 * GiB)).plan
    blocks = list(plan.placement.blocks)
    number = next(i for i, block in enumerate(blocks) if block.is_split)
    blocks[number] = replace(blocks[number], sweep="cpu")
    wrong = replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))
    with pytest.raises(PlanError, match="all that is trained must be in HBM"):
        wrong.check_model(LORA)


def test_backward_computes_gradients_of_trained_matrices_only() -> None:
    plain = llama("3b", 4096, 11008, 16, 4096, 1024, 32000, False).layers[0]
    frozen = replace(
        plain, tensors=tuple(replace(tensor, trainable=False) for tensor in plain.tensors)
    )
    forward, _ = operations(plain, 2048, Verb.FORWARD)
    whole, _ = operations(plain, 2048, Verb.BACKWARD)
    least, _ = operations(frozen, 2048, Verb.BACKWARD)
    adapter, _ = operations(LORA.layers[0], 2048, Verb.BACKWARD)
    assert (whole, least) == (3 * forward, 2 * forward)
    assert least < adapter < 1.05 * least
