"""The campaign that compares repeated runs: it finds differences, and none on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench import repeat_campaign


def record(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    (folder / name).mkdir()
    save_file(tensors, folder / name / "model.safetensors")
    steps = {str(n): [5.0 - n, 1.0] for n in range(1, 4)}
    return {"steps": steps, "checkpoint": str(folder / name)}


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([1.0, float("nan")]), "b": torch.arange(3)}
    runs = [record(tmp_path, name, tensors) for name in ("first", "other")]

    assert repeat_campaign.compare(*runs) == {}


def test_one_bit_of_one_tensor_and_one_loss_are_found(tmp_path: Path) -> None:
    first = record(tmp_path, "first", {"a": torch.tensor([0.0, 2.0]), "b": torch.arange(3)})
    other = record(tmp_path, "other", {"a": torch.tensor([-0.0, 2.0]), "b": torch.arange(3)})
    other["steps"]["2"][0] += 1e-12

    found = repeat_campaign.compare(first, other)

    assert found["first_step"]["step"] == 2
    assert found["differing_tensors"] == 1
    assert found["first_tensors"] == ["model.safetensors:a"]


def test_missing_steps_and_tensors_are_differences(tmp_path: Path) -> None:
    first = record(tmp_path, "first", {"a": torch.zeros(2), "b": torch.arange(3)})
    other = record(tmp_path, "other", {"a": torch.zeros(2)})
    del other["steps"]["3"]

    found = repeat_campaign.compare(first, other)

    assert found["first_step"]["step"] == 3
    assert found["first_tensors"] == ["model.safetensors:b"]


def test_a_run_that_did_not_use_its_tier_is_a_problem() -> None:
    arms = {arm.name: arm for arm in repeat_campaign.ARMS}
    nothing = {"hbm": 9, "dram": 0, "cxl": 0, "nvme": 0}

    assert repeat_campaign.check_placement(arms["resident"], nothing) == []
    assert repeat_campaign.check_placement(arms["killed, to hbm"], nothing) == []
    for name in ("dram", "nvme", "killed, to nvme"):
        assert len(repeat_campaign.check_placement(arms[name], nothing)) == 1
    assert len(repeat_campaign.check_placement(arms["resident"], nothing | {"dram": 1})) == 1


# tests/equivalence/test_reproducible.py repeats a run, and tests/train/test_faults.py kills one.
@pytest.mark.long
@pytest.mark.parametrize("data", repeat_campaign.DATA)
@pytest.mark.parametrize("family", repeat_campaign.FAMILIES)
def test_runs_on_a_cpu_repeat_to_the_bit(family: str, data: str, tmp_path: Path) -> None:
    words = ["--tiny", "--families", family, "--data", data, "--workers", "2"]
    words += ["--out", str(tmp_path), "--arms", "killed, to nvme"]

    code = repeat_campaign.main(words)

    results = json.loads((tmp_path / "results.json").read_text())
    ((_, rows),) = results["combinations"].items()
    assert code == 0, rows
    assert [row["arm"] for row in rows] == ["resident", "killed, to nvme"]
    assert all(len(row["losses"]) == repeat_campaign.TINY.steps for row in rows)
    killed = rows[-1]
    assert 0 < killed["resumed_from"] < killed["killed_after"]
