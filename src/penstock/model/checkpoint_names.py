"""Find out under which names the files of a model have its tensors."""

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
from penstock.model.text_stack import multimodal_class, text_module_paths

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
    """The files' name of each parameter and buffer of the model that they have."""
    kept: tuple[str, ...] = ()
    """Tensors of a multimodal model outside its text stack, saved as they are."""
    unexpected: tuple[str, ...] = ()
    """Tensors that the model does not have, so that neither training nor saving includes them."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further copies of a tied tensor, and the tensor of the model that each is a copy of."""
    tied_outside: tuple[str, str] | None = None
    """Two tensors that a multimodal model ties, and the causal language model in it does not."""


def map_names(found: Iterable[str], inventory: Inventory, folder: Path) -> NameMap:
    """Map the names of a model's tensors to those in its files, as transformers does on loading."""
    found = sorted(found)
    wanted = {t.name for block in inventory.blocks for t in block.tensors}
    wanted |= {buffer.name for buffer in inventory.buffers}
    body = _build_as_saved(folder)
    if body is None:  # code of its own, or no config: the names must be the model's own
        names = _own_names(set(found), wanted, inventory)
        left = sorted(set(found) - set(names.values()))
        return NameMap(names, unexpected=tuple(n for n in left if not _COMPUTED.search(n)))
    mapper, stack = _Mapper(body), _TextStack(body, inventory)
    names, unexpected, kept, tied = {}, [], [], {}
    for name in found:
        renamed, converted = mapper.rename(name)
        own = stack.text_name(renamed)
        if converted and own is not None:
            raise UnsupportedModelError(
                f"transformers converts the tensor {name[:120]} to {renamed[:120]} when it loads "
                f"it, which is more than a new name. Load the model with transformers, save it "
                f"with save_pretrained(save_original_format=False), and train that directory"
            )
        if own in wanted:
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
    return NameMap(names, tuple(kept), tuple(unexpected), tied,
                   next(((str(own), str(owner)) for own, owner in outside), None))  # fmt: skip


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


class _Mapper:
    """Renames tensors of files as transformers does when it loads them into a model."""

    def __init__(self, body: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules: list[Any] = get_model_conversion_mapping(body)
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self._prefix, self._state = body.base_model_prefix, body.state_dict()
        first: dict[int, str] = {}
        self._owner = {
            name: first.setdefault(id(tensor), name)
            for name, tensor in body.named_parameters(remove_duplicate=False)
        }
        self._computed = {name for name, _ in body.named_buffers()} - self._state.keys()

    def rename(self, name: str) -> tuple[str, bool]:
        """Return a tensor's name in the model, and whether more than its name changes."""
        from transformers.core_model_loading import rename_source_key

        renamed, converter = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        return str(renamed), converter is not None

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

    def text_name(self, name: str) -> str | None:
        """Return a tensor's name in the causal language model; None if it is outside of it."""
        if not self._head:
            return name
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
