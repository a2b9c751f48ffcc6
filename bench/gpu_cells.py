"""The cells of the GPU table: what is trained, under which budgets, and how long it takes.

Seconds are those of an H200 machine (16 cores, 125 GiB, a disk of 2.3 / 2.7 GB/s) and include
startup (drawing, pinning and filling), compilation, steps and baselines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.shapes import TINY, config_of
from penstock.engine.plan_choice import workload_for
from penstock.machine.machine import Figure, Machine, MemoryRate
from penstock.machine.presets import preset
from penstock.model.inventory import Inventory
from penstock.planner import PlanResult, make_plan
from penstock.planner.search import THOROUGH
from penstock.settings import Settings

MACHINE = "h200"
ALL_OF_IT = "130GiB"
"""HBM budget for training with everything in HBM."""

PREDICTED = ".predicted.json"
"""Suffix of the file next to a plan that contains its prediction."""

PARTS = (
    "fast",
    "keep",
    "large",
    "long",
    "longest",
    "disk",
    "curve",
    "moments",
    "32b",
    "moe",
    "peers",
    "memascend",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of the table: a model, a workload, budgets, and what to measure."""

    name: str
    part: str
    shape: str
    context: int
    batch: int
    hbm: str
    dram: str
    nvme: str | None = None
    """Size of the NVMe budget. Its path is the scratch directory."""
    micro_batch: int | None = None
    dtype: str = "bf16"
    moments: str = "fp32"
    steps: int = 6
    resident: bool = False
    """Whether to measure the same compiled layers with everything in HBM too."""
    plain: bool = False
    """Whether to measure plain torch in HBM too."""
    compile: bool = False
    """Whether to compile the layers of plain torch."""
    seconds: int = 90
    """Expected seconds of the whole cell."""

    def budget(self, scratch: Path) -> dict[str, Any]:
        disk = [f"{scratch}:{self.nvme}"] if self.nvme else []
        return {"hbm": self.hbm, "dram": self.dram, "nvme": disk}

    def whole(self) -> Cell:
        """Return this cell with everything in HBM."""
        return replace(self, name=f"{self.name}-resident", hbm=ALL_OF_IT, dram="1GiB", nvme=None)

    def tiny(self) -> Cell:
        """Return this cell with a tiny model, to rehearse without a GPU."""
        scaled: dict[str, Any] = {
            "hbm": "2GiB",
            "dram": "512MiB",
            "nvme": "256MiB" if self.nvme else None,
        }
        shape = TINY.get(self.shape, "tiny")
        return replace(self, shape=shape, context=64, batch=min(self.batch, 4),
                       micro_batch=None, steps=min(self.steps, 3), **scaled)  # fmt: skip


def cells() -> Iterator[Cell]:
    """Return every cell of the table, except the parts that are separate scripts."""
    yield from _fast_and_long()
    yield Cell(
        name="disk-16", part="disk", shape="3b", context=4096, batch=4, hbm="24GiB", dram="16GiB",
        nvme="45GiB", steps=5, plain=True, seconds=85,
    )  # fmt: skip
    for dram in range(8, 45, 4):
        yield Cell(
            name=f"curve-{dram:02}", part="curve", shape="3b", context=4096, batch=4, hbm="24GiB",
            dram=f"{dram}GiB", nvme="45GiB", steps=3, plain=dram == 8,
            seconds=85 if dram < 16 else 60,
        )  # fmt: skip
    for moments in ("fp32", "bf16", "int8"):
        yield Cell(
            name=f"moments-{moments}", part="moments", shape="3b", context=4096, batch=4,
            hbm="16GiB", dram="60GiB", moments=moments, seconds=50,
        )  # fmt: skip
    yield Cell(
        name="32b", part="32b", shape="32b", context=4096, batch=4, hbm="130GiB", dram="108GiB",
        nvme="48GiB", moments="int8", steps=2, seconds=300,
    )  # fmt: skip
    yield from _experts()


