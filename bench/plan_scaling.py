"""Predict how steps scale with GPUs and machines: the tables of docs/scaling.md.

    python -m bench.plan_scaling [--save]

Nothing is measured. Every row is a plan that `penstock plan` would make for a preset, with the
working memory that is estimated from the model's sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.certificate import save
from penstock.machine.machine import Figure, GpuLink, Machine, MemoryRate, Nic, Transfer
from penstock.machine.presets import preset
from penstock.model.known_models import KNOWN_MODELS
from penstock.plan.budget import parse_budget, with_budget_memory, with_gpus
from penstock.plan.placement import TransportName
from penstock.plan.workload import Workload, default_numerics
from penstock.planner import PlanResult, find_plan
from penstock.planner.resource_names import bound_by
from penstock.tiers import Tier
from penstock.units import GiB, TiB

GPUS = (1, 2, 4, 8)
MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.3-70b"}
TOKENS = {"16k": 16384, "64k": 65536}
CONTEXT = 4096


@dataclass(frozen=True)
class Case:
    """A model on some GPUs of some machines."""

    name: str
    machine: Machine
    model: str
    tokens: int
    """Tokens per step and GPU."""
    gpus: int
    transport: TransportName | None = None
    budgets: Mapping[str, str] | None = None

    def plan(self) -> PlanResult | None:
        """Return the plan, or None if nothing fits."""
        inventory = KNOWN_MODELS[self.model].inventory(self.model)
        world = self.gpus * self.machine.machines
        batch = world * self.tokens // CONTEXT
        numerics = default_numerics(inventory, context=CONTEXT, batch=batch, kernels=True)
        workload = Workload(context=CONTEXT, batch=batch, world=world, numerics=numerics)
        budget = parse_budget(self.machine, ranks=self.gpus, **(self.budgets or {}))
        box, _ = with_budget_memory(self.machine, budget)
        return find_plan(inventory, workload, budget, box, transport=self.transport)


def measure(case: Case, alone: float | None) -> dict[str, Any]:
    """Return the row of a case; `alone` is the time of one GPU with as many tokens."""
    result = case.plan()
    row: dict[str, Any] = {
        "machine": case.name, "model": case.model, "tokens_per_gpu": case.tokens,
        "gpus": case.gpus, "machines": case.machine.machines, "fits": result is not None,
    }  # fmt: skip
    if result is None:
        return row
    cost, plan = result.cost, result.plan
    share = next(iter(cost.bounds.values())) / cost.step_seconds
    return row | {
        "transport": plan.placement.transport,
        "step_seconds": cost.step_seconds,
        "tokens_per_second": cost.tokens_per_second,
        "efficiency": None if alone is None else alone / cost.step_seconds,
        "bound_by": bound_by(cost.bounds),
        "bound_share": share,
        "hbm_gib": plan.peak(Tier.HBM) / GiB,
        "dram_per_machine_gib": plan.ranks.local * plan.peak(Tier.DRAM) / GiB,
    }


def scaling(
    name: str, machine: Machine, models: Sequence[str] = tuple(MODELS.values()), **of: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows for the models, both numbers of tokens and all numbers of GPUs."""
    for model in models:
        for tokens in TOKENS.values():
            alone: float | None = None
            for gpus in GPUS:
                row = measure(Case(name, machine, model, tokens, gpus, **of), alone)
                if gpus == 1 and row["fits"]:
                    alone = row["step_seconds"]
                    row["efficiency"] = 1.0
                yield row


# The cases that were estimated before any of this was built.


def expected_machine(*, sweep: float, pcie: float, link: bool, flops: float | None) -> Machine:
    """Return an H200-like host, or one with 4090s, with one node and eight GPUs."""
    box = preset("h200" if flops is None else "board-8x4090")
    node = box.nodes[0]
    rates = (MemoryRate(operation="sweep", threads=64, bytes_per_second=figure(sweep)),)
    transfers = tuple(
        Transfer(
            direction=way, gpus=(0,), node=node.id, nbytes=1 << 28, bytes_per_second=figure(speed)
        )
        for way, speed in (("h2d", pcie), ("d2h", pcie), ("both", 1.83 * pcie))
    )  # type: ignore[misc]
    box = replace(
        box, nodes=(replace(node, rates=rates, capacity=2 * TiB, free=None),), transfers=transfers,
        memory_limit=None, gpu_links=(),
    )  # fmt: skip
    box, _ = with_gpus(box, 8)
    links = (GpuLink(gpus=tuple(range(8)), kind="nvlink", bytes_per_second=figure(300e9)),)
    return replace(box, gpu_links=links if link else ())


