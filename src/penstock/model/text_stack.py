"""Find out whether the text stack of a multimodal model can be trained by itself.

Penstock trains the causal language model of a multimodal model's text config, and saves all other
tensors unchanged. That is right only if the whole model, given nothing but text, computes what this
language model computes. No list of models decides that. The whole model is built without memory,
the decoder and the head of a small language model (`penstock.model.twin`) take the places of its
own, and both run on the same tokens. All numbers of towers and projectors are NaN, so it does not
go unnoticed if one of them is used for text alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from typing import Any

import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.model.twin import LAYERS, VOCABULARY, build_twin, twin_config

LENGTH = 12

_TOLERANCE = 1e-5
"""Largest difference of two fp32 results of the same code, relative to the largest of them."""


def check_text_stack(whole: Any, text: Any, name: str) -> None:
    """Raise UnsupportedModelError if the text stack of a multimodal model cannot be trained.

    Args:
        whole: The multimodal model's config.
        text: The text config inside it.
        name: The model's name, for messages.
    """
    try:
        key = json.dumps(whole.to_dict(), sort_keys=True, default=str)
    except TypeError:  # fields that do not sort are not worth a cache
        problem = _find_problem(whole, text)
    else:
        problem = _cached_problem(_Configs(key, whole, text))
    if problem:
        raise UnsupportedModelError(
            f"{name} is a multimodal model of type {whole.model_type!r}, and {problem}. To train "
            f"its language model, save that alone with transformers, and use its directory. To "
            f"train it with images, load it with transformers, and use penstock.stream"
        )


class _Configs:
    """The configs of a model, which compare by their fields."""

    def __init__(self, key: str, whole: Any, text: Any) -> None:
        self.key, self.whole, self.text = key, whole, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Configs) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=64)
def _cached_problem(configs: _Configs) -> str:
    return _find_problem(configs.whole, configs.text)


def multimodal_class(config: Any) -> Any:
    """Return the transformers class of a multimodal model, or None if it has none."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    auto: Any = transformers.AutoModelForImageTextToText
    return auto._model_mapping.get(type(config), None)


def text_module_paths(body: Any) -> tuple[str, str]:
    """Return where a multimodal model has its decoder and its head."""
    decoder, head = body.get_decoder(), body.get_output_embeddings()
    if any(module is head for module in decoder.modules()) and decoder is not body:
        # A whole causal language model, as in Llama 4, whose get_decoder returns itself.
        decoder = getattr(decoder, "model", decoder)
    paths = {id(module): path for path, module in body.named_modules()}
    if id(decoder) not in paths or id(head) not in paths or decoder is body:
        raise UnsupportedModelError(
            f"{type(body).__name__} does not say which of its modules are the decoder and the head "
            f"of its language model (get_decoder and get_output_embeddings)"
        )
    return paths[id(decoder)], paths[id(head)]


def ties_head(whole: Any, text: Any) -> bool:
    """Return whether transformers ties the head of a multimodal model to its embedding.

    The head belongs to the whole model, so its class and its config decide, and not the text
    config. The answer is that of transformers' own code, which ties tensors when it builds a model.

    Args:
        whole: The multimodal model's config.
        text: The text config inside it.
    """
    try:
        return _ties_head(_Configs(json.dumps(whole.to_dict(), default=str), whole, text))
    except Exception:  # the model's own code may raise any exception; it cannot be trained then
        return bool(getattr(whole, "tie_word_embeddings", text.tie_word_embeddings))


@functools.lru_cache(maxsize=64)
def _ties_head(configs: _Configs) -> bool:
    body = _build_whole(multimodal_class(configs.whole), configs.whole, _small(configs.text))
    head, table = body.get_output_embeddings(), body.get_input_embeddings()
    return head is not None and head.weight is table.weight


def _small(text: Any) -> Any:
    return twin_config(text, _layer_count(text))


def _build_whole(whole_class: Any, whole: Any, small: Any) -> Any:
    """Build a multimodal model without memory, with another text config."""
    outer = copy.deepcopy(whole)
    outer.text_config = copy.deepcopy(small)
    with torch.device("meta"):
        return whole_class._from_config(outer, attn_implementation="eager")


