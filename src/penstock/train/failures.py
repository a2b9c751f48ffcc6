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

    from penstock.plan.plan import Plan

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


def _gpu_memory(plan: Plan) -> GpuMemoryError:
    """The device could have given what was left of the plan's share: then that share was too
    little."""
    import torch

    budget = plan.budget.of(Tier.HBM)
    if not torch.cuda.is_available():
        return GpuMemoryError(budget=budget, free=0, total=0, by_plan=False)
    free, total = torch.cuda.mem_get_info()
    left = plan.allocator_nbytes - torch.cuda.memory_reserved()
    return GpuMemoryError(budget=budget, free=free, total=total, by_plan=free >= left)


@contextlib.contextmanager
def memory_told(plan: Plan) -> Iterator[None]:
    """Torch's own words for too little memory, as errors that say which budget to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as failed:
        raise _gpu_memory(plan) from failed
    except RuntimeError as failed:
        if _NO_MEMORY not in str(failed):
            raise
        raise HostMemoryError(str(failed).splitlines()[0]) from failed
