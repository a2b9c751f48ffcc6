"""Run the updates of whole tensors on the device (`penstock.optim.tensor_rules`).

The sweep lane issues them, on a stream of its own on a GPU, so that they overlap with the
computation of other blocks. The state of a tensor may be in device memory, in host memory or in
NVMe staging; the device always computes the update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.engine.device import Device
from penstock.engine.pending_update import PendingUpdate
from penstock.engine.spans import Span
from penstock.errors import NonFiniteMasterError
from penstock.model.inventory import Inventory
from penstock.optim.tensor_rules import NONE_REFUSED, TensorState, Workspace, update_tensor
from penstock.plan.update_workspace import UpdateWorkspace
from penstock.roles import Role


class TensorUpdates:
    """Updates whole tensors, one after another, with one workspace."""

    def __init__(self, inventory: Inventory, device: Device, sizes: UpdateWorkspace) -> None:
        self._inventory = inventory
        memory = device.empty(sizes.nbytes, "the optimizer workspace")
        self._workspace = Workspace(memory, sizes.chunk, sizes.matrix, sizes.gram)

    def issue(
        self, block: int, pending: PendingUpdate, roles: Mapping[Role, Span], start: int, stop: int
    ) -> RefusedElements:
        """Issue the updates of all tensors that begin in elements `start` to `stop` of a block."""
        spec = self._inventory.blocks[block]
        refused: dict[str, torch.Tensor] = {}
        for name, offset in spec.offsets(True).items():
            if start <= offset < stop and name in pending.whole and name not in pending.updated:
                state = self._state(block, name, pending, roles)
                with torch.no_grad():
                    refused[name] = update_tensor(state, pending.whole[name], self._workspace)
                pending.updated.add(name)
        return RefusedElements(refused)

    def _state(
        self, block: int, name: str, pending: PendingUpdate, roles: Mapping[Role, Span]
    ) -> TensorState:
        spec = self._inventory.blocks[block]
        tensor = next(t for t in spec.tensors if t.name == name)

        def values(role: Role) -> torch.Tensor | None:
            elements = spec.state_elements(role, tensor)
            if role not in roles or not elements:
                return None
            offset = spec.state_offset(role, tensor)
            return roles[role].values(offset, offset + elements)

        grad, weight = values(Role.GRADIENT), values(Role.WEIGHT)
        assert grad is not None
        assert weight is not None
        return TensorState(
            name=name,
            shape=tensor.shape,
            grad=grad,
            weight=weight,
            rest=values(Role.MASTER),
            first=values(Role.FIRST),
            second=values(Role.SECOND),
            key=pending.keys[name],
        )


class RefusedElements:
    """A ticket that raises NonFiniteMasterError if an update refused an element."""

    def __init__(self, refused: Mapping[str, torch.Tensor]) -> None:
        self._refused = dict(refused)

    def done(self) -> bool:
        return not self._refused

    def wait(self) -> None:
        """Block until the updates have finished; raise NonFiniteMasterError for the first one."""
        found = {name: int(first) for name, first in self._refused.items()}
        self._refused.clear()
        for name, first in found.items():
            if first != NONE_REFUSED:
                raise NonFiniteMasterError(name, first)

    def settle(self) -> None:
        """Do nothing: the ticket of the lane tells when the updates have finished."""
