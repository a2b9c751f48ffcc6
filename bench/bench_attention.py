"""Measure forward and backward of attention: Penstock's kernels, FlashAttention-2 and cuDNN.

    python bench/bench_attention.py
    python bench/bench_attention.py --tune --shapes 4x4096-d128 packed-d128

Prints milliseconds, TFLOP/s of the visible scores (forward 4, backward 10 operations per score and
head dimension), whether 20 repetitions gave the same bits, and the memory allocated in addition to
the inputs. With --tune, it times a list of tiles for each kernel and prints them from fast to slow;
the winners are entered in `penstock.model.attention_launch` by hand, since a choice by timing would
not be reproducible.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.model import attention_launch
from penstock.model.attention_launch import Kernel, Layout, Tiles

REPEATS = 20


class Shape(NamedTuple):
    rows: int
    context: int
    heads: int
    shared: int
    size: int
    window: int = 0
    cap: float = 0.0
    documents: int = 0
    """Mean number of tokens per document; 0: each row is one document."""

    @property
    def lengths(self) -> list[int]:
        if not self.documents:
            return [self.context] * self.rows
        draw, left, lengths = random.Random(0), self.rows * self.context, []
        while left:
            lengths.append(min(left, 1 + int(draw.expovariate(1 / self.documents))))
            left -= lengths[-1]
        return lengths

    @property
    def scores(self) -> int:
        """Number of visible scores of all heads."""
        seen = 0
        for length in self.lengths:
            window = min(self.window or length, length)
            seen += length * window - window * (window - 1) // 2
        return seen * self.heads

    @property
    def apart(self) -> bool:
        """Whether keys and values have kernels of their own."""
        return "value_gradient" in CANDIDATES[self.wide]

    @property
    def wide(self) -> int:
        return max(64, attention_launch.padded_head_size(self.size))


SHAPES = {
    "4x4096-d128": Shape(4, 4096, 32, 8, 128),
    "4x4096-d128-2shared": Shape(4, 4096, 16, 2, 128),
    "4x4096-d128-3b": Shape(4, 4096, 24, 8, 128),
    "1x32768-d128": Shape(1, 32768, 32, 8, 128),
    "packed-d128": Shape(4, 4096, 32, 8, 128, documents=700),
    "gemma3-d256": Shape(2, 8192, 4, 1, 256, window=512),
    "gemma2-d256": Shape(4, 4096, 8, 4, 256, cap=50.0),
    "full-d256": Shape(2, 8192, 4, 1, 256),
    "4x4096-d64": Shape(4, 4096, 32, 8, 64),
    "8x2048-d80": Shape(8, 2048, 32, 32, 80),
}

TUNED = ("4x4096-d128", "packed-d128", "gemma3-d256", "gemma2-d256", "full-d256", "4x4096-d64",
         "8x2048-d80")  # fmt: skip

CANDIDATES: dict[int, dict[Kernel, list[tuple[int, int, int, int]]]] = {
    64: {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (64, 128, 4, 3),
                    (128, 64, 4, 3)],
        "query_gradient": [(128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 3)],
        "key_gradient": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (32, 128, 4, 3)],
    },
    128: {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 3), (64, 32, 4, 4),
                    (128, 64, 8, 3), (128, 128, 8, 3)],
        "query_gradient": [(64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3),
                           (128, 64, 8, 3), (128, 32, 8, 3)],
        "key_gradient": [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 64, 4, 3),
                         (64, 128, 8, 2)],
    },
    256: {
        "forward": [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)],
        "query_gradient": [(64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 4, 1)],
        "key_gradient": [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 128, 8, 2),
                         (64, 128, 8, 1)],
        "value_gradient": [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2), (64, 128, 8, 2),
                           (64, 128, 8, 1), (32, 128, 8, 2)],
    },
}  # fmt: skip
"""Queries, keys, warps and stages, by padded head size and kernel."""


class Inputs:
    """The tensors of one shape, and what the backward kernels read."""

    def __init__(self, shape: Shape, tokens: int | None = None) -> None:
        made = torch.Generator("cuda").manual_seed(0)
        self.shape = shape
        rows = tokens or shape.rows * shape.context
        self.q, self.k, self.v, self.grad = (
            torch.randn(rows, heads, shape.size, generator=made, device="cuda").bfloat16()
            for heads in (shape.heads, shape.shared, shape.shared, shape.heads)
        )
        starts = [start for start in itertools.accumulate(shape.lengths, initial=0) if start < rows]
        spans = attention_launch.document_spans([*starts, rows]).cuda()
        self.layout = Layout(spans, shape.size**-0.5, shape.window, shape.cap)
        self.out = torch.empty_like(self.q)
        self.sums, self.deltas = (
            torch.zeros(shape.heads, attention_launch.padded_tokens(rows), device="cuda")
            for _ in range(2)
        )  # fmt: skip

    def call(self, kernel: Kernel, tiles: Tiles | None) -> Callable[[], Any]:
        """Return a call of one kernel, with the tiles of the table or with others."""
        choose = attention_launch.choose_tiles if tiles is None else lambda *_: tiles
        base = (self.grad, self.q, self.k, self.v)
        if kernel == "forward":
            return lambda: attention_launch.forward(*base[1:], self.layout, choose)
        if kernel == "query_gradient":
            arguments = (*base, self.out, self.sums, self.layout, choose)
            return lambda: attention_launch.query_gradient(*arguments)
        arguments = (*base, self.sums, self.deltas, self.layout)
        if tiles is None:
            return lambda: attention_launch.key_gradients(*arguments)
        made = (torch.empty_like(self.k), torch.empty_like(self.v))
        keys = kernel == "key_gradient"
        values = not keys or not self.shape.apart
        return lambda: attention_launch.launch_key_gradients(
            *arguments, *made, tiles, keys=keys, values=values
        )

    def fill(self) -> None:
        """Compute what the backward kernels read."""
        self.out, self.sums = self.call("forward", None)()
        _, self.deltas = self.call("query_gradient", None)()


def document_spans(lengths: Sequence[int]) -> torch.Tensor:
    bounds = [0, *itertools.accumulate(lengths)]
    return attention_launch.document_spans(bounds).cuda()


def time_call(call: Callable[[], Any], repeats: int) -> float:
    """Return the milliseconds of a call: the median of groups of calls.

    Launches of a group overlap with the kernels before them, as they do in training.
    """
    group = 4
    for _ in range(2):
        call()
    times = []
    for _ in range(-(-repeats // group)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(group):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / group)
    return sorted(times)[len(times) // 2]


def as_tensors(made: Any) -> list[torch.Tensor]:
    return [t for t in (made if isinstance(made, (tuple, list)) else [made]) if t is not None]


def report(name: str, shape: Shape, per_score: int, call: Callable[[], Any]) -> Any:
    """Print one line, and return what the call returned."""
    try:
        milliseconds = time_call(call, REPEATS)
    except Exception as error:  # a library that does not support the shape
        print(f"   {name:32} {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = as_tensors(call())
    nbytes = torch.cuda.max_memory_allocated() - before
    same = all(
        torch.equal(a, b)
        for _ in range(REPEATS)
        for a, b in zip(first, as_tensors(call()), strict=True)
    )
    rate = per_score * shape.scores * shape.size / milliseconds / 1e9
    print(f"   {name:32} {milliseconds:8.3f} ms {rate:6.0f} TFLOP/s  same bits: {same}  "
          f"memory {nbytes >> 20} MiB", flush=True)  # fmt: skip
    return first


def exact(inputs: Inputs) -> list[torch.Tensor]:
    """Return output and gradients of the first shared head's first documents, in fp64."""
    shape = inputs.shape
    tokens = sum(shape.lengths[: 1 if not shape.documents else 4])
    group = shape.heads // shape.shared
    q, k, v, g = (
        t[:tokens, : group if t.shape[1] == shape.heads else 1].double().transpose(0, 1)
        for t in (inputs.q, inputs.k, inputs.v, inputs.grad)
    )
    if shape.heads == shape.shared:
        q, g = q[:1], g[:1]
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    scores = q @ k.mT * shape.size**-0.5
    if shape.cap:
        scores = torch.tanh(scores / shape.cap) * shape.cap
    index = torch.arange(tokens, device="cuda")
    first = document_spans(shape.lengths)[0, :tokens]
    hidden = (index[None] > index[:, None]) | (index[None] < first[:, None])
    if shape.window:
        hidden |= index[:, None] - index[None] >= shape.window
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    made = [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]
    return [t.transpose(0, 1) for t in made]


