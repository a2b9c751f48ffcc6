"""The one argument that Penstock adds to a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import SettingsError
from penstock.packed_weights import Quantization
from penstock.roles import Dtype, Moments


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
    moments: Moments = "fp32"
    """Storage format of the AdamW moments: `fp32` is exact, `bf16` and `int8` use less memory."""
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
        if self.context is not None and self.context < 2:
            raise SettingsError("context", f"must be 2 or more, got {self.context}")

    @property
    def budget(self) -> dict[str, Any]:
        """The budgets in the form that `penstock.prepare` takes."""
        nvme = (self.nvme,) if isinstance(self.nvme, str) else tuple(self.nvme)
        return {"hbm": self.hbm, "dram": self.dram, "cxl": self.cxl, "nvme": nvme}
