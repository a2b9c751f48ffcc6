"""Launching a Triton kernel as it was launched before. Room: hold.

Triton asks every argument of every launch how the kernel may be specialised for it, which takes the
host longer than the launch itself; without graphs, a token has three such launches in each layer.
A kernel that a launch has compiled is kept here, and is given its arguments at once the next time
they are of the same kind.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

ALIGNED = 16
"""Bytes: Triton loads more at once where it knows that a pointer is a multiple of this."""

_compiled: dict[tuple[object, ...], Any] = {}
"""By kernel, warps, constants and kinds of arguments. Few: none of them grows with the rows."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[torch.Tensor | int | float],
    constants: tuple[int | bool, ...],
    *,
    warps: int,
) -> None:
    """On the current device, where all tensors are. `constants` are the kernel's last parameters,
    in order. Kernels are a module's own, and never go."""
    like = (id(kernel), warps, constants, *map(_kind, arguments))
    ready = _compiled.get(like)
    if ready is not None:
        ready[grid](*arguments, *constants)
        return
    made = kernel[grid](*arguments, *constants, num_warps=warps)
    if made is not None and takes_constants():  # Triton's interpreter compiles nothing
        _compiled[like] = made


@functools.cache
def takes_constants() -> bool:
    """Whether what is compiled is given all parameters again, as from Triton 3.3 on; before that it
    was given those that are no constants."""
    version = str(importlib.import_module("triton").__version__).split(".")
    return tuple(map(int, version[:2])) >= (3, 3)


def _kind(argument: torch.Tensor | int | float) -> object:
    """Arguments of one kind are served by the same code. Numbers are of their own kind each, which
    is finer than Triton's."""
    if isinstance(argument, torch.Tensor):
        return argument.device, argument.dtype, argument.data_ptr() % ALIGNED == 0
    return argument
