"""Find out which parameters a model uses before its first layer and after its last.

The model's own code runs once on two tokens. Its parameters are zeros that take no memory, and
every operation passes on which parameters its result depends on. So what is part of the embedding,
what is part of the head, and whether the embedding is linear, follow from what the model computes
and not from names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.model.compile import layer_kinds
from penstock.model.layer_probe import Arguments, LayerProbes
from penstock.model.meta_model import gpus_of, remember_model
from penstock.model.router_loss import head_options

LARGE = 1 << 18
"""Elements of a tensor from which on an operation is computed without data."""

TOKENS = 2

_aten = torch.ops.aten

# Their results may be large where their inputs are not: the gradients of weights, from two tokens.
_PRODUCTS = frozenset((_aten.mm.default, _aten.bmm.default))

# Their results depend on the shapes of their inputs, not on the values.
_SHAPE_ONLY = frozenset(
    (_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.rand_like,
     _aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full, _aten.new_empty_strided)
)  # fmt: skip


class StateChangedError(Exception):
    """A forward pass changes a tensor of the model, or the input of a layer."""


@dataclass(frozen=True, slots=True)
class ParameterFlow:
    """Which parameters reach the first layer, and which the logits, by name."""

    embedding: frozenset[str]
    """Parameters that the input of the first layer depends on."""

    head: frozenset[str]
    """Parameters that the logits depend on, given the output of the last layer."""

    linear: bool
    """Whether the gradients of the embedding's parameters do not depend on their values."""

    without_gradient: frozenset[str]
    """Parameters that get no gradient: those outside the layers from neither embedding nor head,
    and those of layers not from their layer."""

    arguments: Mapping[str, str]
    """Parameters that arguments of layers depend on, with the name or position of such an
    argument."""

    problem: str = ""
    """Why the parts between which the layers lie cannot be separated; empty if they can."""

    def refusal(self, trainable: Sequence[str]) -> str:
        """Return why Penstock would train the model wrongly; empty if it would not."""
        for name in trainable:
            if name in self.arguments:
                return (
                    f"its layers take the argument {self.arguments[name]}, which it computes from "
                    f"{name}; Penstock differentiates layers only with respect to their hidden "
                    f"states. Freeze it with `--freeze {name}`"
                )
        for name in trainable:
            if name in self.without_gradient:
                return (
                    f"{name} gets no gradient: the model does not use it in its layer, nor before "
                    f"its first layer or after its last. Freeze it with `--freeze {name}`"
                )
        return self.problem


def trace_parameters(body: nn.Module, path: str, hidden: int) -> ParameterFlow:
    """Run what is around the layers at `path`, and return which parameters it uses.

    The model may be on any device; it is as before afterwards. Raises StateChangedError if a
    forward pass in training changes a parameter, a buffer or the input of a layer: backward runs
    layers again, and micro-batches run them more often than a whole batch.
    """
    restore = remember_model(body)
    try:
        with torch.random.fork_rng(devices=gpus_of(body)):  # dropout draws numbers
            body.train()
            return _trace(body, path, hidden)
    finally:
        restore()


def _trace(body: nn.Module, path: str, hidden: int) -> ParameterFlow:
    table: Any = body.get_input_embeddings()  # type: ignore[operator]
    width = int(table.weight.shape[-1])
    layers: Any = body.get_submodule(path)
    probes = LayerProbes(body, path)
    probes.install()
    parameters, fixed = _replace_tensors(body)
    with _Dependencies() as flow, torch.enable_grad():
        flow.fix(fixed)
        for name, parameter in parameters.items():
            flow.mark(parameter, frozenset((name,)))
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        positions = torch.arange(TOKENS)[None]
        first, calls = probes.enter(input_ids=ids, position_ids=positions, use_cache=False)
        gradients = _differentiate(first, parameters)
        linear = not flow.values_read and not any(flow.names(g) for g in gradients.values())
        embedding = flow.names(first)
        arguments = {
            name: str(argument)
            for positional, named in calls
            for argument, value in (*enumerate(positional, start=1), *named.items())
            for name in flow.names(value)
        }

        embeddings = torch.zeros(1, TOKENS, width, dtype=first.dtype)
        flow.mark(embeddings, frozenset((_EMBEDDINGS,)))
        inputs = {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}
        inputs |= head_options(body.config)
        output = torch.zeros(1, TOKENS, hidden, dtype=first.dtype)
        out = probes.run_head(output, lambda: body(**inputs))
        head = flow.names(out.logits)
        gradients |= _differentiate(out.logits, parameters)
        unused = _unused_in_layers(path, layers, calls, output, flow)
    return ParameterFlow(
        embedding=embedding,
        head=head - {_EMBEDDINGS},
        linear=linear,
        without_gradient=(frozenset(parameters) - frozenset(gradients)) | unused,
        arguments=arguments,
        problem=_find_problem(probes, head),
    )


_EMBEDDINGS = "the input embeddings"

CHANGED = (
    "its forward pass changes {name}. Penstock runs a layer again in its backward pass, and once "
    "for each micro-batch, so results would not be those of one call. Modules that keep running "
    "statistics, such as BatchNorm and spectral_norm, cannot be trained, and a layer must not "
    "change its input in place"
)


