"""A plan on disk, and a plan that the machine, the model or the version cannot honour."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import MachineError, PlanError
from penstock.machine.machine import Machine
from penstock.machine.presets import preset, preset_names
from penstock.plan.budget import Budget, PathBudget, parse_budget
from penstock.plan.plan import Plan
from penstock.planner import QUICK, make_plan
from penstock.planner.cost import Rates
from penstock.tiers import Tier
from penstock.units import GiB, MiB, TiB
from tests.support.machines import machine
from tests.support.models import llama, work

MODEL = llama("small", 1024, 4096, 4, 1024, 256, 32000, False)
NVME = (PathBudget(path="/mnt/nvme", nbytes=TiB),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    budget = Budget(hbm=2400 * MiB, dram=GiB, cxl=GiB, nvme=NVME)
    return make_plan(MODEL, work(MODEL, 1024, 4), budget, machine(), effort=QUICK).plan


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan


def altered(plan: Plan, tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_newer_version_is_refused_by_that_reason(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="version: is 2, but this Penstock reads versions up to 1"):
        Plan.load(altered(plan, tmp_path, version=2))


def test_a_plan_that_breaks_its_own_budget_is_refused(plan: Plan, tmp_path: Path) -> None:
    budget = {"hbm": "1GiB", "dram": "1GiB", "cxl": "1GiB"}
    with pytest.raises(PlanError, match=r"budget\.hbm: is 1\.00 GiB, but the plan needs"):
        Plan.load(altered(plan, tmp_path, budget=budget))


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    other = llama("other", 1024, 4096, 5, 1024, 256, 32000, False)

    plan.check_model(MODEL)
    with pytest.raises(PlanError, match=f"^fingerprint: is {MODEL.fingerprint} .small., but other"):
        plan.check_model(other)


def test_a_machine_that_cannot_hold_it_is_refused(plan: Plan) -> None:
    box = machine()
    plan.check(box)

    small = replace(box.nodes[0], capacity=256 * MiB)
    with pytest.raises(PlanError, match=r"^node 0: needs .* but node 0 has 256 MiB"):
        plan.check(replace(box, nodes=(small, *box.nodes[1:])))
    with pytest.raises(PlanError, match=r"^hbm: needs .* the GPU has 1\.00 GiB"):
        plan.check(replace(box, gpus=(replace(box.gpus[0], memory=GiB),)))


def test_a_path_that_is_not_there_is_refused() -> None:
    budget = Budget(hbm=2300 * MiB, dram=1200 * MiB, nvme=NVME)
    plan = make_plan(MODEL, work(MODEL, 1024, 4), budget, machine(), effort=QUICK).plan
    assert plan.peak(Tier.NVME)

    with pytest.raises(PlanError, match=r"^nvme: /mnt/nvme is not on this machine; it has none"):
        plan.check(replace(machine(), storage=()))


# Budgets as typed.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dram": "lots"}, "^dram: 'lots' is not a size"),
        ({"hbm": "-3GiB"}, "^hbm: must be 0 or more, got -3GiB"),
        ({"nvme": ("/mnt/nvme:1GiB", "/mnt/nvme:2GiB")}, "^nvme: names a path twice"),
        ({"nvme": ("/mnt/nvme:huge",)}, "^nvme: 'huge' is not a size"),
    ],
)
def test_nonsense_sizes_name_the_tier(given: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_budget(machine(), **given)  # type: ignore[arg-type]


def test_auto_is_what_is_free_less_the_reserve() -> None:
    box = preset("desktop-24gb")
    budget = parse_budget(box)

    assert 23 * GiB < budget.hbm < (box.gpus[0].memory or 0)
    assert budget.dram == 64 * GiB - 2 * GiB - int(0.05 * 64 * GiB)
    assert budget.of(Tier.NVME) == 0
    assert parse_budget(box, nvme=("400GiB",)).nvme[0].path == "/mnt/nvme"


# Machines as written.


def test_every_bundled_machine_loads_says_its_source_and_can_be_planned_for() -> None:
    assert {"desktop-24gb", "h200", "cxl-paper-1", "cxl-paper-2"} <= set(preset_names())
    for name in preset_names():
        assert preset(name).made.by
        assert Rates.of(preset(name)).block_flops > 0
    with pytest.raises(
        MachineError, match="there is no preset 'laptop'; the presets are cxl-paper-1"
    ):
        preset("laptop")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: d["gpus"][0].update(name="?"), r"^gpus\[0\]\.matmul_flops: is missing"),
        (lambda d: d["storage"][0].pop("rates"), r"^storage\[0\]\.rates: must contain a read rate"),
    ],
)
def test_a_machine_file_without_a_needed_figure_names_the_field(
    break_it: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    preset("desktop-24gb").save(path)
    data = json.loads(path.read_text())
    for name in ("matmul_flops", "block_flops"):
        del data["gpus"][0][name]
    break_it(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))

    with pytest.raises(MachineError, match=message):
        Rates.of(Machine.load(path))


def test_a_zero_bandwidth_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    preset("desktop-24gb").save(path)
    data = json.loads(path.read_text())
    data["nodes"][0]["rates"][0]["bytes_per_second"] = 0
    path.write_text(json.dumps(data))

    with pytest.raises(MachineError, match=r"nodes\[0\]\.rates\[0\]\.bytes_per_second.*above 0"):
        Machine.load(path)


def test_an_unmeasured_gpu_is_known_by_its_data_sheet_and_said_so() -> None:
    box = preset("desktop-24gb")
    plain = replace(box.gpus[0], matmul_flops=None, block_flops=None, memory_bandwidth=None)
    rates = Rates.of(replace(box, gpus=(plain,)))

    assert 50e12 < rates.block_flops < 165e12
    assert any("data sheet" in text for text in rates.assumed)


def test_a_machine_without_a_gpu_computes_on_its_cores() -> None:
    rates = Rates.of(replace(machine(), gpus=(), transfers=()))

    assert rates.block_flops == 8 * 20e9
    assert any("no GPU" in text for text in rates.assumed)
