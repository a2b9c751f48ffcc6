"""Rates that the cost model reads from machine files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import MachineError
from penstock.machine.machine import Machine
from penstock.machine.presets import preset, preset_names
from penstock.planner.cost import Rates
from tests.support.machines import machine


def test_every_preset_loads_names_its_source_and_can_be_planned_for() -> None:
    assert {"desktop-24gb", "h200", "cxl-paper-1", "cxl-paper-2"} <= set(preset_names())
    for name in preset_names():
        assert preset(name).made.by
        assert Rates.of(preset(name)).block_flops > 0
    with pytest.raises(
        MachineError, match="there is no preset 'laptop'; the presets are cxl-paper-1"
    ):
        preset("laptop")


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda d: d["gpus"][0].update(name="?"), r"^gpus\[0\]\.matmul_flops: is missing"),
        (lambda d: d["storage"][0].pop("rates"), r"^storage\[0\]\.rates: must contain a read rate"),
    ],
)
def test_a_machine_file_without_a_required_rate_names_the_field(
    alter: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    preset("desktop-24gb").save(path)
    data = json.loads(path.read_text())
    for name in ("matmul_flops", "block_flops"):
        del data["gpus"][0][name]
    alter(data)  # type: ignore[operator]
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


def test_the_rates_of_an_unmeasured_gpu_come_from_its_data_sheet() -> None:
    box = preset("desktop-24gb")
    plain = replace(box.gpus[0], matmul_flops=None, block_flops=None, memory_bandwidth=None)
    rates = Rates.of(replace(box, gpus=(plain,)))

    assert 50e12 < rates.block_flops < 165e12
    assert any("data sheet" in text for text in rates.assumed)


def test_a_machine_without_a_gpu_computes_on_its_cores() -> None:
    rates = Rates.of(replace(machine(), gpus=(), transfers=()))

    assert rates.block_flops == 8 * 20e9
    assert any("no GPU" in text for text in rates.assumed)
