"""What is taken for the whole run, and what one step carries through. Room: move."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from penstock.engine.device import Device, Mark
from penstock.engine.disk_pipe import DiskPipe
from penstock.engine.gradients import Gradients
from penstock.engine.hidden_states import Hidden
from penstock.engine.marks import Marks
from penstock.engine.pending_update import Pending
from penstock.engine.program import Buffers, Program, compile_program
from penstock.engine.tier_memory import StoreSettings, TierMemory
from penstock.engine.weight_slots import WeightSlots
from penstock.errors import PlanError
from penstock.memory.arena import Arena
from penstock.memory.heap import return_freed_memory
from penstock.memory.placement import Node, Place
from penstock.model.inventory import Inventory
from penstock.model.split import MicroBatch
from penstock.optim.threads import Pool
from penstock.plan.buffers import pipe_lanes, pipe_nbytes
from penstock.plan.build_schedule import evaluation_schedule, step_schedule, sweep_schedule
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.schedule import Schedule
from penstock.roles import EXTENT
from penstock.storage.store import Store
from penstock.tiers import Tier
from penstock.units import format_bytes

Part = int | tuple[int, int]
"""An operation of a program, by its place in it; or a micro-batch of one."""


@dataclass(slots=True)
class EngineMemory:
    """Everything taken before the first step."""

    device: Device
    homes: TierMemory
    hidden: Hidden
    weights: WeightSlots
    gradients: Gradients
    gradient_pool: torch.Tensor
    """Device memory for sums, and for gradients on their way out."""
    staging: torch.Tensor
    """Host memory for pieces from disk."""
    pipes: dict[str, DiskPipe]
    pool: Pool
    """The CPU sweep's threads."""

    @contextlib.contextmanager
    def lending(self) -> Iterator[int]:
        """Inside, others may have the memory of gradient buffers: so many bytes. Between runs, when
        nothing is in them."""
        nbytes = self.gradient_pool.numel()
        self.gradient_pool = self.gradient_pool.new_empty(0)
        self.device.returned(nbytes)
        try:
            yield nbytes
        finally:
            self.gradient_pool = self.device.empty(nbytes, "gradient buffers")

    def release(self) -> None:
        """Give everything back; the store leaves its disks."""
        self.homes.close()
        self.weights.release()
        self.hidden.release()
        self.gradients.start_step()
        self.gradient_pool = self.staging = torch.empty(0, dtype=torch.uint8)
        self.pipes.clear()
        self.device.limit(None)

    @property
    def store(self) -> Store:
        assert self.homes.store is not None
        return self.homes.store


@dataclass(slots=True)
class StepState:
    """One program being carried out. `slots` and `leaving` are written by the thread that computes
    before it puts the mark that others wait for."""

    program: Program
    rounds: Sequence[Sequence[MicroBatch]]
    pending: Pending | None
    step: int
    """Of the run so far: what dropout depends on."""
    items: int = 1
    """Trained tokens of the whole step."""
    scale: float = 1.0
    """On the loss, for fp16."""
    fresh: bool = True
    """Whether gradients start from zero."""
    marks: Marks = field(default_factory=Marks)
    origin: Mark | None = None
    """When it began, with nothing under way."""
    began: dict[Part, Mark] = field(default_factory=dict)
    """When all that it needs was there: of an operation, or of each of its micro-batches where they
    move one by one, with waits in between."""
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By round, block and micro-batch: where in the ring its input is."""
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)
    """By block: the bytes of its gradient on the device."""
    turned: dict[int, Sequence[int]] = field(default_factory=dict)
    """By round: the slots through which inputs come back, once forward has no use for them."""
    loss: torch.Tensor | None = None
    """The sum over trained tokens."""
    swept: list[Mark] = field(default_factory=list)
    """Sweeps on the device, which may have refused an element."""
    swept_now: set[tuple[int, int | None]] = field(default_factory=set)
    """Blocks and pieces that the CPU swept in this run."""
    used: Counter[int] = field(default_factory=Counter)
    """By round: inputs that came back and were used."""
    came_back: dict[int, list[Hashable]] = field(default_factory=dict)
    """By round: who used the inputs that came back, in order."""

    def shapes(self, round: int) -> list[tuple[int, int]]:
        return [micro.shape for micro in self.rounds[round]]

    def input_slot(self, round: int) -> int:
        """The slot of the next input to be used; they are used in the order they come back."""
        number = self.used[round]
        self.used[round] += 1
        return self.turned[round][number % len(self.turned[round])]

    def next_input(self, round: int, user: Hashable) -> tuple[int, Hashable | None]:
        """The slot for the next input to come back, and who must be done with it before."""
        slots, users = self.turned[round], self.came_back.setdefault(round, [])
        number = len(users)
        users.append(user)
        freed = users[number - len(slots)] if number >= len(slots) else None
        return slots[number % len(slots)], freed


# --------
# Takes everything a plan says, once, and checks that it is what the plan says. Room: move.

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


def allocate(
    plan: Plan, inventory: Inventory, programs: Programs, device: Device,
    store: StoreSettings, pool: Pool,
) -> EngineMemory:  # fmt: skip
    """All memory and disk space of the run. Nothing is left behind if some of it cannot be had."""
    if plan.placement.rounds > 1 and not inventory.may_have_rounds:
        raise PlanError("placement.rounds", "must be 1 for a model with tied embeddings")
    _check_pools(plan, programs)
    device.limit(plan.allocator_nbytes)
    return_freed_memory()
    homes = TierMemory(plan, inventory, device, store)
    try:
        gradients = Gradients(inventory, homes.formats, device)
        weights = device.empty(programs.nbytes("weights"), "weight slots")
        staging, pipes = _take_staging(plan, inventory, programs, homes)
        return EngineMemory(
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
    plan: Plan, inventory: Inventory, programs: Programs, homes: TierMemory
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
