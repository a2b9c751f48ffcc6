"""Which code steps states in GPU memory: Triton's kernels, or plain torch. Room: update.

Where Triton is missing, `reference` itself runs on the GPU: each of torch's operations rounds once,
so its bits are the same, but it is slow and takes temporaries.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any, Literal

import torch

from penstock.errors import SweepInputError

Engine = Literal["triton", "torch"]


@functools.cache
def kernels(module: str) -> Any:
    """A module of kernels, or None where Triton is not there."""
    try:
        return importlib.import_module(f"penstock.optim.{module}")
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] != "triton":
            raise
        return None


def pick(wanted: Engine | None = None) -> Engine:
    """The engine that runs: the one wanted, else Triton where it can be imported."""
    found: Engine = "torch" if kernels("device_math") is None else "triton"
    if wanted == "triton" and found != "triton":
        raise SweepInputError("engine", "'triton' cannot be imported here; pip install triton")
    if wanted not in (None, "triton", "torch"):
        raise SweepInputError("engine", f"is 'triton' or 'torch', not {wanted!r}")
    return found if wanted is None else wanted


def interpreted() -> bool:
    """Triton's own interpreter runs kernels on host tensors: for tests, on machines with no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def record(device: torch.device) -> Any:
    """An event on the current stream; on the host there is nothing to wait for: None."""
    cuda: Any = torch.cuda  # whose events have no types
    return cuda.current_stream(device).record_event() if device.type == "cuda" else None


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as int16: the kernels convert them themselves."""
    plain = tensor.detach()
    return plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain
