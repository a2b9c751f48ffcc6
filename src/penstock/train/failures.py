"""What is kept and said when a step fails. Room: show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.tiers import Tier
from penstock.train.errors import GpuMemoryError, HostMemoryError

if TYPE_CHECKING:
    import torch

    from penstock.plan import Plan

_NO_MEMORY = "can't allocate memory"
"""How torch says it of the host."""


def keep_batch(
    out: Path, step: int, batch: Mapping[str, torch.Tensor], decode: Callable[[Any], str]
) -> Path:
    """The batch of a step that failed: its tensors, and beside them its text."""
    from safetensors.torch import save_file

    path = out / f"bad-batch-{step:06d}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in batch.items()}, path)
    rows = [
        f"--- row {number}\n{decode(row.tolist())}\n"
        for number, row in enumerate(batch["input_ids"])
    ]
    path.with_suffix(".txt").write_text("".join(rows), encoding="utf-8")
    return path


@contextlib.contextmanager
def memory_told(plan: Plan) -> Iterator[None]:
    """Torch's own words for too little memory, as errors that say which budget to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as failed:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        budget = plan.budget.of(Tier.HBM)
        raise GpuMemoryError(budget=budget, free=free, total=total) from failed
    except RuntimeError as failed:
        if _NO_MEMORY not in str(failed):
            raise
        raise HostMemoryError(str(failed).splitlines()[0]) from failed
