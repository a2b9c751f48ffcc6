"""Plans respect their budgets, are deterministic, and are close to the optimum."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from penstock.errors import InfeasibleError
from penstock.machine.presets import preset
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, PathBudget, parse_budget
from penstock.plan.buffers import ALLOCATOR_PAGES, CUDA_CONTEXT
from penstock.plan.working_memory import ASSUMED_GAPS, LIBRARIES
from penstock.planner import QUICK, fits, make_plan, planner
from penstock.planner.candidate import BlockLocations, Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.search import search
from penstock.roles import EXTENT, TRAINED
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, model, work

NVME = (PathBudget(path="/mnt/nvme", nbytes=2 * TiB),)
BUDGETS = [
    Budget(hbm=160 * GiB, dram=200 * GiB),
    Budget(hbm=12 * GiB, dram=160 * GiB),
    Budget(hbm=12 * GiB, dram=6 * GiB, cxl=200 * GiB),
    Budget(hbm=12 * GiB, dram=6 * GiB, nvme=NVME),
    Budget(hbm=12 * GiB, dram=6 * GiB, cxl=4 * GiB, nvme=NVME),
]
FORMATS = [{"moments": "fp32"}, {"moments": "int8"}, {"dtype": "fp16"}]
TINY = {
    "1b": llama("1b", 2048, 8192, 12, 2048, 512, 32000, False),
    "1b-tied": llama("1b-tied", 2048, 8192, 12, 2048, 512, 32000, True),
}
GRID = [
    *itertools.product(["1b", "1b-tied"], BUDGETS, FORMATS),
    *itertools.product(["llama-3.1-8b"], [Budget(hbm=24 * GiB, dram=64 * GiB, nvme=NVME)], FORMATS),
]


@pytest.mark.parametrize(("name", "budget", "formats"), GRID)
def test_the_peak_is_the_sum_of_its_parts_and_within_every_budget(
    name: str, budget: Budget, formats: dict[str, str]
) -> None:
    inventory = TINY.get(name) or model(name)
    workload = work(inventory, 4096, 4, **formats)

    plan = make_plan(inventory, workload, budget, machine(), effort=QUICK).plan

    for tier in Tier:
        assert sum(nbytes for _, nbytes in plan.parts(tier)) == plan.peak(tier)
        assert plan.peak(tier) <= budget.of(tier)
    # Every role of every block is stored completely.
    formats_used = workload.formats(plan.placement.rounds)
    for block, at in zip(inventory.blocks, plan.placement.blocks, strict=True):
        for role in TRAINED:
            home = at.home(role)
            elements, pieces = (
                block.flat_elements(True),
                block.pieces(plan.placement.piece_elements),
            )
            padding = (home.nbytes if home else 0) - formats_used.nbytes(role, elements)
            assert 0 <= padding <= len(pieces) * EXTENT
    assert plan.bytes_per_parameter == pytest.approx(formats_used.per_parameter, rel=1e-4)


def test_a_plan_is_the_same_in_every_process() -> None:
    code = (
        "import sys; from tests.planner import test_planner as t; sys.stdout.write(t.plan_text())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin", "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip

    assert runs[0] == runs[1] == plan_text()


def plan_text() -> str:
    inventory = TINY["1b"]
    budget = Budget(hbm=10 * GiB, dram=6 * GiB, cxl=4 * GiB, nvme=NVME)
    result = make_plan(inventory, work(inventory, 4096, 4), budget, machine(), effort=QUICK)
    return repr(result.plan) + repr(result.cost.step_seconds)


# Comparison with exhaustive search on small cases.


def small_cases() -> list[tuple[str, Inventory, Budget, dict[str, float]]]:
    tiny = llama("tiny", 1024, 4096, 2, 1024, 256, 8192, False)
    # Buffers, working memory and the CUDA context; then what allocator and libraries add.
    fixed = CUDA_CONTEXT + 423 * MiB + ALLOCATOR_PAGES + ASSUMED_GAPS + LIBRARIES
    return [
        ("too little dram, some cxl", tiny,
         Budget(hbm=fixed, dram=300 * MiB, cxl=500 * MiB), {}),
        ("too little dram, a fast disk", tiny,
         Budget(hbm=fixed, dram=450 * MiB, nvme=NVME), {"disk": 12e9}),
        ("too little dram, a slow disk", tiny,
         Budget(hbm=fixed + 120 * MiB, dram=450 * MiB, nvme=NVME), {"disk": 1e9}),
        ("a slow link", tiny,
         Budget(hbm=fixed + 300 * MiB, dram=2 * GiB), {"link": 2e9}),
        ("slow memory", tiny,
         Budget(hbm=fixed + 120 * MiB, dram=2 * GiB, cxl=2 * GiB), {"dram": 10e9}),
    ]  # fmt: skip


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case[0])
def test_the_search_is_within_two_percent_of_the_best_placement(
    case: tuple[str, Inventory, Budget, dict[str, float]],
) -> None:
    _, inventory, budget, speeds = case
    evaluator = PlanEvaluator(
        inventory, work(inventory, 512, 4), machine(**speeds), budget, piece_elements=1 << 21
    )

    exact = min(evaluator.seconds(candidate) for candidate in every_candidate(evaluator))
    candidate = search(evaluator)

    assert exact < math.inf, "some placement must fit"
    assert candidate is not None
    assert evaluator.seconds(candidate) <= 1.02 * exact


def every_candidate(evaluator: PlanEvaluator) -> list[Candidate]:
    """Return all placements of four blocks that store a gradient with its states."""
    host = {Location.DRAM: Tier.DRAM, Location.CXL: Tier.CXL, Location.NVME: Tier.NVME}
    tiers = [location for location, tier in host.items() if evaluator.capacity(tier)]
    states = [*tiers, Location.MIX] if Location.CXL in tiers else tiers
    whole = (Location.HBM, Location.HBM, Location.HBM)
    trios = [whole, *((w, s, s if s in tiers else Location.DRAM) for w in tiers for s in states)]
    inputs = [*tiers, Location.HBM]
    # The embedding and the head are each in one location.
    outer = [t for t in trios if t[0] is t[1] or t is whole]
    return [
        Candidate(
            (BlockLocations(*first, None), BlockLocations(*one, i), BlockLocations(*two, i),
             BlockLocations(*last, None)),
        )
        for first, one, two, last in itertools.product(outer, trios, trios, outer)
        for i in inputs
        if plausible(evaluator, first, one, two, last)
    ]  # fmt: skip


def plausible(evaluator: PlanEvaluator, *trios: tuple[Location, Location, Location]) -> bool:
    """Return whether the stored bytes fit, so that only those candidates are timed."""
    locations = tuple(BlockLocations(*trio, None) for trio in trios)
    stored = evaluator.stored_nbytes(Candidate(locations))
    return all(stored[tier] <= evaluator.capacity(tier) for tier in Tier)


# Effects of budgets.


def test_a_large_hbm_holds_nearly_everything_if_the_host_is_slow() -> None:
    inventory = model("qwen2.5-3b")
    slow = machine(link=2e9, dram=10e9)
    plan = make_plan(
        inventory, work(inventory, 4096, 4), Budget(hbm=160 * GiB, dram=200 * GiB), slow
    ).plan

    # Not everything: a block that the CPU updates in time saves the GPU that work.
    assert plan.at_rest(Tier.HBM) > 0.75 * 14 * inventory.parameters()


def test_hbm_holds_what_does_not_fit_in_dram() -> None:
    inventory = model("qwen2.5-3b")
    plan = make_plan(
        inventory, work(inventory, 4096, 4), Budget(hbm=40 * GiB, dram=16 * GiB), machine()
    ).plan

    assert plan.peak(Tier.DRAM) <= 16 * GiB
    assert plan.at_rest(Tier.HBM) > 20 * GiB


def test_more_dram_is_never_slower() -> None:
    inventory = TINY["1b"]
    workload, box = work(inventory, 1024, 4), machine(disk=3e9)
    seconds = [
        make_plan(inventory, workload, Budget(hbm=5 * GiB, dram=d * GiB, nvme=NVME), box)
        .cost.step_seconds
        for d in (6, 9, 18)
    ]  # fmt: skip

    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.8 * seconds[0]


def test_a_step_has_several_rounds_if_activations_do_not_fit() -> None:
    inventory = model("llama-3.1-8b")
    workload = work(inventory, 32768, 32)
    plan = make_plan(
        inventory, workload, Budget(hbm=40 * GiB, dram=192 * GiB), machine(), effort=QUICK
    ).plan

    # One round needs 256 GiB of activations. Several rounds need fp32 gradients.
    assert plan.placement.rounds > 1
    assert plan.bytes_per_parameter == pytest.approx(16, rel=1e-3)
    assert sum(plan.activations(tier) for tier in Tier) <= 128 * GiB


def test_budgets_do_not_change_the_numerics() -> None:
    inventory = model("qwen2.5-3b")
    workload = work(inventory, 4096, 4)
    budgets = [Budget(hbm=160 * GiB, dram=GiB), Budget(hbm=14 * GiB, dram=12 * GiB, nvme=NVME)]

    plans = [make_plan(inventory, workload, b, machine(), effort=QUICK).plan for b in budgets]

    assert plans[0].workload == plans[1].workload == workload


def test_stripes_follow_measured_bandwidth() -> None:
    inventory = TINY["1b"]
    budget = Budget(hbm=10 * GiB, dram=4 * GiB, cxl=200 * GiB)
    plan = make_plan(inventory, work(inventory, 4096, 4), budget, machine(cards=2)).plan
    striped = [
        home
        for block in plan.placement.blocks
        for home in block.homes
        if home.on(Tier.CXL) > 64 * MiB
    ]

    assert striped
    for home in striped:
        cards = [share.nbytes for share in home.shares if share.tier is Tier.CXL]
        assert len(cards) == 2
        assert cards[0] == pytest.approx(cards[1], abs=4 * MiB)


# Workloads that do not fit.


@pytest.mark.parametrize("tier", ["hbm", "dram", "nvme"])
def test_the_reported_least_budget_is_enough_and_slightly_less_is_not(tier: str) -> None:
    inventory = TINY["1b"]
    workload, box = work(inventory, 1024, 4), machine(cards=0)
    tight = {
        "hbm": Budget(hbm=2 * GiB, dram=64 * GiB),
        "dram": Budget(hbm=6 * GiB, dram=2 * GiB),
        "nvme": Budget(hbm=6 * GiB, dram=5 * GiB, nvme=(PathBudget(path="/mnt/nvme", nbytes=1),)),
    }[tier]

    with pytest.raises(InfeasibleError) as caught:
        make_plan(inventory, workload, tight, box)

    least = caught.value.least[tier]
    assert least is not None
    assert f"--{tier}" in str(caught.value)
    assert fits(inventory, workload, tight.changed(Tier(tier), least), box)
    assert not fits(inventory, workload, tight.changed(Tier(tier), least - 128 * MiB), box)


def test_a_tier_that_cannot_help_alone_has_no_least_budget() -> None:
    inventory = model("qwen2.5-3b")
    with pytest.raises(InfeasibleError) as caught:
        make_plan(inventory, work(inventory, 4096, 4), Budget(hbm=GiB, dram=GiB), machine())

    assert caught.value.least["dram"] is None


def test_a_70b_model_can_be_planned() -> None:
    inventory = model("llama-3.1-70b")
    box = preset("desktop-24gb")
    budget = parse_budget(box, hbm="23GiB", dram="60GiB", nvme=("1500GiB",))

    plan = make_plan(inventory, work(inventory, 4096, 8), budget, box, effort=QUICK).plan

    assert plan.at_rest(Tier.NVME) > 800 * GiB
    assert plan.peak(Tier.HBM) <= 23 * GiB


@pytest.mark.parametrize(
    ("name", "dram", "most_timed", "most_bounded"),
    [
        ("llama-3.1-8b", "60GiB", 150, 4000),
        pytest.param("llama-3.1-70b", "60GiB", 60, 2000, marks=pytest.mark.long),
    ],
)
def test_few_candidates_have_to_be_timed(
    name: str, dram: str, most_timed: int, most_bounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes seconds because a lower bound rules out most candidates."""
    inventory, box = model(name), preset("desktop-24gb")
    budget = parse_budget(box, hbm="23.5GiB", dram=dram, nvme=("1500GiB",))
    workload = work(inventory, 1024, 16)
    bounded = []
    lower_bound = PlanEvaluator.score_lower_bound
    monkeypatch.setattr(
        PlanEvaluator,
        "score_lower_bound",
        lambda self, candidate: bounded.append(candidate) or lower_bound(self, candidate),
    )
    evaluator = PlanEvaluator(inventory, workload, box, budget)

    assert search(evaluator) is not None

    assert len(evaluator._seconds) < most_timed
    assert len(bounded) < most_bounded
    assert 0 < evaluator.operations_timed < 150_000


