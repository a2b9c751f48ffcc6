"""The weights of a model's files, under the model's own names and without quantization.

`ModelWeights` compares every header with the model when it is created: a missing tensor, and one of
another shape or type, is an error before memory is allocated. FP8 weights are multiplied by their
scales while they are read, part by part, so that no tensor is ever in memory as a whole.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from penstock.checkpoint.errors import CorruptIndexError, TensorMismatchError, TensorNotFoundError
from penstock.checkpoint.reader import ShardReader, Spec
from penstock.checkpoint.safetensors_header import dtype_name
from penstock.errors import RecordError, UnsupportedModelError
from penstock.model.checkpoint_names import NameMap, map_names
from penstock.model.inventory import Inventory, TensorSpec
from penstock.model.quantization import ScaleBlocks, find_quantization
from penstock.records import parse

SCALE = "_scale_inv"
"""Suffix of the name of a tensor's scales. Despite the name, weights are multiplied by them."""

_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu)
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
"""Suffixes of scales of activations, which unquantized layers do not use."""

PART = 1 << 22
"""Number of elements of a kept tensor that are read at a time."""

_MAX_CONFIG_NBYTES = 16_000_000

_thread = threading.local()


class ModelWeights:
    """The weights of a directory, which match an inventory.

    Quantized tensors are delivered in `dtype`, and all others in the type of the file.
    """

    def __init__(self, folder: Path, inventory: Inventory, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks = find_quantization(_read_config(folder), str(folder))
        self.shards = ShardReader(folder)
        try:
            scales = {name for name in self.shards.names if self._is_scale(name)}
            found = [name for name in self.shards.names if name not in scales]
            mapped = map_names(found, inventory, folder)
            self._names, self.kept = mapped.names, mapped.kept
            self.unexpected = mapped.unexpected
            """Tensors of the files that the model does not have, and that are not saved with it."""
            self._check_missing(inventory, mapped)
            for block in inventory.blocks:
                for tensor in block.tensors:
                    self._check(self._names[tensor.name], tensor.shape)
            self.missing_buffers = [b.name for b in inventory.buffers if b.name not in self._names]
            """Buffers that the files lack: the model has the values that its class computes."""
            for buffer in inventory.buffers:
                if buffer.name in self._names:
                    self._check_shape(self._names[buffer.name], buffer.shape)
            for name, owner in mapped.tied.items():
                self._check_tied(name, self._names[owner])
            if mapped.tied_outside:
                self._check_untied(*(self._names[name] for name in mapped.tied_outside))
            for name in self.kept:
                if self._is_quantized(name):
                    self._check_scales(name, self.shards.spec(name).shape)
        except BaseException:
            self.shards.close()
            raise

    def file_name(self, name: str) -> str:
        """Return the name in the files of a tensor of the model."""
        return self._names.get(name, name)

    def dtype(self, tensor: TensorSpec) -> torch.dtype:
        """Return the type in which `read` delivers a tensor."""
        return self.kept_spec(self._names[tensor.name]).dtype

    def read(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        """Read elements of a tensor; the result is valid until this thread reads again."""
        return self._read(self._names[tensor.name], low, high)

    def kept_spec(self, name: str) -> Spec:
        """Return the shape of a tensor of the files, and the type in which it is delivered."""
        spec = self.shards.spec(name)
        return Spec(self._dtype, spec.shape) if self._is_quantized(name) else spec

    def kept_parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor of the files part by part; each is valid until the next."""
        elements = math.prod(self.shards.spec(name).shape)
        for low in range(0, elements, PART):
            yield self._read(name, low, min(low + PART, elements))

    def read_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set those buffers of a model that the files have."""
        for name, buffer in buffers.items():
            if name in self._names:
                values = self._read(self._names[name], 0, buffer.numel())
                buffer.copy_(values.view(buffer.shape))

    def move_to(self, folder: Path) -> None:
        """Read from a folder with a copy of all tensors under the same names from now on."""
        shards = ShardReader(folder)
        self.shards.close()
        self.shards = shards

    def _read(self, name: str, low: int, high: int) -> torch.Tensor:
        stored = thread_buffer(high - low, self.shards.spec(name).dtype)
        self.shards.read_into(name, stored, low)
        return self._dequantize(name, stored, low) if self._is_quantized(name) else stored

    def close(self) -> None:
        """Close the files."""
        self.shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.shards.__exit__(*exception)

    def _is_scale(self, name: str) -> bool:
        if self._blocks is None:
            return False
        if name.endswith(SCALE):
            return name.removesuffix(SCALE) in self.shards.names_set
        return name.endswith(_ACTIVATION_SCALES)

    def _is_quantized(self, name: str) -> bool:
        return self.shards.spec(name).dtype == torch.float8_e4m3fn

    def _check_missing(self, inventory: Inventory, mapped: NameMap) -> None:
        """Raise an error for tensors that only the model has."""
        owned = (tensor.name for block in inventory.blocks for tensor in block.tensors)
        missing = [name for name in owned if name not in self._names]
        if mapped.tied_outside and missing == [mapped.tied_outside[0]]:
            raise UnsupportedModelError(
                f"{self.shards.path} has no tensor {missing[0]}: config.json ties it to the "
                f"embedding (tie_word_embeddings), but its text_config does not. Tie both with "
                f"--model-config tie_word_embeddings=true"
            )
        if missing:
            raise TensorNotFoundError(
                self.shards.path, missing[0], others=missing[1:], total=len(self.shards.names),
                close=difflib.get_close_matches(missing[0], self.shards.names, n=1),
            )  # fmt: skip

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        spec, path = self.shards.spec(name), self.shards.file_of(name)
        if spec.shape != shape:
            raise UnsupportedModelError(
                f"{path}: {name} has shape {spec.shape}, but config.json describes a model with "
                f"shape {shape}; use weights and config.json of the same model"
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise an error if a tensor cannot be read as the model needs it."""
        self._check_shape(name, shape)
        spec, path = self.shards.spec(name), self.shards.file_of(name)
        if self._is_quantized(name):
            self._check_scales(name, shape)
        elif spec.dtype not in _PLAIN:
            wanted, had = "BF16, F16 or F32", dtype_name(spec.dtype)
            raise TensorMismatchError(path, name, wanted=wanted, had=had)
        elif self._blocks is not None and name + SCALE in self.shards.names_set:
            wanted = "F8_E4M3, because it has scales"
            raise TensorMismatchError(path, name, wanted=wanted, had=dtype_name(spec.dtype))

    def _check_tied(self, name: str, owner: str) -> None:
        """Raise an error if two tensors that the model ties differ in the files.

        transformers loads such a model without the tie, which is another model than was planned.
        """
        if not self._equal(name, owner):
            raise UnsupportedModelError(
                f"{self.shards.file_of(name)}: tensor {name} differs from {owner}, and config.json "
                f"ties the two (tie_word_embeddings). To train both, set tie_word_embeddings to "
                f"false in config.json; otherwise remove {name} from the file"
            )

    def _check_untied(self, name: str, owner: str) -> None:
        """Raise an error if two tensors are equal that only the outer model ties.

        transformers ties them if they are equal, and trains both if they are not.
        """
        if self._equal(name, owner):
            raise UnsupportedModelError(
                f"{self.shards.file_of(name)}: tensor {name} equals {owner}. config.json ties the "
                f"two (tie_word_embeddings), but its text_config does not. Tie both with "
                f"--model-config tie_word_embeddings=true"
            )

    def _equal(self, name: str, other: str) -> bool:
        """Compare two tensors of the files part by part."""
        spec = self.shards.spec(name)
        if spec != self.shards.spec(other):
            return False
        elements = math.prod(spec.shape)
        for low in range(0, elements, PART):
            count = min(PART, elements - low)
            pair = [torch.empty(count, dtype=spec.dtype) for _ in range(2)]
            self.shards.read_into(name, pair[0], low)
            self.shards.read_into(other, pair[1], low)
            if not torch.equal(*pair):
                return False
        return True

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        path = self.shards.file_of(name)
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


def _scale_grid(blocks: ScaleBlocks, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales; the last block of a row or column may be partial."""
    sizes = (blocks.rows, blocks.columns)
    return tuple(-(-n // (size or n or 1)) for n, size in zip(shape, sizes, strict=False))


def thread_buffer(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory that belongs to this thread until it calls again.

    The buffer is reused, because the first touch of a new page takes about as long as filling it
    from a good disk.
    """
    nbytes = count * dtype.itemsize
    buffer: torch.Tensor | None = getattr(_thread, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _thread.buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer[:nbytes].view(dtype)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`; empty if there is none next to the weights."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_CONFIG_NBYTES:
            raise CorruptIndexError(str(path), f"has more than {_MAX_CONFIG_NBYTES} B")
        document = parse(path.read_bytes())
    except RecordError as error:
        raise CorruptIndexError(str(path), str(error)) from None
    return document if isinstance(document, dict) else {}
