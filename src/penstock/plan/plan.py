"""The plan: what rests where. Room: decide.

One frozen value, JSON on disk. It allocates nothing and measures nothing; it is all that the
planner hands the engine, and the engine obtains bytes only from it. Nothing in it can change a bit
of the result: what can is in the workload it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from penstock import records
from penstock.errors import PlanError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.activation_overlay import OverlaidActivation, overlaid_activations
from penstock.plan.budget import Budget
from penstock.plan.buffers import CONTEXT, Pool
from penstock.plan.placement import Placement, Share
from penstock.plan.workload import Workload
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What rests where, for one model, one workload and one set of budgets."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """The version of the file's form."""

    model: str
    """What the user called the model."""

    fingerprint: str
    """Of the model's blocks and tensors: a plan is good for no other."""

    parameters: int
    """Of the model, tied and shared ones once."""

    machine: str = ""
    """The machine it was made for."""

    workload: Workload
    """What is to be done."""

    budget: Budget
    """What each tier may give."""

    placement: Placement
    """Where everything rests, and how it streams."""

    pools: tuple[Pool, ...] = ()
    """What is taken beside what rests."""

    note: str = ""
    """What the user should know, such as that training refuses the model for now."""

    _shares: tuple[tuple[Role, Share], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise PlanError("version", f"must be {self.FORMAT}, got {self.version}")
        lent = self.overlaid_activations()
        shares = tuple(
            (home.role, share)
            for index, block in enumerate(self.placement.blocks)
            for home in block.homes
            for share in home.shares
            if home.role is not Role.INPUT or index not in lent
        )
        object.__setattr__(self, "_shares", shares)
        for tier in Tier:
            if self.peak(tier) > self.budget.of(tier):
                raise PlanError(
                    f"budget.{tier}",
                    f"is {format_bytes(self.budget.of(tier))}, but the plan takes "
                    f"{format_bytes(self.peak(tier))}",
                )

    # Bytes.

    def overlaid_activations(self) -> dict[int, OverlaidActivation]:
        """By block, the inputs that rest where gradients leave room, and so take none."""
        accumulate, placement = self.workload.accumulate, self.placement
        return overlaid_activations(
            placement.blocks, rounds=placement.rounds, accumulate=accumulate
        )

    def at_rest(self, tier: Tier) -> int:
        """Weights, states and gradients between two steps."""
        return sum(s.nbytes for r, s in self._shares if s.tier is tier and r is not Role.INPUT)

    def inputs(self, tier: Tier) -> int:
        """Block inputs, from forward to backward, but for those that are lent a place."""
        return sum(s.nbytes for role, s in self._shares if s.tier is tier and role is Role.INPUT)

    def pooled(self, tier: Tier) -> int:
        return sum(pool.nbytes for pool in self.pools if pool.tier is tier)

    def peak(self, tier: Tier) -> int:
        """The most it ever takes: the sum of its parts."""
        return self.at_rest(tier) + self.inputs(tier) + self.pooled(tier)

    def parts(self, tier: Tier) -> Iterator[tuple[str, int]]:
        """What the peak is made of, by name."""
        by_role: Counter[Role] = Counter()
        for role, share in self._shares:
            if share.tier is tier:
                by_role[role] += share.nbytes
        yield from ((role.value, by_role[role]) for role in Role if by_role[role])
        yield from ((pool.what, pool.nbytes) for pool in self.pools if pool.tier is tier)

    @property
    def allocator_nbytes(self) -> int:
        """Of HBM's budget, what torch's allocator may take: the driver's context is not its."""
        context = sum(pool.nbytes for pool in self.pools if pool.what == CONTEXT)
        return self.budget.of(Tier.HBM) - context

    @property
    def bytes_per_parameter(self) -> float:
        """At rest in all tiers together: 14 in exact mode."""
        return sum(self.at_rest(tier) for tier in Tier) / self.parameters

    # Whether it can be.

    def check_model(self, inventory: Inventory) -> None:
        """Raise PlanError if it is a plan for another model."""
        if self.fingerprint != inventory.fingerprint:
            raise PlanError(
                "fingerprint",
                f"is {self.fingerprint} ({self.model}), but {inventory.model} has "
                f"{inventory.fingerprint}; make a plan for it with `penstock plan`",
            )

    def check(self, machine: Machine) -> None:
        """Raise PlanError unless the machine has what the plan takes."""
        gpus = [gpu.memory for gpu in machine.gpus if gpu.memory is not None]
        if machine.gpus and gpus:
            _check_room("hbm", "the GPU", self.peak(Tier.HBM), max(gpus))
        by_node: Counter[int] = Counter()
        by_path: Counter[str] = Counter()
        for _, share in self._shares:
            if share.node is not None:
                by_node[share.node] += share.nbytes
            elif share.path:
                by_path[share.path] += share.nbytes
        # Buffers of the host go to the first node, where the GPU's driver finds them soonest.
        by_node[machine.dram_nodes[0].id] += self.pooled(Tier.DRAM)
        if not machine.gpus:  # the CPU computes, and what is called HBM is memory of that node
            by_node[machine.dram_nodes[0].id] += self.peak(Tier.HBM)
        capacities = {node.id: node.capacity for node in machine.nodes}
        for node, wanted in sorted(by_node.items()):
            _check_room(f"node {node}", f"node {node}", wanted, capacities.get(node, 0))
        rooms = {s.path: s.free if s.free is not None else s.capacity for s in machine.storage}
        for path, wanted in sorted(by_path.items()):
            if path not in rooms:
                listed = ", ".join(rooms) or "none"
                raise PlanError("nvme", f"{path} is not on this machine; it has {listed}")
            room = rooms[path]
            if room is not None:
                _check_room("nvme", path, wanted, room)

    # Files.

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. PlanError names the field that is wrong."""
        return records.load(cls, path, error=PlanError)

    def save(self, path: str | Path) -> None:
        """Write it whole, or leave what was there."""
        records.save(self, path)


def _check_room(field_name: str, place: str, wanted: int, room: int) -> None:
    if wanted > room:
        raise PlanError(
            field_name,
            f"is to hold {format_bytes(wanted)} ({wanted} B), but {place} has "
            f"{format_bytes(room)}; plan again with a smaller budget",
        )
