"""Initial weights: drawn at random, or copied from tensors or files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.tensor_access import Source, TensorAccess
from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.model.split import SplitModel
from penstock.optim import formats
from penstock.optim.rules import draw_key
from penstock.roles import Role

Types = Callable[[TensorSpec], torch.dtype]
"""Returns the type in which a source will deliver a tensor."""


def set_master(
    access: TensorAccess, block: int, inventory: Inventory, source: Source, types: Types,
    *, executor: BoundedExecutor | None = None,
) -> None:  # fmt: skip
    """Set a block's weights and master weights from `source`, and its moments to zero.

    The source delivers fp32 or the type of the weights. With an executor, its threads call
    `source`, and the block is complete only after `executor.wait_all`.
    """
    dtype = access.weight_dtype

    def weight(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        values = source(tensor, low, high)
        return values if values.dtype == dtype else formats.store_master(values.float(), dtype)[0]

    def rest(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        if dtype == torch.bfloat16 == types(tensor):  # the weight is the whole master
            return torch.zeros(high - low, dtype=torch.int16)
        values = formats.store_master(source(tensor, low, high).float(), dtype)[1]
        assert values is not None
        return values

    access.fill(block, Role.WEIGHT, weight, executor=executor)
    if inventory.blocks[block].parameters(True):
        source_types = {types(tensor) for tensor in inventory.blocks[block].tensors}
        if dtype == torch.bfloat16 and source_types == {dtype}:
            access.clear(block, Role.MASTER)
        elif access.formats.has(Role.MASTER):
            access.fill(block, Role.MASTER, rest, executor=executor)
        clear_moments(access, block)


def clear_moments(access: TensorAccess, block: int) -> None:
    """Set both moments of a block to zero."""
    for role in (Role.FIRST, Role.SECOND):
        access.clear(block, role)


def set_weights(
    access: TensorAccess, inventory: Inventory, state: Mapping[str, torch.Tensor]
) -> None:
    """Set all weights from tensors by name."""
    for index in range(len(inventory.blocks)):
        set_master(access, index, inventory, *_from_tensors(state))


def _from_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[Source, Types]:
    return (
        lambda tensor, low, high: tensors[tensor.name].reshape(-1)[low:high],
        lambda tensor: tensors[tensor.name].dtype,
    )


def draw_weights(
    access: TensorAccess, inventory: Inventory, split_model: SplitModel, seed: int
) -> None:
    """Draw all weights the way the model's own class initializes them, in fp32, block by block.

    The values depend on the seed and the block, and not on the plan.
    """
    for index, block in enumerate(inventory.blocks):
        drawn = _draw_block(split_model, block, draw_key(seed, 0, index) & ((1 << 63) - 1))
        set_master(access, index, inventory, *_from_tensors(drawn))


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
