"""The cost model agrees with measurements of other systems on the H200 machine.

The workload is a full fine-tune of a model with 3.086 B parameters and 16,384 tokens per step,
unless stated otherwise; docs/planner.md has the table. No constant is fitted to these systems: the
estimates follow from the machine's rates and the bytes that each system moves. These systems do not
use Penstock's optimizer sweep, so its rate is replaced by that of a plain one, measured alone.
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

TORCH_ATTENTION = 527e12
"""FLOP/s of the attention that PyTorch chooses for whole rows, which these systems use. It was
fitted to lanes of the engine when it used that attention, too."""


def machine_with_plain_sweep() -> Machine:
    """Return the preset with the sweep rate of a plain optimizer, and PyTorch's attention."""
    h200, plain = preset("h200"), Figure.from_number(PLAIN_SWEEP)
    rates = tuple(
        replace(rate, bytes_per_second=plain) if rate.operation == "sweep" else rate
        for rate in h200.nodes[0].rates
    )
    gpu = replace(h200.gpus[0], attention_flops=Figure.from_number(TORCH_ATTENTION))
    return replace(h200, nodes=(replace(h200.nodes[0], rates=rates),), gpus=(gpu,))


RATES = Rates.of(machine_with_plain_sweep())


def test_the_step_time_of_zero_3_offload() -> None:
    inventory = model("qwen2.5-3b")
    step = ZeroStep(
        inventory, work(inventory, 4096, 4), RATES, all_on(0), offload_activations=False
    )

    assert step.seconds() == pytest.approx(2.41, rel=0.25)


@pytest.mark.parametrize("measured", [62.1, 46.2], ids=["first day", "second day"])
def test_the_step_time_of_zero_infinity(measured: float) -> None:
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
def test_the_step_time_of_a_prototype_of_the_schedule(
    name: str, context: int, batch: int, measured: float
) -> None:
    inventory = model(name)
    evaluator = PlanEvaluator(
        inventory,
        work(inventory, context, batch),
        machine_with_plain_sweep(),
        Budget(hbm=60 * GiB, dram=120 * GiB),
    )
    candidate = fill(evaluator, FillStrategy())  # all blocks are streamed, as in the prototype

    assert candidate is not None
    assert evaluator.cost(candidate).step_seconds == pytest.approx(measured, rel=0.15)


def test_the_sweep_limits_a_short_step_and_is_hidden_in_a_long_one() -> None:
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
