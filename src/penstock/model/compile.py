"""Compile one body per kind of layer, shared by all layers of that kind.

A transformer has dozens of layers that run the same code. The compiled body of a kind takes the
weights as arguments instead of reading them from a module, so one compilation serves every layer,
wherever its weights are in memory at the time.

`LayerBodies` is the mechanism; training (`CompiledLayers`, below) and generation
(`penstock.generate.compiled_layers`) differ in what they pass through a body and in how they copy
the layer that the body is made from.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.model.attention import attending_over
from penstock.model.copy_check import HOOKS
from penstock.model.experts import Routing, noting_routing
from penstock.model.mlp_tiles import set_training
from penstock.model.varlen_attention import DocumentSpans

RECOMPILE_LIMIT = 64
"""Number of versions of one body that torch may compile."""

Body = Callable[..., Any]
"""A function of a layer's weights, by name, and of the layer's other arguments."""

Kind = tuple[Any, ...]
"""Identifies layers that run the same code. Code compiled for one serves the others."""


class LayerBodies:
    """The compiled bodies of a list of layers, one body for each kind of layer.

    `make_shell` copies the first layer of a kind. Compiled code must not find its arguments in the
    layer itself, or it could not be used for another layer, so the body is made from a copy, the
    shell, whose own tensors are never read. `make_body` returns the function to compile, which
    calls the shell with `call_with_weights`. `options` are those of `torch.compile`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        make_shell: Callable[[nn.Module], nn.Module],
        make_body: Callable[[nn.Module], Body],
        **options: Any,
    ) -> None:
        self._layers = layers
        raise_recompile_limit()
        self._names = [_tensor_names(layer) for layer in layers]
        kinds = layer_kinds(layers)
        firsts = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
        shells = {kind: make_shell(layers[index]) for kind, index in firsts.items()}
        plain: dict[Kind, Body] = {kind: make_body(shell) for kind, shell in shells.items()}
        bodies = {kind: torch.compile(body, **options) for kind, body in plain.items()}
        self.shells = list(shells.values())
        self.plain_bodies = [plain[kind] for kind in kinds]
        """The function of each layer, before it is compiled."""
        self._bodies: list[Body] = [bodies[kind] for kind in kinds]

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the body of layer `index` with the weights that the layer holds now."""
        return self._bodies[index](self.weights(index), *args)

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """Return the weights that a layer holds now, by name."""
        layer = self._layers[index]
        return {name: _get_tensor(layer, name) for name in self._names[index]}


class CompiledLayers:
    """The layers of a model in training, run by compiled bodies.

    Create it before weights are bound to the layers: a shell keeps what its layer holds. Where
    documents begin is an argument of the body as well, so however a batch is packed, nothing is
    compiled again.
    """

    def __init__(self, layers: Sequence[nn.Module], *, deterministic: bool = True) -> None:
        # The compiler suggests TF32 for fp32 products. Who asks for fp32 does not want it.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        # Asks users to report to PyTorch that a softmax could be faster; its result is the same.
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        self._bodies = LayerBodies(
            layers, make_shell=copy.deepcopy, make_body=_training_body, dynamic=False,
            options=deterministic_options() if deterministic else {},
        )  # fmt: skip

    def train(self, training: bool) -> None:
        """Set training mode, which decides about dropout, in all shells."""
        for shell in self._bodies.shells:
            set_training(shell, training)

    def __call__(
        self,
        index: int,
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        documents: DocumentSpans | None,
    ) -> tuple[torch.Tensor, Routing]:
        """Run layer `index` over `documents`; None: PyTorch computes each row as one."""
        output, notes = self._bodies(index, hidden, args, kwargs, documents)
        return output, Routing(**notes)

    def plain_call(
        self,
        index: int,
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        documents: DocumentSpans | None,
    ) -> tuple[Body, tuple[Any, ...]]:
        """Return the function that is compiled for a layer, and its arguments for this call."""
        weights = self._bodies.weights(index)
        return self._bodies.plain_bodies[index], (weights, hidden, args, kwargs, documents)


def _training_body(shell: nn.Module) -> Body:
    def run(
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        args: Any,
        kwargs: Any,
        documents: DocumentSpans | None,
    ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        with attending_over(documents), noting_routing() as notes:
            out: Any = call_with_weights(shell, weights, (hidden, *args), kwargs)
        output: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return output, notes

    return run


def call_with_weights(
    shell: nn.Module,
    weights: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a shell with other tensors in place of its own."""
    return torch.func.functional_call(shell, weights, args, kwargs)


