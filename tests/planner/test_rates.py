"""Rates that the cost model reads from machine files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import MachineError
from penstock.machine.machine import Figure, Machine, MemoryRate
from penstock.machine.presets import (
    BLOCK_SHARE,
    DATA_SHEETS,
    LAYER_SHARE,
    MATMUL_SHARE,
    data_sheet,
    preset,
    preset_names,
)
from penstock.plan.schedule import Verb
from penstock.planner.cost import Rates
from penstock.planner.cost.compute import token_seconds
from penstock.planner.cost.flops import operations
from penstock.planner.cost.rates import FP32_SHARE
from tests.support.machines import machine
from tests.support.models import model


def test_every_preset_loads_names_its_source_and_can_be_planned_for() -> None:
    assert {"desktop-24gb", "h200", "cxl-paper-1", "cxl-paper-2"} <= set(preset_names())
    for name in preset_names():
        assert preset(name).made.by
        assert Rates.of(preset(name)).block_flops > 0
    with pytest.raises(
        MachineError, match="there is no preset 'laptop'; the presets are board-8x4090, cxl-paper-1"
    ):
        preset("laptop")


def layer_flops(box: Machine, *, compiled: bool) -> float:
    """Return the FLOP/s of a layer of an 8B model, forward and backward, at 4,096 tokens."""
    rates = Rates.of(box, compiled=compiled)
    inventory = model("llama-3.1-8b")
    layer, verbs = inventory.layers[0], (Verb.FORWARD, Verb.BACKWARD)
    counted = sum(sum(operations(layer, 4096, verb)) for verb in verbs)
    return counted / sum(token_seconds(inventory, layer, 4096, verb, rates) for verb in verbs)


@pytest.mark.parametrize("name", preset_names())
def test_no_preset_computes_faster_than_a_share_of_its_data_sheet(name: str) -> None:
    box = preset(name)
    sheet = data_sheet(box.gpus[0].name)

    assert sheet is not None
    assert Rates.of(box, compiled=True).block_flops <= 1.001 * MATMUL_SHARE * sheet[0]
    assert layer_flops(box, compiled=True) <= 1.001 * LAYER_SHARE * sheet[0]
    assert layer_flops(box, compiled=False) <= 1.001 * MATMUL_SHARE * BLOCK_SHARE * sheet[0]


@pytest.mark.parametrize("product", DATA_SHEETS)
def test_a_gpu_of_the_catalogue_computes_at_a_share_of_its_data_sheet(product: str) -> None:
    box = machine()
    gpu = replace(box.gpus[0], name=product, block_flops=None, memory_bandwidth=None)
    flops = layer_flops(replace(box, gpus=(gpu,)), compiled=True)

    assert flops == pytest.approx(LAYER_SHARE * DATA_SHEETS[product][0], rel=1e-6)


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
    plain = replace(box.gpus[0], memory_bandwidth=None)
    rates = Rates.of(replace(box, gpus=(plain,)))

    assert 50e12 < rates.block_flops < 165e12
    assert any("data sheet" in text for text in rates.assumed)


@pytest.mark.parametrize(("product", "fp32"), [("NVIDIA H200", 67e12), ("An unknown GPU", None)])
def test_fp32_computes_without_tensor_cores(product: str, fp32: float | None) -> None:
    box = preset("h200")
    box = replace(box, gpus=(replace(box.gpus[0], name=product),))
    narrow, wide = Rates.of(box), Rates.of(box, dtype="fp32")

    expected = FP32_SHARE * narrow.block_flops if fp32 is None else MATMUL_SHARE * fp32
    assert wide.block_flops == wide.attention_flops == pytest.approx(expected)
    assert any("in fp32" in text for text in wide.assumed)
    assert not any("in fp32" in text for text in narrow.assumed)
    assert (narrow.element, wide.element) == (2, 4)
    inventory = model("llama-3.1-8b")
    times = [
        token_seconds(inventory, inventory.layers[0], 4096, Verb.FORWARD, rates)
        for rates in (narrow, wide)
    ]
    assert times[1] > 5 * times[0]


def test_a_machine_without_a_gpu_computes_on_its_cores() -> None:
    rates = Rates.of(replace(machine(), gpus=(), transfers=()))

    assert rates.block_flops == 8 * 20e9
    assert any("no GPU" in text for text in rates.assumed)


def test_a_sweep_that_fits_into_a_cache_is_no_faster_than_memory() -> None:
    def sweep_rate(parameters: int | None) -> float:
        box = machine()
        node = box.nodes[0]
        figure = Figure(median=243e9, low=200e9, high=287e9, samples=15)
        copy = Figure(median=80e9, low=75e9, high=108e9, samples=15)
        rates = (
            MemoryRate(operation="copy", threads=16, bytes_per_second=copy),
            MemoryRate(operation="sweep", threads=16, moments="fp32", parameters=parameters,
                 bytes_per_second=figure),
        )  # fmt: skip
        box = replace(box, nodes=(replace(node, rates=rates), *box.nodes[1:]))
        return Rates.of(box).nodes[node.id].sweep

    assert sweep_rate(16_000_000) == 160e9
    assert sweep_rate(64_000_000) == 243e9
    assert sweep_rate(None) == 243e9
