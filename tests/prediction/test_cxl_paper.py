"""The cost model reproduces the CXL paper's results from its authors' microbenchmarks.

The machines are the presets `cxl-paper-1` and `cxl-paper-2`. The paper's system is ZeRO-3 of early
2026, in which nothing overlaps. docs/planner.md has the whole table, and where the model disagrees.
"""

from __future__ import annotations

import itertools

import pytest

from bench.baselines.deepspeed import CLASSES, Shares, ZeroStep, all_on, interleaved
from bench.baselines.latency_first import latency_first, latency_first_placement
from penstock.machine.presets import preset
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.placement import Share, stripe
from penstock.plan.seats import Ranks
from penstock.plan.workload import Workload
from penstock.planner import QUICK, make_plan
from penstock.planner.candidate import Candidate
from penstock.planner.cost import Rates, estimate
from penstock.planner.cost.demands import Demands
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import FillStrategy, undecided
from penstock.tiers import Tier
from penstock.units import GiB
from tests.support.models import model, work

MODELS = ("qwen2.5-7b", "mistral-nemo-12b")
WORK = ((4096, 1), (4096, 8), (4096, 16), (32768, 1), (32768, 2), (32768, 3))
CARDS = {1: (3,), 2: (3, 4)}
LOCAL = 128 * GiB


def seconds(inventory: Inventory, workload: Workload, cards: int, homes: Shares) -> float:
    rates = Rates.of(preset(f"cxl-paper-{cards}"))
    return ZeroStep(inventory, workload, rates, homes, overlaps=False).seconds()


def latency_first_shares(inventory: Inventory, workload: Workload, cards: int) -> Shares:
    sizes = {name: width * inventory.parameters() for name, width in CLASSES.items()}
    tokens = workload.tokens * len(inventory.layers)
    sizes["activation"] = tokens * inventory.hidden * 2
    return latency_first(
        sizes, local=0, local_budget=LOCAL, cards=CARDS[cards], card_budget=cards * 256 * GiB
    )


def relative_to_dram(name: str, context: int, batch: int, cards: int, kind: str) -> float:
    """Return the throughput relative to everything in DRAM."""
    inventory = model(name)
    workload = work(inventory, context, batch)
    homes = (
        interleaved((0, *CARDS[cards]))
        if kind == "naive"
        else latency_first_shares(inventory, workload, cards)
    )
    return seconds(inventory, workload, cards, all_on(0)) / seconds(
        inventory, workload, cards, homes
    )


@pytest.mark.parametrize(
    ("places", "one_gpu", "two_gpus"),
    [
        ({0: 1}, (51.77, 51.69), (51.79, 51.18)),
        ({3: 1}, (49.81, 34.66), (24.87, 18.24)),
        ({0: 1, 3: 1}, (51.79, 50.20), (49.56, 34.45)),
        ({0: 1, 3: 2}, (51.79, 45.89), (37.23, 26.60)),
        ({0: 1, 3: 4}, (51.77, 42.05), (31.03, 22.29)),
    ],
)
def test_copy_rates_match_the_measured_ones_with_one_and_two_gpus(
    places: dict[int, float], one_gpu: tuple[float, float], two_gpus: tuple[float, float]
) -> None:
    rates = Rates.of(preset("cxl-paper-1"))
    weights = [
        (Share(tier=Tier.CXL if node else Tier.DRAM, nbytes=0, node=node), weight)
        for node, weight in places.items()
    ]
    shares = stripe(64 * GiB, weights)
    for gpus, measured in ((1, one_gpu), (2, two_gpus)):
        copies_in, copies_out = (Demands(rates, Ranks(world=gpus)) for _ in range(2))
        for share in shares:
            copies_in.copy_in(share, share.nbytes)
            copies_out.copy_out(share, share.nbytes)

        assert 64 / max(copies_in.total().values()) == pytest.approx(measured[0], rel=0.07)
        assert 64 / max(copies_out.total().values()) == pytest.approx(measured[1], rel=0.14)


@pytest.mark.parametrize(
    ("places", "milliseconds"), [({0: 1.0}, 67.63), ({3: 1.0}, 273.29), ({0: 0.5, 3: 0.5}, 138.93)]
)
def test_the_time_of_adam_matches_the_measured_one(
    places: dict[int, float], milliseconds: float
) -> None:
    demands = Demands(Rates.of(preset("cxl-paper-1")))
    for node, part in places.items():
        share = Share(tier=Tier.CXL if node else Tier.DRAM, nbytes=0, node=node)
        demands.sweep(share, read=16 * 671e6 * part, write=12 * 671e6 * part)

    assert 1e3 * max(demands.total().values()) == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("name", "size"), [*itertools.product(MODELS, WORK)])
def test_latency_first_placement_with_one_card_reaches_97_to_99_percent_of_dram(
    name: str, size: tuple[int, int]
) -> None:
    share = relative_to_dram(name, *size, cards=1, kind="aware")

    # The latency-critical tensors of the 7B model all fit in local memory, so the estimate shows no
    # loss. For the 12B model at 1 x 4,096 tokens the estimate is 90 %, because it lacks the
    # overheads of the paper's system.
    least = 0.89 if (name, size) == ("mistral-nemo-12b", (4096, 1)) else 0.96
    assert least <= share <= 1.005


@pytest.mark.parametrize(("name", "size"), [*itertools.product(MODELS, WORK)])
def test_two_cards_are_as_fast_as_dram(name: str, size: tuple[int, int]) -> None:
    assert 0.99 <= relative_to_dram(name, *size, cards=2, kind="aware") <= 1.06


@pytest.mark.parametrize("name", MODELS)
def test_naive_interleaving_is_up_to_a_fifth_slower(name: str) -> None:
    shares = [relative_to_dram(name, *size, cards=1, kind="naive") for size in WORK]

    assert 0.75 <= min(shares) <= 0.83  # the paper reports up to 21 % slower
    assert max(shares) >= 0.97  # compute hides it at 3 x 32,768 tokens
    for size, naive in zip(WORK, shares, strict=True):
        assert naive <= relative_to_dram(name, *size, cards=1, kind="aware") * 1.001


@pytest.mark.parametrize(
    ("name", "size", "cards"),
    [
        ("qwen2.5-7b", (4096, 1), 1),
        ("qwen2.5-7b", (32768, 1), 2),
        ("mistral-nemo-12b", (4096, 1), 1),
        ("mistral-nemo-12b", (4096, 1), 2),
    ],
)
def test_the_planner_is_never_slower_than_the_published_greedy_placement(
    name: str, size: tuple[int, int], cards: int
) -> None:
    inventory = model(name)
    workload, box = work(inventory, *size), preset(f"cxl-paper-{cards}")
    budget = Budget(hbm=30 * GiB, dram=64 * GiB, cxl=cards * 256 * GiB)
    evaluator = PlanEvaluator(inventory, workload, box, budget)
    streamed = tuple(undecided(evaluator, FillStrategy(), i) for i in range(len(inventory.blocks)))
    greedy = latency_first_placement(evaluator, Candidate(streamed))

    greedy_seconds = estimate(inventory, workload, greedy, evaluator.rates).step_seconds
    seconds_planned = make_plan(inventory, workload, budget, box, effort=QUICK).cost.step_seconds

    assert seconds_planned <= greedy_seconds * 1.0001
