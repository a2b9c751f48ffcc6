"""The language model inside a live multimodal model, as a model of its own.

The engine streams a decoder and its head. A multimodal model has other modules around them: towers
for images or sound, and projectors. They stay with the caller, who runs them. `language_model_of`
returns a model that shares the modules of the decoder and the head with the multimodal model, under
the same names, so that everything that Penstock does with a causal language model works on it:
survey, twins, self-check, planning and training.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.errors import UnsupportedModelError
from penstock.model.config import text_config
from penstock.model.text_stack import text_module_paths

INPUTS = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds"),
    *("use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"),
    *("token_type_ids", "kwargs"),
)
"""Arguments of decoders that get nothing from towers but embeddings of tokens."""


class LanguageModel:
    """The methods of the language model of a multimodal model.

    Its classes are made by `_class_of`. Like every class of transformers, they can be built from a
    config, which is how a small twin is made.
    """

    decoder_class: type
    decoder_path: str
    head_path: str
    head_bias: bool
    ties_head: bool

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        decoder = self.decoder_class(config)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=self.head_bias)
        self.place(decoder, head)
        if self.ties_head:
            head.weight = decoder.get_input_embeddings().weight

    def place(self, decoder: nn.Module, head: nn.Module) -> None:
        """Put a decoder and a head where the multimodal model has them."""
        this: Any = self
        for path, module in ((self.decoder_path, decoder), (self.head_path, head)):
            *parents, leaf = path.split(".")
            at: nn.Module = this
            for name in parents:
                if not hasattr(at, name):
                    at.add_module(name, nn.Module())
                at = getattr(at, name)
            setattr(at, leaf, module)

    def get_decoder(self) -> Any:
        this: Any = self
        return this.get_submodule(self.decoder_path)

    def get_input_embeddings(self) -> Any:
        return self.get_decoder().get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        this: Any = self
        return this.get_submodule(self.head_path)

    def forward(self, input_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Compute logits, without the scales and caps that the multimodal model may apply.

        The caller's own code computes the head in training.
        """
        out = self.get_decoder()(input_ids=input_ids, **inputs)
        return CausalLMOutputWithPast(logits=self.get_output_embeddings()(out[0]))


def is_multimodal(model: nn.Module) -> bool:
    """Return whether a live model has other parts than a language model."""
    config: Any = getattr(model, "config", None)
    return isinstance(model, PreTrainedModel) and text_config(config) is not config


def refuse_live_multimodal(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a multimodal model that is to be trained with text alone."""
    if is_multimodal(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is a multimodal model, and batches of text are all that is "
            f"trained here. To train it with images, use penstock.stream(model, ...) and compute "
            f"the loss from what the model returns; to train its language model alone, pass the "
            f"model's directory"
        )


def language_model_of(whole: Any) -> Any:
    """Return the language model of a multimodal model; both share their modules.

    Raises UnsupportedModelError if its decoder cannot be found, or if other modules are trained.
    """
    decoder_path, head_path = text_module_paths(whole)
    decoder, head = whole.get_submodule(decoder_path), whole.get_submodule(head_path)
    _check_decoder(whole, decoder)
    table = decoder.get_input_embeddings()
    ties = getattr(head, "weight", None) is getattr(table, "weight", table)
    make: Any = _class_of
    made_class: Any = make(
        type(whole), type(decoder), decoder_path, head_path,
        getattr(head, "bias", None) is not None, ties,
    )  # fmt: skip
    with torch.device("meta"):
        made = made_class(decoder.config)
    made.place(decoder, head)
    made.name_or_path = whole.name_or_path
    made.generation_config = getattr(whole, "generation_config", None)
    if getattr(whole, "peft_config", None):
        made.peft_config = whole.peft_config
    _check_frozen(whole, made)
    return made.train(whole.training)


@functools.lru_cache(maxsize=64)
def _class_of(
    whole: type, decoder: type, decoder_path: str, head_path: str, head_bias: bool, ties_head: bool
) -> type:
    """Return the class of language models of a multimodal class."""
    # transformers' base class of the decoder knows how its modules are initialized, and which
    # attention functions they support.
    base = next(c for c in decoder.__mro__ if c is not decoder and issubclass(c, PreTrainedModel))
    fields = {
        "decoder_class": decoder,
        "decoder_path": decoder_path,
        "head_path": head_path,
        "head_bias": head_bias,
        "ties_head": ties_head,
        "base_model_prefix": decoder_path,
        "_tied_weights_keys": None,
        "__module__": whole.__module__,
        "__qualname__": f"{whole.__qualname__}.language_model",
    }
    return type(f"{whole.__name__}.language_model", (LanguageModel, base), fields)


def outside_parameters(whole: nn.Module, language_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a multimodal model that its language model does not have."""
    inside = {id(p) for p in language_model.parameters()}
    return {n: p for n, p in whole.named_parameters() if id(p) not in inside}


def outside_buffers(whole: nn.Module, language_model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a multimodal model that its language model does not have."""
    inside = {id(b) for b in language_model.buffers()}
    return {n: b for n, b in whole.named_buffers() if id(b) not in inside}


def _check_decoder(whole: nn.Module, decoder: nn.Module) -> None:
    others = [name for name in inspect.signature(decoder.forward).parameters if name not in INPUTS]
    if others:
        raise UnsupportedModelError(
            f"the decoder of {type(whole).__name__} takes {' and '.join(others)} in addition to "
            f"embeddings, so that images or sound reach its layers in another way, which Penstock "
            f"does not support. To train it with text alone, pass the model's directory"
        )


def _check_frozen(whole: nn.Module, language_model: nn.Module) -> None:
    outside = outside_parameters(whole, language_model)
    trained = [name for name, parameter in outside.items() if parameter.requires_grad]
    if not trained:
        return
    shown = trained[0]
    if getattr(whole, "peft_config", None):
        module = shown.partition(".lora_")[0]
        raise UnsupportedModelError(
            f"the adapter trains {shown}, which is outside of the language model of "
            f"{type(whole).__name__}; Penstock trains the language model alone. Name its modules "
            f"in exclude_modules of the adapter's config, so that {module} has no adapter"
        )
    parts = sorted({".".join(name.split(".")[:2]) for name in trained})
    calls = "; ".join(f"model.{part}.requires_grad_(False)" for part in parts)
    raise UnsupportedModelError(
        f"{len(trained)} parameters outside of the language model of {type(whole).__name__} are "
        f"trained, such as {shown}; Penstock streams and trains the language model, and its other "
        f"modules must be frozen: {calls}"
    )
