"""A view of weights, master weights and moments as ordinary host tensors, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from penstock.engine.tensor_access import TensorAccess
from penstock.model.inventory import Inventory, TensorSpec
from penstock.optim import formats
from penstock.roles import Moments, Role


class StateView(Mapping[str, dict[str, torch.Tensor]]):
    """A mapping from tensor names to host copies of their state.

    Each value has `weight` in the type it computes with, and for trained tensors `master`,
    `exp_avg` and `exp_avg_sq` in fp32, however they are stored. Every access finishes pending
    sweeps first and makes new copies.
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
        tensors = {
            "weight": weight,
            "master": self._master(name, weight),
            "exp_avg": self._moment(name, Role.FIRST),
            "exp_avg_sq": self._moment(name, Role.SECOND),
        }
        return {key: value.view(shape) for key, value in tensors.items()}

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
        """Set both moments of every trained tensor from `exp_avg` and `exp_avg_sq` by name."""
        self._finish()
        for index, block in enumerate(self._inventory.blocks):
            if block.parameters(True):
                for role, key in ((Role.FIRST, "exp_avg"), (Role.SECOND, "exp_avg_sq")):
                    encoder = _MomentEncoder(states, key, self._access.formats.moments)
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
        self, states: Mapping[str, Mapping[str, torch.Tensor]], key: str, moments: Moments
    ) -> None:
        self._states, self._key, self._moments = states, key, moments

    def values(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        encoded = self._encode(tensor, low, high)
        return encoded["m_code"] if self._moments == "int8" else encoded["m"]

    def bases(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        return self._encode(tensor, low, high)["m_base"]

    def _encode(self, tensor: TensorSpec, low: int, high: int) -> dict[str, torch.Tensor]:
        flat = self._states[tensor.name][self._key].detach().cpu().reshape(-1)[low:high].float()
        second = self._key == "exp_avg_sq"
        return formats.write_moment(flat, "m", self._moments, second=second)
