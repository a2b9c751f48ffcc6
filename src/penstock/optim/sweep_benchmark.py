"""Buffers to measure the optimizer sweep with: one tensor that is updated repeatedly.

The probe measures rates by node, format, threads and size with it, and so does the benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penstock.memory.placement import Place
from penstock.memory.tensors import empty
from penstock.optim.formats import BLOCK, Moments, StateFormat, num_blocks
from penstock.optim.rules import adamw, draw_key
from penstock.optim.sweep import Part, Segment, start
from penstock.optim.thread_pool import Pool

TRAFFIC: dict[Moments, float] = {"fp32": 26.0, "bf16": 18.0, "int8": 14.0 + 8 / 256}
"""Bytes per parameter that an AdamW step must read and write with a bf16 gradient and weight."""

_FILL = 1 << 20
"""Number of random values that fill a tensor by repetition."""


class SweepBuffers:
    """A bf16 tensor with gradient, remainder and moments on `place`, with plausible values."""

    def __init__(self, numel: int, moments: Moments, place: Place | None = None) -> None:
        self.numel, self.moments, self._step = numel, moments, 0
        self.grad = self._allocate(torch.bfloat16, place, lambda n: torch.randn(n) * 1e-3)
        self.weight = self._allocate(torch.bfloat16, place, lambda n: torch.randn(n) * 0.02)
        self.low = self._allocate(torch.int16, place, torch.zeros)
        dtype = StateFormat(moments=moments).moment_dtype
        self.moment = [self._allocate(dtype, place, torch.zeros) for _ in range(2)]
        coded = moments == "int8"
        self.base = [
            torch.zeros(num_blocks(numel), dtype=torch.int16) if coded else None for _ in range(2)
        ]

    def _allocate(
        self, dtype: torch.dtype, place: Place | None, create: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:
        tensor = empty(self.numel, dtype=dtype, place=place)
        sample = create(min(self.numel, _FILL)).to(dtype)
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
        part: Part = "all",
    ) -> float:
        """Update the tensor and return the seconds it took.

        Updates all parameters, or `numel` from index `at`, which is a multiple of `LEAF`. With a
        `part`, it updates only the weights, or only the moments.
        """
        self._step += 1
        end = self.numel if numel is None else at + numel
        here, blocks = slice(at, end), slice(at // BLOCK, num_blocks(end))
        bases = [None if base is None else base[blocks] for base in self.base]
        segment = Segment(
            name="measured tensor",
            by=adamw(step=self._step, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
            grad=self.grad[here],
            weight=self.weight[here],
            rest=self.low[here],
            first=self.moment[0][here],
            second=self.moment[1][here],
            first_base=bases[0],
            second_base=bases[1],
            first_index=at,
            key=draw_key(0, self._step, 0),
        )
        start_time = time.perf_counter()
        start("adamw", [segment], pool=pool, stats=stats, isa=isa, part=part).wait()
        return time.perf_counter() - start_time
