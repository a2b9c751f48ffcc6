"""A model that its owner holds while an engine trains its weights.

The engine computes with a copy of the model that has no weights. The owner's modules stay as they
are, except that their parameters have no memory until `load` gives them some. Meanwhile, calls of
the model raise an error that says what to call instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Self

import torch
from torch import nn

from penstock.errors import EngineError, UnsupportedModelError
from penstock.model.adapters import without_wrapper
from penstock.model.attention import DOCUMENTS, set_attention
from penstock.model.copy_check import check_functions
from penstock.model.meta_model import check_own_attention, move_buffers, on_meta
from penstock.model.rotary import choose_frequencies_by_document
from penstock.model.split import find_holders

GUARDED = ("forward", "generate", "save_pretrained", "push_to_hub", "state_dict", "load_state_dict")
"""Methods that need the weights. Without memory, the last two would silently do nothing."""

NO_HOOKS = (
    "Penstock computes gradients block by block and calls no hooks of parameters. Remove the hook. "
    "To leave a parameter as it is, freeze it with requires_grad_(False); for other learning rates "
    "or weight decay, use parameter groups; to change the loss, compute it yourself with "
    "penstock.stream"
)

ReadWeight = Callable[[str, torch.dtype], torch.Tensor]
"""Returns a tensor by name, in host memory and in the given type."""


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class WithheldParameter(torch.Tensor):
    """Stands for a parameter whose values an engine has.

    It has the shape, type and other properties of a parameter on the meta device. Operations on
    such a parameter would silently do nothing; here they raise an EngineError.
    """

    _name: str
    _reason: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, reason: str) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("meta"),
            requires_grad=like.requires_grad,
        )  # fmt: skip
        made._name, made._reason = name, reason
        made._is_param = True  # so that isinstance(..., nn.Parameter) is true
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WithheldParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(f"{self._name} cannot be used: {self._reason}")

    def _refuse_gradient(self, *_: Any) -> NoReturn:
        raise EngineError(f"{self._name}.grad cannot be used: {self._reason}")

    def _refuse_hook(self, *_: Any) -> NoReturn:
        raise EngineError(f"a hook on {self._name} would not run: {self._reason}")

    __deepcopy__ = __reduce_ex__ = _refuse
    register_hook = register_post_accumulate_grad_hook = _refuse_hook
    data = property(lambda self: self.detach(), _refuse)
    grad = property(_refuse_gradient, _refuse_gradient)

    @property
    def requires_grad(self) -> bool:
        return bool(_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise EngineError(
                f"{self._name}.requires_grad cannot be set to {value} now: this decides what is "
                f"trained, so freeze or unfreeze parameters before training. {self._reason}"
            )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.requires_grad = requires_grad
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        mine = next(each for each in leaves if isinstance(each, cls))
        if func is not torch.ops.aten.detach.default:  # of which the shape may be asked
            mine._refuse()
        shape = torch.empty(mine.shape, dtype=mine.dtype, device="meta")
        return cls(shape, mine._name, mine._reason)


class LiveModel:
    """The owner's model."""

    def __init__(self, model: nn.Module) -> None:
        self.owned = model
        """What the owner passed: the transformers model, or a PEFT model around it."""
        self.model = model = without_wrapper(model)
        """The transformers model."""
        self._holders = find_holders(model)
        self.weights = {name: self._parameter(name) for name in self._holders}
        """The owner's parameters, until `forget_weights`."""
        self._specs = {
            name: (parameter.dtype, parameter.device, parameter.requires_grad)
            for name, parameter in self.weights.items()
        }
        self._guarded: list[tuple[nn.Module, dict[str, Any]]] = []
        self._check_owner()
        self._check_hooks()
        check_functions(model, self.owned)

    def _check_owner(self) -> None:
        """Raise UnsupportedModelError for a model of penstock.stream."""
        if "_stream" in vars(self.model):
            raise UnsupportedModelError(
                f"this {type(self.model).__name__} is streamed already, and its weights are in its "
                f"engine. Call model.close() first, which gives it the weights, or load another "
                f"model"
            )

    def _check_hooks(self) -> None:
        """Raise UnsupportedModelError if a trained parameter has hooks."""
        for name, parameter in self.weights.items():
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if parameter.requires_grad and any(hooks):
                raise UnsupportedModelError(f"{name} has a hook on its gradient; {NO_HOOKS}")

    @property
    def nbytes(self) -> int:
        """The memory that `load` allocates."""
        shapes = ((n, self._parameter(n)) for n in self._holders if n not in self.weights)
        return sum(p.numel() * self._specs[n][0].itemsize for n, p in shapes if p.is_meta)

    @property
    def missing(self) -> dict[str, torch.dtype]:
        """Names and types of the weights that `load` reads."""
        return {n: dtype for n, (dtype, *_) in self._specs.items() if n not in self.weights}

    def copy_without_weights(
        self, device: torch.device, dtype: torch.dtype, *, own_attention: bool = False
    ) -> nn.Module:
        """Take the weights out of the owner's modules, and return a copy that can compute.

        The copy's config has the type and the attention of the engine, and its buffers are on the
        device. The owner's config and buffers stay as they are. With `own_attention`, the copy
        keeps its attention, which must be the one that transformers chooses for its class.
        """
        if own_attention:
            check_own_attention(self.model)
        for name in self._holders:
            self._set(name, on_meta(self._parameter(name)))
        try:
            bare = copy.deepcopy(self.model)
        except Exception as problem:
            self.put_back()
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be copied ({problem}); pass its directory to "
                f"prepare instead of the model"
            ) from problem
        for module in bare.modules():
            if "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False  # the engine recomputes layers
        config: Any = bare.config
        if not own_attention:
            set_attention([config], DOCUMENTS)
        config.dtype = dtype
        return move_buffers(choose_frequencies_by_document(bare), device)

    def put_back(self) -> None:
        """Give the owner's modules the parameters that they had."""
        for name, parameter in self.weights.items():
            self._set(name, parameter)

    def forget_weights(self, *, keep: Collection[str]) -> None:
        """Drop the parameters that the owner's modules had: the engine has its own copy.

        Those to `keep` are put back by `load`, instead of what the engine has.
        """
        self.weights = {name: self.weights[name] for name in keep}

    def load(self, read: ReadWeight) -> None:
        """Give the owner's modules these weights, in their former types and in host memory.

        Parameters that have memory are overwritten in place, wherever they are.
        """
        self.unguard()
        with torch.no_grad():
            for name, (dtype, _, trained) in self._specs.items():
                if name in self.weights:
                    self._set(name, self.weights[name])
                    continue
                value, present = read(name, dtype), self._parameter(name)
                if present.is_meta:
                    self._set(name, nn.Parameter(value, requires_grad=trained))
                else:
                    present.copy_(value)

    def move_to_former_devices(self) -> None:
        """Move the weights to the devices where they were before training."""
        for name, (_, device, trained) in self._specs.items():
            parameter = self._parameter(name)
            if parameter.device != device and not parameter.is_meta:
                self._set(name, nn.Parameter(parameter.detach().to(device), requires_grad=trained))

    def guard(self, message: str) -> None:
        """Let all that needs weights raise an EngineError with this message.

        That is methods, and operations on parameters without memory.
        """
        self.unguard()
        refusal = f"this {type(self.model).__name__} {message}"

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineError(refusal)

        outer = (self.owned, getattr(self.owned, "base_model", self.owned))
        base = getattr(self.model, "base_model", self.model)
        for module in {id(m): m for m in (*outer, self.model, base)}.values():
            own = {n: vars(module)[n] for n in (*GUARDED, "zero_grad") if n in vars(module)}
            self._guarded.append((module, own))
            vars(module).update({name: refuse for name in GUARDED if hasattr(module, name)})
            vars(module)["zero_grad"] = _do_nothing  # trainers call it; there are no gradients
        for name in self._holders:
            parameter = self._parameter(name)
            if parameter.is_meta:
                stand_in: Any = WithheldParameter(parameter, name, refusal)
                self._set(name, stand_in)

    def check_memory(self) -> None:
        """Raise UnsupportedModelError if the model's weights are not in it."""
        bare = next((name for name in self._holders if self._parameter(name).is_meta), None)
        if bare is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no weights: {bare} is on the meta device. Load "
                f"the weights first, or pass the model's directory. If another engine trains this "
                f"model, close that engine"
            )

    def unguard(self) -> None:
        """Give the owner's model its methods back, and allow operations on its parameters."""
        for module, own in self._guarded:
            for name in (*GUARDED, "zero_grad"):
                vars(module).pop(name, None)
            vars(module).update(own)
        self._guarded = []
        for name in self._holders:
            held = self._parameter(name)
            if isinstance(held, WithheldParameter):
                empty = torch.empty(held.shape, dtype=held.dtype, device="meta")
                self._set(name, nn.Parameter(empty, requires_grad=held.requires_grad))

    def _parameter(self, name: str) -> nn.Parameter:
        module, leaf = self._holders[name][0]
        parameter = module._parameters[leaf]
        assert parameter is not None
        return parameter

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for module, leaf in self._holders[name]:
            module._parameters[leaf] = parameter


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
