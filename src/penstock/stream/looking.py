"""What rests, as tensors that a person or a torch program can read. Room: move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from penstock.optim import formats
from penstock.roles import Role
from penstock.stream.access import Access


class StateView(Mapping[str, dict[str, torch.Tensor]]):
    """By tensor name: `weight` as it computes, and for trained ones `master`, `exp_avg` and
    `exp_avg_sq` in fp32, whatever they are stored as. Each look makes copies on the host and
    finishes pending sweeps first."""

    def __init__(
        self, access: Access, names: Mapping[str, bool], finish: Callable[[], None]
    ) -> None:
        self._access, self._names, self._finish = access, dict(names), finish

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        trained = self._names[name]
        self._finish()
        shape = self._access.tensor(name)[1].shape
        weight = self._whole(name, Role.WEIGHT)
        if not trained:
            return {"weight": weight.view(shape)}
        rest = self._whole(name, Role.MASTER)
        found = {
            "weight": weight,
            "master": formats.read_master(weight, rest),
            "exp_avg": self._moment(name, Role.FIRST),
            "exp_avg_sq": self._moment(name, Role.SECOND),
        }
        return {key: value.view(shape) for key, value in found.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _moment(self, name: str, role: Role) -> torch.Tensor:
        values = self._whole(name, role)
        if not self._access.has_bases:
            return values.float()
        bases = self._whole(name, role, bases=True)
        decode = formats.decode_second if role is Role.SECOND else formats.decode_first
        return decode(values, bases)

    def _whole(self, name: str, role: Role, *, bases: bool = False) -> torch.Tensor:
        return torch.cat([p.clone() for p in self._access.parts(name, role, bases=bases)])
