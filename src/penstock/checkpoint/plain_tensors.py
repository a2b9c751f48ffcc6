"""The tensors of a model's files, without quantization.

FP8 weights are multiplied by their scales while they are read, and 4-bit MXFP4 weights are
unpacked, part by part, so that no tensor is ever in memory as a whole.
"""

from __future__ import annotations

import functools
import math
import threading
from pathlib import Path

import torch

from penstock.checkpoint.errors import TensorMismatchError
from penstock.checkpoint.reader import ShardReader, Spec
from penstock.checkpoint.safetensors_header import dtype_name
from penstock.errors import UnsupportedModelError
from penstock.model.quantization import Mxfp4, ScaleBlocks

SCALE = "_scale_inv"
"""Suffix of the name of a tensor's scales. Despite the name, weights are multiplied by them."""

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that an MXFP4 weight is stored in."""

PART = 1 << 22
"""Number of elements that are read at a time."""

_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu)
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
"""Suffixes of scales of activations, which unquantized layers do not use."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4-bit floats without a sign, in the order of their codes."""
_FP4_GROUP = 32
"""Number of MXFP4 weights with one scale; they take 16 bytes."""

_thread = threading.local()


class PlainTensors:
    """Reads the tensors of a directory.

    FP8 tensors are delivered in `dtype`, MXFP4 tensors in bfloat16, and all others in the type of
    the file. An MXFP4 tensor has one name here, without the suffixes of its parts, and the shape
    `[experts, rows, columns]`.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, quantization: ScaleBlocks | Mxfp4 | None
    ) -> None:
        self._dtype = dtype
        self._quantization = quantization
        self._blocks = quantization if isinstance(quantization, ScaleBlocks) else None
        self.shards = ShardReader(folder)
        self.packed = self._find_packed()
        """Names of MXFP4 tensors."""

    def move_to(self, folder: Path) -> None:
        """Read from a folder with a copy of all tensors under the same names from now on."""
        shards = ShardReader(folder)
        self.shards.close()
        self.shards = shards
        self.packed = self._find_packed()

    @property
    def names(self) -> list[str]:
        """Names of the tensors, without those of scales."""
        parts = {name + suffix for name in self.packed for suffix in (BLOCKS, SCALES)}
        stored = (name for name in self.shards.names if name not in parts)
        return [*(name for name in stored if not self._is_scale(name)), *self.packed]

    def file_of(self, name: str) -> str:
        """Return the path of the file that has a tensor."""
        return self.shards.file_of(name + BLOCKS if name in self.packed else name)

    def spec(self, name: str) -> Spec:
        """Return the shape of a tensor, and the type in which it is delivered."""
        if name in self.packed:
            shape = self.shards.spec(name + BLOCKS).shape
            return Spec(torch.bfloat16, (*shape[:2], math.prod(shape[2:3]) * _FP4_GROUP))
        spec = self.shards.spec(name)
        return Spec(self._dtype, spec.shape) if self._is_fp8(name) else spec

    def read(self, name: str, low: int, high: int) -> torch.Tensor:
        """Read elements of a tensor; the result is valid until this thread reads again."""
        if name in self.packed:
            return self._unpack(name, low, high)
        stored = thread_buffer(high - low, self.shards.spec(name).dtype)
        self.shards.read_into(name, stored, low)
        return self._dequantize(name, stored, low) if self._is_fp8(name) else stored

    def fill(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill a tensor with elements from `first` on, in the type of `out`."""
        stored = name not in self.packed and self.shards.spec(name).dtype == out.dtype
        if stored and not self._is_fp8(name):
            self.shards.read_into(name, out, first)
            return
        for low in range(0, out.numel(), PART):
            part = out[low : low + PART]
            part.copy_(self.read(name, first + low, first + low + part.numel()))

    def check(self, name: str) -> None:
        """Raise an error if a tensor is not a weight that can be read."""
        spec, path = self.spec(name), self.file_of(name)
        if name in self.packed:
            self._check_packed(name)
        elif self._is_fp8(name):
            self.check_scales(name)
        elif spec.dtype not in _PLAIN:
            wanted, had = "BF16, F16 or F32", dtype_name(spec.dtype)
            raise TensorMismatchError(path, name, wanted=wanted, had=had)
        elif self._blocks is not None and name + SCALE in self.shards.names_set:
            wanted = "F8_E4M3, because it has scales"
            raise TensorMismatchError(path, name, wanted=wanted, had=dtype_name(spec.dtype))

    def check_scales(self, name: str) -> None:
        """Raise an error if a tensor is FP8, and its scales do not fit."""
        if not self._is_fp8(name):
            return
        path, shape = self.file_of(name), self.spec(name).shape
        if self._blocks is None:
            raise UnsupportedModelError(
                f"{path}: tensor {name} has the type F8_E4M3, and config.json has no "
                f"quantization_config that says how to read it; use the model's own config.json"
            )
        spec = self.shards.spec(name + SCALE)
        if spec.dtype not in _SCALE_DTYPES:
            wanted, had = "a type of scales such as F32", dtype_name(spec.dtype)
            raise TensorMismatchError(path, name + SCALE, wanted=wanted, had=had)
        grid = _scale_grid(self._blocks, shape)
        fits = math.prod(spec.shape) == 1 if grid == (1, 1) else spec.shape == grid
        if len(shape) != 2 or not fits:
            raise TensorMismatchError(
                self.shards.file_of(name + SCALE), name + SCALE, had=f"shape {spec.shape}",
                wanted=f"shape {grid}, one scale for each block of the weight's shape {shape}",
            )  # fmt: skip

    def _find_packed(self) -> frozenset[str]:
        if not isinstance(self._quantization, Mxfp4):
            return frozenset()
        parts = [name for name in self.shards.names if name.endswith((BLOCKS, SCALES))]
        return frozenset(name.removesuffix(BLOCKS).removesuffix(SCALES) for name in parts)

    def _is_scale(self, name: str) -> bool:
        if self._blocks is None:
            return False
        if name.endswith(SCALE):
            return name.removesuffix(SCALE) in self.shards.names_set
        return name.endswith(_ACTIVATION_SCALES)

    def _is_fp8(self, name: str) -> bool:
        return name not in self.packed and self.shards.spec(name).dtype == torch.float8_e4m3fn

    # FP8.

    def _dequantize(self, name: str, stored: torch.Tensor, low: int) -> torch.Tensor:
        """Multiply stored values, from element `low` of the tensor on, by their scales.

        The product is rounded once, from fp32 to the type of the weights, as transformers does it.
        """
        assert self._blocks is not None
        shape = self.shards.spec(name).shape
        columns, grid = shape[1], _scale_grid(self._blocks, shape)
        rows_per_scale = self._blocks.rows or shape[0]
        high = low + stored.numel()
        first, last = (at // columns // rows_per_scale for at in (low, high - 1))
        scales = self._read_scales(name + SCALE, first, last + 1, grid[1])
        out = torch.empty(stored.numel(), dtype=self._dtype)
        at = low
        while at < high:
            row, column = divmod(at, columns)
            scale = scales[row // rows_per_scale - first]
            if column or high - at < columns:  # part of a row
                stop = min(high, (row + 1) * columns)
            else:  # whole rows with the same scales
                last_row = min(high // columns, (row // rows_per_scale + 1) * rows_per_scale)
                stop = last_row * columns
            wide = scale.repeat_interleave(self._blocks.columns or columns)[:columns]
            wide = wide[column : column + stop - at]
            values = stored[at - low : stop - low].float().view(-1, wide.numel())
            out[at - low : stop - low].copy_((values * wide).view(-1))
            at = stop
        return out

    def _read_scales(self, name: str, first: int, stop: int, columns: int) -> torch.Tensor:
        """Read rows `first` to `stop` of a tensor's scales, as fp32."""
        spec = self.shards.spec(name)
        scales = torch.empty((stop - first) * columns, dtype=spec.dtype)
        self.shards.read_into(name, scales, first * columns)
        if spec.dtype == torch.uint8:  # exponents of powers of two
            return (scales.float() - 127.0).exp2().view(-1, columns)
        return scales.float().view(-1, columns)

    # MXFP4.

    def _unpack(self, name: str, low: int, high: int) -> torch.Tensor:
        """Return elements of an MXFP4 tensor: 4-bit floats times powers of two."""
        first, stop = low // _FP4_GROUP, -(-high // _FP4_GROUP)
        pairs = thread_buffer((stop - first) * _FP4_GROUP // 2, torch.uint8)
        self.shards.read_into(name + BLOCKS, pairs, first * _FP4_GROUP // 2)
        exponents = torch.empty(stop - first, dtype=torch.uint8)
        self.shards.read_into(name + SCALES, exponents, first)
        values = multiply_fp4(pairs, exponents)
        return values[low - first * _FP4_GROUP : high - first * _FP4_GROUP]

    def _check_packed(self, name: str) -> None:
        """Raise an error if the two tensors of an MXFP4 weight do not fit each other."""
        blocks, scales = (self.shards.spec(name + suffix) for suffix in (BLOCKS, SCALES))
        for suffix, spec in ((BLOCKS, blocks), (SCALES, scales)):
            if spec.dtype != torch.uint8:
                path, had = self.shards.file_of(name + suffix), dtype_name(spec.dtype)
                raise TensorMismatchError(path, name + suffix, wanted="U8", had=had)
        if len(blocks.shape) != 4 or blocks.shape[3] != _FP4_GROUP // 2:
            raise TensorMismatchError(
                self.shards.file_of(name + BLOCKS), name + BLOCKS, had=f"shape {blocks.shape}",
                wanted=f"four dimensions, the last of {_FP4_GROUP // 2} bytes",
            )  # fmt: skip
        if scales.shape != blocks.shape[:3]:
            raise TensorMismatchError(
                self.shards.file_of(name + SCALES), name + SCALES, had=f"shape {scales.shape}",
                wanted=f"shape {blocks.shape[:3]}, one scale for each block",
            )  # fmt: skip


def _scale_grid(blocks: ScaleBlocks, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales; the last block of a row or column may be partial."""
    sizes = (blocks.rows, blocks.columns)
    return tuple(-(-n // (size or n or 1)) for n, size in zip(shape, sizes, strict=False))


def multiply_fp4(pairs: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return bf16 values of 4-bit floats, two in each byte, times a power of two for each group.

    Two look-ups in small tables and one product: 700 M elements/s per core, where `torch.ldexp`
    and a look-up by 64-bit indices take 35 times as long. The product is exact.
    """
    table, scales = _fp4_tables()
    # The two bf16 values of a byte are looked up as one 32-bit number.
    values = table.index_select(0, pairs.int()).view(torch.bfloat16).view(-1, _FP4_GROUP)
    return values.mul_(scales.index_select(0, exponents.int()).view(-1, 1)).view(-1)


@functools.cache
def _fp4_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return twice the two values of each byte, as a 32-bit number, and half of each scale.

    Scales are 2 ** -127 to 2 ** 128, and bf16 has no 2 ** 128.
    """
    values = 2 * torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # low half first
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 128)
    return pairs.view(torch.int32).view(-1), scales.to(torch.bfloat16)


def thread_buffer(count: int, dtype: torch.dtype, slot: int = 0) -> torch.Tensor:
    """Return memory that belongs to this thread until it calls again with the same slot.

    The buffer is reused, because the first touch of a new page takes about as long as filling it
    from a good disk.
    """
    nbytes = count * dtype.itemsize
    buffers: dict[int, torch.Tensor] = vars(_thread).setdefault("buffers", {})
    if slot not in buffers or buffers[slot].numel() < nbytes:
        buffers[slot] = torch.empty(nbytes, dtype=torch.uint8)
    return buffers[slot][:nbytes].view(dtype)
