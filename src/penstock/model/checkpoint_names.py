"""Find out under which names the files of a model have its tensors, and in which form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedModelError
from penstock.model.config import text_config
from penstock.model.inventory import Inventory
from penstock.model.tensor_layout import Layout, LayoutError, whole
from penstock.model.text_stack import multimodal_class, text_module_paths
from penstock.model.weight_conversion import (
    Streams,
    check_operations,
    convert,
    number_of,
    reverse_operations,
    with_number,
)

if TYPE_CHECKING:
    from torch import nn

_COMPUTED = re.compile(
    r"\.rotary(_emb)?\.inv_freq$|\.(attn|attention|self_attention)\.(masked_)?bias$"
    r"|\.causal_mask$|(^|\.)position_ids$"
)
"""Buffers in old files that transformers computes and does not read."""


@dataclass(frozen=True, slots=True)
class NameMap:
    """The names of a model's tensors in its files."""

    names: dict[str, str]
    """The files' name of each parameter and buffer of the model that they have as it is."""
    kept: tuple[str, ...] = ()
    """Tensors of a multimodal model outside its text stack, saved as they are."""
    unexpected: tuple[str, ...] = ()
    """Tensors that the model does not have, so that neither training nor saving includes them."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further copies of a tied tensor, and the tensor of the model that each is a copy of."""
    tied_outside: tuple[str, str] | None = None
    """Two tensors that a multimodal model ties, and the causal language model in it does not."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Parameters of the model that are made of several tensors of the files, or of a part of one:
    where their elements are in the files."""
    splits: dict[str, Layout] = field(default_factory=dict)
    """The reverse: those tensors of the files, and where their elements are in the model."""
    missing: tuple[str, ...] = ()
    """Tensors that the files lack, of a parameter that they have other parts of."""


def map_names(found: Iterable[str], inventory: Inventory, folder: Path) -> NameMap:
    """Map the names of a model's tensors to those in its files, as transformers does on loading."""
    found = sorted(found)
    wanted = tensor_shapes(inventory)
    body = _build_as_saved(folder)
    if body is None:  # code of its own, or no config: the names must be the model's own
        names = _own_names(set(found), set(wanted), inventory)
        left = sorted(set(found) - set(names.values()))
        return NameMap(names, unexpected=tuple(n for n in left if not _COMPUTED.search(n)))
    mapper, stack = _Mapper(body), _TextStack(body, inventory)
    names, unexpected, kept, tied = {}, [], [], {}
    groups = _ConvertedTensors(mapper, stack, wanted)
    for name in found:
        renamed, pattern = mapper.rename(name)
        own = stack.text_name(renamed)
        if pattern is not None and own in wanted:
            groups.add(renamed, pattern, name)
        elif own in wanted:
            _check_unique(names.setdefault(own, name), name, own)
        elif own is None:
            kept.append(name)
        elif (owner := stack.text_name(mapper.owner(renamed))) in wanted:
            tied[name] = str(owner)
        elif not mapper.is_computed(renamed) and not _COMPUTED.search(name):
            unexpected.append(name)
    for name, owner in list(tied.items()):
        if owner not in names:  # the files have only the other name of a tied tensor
            names[owner] = name
            del tied[name]
    pairs = ((stack.text_name(n), stack.text_name(owner)) for n, owner in mapper.tied_names)
    outside = ((own, owner) for own, owner in pairs if own in wanted and owner in wanted)
    groups.convert()
    for own, layout in groups.layouts.items():
        _check_unique(names.get(own, layout.sources[0]), layout.sources[0], own)
    return NameMap(names, tuple(kept), tuple(unexpected), tied,
                   next(((str(own), str(owner)) for own, owner in outside), None),
                   groups.layouts, groups.splits, tuple(groups.missing))  # fmt: skip


