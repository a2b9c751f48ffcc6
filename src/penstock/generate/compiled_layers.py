"""A model's layers, compiled for passes that make one token a row. Room: hold. Imported only where
that is wanted: it brings torch's compiler.

A layer is some forty small kernels, and even launched as one graph each of them waits for memory.
Compiled, they are about ten. All layers of one kind share the code: their weights are arguments.

The cache is not in what is compiled. A layer hands its new keys and values to one operator, which
writes them and attends as any other pass does (`attention`), and finds in this module which layer
of which cache it is about. So nothing is compiled anew for another cache or another layer; rows
may be as many as they like from two on.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.generate import attention
from penstock.model.compile import was_compiled
from penstock.model.layer_kinds import firsts, layer_kinds, raise_recompile_limit

NAME = "penstock-kv-compiled"
"""What shells of layers are told to attend by."""

PROBLEMS: tuple[type[Exception], ...] = (torch._dynamo.exc.TorchDynamoException,)
"""What says that code cannot be compiled, here or at all."""


class UnfitLayersError(PenstockError, LookupError):
    """Layers of which no shell can stand for all of a kind."""


_now = threading.local()


@torch.library.custom_op("penstock::attend_new", mutates_args=())
def attend_new(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Write the new keys and values, and attend over all: [rows, 1, heads, head size]."""
    keys, values = _now.cache.update(key, value, _now.layer)
    return attention.over_rows(query, keys, values, scaling, window, softcap).contiguous()


@attend_new.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    rows, heads, new, head = query.shape
    return query.new_empty(rows, new, heads, head)


def attend(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What shells call."""
    return torch.ops.penstock.attend_new(query, key, value, scaling, sliding_window, softcap), None


class Handed:
    """What a shell sees as the cache: new keys and values go on to `attend_new`."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


class CompiledLayers:
    """The layers of one model."""

    def __init__(self, model: Any) -> None:
        attention.register(NAME, attend)
        if was_compiled(model):
            raise UnfitLayersError("it was compiled already; give it as it was before")
        self._layers = list(layers_of(model))
        for index, layer in enumerate(self._layers):
            _check(layer, index)
        kinds = layer_kinds(self._layers)
        shells = {kind: shell_of(self._layers[index]) for kind, index in firsts(kinds).items()}
        bodies = {kind: _compile(shell) for kind, shell in shells.items()}
        self._runs = [
            _Run(layer, index, bodies[kind])
            for index, (layer, kind) in enumerate(zip(self._layers, kinds, strict=True))
        ]

    @contextlib.contextmanager
    def used(self, cache: Any) -> Iterator[None]:
        """The model runs its layers this way inside, over this cache, and as before outside."""
        before = [vars(layer).get("forward") for layer in self._layers]
        try:
            _now.cache = cache
            for layer, run in zip(self._layers, self._runs, strict=True):
                vars(layer)["forward"] = run
            yield
        finally:
            _now.cache = None  # a cache that is not used any more must not live on here
            for layer, forward in zip(self._layers, before, strict=True):
                vars(layer).pop("forward", None)
                if forward is not None:
                    vars(layer)["forward"] = forward


class _Run:
    """One layer."""

    def __init__(self, layer: nn.Module, index: int, body: Callable[..., Any]) -> None:
        self._layer, self._index, self._body = layer, index, body
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        self._names = [name for name, _ in tensors]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, _now.layer = _now.cache, self._index
        # Models differ in what they call it, and in whether they call it anything.
        given = [_handed if each is cache else each for each in args]
        named = {name: _handed if each is cache else each for name, each in kwargs.items()}
        torch.utils._pytree.tree_map_(partial(_any_rows, cache.batch_size), (given, named))
        weights = {name: _tensor(self._layer, name) for name in self._names}
        return self._body(weights, given, named)


_handed = Handed()


def _any_rows(rows: int, each: Any) -> None:
    """Let the code that is compiled for this serve any number of rows."""
    if isinstance(each, torch.Tensor) and rows > 1 and each.ndim and len(each) == rows:
        torch._dynamo.maybe_mark_dynamic(each, 0)


def _tensor(layer: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(layer.get_submodule(path), last)
    return found


def _compile(shell: nn.Module) -> Callable[..., Any]:
    def run(weights: dict[str, torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return torch.func.functional_call(shell, weights, tuple(args), kwargs)

    raise_recompile_limit()
    made: Callable[..., Any] = torch.compile(run, fullgraph=True)
    return made


def shell_of(layer: nn.Module) -> nn.Module:
    """The layer without its weights, attending by `attend_new`."""
    tensors = (*layer.parameters(), *layer.buffers())
    empty = {
        id(each): nn.Parameter(each.to("meta"), requires_grad=False)
        if isinstance(each, nn.Parameter)
        else each.to("meta")
        for each in tensors
    }
    try:
        shell = copy.deepcopy(layer, dict(empty))
    except Exception as failed:  # whatever others have put into it
        raise UnfitLayersError(f"{type(layer).__name__} cannot be copied: {failed}") from failed
    for hooks in (shell._forward_hooks, shell._forward_pre_hooks):
        hooks.clear()  # the layer itself calls them
    for part in shell.modules():
        if (config := getattr(part, "config", None)) is not None:
            config._attn_implementation = NAME
    return shell.eval()


def _check(layer: nn.Module, index: int) -> None:
    """UnfitLayersError if others have changed what a part of it computes: shells would not do so,
    or would do so for all layers."""
    for path, part in layer.named_modules():
        hooked = part is not layer and (part._forward_hooks or part._forward_pre_hooks)
        if hooked or "forward" in vars(part):
            what = "hooks" if hooked else "a forward of its own"
            raise UnfitLayersError(
                f"{path or type(layer).__name__} of layer {index} has {what}; remove that to have "
                f"layers compiled"
            )


def layers_of(model: Any) -> nn.ModuleList:
    """The list of layers. UnfitLayersError if the model has none of the usual length."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()  # a model that sees as well has layers for that, too
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count == len(set(part)):
            return part
    raise UnfitLayersError(f"{type(model).__name__} has no list of {count} layers")
