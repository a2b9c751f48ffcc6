"""First weights: drawn at random, or taken from a model that is there. Room: move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.tensor_access import Access, Source
from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.model.split import SplitModel
from penstock.optim import formats
from penstock.optim.rules import draw_key
from penstock.roles import Role

Types = Callable[[TensorSpec], torch.dtype]
"""What a source gives of a tensor, before it gives it."""


def set_master(
    access: Access, block: int, inventory: Inventory, source: Source, types: Types,
    *, crew: BoundedExecutor | None = None,
) -> None:  # fmt: skip
    """Weights and the rest of their masters, from elements in fp32 or in the weight's own type. A
    crew calls `source` from its threads, and is through when it has settled."""
    dtype = access.weight_dtype

    def weight(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        values = source(tensor, low, high)
        if values.dtype == dtype:
            return values
        if dtype == torch.bfloat16:
            return formats.split(values.float())[0]
        return values.to(dtype)

    def rest(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        if dtype == torch.bfloat16 == types(tensor):  # all of it is in the weight
            return torch.zeros(high - low, dtype=torch.int16)
        values = source(tensor, low, high)
        return formats.split(values.float())[1] if dtype == torch.bfloat16 else values.float()

    access.fill(block, Role.WEIGHT, weight, crew=crew)
    if inventory.blocks[block].parameters(True):
        came_as = {types(tensor) for tensor in inventory.blocks[block].tensors}
        if dtype == torch.bfloat16 and came_as == {dtype}:
            access.clear(block, Role.MASTER)
        else:
            access.fill(block, Role.MASTER, rest, crew=crew)
        clear_moments(access, block)


def clear_moments(access: Access, block: int) -> None:
    for role in (Role.FIRST, Role.SECOND):
        access.clear(block, role)


def take_weights(access: Access, inventory: Inventory, state: Mapping[str, torch.Tensor]) -> None:
    """From tensors by name."""
    for index in range(len(inventory.blocks)):
        set_master(access, index, inventory, *_from(state))


def _from(tensors: Mapping[str, torch.Tensor]) -> tuple[Source, Types]:
    return (
        lambda tensor, low, high: tensors[tensor.name].reshape(-1)[low:high],
        lambda tensor: tensors[tensor.name].dtype,
    )


def draw_weights(access: Access, inventory: Inventory, body: SplitModel, seed: int) -> None:
    """As the model's own class initialises itself, a block at a time in fp32; what is drawn depends
    on the seed and the block, and on no plan."""
    for index, block in enumerate(inventory.blocks):
        drawn = _drawn(body, block, draw_key(seed, 0, index) & ((1 << 63) - 1))
        set_master(access, index, inventory, *_from(drawn))


def _drawn(body: SplitModel, block: Block, seed: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for tensor in block.tensors:
            if tensor.name not in found:
                found |= _init_module(body, *body.module_of(tensor.name))
    return found


def _init_module(
    body: SplitModel, module: nn.Module, names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """One leaf module's tensors, on a copy that has memory for them."""
    bare = copy.copy(module)
    bare._parameters = dict.fromkeys(module._parameters)
    for leaf, name in names.items():
        empty = torch.full(body.shape_of(name), float("nan"))
        bare._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
    init: Any = body.model._init_weights
    init(bare)
    found = {}
    for leaf, name in names.items():
        value = bare._parameters[leaf]
        assert value is not None
        if bool(value.isnan().any()):
            raise UnsupportedModelError(
                f"{type(module).__name__} says nothing about how {name} begins; "
                f"start from a checkpoint instead of --init random"
            )
        found[name] = value.detach()
    return found
