"""A rehearsal measures what a step needs, and the plan makes room for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.allocate import Programs
from penstock.engine.device import CpuDevice, PeakMemory
from penstock.engine.engine import Engine
from penstock.engine.model_source import inspect_model
from penstock.engine.plan_choice import PlanRequest, fit_plan
from penstock.engine.prepare import choose_plan, prepare
from penstock.engine.rehearsal import rehearse
from penstock.engine.step_parts import HeadBackward
from penstock.errors import DeviceMemoryError, InfeasibleError, PlanError
from penstock.model.meta_model import build_model
from penstock.model.split import SplitModel
from penstock.plan.budget import Budget
from penstock.plan.buffers import PlannedRoom
from penstock.plan.cuda_allocator import PAGE
from penstock.plan.memory_cache import load_memory, memory_key
from penstock.plan.plan import Plan
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.roles import Role
from penstock.settings import Settings
from penstock.tiers import Tier
from penstock.units import GiB, KiB, MiB
from tests.equivalence.compiled import compile_by, every_batch, graphs
from tests.equivalence.runs import FROZEN, RESIDENT, Setup
from tests.support.engines import inventory, plain_model, tiny_config, workload
from tests.support.machines import machine
from tests.support.models import model, work

SMALL: dict[str, Any] = {"context": 32, "batch": 4, "device": "cpu"}
BUDGET = {"hbm": "64MiB", "dram": "64MiB"}
TIGHT = {"hbm": "3MiB", "dram": "64MiB"}


def llama() -> Any:
    return plain_model(tiny_config("llama"))


def split(family: str = "llama") -> SplitModel:
    config = tiny_config(family)
    bare = build_model(config, torch.bfloat16, torch.device("cpu"))
    return SplitModel(bare, inventory(config, ()), mlp_tile=4096)


class Gauge(CpuDevice):
    """A device on which every part needs as much memory as a test says."""

    def __init__(self, *peaks: PeakMemory, context: int | None = None) -> None:
        super().__init__()
        self.peaks, self.measured, self.limits = peaks, 0, list[int | None]()
        self.context = context

    def measure_peak(self, work: Callable[[], None]) -> PeakMemory:
        work()
        self.measured += 1
        return self.peaks[(self.measured - 1) % len(self.peaks)]

    def limit_memory(self, nbytes: int | None) -> None:
        self.limits.append(nbytes)

    def nbytes_outside_torch(self) -> int | None:
        return self.context


# Measuring.


def test_every_part_is_measured_and_announced() -> None:
    lines: list[tuple[int, int, str]] = []
    model = split("gemma2")

    memory = rehearse(
        model, model.inventory, workload(), CpuDevice(), progress=lambda *line: lines.append(line)
    )

    names = [block.name for block in model.inventory.blocks]
    # Two kinds of layers, which differ in their attention.
    assert [part.name for part in memory.parts] == [*names[:3], names[-1]]
    assert memory.origin == "measured"
    assert all(part.backward > 0 for part in memory.parts)
    assert memory.inputs > 0
    assert memory.arguments > 0
    total = lines[0][1]
    assert [done for done, *_ in lines] == list(range(total))
    assert f"rehearsing backward of {names[1]} of packed rows" in [text for *_, text in lines]


def test_a_part_is_measured_without_what_the_plan_has_elsewhere() -> None:
    model, work = split(), workload()
    memory = rehearse(model, model.inventory, work, CpuDevice())

    (head,) = (part for part in memory.parts if part.name == model.inventory.blocks[-1].name)
    chunk = min(work.numerics.loss_chunk, work.numerics.micro_batch * work.context)
    logits = 4 * chunk * model.inventory.vocabulary
    weights = 2 * model.inventory.vocabulary * model.inventory.hidden
    assert head.forward >= logits
    assert head.backward >= head.forward + weights, "without the gradient of its weights"
    assert head.backward < 4 * logits + 2 * weights


def test_the_largest_figures_count() -> None:
    device = Gauge(PeakMemory(5 * MiB, 9 * MiB, 0), PeakMemory(7 * MiB, 8 * MiB, 0))
    model = split()

    memory = rehearse(model, model.inventory, workload(), device)

    assert memory.peak == 7 * MiB
    assert memory.gaps == 2 * MiB + 20 * MiB
    assert memory.context is None


def test_the_context_is_measured_after_all_kernels_are_loaded() -> None:
    device = Gauge(PeakMemory(MiB, MiB, 0), context=600 * MiB)
    model = split()

    memory = rehearse(model, model.inventory, workload(), device)

    assert memory.context == 632 * MiB


def test_random_numbers_of_the_user_are_not_drawn() -> None:
    model = split()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    rehearse(model, model.inventory, workload(), CpuDevice())

    assert torch.equal(torch.rand(4), expected)


def test_weights_and_tensors_are_dropped() -> None:
    model = split()
    device = Gauge(PeakMemory(MiB, MiB, 0))

    rehearse(model, model.inventory, workload(), device)

    holders = [m._parameters.values() for layer in model.layers for m in layer.modules()]
    assert all(parameter is None for values in holders for parameter in values)
    assert device.limits[-1] is None


def test_a_part_beyond_the_limit_is_measured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Gauge(PeakMemory(3 * MiB, 3 * MiB, 0))
    plain, tried = HeadBackward.run, list[int | None]()

    def run(self: HeadBackward) -> None:
        tried.append(device.limits[-1])
        if device.limits[-1] is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        plain(self)

    monkeypatch.setattr(HeadBackward, "run", run)
    model = split()

    memory = rehearse(model, model.inventory, workload(), device, limit=MiB)

    assert tried == [MiB, None, None]
    assert memory.peak == 3 * MiB


@pytest.mark.parametrize(
    ("needs", "gaps"), [(False, 30 * MiB), (True, 90 * MiB + PAGE)], ids=["kept", "needed"]
)
def test_pages_that_the_allocator_only_keeps_are_not_counted(
    needs: bool, gaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator reserves 90 MiB too many, where the plan has 30 MiB for gaps."""
    device = Gauge(PeakMemory(10 * MiB, 100 * MiB, 0))
    plain, tried = HeadBackward.run, list[int | None]()

    def run(self: HeadBackward) -> None:
        tried.append(device.limits[-1])
        if needs and len(tried) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        plain(self)

    monkeypatch.setattr(HeadBackward, "run", run)
    model, room = split(), PlannedRoom(10 * MiB, 30 * MiB)

    memory = rehearse(model, model.inventory, workload(), device, limit=GiB, room=room)

    assert tried == [GiB, GiB, device.memory().reserved + 40 * MiB]
    assert (memory.peak, memory.gaps) == (10 * MiB, gaps)