def deterministic_options() -> dict[str, Any]:
    """Return options of the compiler with which its kernels do not depend on timings.

    By default, the compiler times several launch configurations of a kernel, and keeps the fastest.
    For a reduction they differ in the number of elements that are summed at a time, and so in the
    bits of the sum: which one wins differs from process to process. Kernels without a reduction
    compute each element by itself, but nothing promises that the GPU's assembler fuses the same
    products and sums in each configuration, so they have one as well.
    """
    config: Any = torch._inductor.config
    wanted: dict[str, Any] = {
        # One configuration per reduction, no timed padding of matrices, no timed choice of kernels.
        "deterministic": True,
        # Otherwise a second configuration, with half as many elements at a time, is added when a
        # kernel uses many registers, and the faster one is kept.
        "dynamic_scale_rblock": False,
        "triton.autotune_pointwise": False,
        # The first option says it all. Torch's switch for deterministic algorithms, which is on
        # while the engine computes and off elsewhere, must not decide about kernels as well.
        "write_are_deterministic_algorithms_enabled": not hasattr(config, "deterministic"),
    }
    known = config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


def layer_kinds(layers: Sequence[nn.Module]) -> list[Kind]:
    """Return the kind of each layer: equal for layers that run the same code.

    A kind is everything that the modules of a layer hold, except their number in the model. That
    includes functions that a caller has put there, and hooks.
    """
    return [_kind(layer) for layer in layers]


def _kind(layer: nn.Module) -> Kind:
    parts: list[Any] = [repr(layer)]
    for path, module in layer.named_modules():
        attributes = {
            name: value
            for name, each in vars(module).items()
            if (value := _plain(each)) is not _OTHER
            and name not in ("layer_idx", "layer_id", "training")
        }
        functions = [
            (name, key)
            for name, each in vars(module).items()
            for value in (each.values() if name in HOOKS else (each,))
            if (key := _function_key(value)) is not None
        ]
        parts.append((path, tuple(sorted(attributes.items())), tuple(functions)))
    return tuple(parts)


def _function_key(value: Any, depth: int = 0) -> Any:
    """Return a key that distinguishes a function or a tensor from others; None for other values.

    Functions of equal code that hold equal values have equal keys: a caller who changes all layers
    in a loop makes a new function for each. `check_functions` refuses those that hold modules.
    """
    if isinstance(value, types.MethodType):
        return "method", _function_key(value.__func__, depth), _held_key(value.__self__, depth)
    if isinstance(value, functools.partial):
        held = (*value.args, *value.keywords.values())
        parts = (_function_key(value.func, depth), tuple(value.keywords))
        return "partial", *parts, *(_held_key(each, depth) for each in held)
    if isinstance(value, torch.Tensor):  # an attribute, which is no argument of compiled code
        return _tensor_key(value)
    if isinstance(value, types.FunctionType):
        cells = (_content(cell) for cell in value.__closure__ or ())
        others = (value.__kwdefaults__ or {}).values()
        held = (*cells, *(value.__defaults__ or ()), *others)
        return "function", id(value.__code__), *(_held_key(each, depth) for each in held)
    return None


def _tensor_key(value: torch.Tensor) -> Any:
    """Return a key that equal tensors share, unless they are large.

    Layers may each make a tensor with the same values, such as a scale. By identity, every layer
    would be of another kind, and would be compiled separately.
    """
    if value.numel() > LARGE or value.is_meta:
        return id(value)
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    return "tensor", value.dtype, tuple(value.shape), str(value.device), digest


def _held_key(value: Any, depth: int) -> Any:
    """Return a key that distinguishes a value that a function holds from others."""
    if isinstance(value, nn.Module):
        return type(value)
    plain = _plain(value)
    if plain is not _OTHER:
        return plain
    key = _function_key(value, depth + 1) if depth < FUNCTION_DEPTH else None
    return id(value) if key is None else key


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


LARGE = 1 << 22
"""Number of elements above which tensors are compared by their identity."""

FUNCTION_DEPTH = 8
"""Functions inside of functions that `_function_key` looks into: they may hold each other."""

_OTHER = object()
"""Stands for a value that is no number, no text, and no collection of these."""


def _plain(value: Any) -> Any:
    """Return a number, a text or a collection of these in a form that can be compared.

    Adapters keep the factor of their product in a dictionary.
    """
    if isinstance(value, dict) and value:
        items = [(key, _plain(each)) for key, each in value.items()]
        return _OTHER if any(each is _OTHER for _, each in items) else repr(items)
    if isinstance(value, list | tuple):
        members = [_plain(each) for each in value]
        return _OTHER if any(each is _OTHER for each in members) else repr(members)
    return value if isinstance(value, int | float | str | bool | type(None)) else _OTHER


def raise_recompile_limit() -> None:
    """Let torch compile enough versions of one body.

    The bodies of all kinds are closures of one function, and torch limits the versions per
    function: with and without gradients, for each kind and each shape.
    """
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)


def was_compiled(model: Any) -> bool:
    """Return whether some part of the model was compiled with `torch.compile` by its owner."""
    return any(
        part._compiled_call_impl is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def _tensor_names(layer: nn.Module) -> list[str]:
    # Buffers too: layers of one kind may differ in their values, such as a scale of each layer.
    buffers = [name for name, _ in layer.named_buffers()]
    return [*(name for name, _ in layer.named_parameters()), *buffers]


def _get_tensor(layer: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(layer.get_submodule(path), last)
    return tensor
