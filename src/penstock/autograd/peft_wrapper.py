"""A PEFT model around a streamed model, as trainers see it.

Trainers move the model that they get to a device and save it. A PEFT model passes both on to its
modules, one by one, which a streamed model refuses; here it passes them on to the streamed model.

TRL's trainers add a frozen copy of the adapter to a PEFT model if they get no reference model, and
compute the reference with that copy. As long as the adapter is new, so that it adds nothing, the
copy is the base model: the layers with the adapter off. That is the reference here, which takes no
memory. An adapter that was trained before has no such reference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Self

import torch

from penstock.engine.engine import Engine
from penstock.errors import UnsupportedModelError
from penstock.model.adapters import WRAPPER

ZERO_AT_FIRST = (".lora_B.", ".lora_embedding_B.")
"""Parts of the names of tensors that are zero in a new adapter, which then adds nothing."""

TRAINED = (
    "the reference of this adapter cannot be computed with its layers switched off: {reason}. "
    "Merge the adapter into the model (penstock merge, or merge_and_unload of PEFT) and add a new "
    "one, so that the reference is the model without it; or pass ref_model to the trainer, such as "
    "a second streamed model"
)


class _CopiedTensor:
    """Stands for a tensor of the copy. It has the values of the trained one already."""

    @property
    def data(self) -> Self:
        return self

    def copy_(self, _: Any) -> Self:
        return self


CONVERSIONS = ("to", "cuda", "cpu", "float", "bfloat16", "half", "double")
"""Methods that return the model itself."""

PASSED_ON = ("save_pretrained", "save_checkpoint", "load_checkpoint", "zero_grad", "close")


class PeftWrapper:
    """Gives a PEFT model the methods of the streamed model in it."""

    def __init__(self, owner: Any, model: Any, engine: Engine) -> None:
        self._owner, self._engine = owner, engine
        self._names: set[str] = set()
        """Adapters that were added as copies of the trained one."""
        converted = {n: functools.partial(self._convert, getattr(model, n)) for n in CONVERSIONS}
        self._methods: dict[str, Any] = {
            **converted,
            **{name: getattr(model, name) for name in PASSED_ON},
            "add_adapter": self._add_adapter,
            "load_state_dict": functools.partial(self._load_state_dict, model.load_state_dict),
            "get_parameter": functools.partial(self._get_parameter, owner.get_parameter),
        }
        vars(owner).update(self._methods)

    def remove(self) -> None:
        """Give the PEFT model its own methods back."""
        for name in self._methods:
            vars(self._owner).pop(name, None)

    def _convert(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return self._owner

    def _load_state_dict(
        self, load: Any, state_dict: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Pass the tensors to the streamed model, under the names that they have there."""
        named = {name.removeprefix(WRAPPER): tensor for name, tensor in state_dict.items()}
        return load(named, *args, **kwargs)

    def _add_adapter(self, adapter_name: str, peft_config: Any, *_: Any, **__: Any) -> None:
        """Take note of a copy of the adapter. Code that looks for it finds none, as in a model
        whose adapter is switched off instead.
        """
        own = self._owner.active_peft_config
        if peft_config is not own:
            raise UnsupportedModelError(
                f"a streamed model has one adapter, and {adapter_name} has another config; call "
                f"get_peft_model before penstock.stream"
            )
        reason = self._find_reason()
        if reason:
            raise UnsupportedModelError(TRAINED.format(reason=reason))
        self._names.add(adapter_name)

    def _find_reason(self) -> str:
        """Say why the layers with the adapter off are not what the adapter is now."""
        if str(getattr(self._owner.active_peft_config.peft_type, "value", "")) != "LORA":
            return "it is not a LoRA adapter, so it is not known whether it adds anything"
        tensors = [t for block in self._engine.inventory.blocks for t in block.tensors]
        zeros = [t.name for t in tensors if any(part in t.name for part in ZERO_AT_FIRST)]
        others = [t.name for t in tensors if t.trainable and ".lora_" not in t.name]
        if others:
            return f"{others[0]} is trained as well, and PEFT does not switch it off"
        for name in zeros:
            if self._engine.state.weight(name, torch.float32).any():
                return f"{name} is not zero, so the adapter has been trained"
        return ""

    def _get_parameter(self, get: Any, target: str) -> Any:
        copied = any(f".{name}." in target for name in self._names)
        return _CopiedTensor() if copied else get(target)
