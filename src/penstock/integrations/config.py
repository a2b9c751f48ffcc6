"""The one argument that Penstock adds to a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from penstock.errors import SettingsError
from penstock.packed_weights import Quantization
from penstock.roles import Dtype, Moments, OptimizerName

_SIZE = ((str, int), "a size such as '22GiB', a number of bytes, or 'auto'")
_SWITCH = ((bool,), "True or False")
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("hbm", "dram", "cxl"), _SIZE),
    "nvme": ((str, tuple, list), "a budget such as '/mnt/nvme:400GiB', or several"),
    **dict.fromkeys(("moments", "on_nonfinite"), ((str,), "a string")),
    **dict.fromkeys(("dtype", "quantize"), ((str, NoneType), "a string or None")),
    "context": ((int, NoneType), "a number of tokens or None"),
    "micro_batch": ((int, str), "a number of sequences or 'auto'"),
    "pack": ((bool, NoneType), "True, False or None"),
    "freeze": ((str, tuple, list), "a pattern of names, or several"),
    **dict.fromkeys(("deterministic", "self_check", "show_plan"), _SWITCH),
    "engine": ((Mapping, NoneType), "a dictionary of arguments of penstock.prepare, or None"),
}
"""The types of the fields, and their description in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenstockConfig:
    """Memory budgets, and what a trainer's own arguments do not say.

    Everything else is taken from the trainer's arguments: batch, accumulation, learning rate,
    betas, weight decay, clipping, label smoothing, noise, steps and seed.
    """

    hbm: str | int = "auto"
    """GPU memory budget, such as `22GiB`."""
    dram: str | int = "auto"
    """DRAM budget, such as `40GiB`."""
    cxl: str | int = "auto"
    """CXL memory budget."""
    nvme: str | tuple[str, ...] | list[str] = ()
    """NVMe budgets, such as `/mnt/nvme:400GiB`."""
    optimizer: OptimizerName | Mapping[str, Any] | None = None
    """The optimizer, or its name and options, such as `{"name": "sgd", "momentum": 0.9}`. By
    default, the one that `optim` names."""
    moments: Moments = "fp32"
    """Storage format of the optimizer's moments: `fp32` is exact, `bf16` and `int8` use less
    memory."""
    context: int | None = None
    """Longest sequence in tokens, which memory is planned for. By default, the trainer's
    `max_length`, or the longest sequence of the datasets."""
    dtype: Dtype | None = None
    """Type to compute in. By default, that of the arguments `bf16` and `fp16`, or of the model."""
    micro_batch: int | Literal["auto"] = "auto"
    """Number of sequences computed together; part of the run's numerics."""
    pack: bool | None = None
    """Whether sequences of a step share rows, each of them attending to itself alone, so that
    little padding is computed. By default, on a GPU with Penstock's kernels."""
    freeze: str | tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, besides those that the model freezes
    itself."""
    quantize: Quantization | None = None
    """For a PEFT model: `nf4` or `int4` to store the frozen weights of linear layers as 4-bit
    numbers."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """Whether a loss or gradient that is not finite stops the run, or only skips the step."""
    deterministic: bool = True
    """Whether to use only kernels that give the same bits in every run."""
    self_check: bool = True
    """Whether to compare the training of a tiny copy of the model with plain transformers first."""
    show_plan: bool = True
    """Whether `train` prints the plan."""
    engine: Mapping[str, Any] | None = None
    """Other arguments of `penstock.prepare`, such as `machine` or `sweep_threads`."""

    def __post_init__(self) -> None:
        for name, (kinds, words) in _KINDS.items():
            value = getattr(self, name)
            several = value if isinstance(value, list | tuple) else ()
            # To Python, True is an int.
            right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not right or not all(isinstance(each, str) for each in several):
                raise SettingsError(name, f"must be {words}, got {value!r:.80}")
        if self.context is not None and self.context < 2:
            raise SettingsError("context", f"must be 2 or more, got {self.context}")

    @property
    def budget(self) -> dict[str, Any]:
        """The budgets in the form that `penstock.prepare` takes."""
        nvme = (self.nvme,) if isinstance(self.nvme, str) else tuple(self.nvme)
        return {"hbm": self.hbm, "dram": self.dram, "cxl": self.cxl, "nvme": nvme}