def tensor_shapes(inventory: Inventory) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and buffers by name."""
    tensors = [t for block in inventory.blocks for t in block.tensors]
    return {tensor.name: tensor.shape for tensor in (*tensors, *inventory.buffers)}


def _check_unique(first: str, name: str, own: str) -> None:
    if first != name:
        raise UnsupportedModelError(
            f"the files have the tensor {own[:120]} of the model twice, as {first[:120]} and as "
            f"{name[:120]}; remove one of them"
        )


def _own_names(found: set[str], wanted: set[str], inventory: Inventory) -> dict[str, str]:
    """Return the tensors that the files have under the model's names.

    Some files were written from the model without its head, so their names lack the first part, or
    have it where ours do not.
    """
    prefix = inventory.layers[0].name.split(".")[0] + "."
    names = {}
    for own in wanted:
        candidates = (own, own.removeprefix(prefix), prefix + own)
        name = next((n for n in candidates if n in found), None)
        if name is not None:
            names[own] = name
    return names


class _ConvertedTensors:
    """The tensors of files that are converted, by the parameter that they become."""

    def __init__(
        self, mapper: _Mapper, stack: _TextStack, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self._mapper, self._stack, self._shapes = mapper, stack, shapes
        self._groups: dict[str, dict[str, list[str]]] = {}
        """Names of the files by the model's name and the pattern that they match."""
        self.layouts: dict[str, Layout] = {}
        self.splits: dict[str, Layout] = {}
        self.missing: list[str] = []

    def add(self, renamed: str, pattern: str, name: str) -> None:
        """Add a tensor of the files, with its name in the model and the pattern that it matches."""
        self._groups.setdefault(renamed, {}).setdefault(pattern, []).append(name)

    def convert(self) -> None:
        """Find out where the elements of all these tensors are."""
        for renamed, found in self._groups.items():
            self._convert(renamed, found)

    def _convert(self, renamed: str, found: dict[str, list[str]]) -> None:
        converter = self._mapper.converter(next(iter(found)))
        example = next(iter(found.values()))[0]
        check_operations(converter.operations, example)
        reverse = reverse_operations(converter.operations)
        targets = [str(self._stack.text_name(n)) for n in _target_names(converter, renamed)]
        config, patterns = self._mapper.config, converter.source_patterns
        try:
            shapes = [self._shapes[name] for name in targets]
            model = [[whole(name, shape)] for name, shape in zip(targets, shapes, strict=True)]
            splits = convert(reverse, model, outputs=len(patterns), config=config)
            names = [
                self._number(pattern, found.get(pattern, []), len(split), example)
                for pattern, split in zip(patterns, splits, strict=True)
            ]
            files = _name_streams(names, splits)
            made = convert(converter.operations, files, outputs=len(targets), config=config,
                           shapes=shapes)  # fmt: skip
            layouts = {name: each[0] for name, each in zip(targets, made, strict=True)}
        except (LayoutError, ValueError, KeyError) as problem:
            raise UnsupportedModelError(
                f"the tensor {example[:120]} cannot be converted to {renamed[:120]} as "
                f"transformers does it: {problem}"
            ) from None
        if [layout.shape for layout in layouts.values()] != shapes:
            raise UnsupportedModelError(
                f"transformers converts the tensor {example[:120]} to {renamed[:120]}, which would "
                f"have another shape than config.json describes"
            )
        self.layouts |= layouts
        for of_pattern, each in zip(names, splits, strict=True):
            self.splits |= dict(zip(of_pattern, each, strict=True))

    def _number(self, pattern: str, found: list[str], count: int, example: str) -> list[str]:
        """Return the names of a pattern's tensors in order; note those that the files lack."""
        by_number: dict[int, str] = {}
        for name in found:
            number = number_of(name, pattern)
            _check_unique(by_number.setdefault(number, name), name, f"{pattern} ({number})")
            if number >= count:
                raise UnsupportedModelError(
                    f"the files have the tensor {name[:120]}, and config.json describes a model "
                    f"with {count} of these; use weights and config.json of the same model"
                )
        sample = found[0] if found else _name_like(pattern, example, self._mapper)
        lacking = [i for i in range(count) if i not in by_number]
        self.missing += (with_number(sample, pattern, i) for i in lacking)
        return [by_number.get(i) or with_number(sample, pattern, i) for i in range(count)]


