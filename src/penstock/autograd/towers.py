"""The parts of a multimodal model that do not stream: towers, projectors, and what they pass on.

The caller's model runs them with its own code. It looks up the embeddings of tokens, replaces those
that stand for images by the output of a tower, and calls its decoder. The table of embeddings
streams, so the lookup returns a mark for each token here. What the decoder gets tells which marks
were replaced, and the engine looks up the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.autograd.model_masks import RECORDED, register_recorded_masks
from penstock.errors import BatchError, UnsupportedModelError
from penstock.model.attention import attention_configs
from penstock.model.language_model import (
    language_model_of,
    outside_buffers,
    outside_parameters,
)
from penstock.model.split import Features
from penstock.plan.workload import CallerLoss

COPIES = 3
"""Tensors of embeddings that exist while a call of the model is prepared: the marks, the marks with
the features, and what is compared."""


class Towers:
    """A multimodal model, its language model, and the modules outside of that."""

    def __init__(self, whole: nn.Module) -> None:
        self.whole = whole
        self.language_model = language_model_of(whole)
        self._parameters = outside_parameters(whole, self.language_model)
        self._buffers = outside_buffers(whole, self.language_model)
        saved = whole.state_dict(keep_vars=True)
        self.tensors: dict[str, torch.Tensor] = {
            n: t for n, t in saved.items() if n in self._parameters or n in self._buffers
        }
        """The tensors outside of the language model that are part of the saved model."""
        self._former: dict[str, torch.device] = {}
        self._table: Any = self.language_model.get_input_embeddings()
        self._ids: torch.Tensor | None = None
        self._mark = torch.empty(0)
        self._attention: list[tuple[Any, str]] = []

    # Memory.

    @property
    def makes_masks(self) -> bool:
        """Whether the model has an argument for tokens that see each other in both directions."""
        from inspect import signature

        return "token_type_ids" in signature(self.whole.forward).parameters

    @property
    def position_axes(self) -> int:
        """Number of positions of each token: Qwen's models have one each for time and place."""
        rotary: Any = getattr(self.language_model.config, "rope_parameters", None) or {}
        return len(rotary.get("mrope_section", ())) or 1

    def memory(self, tokens: int, context: int, live_forwards: int, itemsize: int) -> int:
        """Return the device memory of the modules, and of what they pass to the layers."""
        outside = (*self._parameters.values(), *self._buffers.values())
        modules = sum(t.numel() * t.element_size() for t in outside)
        width = int(self.language_model.config.hidden_size)
        passed = (COPIES + live_forwards) * tokens * width * itemsize
        masks = 4 * tokens * context if self.makes_masks else 0  # and what they are compared with
        return modules + passed + masks

    def planned(self, loss: CallerLoss, tokens: int, context: int, itemsize: int) -> CallerLoss:
        """Return the caller's memory with that of the modules."""
        resident = self.memory(tokens, context, loss.live_forwards, itemsize)
        return CallerLoss(live_forwards=loss.live_forwards, nbytes=loss.nbytes, resident=resident)

    # Connecting.

    def connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the modules to the device, and let the model look up marks."""
        for name, tensor in {**self._parameters, **self._buffers}.items():
            if tensor.device != device:
                self._former[name] = tensor.device
                tensor.data = tensor.data.to(device)
        generator = torch.Generator().manual_seed(0)
        width = self.language_model.config.hidden_size
        self._mark = torch.randn(width, generator=generator).to(device, dtype)
        vars(self._table)["forward"] = self._look_up
        register_recorded_masks()
        decoder = self.language_model.get_decoder()
        text: Any = self.whole.config.get_text_config()  # type: ignore[union-attr, operator]
        configs = {id(c): c for c in (*attention_configs(decoder), text)}
        self._attention = [(c, c._attn_implementation) for c in configs.values()]
        for config, _ in self._attention:
            config._attn_implementation = RECORDED

    def disconnect(self) -> None:
        """Make the modules what they were."""
        vars(self._table).pop("forward", None)
        for config, name in self._attention:
            config._attn_implementation = name
        for name, tensor in {**self._parameters, **self._buffers}.items():
            if name in self._former:
                tensor.data = tensor.data.to(self._former[name])

    # Inputs.

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._ids = input_ids
        return self._mark.expand(*input_ids.shape, -1).clone()

    def find_inputs(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Features | None]:
        """Return the decoder's arguments with tokens in the place of embeddings, and features.

        Raises UnsupportedModelError if the model changed the embeddings of other tokens than those
        that stand for images or sound.
        """
        inputs, ids = dict(given), self._ids
        embeddings: torch.Tensor | None = inputs.pop("inputs_embeds", None)
        self._ids = None
        if embeddings is None:
            return inputs, None
        name = type(self.whole).__name__
        if ids is None or inputs.get("input_ids") is not None:
            raise BatchError("a streamed model needs input_ids, and takes no inputs_embeds")
        if embeddings.shape[:2] != ids.shape:
            raise UnsupportedModelError(
                f"{name} changes the number of tokens: its decoder gets {embeddings.shape[1]} for "
                f"{ids.shape[-1]}, which is not supported"
            )
        inputs["input_ids"] = ids
        replaced = (embeddings != self._mark).any(dim=-1)
        if not bool(replaced.any()):
            return inputs, None
        if embeddings.requires_grad:
            raise UnsupportedModelError(
                f"{name} passes features to its decoder that need a gradient; freeze its towers"
            )
        others = sorted(set(ids[replaced].tolist()) - self._placeholders())
        if others:
            raise UnsupportedModelError(
                f"{name} changes the embedding of ordinary tokens, such as {others[0]}, before "
                f"its decoder gets it, which is not supported"
            )
        return inputs, Features(embeddings.detach(), replaced)

    def _placeholders(self) -> set[int]:
        """Return the tokens of the config that stand for something, and padding.

        Placeholders outside of the vocabulary are looked up as padding.
        """
        fields = self.whole.config.to_dict()  # type: ignore[union-attr, operator]
        named = {
            value for name, value in fields.items()
            if name.endswith(("_id", "_index")) and isinstance(value, int)
        }  # fmt: skip
        return named | {0}
