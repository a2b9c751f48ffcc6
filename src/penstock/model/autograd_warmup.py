"""The thread in which torch runs backward passes on a GPU. Room: measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def warm_up_autograd(device: torch.device) -> None:
    """Let its first kernel be one that any thread may launch.

    A thread has no CUDA context until a kernel gives it one. cuBLAS launches through the driver,
    which gives none, and torch then warns about it in the middle of somebody's first step.
    """
    import torch

    given = torch.ones(1, device=device, requires_grad=True)
    made = (2 * given).sum()
    # By the engine itself: who watches `torch.autograd` for backward passes should not see one.
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((made,), (torch.ones_like(made),), False, False, (given,), False, False)
