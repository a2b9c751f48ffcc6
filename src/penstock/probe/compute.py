"""Measure the compute rates and memory bandwidth of GPUs. torch is imported only when needed.

The figures are what the planner needs: large matrix multiplications, a complete transformer layer
(forward and backward, eager and compiled), attention alone, and copies within GPU memory.
Operations are counted as in the cost model.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ProbeError
from penstock.machine.machine import Figure, Gpu
from penstock.model import autograd_warmup
from penstock.probe.measurement import Effort, Progress, measure_rate
from penstock.units import GiB, format_bytes

if TYPE_CHECKING:
    import torch

    from penstock.model.varlen_attention import DocumentSpans

FIGURES = (
    "matmul_flops",
    "block_flops",
    "compiled_flops",
    "attention_flops",
    "memory_bandwidth",
)
"""Fields of a `Gpu`, in the order they are measured."""

SLOW_FIGURES = ("compiled_flops",)
"""Figures that a quick probe skips: compiling alone would exceed its time."""

WARM_UP_SECONDS = 1.0
"""Seconds that a layer runs before it is measured. Under load a GPU lowers its clock to stay within
its power limit: an H200 ran a layer at 675 TFLOP/s at first, and at 597 after a second."""

MAX_RUNS = 4096
"""Maximum number of repetitions in one run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Shape of the measured transformer layer: Llama-like, of an 8B model."""

    hidden: int = 4096
    """Size of the hidden states."""

    inside: int = 14336
    """Size of the MLP."""

    heads: int = 32
    """Number of query heads."""

    key_value_heads: int = 8
    """Number of key and value heads."""

    context: int = 4096
    """Tokens per sequence."""

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.heads

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the weight matrices."""
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
        """Return the operations of forward and backward.

        Each weight takes two per token in forward and four in backward. The causal half of
        attention takes 2.5 times as many in backward as in forward.
        """
        weights = sum(rows * columns for rows, columns in self.widths.values())
        attention = 4 * self.hidden * (self.context // 2)
        return int(sequences * self.context * (3 * 2 * weights + 3.5 * attention))

    def attention_operations(self, context: int) -> int:
        """Return the operations of the quadratic part of attention for one sequence."""
        return int(context * 3.5 * 4 * self.hidden * (context // 2))


def figures(*, quick: bool) -> tuple[str, ...]:
    """Return the figures to measure for each GPU."""
    return tuple(what for what in FIGURES if not (quick and what in SLOW_FIGURES))


class GpuBenchmark(Protocol):
    """Runs the workload of each figure. Tests replace it with a simulated GPU."""

    def work(self, what: str) -> int:
        """Return the operations, or bytes, of one repetition."""

    def seconds(self, what: str, count: int) -> float:
        """Repeat the workload and return the seconds it took."""


def probe_gpu(
    gpu: Gpu, benchmark: GpuBenchmark, effort: Effort, progress: Progress, *, quick: bool = False
) -> Gpu:
    """Return the GPU with the figures that could be measured."""
    measured: dict[str, Figure] = {}
    for what in figures(quick=quick):
        label = f"GPU {gpu.index}: {what.replace('_', ' ')}"
        figure = progress.measure(label, partial(_rate, benchmark, what, effort))
        if figure is not None:
            measured[what] = figure
    return replace(gpu, **measured)  # type: ignore[arg-type]


def _rate(benchmark: GpuBenchmark, what: str, effort: Effort) -> Figure:
    unit = benchmark.work(what)
    return measure_rate(
        lambda work: benchmark.seconds(what, work // unit),
        effort,
        unit=unit,
        limit=unit * MAX_RUNS,
    )


class TorchGpuBenchmark:
    """Runs bf16 workloads on one GPU, sized by its free memory."""

    LAYER = Layer()

    def __init__(self, ordinal: int) -> None:
        import torch

        self._device = torch.device("cuda", ordinal)
        free = torch.cuda.mem_get_info(ordinal)[0]
        if free < 3 * GiB:
            raise ProbeError(f"{format_bytes(free)} of its memory is free; it needs 3 GiB")
        self._side = 8192
        self._sequences = 4 if free > 12 * GiB else 1
        self._long = 32768 if free > 12 * GiB else 8192
        self._nbytes = int(min(GiB, free // 8))
        self._workloads: dict[str, Callable[[], None]] = {}
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
                return 2 * self._nbytes  # each byte is read and written

    def seconds(self, what: str, count: int) -> float:
        import torch

        if what not in self._workloads:
            self._workloads.clear()  # free the buffers of the last kind first
            self._workloads[what] = self._create_workload(what)
            if what in ("block_flops", "compiled_flops"):
                self._warm_up(self._workloads[what])
        once = self._workloads[what]
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(count):
            once()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def _warm_up(self, once: Callable[[], None]) -> None:
        import torch

        end = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < end:
            once()
            torch.cuda.synchronize(self._device)

    def _create_workload(self, what: str) -> Callable[[], None]:
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
    """Return a function that runs attention forward and backward on one long sequence."""
    import torch

    documents = _whole_rows(1, context, device)
    query, key, value = (
        torch.randn((1, context, heads, layer.head_size), dtype=torch.bfloat16, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (layer.heads, layer.key_value_heads, layer.key_value_heads)
    )

    def once() -> None:
        out = _attend(query, key, value, documents)
        torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    return once


def _layer(
    layer: Layer, sequences: int, device: torch.device, *, compiled: bool
) -> Callable[[], None]:
    """Return a function that runs one layer forward and backward."""
    import torch

    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).requires_grad_()
        for name, shape in layer.widths.items()
    }
    shape = (sequences, layer.context, layer.hidden)
    hidden_in = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()

    run = torch.compile(forward, dynamic=False) if compiled else forward
    documents = _whole_rows(sequences, layer.context, device)

    def once() -> None:
        out = run(layer, weights, hidden_in, documents)
        torch.autograd.grad(out, [hidden_in, *weights.values()], torch.ones_like(out))

    return once


def _whole_rows(rows: int, length: int, device: torch.device) -> DocumentSpans | None:
    """Return rows of one document for Penstock's attention; None where training uses PyTorch's."""
    import torch

    from penstock.model.varlen_attention import flatten_bounds
    from penstock.probe.machine_choice import KERNEL_CAPABILITY

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < KERNEL_CAPABILITY:
        return None
    return flatten_bounds([[0, length]] * rows, device)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: DocumentSpans | None
) -> torch.Tensor:
    """Attend as training does; returns `[rows, tokens, heads, head size]`."""
    from torch.nn import functional

    from penstock.model.varlen_attention import attend_packed

    if documents is not None:
        return attend_packed(query, key, value, documents, scale=None, window=None, softcap=None)
    groups = query.shape[1] // key.shape[1]
    seen = functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        is_causal=True,
    )
    return seen.transpose(1, 2)


def forward(
    layer: Layer,
    weights: Mapping[str, torch.Tensor],
    hidden_in: torch.Tensor,
    documents: DocumentSpans | None = None,
) -> torch.Tensor:
    """Compute a transformer layer: norm, attention, norm, MLP."""
    from torch.nn import functional

    def heads(name: str, count: int) -> torch.Tensor:
        flat = functional.linear(normed, weights[name])
        return flat.view(*flat.shape[:2], count, layer.head_size).transpose(1, 2)

    normed = functional.rms_norm(hidden_in, (layer.hidden,))
    query, key, value = (
        heads("query", layer.heads),
        *(heads(name, layer.key_value_heads) for name in ("key", "value")),
    )
    seen = _attend(query, key, value, documents)
    hidden = hidden_in + functional.linear(seen.reshape(hidden_in.shape), weights["out"])
    normed = functional.rms_norm(hidden, (layer.hidden,))
    gate = functional.silu(functional.linear(normed, weights["gate"]))
    inside = gate * functional.linear(normed, weights["up"])
    return hidden + functional.linear(inside, weights["down"])


def _ignore(_: object) -> None:
    """Discard a result: the workload is timed, and its output is not used."""
