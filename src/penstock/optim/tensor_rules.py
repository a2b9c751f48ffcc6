"""Update rules that need whole tensors: Muon and Adafactor, in plain torch operations.

They run on the device that computes, wherever the state of a tensor is stored, so that every plan
gives the same bits: a matrix product has other bits on a CPU than on a GPU. A tensor passes through
the device in chunks, whose size does not depend on the plan either. On the way, a chunk of a tensor
in host memory has a place in the `Workspace`, and one in device memory is used where it is.

Muon's matrices are orthogonalized as a whole. The operations and their order are those of
`torch.optim.Muon` and `torch.optim.Adafactor`, except that Adafactor adds up its sums in chunks.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.optim import formats
from penstock.optim.reference import WEIGHT_LIMIT
from penstock.optimizer_options import UPDATE_CHUNK

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, from Keller Jordan's Muon."""

NORM_EPS = 1e-7
"""Smallest norm that a matrix is divided by."""

NONE_REFUSED = (1 << 63) - 1
"""Stands for the index of a refused element if there is none."""

_LIMIT = {
    dtype: struct.unpack("<f", struct.pack("<i", bits))[0] for dtype, bits in WEIGHT_LIMIT.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonUpdate:
    """The options of Muon for one matrix in one step."""

    scale: float
    """Factor on the gradient: loss unscaling times clipping."""
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr_fn: str

    def rate(self, rows: int, columns: int) -> float:
        """Return the learning rate of a matrix of this shape."""
        if self.adjust_lr_fn == "original":
            return self.lr * math.sqrt(max(1, rows / columns))
        return self.lr * 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdafactorUpdate:
    """The options of Adafactor for one tensor in one step."""

    scale: float
    """Factor on the gradient: loss unscaling times clipping."""
    step: int
    """Number of the step, from 1."""
    lr: float
    weight_decay: float
    beta2_decay: float
    eps: tuple[float, float]
    d: float


TensorUpdate = MuonUpdate | AdafactorUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorState:
    """One tensor, its gradient and its optimizer state, as flat tensors in any memory."""

    name: str
    shape: tuple[int, ...]
    grad: torch.Tensor
    weight: torch.Tensor
    rest: torch.Tensor | None
    """What the fp32 master needs in addition to the weight; None for fp32."""
    first: torch.Tensor | None
    """Muon's momentum."""
    second: torch.Tensor | None
    """Adafactor's second moments: of all rows and then of all columns, or of each element."""
    key: int
    """Key of the stochastic rounding."""


class Workspace:
    """Device memory for updates, allocated once.

    It has a place for a chunk of each role, and two buffers for a matrix that is orthogonalized and
    two for its products with itself (`penstock.plan.update_workspace` computes the sizes).
    """

    def __init__(self, memory: torch.Tensor, chunk: int, matrix: int, gram: int) -> None:
        self.device = memory.device
        sizes = [*[4 * chunk] * 5, *[2 * matrix] * 2, *[2 * gram] * 2]
        ends = list(itertools.accumulate(sizes))
        parts = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._chunks = dict(zip(("grad", "weight", "rest", "first", "second"), parts, strict=False))
        self._matrices, self._grams = parts[5:7], parts[7:9]

    def chunk(self, role: str, source: torch.Tensor) -> torch.Tensor:
        """Return device memory for a chunk of a role."""
        nbytes = source.numel() * source.element_size()
        return self._chunks[role][:nbytes].view(source.dtype)

    def matrix(self, number: int, elements: int) -> torch.Tensor:
        """Return one of two bf16 buffers for a matrix."""
        return self._matrices[number][: 2 * elements].view(torch.bfloat16)

    def gram(self, number: int, size: int) -> torch.Tensor:
        """Return one of two bf16 buffers for a square matrix."""
        return self._grams[number][: 2 * size * size].view(torch.bfloat16).view(size, size)


def update_tensor(state: TensorState, update: TensorUpdate, workspace: Workspace) -> torch.Tensor:
    """Update a tensor and its state in place; return the first element that was refused.

    The result is on the device, and `NONE_REFUSED` if there is none. An element is refused, and
    keeps its weight, if its new weight would not be finite.
    """
    chunks = _Chunks(state, workspace)
    if isinstance(update, MuonUpdate):
        rows, columns = state.shape[-2:]
        for first in range(0, state.weight.numel(), rows * columns):
            _step_muon(chunks, update, workspace, first)
    else:
        _Adafactor(chunks, update).step()
    return chunks.refused


class _Chunks:
    """Moves the chunks of one tensor to the device and back."""

    def __init__(self, state: TensorState, workspace: Workspace) -> None:
        self.state, self._workspace = state, workspace
        self.refused = torch.full((), NONE_REFUSED, dtype=torch.int64, device=workspace.device)

    def load(self, role: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a role on the device. They must not be written to."""
        source: torch.Tensor = getattr(self.state, role)[start:stop]
        if source.device == self._workspace.device:
            return source
        into = self._workspace.chunk(role, source)
        into.copy_(source, non_blocking=True)
        return into

    def store(self, role: str, start: int, values: torch.Tensor) -> None:
        """Write elements of a role to where it is stored."""
        into: torch.Tensor = getattr(self.state, role)
        into[start : start + values.numel()].copy_(values, non_blocking=True)

    def gradient(self, start: int, stop: int, scale: float) -> torch.Tensor:
        """Return gradients in fp32, times the scale."""
        return self.load("grad", start, stop).float() * scale

    def master(self, start: int, stop: int) -> torch.Tensor:
        """Return fp32 master weights."""
        weight = self.load("weight", start, stop)
        rest = None if self.state.rest is None else self.load("rest", start, stop)
        return formats.read_master(weight, rest)

    def store_master(self, start: int, old: torch.Tensor, new: torch.Tensor) -> None:
        """Store master weights, and keep the old ones where the new ones are not finite."""
        dtype = self.state.weight.dtype
        finite = new.abs() <= _LIMIT[dtype]
        # The first element that is not finite, or the first of all.
        first = start + finite.logical_not().to(torch.uint8).argmax()
        first.masked_fill_(finite.all(), NONE_REFUSED)
        self.refused = torch.minimum(self.refused, first)
        weight, rest = formats.store_master(torch.where(finite, new, old), dtype)
        self.store("weight", start, weight)
        if rest is not None:
            self.store("rest", start, rest)

    def store_first(self, start: int, value: torch.Tensor) -> None:
        """Store first moments in their format."""
        assert self.state.first is not None
        if self.state.first.dtype == torch.bfloat16:
            random = formats.draw_bits(self.state.key, start, value.numel(), value.device)
            value = formats.round_bf16(value, random >> 16)
        self.store("first", start, value)


def chunk_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole rows, each of at most `UPDATE_CHUNK` elements if a row has no more."""
    step = max(1, UPDATE_CHUNK // columns)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


# Muon.


def _step_muon(chunks: _Chunks, update: MuonUpdate, workspace: Workspace, at: int) -> None:
    """Update the matrix whose first element is `at`."""
    rows, columns = chunks.state.shape[-2:]
    matrix = workspace.matrix(0, rows * columns)
    for start, stop in chunk_ranges(rows * columns, 1):
        gradient = chunks.gradient(at + start, at + stop, update.scale)
        momentum = chunks.load("first", at + start, at + stop).float()
        momentum = torch.lerp(momentum, gradient, 1 - update.momentum)
        chunks.store_first(at + start, momentum)
        ahead = torch.lerp(gradient, momentum, update.momentum) if update.nesterov else momentum
        matrix[start:stop] = ahead
    direction = orthogonalize(matrix.view(rows, columns), update.ns_steps, workspace)
    rate, kept = update.rate(rows, columns), 1 - update.lr * update.weight_decay
    for low, high in chunk_ranges(rows, columns):
        first = at + low * columns
        master = chunks.master(first, at + high * columns)
        step = direction[low:high].reshape(-1)
        chunks.store_master(first, master, torch.add(master * kept, step, alpha=-rate))


def orthogonalize(matrix: torch.Tensor, steps: int, workspace: Workspace) -> torch.Tensor:
    """Return nearly the orthogonal matrix that is closest to a bf16 matrix, by Newton-Schulz.

    The matrix is the workspace's first buffer, and is overwritten.
    """
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=NORM_EPS))
    small, large = x.shape
    gram, polynomial = (workspace.gram(number, small) for number in (0, 1))
    for step in range(steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        # The two buffers take turns: the one that `x` is not in holds the next iterate.
        following = workspace.matrix((step + 1) % 2, small * large).view(small, large)
        x = torch.addmm(x, polynomial, x, beta=a, out=following)
    return x.T if tall else x


# Adafactor.


class _Adafactor:
    """One step of Adafactor over one tensor."""

    def __init__(self, chunks: _Chunks, update: AdafactorUpdate) -> None:
        self._chunks, self._update = chunks, update
        shape = chunks.state.shape
        self._factored = len(shape) > 1
        self._columns = shape[-1] if self._factored else 1
        self._rows = shape[-2] if self._factored else chunks.state.weight.numel()
        self._slices = math.prod(shape[:-2]) if self._factored else 1
        self._new = update.step**update.beta2_decay
        device = chunks.refused.device
        self._weight_sum, self._step_sum = torch.zeros(2, dtype=torch.float64, device=device)
        assert chunks.state.second is not None
        # Small next to the tensor: one number for each row and each column.
        self._second = chunks.state.second.to(device, copy=True) if self._factored else None

    def step(self) -> None:
        """Update the second moments, then the weights."""
        for number in range(self._slices):
            self._average(number)
        for number in range(self._slices):
            for first, stop, low, high in self._ranges(number):
                step = self._direction(number, first, stop, low, high)
                self._step_sum += step.square().sum(dtype=torch.float64)
        self._apply()
        if self._second is not None:
            self._chunks.store("second", 0, self._second)

    def _ranges(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first element and the end of each chunk of a slice, and its rows."""
        at = number * self._rows * self._columns
        for low, high in chunk_ranges(self._rows, self._columns):
            yield at + low * self._columns, at + high * self._columns, low, high

    def _factors(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the second moments of the rows and of the columns of a slice, as views."""
        assert self._second is not None
        rows = self._second[: self._slices * self._rows].view(self._slices, -1)
        columns = self._second[self._slices * self._rows :].view(self._slices, -1)
        return rows[number], columns[number]

    def _average(self, number: int) -> None:
        """Update second moments with the squares of the gradient, and add up squared weights."""
        chunks, update = self._chunks, self._update
        of_columns = torch.zeros(self._columns, dtype=torch.float64, device=chunks.refused.device)
        for first, stop, low, high in self._ranges(number):
            squared = chunks.gradient(first, stop, update.scale).square_()
            self._weight_sum += chunks.master(first, stop).square().sum(dtype=torch.float64)
            if self._factored:
                squared = squared.view(high - low, self._columns)
                rows = self._factors(number)[0][low:high]
                rows.lerp_(squared.mean(dim=1), self._new)
                of_columns += squared.sum(dim=0, dtype=torch.float64)
            else:
                old = chunks.load("second", first, stop)
                chunks.store("second", first, torch.lerp(old, squared, self._new))
        if self._factored:
            self._factors(number)[1].lerp_((of_columns / self._rows).float(), self._new)

    def _direction(self, number: int, first: int, stop: int, low: int, high: int) -> torch.Tensor:
        """Return the gradient divided by the root of its second moments."""
        small = self._update.eps[0]
        if self._factored:
            rows, columns = self._factors(number)
            mean = rows.mean().clamp_(min=small)
            estimate = (rows[low:high, None] * columns[None]).div_(mean).view(-1)
        else:
            estimate = self._chunks.load("second", first, stop).clone()
        estimate.clamp_(min=small * small).rsqrt_()
        return estimate.mul_(self._chunks.gradient(first, stop, self._update.scale))

    def _apply(self) -> None:
        """Step by a share of the weights' size, and by no more than `d` of it."""
        update, elements = self._update, self._chunks.state.weight.numel()
        size = (self._weight_sum / elements).sqrt_().clamp_(min=update.eps[1])
        rate = size * min(update.lr, 1 / math.sqrt(update.step))
        too_long = (self._step_sum / elements).sqrt_().div_(update.d).clamp_(min=1.0)
        rate = (rate / too_long).float()
        kept = 1 - update.lr * update.weight_decay
        for number in range(self._slices):
            for first, stop, low, high in self._ranges(number):
                step = self._direction(number, first, stop, low, high)
                master = self._chunks.master(first, stop)
                self._chunks.store_master(first, master, master * kept - step * rate)
