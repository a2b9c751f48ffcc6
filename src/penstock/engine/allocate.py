"""Allocate everything a plan lists, once, before the first step.

`allocate` builds the engine's memory: the tiers in which weights, optimizer states, gradients and
activations live (`TierMemory`), and the temporary buffers that the schedule shares between blocks
(weight slots, gradient buffers, NVMe staging). Nothing is allocated later, so a machine that lacks
memory or disk space fails here, and not in the middle of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.engine.attention_results import AttentionResults
from penstock.engine.dequantized_weights import DequantizedWeights
from penstock.engine.device import Device, DeviceSweep
from penstock.engine.disk_pipe import DiskPipe
from penstock.engine.gradients import GradientSums
from penstock.engine.held_blocks import HeldBlocks
from penstock.engine.hidden_states import HiddenStates
from penstock.engine.host_arenas import HostArenas
from penstock.engine.pending_update import Swept
from penstock.engine.program import Buffers, Program, compile_program
from penstock.engine.spans import WeightSlots
from penstock.engine.startup import HBM, HOST, StartUp
from penstock.engine.tensor_updates import TensorUpdates
from penstock.engine.tier_memory import StoreSettings, TierMemory
from penstock.engine.transport import Transport
from penstock.errors import PlanError
from penstock.memory.arena import Arena
from penstock.memory.heap import return_freed_memory
from penstock.memory.placement import Node
from penstock.model.inventory import Inventory
from penstock.optim.sweep import PreparedSweep
from penstock.optim.thread_pool import Pool
from penstock.plan.buffers import MAILBOXES, STATES, pipe_lanes, pipe_nbytes, states_nbytes
from penstock.plan.build_schedule import (
    backward_schedule,
    evaluation_schedule,
    fetch_held_schedule,
    forward_schedule,
    offload_held_schedule,
    step_schedule,
    sweep_schedule,
)
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.schedule import Schedule
from penstock.plan.update_workspace import UpdateWorkspace
from penstock.roles import EXTENT
from penstock.storage.store import Store
from penstock.tiers import Tier
from penstock.units import format_bytes

MakeSchedule = Callable[[Inventory, Placement], Schedule]


@dataclass(slots=True)
class EngineMemory:
    """All memory of an engine, allocated before the first step."""

    device: Device
    ranks: Transport
    """The connection to the other ranks."""
    tiers: TierMemory
    """Weights, optimizer states, gradients and activations where the plan places them."""
    hidden: HiddenStates
    attention: AttentionResults
    weights: WeightSlots
    held: HeldBlocks
    """Weights and gradient sums that a caller's own loss computes with."""
    gradients: GradientSums
    gradient_pool: torch.Tensor
    """Device memory for gradient sums, and for gradients that are being offloaded."""
    staging: torch.Tensor
    """Host memory for pieces of weights and optimizer states that live on NVMe."""
    states: torch.Tensor
    """Device memory for pieces of weights and optimizer states that live in host memory, while the
    device sweeps them."""
    pipes: dict[str, DiskPipe]
    """Per lane that copies between the device and NVMe, its pair of host buffers."""
    sweep_pool: Pool
    """Threads of the CPU sweep."""
    sweeps: dict[Swept, PreparedSweep]
    """Sweeps on the CPU of what stays where it is, by block and piece, from their first start."""
    device_sweeps: dict[Swept, DeviceSweep]
    """Sweeps of what stays in device memory, likewise."""
    state_sweeps: dict[tuple[int, int, int], DeviceSweep]
    """Sweeps of what passes through device memory, by block, piece, and offset of the buffer."""
    updates: TensorUpdates | None
    """Updates of whole tensors; None if the optimizer works element by element."""
    start_up: StartUp
    """How long each phase of the start took."""

    @contextlib.contextmanager
    def gradient_buffers_released(self) -> Iterator[int]:
        """Free the gradient buffers inside the `with` block; yields how many bytes that makes.

        Allowed between steps only, when the buffers hold nothing.
        """
        nbytes = self.gradient_pool.numel()
        self.gradient_pool = self.gradient_pool.new_empty(0)
        self.device.release(nbytes)
        try:
            yield nbytes
        finally:
            self.gradient_pool = self.device.empty(nbytes, "gradient buffers")

    def release(self) -> None:
        """Release all memory and close the store, which removes its files."""
        self.tiers.close()
        self.weights.release()
        self.held.release()
        self.hidden.release()
        self.attention.release()
        self.gradients.start_step()
        self.gradient_pool = self.staging = self.states = torch.empty(0, dtype=torch.uint8)
        self.updates = None
        self.sweeps.clear()
        self.device_sweeps.clear()
        self.state_sweeps.clear()
        self.pipes.clear()
        self.device.limit_memory(None)

    @property
    def store(self) -> Store:
        assert self.tiers.store is not None
        return self.tiers.store


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of an engine by name, compiled once from the plan's placement.

    If the engine computes the loss:

    - `step`: forward and backward, with the sweeps of the previous step
    - `first`: forward and backward with nothing to sweep
    - `accumulate`: forward and backward, adding to the gradients of an earlier call
    - `evaluate`: forward and the loss

    If the caller computes it (`Workload.caller_loss`):

    - `forward`: forward through the layers, with the sweeps of the previous step
    - `forward again`: the same with nothing to sweep
    - `infer`, `infer again`: the same two without keeping activations
    - `backward`, `backward adding`: backward through the layers, to new or to earlier gradients
    - `offload held`: store the gradient sums of held blocks
    - `sweep held`, `fetch held`: update held blocks and fetch their weights, or only fetch

    In both cases, `sweep`: the pending sweeps alone.
    """

    by_name: Mapping[str, Program]

    @classmethod
    def of(cls, plan: Plan, inventory: Inventory) -> Programs:
        placement = plan.placement
        formats = plan.workload.formats(placement.rounds)
        makers = _caller_loss_makers() if plan.workload.caller_loss else _step_makers(plan)

        def compiled(make: MakeSchedule, placement: Placement) -> Program:
            return compile_program(inventory, placement, formats, make(inventory, placement))

        # These read the most from NVMe, and decide the size of the staging memory.
        largest = {"step", "forward", "sweep held"} & makers.keys()
        programs = {name: compiled(makers[name], placement) for name in largest}
        staging = max(program.staging.nbytes for program in programs.values())
        for name in makers.keys() - largest:
            programs[name] = _fit_staging(staging, placement, partial(compiled, makers[name]))
        return cls(programs)

    def __getitem__(self, name: str) -> Program:
        return self.by_name[name]

    @property
    def held(self) -> frozenset[int]:
        """The blocks whose weights a caller's own loss computes with."""
        return frozenset[int]().union(*(program.held for program in self.by_name.values()))

    def nbytes(self, pool: str) -> int:
        """Return the most bytes that any of the programs needs of a pool of buffers."""
        buffers: list[Buffers] = [getattr(program, pool) for program in self.by_name.values()]
        return max(each.nbytes for each in buffers)


