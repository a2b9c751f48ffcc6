"""The weights of a model with an adapter merged into them, tensor by tensor.

PEFT's own modules merge: each gets the tensors that it needs, merges, and gives its result back. So
the result is that of `merge_and_unload`, and only one tensor of the model is in memory at a time.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from penstock import records
from penstock.checkpoint.adapter_files import (
    CONFIG,
    STEM,
    BaseModel,
    WeightDigest,
    check_described,
)
from penstock.checkpoint.assemble import Assembler
from penstock.checkpoint.errors import TensorMismatchError
from penstock.checkpoint.model_weights import ModelWeights
from penstock.checkpoint.reader import ShardReader
from penstock.errors import RecordError, SettingsError, UnsupportedModelError
from penstock.model.adapters import COPIES, WRAPPER, Adapter, base_name, find_adapter
from penstock.model.config import load_config
from penstock.model.inventory import TensorSpec
from penstock.model.meta_model import build_model, on_meta, weight_dtype
from penstock.model.survey import survey_config
from penstock.model.tensor_layout import Layout
from penstock.optim import formats
from penstock.roles import SWEEP_LEAF, Dtype

PART = 1 << 22
"""Number of elements that are delivered at a time."""


def load_adapter(folder: str | Path) -> Adapter:
    """Read the config of a saved adapter. Raises SettingsError if PEFT is not installed."""
    try:
        import peft
    except ImportError:
        raise SettingsError(
            "lora", "adapters need the package peft, which is not installed: run `pip install peft`"
        ) from None
    path = Path(folder, CONFIG)
    records.read_json(path)  # says which file is wrong
    try:
        return Adapter("default", peft.PeftConfig.from_pretrained(str(folder)))
    except Exception as problem:  # PEFT checks few of the types
        raise RecordError("", f"PEFT cannot read it: {problem}", where=str(path)) from None


def _attach(adapter: Adapter, model: nn.Module, path: Path) -> nn.Module:
    """Put a saved adapter into a model. Raises RecordError, which names its config."""
    try:
        return adapter.attach(model)
    except SettingsError as problem:
        raise RecordError("", problem.problem, where=str(path)) from None


class MergedWeights:
    """The weights of a base model in a directory, with the adapter of another directory.

    It delivers what `ModelWeights` does. Raises BaseModelError if the adapter was trained with
    other weights, and AdapterConfigError if its file has other tensors than its config describes.
    Several threads may read.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        trust_remote_code: bool = False,
    ) -> None:
        self.config = load_config(base, trust_remote_code=trust_remote_code, trained=False)
        self.inventory = survey_config(
            self.config, name=str(base), trust_remote_code=trust_remote_code
        )
        model = build_model(
            self.config, torch.float32, torch.device("cpu"), trust_remote_code=trust_remote_code
        )
        model = _attach(load_adapter(folder), model, Path(folder, CONFIG))
        adapter = find_adapter(model)
        assert adapter is not None
        self._model, self._adapter = model, adapter
        self._names = adapter.file_names(model)
        self._modules = _modules_by_tensor(model, adapter)
        self._replaced = _replaced_tensors(self._names, adapter)
        self._lock, self._thread = threading.Lock(), threading.local()
        with contextlib.ExitStack() as opened:
            self.base = opened.enter_context(ModelWeights(base, self.inventory, dtype))
            self._tensors = opened.enter_context(ShardReader(folder, STEM))
            self._check_tensors(model)
            self._check_tie()
            recorded = BaseModel.load(folder)
            recorded.check(folder, self._identify(str(base), recorded.dtype))
            self._opened = opened.pop_all()

    def read(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        """Read elements of a tensor; the result is valid until this thread reads again."""
        if not self.is_changed(tensor.name):
            return self.base.read(tensor, low, high)
        last: dict[str, torch.Tensor] = vars(self._thread).setdefault("last", {})
        if tensor.name not in last:
            last.clear()  # before the next one is in memory
            last[tensor.name] = self._merge(tensor)
        return last[tensor.name].reshape(-1)[low:high]

    def parts(self, tensor: TensorSpec) -> Iterator[torch.Tensor]:
        """Yield a tensor part by part; each is valid until the next."""
        for low in range(0, tensor.elements, PART):
            yield self.read(tensor, low, min(low + PART, tensor.elements))
        vars(self._thread).pop("last", None)

    def split_parts(self, layout: Layout) -> Iterator[torch.Tensor]:
        """Yield a tensor in the form of the files, such as one expert's matrix, part by part."""
        assembler = Assembler(self._fill)
        dtype = self.dtype(self._tensor(layout.sources[0]))
        for low in range(0, layout.elements, PART):
            out = torch.empty(min(PART, layout.elements - low), dtype=dtype)
            assembler.read(layout, low, out)
            yield out

    def _fill(self, name: str, first: int, out: torch.Tensor) -> None:
        out.copy_(self.read(self._tensor(name), first, first + out.numel()))

    def _tensor(self, name: str) -> TensorSpec:
        tensors = (tensor for block in self.inventory.blocks for tensor in block.tensors)
        return next(tensor for tensor in tensors if tensor.name == name)

    def is_changed(self, name: str) -> bool:
        """Return whether the adapter changes a tensor of the base model."""
        return name in self._modules or name in self._replaced

    def dtype(self, tensor: TensorSpec) -> torch.dtype:
        """Return the type in which `read` delivers a tensor: that of the base model."""
        return self.base.dtype(tensor)

    def read_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set those buffers of a model that the base model's files have."""
        self.base.read_buffers(buffers)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def _merge(self, tensor: TensorSpec) -> torch.Tensor:
        """Return a whole tensor, as PEFT merges it."""
        if tensor.name in self._replaced:
            return self._own(self._replaced[tensor.name]).to(self.dtype(tensor))
        value = self._whole(tensor)
        with self._lock:
            for path, leaf in self._modules[tensor.name]:
                value = self._merge_module(path, leaf, value)
        return value

    def _merge_module(self, path: str, leaf: str, value: torch.Tensor) -> torch.Tensor:
        """Let one of PEFT's modules merge its adapter into a tensor."""
        module: Any = self._model.get_submodule(path)
        with _with_tensors(module, self._module_tensors(path, leaf, value)):
            try:
                module.merge()
                merged: torch.Tensor = module.get_parameter(leaf).detach()
            finally:
                module.merged_adapters = []
        return merged

    def _module_tensors(
        self, path: str, leaf: str, value: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        module = self._model.get_submodule(path)
        tensors = {t.name: t for block in self.inventory.blocks for t in block.tensors}
        for local, _ in module.named_parameters():
            name = f"{path}.{local}"
            if _is_elsewhere(module, local) and local != leaf:
                continue
            if local == leaf:
                yield local, value
            elif self._adapter.is_own(name):
                yield local, self._own(self._names[name]).float()  # as PEFT loads it
            elif (found := base_name(name)) in self._replaced:
                yield local, self._own(self._replaced[found]).to(value.dtype)
            elif found in tensors:
                yield local, self._whole(tensors[found])

    def _whole(self, tensor: TensorSpec) -> torch.Tensor:
        parts = (
            self.base.read(tensor, low, min(low + PART, tensor.elements)).clone()
            for low in range(0, tensor.elements, PART)
        )
        return torch.cat(list(parts)).view(tensor.shape)

    def _own(self, name: str) -> torch.Tensor:
        """Read a whole tensor of the adapter's file."""
        spec = self._tensors.spec(name)
        out = torch.empty(spec.shape, dtype=spec.dtype)
        self._tensors.read_into(name, out.view(-1), 0)
        return out

    def _check_tensors(self, model: nn.Module) -> None:
        """Raise an error unless the file has the tensors of the adapter, in their shapes."""
        described = set(self._names.values())
        check_described(self._tensors, self._adapter, described, allowed=self._is_of_base)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for own, name in self._names.items():
            spec = self._tensors.spec(name)
            if spec.shape != shapes[own]:
                wanted, had = f"shape {shapes[own]}", f"shape {spec.shape}"
                raise TensorMismatchError(self._tensors.file_of(name), name, wanted=wanted, had=had)

    def _is_of_base(self, name: str) -> bool:
        """Return whether a tensor of the adapter's file is one of the base model, unchanged.

        PEFT also saves an embedding that has an adapter.
        """
        wanted = base_name(name.removeprefix(WRAPPER))
        tensors = (tensor for block in self.inventory.blocks for tensor in block.tensors)
        tensor = next((tensor for tensor in tensors if tensor.name == wanted), None)
        if tensor is None or self._tensors.spec(name).shape != tensor.shape:
            return False
        return torch.equal(self._own(name).to(self.dtype(tensor)), self._whole(tensor))

    def _check_tie(self) -> None:
        """Raise UnsupportedModelError if merging would untie the head from the embedding."""
        tied = {name for block in self.inventory.blocks for name in block.borrows}
        copies = {base_name(name) for name in self._names if COPIES in name}
        if tied & copies and not getattr(self._adapter.config, "ensure_weight_tying", False):
            raise UnsupportedModelError(
                f"the adapter has a trained copy of {min(tied & copies)}, to which the base model "
                f"ties its head; merged, the two would differ. Train it with "
                f"ensure_weight_tying=True, or use the adapter without merging"
            )

    def _identify(self, path: str, dtype: Dtype | None) -> BaseModel:
        """Return the digest of the weights that the adapter leaves as they are."""
        if dtype is None:
            return BaseModel(path=path)
        digest, kind = WeightDigest(), weight_dtype(dtype)
        for block in self.inventory.blocks:
            for tensor in block.tensors:
                if tensor.name in self._replaced:
                    continue
                values = self.base.read(tensor, 0, min(SWEEP_LEAF, tensor.elements))
                if values.dtype != kind:
                    values = formats.store_master(values.float(), kind)[0]
                frozen = TensorSpec(name=tensor.name, shape=tensor.shape, trainable=False)
                digest.note(frozen, values)
        return BaseModel(path=path, dtype=dtype, digest=digest.value)


def merge_in_memory(model: Any, folder: Path, base: Path) -> Any:
    """Merge a saved adapter into a transformers model that was loaded from `base`."""
    import peft

    MergedWeights(folder, base).close()  # checks that they belong together
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def _modules_by_tensor(model: nn.Module, adapter: Adapter) -> dict[str, list[tuple[str, str]]]:
    """Return which of PEFT's modules change a tensor: their paths, and their name of it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    first: dict[int, str] = {}  # a tied tensor is known by its first name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    found: dict[str, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and isinstance(module, nn.Module):
            for leaf, parameter in module.named_parameters():
                if not adapter.is_own(f"{path}.{leaf}") and not _is_elsewhere(module, leaf):
                    name = base_name(first[id(parameter)])
                    found.setdefault(name, []).append((path, leaf))
    return found


def _is_elsewhere(module: Any, leaf: str) -> bool:
    """Return whether merging a module needs a tensor in it neither as weight nor as a factor.

    Adapters of parameters, such as those of experts, are nested, and each changes one parameter.
    """
    changed = getattr(module, "parameter_name", None)
    inner = leaf.startswith("base_layer.")
    return changed is not None and inner and leaf.rpartition(".")[2] != changed


def _replaced_tensors(names: Mapping[str, str], adapter: Adapter) -> dict[str, str]:
    """Return the tensors of the base model that the adapter's file has as a whole."""
    return {base_name(own): name for own, name in names.items() if not adapter.is_own(own)}


@contextlib.contextmanager
def _with_tensors(module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Give a module tensors with memory inside the block."""
    holders = []
    try:
        for name, tensor in tensors:
            parent, _, leaf = name.rpartition(".")
            holder = module.get_submodule(parent)
            holders.append((holder, leaf))
            holder._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for holder, leaf in holders:
            parameter = holder._parameters[leaf]
            assert parameter is not None
            holder._parameters[leaf] = on_meta(parameter)
