"""Check the fields of a model's config before anything is built from them.

Building a model from a wrong config fails late, or not within minutes: two billion layers are
created one by one. The types are checked by transformers, and the ranges here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock import records
from penstock.errors import RecordError, SurveyError

LARGEST_INT = (1 << 31) - 1
"""Positions and tokens are 32-bit numbers in kernels, and no dimension of a model is larger."""

MAX_WIDTH = 1 << 22
"""Largest width of a layer. The product of two widths is a number of elements that int64 holds."""

MAX_LAYERS = 1024
"""Largest number of layers. The deepest published models have fewer than 200."""

MAX_ELEMENTS = 1 << 44
"""Largest number of elements of a tensor: its optimizer states still have addresses of 48 bits."""

_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), MAX_WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), MAX_WIDTH
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), 1 << 16),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), LARGEST_INT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
}
"""Fields that are sizes, and the largest value of each."""

_MAY_BE_ZERO = ("num_experts", "num_local_experts", "n_routed_experts")
"""Sizes that are 0 in a model without that part, such as Granite 4 without experts."""

_WIDTHS = ("hidden_size", "n_embd", "d_model")

_PROBABILITIES = ("dropout", "pdrop")
"""Parts of the names of fields that are probabilities."""

_EPSILONS = ("_eps", "_epsilon")
"""Ends of the names of fields that norms add to a square."""


def check_config_file(path: Path) -> None:
    """Raise SurveyError, which names the file and the field, if a config file is invalid."""
    try:
        fields = records.read_json(path)
    except RecordError as wrong:
        raise SurveyError(str(wrong)) from None
    if not isinstance(fields, Mapping):
        raise SurveyError(f"{path} must contain an object {{...}}")
    if not isinstance(fields.get("model_type", ""), str):
        raise SurveyError(f"{path}: model_type must be a string, got {_show(fields['model_type'])}")
    check_fields(fields, str(path))


def check_fields(fields: Mapping[str, Any], where: str, *, least: int = 1) -> None:
    """Raise SurveyError if a field is a size that no model can have, or a number that is too large.

    The parts of a multimodal config are checked as well. transformers checks the types of all other
    fields. `where` is the file or the option that the fields come from, and `least` the smallest
    size: 0 in the parts of a multimodal config, which a model may lack.
    """
    for name, value in fields.items():
        if name in _SIZES and value is not None:
            _check_size(name, value, where, 0 if name in _MAY_BE_ZERO else least)
        elif isinstance(value, Mapping):
            check_fields(value, where, least=0)
        elif name == "rope_theta" and isinstance(value, int | float) and not value > 0:
            raise SurveyError(f"{where}: {name} must be above 0, got {_show(value)}")
        elif name.endswith(_EPSILONS) and isinstance(value, int | float) and not value >= 0:
            # The root of a negative number is NaN, and so is the first loss.
            raise SurveyError(f"{where}: {name} must be 0 or above, got {_show(value)}")
        elif any(part in name for part in _PROBABILITIES) and isinstance(value, int | float):
            # The model may not notice before its first training step.
            if not 0 <= value <= 1:
                raise SurveyError(f"{where}: {name} must be from 0 to 1, got {_show(value)}")
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            raise SurveyError(f"{where}: {name} must fit into 64 bits, got {_show(value)}")
    width = next((fields[name] for name in _WIDTHS if fields.get(name)), 1)
    rows = fields.get("vocab_size") or 1
    if isinstance(width, int) and isinstance(rows, int) and rows * width > MAX_ELEMENTS:
        raise SurveyError(
            f"{where}: vocab_size {rows} times hidden_size {width} is {rows * width:,} elements, "
            f"more than the {MAX_ELEMENTS:,} that can be addressed"
        )


def _check_size(name: str, value: Any, where: str, least: int) -> None:
    # Some configs of transformers have a list of sizes, one per layer.
    values = value if isinstance(value, list) and value else [value]
    for size in values:
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or not least <= size <= _SIZES[name]:
            raise SurveyError(
                f"{where}: {name} must be a whole number from {least} to {_SIZES[name]}, "
                f"got {_show(value)}"
            )


def check_loads_again(config: Any, where: str) -> None:
    """Raise SurveyError if transformers would refuse to load the config once it is saved.

    A run saves the config with its checkpoints. Without this check it would train, and its result
    could not be loaded.
    """
    try:
        type(config).from_dict(json.loads(config.to_json_string()))
    except config_errors() as wrong:
        raise SurveyError(f"{where}: {describe(wrong)}") from None


def adjust_layer_lists(config: Any, layers_before: int | None, changed: Mapping[str, Any]) -> None:
    """Adjust the lists with one entry per layer to a changed number of layers.

    transformers derives such a list, e.g. `layer_types`, if a config has none. A list that is what
    transformers derives is derived again. Any other list is refused, because nothing says which
    entries the new layers have.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None or layers == layers_before:
        return
    fields = config.to_dict()
    lists = [
        name
        for name, value in fields.items()
        if "layer" in name and isinstance(value, list) and name not in changed
        if len(value) == layers_before
    ]
    without = {name: value for name, value in fields.items() if name not in lists}
    for name in lists:
        before = type(config).from_dict({**without, "num_hidden_layers": layers_before})
        if getattr(before, name, None) != fields[name]:
            raise SurveyError(
                f"--model-config: num_hidden_layers is {layers}, but {name} has {layers_before} "
                f"entries, which transformers has no rule for; set {name} with --model-config, too"
            )
        setattr(config, name, getattr(type(config).from_dict(without), name))


def describe_short_lists(config: Any) -> str:
    """Describe the lists that have too few entries for the layers of a config; "" without any.

    Models look up what kind of layer each one is, such as in `no_rope_layers` of SmolLM 3. Lists of
    some other layers, such as `mlp_only_layers`, may be short, so a short list is a mistake only if
    the model cannot be built.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return ""
    short = [
        f"{name} has {len(value)} entries"
        for name, value in config.to_dict().items()
        if "layer" in name and isinstance(value, list) and 0 < len(value) < layers
    ]
    if not short:
        return ""
    return f"{' and '.join(short)} for {layers} layers; a list needs one entry for each layer"


def config_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which transformers refuses the fields of a config."""
    from huggingface_hub.errors import StrictDataclassError

    # A config's own code computes with its fields before it has checked all of them.
    return (StrictDataclassError, OSError, ValueError, LookupError, TypeError, AttributeError,
            ArithmeticError)  # fmt: skip


def describe(problem: Exception) -> str:
    """Describe in one line why transformers refuses a config."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    # The first line of a failed validation names the field, and the second one the reason.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    text = text or type(problem).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _show(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python may refuse to print it
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