def errors(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    """Return the relative errors of output and gradients."""
    parts = [t[: w.shape[0], : w.shape[1]].double() - w for t, w in zip(made, wanted, strict=True)]
    return " ".join(
        f"{float(p.norm() / w.norm()):.2e}" for p, w in zip(parts, wanted, strict=True)
    )  # fmt: skip


def compare(name: str) -> None:
    """Measure all implementations on one shape."""
    shape = SHAPES[name]
    print(f"{name}: {shape.scores * shape.size * 4 / 1e12:.2f} TFLOP forward", flush=True)
    inputs = Inputs(shape)
    inputs.fill()
    wanted = exact(inputs) if shape.context <= 8192 else None
    forward = report("Penstock forward", shape, 4, inputs.call("forward", None))
    base = (inputs.grad, inputs.q, inputs.k, inputs.v, inputs.out, inputs.sums, inputs.layout)
    backward = report(
        "Penstock backward", shape, 10, lambda: attention_launch.backward(*base)
    )  # fmt: skip
    report("  gradient of queries", shape, 6, inputs.call("query_gradient", None))
    report("  gradients of keys and values", shape, 8, inputs.call("key_gradient", None))
    _in_order_of_tokens(inputs)
    if wanted is not None:
        print(f"   errors of out, dq, dk, dv: {errors([forward[0], *backward], wanted)}")
    if not shape.cap:
        _flash(inputs, wanted)
    if not (shape.cap or shape.documents or shape.window):
        _cudnn(inputs)
    del inputs
    torch.cuda.empty_cache()


def _in_order_of_tokens(inputs: Inputs) -> None:
    """Measure the same with programs in the order of tokens: the last query first."""
    shape, spans = inputs.shape, inputs.layout.spans.clone()
    padded = attention_launch.padded_tokens(inputs.q.shape[0])
    blocks = torch.arange(spans.shape[1] - padded, dtype=torch.int32, device="cuda")
    spans[0, padded:], spans[1, padded:] = blocks.flip(0), blocks
    sorted_layout, inputs.layout = inputs.layout, inputs.layout._replace(spans=spans)
    for kernel, per_score in (("forward", 4), ("query_gradient", 6), ("key_gradient", 8)):
        report(f"  {kernel}, by tokens", shape, per_score, inputs.call(kernel, None))
    inputs.layout = sorted_layout


def _flash(inputs: Inputs, wanted: Any) -> None:
    shape = inputs.shape
    lengths = shape.lengths
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    window = {"window_size_left": shape.window - 1, "window_size_right": 0} if shape.window else {}
    common = (starts, starts, max(lengths), max(lengths), 0.0, not shape.window)
    options = {"scale": shape.size**-0.5, **window}
    ops = torch.ops.aten

    def forward() -> Any:
        return ops._flash_attention_forward(
            inputs.q, inputs.k, inputs.v, *common, False, **options
        )[:2]  # fmt: skip

    made = report("FlashAttention-2 forward", shape, 4, forward)
    rest = (torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.empty(0, device="cuda"))

    def backward() -> Any:
        return ops._flash_attention_backward(
            inputs.grad, inputs.q, inputs.k, inputs.v, *made, *common, *rest, **options
        )

    back = report("FlashAttention-2 backward", shape, 10, backward)
    if wanted is not None and back is not None:
        print(f"   errors of out, dq, dk, dv: {errors([made[0], *back], wanted)}")
    torch.use_deterministic_algorithms(True)
    report("FlashAttention-2 deterministic", shape, 10, backward)
    torch.use_deterministic_algorithms(False)


def _cudnn(inputs: Inputs) -> None:
    shape = inputs.shape
    q, k, v, grad = (
        t.view(shape.rows, shape.context, *t.shape[1:]).transpose(1, 2)
        for t in (inputs.q, inputs.k, inputs.v, inputs.grad)
    )
    ops = torch.ops.aten

    def forward() -> Any:
        return ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)

    made = report("cuDNN forward", shape, 4, lambda: forward()[:2])
    if made is None:
        return
    out, sums, _, _, most_q, most_k, seed, offset, _ = forward()
    ours = inputs.sums.view(shape.heads, shape.rows, shape.context).transpose(0, 1)
    difference = (sums.view(ours.shape) - ours).abs().max()
    flat = out.transpose(1, 2).reshape(inputs.out.shape).float()
    apart = (float(difference), float((flat - inputs.out).abs().max()))
    print(f"   log-sum-exps {tuple(sums.shape)}, strides {sums.stride()}, output {out.stride()}")
    print(f"   largest differences of both from ours: {apart[0]:.1e}, {apart[1]:.1e}")
    report(
        "cuDNN backward", shape, 10,
        lambda: ops._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, sums, seed, offset, None, None, None, most_q, most_k, 0.0, True
        ),
    )  # fmt: skip


