"""Check that a copy of a model computes with its own modules, and not with those of the original.

`copy.deepcopy` copies modules, methods and `functools.partial`, but not functions: a function in
the copy is the one in the original. If it was made around a module, for example to scale the output
of that module's former `forward`, the copy computes with the original's weights.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from penstock.errors import UnsupportedModelError

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Attributes with the hooks that run when a module computes. Those on state dicts do not."""

COMPUTING = ("forward", "get_input_embeddings", "get_output_embeddings")
"""Methods of every model that the engine calls. A copy may have a function in place of others, such
as `to`, which accelerate replaces."""

DEVICES = ("npu", "mlu", "sdaa", "musa", "neuron")
"""Methods that accelerate may add to those of torch, to refuse them."""

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "penstock", "functools")
"""Packages whose global variables do not refer to a caller's model."""

COPIED = (
    "Penstock trains a copy of the model, and a function is not copied: it would use the original, "
    "which has no weights then"
)

FUNCTION = (
    f"{COPIED}. Override the method in a subclass, or set it with types.MethodType(function, "
    f"module), so that the function gets its module as an argument"
)

HOOK = f"{COPIED}. Use the module that the hook gets as its first argument, or remove the hook"

COMPILED = (
    f"{COPIED}. Pass the model without torch.compile; Penstock compiles the layers of its copy "
    f"itself (compiled=True)"
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType)


def may_draw(module: nn.Module) -> bool:
    """Return whether a module may draw random numbers in training.

    Dropout does, also that of modules that keep its rate as a number. What code outside of torch
    and transformers does is not known.
    """
    return has_dropout(module) or has_own_code(module)


def has_own_code(module: nn.Module) -> bool:
    """Return whether a module runs code from outside of torch, transformers and similar packages.

    That is its class, a function in the place of its `forward`, or a hook.
    """
    if is_foreign(type(module)):
        return True
    own = vars(module)
    functions = [own["forward"]] if "forward" in own else []
    functions += [hook for name in HOOKS for hook in (own.get(name) or {}).values()]
    return any(map(is_foreign, functions))


def is_foreign(code: Any) -> bool:
    """Return whether a class, function or callable object is from none of the known packages."""
    if isinstance(code, functools.partial):
        code = code.func
    name = getattr(code, "__module__", None) or ""
    return name.partition(".")[0] not in LIBRARIES


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module drops out values in training."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    named = vars(module).items()
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in named
        if not name.startswith("_")
    )


def check_functions(model: nn.Module, owned: nn.Module) -> None:
    """Raise UnsupportedModelError if a function in the model would compute with the original.

    `owned` is the model, or a PEFT model around it.
    """
    from transformers import PreTrainedModel

    names = {id(module): "the model" for module in owned.modules()}
    for path, module in model.named_modules():
        names[id(module)] = path or "the model"
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), f"{path}.{leaf}" if path else leaf)
    skipped = {*dir(PreTrainedModel), *DEVICES}.difference(COMPUTING)
    for path, module in model.named_modules():
        for attribute, value in _functions_of(module, skipped):
            search = _Search(names)
            used = search.find(value, shared=False)
            if used is None:
                continue
            where = f"{type(model).__name__}: {path or 'the model'}"
            if attribute in HOOKS:
                raise UnsupportedModelError(f"{where} has a hook that uses {used}. {HOOK}")
            if search.compiled:
                raise UnsupportedModelError(f"{where} has a compiled {attribute}. {COMPILED}")
            raise UnsupportedModelError(
                f"{where} has a function as its {attribute} that uses {used}. {FUNCTION}"
            )


def _functions_of(module: nn.Module, skipped: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and its hooks, in which there may be functions."""
    for attribute, value in vars(module).items():
        if attribute in HOOKS:
            for hook in value.values():
                yield attribute, hook
        elif attribute not in skipped and not isinstance(value, _PLAIN):
            yield attribute, value


class _Search:
    """Looks for modules and parameters of a model that a copy of a value would share with it."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        """Names of the model's modules and parameters, by identity."""
        self._seen: set[tuple[int, bool]] = set()
        self.compiled = False
        """Whether a function was made by torch.compile."""

    def find(self, value: Any, *, shared: bool) -> str | None:
        """Return the name of a module or parameter that is reached through a function.

        `shared` says whether a function has led to the value.
        """
        if shared and id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, (*_PLAIN, nn.Module)) or (id(value), shared) in self._seen:
            return None
        self._seen.add((id(value), shared))
        if isinstance(value, types.FunctionType):
            self.compiled = self.compiled or hasattr(value, "_torchdynamo_orig_callable")
            shared = True
        elif isinstance(value, weakref.ref):
            value, shared = (value(),), True  # weak references are not copied either
        found = (self.find(part, shared=shared) for part in _parts(value))
        return next((name for name in found if name is not None), None)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value refers to: the variables of a function, the elements of a container.

    Objects that cannot be called are not searched: a function that records what it sees may well
    belong to an object that also has the model.
    """
    if isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values(), *vars(value).values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif callable(value):
        yield from getattr(value, "__dict__", {}).values()


def _variables(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function uses, and of its attributes."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    if str(function.__globals__.get("__name__")).partition(".")[0] not in LIBRARIES:
        for name in _global_names(function.__code__):
            yield function.__globals__.get(name)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a function reads."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function inside the function
            found.update(_global_names(constant))
    return tuple(sorted(found))