def _experts() -> Iterator[Cell]:
    """Yield mixtures of experts, with the auxiliary loss of their routers.

    Two ways to choose budgets: a card of 24 GiB, and about half of the states in HBM. With the
    least HBM, moments are in bf16 because DRAM has no room for 113 GB of exact states.
    """
    olmoe = {"part": "moe", "shape": "olmoe", "context": 4096, "dram": "100GiB", "steps": 4}
    baseline = {"plain": True, "compile": True}
    oss = {"part": "moe", "shape": "gpt-oss-20b", "context": 4096, "moments": "int8",
           "hbm": "24GiB", "dram": "108GiB", "nvme": "50GiB", "steps": 2}  # fmt: skip
    least = {"part": "moe", "shape": "qwen3-30b-a3b-12", "context": 4096, "batch": 4,
             "moments": "bf16", "dram": "90GiB", "steps": 3}  # fmt: skip
    rows: list[dict[str, Any]] = [
        olmoe | baseline | {"name": "olmoe-4x4096-24", "batch": 4, "hbm": "24GiB", "seconds": 110},
        olmoe | baseline | {"name": "olmoe-16x4096-24", "batch": 16, "micro_batch": 4,
                            "hbm": "24GiB", "seconds": 120},
        olmoe | {"name": "olmoe-4x4096-60", "batch": 4, "hbm": "60GiB", "seconds": 70},
        olmoe | {"name": "olmoe-16x4096-60", "batch": 16, "micro_batch": 4, "hbm": "60GiB",
                 "seconds": 80},
        least | {"name": "qwen3-12-least", "hbm": "12.7GiB", "seconds": 90},
        least | {"name": "qwen3-12-16", "hbm": "16GiB", "seconds": 90},
        oss | {"name": "gpt-oss-4x4096", "batch": 4, "seconds": 170},
        oss | {"name": "gpt-oss-64x4096", "batch": 64, "micro_batch": 4, "seconds": 200},
    ]  # fmt: skip
    for fields in rows:
        yield Cell(**fields)


def _fast_and_long() -> Iterator[Cell]:
    three = {"shape": "3b", "context": 4096, "part": "fast", "hbm": "24GiB"}
    eight = {"shape": "8b", "part": "long"}
    rows: list[dict[str, Any]] = [
        three | {"name": "fast-4x4096", "batch": 4, "dram": "38GiB", "resident": True,
                 "plain": True, "seconds": 70},
        three | {"name": "fast-16x4096", "batch": 16, "micro_batch": 4, "dram": "38GiB",
                 "resident": True, "plain": True, "seconds": 110},
        {"shape": "qwen3-4b", "context": 4096, "part": "fast", "hbm": "24GiB", "batch": 4,
         "name": "qwen3-4b-4x4096", "dram": "52GiB", "seconds": 70},
        three | {"name": "keep-4x4096-24", "part": "keep", "batch": 4, "dram": "38GiB",
                 "seconds": 60},
        three | {"name": "keep-4x4096-80", "part": "keep", "batch": 4, "hbm": "80GiB",
                 "dram": "38GiB", "seconds": 60},
        three | {"name": "keep-16x4096-24", "part": "keep", "batch": 16, "micro_batch": 4,
                 "dram": "38GiB", "seconds": 80},
        three | {"name": "keep-16x4096-80", "part": "keep", "batch": 16, "micro_batch": 4,
                 "hbm": "80GiB", "dram": "38GiB", "seconds": 80},
        eight | {"name": "8b-4x4096", "context": 4096, "batch": 4, "hbm": "24GiB",
                 "dram": "100GiB", "seconds": 70},
        # Large steps, as peers publish them. In 24 GiB, gradients of rounds or activations do not
        # leave room for all states in DRAM.
        eight | {"name": "8b-64x4096", "part": "large", "context": 4096, "batch": 64,
                 "micro_batch": 4, "hbm": "130GiB", "dram": "105GiB", "steps": 3, "seconds": 130},
        eight | {"name": "8b-64x4096-24", "part": "large", "context": 4096, "batch": 64,
                 "micro_batch": 4, "hbm": "24GiB", "dram": "108GiB", "nvme": "12GiB", "steps": 3,
                 "seconds": 160},
        eight | {"name": "8b-1x65536", "context": 65536, "batch": 1, "hbm": "60GiB",
                 "dram": "105GiB", "steps": 3, "seconds": 110},
        eight | {"name": "8b-1x131072", "context": 131072, "batch": 1, "hbm": "80GiB",
                 "dram": "105GiB", "moments": "bf16", "steps": 2, "seconds": 170},
        eight | {"name": "8b-1x262144", "context": 262144, "batch": 1, "hbm": "130GiB",
                 "dram": "105GiB", "moments": "bf16", "steps": 1, "seconds": 340},
        # The longest context. A whole step takes longer than one call of ten minutes.
        eight | {"name": "8b-8-1x524288", "part": "longest", "shape": "8b-8", "context": 524288,
                 "batch": 1, "hbm": "134GiB", "dram": "105GiB", "moments": "bf16", "steps": 2,
                 "seconds": 450},
        eight | {"name": "8b-1x524288", "part": "longest", "context": 524288, "batch": 1,
                 "hbm": "134GiB", "dram": "108GiB", "nvme": "40GiB", "moments": "bf16", "steps": 1,
                 "seconds": 900},
    ]  # fmt: skip
    for fields in rows:
        yield Cell(**fields)


