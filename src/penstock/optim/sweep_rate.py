"""How fast the sweep is: a tensor's worth of memory, stepped over and over. Room: update.

For the probe (rate by node, format, threads and size) and for the benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penstock.memory.placement import Place
from penstock.memory.tensors import empty
from penstock.optim.formats import BLOCK, Moments, StateFormat, num_blocks
from penstock.optim.rules import adamw, draw_key
from penstock.optim.sweep import Segment, start
from penstock.optim.threads import Pool

TRAFFIC: dict[Moments, float] = {"fp32": 26.0, "bf16": 18.0, "int8": 14.0 + 8 / 256}
"""Bytes AdamW must read and write a parameter with a bf16 gradient and weight: the floor."""

_FILL = 1 << 20


class SweepBuffers:
    """One bf16 tensor with gradient, remainder and moments on `place`, in plausible numbers."""

    def __init__(self, numel: int, moments: Moments, place: Place | None = None) -> None:
        self.numel, self.moments, self._step = numel, moments, 0
        self.grad = self._take(torch.bfloat16, place, lambda n: torch.randn(n) * 1e-3)
        self.weight = self._take(torch.bfloat16, place, lambda n: torch.randn(n) * 0.02)
        self.low = self._take(torch.int16, place, torch.zeros)
        dtype = StateFormat(moments=moments).moment_dtype
        self.moment = [self._take(dtype, place, torch.zeros) for _ in range(2)]
        coded = moments == "int8"
        self.base = [
            torch.zeros(num_blocks(numel), dtype=torch.int16) if coded else None for _ in range(2)
        ]

    def _take(
        self, dtype: torch.dtype, place: Place | None, make: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:
        tensor = empty(self.numel, dtype=dtype, place=place)
        sample = make(min(self.numel, _FILL)).to(dtype)
        for at in range(0, self.numel, _FILL):
            part = tensor[at : at + _FILL]
            part.copy_(sample[: part.numel()])
        return tensor

    def step(
        self,
        pool: Pool | None = None,
        *,
        at: int = 0,
        numel: int | None = None,
        stats: bool = False,
        isa: str = "",
    ) -> float:
        """Step all of it, or `numel` parameters from `at`, a multiple of `LEAF`; gives seconds."""
        self._step += 1
        end = self.numel if numel is None else at + numel
        part, blocks = slice(at, end), slice(at // BLOCK, num_blocks(end))
        bases = [None if base is None else base[blocks] for base in self.base]
        segment = Segment(
            name="bed",
            by=adamw(step=self._step, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
            grad=self.grad[part],
            weight=self.weight[part],
            rest=self.low[part],
            first=self.moment[0][part],
            second=self.moment[1][part],
            first_base=bases[0],
            second_base=bases[1],
            first_index=at,
            key=draw_key(0, self._step, 0),
        )
        begin = time.perf_counter()
        start("adamw", [segment], pool=pool, stats=stats, isa=isa).wait()
        return time.perf_counter() - begin
