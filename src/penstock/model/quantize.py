"""Quantize weights to 4 bits, and compute the weights that a layer uses from them.

The values are those of bitsandbytes (`quantize_4bit` with double quantization). A weight is
dequantized as `table[code] * scale` in fp32 and rounded once to the type of the run: the same bits
on every device, and with every kernel. See `penstock.packed_weights` for the layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.errors import EngineError
from penstock.packed_weights import (
    BLOCK,
    CHUNK,
    GROUP,
    PackedLayout,
    Quantization,
    scratch_nbytes,
    scratch_sizes,
)

PART = 1 << 22
"""Number of weights that are quantized at a time: a whole number of groups of blocks."""

ON_GPU = 1 << 20
"""Number of weights that a GPU quantizes at a time: about 22 MB of temporary memory."""

CACHED = 1 << 17
"""Number of weights that a CPU quantizes at a time."""

# The 16 values of NF4, from the definition in QLoRA (Dettmers et al., 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

INT4 = tuple(code / 7 for code in range(-8, 8))
"""The first value is never chosen: a weight is at most its block's scale."""

_TABLES: dict[Quantization, tuple[float, ...]] = {"nf4": NF4, "int4": INT4}

Read = Callable[[int, int], torch.Tensor]
"""Returns weights `low` to `high` of a tensor, in any type, on any device."""


# Quantizing.

_SMALLEST = torch.finfo(torch.float32).tiny


