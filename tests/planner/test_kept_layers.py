"""Plans fill HBM with what forward passes save, where that makes steps faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.machine.presets import preset
from penstock.plan.budget import Budget
from penstock.plan.buffers import SAVED, saved_nbytes
from penstock.plan.plan import Plan
from penstock.plan.schedule import Operation, Verb
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.plan.workload import Workload
from penstock.planner import QUICK, PlanResult, make_plan
from penstock.planner.cost.compute import ComputeTime
from penstock.planner.cost.rates import Rates
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import FillStrategy, fill
from penstock.planner.kept_layers import most_kept, with_kept
from penstock.planner.plan_view import plan_json, summary
from penstock.records import from_json, to_json
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.models import llama, work

MODEL = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)
MEMORY = WorkingMemory(
    parts=(
        PartMemory(name="embed", forward=64 * MiB, backward=300 * MiB),
        PartMemory(name="layer", forward=1100 * MiB, backward=1600 * MiB, saved=1000 * MiB),
        PartMemory(name="head", forward=600 * MiB, backward=900 * MiB),
    ),
    origin="traced",
)
MACHINE = preset("h200")


def planned(
    hbm: int, workload: Workload | None = None, memory: WorkingMemory = MEMORY
) -> PlanResult:
    workload = workload or work(MODEL, 4096, 4)
    budget = Budget(hbm=hbm, dram=64 * GiB)
    return make_plan(MODEL, workload, budget, MACHINE, effort=QUICK, source=lambda *_: memory)


def kept(plan: Plan) -> list[int]:
    return [block.kept for block in plan.placement.blocks]


def test_new_workloads_may_keep() -> None:
    assert work(MODEL, 4096, 4).may_keep


def test_with_much_hbm_nothing_is_recomputed_and_steps_are_faster() -> None:
    result, without = planned(100 * GiB), planned(100 * GiB, memory=unknown())

    assert kept(result.plan) == [0, *[1] * 12, 0]
    assert kept(without.plan) == [0] * 14
    assert result.cost.step_seconds < 0.9 * without.cost.step_seconds
    assert "recompute: 12 of 12 layers kept" in summary(result, MACHINE)
    assert "recompute" not in summary(without, MACHINE)
    assert plan_json(result)["recompute"] == {
        "layers": 12, "kept_layers": 12, "passes": 12, "kept_passes": 12, "saved_attention": {},
    }  # fmt: skip


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("hbm", range(6, 40, 7))
def test_the_budget_is_never_exceeded_and_the_last_layers_are_kept_first(
    hbm: int, batch: int
) -> None:
    result = planned(hbm * GiB, work(MODEL, 4096, batch, micro_batch=4))
    plan = result.plan

    assert plan.peak(Tier.HBM) <= hbm * GiB
    layers = kept(plan)[1:-1]
    assert layers == sorted(layers)
    assert dict(plan.parts(Tier.HBM)).get(SAVED, 0) == saved_nbytes(
        plan.workload, plan.placement, MEMORY
    )
    for block in plan.placement.blocks:
        assert not block.kept or block.all_on(Role.ACTIVATION, Tier.HBM)
    plan.check_model(MODEL)
    slower = planned(hbm * GiB, plan.workload, unknown()).cost.step_seconds
    assert result.cost.step_seconds <= slower * (1 + 1e-9)


def unknown() -> WorkingMemory:
    return replace(MEMORY, parts=tuple(replace(part, saved=None) for part in MEMORY.parts))


@pytest.mark.parametrize("why", ["estimated", "unknown", "earlier numerics"])
def test_nothing_is_kept_if_its_size_is_not_known_or_numerics_forbid_it(why: str) -> None:
    workload = work(MODEL, 4096, 4)
    memory = {"estimated": replace(MEMORY, origin="estimated"), "unknown": unknown()}
    if why == "earlier numerics":
        workload = replace(workload, numerics=replace(workload.numerics, forward="inference"))

    assert not any(kept(planned(100 * GiB, workload, memory.get(why, MEMORY)).plan))


def test_a_plan_with_kept_layers_is_read_back_and_plans_without_the_field_still_load(
    tmp_path: Path,
) -> None:
    plan = planned(100 * GiB).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan

    data = json.loads(json.dumps(to_json(planned(100 * GiB, memory=unknown()).plan)))
    for block in data["placement"]["blocks"]:
        block.pop("kept", None)
    data["workload"]["numerics"].pop("forward")
    old = from_json(Plan, data, error=PlanError)
    assert not any(kept(old))
    assert old.workload.numerics.forward == "inference"


def test_saved_tensors_of_the_last_layers_use_working_memory_that_is_free_then() -> None:
    """Recomputing needs 1,600 MiB, but not before the saved tensors of later layers are gone."""
    evaluator = PlanEvaluator(
        MODEL, work(MODEL, 4096, 4), MACHINE, Budget(hbm=40 * GiB, dram=64 * GiB),
        source=lambda *_: MEMORY,
    )  # fmt: skip
    base = fill(evaluator, FillStrategy())
    assert base is not None

    def saved(*passes: int) -> int:
        candidate = replace(base, kept=(0, *passes, 0))
        return saved_nbytes(evaluator.workload, evaluator.placement(candidate), MEMORY) // MiB

    assert saved(*[0] * 12) == 0
    # At the loss, 1,000 MiB are saved, and the head needs 900 of 1,600.
    assert saved(*[0] * 11, 1) == 300
    assert saved(*[0] * 10, 1, 1) == 1300
    # All other layers are recomputed while the first one's tensors exist.
    assert saved(1, *[0] * 11) == 1000


def test_more_kept_passes_need_more_hbm_and_as_many_as_fit_are_found() -> None:
    evaluator = PlanEvaluator(
        MODEL, work(MODEL, 4096, 8, micro_batch=4), MACHINE, Budget(hbm=16 * GiB, dram=64 * GiB),
        source=lambda *_: MEMORY,
    )  # fmt: skip
    base = fill(evaluator, FillStrategy())
    assert base is not None

    most = most_kept(evaluator, base)

    passes = sum(most.kept)
    assert 0 < passes < 24
    assert not evaluator.shortage(most)
    assert evaluator.shortage(with_kept(evaluator, base, passes + 1))
    # The quick count is no less than the exact one.
    assert evaluator.quick_hbm_nbytes(most) >= evaluator.total_nbytes(most)[Tier.HBM]


def test_a_kept_backward_takes_as_long_as_a_recomputed_one_less_the_forward() -> None:
    workload = work(MODEL, 4096, 8, micro_batch=4)
    evaluator = PlanEvaluator(
        MODEL, workload, MACHINE, Budget(hbm=60 * GiB, dram=64 * GiB), source=lambda *_: MEMORY
    )
    base = fill(evaluator, FillStrategy())
    assert base is not None
    rates = Rates.of(MACHINE, "fp32", dtype="bf16", compiled=True)

    def seconds(verb: Verb, passes: int) -> float:
        placement = evaluator.placement(replace(base, kept=(0, *[0] * 11, passes, 0)))
        phase = "forward" if verb is Verb.FORWARD else "backward"
        operation = Operation(verb, 12, (), phase)
        return ComputeTime(evaluator.inventory, workload, placement, rates).seconds(operation)

    forward = seconds(Verb.FORWARD, 0)
    assert forward == seconds(Verb.FORWARD, 2)
    for passes, share in ((0, 0.0), (1, 0.5), (2, 1.0)):
        expected = seconds(Verb.BACKWARD, 0) - share * forward
        assert seconds(Verb.BACKWARD, passes) == pytest.approx(expected)
