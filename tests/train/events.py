"""Events as a run emits them."""

from __future__ import annotations

from typing import Any

TIERS = {"hbm": {"budget": 100, "at_rest": 10, "peak": 50},
         "cxl": {"budget": 0, "at_rest": 0, "peak": 0}}  # fmt: skip
"""Tiers of a `plan` event: what was planned."""

MEASURED = {"hbm": {"budget": 100, "planned": 50, "used": 40, "peak": 45, "tensors": 30},
            "cxl": {"budget": 0, "planned": 0, "used": 0, "peak": 0}}  # fmt: skip
"""Tiers of a `step` event: what was measured."""

HOST = {"planned": 80, "used": 60, "peak": 70}

STEP: dict[str, Any] = {
    "event": "step", "step": 3, "loss": 2.5, "grad_norm": 0.7, "lr": 1e-4, "epoch": 0.3,
    "seconds": 2.0, "tokens_per_second": 1234.0, "tiers": MEASURED, "host": HOST,
}  # fmt: skip