def quantize(read: Read, elements: int, form: Quantization, packed: torch.Tensor) -> None:
    """Quantize a tensor part by part, and write its bytes into `packed`.

    Everything but the bytes and the scales of blocks (4 bytes for 64 weights) exists for one part
    at a time. Parts are quantized where `read` returns them.
    """
    layout = PackedLayout(elements)
    scales = torch.empty(layout.blocks)
    for low in range(0, elements, PART):
        high = min(low + PART, elements)
        values = read(low, high)
        # A CPU takes half the time if a step stays in its cache. On a GPU, several threads need
        # memory at the same time, next to what the plan has allocated.
        step = ON_GPU if values.is_cuda else CACHED
        for start in range(low, high, step):
            stop = min(start + step, high)
            codes, found = _quantize_part(values[start - low : stop - low], form)
            packed[start // 2 : -(-stop // 2)].copy_(codes)
            scales[start // BLOCK : -(-stop // BLOCK)].copy_(found)
    group_scales, mean, codes = _quantize_scales(scales)
    packed[layout.codes.stop : layout.group_scales.start].zero_()
    packed[layout.group_scales].copy_(group_scales.view(torch.uint8))
    packed[layout.mean].copy_(mean.view(torch.uint8))
    packed[layout.scale_codes].copy_(codes)
    packed[layout.scale_codes.stop : layout.nbytes].zero_()


def _quantize_part(values: torch.Tensor, form: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of weights, two in a byte, and the scales of their blocks."""
    blocks = _in_rows(values.reshape(-1).float(), BLOCK)
    scales = blocks.abs().amax(1)
    if not bool(scales.isfinite().all()):
        raise EngineError("has values that are not finite, and cannot be quantized")
    # A block of zeros, or of numbers so small that their inverse overflows, has the code of 0.
    normed = blocks * torch.where(scales >= _SMALLEST, 1 / scales, 0)[:, None]
    codes = _nearest_codes(normed.view(-1), form)[: values.numel()]
    pairs = _in_rows(codes, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], scales


def _nearest_codes(normed: torch.Tensor, form: Quantization) -> torch.Tensor:
    """Return the codes of the nearest values of the table, for numbers from -1 to 1.

    The range has 64 equal cells, each with at most one number that is halfway between two values:
    a lookup and a comparison, which take a tenth of the time of a search (`torch.bucketize`).
    """
    codes, bounds = _cells(form, normed.device)
    cells = ((normed + 1) * (_CELLS / 2 - 0.5)).to(torch.int32)
    above = normed > torch.index_select(bounds, 0, cells)
    return torch.index_select(codes, 0, cells).add_(above)


def _quantize_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fp32 scales of groups, the mean, and the 8-bit codes of the scales of blocks."""
    # Sums of rows in fp64 and then an exact sum: the result does not depend on how many threads
    # torch uses.
    rows = _in_rows(scales.double(), GROUP).sum(1)
    mean = torch.tensor([math.fsum(rows.tolist()) / scales.numel()], dtype=torch.float32)
    groups = _in_rows(scales - mean, GROUP)
    largest = groups.abs().amax(1)
    normed = groups * torch.where(largest >= _SMALLEST, 1 / largest, 0)[:, None]
    table = _scale_table(scales.device)
    codes = torch.bucketize(normed, (table[1:] + table[:-1]) / 2, out_int32=True)
    return largest, mean, codes.view(-1)[: scales.numel()].to(torch.uint8)


def _in_rows(flat: torch.Tensor, width: int) -> torch.Tensor:
    """Return a flat tensor as rows, the last one padded with zeros."""
    missing = -flat.numel() % width
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, width)


_CELLS = 64


@functools.cache
def _cells(form: Quantization, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each cell its lowest code, and the number above which the next code is nearer."""
    table = torch.tensor(_TABLES[form], dtype=torch.float64)
    bounds = ((table[1:] + table[:-1]) / 2).float()
    if form == "int4":
        bounds[0] = -1.0  # the first code is never chosen
    # The same operations as for weights, which never decrease: they decide the cell of a number.
    cells = ((bounds + 1) * (_CELLS / 2 - 0.5)).to(torch.int32).tolist()
    assert len(set(cells)) == len(cells)
    inside = torch.full((_CELLS,), math.inf)
    inside[cells] = bounds
    codes = torch.tensor([sum(each < cell for each in cells) for cell in range(_CELLS)])
    if form == "int4":
        codes[0], inside[0] = 1, math.inf
    return codes.to(torch.uint8).to(device), inside.to(device)


@functools.cache
def _scale_table(device: torch.device) -> torch.Tensor:
    """Return the 256 values of the scales' codes: bitsandbytes' signed dynamic map.

    For each of seven powers of ten, it has the midpoints of 1, 2, 4, ... 64 equal parts of the
    range from a tenth of that power to the power itself, positive and negative; and 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = (10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += middles + [-middle for middle in middles]
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


# Dequantizing.


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for the steps between codes and weights, of at most one chunk."""

    scales: torch.Tensor
    scale_indices: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, memory: torch.Tensor, blocks: int) -> _Scratch:
        """Divide bytes into the parts that so many blocks need."""
        sizes = scratch_sizes(blocks)
        scales, scale_indices, indices, values = memory[: sum(sizes)].split_with_sizes(sizes)
        return cls(
            scales.view(torch.float32),
            scale_indices.view(torch.int32),
            indices.view(torch.int32),
            values.view(torch.float32),
        )


def dequantize(
    packed: torch.Tensor,
    form: Quantization,
    into: torch.Tensor,
    scratch: torch.Tensor,
    *,
    compiled: bool = False,
) -> None:
    """Compute the weights of a quantized tensor.

    Args:
        packed: Its bytes.
        form: What its codes mean.
        into: Flat tensor for the weights, in the type of the run, on the same device.
        scratch: `scratch_nbytes` bytes on the device. Nothing else is allocated.
        compiled: Whether a kernel may compute the product instead of separate operations. The bits
            are the same.
    """
    for low in range(0, into.numel(), CHUNK):
        high = min(low + CHUNK, into.numel())
        dequantize_range(packed, form, into[low:high], low, into.numel(), scratch, compiled)


def dequantize_range(
    packed: torch.Tensor,
    form: Quantization,
    into: torch.Tensor,
    low: int,
    elements: int,
    scratch: torch.Tensor,
    compiled: bool = False,
) -> None:
    """Compute the weights from number `low` on, of a tensor with so many elements.

    `low` is a multiple of `PART`, and `into` has at most `CHUNK` elements.
    """
    layout, part = PackedLayout(elements), PackedLayout(into.numel())
    space = _Scratch.of(scratch, part.blocks)
    _dequantize_scales(packed, layout, low // BLOCK, part.blocks, space)
    codes = packed[low // 2 : low // 2 + part.codes.stop]
    kernel = _kernel(form, packed.device, into.dtype) if compiled else None
    if kernel is not None:
        kernel(codes, space.scales, into)
        return
    indices = space.indices[: codes.numel()].copy_(codes)
    # Two fp32 values are one 64-bit value for a lookup: one for each byte of codes.
    pairs = space.values.view(torch.float64)[: codes.numel()]
    torch.index_select(_pair_table(form, packed.device), 0, indices, out=pairs)
    space.values.view(-1, BLOCK).mul_(space.scales[:, None])
    into.copy_(space.values[: into.numel()])


def _dequantize_scales(
    packed: torch.Tensor, layout: PackedLayout, first: int, count: int, space: _Scratch
) -> None:
    """Compute the scales of `count` blocks from block `first` on, which starts a group."""
    start = layout.scale_codes.start + first
    indices = space.scale_indices.copy_(packed[start : start + count])
    torch.index_select(_scale_table(packed.device), 0, indices, out=space.scales)
    largest = packed[layout.group_scales].view(torch.float32)[first // GROUP :]
    whole = count - count % GROUP
    space.scales[:whole].view(-1, GROUP).mul_(largest[: whole // GROUP, None])
    if whole < count:
        space.scales[whole:].mul_(largest[whole // GROUP])
    # Two operations, because bitsandbytes rounds the product and the sum.
    space.scales.add_(packed[layout.mean].view(torch.float32))


@functools.cache
def _pair_table(form: Quantization, device: torch.device) -> torch.Tensor:
    """Return the two values of each byte of codes, as one 64-bit number."""
    table = torch.tensor(_TABLES[form], dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack([table[byte >> 4], table[byte & 15]], 1).contiguous()
    return pairs.view(torch.float64).view(-1).to(device)


def dequantized_parts(
    packed: torch.Tensor, elements: int, form: Quantization, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield the weights of a quantized tensor, `PART` at a time; each is valid until the next."""
    memory = torch.empty(min(elements, PART), dtype=dtype, device=packed.device)
    nbytes = scratch_nbytes(min(elements, PART))
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=packed.device)
    for low in range(0, elements, PART):
        into = memory[: min(PART, elements - low)]
        dequantize_range(packed, form, into, low, elements, scratch)
        yield into


def quantized_values(weight: torch.Tensor, form: Quantization) -> torch.Tensor:
    """Return the values that a weight has after it was quantized, in its own type."""
    flat = weight.detach().reshape(-1)
    packed = torch.empty(PackedLayout(flat.numel()).nbytes, dtype=torch.uint8, device=flat.device)
    quantize(lambda low, high: flat[low:high], flat.numel(), form, packed)
    parts = dequantized_parts(packed, flat.numel(), form, weight.dtype)
    return torch.cat([part.clone() for part in parts]).view(weight.shape)


# Kernels.

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Computes weights from the bytes of codes and the scales of blocks."""


@functools.cache
def _kernel(form: Quantization, device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return the kernel for a GPU: that of bitsandbytes if it is installed, else a compiled one.

    bitsandbytes has none for int4. torchao has kernels that multiply with int4 weights of its own
    layout, and none that computes the weights.
    """
    if device.type != "cuda":
        return None
    table = torch.tensor(_TABLES[form], dtype=torch.float32, device=device)
    installed = _bitsandbytes_kernel() if form == "nf4" else None
    if installed is not None and _has_equal_bits(installed, table, dtype):
        return installed
    # One kernel for all sizes. The product is rounded once to fp32 and once to the type of the
    # weights, as without the compiler.
    multiply = torch.compile(_multiply, dynamic=True, fullgraph=True)

    def kernel(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
        multiply(codes, scales, table, into)

    return kernel


def _multiply(
    codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, into: torch.Tensor
) -> None:
    number = torch.arange(into.numel(), device=into.device)
    byte = codes[number // 2].int()
    code = torch.where(number % 2 == 0, byte >> 4, byte & 15)
    into.copy_(table[code] * scales[number // BLOCK])


def _has_equal_bits(kernel: Kernel, table: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a kernel computes the values of all codes with several scales."""
    codes = torch.arange(256, dtype=torch.uint8, device=table.device).repeat(8)
    blocks = 2 * codes.numel() // BLOCK
    scales = torch.linspace(1e-4, 3, blocks, dtype=torch.float32, device=table.device)
    expected = torch.zeros(2 * codes.numel(), device=table.device, dtype=dtype)
    found = torch.zeros_like(expected)
    _multiply(codes, scales, table, expected)
    kernel(codes, scales, found)
    return torch.equal(found, expected)


def _bitsandbytes_kernel() -> Kernel | None:
    try:
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401 - registers the kernel
    except ImportError:
        return None

    def kernel(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
        torch.ops.bitsandbytes.dequantize_4bit.out(
            codes, scales, BLOCK, "nf4", into.shape, into.dtype, out=into
        )

    return kernel
