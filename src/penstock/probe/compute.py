"""How fast a GPU computes, and its own memory. Room: measure. torch is imported where it is used.

What a plan needs: large matrix products, a whole transformer layer forward and backward, as it is
and compiled, attention alone, and a copy within the GPU's memory. Operations are counted as the
cost model counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ProbeError
from penstock.machine.machine import Figure, Gpu
from penstock.model import autograd_warmup
from penstock.probe.measurement import Effort, Progress, take_rate
from penstock.units import GiB, format_bytes

if TYPE_CHECKING:
    import torch

FIGURES = (
    "matmul_flops",
    "block_flops",
    "compiled_flops",
    "attention_flops",
    "memory_bandwidth",
)
"""Fields of a Gpu, in the order they are taken."""

SLOW_FIGURES = ("compiled_flops",)
"""Those that a quick probe leaves out: compiling alone takes longer than it has."""

MAX_RUNS = 4096
"""Pieces of work in one run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A Llama-like layer that is timed: that of an 8B model."""

    hidden: int = 4096
    inside: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    context: int = 4096

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of its matrices."""
        narrow = self.key_value_heads * self.head_size
        return {
            "query": (self.hidden, self.hidden),
            "key": (narrow, self.hidden),
            "value": (narrow, self.hidden),
            "out": (self.hidden, self.hidden),
            "gate": (self.inside, self.hidden),
            "up": (self.inside, self.hidden),
            "down": (self.hidden, self.inside),
        }

    def operations(self, sequences: int) -> int:
        """Forward and backward: two per weight and token, three times; the causal half of
        attention, forward and two and a half times that again."""
        weights = sum(rows * columns for rows, columns in self.widths.values())
        attention = 4 * self.hidden * (self.context // 2)
        return int(sequences * self.context * (3 * 2 * weights + 3.5 * attention))

    def attention_operations(self, context: int) -> int:
        """The quadratic part alone, of one sequence."""
        return int(context * 3.5 * 4 * self.hidden * (context // 2))


def figures(*, quick: bool) -> tuple[str, ...]:
    """What is taken of each GPU."""
    return tuple(what for what in FIGURES if not (quick and what in SLOW_FIGURES))


class Calculator(Protocol):
    """Work of each kind, ready to be done."""

    def work(self, what: str) -> int:
        """Operations, or bytes, of doing it once."""

    def seconds(self, what: str, count: int) -> float:
        """For doing it so many times."""


def probe_gpu(
    gpu: Gpu, calculator: Calculator, effort: Effort, progress: Progress, *, quick: bool = False
) -> Gpu:
    """The GPU with those figures that could be taken."""
    found: dict[str, Figure] = {}
    for what in figures(quick=quick):
        words = f"GPU {gpu.index}: {what.replace('_', ' ')}"
        figure = progress.take(words, partial(_rate, calculator, what, effort))
        if figure is not None:
            found[what] = figure
    return replace(gpu, **found)  # type: ignore[arg-type]


def _rate(calculator: Calculator, what: str, effort: Effort) -> Figure:
    unit = calculator.work(what)
    return take_rate(
        lambda work: calculator.seconds(what, work // unit),
        effort,
        unit=unit,
        most=unit * MAX_RUNS,
    )


class TorchCalculator:
    """Matrices and a layer in 16 bit on one GPU, as large as its free memory lets them be."""

    LAYER = Layer()

    def __init__(self, ordinal: int) -> None:
        import torch

        self._device = torch.device("cuda", ordinal)
        free = torch.cuda.mem_get_info(ordinal)[0]
        if free < 3 * GiB:
            raise ProbeError(f"{format_bytes(free)} of its memory is free; 3 GiB would do")
        self._side = 8192
        self._sequences = 4 if free > 12 * GiB else 1
        self._long = 32768 if free > 12 * GiB else 8192
        self._nbytes = int(min(GiB, free // 8))
        self._made: dict[str, Callable[[], None]] = {}
        autograd_warmup.warm_up_autograd(self._device)

    def work(self, what: str) -> int:
        match what:
            case "matmul_flops":
                return 2 * self._side**3
            case "block_flops" | "compiled_flops":
                return self.LAYER.operations(self._sequences)
            case "attention_flops":
                return self.LAYER.attention_operations(self._long)
            case _:
                return 2 * self._nbytes  # each is read and written

    def seconds(self, what: str, count: int) -> float:
        import torch

        if what not in self._made:
            self._made.clear()  # the buffers of one kind at a time
            self._made[what] = self._make(what)
        once = self._made[what]
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(count):
            once()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def _make(self, what: str) -> Callable[[], None]:
        import torch

        if what == "memory_bandwidth":
            source = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            return lambda: _ignore(target.copy_(source))
        if what == "matmul_flops":
            shape = (self._side, self._side)
            one = torch.randn(shape, dtype=torch.bfloat16, device=self._device)
            out = torch.empty_like(one)
            return lambda: _ignore(torch.mm(one, one, out=out))
        if what == "attention_flops":
            return _attention(self.LAYER, self._long, self._device)
        compiled = what == "compiled_flops"
        return _layer(self.LAYER, self._sequences, self._device, compiled=compiled)


def _attention(layer: Layer, context: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of attention in one long sequence, ready to be called."""
    import torch
    from torch.nn import functional

    shape = (1, layer.heads, context, layer.head_size)
    query, key, value = (
        torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3)
    )

    def once() -> None:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    return once


def _layer(
    layer: Layer, sequences: int, device: torch.device, *, compiled: bool
) -> Callable[[], None]:
    """Forward and backward of one layer, ready to be called."""
    import torch

    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).requires_grad_()
        for name, shape in layer.widths.items()
    }
    shape = (sequences, layer.context, layer.hidden)
    given = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()

    run = torch.compile(forward, dynamic=False) if compiled else forward

    def once() -> None:
        out = run(layer, weights, given)
        torch.autograd.grad(out, [given, *weights.values()], torch.ones_like(out))

    return once


def forward(layer: Layer, weights: Mapping[str, torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Norm, attention, norm, MLP, as the models do it."""
    from torch.nn import functional

    def heads(name: str, count: int) -> torch.Tensor:
        flat = functional.linear(normed, weights[name])
        return flat.view(*flat.shape[:2], count, layer.head_size).transpose(1, 2)

    normed = functional.rms_norm(given, (layer.hidden,))
    query, key, value = (
        heads("query", layer.heads),
        *(heads(name, layer.key_value_heads) for name in ("key", "value")),
    )
    groups = layer.heads // layer.key_value_heads
    seen = functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        is_causal=True,
    )
    hidden = given + functional.linear(seen.transpose(1, 2).reshape(given.shape), weights["out"])
    normed = functional.rms_norm(hidden, (layer.hidden,))
    gate = functional.silu(functional.linear(normed, weights["gate"]))
    inside = gate * functional.linear(normed, weights["up"])
    return hidden + functional.linear(inside, weights["down"])


def _ignore(_: object) -> None:
    """Work is timed, not used."""
