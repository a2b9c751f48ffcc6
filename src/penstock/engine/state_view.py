"""A view of weights, master weights and moments as ordinary host tensors, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from penstock.engine.tensor_access import TensorAccess
from penstock.model.inventory import Inventory, TensorSpec, is_muon_matrix
from penstock.optim import formats
from penstock.roles import Moments, OptimizerName, Role

StateKey = tuple[Role, str, tuple[int, ...]]
"""A part of a role of a tensor, its name in the state dict of torch's optimizer, and its shape."""

STATE_KEYS: Mapping[OptimizerName, tuple[tuple[Role, str], ...]] = {
    "adamw": ((Role.FIRST, "exp_avg"), (Role.SECOND, "exp_avg_sq")),
    "lion": ((Role.FIRST, "exp_avg"),),
    "sgd": ((Role.FIRST, "momentum_buffer"),),
}
"""The moments of each optimizer, and their names in the state dicts of torch's optimizers. Muon has
those of SGD for matrices, and those of AdamW for everything else."""


class StateView(Mapping[str, dict[str, torch.Tensor]]):
    """A mapping from tensor names to host copies of their state.

    Each value has `weight` in the type it computes with, and for trained tensors `master` and the
    optimizer's moments in fp32, however they are stored. Moments have the names of torch's
    optimizers, such as `exp_avg` and `exp_avg_sq`. Every access finishes pending sweeps first and
    makes new copies.
    """

    def __init__(
        self, access: TensorAccess, inventory: Inventory, finish: Callable[[], None]
    ) -> None:
        self._access, self._inventory, self._finish = access, inventory, finish
        tensors = (t for block in inventory.blocks for t in block.tensors)
        self._names = {t.name: t.trainable for t in tensors}

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        trained = self._names[name]
        self._finish()
        shape = self.shape(name)
        weight = self._whole(name, Role.WEIGHT)
        if not trained:
            return {"weight": weight.view(shape)}
        tensors = {"weight": weight, "master": self._master(name, weight)}
        found = {key: value.view(shape) for key, value in tensors.items()}
        return found | self.moments(name)

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return the moments of a trained tensor, under the names of torch's optimizers."""
        self._finish()
        block, tensor = self._access.tensor(name)
        found: dict[str, torch.Tensor] = {}
        stored: dict[Role, torch.Tensor] = {}
        for role, key, shape in self._keys(block, tensor):
            values = stored[role] if role in stored else self._moment(name, role)
            elements = math.prod(shape)
            found[key], stored[role] = values[:elements].view(shape), values[elements:]
        return found

    def _keys(self, block: int, tensor: TensorSpec) -> list[StateKey]:
        """Return the moments of a tensor: role, name in torch's optimizer, and shape."""
        formats = self._access.formats
        spec = self._inventory.blocks[block]
        if formats.optimizer == "adafactor":
            return _adafactor_keys(tensor.shape)
        name = formats.optimizer
        if name == "muon":
            name = "sgd" if is_muon_matrix(spec, tensor) else "adamw"
        keys = STATE_KEYS[name]
        return [(role, key, tensor.shape) for role, key in keys if formats.has(role)]

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of one tensor, from its fp32 master if `dtype` is not the compute type."""
        self._finish()
        weight = self._whole(name, Role.WEIGHT)
        if self._names[name] and dtype != weight.dtype:
            weight = self._master(name, weight)
        return weight.view(self.shape(name)).to(dtype)

    def _master(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        split = self._access.formats.has(Role.MASTER)
        return formats.read_master(weight, self._whole(name, Role.MASTER) if split else None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._access.tensor(name)[1].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def write_moments(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set the moments of every trained tensor, from those of torch's optimizer by name."""
        self._finish()
        for index, block in enumerate(self._inventory.blocks):
            if block.parameters(True):
                keys = partial(self._keys, index)
                for role in filter(self._access.formats.has, (Role.FIRST, Role.SECOND)):
                    encoder = _MomentEncoder(states, role, keys, self._access.formats.moments)
                    bases = encoder.bases if self._access.has_bases else None
                    self._access.fill(index, role, encoder.values, bases=bases)

    def _moment(self, name: str, role: Role) -> torch.Tensor:
        values = self._whole(name, role)
        if not self._access.has_bases:
            return values.float()
        bases = self._whole(name, role, bases=True)
        decode = formats.decode_second if role is Role.SECOND else formats.decode_first
        return decode(values, bases)

    def _whole(self, name: str, role: Role, *, bases: bool = False) -> torch.Tensor:
        return torch.cat([p.clone() for p in self._access.parts(name, role, bases=bases)])


class _MomentEncoder:
    """Encodes a moment in its storage format, one range of elements at a time."""

    def __init__(
        self,
        states: Mapping[str, Mapping[str, torch.Tensor]],
        role: Role,
        keys: Callable[[TensorSpec], list[StateKey]],
        moments: Moments,
    ) -> None:
        self._states, self._role, self._keys, self._moments = states, role, keys, moments

    def values(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        encoded = self._encode(tensor, low, high)
        return encoded["m_code"] if self._moments == "int8" else encoded["m"]

    def bases(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        return self._encode(tensor, low, high)["m_base"]

    def _encode(self, tensor: TensorSpec, low: int, high: int) -> dict[str, torch.Tensor]:
        state = self._states[tensor.name]
        parts = [state[key] for role, key, _ in self._keys(tensor) if role is self._role]
        whole = [part.detach().cpu().reshape(-1) for part in parts]
        flat = (whole[0] if len(whole) == 1 else torch.cat(whole))[low:high].float()
        second = self._role is Role.SECOND
        return formats.write_moment(flat, "m", self._moments, second=second)


def _adafactor_keys(shape: tuple[int, ...]) -> list[StateKey]:
    """Return Adafactor's second moments: all of rows first, then those of columns."""
    if len(shape) < 2:
        return [(Role.SECOND, "variance", shape)]
    return [
        (Role.SECOND, "row_var", (*shape[:-1], 1)),
        (Role.SECOND, "col_var", (*shape[:-2], 1, shape[-1])),
    ]
