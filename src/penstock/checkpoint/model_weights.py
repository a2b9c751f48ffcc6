"""The weights of a model's files, under the model's own names and in its own form.

`ModelWeights` compares every header with the model when it is created: a missing tensor, and one of
another shape or type, is an error before memory is allocated. Experts that files have one by one
are put in their places in the model's tensors while they are read.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from penstock.checkpoint.assemble import Assembler
from penstock.checkpoint.errors import CorruptIndexError, TensorNotFoundError
from penstock.checkpoint.plain_tensors import PART, PlainTensors, thread_buffer
from penstock.checkpoint.reader import ShardReader, Spec
from penstock.errors import RecordError, UnsupportedModelError
from penstock.model.checkpoint_names import NameMap, map_names
from penstock.model.inventory import Inventory, TensorSpec
from penstock.model.quantization import find_quantization
from penstock.model.saved_names import SavedNames
from penstock.model.tensor_layout import Layout, transpose, whole
from penstock.records import parse

_MAX_CONFIG_NBYTES = 16_000_000


class ModelWeights:
    """The weights of a directory, which match an inventory.

    FP8 tensors are delivered in `dtype`, MXFP4 tensors in bfloat16, and all others in the type of
    the file.
    """

    def __init__(self, folder: Path, inventory: Inventory, dtype: torch.dtype) -> None:
        quantization = find_quantization(_read_config(folder), str(folder))
        self.tensors = PlainTensors(folder, dtype, quantization)
        self._assembler = Assembler(self.tensors.fill)
        try:
            mapped = map_names(self.tensors.names, inventory, folder)
            self._names, self.kept = mapped.names, mapped.kept
            self._layouts = mapped.layouts | self._unpacked(mapped)
            self._splits = mapped.splits
            self._dtypes: dict[str, torch.dtype] = {}
            self.unexpected = mapped.unexpected
            """Tensors of the files that the model does not have, and that are not saved with it."""
            self.missing_buffers = [b.name for b in inventory.buffers if b.name not in self._names]
            """Buffers that the files lack: the model has the values that its class computes."""
            self._check_missing(inventory, mapped)
            self._check_tensors(inventory)
            for name, owner in mapped.tied.items():
                self._check_tied(name, self._names[owner])
            if mapped.tied_outside:
                self._check_untied(*(self._names[name] for name in mapped.tied_outside))
        except BaseException:
            self.shards.close()
            raise

    @property
    def shards(self) -> ShardReader:
        """The files."""
        return self.tensors.shards

    @property
    def saved_names(self) -> SavedNames:
        """The names and forms in which the model is saved: those of the files.

        Models that the files have under other names, and nothing else, get their own names.
        """
        if not (self.kept or self._splits):
            return SavedNames()
        return SavedNames(dict(self._names), self._splits)

    def file_name(self, name: str) -> str:
        """Return the name in the files of a tensor of the model."""
        return self._names.get(name, name)

    def dtype(self, tensor: TensorSpec) -> torch.dtype:
        """Return the type in which `read` delivers a tensor."""
        layout = self._layouts.get(tensor.name)
        if layout is None:
            return self.tensors.spec(self._names[tensor.name]).dtype
        if tensor.name not in self._dtypes:
            dtypes = {self.tensors.spec(name).dtype for name in layout.sources}
            self._dtypes[tensor.name] = functools.reduce(torch.promote_types, dtypes)
        return self._dtypes[tensor.name]

    def read(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        """Read elements of a tensor; the result is valid until this thread reads again."""
        layout = self._layouts.get(tensor.name)
        if layout is None:
            return self.tensors.read(self._names[tensor.name], low, high)
        # Slot 1: the first one is used to read tensors of another type.
        out = thread_buffer(high - low, self.dtype(tensor), slot=1)
        self._assembler.read(layout, low, out)
        return out

    def kept_spec(self, name: str) -> Spec:
        """Return the shape of a tensor of the files, and the type in which it is delivered."""
        return self.tensors.spec(name)

    def kept_parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor of the files part by part; each is valid until the next."""
        elements = math.prod(self.tensors.spec(name).shape)
        for low in range(0, elements, PART):
            yield self.tensors.read(name, low, min(low + PART, elements))

    def read_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set those buffers of a model that the files have."""
        for name, buffer in buffers.items():
            if name in self._names:
                values = self.tensors.read(self._names[name], 0, buffer.numel())
                buffer.copy_(values.view(buffer.shape))

    def move_to(self, folder: Path) -> None:
        """Read from a folder with a copy of all tensors under the same names from now on."""
        self.tensors.move_to(folder)

    def close(self) -> None:
        """Close the files."""
        self.shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.shards.__exit__(*exception)

    def _unpacked(self, mapped: NameMap) -> dict[str, Layout]:
        """Return the layouts of MXFP4 tensors, whose matrices are transposed in the files."""
        packed = {own: name for own, name in mapped.names.items() if name in self.tensors.packed}
        for name in packed.values():
            self.tensors.check(name)
        return {
            own: transpose(whole(name, self.tensors.spec(name).shape), 1, 2)
            for own, name in packed.items()
        }

    def _check_missing(self, inventory: Inventory, mapped: NameMap) -> None:
        """Raise an error for tensors that only the model has."""
        found = self._names.keys() | self._layouts
        owned = (tensor.name for block in inventory.blocks for tensor in block.tensors)
        missing = [name for name in owned if name not in found]
        if mapped.tied_outside and missing == [mapped.tied_outside[0]]:
            raise UnsupportedModelError(
                f"{self.shards.path} has no tensor {missing[0]}: config.json ties it to the "
                f"embedding (tie_word_embeddings), but its text_config does not. Tie both with "
                f"--model-config tie_word_embeddings=true"
            )
        if missing := [*mapped.missing, *missing]:
            raise TensorNotFoundError(
                self.shards.path, missing[0], others=missing[1:], total=len(self.shards.names),
                close=difflib.get_close_matches(missing[0], self.shards.names, n=1),
            )  # fmt: skip

    def _check_tensors(self, inventory: Inventory) -> None:
        """Raise an error if a tensor cannot be read as the model needs it."""
        for name, split in self._splits.items():
            self._check_shape(name, split.shape)
            self.tensors.check(name)
        for tensor in (tensor for block in inventory.blocks for tensor in block.tensors):
            if tensor.name in self._names:
                name = self._names[tensor.name]
                self.tensors.check(name)
                self._check_shape(name, tensor.shape, self._layouts.get(tensor.name))
        for buffer in inventory.buffers:
            if buffer.name in self._names:
                self._check_shape(self._names[buffer.name], buffer.shape)
        for name in self.kept:
            self.tensors.check_scales(name)

    def _check_shape(self, name: str, shape: tuple[int, ...], layout: Layout | None = None) -> None:
        had = self.tensors.spec(name).shape if layout is None else layout.shape
        if had != shape:
            raise UnsupportedModelError(
                f"{self.tensors.file_of(name)}: {name} has shape {had}, but config.json describes "
                f"a model with shape {shape}; use weights and config.json of the same model"
            )

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
