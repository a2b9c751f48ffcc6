"""Initial weights: drawn at random, or copied from tensors or files."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.checkpoint.adapter_files import WeightDigest
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.tensor_access import Source, TensorAccess
from penstock.errors import UnsupportedModelError
from penstock.model.adapters import Adapter
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.model.meta_model import build_model
from penstock.model.split import SplitModel
from penstock.optim import formats
from penstock.optim.rules import draw_key
from penstock.roles import Role

Types = Callable[[TensorSpec], torch.dtype]
"""Returns the type in which a source will deliver a tensor."""


def set_master(
    access: TensorAccess, block: int, inventory: Inventory, source: Source, types: Types,
    *, executor: BoundedExecutor | None = None, digest: WeightDigest | None = None,
    trainable: bool | None = None,
) -> None:  # fmt: skip
    """Set a block's weights and master weights from `source`, and its moments to zero.

    The source delivers fp32 or the type of the weights. With an executor, its threads call
    `source`, and the block is complete only after `executor.wait_all`. The digest, if given, notes
    all frozen weights. `trainable` selects tensors as in `TensorAccess.fill`; if it is False,
    master weights and moments stay as they are.
    """
    dtype = access.weight_dtype

    def weight(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        values = source(tensor, low, high)
        if values.dtype != dtype:
            values = formats.store_master(values.float(), dtype)[0]
        return values

    def rest(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        if dtype == torch.bfloat16 == types(tensor):  # the weight is the whole master
            return torch.zeros(high - low, dtype=torch.int16)
        values = formats.store_master(source(tensor, low, high).float(), dtype)[1]
        assert values is not None
        return values

    if digest is not None:
        digest.note_block(inventory.blocks[block], weight)
    access.fill(block, Role.WEIGHT, weight, executor=executor, trainable=trainable)
    if inventory.blocks[block].parameters(True) and trainable is not False:
        trained = (tensor for tensor in inventory.blocks[block].tensors if tensor.trainable)
        source_types = {types(tensor) for tensor in trained}
        if dtype == torch.bfloat16 and source_types == {dtype}:
            access.clear(block, Role.MASTER)
        elif access.formats.has(Role.MASTER):
            access.fill(block, Role.MASTER, rest, executor=executor)
        clear_moments(access, block)


def clear_moments(access: TensorAccess, block: int) -> None:
    """Set the moments of a block to zero."""
    for role in (Role.FIRST, Role.SECOND):
        access.clear(block, role)


def set_weights(
    access: TensorAccess,
    inventory: Inventory,
    state: Mapping[str, torch.Tensor],
    *,
    digest: WeightDigest | None = None,
) -> None:
    """Set all weights from tensors by name."""
    for index in range(len(inventory.blocks)):
        set_master(access, index, inventory, *_from_tensors(state), digest=digest)


def _from_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[Source, Types]:
    return (
        lambda tensor, low, high: tensors[tensor.name].reshape(-1)[low:high],
        lambda tensor: tensors[tensor.name].dtype,
    )


def draw_weights(
    access: TensorAccess, inventory: Inventory, split_model: SplitModel, seed: int,
    *, adapter: Mapping[str, torch.Tensor] | None = None, digest: WeightDigest | None = None,
    trainable: bool | None = None,
) -> None:  # fmt: skip
    """Draw all weights the way the model's own class initializes them, in fp32, block by block.

    The values depend on the seed and the block, and not on the plan. The tensors of an `adapter`
    are not drawn here. `digest` and `trainable` are those of `set_master`.
    """
    given = adapter or {}
    for index, block in enumerate(inventory.blocks):
        wanted = (t for t in block.tensors if t.name not in given)
        wanted = (t for t in wanted if trainable in (None, t.trainable))
        rest = replace(block, tensors=tuple(wanted))
        drawn = _draw_block(split_model, rest, draw_key(seed, 0, index) & ((1 << 63) - 1))
        set_master(
            access, index, inventory, *_from_tensors({**given, **drawn}),
            digest=digest, trainable=trainable,
        )  # fmt: skip


def draw_adapter(
    adapter: Adapter, config: Any, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of a new adapter, as `get_peft_model` draws them after `manual_seed`.

    PEFT draws them on the device of the weights, one module after the other. The weights are zeros
    that take no memory.
    """
    from peft import get_peft_model

    model: Any = build_model(config, dtype, torch.device("cpu"))
    zero = torch.zeros((), dtype=dtype)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                zeros = zero.expand(parameter.shape)
                module._parameters[leaf] = nn.Parameter(zeros, requires_grad=False)
    settings = copy.deepcopy(adapter.config)
    settings.modules_to_save = None  # copies of weights: nothing is drawn
    if getattr(settings, "modules_to_tie", None):
        settings.modules_to_tie, settings.ensure_weight_tying = None, False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Warnings about the model were given when the adapter was put into it.
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        found: Any = get_peft_model(model, settings, adapter_name=adapter.name)
    named = found.get_base_model().named_parameters()
    return {name: tensor.detach() for name, tensor in named if adapter.is_own(name)}


def _draw_block(split_model: SplitModel, block: Block, seed: int) -> dict[str, torch.Tensor]:
    drawn: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for tensor in block.tensors:
            if tensor.name not in drawn:
                drawn |= _init_module(split_model, *split_model.module_of(tensor.name))
    return drawn


def _init_module(
    split_model: SplitModel, module: nn.Module, names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Initialize a copy of one leaf module that has memory, and return its tensors by name."""
    bare = copy.copy(module)
    bare._parameters = dict.fromkeys(module._parameters)
    for leaf, name in names.items():
        empty = torch.full(split_model.shape_of(name), float("nan"))
        bare._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
    init: Any = split_model.model._init_weights
    init(bare)
    initialized = {}
    for leaf, name in names.items():
        value = bare._parameters[leaf]
        assert value is not None
        if bool(value.isnan().any()):
            raise UnsupportedModelError(
                f"{type(module).__name__} does not initialize {name}; start from a checkpoint "
                f"instead of --init random"
            )
        initialized[name] = value.detach()
    return initialized
