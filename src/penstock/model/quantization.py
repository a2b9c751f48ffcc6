"""Find out whether a checkpoint is quantized, and refuse the formats that Penstock cannot read.

A quantized checkpoint stores weights as small integers or 8-bit floats next to their scales.
Without its scale such a weight has another value, so a format that is not known is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

FP8 = "fp8"
"""The method of transformers' `FineGrainedFP8Config`: one scale for each block of a matrix."""

MXFP4 = "mxfp4"
"""The method of transformers' `Mxfp4Config`: 4-bit floats, with one scale for 32 of them."""

_MAX_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class ScaleBlocks:
    """The part of a matrix that one scale belongs to."""

    rows: int | None
    """Number of rows; None means all of them."""
    columns: int | None


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Weights of experts are 4-bit floats, as in the files of gpt-oss."""


def find_quantization(config: Any, name: str) -> ScaleBlocks | Mxfp4 | None:
    """Return how the weights of a model are quantized, or None if they are not.

    Raises UnsupportedModelError if Penstock cannot dequantize them.

    Args:
        config: A transformers config, or the content of `config.json`.
        name: The model's name, for messages.
    """
    fields = _quantization_fields(config)
    if fields is None:
        return None
    method = str(fields.get("quant_method") or _old_method(fields) or "not named")
    if method == MXFP4:
        return Mxfp4()
    if method != FP8:
        raise UnsupportedModelError(_refusal(name, method))
    size = fields.get("weight_block_size", (128, 128))
    if size is None:
        return ScaleBlocks(None, None)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(map(_is_size, size)):
        raise UnsupportedModelError(
            f"{name}: quantization_config of config.json has weight_block_size {str(size)[:60]}; "
            f"expected two positive integers, such as [128, 128]"
        )
    return ScaleBlocks(*size)


def refuse_quantized(model: nn.Module, name: str) -> None:
    """Raise UnsupportedModelError if a live model has parameters that are quantized."""
    for tensor_name, tensor in model.named_parameters():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            fields = _quantization_fields(model.config) or {}
            raise UnsupportedModelError(
                f"{name} is quantized (quant_method {str(fields.get('quant_method'))[:40]!r}): its "
                f"parameter {tensor_name} has the type {tensor.dtype}. Load the unquantized "
                f"original, and to train an adapter pass quantize='nf4' to Penstock, which stores "
                f"the frozen weights in 4 bits; or call model.dequantize() before you pass it"
            )


def _quantization_fields(config: Any) -> Mapping[str, Any] | None:
    """Return `quantization_config`, which multimodal models also have in their text config."""
    for owner in (config, _field(config, "text_config")):
        fields = None if owner is None else _field(owner, "quantization_config")
        if fields is None and owner is not None:
            fields = _field(owner, "compression_config")  # early compressed-tensors files
        if fields:
            return fields if isinstance(fields, Mapping) else dict(fields.to_dict())
    return None


def _field(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _old_method(fields: Mapping[str, Any]) -> str:
    """Return the method of early bitsandbytes files, which do not name it."""
    return "bitsandbytes" if fields.get("load_in_4bit") or fields.get("load_in_8bit") else ""


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _MAX_BLOCK


def _refusal(name: str, method: str) -> str:
    return (
        f"{name} is quantized (quant_method {method[:40]!r} in quantization_config of "
        f"config.json), and Penstock reads only unquantized, FP8 ({FP8!r}) and MXFP4 ({MXFP4!r}) "
        f"weights. Load it "
        f"with transformers, call model.dequantize(), save it with save_pretrained(), copy the "
        f"tokenizer's files, and train that directory; or train the unquantized original"
    )
