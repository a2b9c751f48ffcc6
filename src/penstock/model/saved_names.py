"""Find out under which names, and in which form, a model's tensors are saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.model.checkpoint_names import tensor_shapes
from penstock.model.inventory import Inventory
from penstock.model.tensor_layout import Layout, LayoutError, whole
from penstock.model.weight_conversion import check_operations, convert


@dataclass(frozen=True, slots=True)
class SavedNames:
    """The names and forms in which a model's tensors are saved."""

    names: dict[str, str] = field(default_factory=dict)
    """Names of tensors that are not saved under the model's own."""
    splits: dict[str, Layout] = field(default_factory=dict)
    """Tensors that have other shapes in files: where their elements are in the model."""

    def splits_by_tensor(self) -> dict[str, list[str]]:
        """Return, for each tensor of the model that has another form in files, the names of these.

        A tensor of the files that has elements of several is listed with the first of them.
        """
        found: dict[str, list[str]] = {}
        for name, layout in self.splits.items():
            first, *others = layout.sources
            found.setdefault(first, []).append(name)
            for other in others:
                found.setdefault(other, [])
        return found


def names_on_save(model: Any, inventory: Inventory) -> SavedNames:
    """Return the names and forms in which transformers saves a model that was not read from files.

    Without conversions, these are the model's own names.
    """
    from transformers.core_model_loading import PrefixChange, WeightConverter

    rules = getattr(model, "_weight_conversions", None)  # those that loading has applied
    if rules is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    try:
        backward = [rule.reverse_transform() for rule in reversed(rules)]
    except ValueError:  # of weights that were quantized: the model's own names are as good
        return SavedNames()
    renamings = [rule for rule in backward if not isinstance(rule, WeightConverter)]
    shapes = tensor_shapes(inventory)
    splits, names = {}, {}
    converted = _reverse_groups([r for r in backward if isinstance(r, WeightConverter)], shapes)
    for renamed, (converter, owns) in converted.items():
        for name, layout in _split_tensor(converter, renamed, owns, shapes, model.config).items():
            splits[_rename(name, renamings)] = layout
    used = {source for layout in splits.values() for source in layout.sources}
    if splits:
        names = {own: _rename(own, renamings) for own in shapes if own not in used}
    return SavedNames({own: name for own, name in names.items() if own != name}, splits)


def _rename(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _reverse_groups(
    converters: list[Any], names: Iterable[str]
) -> dict[str, tuple[Any, dict[str, str]]]:
    """Return the reversed conversion of each group of tensors, and its tensors by pattern."""
    groups: dict[str, tuple[Any, dict[str, str]]] = {}
    for name in names:
        for converter in converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups.setdefault(renamed, (converter, {}))[1][pattern] = name
                break
    return groups


def _split_tensor(
    converter: Any, renamed: str, owns: dict[str, str], shapes: dict[str, tuple[int, ...]],
    config: Any,
) -> dict[str, Layout]:  # fmt: skip
    """Return the tensors that a reversed conversion makes; none if it is not known."""
    patterns = converter.target_patterns
    try:
        check_operations(converter.operations, renamed)
        model = [[whole(owns[p], shapes[owns[p]])] for p in converter.source_patterns]
        made = convert(converter.operations, model, outputs=len(patterns), config=config)
        made_names = [
            [
                renamed.replace(patterns[0], pattern.replace("*", str(i)), 1)
                for i in range(len(each))
            ]
            for pattern, each in zip(patterns, made, strict=True)
        ]
    except (UnsupportedModelError, LayoutError, ValueError, KeyError):
        # transformers also loads the model's own form.
        return {}
    pairs = zip(made_names, made, strict=True)
    return {name: layout for n, each in pairs for name, layout in zip(n, each, strict=True)}