def _step_makers(plan: Plan) -> dict[str, MakeSchedule]:
    adds = plan.workload.accumulate
    return {
        "step": step_schedule,
        "first": partial(step_schedule, pending=False),
        "sweep": sweep_schedule,
        "evaluate": evaluation_schedule,
        "accumulate": partial(step_schedule, pending=False, adds=adds),
    }


def _caller_loss_makers() -> dict[str, MakeSchedule]:
    return {
        "forward": forward_schedule,
        "forward again": partial(forward_schedule, pending=False),
        "infer": partial(forward_schedule, keeps=False),
        "infer again": partial(forward_schedule, pending=False, keeps=False),
        "backward": partial(backward_schedule, adds=False),
        "backward adding": partial(backward_schedule, adds=True),
        "offload held": offload_held_schedule,
        "sweep held": partial(fetch_held_schedule, pending=True),
        "fetch held": partial(fetch_held_schedule, pending=False),
        "sweep": sweep_schedule,
    }


def _fit_staging(
    nbytes: int, placement: Placement, make: Callable[[Placement], Program]
) -> Program:
    """Compile a program whose staging fits in `nbytes`, the staging that a training step needs.

    The other programs read less than a step, but in another order, which may pack worse. They then
    keep fewer pieces in staging at the same time.
    """
    for staged in range(placement.pieces_staged, 0, -1):
        program = make(replace(placement, pieces_staged=staged))
        if program.staging.nbytes <= nbytes:
            break
    return program