def _find_problem(whole: Any, text: Any) -> str:
    import transformers

    inner: Any = getattr(whole, "text_config", None)
    if inner is not text:
        return "its text config is not its text_config field"
    auto: Any = transformers.AutoModelForCausalLM
    text_class = auto._model_mapping.get(type(text), None)
    if text_class is None:
        return (
            f"transformers has no causal language model of the type {text.model_type!r} of its "
            f"text config"
        )
    whole_class = multimodal_class(whole)
    if whole_class is None:
        return "its class is not one of transformers"
    if needed := _required_inputs(whole_class):
        return f"it does not run on text alone: its forward requires {' and '.join(needed)}"
    try:
        return _compare(whole_class, text_class, whole, text)
    except UnsupportedModelError as problem:
        return str(problem)
    except ImportError as problem:
        return f"transformers cannot build it without {_missing_package(problem)}"
    except Exception as problem:  # the model's own code may raise any exception
        lines = str(problem).strip().splitlines()
        reason = f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
        return f"it cannot be compared with its language model on text alone; {reason[:200]}"


def _required_inputs(whole_class: Any) -> list[str]:
    """Return the arguments besides tokens without which a model does not run."""
    parameters = inspect.signature(whole_class.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty
            and p.name not in ("self", "input_ids")]  # fmt: skip


def _missing_package(problem: ImportError) -> str:
    """Say which package an import did not find."""
    # transformers' own message begins "TimmWrapperModel requires the timm library but".
    named = re.search(r"requires the (\S+) library", str(problem))
    name = named.group(1) if named else (problem.name or "").partition(".")[0]
    if name:
        return f"the package {name}, which is not installed"
    return f"a package that is not installed ({' '.join(str(problem).split())[:200]})"


def _compare(whole_class: Any, text_class: Any, whole: Any, text: Any) -> str:
    """Say how a small model differs from its language model on text; empty if it does not."""
    small = _small(text)
    language_model: Any = build_twin(text_class, small, "eager")
    body = _build_whole(whole_class, whole, small)
    decoder_path, head_path = text_module_paths(body)
    own = language_model.get_decoder()
    if type(body.get_submodule(decoder_path)) is not type(own):
        return (
            f"its decoder is a {type(body.get_submodule(decoder_path)).__name__}, which is not the "
            f"{type(own).__name__} of {text_class.__name__}"
        )
    _replace(body, decoder_path, own)
    _replace(body, head_path, language_model.get_output_embeddings())
    _fill_with_nan(body)
    ids = _text_tokens(whole)
    for training in (True, False):  # some choose their attention mask by the mode
        language_model.train(training)
        body.train(training)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            expected = language_model(input_ids=ids, use_cache=False).logits
            got = body(input_ids=ids, use_cache=False).logits
        if got.isnan().any():
            return "it uses tensors outside of its text stack for text alone"
        if got.shape != expected.shape or not _close(got, expected):
            return _describe_difference(got, expected, text_class.__name__)
    return ""


def _describe_difference(got: torch.Tensor, expected: torch.Tensor, name: str) -> str:
    """Say how logits differ from those of the language model with the given name."""
    if got.shape == expected.shape:
        factor = float((got * expected).sum() / expected.square().sum())
        if _close(got, factor * expected):
            return f"on text alone its logits are {factor:.4g} times those of {name}"
    return f"on text alone it computes other logits than {name}"


def _layer_count(text: Any) -> int:
    """Return the number of layers after which every type of layer has occurred."""
    types = getattr(text, "layer_types", None) or ()
    firsts: dict[Any, int] = {kind: index for index, kind in reversed(list(enumerate(types)))}
    count = max((LAYERS, *(index + 1 for index in firsts.values())))
    if getattr(text, "num_kv_shared_layers", None):
        # The last layers use keys and values of a layer of their type among the first ones.
        count = min(2 * count, len(types))
    return count


def _text_tokens(whole: Any) -> torch.Tensor:
    """Return a row of text tokens, without placeholders for images or sound."""
    special = {v for n, v in whole.to_dict().items() if n.endswith(("_id", "_index"))
               and isinstance(v, int)}  # fmt: skip
    tokens = [token for token in range(3, VOCABULARY) if token not in special]
    return torch.tensor(tokens[:LENGTH])[None]


def _replace(body: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(body.get_submodule(parent), leaf, module)


def _fill_with_nan(body: nn.Module) -> None:
    """Replace tensors without data by ones that are NaN and take no memory; integers become 0."""
    for module in body.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(_nan_like(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _nan_like(buffer)


def _nan_like(tensor: torch.Tensor) -> torch.Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= _TOLERANCE * expected.abs().max())