def settings_of(cell: Cell) -> Settings:
    names = ("context", "batch", "micro_batch", "dtype", "moments")
    return Settings.of({name: getattr(cell, name) for name in names} | {"init": "random"})


def survey_model(cell: Cell) -> Inventory:
    from penstock.model.self_check import check_model
    from penstock.model.survey import survey_config

    # The check finds out which attention a model can use, as in `prepare`.
    return survey_config(config_of(cell.shape, cell.context), name=cell.shape, check=check_model)


def plan_cell(
    cell: Cell, scratch: Path, *, compiled: bool = True, traced: bool = False, shared: float = 0.0,
    gpu_sweeps: bool = True, late_moments: bool = True,
) -> PlanResult:  # fmt: skip
    """Plan a cell for the machine of the table. Needs no GPU.

    With `traced`, working memory is that of the model's own code, and the plan may keep layers.
    `shared` replaces the rate of a sweep and copies together, in bytes per second. `gpu_sweeps`
    says whether the GPU may sweep blocks in host memory, and `late_moments` whether moments may be
    updated in backward.
    """
    from penstock.engine.memory_source import working_memory_source
    from penstock.plan.budget import parse_budget, with_paths

    given = cell.budget(scratch)
    machine = with_shared_rate(preset(MACHINE), shared) if shared else preset(MACHINE)
    budget = parse_budget(machine, hbm=given["hbm"], dram=given["dram"], nvme=tuple(given["nvme"]))
    machine, _ = with_paths(machine, budget)
    inventory = survey_model(cell)
    workload = workload_for(inventory, settings_of(cell), compiled=compiled)
    config = config_of(cell.shape, cell.context) if traced else None
    source = working_memory_source(config, machine)
    effort = replace(THOROUGH, gpu_sweeps=gpu_sweeps, late_moments=late_moments)
    return make_plan(inventory, workload, budget, machine, source=source, effort=effort)


def with_shared_rate(machine: Machine, rate: float) -> Machine:
    """Return a machine on which a sweep and copies together reach a rate."""
    node = machine.nodes[0]
    rates = [each for each in node.rates if each.operation != "shared"]
    rates.append(MemoryRate(operation="shared", bytes_per_second=Figure.from_number(rate)))
    return replace(machine, nodes=(replace(node, rates=tuple(rates)), *machine.nodes[1:]))
