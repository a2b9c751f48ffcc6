"""Compile a model's layers for passes that generate one token per row.

A layer is some forty small kernels, and even in one CUDA graph each of them waits for memory.
Compiled, they are about ten. `penstock.model.compile` has the mechanism: all layers of one kind
share one compiled body.

The cache is not part of the compiled code. A layer hands its new keys and values to one custom
operation, `attend_new`, which writes them to the cache and attends as any other pass does. The
operation reads the current cache and layer from this module. So one compilation serves every cache,
every layer of a kind, and any number of rows from two on.

Import this module only where layers are compiled: it loads torch's compiler.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.generate.attention import attend_rows
from penstock.model.attention import (
    COMPILED_CACHED_ROWS,
    AttentionOptions,
    attention_configs,
    attention_function,
    register,
    set_attention,
)
from penstock.model.compile import Body, LayerBodies, call_with_weights, was_compiled

COMPILE_ERRORS: tuple[type[Exception], ...] = (torch._dynamo.exc.TorchDynamoException,)
"""Errors that say that code cannot be compiled, on this machine or at all."""


class UnfitLayersError(PenstockError, LookupError):
    """The model's layers cannot be compiled as copies of one layer per kind."""


_current = threading.local()
"""The cache and the number of the layer that this thread is computing; read by `attend_new`."""


@torch.library.custom_op("penstock::attend_new", mutates_args=())
def attend_new(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Write new keys and values, and attend over all of them: `[rows, 1, heads, head size]`.

    To the compiler the operation mutates nothing: the cache is not among its arguments.
    """
    keys, values = _current.cache.update(key, value, _current.layer)
    return attend_rows(query, keys, values, scaling, window, softcap).contiguous()


@attend_new.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    rows, heads, new, head = query.shape
    return query.new_empty(rows, new, heads, head)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend as a shell of a layer asks for it."""
    output: torch.Tensor = torch.ops.penstock.attend_new(
        query, key, value, options.scaling, options.window, options.softcap
    )
    return output


attend = attention_function(_attend)


class CacheStandIn:
    """What a shell sees as the cache: it passes new keys and values on to `attend_new`."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


_stand_in = CacheStandIn()


class CompiledDecodeLayers:
    """The layers of one model, compiled for decoding."""

    def __init__(self, model: Any) -> None:
        register(COMPILED_CACHED_ROWS, attend)
        if was_compiled(model):
            raise UnfitLayersError("it was compiled already; pass the model before torch.compile")
        self._layers = list(find_layers(model))
        for index, layer in enumerate(self._layers):
            _check_unchanged(layer, index)
        bodies = LayerBodies(
            self._layers, make_shell=make_shell, make_body=_decode_body, fullgraph=True
        )
        self._forwards = [_LayerForward(bodies, index) for index in range(len(self._layers))]

    @contextlib.contextmanager
    def installed(self, cache: Any) -> Iterator[None]:
        """Make the model run its compiled layers over this cache inside the block."""
        before = [vars(layer).get("forward") for layer in self._layers]
        try:
            _current.cache = cache
            for layer, forward in zip(self._layers, self._forwards, strict=True):
                vars(layer)["forward"] = forward
            yield
        finally:
            _current.cache = None  # do not keep a cache alive that is no longer used
            for layer, own_forward in zip(self._layers, before, strict=True):
                vars(layer).pop("forward", None)
                if own_forward is not None:
                    vars(layer)["forward"] = own_forward


class _LayerForward:
    """The `forward` of one layer while compiled layers are installed."""

    def __init__(self, bodies: LayerBodies, index: int) -> None:
        self._bodies, self._index = bodies, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, _current.layer = _current.cache, self._index
        # By identity: models differ in the name and the position of the cache argument.
        positional = [_stand_in if each is cache else each for each in args]
        named = {name: _stand_in if each is cache else each for name, each in kwargs.items()}
        torch.utils._pytree.tree_map_(partial(_mark_rows, cache.batch_size), (positional, named))
        return self._bodies(self._index, positional, named)


def _mark_rows(rows: int, each: Any) -> None:
    """Mark the number of rows as dynamic, so that one compiled version serves any number."""
    if isinstance(each, torch.Tensor) and rows > 1 and each.ndim and len(each) == rows:
        torch._dynamo.maybe_mark_dynamic(each, 0)


def _decode_body(shell: nn.Module) -> Body:
    def run(weights: dict[str, torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return call_with_weights(shell, weights, tuple(args), kwargs)

    return run


def make_shell(layer: nn.Module) -> nn.Module:
    """Copy a layer without its weights, and make the copy attend with `attend_new`."""
    tensors = (*layer.parameters(), *layer.buffers())
    empty = {
        id(each): nn.Parameter(each.to("meta"), requires_grad=False)
        if isinstance(each, nn.Parameter)
        else each.to("meta")
        for each in tensors
    }
    try:
        # As deepcopy's memo, `empty` makes the copy refer to the empty tensors.
        shell = copy.deepcopy(layer, dict(empty))
    except Exception as error:  # layers may hold anything that their owner put there
        raise UnfitLayersError(f"{type(layer).__name__} cannot be copied: {error}") from error
    for hooks in (shell._forward_hooks, shell._forward_pre_hooks):
        hooks.clear()  # the layer itself calls them
    set_attention(attention_configs(shell), COMPILED_CACHED_ROWS)
    return shell.eval()


def _check_unchanged(layer: nn.Module, index: int) -> None:
    """Raise UnfitLayersError if hooks or a replaced `forward` change what the layer computes.

    A shell would not have the change, or all layers of its kind would have it.
    """
    for path, part in layer.named_modules():
        hooked = part is not layer and (part._forward_hooks or part._forward_pre_hooks)
        if hooked or "forward" in vars(part):
            what = "hooks" if hooked else "a forward of its own"
            raise UnfitLayersError(
                f"{path or type(layer).__name__} of layer {index} has {what}; remove it to compile "
                f"the layers"
            )


def find_layers(model: Any) -> nn.ModuleList:
    """Return the model's list of layers, or raise UnfitLayersError if it has none."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()  # a model that also takes images has layers for those, too
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count == len(set(part)):
            return part
    raise UnfitLayersError(f"{type(model).__name__} has no list of {count} layers")
