"""PenstockConfig refuses what is wrong when it is made, before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hbm", None), ("dram", 1.5), ("cxl", True), ("nvme", 7), ("nvme", [1]), ("moments", []),
        ("context", "48"), ("context", True), ("context", 1), ("dtype", 32), ("quantize", 4),
        ("micro_batch", 2.0), ("pack", 1), ("freeze", 7), ("freeze", ["*", None]),
        ("on_nonfinite", False), ("deterministic", "yes"), ("self_check", None), ("engine", "cpu"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_with_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"^{name}: must be "):
        PenstockConfig(**{name: value})


def test_right_values_are_taken_in_all_their_forms() -> None:
    for fields in (
        {"hbm": 1 << 30, "dram": "40GiB", "nvme": "/mnt/nvme:400GiB", "freeze": "*norm*"},
        {"nvme": ["/a:1GiB", "/b:1GiB"], "freeze": ("a", "b"), "pack": False, "context": 2},
        {"micro_batch": 2, "engine": {"sweep_threads": 2}, "dtype": "fp32", "quantize": None},
    ):
        PenstockConfig(**fields)
