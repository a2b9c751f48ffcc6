"""How evenly the tokens of a step were distributed over the experts of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of experts in one training step, on the rank that says so.

    The load of an expert is the number of its tokens, relative to the mean over the experts of its
    layer: 1 if all experts have as many tokens. No model of transformers that Penstock trains drops
    tokens, so all choices of all tokens count.
    """

    largest: float
    """The largest load of an expert in any layer."""
    smallest: float
    """The smallest load of an expert in any layer."""
    idle: int
    """Number of experts in all layers that had no token. Weight decay still changes them."""

    @classmethod
    def of(cls, rows: Mapping[int, torch.Tensor]) -> ExpertLoad | None:
        """Return the load from the rows of each expert by block; None without experts.

        Waits for the device.
        """
        if not rows:
            return None
        # One copy for all layers, whose numbers of experts may differ.
        sizes = [each.numel() for each in rows.values()]
        counts = torch.split(torch.cat(list(rows.values())).cpu().double(), sizes)
        loads = [each / each.mean().clamp(min=1e-9) for each in counts]
        return cls(
            max(float(each.max()) for each in loads),
            min(float(each.min()) for each in loads),
            sum(int((each == 0).sum()) for each in counts),
        )
