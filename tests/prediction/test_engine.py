"""The cost model against whole steps of the engine, as `bench/results/engine_*.json` has them.

Rates of the bundled `h200` were fitted to how long lanes of some runs worked (docs/planner.md says
which): how long a step takes, with what overlaps and what waits, is predicted. Plans are those that
were run, as where each block's weight, state, gradient and input rested: their bytes are the
recorded ones. `test_before.py` has what was predicted before a run, by the model of that day.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_cells import cells, plan_cell
from penstock.budget import Budget, PathBudget
from penstock.bundled import bundled
from penstock.cost import Cost
from penstock.inventory import Inventory
from penstock.planner.choice import BlockSpots, Choice, Spot
from penstock.planner.desk import Desk
from penstock.tiers import Tier
from penstock.units import TiB
from penstock.workload import Workload, default_numerics
from tests.models import model

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SPOTS = {"h": Spot.HBM, "d": Spot.DRAM, "n": Spot.NVME, "-": None}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured run: the work, and the plan that was run."""

    file: str
    shape: str
    context: int
    batch: int
    rows: str
    """Per block, in runs of equal ones."""
    slots: int = 2
    ahead: int = 1
    piece: int = 1 << 26
    moments: str = "fp32"

    def choice(self) -> Choice:
        spots = []
        for run in self.rows.split():
            row, _, count = run.partition("*")
            spots += [BlockSpots(*(SPOTS[letter] for letter in row))] * int(count or 1)
        return Choice(tuple(spots), slots=self.slots, ahead=self.ahead)

    def desk(self) -> Desk:
        inventory = MODELS[self.shape]
        numerics = default_numerics(
            inventory,
            context=self.context,
            batch=self.batch,
            kernels=True,
        )
        workload = Workload(
            context=self.context,
            batch=self.batch,
            moments=self.moments,  # type: ignore[arg-type]
            numerics=numerics,
        )
        disk = (PathBudget(path="/mnt/nvme", nbytes=TiB),)
        budget = Budget(hbm=TiB, dram=TiB, nvme=disk)
        return Desk(inventory, workload, bundled("h200"), budget, piece_elements=self.piece)

    def results(self) -> dict[str, Any]:
        text = (RESULTS / f"{self.file}_nvidia-h200_2026-11-15.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)["results"]["streamed"]
        return found

    def measured(self) -> float:
        """The first step warms up, where there are more."""
        seconds = self.results()["step_seconds"]
        return statistics.median(seconds[1:] or seconds)

    def predicted(self) -> Cost:
        return self.desk().cost(self.choice())


MODELS: dict[str, Inventory] = {
    "3b": model("qwen2.5-3b"),
    "8b": model("llama-3.1-8b"),
}

SHORT = Cell(
    file="engine_3b_4x4096_24GiB", shape="3b", context=4096, batch=4, slots=3, ahead=2,
    rows="hhh- hhhd hhhh hhhd*2 hhhh hhhd*4 hhhh hhhd*2 hhhh dddd*4 dddh dddd*4 dddh dddd*2 dddh "
    "dddd*4 dddh dddd*2 dddh dddd*2 hhh-",
)  # fmt: skip
MANY = Cell(
    file="engine_3b_16x4096_24GiB", shape="3b", context=4096, batch=16,
    rows="hhh- hhhd dddd*35 ddd-",
)  # fmt: skip
LARGE = Cell(
    file="engine_8b_4x4096_24GiB", shape="8b", context=4096, batch=4,
    rows="hhh- dddd dddh dddd*2 dddh dddd*4 dddh dddd*2 dddh dddd dddh dddd*2 dddh dddd*4 dddh "
    "dddd*2 dddh dddd*4 dddh dddd hhh-",
)  # fmt: skip
LONG = Cell(
    file="engine_8b_1x65536_60GiB", shape="8b", context=65536, batch=1,
    rows="hhh- hhhd*3 dddd hhhd*2 dddd*26 ddd-",
)  # fmt: skip
LONGEST = Cell(
    file="engine_8b_1x131072_80GiB", shape="8b", context=131072, batch=1, moments="bf16",
    rows="hhh- hhhd*3 dddd*29 ddd-",
)  # fmt: skip
DISK = Cell(
    file="engine_3b_4x4096_24GiB_16GiB-dram_nvme", shape="3b", context=4096, batch=4,
    piece=1 << 25,
    rows="hhh- hhhn hhhh hhhn*2 hhhh hhhn*4 hhhh hhhn*2 hhhh dndn dddh dndn*2 dddh dndn dddn "
    "dndn*2 dddh dndn*2 dddh dndn dddn dndn*2 dddh dndn dddn dddh dndn dddh hhh-",
)  # fmt: skip
CELLS = (SHORT, MANY, LARGE, DISK)
"""Not the long ones: they ran before tiles were compiled into the body, slower than today's."""

AGAIN = {
    "fast-4x4096": "engine_fast-4x4096",
    "fast-16x4096": "engine_fast-16x4096",
    "8b-4x4096": "engine_8b-4x4096",
    "8b-1x65536": "engine_8b-1x65536",
    "disk-16": "engine_disk-16",
    "curve-08": "engine_curve-08",
    "curve-12": "engine_curve-12",
    "curve-20": "engine_curve-20",
    "moments-fp32": "engine_moments-fp32",
    "moments-bf16": "engine_moments-bf16",
    "moments-int8": "engine_moments-int8",
    "32b": "engine_32b",
}
"""Cells of the GPU table, planned anew with the budgets of the run."""


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_budgets_are_planned_to_take_as_long_as_they_did(name: str) -> None:
    planned = plan_cell(next(cell for cell in cells() if cell.name == name), Path("/mnt/nvme"))
    text = (RESULTS / f"{AGAIN[name]}_nvidia-h200_2026-11-15.json").read_text(encoding="utf-8")
    seconds = json.loads(text)["results"]["streamed"]["step_seconds"]

    assert planned.cost.step_seconds == pytest.approx(statistics.median(seconds[1:]), rel=0.10)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.file)
def test_a_step_takes_as_long_as_predicted(cell: Cell) -> None:
    assert cell.predicted().step_seconds == pytest.approx(cell.measured(), rel=0.10)


@pytest.mark.parametrize("cell", [SHORT, LARGE, LONG, LONGEST, DISK], ids=lambda cell: cell.file)
def test_the_plan_is_the_one_that_was_run(cell: Cell) -> None:
    """What rests in each tier is to the byte what the run wrote down."""
    desk, choice = cell.desk(), cell.choice()
    recorded = cell.results()["tiers"]
    for tier in (Tier.HBM, Tier.DRAM, Tier.NVME):
        rests = sum(
            desk.nbytes(block, group, 1)
            for block, spots in enumerate(choice.spots)
            for group in ("weight", "state", "gradient")
            if getattr(spots, group) is Spot(tier.value)
        )
        assert rests == recorded[tier.value]["at_rest"]


@pytest.mark.parametrize("cell", [SHORT, LARGE], ids=lambda cell: cell.file)
def test_lanes_work_as_long_as_they_did(cell: Cell) -> None:
    """What the rates were fitted to."""
    cost = cell.predicted()
    busy = dict.fromkeys(("compute", "sweep"), 0.0)
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if operation.lane in busy:
            busy[operation.lane] += span.end - span.start
    recorded = cell.results()["timeline"]["busy"]

    for lane, seconds in busy.items():
        assert seconds == pytest.approx(recorded[lane], rel=0.10)