def _unused_in_layers(
    path: str, layers: Sequence[nn.Module], calls: Sequence[Arguments], source: torch.Tensor,
    flow: _Dependencies,
) -> frozenset[str]:  # fmt: skip
    """Return the parameters of layers that get no gradient. Layers of one kind run once."""
    found: dict[object, list[str]] = {}
    unused = set()
    for index, (code, layer) in enumerate(zip(layer_kinds(layers), layers, strict=True)):
        kind = code, tuple(name for name, _ in layer.named_parameters())
        if kind not in found:
            found[kind] = _unused_parameters(layer, calls[index], source, flow, f"{path}.{index}")
        unused |= {f"{path}.{index}.{name}" for name in found[kind]}
    return frozenset(unused)


def _unused_parameters(
    layer: nn.Module, call: Arguments, source: torch.Tensor, flow: _Dependencies, path: str
) -> list[str]:
    parameters, fixed = _replace_tensors(layer, path)
    flow.fix({f"the input of {path}": source, **fixed})
    try:
        out: Any = layer(source, *call[0], **call[1])
        _check_buffers(layer, path, fixed)
    except StateChangedError:
        raise
    except Exception:  # two tokens, or zeros, are not enough for some mixers
        return []
    output: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
    gradients = _differentiate(output, parameters)
    return [name for name in parameters if name not in gradients]


def _check_buffers(layer: nn.Module, path: str, before: Mapping[str, torch.Tensor]) -> None:
    """Raise StateChangedError if a layer has put other tensors in the place of its buffers."""
    for name, buffer in layer.named_buffers(prefix=path, remove_duplicate=False):
        if before.get(name) is not buffer:
            raise StateChangedError(CHANGED.format(name=name))


def _find_problem(probes: LayerProbes, head: frozenset[str]) -> str:
    if _EMBEDDINGS in head:
        return (
            "it uses the output of its embedding after the last layer, which Penstock does not "
            "differentiate"
        )
    index = probes.first_change()
    if index is not None:
        return (
            f"it changes the hidden states between layers {index} and {index + 1}, which Penstock "
            f"does not differentiate"
        )
    return ""


def _replace_tensors(
    body: nn.Module, prefix: str = ""
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Replace parameters and buffers by zeros without memory.

    Returns the parameters by name, and all tensors by their name with the prefix.
    """
    stand_ins: dict[int, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = {}
    every: dict[str, torch.Tensor] = {}
    for path, module in body.named_modules():
        start = ".".join(part for part in (prefix, path) if part)
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                known = id(parameter) in stand_ins
                new = stand_ins.setdefault(
                    id(parameter), nn.Parameter(_zeros(parameter).data, requires_grad=True)
                )
                every[f"{start}.{leaf}" if start else leaf] = module._parameters[leaf] = new
                if not known:
                    named[f"{path}.{leaf}" if path else leaf] = new
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                stand_in = module._buffers[leaf] = _zeros(buffer)
                every[f"{start}.{leaf}" if start else leaf] = stand_in
    return named, every


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _differentiate(
    out: torch.Tensor, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the gradients of those parameters that have one."""
    if not out.requires_grad:
        return {}
    gradient = torch.ones(out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, list(parameters.values()), gradient, allow_unused=True)
    return {n: g for n, g in zip(parameters, found, strict=True) if g is not None}


class _Dependencies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps track of the parameters that the content of each tensor depends on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, frozenset[str]] = {}  # by storage, which views share
        self._kept: list[torch.Tensor] = []  # a storage's address is reused once it is freed
        self._fixed: dict[int, str] = {}  # names of tensors that may not change, by storage
        self.values_read = False
        """Whether the code read a value that depends on a parameter, to decide what to do."""

    def fix(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let operations that write to these tensors raise StateChangedError from now on."""
        for name, tensor in tensors.items():
            self._kept.append(tensor)
            self._fixed[tensor.untyped_storage()._cdata] = name

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is _aten.set_.source_Tensor and _share_memory(*args):
            return  # torch does this when it registers a parametrization, as PEFT does in a call
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for each in tree_leaves(value):
                if not isinstance(each, torch.Tensor):
                    continue
                name = self._fixed.get(each.untyped_storage()._cdata)
                if name is not None:
                    raise StateChangedError(CHANGED.format(name=name))

    def mark(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        """Note that a tensor depends on parameters, in addition to those noted before."""
        self._kept.append(tensor)
        key = tensor.untyped_storage()._cdata
        self._names[key] = self._names.get(key, frozenset()) | names

    def names(self, value: Any) -> frozenset[str]:
        """Return the parameters that a tensor, or any tensor inside a value, depends on."""
        tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        return frozenset[str]().union(
            *(self._names.get(t.untyped_storage()._cdata, frozenset()) for t in tensors)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check_writes(func, args, kwargs)
        names = self.names((args, kwargs))
        if names and func is _aten._local_scalar_dense.default:
            self.values_read = True
        out = _compute(func, args, kwargs)
        if names and func.overloadpacket not in _SHAPE_ONLY:
            for each in tree_leaves(out):
                if isinstance(each, torch.Tensor):
                    self.mark(each, names)
        return out


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation; with tensors as large as an embedding's table, only its shapes."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    large = (
        func is _aten.embedding_dense_backward.default
        or any(t.numel() >= LARGE for t in tensors)
        or (func in _PRODUCTS and args[0].shape[:-1].numel() * args[1].shape[-1] >= LARGE)
    )
    # Views take no memory, and gathering the rows of a table reads only those rows.
    aliases = any(each.alias_info is not None for each in func._schema.returns)
    if not large or aliases or func is _aten.embedding.default:
        return func(*args, **kwargs)
    shapes = tree_map_only(
        torch.Tensor,
        lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"),
        (args, kwargs),
    )
    out = func(*shapes[0], **shapes[1])
    return tree_map_only(torch.Tensor, _zeros, out)
