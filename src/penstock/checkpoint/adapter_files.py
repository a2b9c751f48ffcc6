"""The files of an adapter, as PEFT writes them, and the model that it belongs to.

A run that trains an adapter does not save the frozen weights: they are those of the base model.
`adapter_model.safetensors` and `adapter_config.json` are PEFT's own files. `base_model.json` says
which weights the adapter was trained with, so that a resume or a merge with others is refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from penstock import records
from penstock.checkpoint.checksums import crc32c, to_hex
from penstock.checkpoint.disk import bytes_of
from penstock.checkpoint.errors import AdapterConfigError, BaseModelError
from penstock.checkpoint.reader import ShardReader
from penstock.durable_files import replace_file
from penstock.errors import RecordError
from penstock.model.adapters import Adapter, base_name
from penstock.model.inventory import Block, TensorSpec
from penstock.packed_weights import Quantization
from penstock.roles import SWEEP_LEAF, Dtype

STEM = "adapter_model"
"""Stem of the name of PEFT's file of tensors."""

CONFIG = "adapter_config.json"
BASE = "base_model.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """The contents of `base_model.json`."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    path: str = ""
    """Directory of the base model, or its name on the Hugging Face Hub; "" if it is not known."""

    revision: str = ""
    """Revision on the Hub; "" for the newest."""

    dtype: Dtype | None = None
    """Type of the frozen weights in that run; None if it is not known."""

    quantize: Quantization | None = None
    """How the frozen weights were quantized in that run; None if they were not."""

    digest: str = ""
    """Hash of the frozen weights in that type, before they were quantized; see `WeightDigest`."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise RecordError("version", f"must be {self.FORMAT}, got {self.version}")

    @classmethod
    def load(cls, folder: str | Path) -> BaseModel:
        """Read the file of an adapter; of an adapter from elsewhere, what PEFT's config says."""
        path = Path(folder, BASE)
        if path.is_file():
            return records.load(cls, path)
        config: Any = records.read_json(Path(folder, CONFIG))
        name = config.get("base_model_name_or_path") if isinstance(config, Mapping) else None
        return cls(path=name if isinstance(name, str) else "")

    def check(self, folder: str | Path, other: BaseModel) -> None:
        """Raise BaseModelError if other weights were loaded than the adapter was trained with."""
        comparable = self.digest and other.digest and self.dtype == other.dtype
        if comparable and self.digest != other.digest:
            raise BaseModelError(str(folder), base=self.path, found=other.path)


class WeightDigest:
    """Hashes the frozen weights of a model while they are loaded.

    It contains the first elements of every tensor in the type of the run, so it depends neither on
    the files that the weights come from, nor on the plan, nor on the number of ranks. Weights that
    were trained further differ in nearly all elements.
    """

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}

    def note_block(
        self, block: Block, read: Callable[[TensorSpec, int, int], torch.Tensor]
    ) -> None:
        """Note the frozen tensors of a block. `read` returns elements in the type of the run."""
        for tensor in block.tensors:
            if not tensor.trainable:
                self.note(tensor, read(tensor, 0, min(SWEEP_LEAF, tensor.elements)))

    def note(self, tensor: TensorSpec, values: torch.Tensor) -> None:
        """Note a frozen tensor, of which `values` are at least the first elements."""
        first = values[: min(SWEEP_LEAF, tensor.elements)].contiguous()
        self._sums[base_name(tensor.name)] = to_hex(crc32c(bytes_of(first)))

    @property
    def value(self) -> str:
        """The hash of all tensors that were noted."""
        text = json.dumps(sorted(self._sums.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """What is saved of an adapter in addition to its tensors."""

    adapter: Adapter
    names: Mapping[str, str]
    """The name in PEFT's file of each tensor that it has."""
    base: BaseModel
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names in PEFT's file, and the tensor of the model that each is a copy of."""

    def write(self, folder: str | Path) -> None:
        """Write the small files into an existing directory."""
        replace_file(Path(folder, CONFIG), self._config())
        records.save(self.base, Path(folder, BASE))

    def _config(self) -> str:
        config = copy.deepcopy(self.adapter.config)
        for name, value in vars(config).items():
            if isinstance(value, set):  # whose order differs from process to process
                setattr(config, name, sorted(value))
        config.inference_mode = True  # as PEFT saves it: loaded adapters are frozen by default
        config.base_model_name_or_path = self.base.path or config.base_model_name_or_path
        if getattr(config, "ensure_weight_tying", False) and not self.tied:
            config.ensure_weight_tying = False  # PEFT would warn that nothing is tied
        if self.base.revision:
            config.revision = self.base.revision
        with tempfile.TemporaryDirectory(prefix="penstock-") as saved:
            config.save_pretrained(saved)
            return Path(saved, CONFIG).read_text(encoding="utf-8")


def is_adapter(folder: str | Path) -> bool:
    """Return whether a directory has an adapter, and not a whole model."""
    return Path(folder, CONFIG).is_file() and Path(folder, f"{STEM}.safetensors").is_file()


def check_described(
    shards: ShardReader,
    adapter: Adapter,
    described: Collection[str],
    *,
    config: str = CONFIG,
    allowed: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raise AdapterConfigError unless an adapter's file has the tensors that its config describes.

    Args:
        shards: The file.
        adapter: The adapter with that config.
        described: Names of the tensors that such an adapter has.
        config: What to call the config in the message.
        allowed: Returns whether a further tensor in the file changes nothing.
    """
    missing = [name for name in described if name not in shards.names_set]
    unknown = [name for name in shards.names if name not in described and not allowed(name)]
    if missing or unknown:
        raise AdapterConfigError(
            str(shards.files[0]),
            config=config,
            missing={name: adapter.config_entry(name) for name in missing},
            unknown={name: adapter.config_entry(name) for name in unknown},
        )
