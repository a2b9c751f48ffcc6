"""Takes everything a plan says, once, and checks that it is what the plan says. Room: move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.errors import PlanError
from penstock.inventory import Inventory
from penstock.memory.arena import Arena
from penstock.memory.heap import hold_heap
from penstock.memory.placement import Node, Place
from penstock.optim.threads import Pool
from penstock.placement_parts import Placement
from penstock.plan import Plan
from penstock.pools import pipe_lanes, pipe_nbytes
from penstock.roles import EXTENT
from penstock.schedule import Schedule
from penstock.step_order import evaluation_schedule, step_schedule, sweep_schedule
from penstock.stream.device import Device
from penstock.stream.disk import DiskPipe
from penstock.stream.gradients import Gradients
from penstock.stream.hidden import Hidden
from penstock.stream.homes import Homes, StoreSettings
from penstock.stream.program import Buffers, Program, compile_program
from penstock.stream.slots import WeightSlots
from penstock.stream.state import Taken
from penstock.tiers import Tier
from penstock.units import format_bytes

MakeSchedule = Callable[[Inventory, Placement], Schedule]


@dataclass(frozen=True, slots=True)
class Programs:
    """What the engine can do, ready to run."""

    step: Program
    """Forward and backward, with the sweeps of the step before."""
    first: Program
    """The same with nothing to sweep."""
    sweep: Program
    """Pending sweeps alone."""
    evaluate: Program
    """Forward and the loss."""
    again: Program
    """Forward and backward, adding to the gradients of an earlier call."""

    @classmethod
    def of(cls, plan: Plan, inventory: Inventory) -> Programs:
        def compiled(make: MakeSchedule, placement: Placement) -> Program:
            return compile_program(inventory, placement, formats, make(inventory, placement))

        placement = plan.placement
        formats = plan.workload.formats(placement.rounds)
        step = compiled(step_schedule, placement)
        first = partial(step_schedule, pending=False)
        again = partial(step_schedule, pending=False, adds=plan.workload.accumulate)
        others = (
            _within(step.staging.nbytes, placement, partial(compiled, make))
            for make in (first, sweep_schedule, evaluation_schedule, again)
        )
        return cls(step, *others)

    def nbytes(self, pool: str) -> int:
        """The most that any of them needs of a pool."""
        every = (self.step, self.first, self.sweep, self.evaluate, self.again)
        buffers: list[Buffers] = [getattr(program, pool) for program in every]
        return max(held.nbytes for held in buffers)


def _within(nbytes: int, placement: Placement, make: Callable[[Placement], Program]) -> Program:
    """The plan's staging is as large as a step needs. The others read less, but in another order,
    which may pack worse; then fewer of their pieces are in staging at once."""
    for staged in range(placement.pieces_staged, 0, -1):
        program = make(replace(placement, pieces_staged=staged))
        if program.staging.nbytes <= nbytes:
            break
    return program


def take(
    plan: Plan, inventory: Inventory, programs: Programs, device: Device,
    store: StoreSettings, pool: Pool,
) -> Taken:  # fmt: skip
    """All memory and disk space of the run. Nothing is left behind if some of it cannot be had."""
    if plan.placement.rounds > 1 and not inventory.may_have_rounds:
        raise PlanError("placement.rounds", "must be 1 for a model with tied embeddings")
    _check_pools(plan, programs)
    device.limit(plan.allocator_nbytes)
    hold_heap()
    homes = Homes(plan, inventory, device, store)
    try:
        gradients = Gradients(inventory, homes.formats, device)
        weights = device.empty(programs.nbytes("weights"), "weight slots")
        staging, pipes = _take_staging(plan, inventory, programs, homes)
        return Taken(
            device=device,
            homes=homes,
            hidden=Hidden(homes),
            weights=WeightSlots(inventory, homes.formats, weights),
            gradients=gradients,
            gradient_pool=device.empty(programs.nbytes("gradients"), "gradient buffers"),
            staging=staging,
            pipes=pipes,
            pool=pool,
        )
    except BaseException:
        homes.close()
        raise


def _take_staging(
    plan: Plan, inventory: Inventory, programs: Programs, homes: Homes
) -> tuple[torch.Tensor, dict[str, DiskPipe]]:
    """Host buffers between disks and the rest, on the node that the plan counts them on."""
    staging, lanes = programs.nbytes("staging"), pipe_lanes(plan.workload, plan.placement)
    pipe = pipe_nbytes(inventory, plan.workload, plan.placement)
    nbytes = staging + len(lanes) * pipe
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8), {}
    assert homes.store is not None
    arena = Arena(nbytes, _staging_place(plan), homes.device.pinned)
    homes.holding.took_arena(arena, {Tier.DRAM: nbytes})
    whole = torch.empty(0, dtype=torch.uint8)
    if staging:
        whole = arena.tensor(staging, torch.uint8, align=EXTENT, name="NVMe staging")
    pipes = {lane: DiskPipe(homes.store, homes.device, arena, pipe) for lane in lanes}
    homes.store.register(arena)
    return whole, pipes


def _staging_place(plan: Plan) -> Place | None:
    nodes = {
        share.node
        for block in plan.placement.blocks
        for home in block.homes
        for share in home.shares
        if share.tier is Tier.DRAM and share.node is not None
    }
    return Node(min(nodes)) if nodes else None


def _check_pools(plan: Plan, programs: Programs) -> None:
    """The plan counted these from the same schedules: they must agree to the byte."""
    planned: Mapping[str, int] = {pool.what: pool.nbytes for pool in plan.pools}
    for name, what in (
        ("weights", "weight slots"),
        ("gradients", "gradient buffers"),
        ("staging", "NVMe staging"),
    ):
        needed, held = programs.nbytes(name), planned.get(what, 0)
        if needed != held:
            raise PlanError(
                f"pools.{what}",
                f"has {format_bytes(held)} ({held} B), but the schedule needs {needed} B; the plan "
                f"was made by another version: plan again",
            )
