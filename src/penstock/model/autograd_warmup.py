"""Prepare the thread in which torch runs backward passes on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def warm_up_autograd(device: torch.device) -> None:
    """Run a tiny backward pass, so that torch's backward thread gets a CUDA context.

    A thread has no CUDA context until it launches a kernel through the CUDA runtime. cuBLAS
    launches through the driver, which does not create one, and torch then prints a warning in the
    middle of the first training step. This backward pass launches a kernel of torch's own first.
    """
    import torch

    inputs = torch.ones(1, device=device, requires_grad=True)
    output = (2 * inputs).sum()
    # Call the autograd engine itself: code that hooks `torch.autograd` to observe backward passes
    # should not see this one.
    engine: Any = torch.autograd.Variable._execution_engine
    gradients = (torch.ones_like(output),)
    engine.run_backward((output,), gradients, False, False, (inputs,), False, False)