PLANNING_MODULES = [
    "roles", "model.inventory", "machine.presets", "plan.workload", "plan.budget", "plan.placement",
    "plan.schedule", "plan.placement_index", "plan.build_schedule", "plan.packing",
    "plan.lifetimes", "plan.buffers", "plan.plan", "planner", "planner.cost",
]  # fmt: skip
BASELINES = ["deepspeed", "latency_first", "memascend"]


def test_planning_imports_neither_torch_nor_memory_nor_the_native_core() -> None:
    names = [f"penstock.{name}" for name in PLANNING_MODULES]
    names += [f"bench.baselines.{name}" for name in BASELINES]
    imports = "; ".join(f"import {name}" for name in names)
    code = (
        f"import sys; {imports}; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'scipy') "
        "or m.startswith(('penstock.memory', 'penstock._native'))]; "
        "sys.exit(str(bad) if bad else 0)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_step_is_timed_with_any_fit_if_the_search_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inventory = llama("two", 256, 1024, 2, 256, 64, 8192, False)
    workload, box = work(inventory, 64, 4), machine()
    monkeypatch.setattr(planner, "search_drives", lambda *given, **more: None)
    seconds = planner.quick_step_seconds(inventory, workload, Budget(hbm=8 * GiB, dram=GiB), box)

    assert seconds is not None
    assert 0 < seconds < 1
    none = planner.quick_step_seconds(inventory, workload, Budget(hbm=MiB, dram=MiB), box)
    assert none is None