def test_a_part_that_the_device_has_no_memory_for_is_a_penstock_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: HeadBackward) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")

    monkeypatch.setattr(HeadBackward, "run", refuse)

    with pytest.raises(DeviceMemoryError, match="the engine"):
        prepare(llama(), rehearse=True, budget=BUDGET, **SMALL)


# Plans that are too small.


def measured(nbytes: int, **changes: Any) -> WorkingMemory:
    part = PartMemory(name="model.layers.0", forward=0, backward=nbytes)
    return WorkingMemory(parts=(part,), origin="measured", **changes)


@pytest.fixture(scope="module")
def request_() -> PlanRequest:
    inventory = model("qwen2.5-3b")
    budget = Budget(hbm=16 * GiB, dram=60 * GiB)
    return PlanRequest(inventory, work(inventory, 4096, 4), budget, machine())


@pytest.fixture(scope="module")
def plan(request_: PlanRequest) -> Plan:
    return request_.make_plan().plan


def too_much(plan: Plan) -> int:
    """Return an amount of working memory for which the plan's budget is 1 GiB short."""
    return pool(plan, "working memory") + plan.budget.hbm - plan.peak(Tier.HBM) + GiB


def pool(plan: Plan, what: str) -> int:
    return sum(each.nbytes for each in plan.pools if each.what == what)


def test_a_plan_that_is_large_enough_stays(plan: Plan, request_: PlanRequest) -> None:
    same = measured(pool(plan, "working memory") - MiB)

    assert fit_plan(plan, request_, request_.inventory, same) == (plan, "")
    assert fit_plan(plan, None, request_.inventory, same) == (plan, "")


def test_noise_of_a_measurement_changes_no_plan(plan: Plan, request_: PlanRequest) -> None:
    exact = replace(plan, budget=replace(plan.budget, hbm=plan.peak(Tier.HBM)))
    same = pool(plan, "working memory") + pool(plan, "batch and layer arguments")

    assert fit_plan(exact, None, request_.inventory, measured(same + 10 * MiB)) == (exact, "")
    with pytest.raises(PlanError):
        fit_plan(exact, None, request_.inventory, measured(same + 20 * MiB))


