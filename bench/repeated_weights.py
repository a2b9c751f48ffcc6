"""Random weights that are made quickly: one random part, repeated in every tensor.

The speed of a step does not depend on the values of weights.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.engine import initial_weights
from penstock.engine.tensor_access import PART


def repeat_weights(dtype: torch.dtype) -> None:
    """Let engines with `init="random"` repeat one random part instead of drawing all weights.

    The part is on the GPU if there is one, where weights may be quantized. It has the type of the
    weights, so that the remainders of the master weights are zero.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeded = torch.Generator(device).manual_seed(0)
    drawn = (0.02 * torch.randn(PART, device=device, generator=seeded)).to(dtype)

    def fill(
        access: Any, inventory: Any, _model: Any, _seed: int,
        *, adapter: Any = None, trainable: bool | None = None, **_others: Any,
    ) -> None:  # fmt: skip
        given = adapter or {}

        def source(tensor: Any, low: int, high: int) -> torch.Tensor:
            if tensor.name in given:
                found: torch.Tensor = given[tensor.name].reshape(-1)[low:high]
                return found
            return drawn[: high - low]

        def types(tensor: Any) -> torch.dtype:
            return given[tensor.name].dtype if tensor.name in given else dtype

        for index in range(len(inventory.blocks)):
            initial_weights.set_master(access, index, inventory, source, types, trainable=trainable)
        if device == "cuda":
            torch.cuda.synchronize()  # copies within the GPU do not wait

    # Assigning to a name that does not exist would silently draw all weights.
    assert hasattr(initial_weights, "draw_weights")
    initial_weights.draw_weights = fill