def allocate(
    plan: Plan, inventory: Inventory, programs: Programs, device: Device,
    store: StoreSettings, sweep_pool: Pool, ranks: Transport, *, start_up: StartUp,
    host: HostArenas | None = None,
) -> EngineMemory:  # fmt: skip
    """Allocate all memory and disk space of the run, or raise and leave nothing behind.

    Arenas of `host` are not pinned yet when this returns.
    """
    if plan.placement.rounds > 1 and not inventory.may_have_rounds:
        raise PlanError("placement.rounds", "must be 1 for a model with tied embeddings")
    if plan.placement.rounds > 1 and plan.workload.caller_loss is not None:
        raise PlanError("placement.rounds", "must be 1 if the caller computes the loss")
    _check_pool_sizes(plan, programs)
    # Before anything is allocated: torch then fails instead of exceeding the plan's HBM, and the C
    # library gives large freed blocks back instead of letting the heap outgrow the plan's DRAM.
    device.limit_memory(device.reserved_before + plan.allocator_nbytes)
    return_freed_memory()
    tiers: TierMemory | None = None
    try:
        _open_transport(plan, device, ranks)
        tiers = TierMemory(plan, inventory, device, store, ranks, start_up=start_up, host=host)
        gradients = GradientSums(inventory, tiers.formats, device)
        with start_up.phase(HBM):
            weights = device.empty(programs.nbytes("weights"), "weight slots")
        compiled = plan.workload.numerics.compiled
        dequantized = DequantizedWeights(inventory, tiers.formats, device, compiled=compiled)
        with start_up.phase(HOST):
            staging, pipes = _allocate_staging(plan, inventory, programs, tiers)
        workspace = UpdateWorkspace.of(inventory, plan.workload)
        with start_up.phase(HBM):
            return EngineMemory(
                device=device,
                ranks=ranks,
                tiers=tiers,
                hidden=HiddenStates(tiers),
                attention=AttentionResults(tiers),
                weights=WeightSlots(
                    inventory,
                    tiers.formats,
                    weights,
                    dequantized,
                    [i for i in range(len(inventory.blocks)) if tiers.is_split(i)],
                ),
                held=HeldBlocks(tiers, programs.held),
                gradients=gradients,
                gradient_pool=device.empty(programs.nbytes("gradients"), "gradient buffers"),
                staging=staging,
                states=device.empty(programs.nbytes("states"), STATES),
                pipes=pipes,
                sweep_pool=sweep_pool,
                sweeps={},
                device_sweeps={},
                state_sweeps={},
                updates=None if workspace is None else TensorUpdates(inventory, device, workspace),
                start_up=start_up,
            )
    except BaseException:
        if tiers is not None:
            tiers.close()
        device.limit_memory(None)
        raise


def _open_transport(plan: Plan, device: Device, ranks: Transport) -> None:
    """Connect the ranks in the way that the plan has chosen."""
    node = plan.placement.host_node
    mailboxes = sum(pool.nbytes for pool in plan.pools if pool.what == MAILBOXES)
    ranks.open(device, plan.placement.transport, mailboxes, None if node is None else Node(node))


def _allocate_staging(
    plan: Plan, inventory: Inventory, programs: Programs, tiers: TierMemory
) -> tuple[torch.Tensor, dict[str, DiskPipe]]:
    """Allocate the host buffers between the disks and the rest: staging and disk pipes."""
    staging, lanes = programs.nbytes("staging"), pipe_lanes(plan.workload, plan.placement)
    pipe = pipe_nbytes(inventory, plan.workload, plan.placement)
    nbytes = staging + len(lanes) * pipe
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8), {}
    assert tiers.store is not None
    node = plan.placement.host_node
    arena = Arena(nbytes, None if node is None else Node(node), tiers.device.pinned)
    tiers.usage.add_arena(arena, {Tier.DRAM: nbytes})
    whole = torch.empty(0, dtype=torch.uint8)
    if staging:
        whole = arena.tensor(staging, torch.uint8, align=EXTENT, name="NVMe staging")
    pipes = {lane: DiskPipe(tiers.store, tiers.device, arena, pipe) for lane in lanes}
    tiers.store.register(arena)
    return whole, pipes


def _check_pool_sizes(plan: Plan, programs: Programs) -> None:
    """Raise PlanError unless the plan's buffer sizes equal those of the programs, to the byte.

    Both are derived from the same schedules, so a difference means that another version of Penstock
    made the plan.
    """
    planned: Mapping[str, int] = {pool.what: pool.nbytes for pool in plan.pools}
    states = states_nbytes(programs.nbytes("states"), on_gpu=plan.context_nbytes > 0)
    for needed, what in (
        (programs.nbytes("weights"), "weight slots"),
        (programs.nbytes("gradients"), "gradient buffers"),
        (programs.nbytes("staging"), "NVMe staging"),
        (states, STATES),
    ):
        listed = planned.get(what, 0)
        if needed != listed:
            raise PlanError(
                f"pools.{what}",
                f"has {format_bytes(listed)} ({listed} B), but the schedule needs {needed} B. "
                f"Another version of Penstock made this plan: make a new one with `penstock plan`",
            )