def test_a_plan_with_room_in_its_budget_keeps_its_placement(
    plan: Plan, request_: PlanRequest
) -> None:
    roomy = replace(plan, budget=replace(plan.budget, hbm=plan.peak(Tier.HBM) + GiB))
    more = measured(pool(plan, "working memory") + GiB // 2)

    grown, change = fit_plan(roomy, None, request_.inventory, more)

    assert grown.placement == plan.placement
    assert pool(grown, "working memory") == more.peak
    assert grown.peak(Tier.HBM) <= grown.budget.hbm
    assert "the HBM budget has room for" in change


def test_a_larger_context_leaves_less_for_torch(plan: Plan, request_: PlanRequest) -> None:
    roomy = replace(plan, budget=replace(plan.budget, hbm=plan.peak(Tier.HBM) + GiB))
    context = pool(plan, "CUDA context") + 100 * MiB

    grown, _ = fit_plan(roomy, None, request_.inventory, measured(MiB, context=context))

    assert pool(grown, "CUDA context") == context
    assert grown.allocator_nbytes == roomy.allocator_nbytes - 100 * MiB


def test_a_plan_that_is_short_is_made_again(plan: Plan, request_: PlanRequest) -> None:
    more = measured(too_much(plan))

    again, change = fit_plan(plan, request_, request_.inventory, more)

    assert again.placement != plan.placement
    assert again.workload == plan.workload, "the numerics changed"
    assert again.budget == plan.budget
    assert pool(again, "working memory") == more.peak
    assert again.peak(Tier.HBM) <= plan.budget.hbm
    assert "planned again" in change
    assert "\n" not in change


def test_a_plan_that_cannot_fit_names_the_least_budget(plan: Plan, request_: PlanRequest) -> None:
    more = measured(20 * GiB)

    with pytest.raises(InfeasibleError) as raised:
        fit_plan(plan, request_, request_.inventory, more)

    least = raised.value.least["hbm"]
    assert least is not None
    assert least > 20 * GiB
    assert "the rehearsal measured 20.0 GiB of working memory (model.layers.0)" in str(raised.value)
    enough = replace(request_, budget=replace(request_.budget, hbm=least), source=lambda *_: more)
    assert enough.make_plan().plan.peak(Tier.HBM) <= least


def test_a_plan_that_the_user_gave_is_not_changed(plan: Plan, request_: PlanRequest) -> None:
    more = measured(too_much(plan))

    with pytest.raises(PlanError, match="penstock plan"):
        fit_plan(plan, None, request_.inventory, more)


def memory_with_saved(saved: int, head: int = 900) -> WorkingMemory:
    sizes = {"embed": (64, 300), "layer": (1100, 1600), "head": (600, head)}
    parts = tuple(
        PartMemory(
            name=name, forward=forward * MiB, backward=backward * MiB,
            saved=saved if name == "layer" else None,
        )
        for name, (forward, backward) in sizes.items()
    )  # fmt: skip
    return WorkingMemory(parts=parts, origin="measured")


@pytest.fixture(scope="module")
def keeping(request_: PlanRequest) -> Plan:
    """A plan that fills its budget with kept forward passes, also of layers that are streamed."""
    traced = memory_with_saved(1000 * MiB)
    budget = replace(request_.budget, hbm=40 * GiB)
    plan = replace(request_, source=lambda *_: traced, budget=budget).make_plan().plan
    return replace(plan, budget=replace(budget, hbm=plan.peak(Tier.HBM)))


def kept(plan: Plan) -> list[int]:
    return [block.kept for block in plan.placement.blocks]


def test_a_plan_that_the_user_gave_recomputes_more_if_it_is_short(
    keeping: Plan, request_: PlanRequest
) -> None:
    more = memory_with_saved(1060 * MiB)

    fitted, change = fit_plan(keeping, None, request_.inventory, more)

    before, after = kept(keeping), kept(fitted)
    assert 2 < sum(after) < sum(before)
    assert after[after.index(1) :] == before[after.index(1) :], "the first layers go first"
    assert fitted.peak(Tier.HBM) <= keeping.budget.hbm
    assert fitted.workload == keeping.workload
    assert f"{sum(after)} forward passes are kept in HBM instead of {sum(before)}" in change
    too_large = memory_with_saved(1000 * MiB, head=40 * 1024)
    with pytest.raises(PlanError, match="penstock plan"):
        fit_plan(keeping, None, request_.inventory, too_large)


@pytest.mark.parametrize("saved", [1010, 1200, 2500])
def test_a_plan_that_recomputes_more_has_the_buffers_of_its_new_schedule(
    saved: int, keeping: Plan, request_: PlanRequest
) -> None:
    """Weights of kept layers stay in their slots, and those of recomputed layers do not."""
    inventory, more = request_.inventory, memory_with_saved(saved * MiB)
    streamed = [block for block in keeping.placement.blocks if block.kept and block.streamed]
    assert any(not block.all_on(Role.WEIGHT, Tier.HBM) for block in streamed)

    fitted, _ = fit_plan(keeping, None, inventory, more)

    programs = Programs.of(fitted, inventory)
    assert kept(fitted) != kept(keeping)
    assert pool(fitted, "weight slots") == programs.nbytes("weights")
    assert pool(fitted, "weight slots") < pool(keeping, "weight slots")
    assert pool(fitted, "gradient buffers") == programs.nbytes("gradients")
    assert fit_plan(fitted, None, inventory, more) == (fitted, "")


# In `prepare`.


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Make every part need some memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_need(nbytes: int) -> None:
        def measure(self: CpuDevice, work: Callable[[], None]) -> PeakMemory:
            work()
            return PeakMemory(nbytes, nbytes, 0)

        monkeypatch.setattr(CpuDevice, "measure_peak", measure)

    return set_need


def resident(engine: Engine) -> int:
    return engine.plan.at_rest(Tier.HBM)


def test_prepare_plans_again_within_the_budget(needs: Callable[[int], None]) -> None:
    with prepare(llama(), budget=TIGHT, **SMALL) as engine:
        before, planned = resident(engine), engine.plan
        assert engine.plan_change == ""
    spare = planned.budget.hbm - planned.peak(Tier.HBM)
    needs(pool(planned, "working memory") + spare + 100 * KiB)

    with prepare(
        llama(), budget={"hbm": "3MiB", "dram": "64MiB"}, rehearse=True, **SMALL
    ) as engine:
        assert "planned again" in engine.plan_change
        assert resident(engine) < before
        assert engine.step({"input_ids": torch.arange(4 * 32).view(4, 32)}).isfinite()


def test_prepare_refuses_a_given_plan_that_is_short(needs: Callable[[int], None]) -> None:
    settings = Settings.of({"context": 32, "batch": 4, **TIGHT})
    config, blocks = inspect_model(llama(), settings)
    choice = choose_plan(blocks, settings, config=config, device="cpu")
    needs(3 * MiB)

    with pytest.raises(PlanError, match=r"^pools: are too small"):
        prepare(llama(), plan=choice.plan, rehearse=True, settings=settings, device="cpu")
    # The same plan, made for the budgets, may be made again; nothing fits in 3 MiB.
    with pytest.raises(InfeasibleError):
        prepare(llama(), plan=choice, rehearse=True, settings=settings, device="cpu")


def test_a_live_model_survives_a_refusal(needs: Callable[[int], None]) -> None:
    source = llama()
    ids = torch.arange(3, 19)[None]
    logits = source(input_ids=ids).logits
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    needs(3 * MiB)

    with pytest.raises(InfeasibleError):
        prepare(source, budget=TIGHT, rehearse=True, **SMALL)

    assert torch.equal(source(input_ids=ids).logits, logits)
    assert all(torch.equal(weights[name], tensor) for name, tensor in source.state_dict().items())
    with prepare(source, budget=BUDGET, rehearse=True, **SMALL) as engine:
        assert engine.step({"input_ids": torch.arange(4 * 32).view(4, 32)}).isfinite()
        name = "model.layers.0.self_attn.q_proj.weight"
        assert engine.state[name]["weight"].shape == weights[name].shape


def test_what_was_measured_is_saved_unless_the_loss_is_the_users(
    needs: Callable[[int], None],
) -> None:
    def loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -log_probs.sum()

    needs(123 * KiB)
    for function in (loss, None):
        source = llama()
        with prepare(source, rehearse=True, budget=BUDGET, loss=function, **SMALL) as engine:
            key = memory_key(source.config, engine.inventory, engine.workload, "cpu")
        found = load_memory(key, "measured")
        assert (found is None) == (function is loss)
    assert found is not None
    assert found.peak == 124 * KiB


def test_a_cpu_rehearses_only_on_request() -> None:
    lines: list[str] = []
    for rehearsed in (None, True):
        prepare(
            llama(), budget=BUDGET, rehearse=rehearsed,
            progress=lambda done, total, text: lines.append(text), **SMALL,
        ).close()  # fmt: skip
        assert any("rehearsing" in line for line in lines) == bool(rehearsed)
    assert lines[-1] == "loading weights"


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_steps_after_a_rehearsal_compile_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_by(backend, monkeypatch)
    setup = Setup.of("llama", compiled=True, attention="varlen")
    plan = setup.plan(RESIDENT, tmp_path)

    with prepare(setup.source, plan=plan, freeze=FROZEN, device="cpu", rehearse=True) as engine:
        rehearsed = graphs()
        assert rehearsed > 0
        for batch in every_batch(setup):
            engine.step(batch)
        assert graphs() == rehearsed