def _target_names(converter: Any, renamed: str) -> list[str]:
    """Return the names of all tensors that a conversion makes; `renamed` is the first."""
    patterns: list[str] = converter.target_patterns
    if len(patterns) == 1:
        return [renamed]
    before, found, after = renamed.partition(patterns[0])
    return [f"{before}{pattern}{after}" for pattern in patterns] if found else []


def _name_like(pattern: str, example: str, mapper: _Mapper) -> str:
    """Return a name for a pattern of which the files have no tensor, from one of another pattern.

    It is made of the parts of the name that both have.
    """
    other = mapper.rename(example)[1] or ""
    leaf = pattern.rpartition("*")[2].replace("\\", "")
    other_leaf = other.rpartition("*")[2].replace("\\", "")
    return example.removesuffix(other_leaf) + leaf if example.endswith(other_leaf) else pattern


def _name_streams(names: list[list[str]], splits: Streams) -> Streams:
    """Return the tensors of the files, in the shapes that the model needs."""
    return [
        [whole(name, split.shape) for name, split in zip(of_pattern, each, strict=True)]
        for of_pattern, each in zip(names, splits, strict=True)
    ]


class _Mapper:
    """Renames tensors of files as transformers does when it loads them into a model."""

    def __init__(self, body: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules: list[Any] = get_model_conversion_mapping(body)
        self.config = body.config
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}
        self._prefix, self._state = body.base_model_prefix, body.state_dict()
        first: dict[int, str] = {}
        self._owner = {
            name: first.setdefault(id(tensor), name)
            for name, tensor in body.named_parameters(remove_duplicate=False)
        }
        self._computed = {name for name, _ in body.named_buffers()} - self._state.keys()

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return a tensor's name in the model, and the pattern of the conversion that it needs.

        The pattern is None if only the name changes.
        """
        from transformers.core_model_loading import rename_source_key

        rules = (self._renamings, self._converters)
        renamed, pattern = rename_source_key(name, *rules, self._prefix, self._state)
        if renamed not in self._state and name in self._state:  # the model's own name already
            return name, None
        return str(renamed), pattern

    def converter(self, pattern: str) -> Any:
        """Return the conversion that a pattern belongs to."""
        return self._by_pattern[pattern]

    @property
    def tied_names(self) -> Iterator[tuple[str, str]]:
        """The other names of tied tensors, each with the first name."""
        return ((name, owner) for name, owner in self._owner.items() if name != owner)

    def owner(self, name: str) -> str:
        """Return the first name of a tensor that may be tied."""
        return self._owner.get(name, name)

    def is_computed(self, name: str) -> bool:
        """Return whether a tensor is a buffer that the model computes and does not save."""
        return name in self._computed


class _TextStack:
    """The language model inside a multimodal model; of any other model, all of it."""

    def __init__(self, body: Any, inventory: Inventory) -> None:
        self._own = inventory.layers[0].name.split(".")[0]
        self._inside, self._head = self._own, ""
        if text_config(body.config) is not body.config:
            self._inside, self._head = text_module_paths(body)
        # The language model of a live multimodal model has the names of the whole.
        self._same_names = inventory.layers[0].name.startswith(f"{self._inside}.")

    def text_name(self, name: str) -> str | None:
        """Return a tensor's name in the causal language model; None if it is outside of it."""
        if not self._head:
            return name
        if self._same_names:
            inside = name.startswith((f"{self._inside}.", f"{self._head}."))
            return name if inside else None
        if name.startswith(f"{self._head}."):
            return "lm_head" + name.removeprefix(self._head)
        if name.startswith(f"{self._inside}."):
            return self._own + name.removeprefix(self._inside)
        return None


def _build_as_saved(folder: Path) -> nn.Module | None:
    """Build the model of a directory's `config.json` on the meta device, if transformers has it."""
    import torch
    import transformers

    if not (folder / "config.json").is_file():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, ImportError, AttributeError):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        factory: Any = transformers.AutoModelForCausalLM.from_config
        if text_config(config) is not config:
            factory = multimodal_class(config)._from_config
        with torch.device("meta"):
            body: nn.Module = factory(config)
        return body
    return None