def figure(value: float) -> Figure:
    return Figure.from_number(value)


def expected() -> Iterator[dict[str, Any]]:
    """Yield the cases of the first estimate."""
    cases = (
        ("8B, sweep 118 GB/s", "llama-3.1-8b", 118e9, 55e9, None),
        ("8B, sweep 400 GB/s", "llama-3.1-8b", 400e9, 55e9, None),
        ("70B, sweep 400 GB/s", "llama-3.3-70b", 400e9, 55e9, None),
        ("8B, 4090-like, PCIe 25 GB/s, sweep 250 GB/s", "llama-3.1-8b", 250e9, 25e9, 1.0),
    )
    for name, model, sweep, pcie, flops in cases:
        # Little more than the least: the estimate assumed that no optimizer states are in HBM.
        hbm = "36GiB" if model == MODELS["70B"] else "18GiB"
        box = expected_machine(sweep=sweep, pcie=pcie, link=flops is None, flops=flops)
        alone: float | None = None
        ways: tuple[TransportName | None, ...] = (
            ("collective", "shared") if not flops else ("shared",)
        )
        for gpus in GPUS:
            for way in ways if gpus > 1 else (None,):
                case = Case(name, box, model, 16384, gpus, way, {"hbm": hbm})
                row = measure(case, alone)
                if gpus == 1:
                    alone, row["efficiency"] = row["step_seconds"], 1.0
                yield row


def machines() -> Iterator[dict[str, Any]]:
    """Yield 70B over four machines with 256 GiB each and one or two GPUs, at two network speeds."""
    server = preset("server-8xh100")
    nodes = tuple(replace(node, capacity=128 * GiB) for node in server.nodes)
    large = replace(server, gpu_links=())
    for tokens in TOKENS.values():
        whole = Case("one machine with 2 TiB", large, "llama-3.3-70b", tokens, 1)
        first = measure(whole, None)
        alone = first["step_seconds"]
        yield first | {"efficiency": 1.0}
        for gpus in (1, 2):
            for gigabits in (400, 100, 25):
                nic = Nic(
                    name="nic", bytes_per_second=figure(0.9 * gigabits / 8 * 1e9), direct=True
                )
                # GPUs on both sockets: one rank uses all memory, two ranks one socket each.
                cards = (server.gpus[0], *((server.gpus[4],) if gpus == 2 else ()))
                links = (GpuLink(gpus=(0, 4), kind="nvlink", bytes_per_second=figure(337e9)),)
                box = replace(
                    server, nodes=nodes, gpus=cards, nics=(nic,), machines=4,
                    gpu_links=links if gpus == 2 else (),
                )  # fmt: skip
                name = f"four machines with 256 GiB, {gigabits} Gb/s"
                budgets = {"dram": "244GiB"}
                yield measure(Case(name, box, "llama-3.3-70b", tokens, gpus, None, budgets), alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write a file to bench/results")
    parser.add_argument("--group", help="only expected, machines, presets or more-dram")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    board, server = preset("board-8x4090"), preset("server-8xh100")
    small = {"hbm": "32GiB"}
    for group, made in (
        ("expected", expected()),
        ("machines", machines()),
        ("presets", scaling("server-8xh100", server)),
        ("presets", scaling("board-8x4090", board)),
        ("presets", scaling("server-8xh100, 32 GiB of HBM", server, budgets=small)),
        (
            "presets",
            scaling("server-8xh100, 32 GiB, shared", server, transport="shared", budgets=small),
        ),
        (
            "more-dram",
            scaling(
                "board-8x4090, 1.2 TiB of DRAM", board, [MODELS["70B"]], budgets={"dram": "1200GiB"}
            ),
        ),
    ):
        for row in made if chosen.group in (None, group) else ():
            rows.append({"group": group} | row)
            print(show(row), flush=True)
    if chosen.save:
        name = f"plan-scaling-{chosen.group}" if chosen.group else "plan-scaling"
        print(save(name, {"context": CONTEXT, "rows": rows}))


def show(row: Mapping[str, Any]) -> str:
    """Return a row as a line of a table in Markdown."""
    head = f"| {row['machine']} | {row['model']} | {row['tokens_per_gpu']:,} | {row['gpus']} "
    if not row["fits"]:
        return head + "| does not fit | | | | | |"
    relative = "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
    return head + (
        f"| {row['step_seconds']:.2f} | {row['tokens_per_second']:,.0f} | {relative} "
        f"| {row['transport'] or '-'} | {row['dram_per_machine_gib']:.0f} "
        f"| {row['bound_by']} ({row['bound_share']:.0%}) |"
    )


if __name__ == "__main__":
    main()