def candidates(shape: Shape) -> list[tuple[Kernel, Tiles]]:
    engines = (True, False) if shape.wide == shape.size else (False,)
    return [
        (kernel, Tiles(*tile, engine, registers))
        for kernel, tiles in CANDIDATES[shape.wide].items()
        for tile in tiles
        for engine in engines
        for registers in (False, True)
        if not registers or (kernel in ("forward", "query_gradient") and shape.wide < 256)
    ]


def prepare(job: tuple[str, Kernel, Tiles]) -> None:
    """Compile one candidate, in another process; the compiled kernel is found on disk later."""
    name, kernel, tiles = job
    try:
        Inputs(SHAPES[name], tokens=SHAPES[name].context).call(kernel, tiles)()
    except Exception as error:  # too much shared memory: `tune` says so
        print(f"   {name} {kernel} {tuple(tiles)}: {type(error).__name__}")


def tune(names: Sequence[str], processes: int) -> None:
    """Time all candidates, and print them from fast to slow."""
    jobs = [(name, *candidate) for name in names for candidate in candidates(SHAPES[name])]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(prepare, jobs, chunksize=1)
    for name in names:
        shape = SHAPES[name]
        inputs = Inputs(shape)
        inputs.fill()
        print(name, flush=True)
        per_score = {"forward": 4, "query_gradient": 6, "key_gradient": 6 if shape.apart else 8,
                     "value_gradient": 4}  # fmt: skip
        for kernel, group in itertools.groupby(candidates(shape), lambda c: c[0]):
            timed = []
            for _, tiles in group:
                try:
                    timed.append((time_call(inputs.call(kernel, tiles), 12), tiles))
                except Exception as error:
                    print(f"   {kernel} {tuple(tiles)}: {str(error).splitlines()[0][:80]}")
            for milliseconds, tiles in sorted(timed):
                rate = per_score[kernel] * shape.scores * shape.size / milliseconds / 1e9
                print(f"   {kernel:16} {tuple(tiles)!s:36} {milliseconds:8.3f} ms {rate:6.0f}",
                      flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--tune", action="store_true", help="time a list of tiles instead")
    parser.add_argument("--processes", type=int, default=12, help="compilations run concurrently")
    args = parser.parse_args()
    if args.tune:
        tune(args.shapes or TUNED, args.processes)
        return
    for name in args.shapes or SHAPES:
        compare(name)


if __name__ == "__main__":
    main()
