"""The cost model against what was measured on the H200 machine.

Full fine-tune of 3.086 B parameters, 16,384 tokens a step unless said; docs/planner.md has the
table. The model has no constant fitted to these systems: rates of the machine, and their bytes.
Their optimizer steps are not our sweep: the rate is that of a plain one, measured alone there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.baselines.deepspeed import ZeroStep, all_on, zero_infinity_seconds
from penstock.machine.machine import Figure, Machine
from penstock.machine.presets import preset
from penstock.plan.budget import Budget
from penstock.planner.cost import Rates
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.initial_candidates import FillStrategy, fill
from penstock.units import GiB
from tests.support.models import model, work

PLAIN_SWEEP = 118e9


def machine() -> Machine:
    h200, plain = preset("h200"), Figure.from_number(PLAIN_SWEEP)
    rates = tuple(
        replace(rate, bytes_per_second=plain) if rate.operation == "sweep" else rate
        for rate in h200.nodes[0].rates
    )
    return replace(h200, nodes=(replace(h200.nodes[0], rates=rates),))


RATES = Rates.of(machine())


def test_zero_3_offload() -> None:
    inventory = model("qwen2.5-3b")
    step = ZeroStep(
        inventory, work(inventory, 4096, 4), RATES, all_on(0), offload_activations=False
    )

    assert step.seconds() == pytest.approx(2.41, rel=0.25)


@pytest.mark.parametrize("measured", [62.1, 46.2], ids=["one day", "another"])
def test_zero_infinity(measured: float) -> None:
    inventory = model("qwen2.5-3b")
    seconds = zero_infinity_seconds(inventory, work(inventory, 4096, 4), RATES, "/mnt/nvme")

    assert seconds == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("name", "context", "batch", "measured"),
    [
        ("qwen2.5-3b", 4096, 4, 1.58),
        ("qwen2.5-3b", 4096, 16, 3.92),
        ("8b-tied", 4096, 4, 3.25),
        ("8b-tied", 65536, 1, 16.8),
    ],
)
def test_our_own_schedule_as_a_prototype_ran_it(
    name: str, context: int, batch: int, measured: float
) -> None:
    inventory = model(name)
    evaluator = PlanEvaluator(
        inventory,
        work(inventory, context, batch),
        machine(),
        Budget(hbm=60 * GiB, dram=120 * GiB),
    )
    candidate = fill(evaluator, FillStrategy())  # every block streams, as in the prototype

    assert candidate is not None
    assert evaluator.cost(candidate).step_seconds == pytest.approx(measured, rel=0.15)


def test_the_sweep_is_exposed_in_a_short_step_and_hidden_in_a_long_one() -> None:
    inventory = model("qwen2.5-3b")
    shares = []
    for batch in (4, 16):
        budget = Budget(hbm=24 * GiB, dram=60 * GiB)
        evaluator = PlanEvaluator(inventory, work(inventory, 4096, batch), preset("h200"), budget)
        candidate = fill(evaluator, FillStrategy())
        assert candidate is not None
        cost = evaluator.cost(candidate)
        shares.append(cost.bounds["sweep@0"] / cost.step_seconds)

    assert shares[0] > 0.4
    assert shares[1] < 0.05
