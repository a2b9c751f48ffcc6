"""Events as a run emits them."""

from __future__ import annotations

from typing import Any

TIERS = {"hbm": {"budget": 100, "at_rest": 10, "peak": 50},
         "cxl": {"budget": 0, "at_rest": 0, "peak": 0}}  # fmt: skip

STEP: dict[str, Any] = {
    "event": "step", "step": 3, "loss": 2.5, "grad_norm": 0.7, "lr": 1e-4, "epoch": 0.3,
    "seconds": 2.0, "tokens_per_second": 1234.0, "tiers": TIERS,
}  # fmt: skip
