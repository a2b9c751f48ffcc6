"""The plan: what is stored where.

A plan is one frozen value, saved as JSON. It allocates and measures nothing. It is all that the
planner hands to the engine, and the engine allocates memory only as the plan says. Nothing in it
can change a bit of the result: everything that can is part of its workload.

One plan is for all ranks. Its bytes and its budget are those of one rank, and its nodes and paths
those of the first seat; `Plan.for_rank` has those of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from penstock import records
from penstock.errors import PlanError
from penstock.machine.machine import Machine
from penstock.model.inventory import Block, Inventory
from penstock.plan.activation_overlay import OverlaidActivation, overlaid_activations
from penstock.plan.budget import Budget
from penstock.plan.buffers import (
    CONTEXT,
    NCCL,
    BufferPool,
    activation_nbytes,
    attention_micro_nbytes,
    memory_pools,
    role_nbytes,
)
from penstock.plan.cuda_allocator import PAGE, SMALL_PAGE
from penstock.plan.placement import BlockPlacement, Placement, Share
from penstock.plan.seats import Ranks, Seat, seated_budget, seated_placement
from penstock.plan.staging import choose_staging_node
from penstock.plan.working_memory import WorkingMemory
from penstock.plan.workload import Workload
from penstock.records import Bytes
from penstock.roles import EXTENT, MOMENTS, PASSING, STATE, SWEEP_LEAF, TRAINED, Role
from penstock.tiers import Tier
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is stored where, for one model, one workload and one set of budgets."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """Version of the file format."""

    model: str
    """The model's name, as the user gave it."""

    fingerprint: str
    """Fingerprint of the model's blocks and tensors. A plan is valid for no other model."""

    parameters: int
    """Number of parameters of the model. Tied and shared ones count once."""

    machine: str = ""
    """Name of the machine that the plan was made for."""

    workload: Workload
    """What to train."""

    budget: Budget
    """How much of each tier a rank may use."""

    placement: Placement
    """Where everything is stored, and how it is streamed."""

    seats: tuple[Seat, ...] = ()
    """What each rank of a machine uses. Without seats there is one rank, or, in plans of earlier
    versions, all ranks use the same nodes and paths."""

    pools: tuple[BufferPool, ...] = ()
    """Memory that is allocated in addition to what is stored."""

    process_memory: Bytes = 0
    """Host memory that the process needs outside the budgets: Python, PyTorch and, with a GPU, CUDA
    and the compiler. 0 in plans of earlier versions, which did not list it."""

    note: str = ""
    """A remark for the user, such as why the model cannot be trained yet."""

    _shares: tuple[tuple[Role, Share], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise PlanError("version", f"must be {self.FORMAT}, got {self.version}")
        self._check_seats()
        overlaid = self.overlaid_activations()
        shares = tuple(
            (home.role, share)
            for index, block in enumerate(self.placement.blocks)
            for home in block.homes
            for share in home.shares
            if (index, home.role) not in overlaid
        )
        object.__setattr__(self, "_shares", shares)
        for tier in Tier:
            if self.peak(tier) > self.budget.of(tier):
                raise PlanError(
                    f"budget.{tier}",
                    f"is {format_bytes(self.budget.of(tier))}, but the plan needs "
                    f"{format_bytes(self.peak(tier))}",
                )

    # Ranks.

    @property
    def ranks(self) -> Ranks:
        """The ranks, and which of them share nodes and drives."""
        return Ranks(world=self.workload.world, seats=self.seats)

    def seat(self, rank: int) -> Seat | None:
        """Return the seat of a rank; None if the plan has no seats."""
        return self.seats[rank % len(self.seats)] if self.seats else None

    def for_rank(self, rank: int) -> Plan:
        """Return the plan with the nodes and paths of a rank. That of rank 0 is unchanged."""
        seat = self.seat(rank)
        if seat is None or seat is self.seats[0]:
            return self
        return replace(
            self,
            placement=seated_placement(self.placement, self.seats[0], seat),
            budget=seated_budget(self.budget, self.seats[0], seat),
        )

    def _check_seats(self) -> None:
        """Raise PlanError unless every rank has a seat like the first one."""
        if not self.seats:
            return
        if self.workload.world % len(self.seats):
            raise PlanError(
                "seats",
                f"has {len(self.seats)} for the ranks of a machine, which must divide the number "
                f"of ranks, {self.workload.world}",
            )
        first = self.seats[0]
        for number, seat in enumerate(self.seats):
            for name in ("nodes", "paths"):
                if len(getattr(seat, name)) != len(getattr(first, name)):
                    raise PlanError(
                        f"seats[{number}].{name}", f"must be as many as in seats[0].{name}"
                    )

    # Bytes.

    def overlaid_activations(self) -> dict[tuple[int, Role], OverlaidActivation]:
        """Return, by block and role, what is stored in the memory of gradients."""
        work, placement = self.workload, self.placement
        return overlaid_activations(
            placement.blocks, rounds=placement.rounds, accumulate=work.accumulate,
            in_hbm=work.sums_apart(placement.rounds),
        )  # fmt: skip

    def at_rest(self, tier: Tier) -> int:
        """Return the bytes of weights, optimizer states and gradients stored between steps."""
        return sum(s.nbytes for r, s in self._shares if s.tier is tier and r not in PASSING)

    def activations(self, tier: Tier) -> int:
        """Return the bytes of saved activations, without those stored in gradients' memory.

        What attention returned counts as well.
        """
        return sum(s.nbytes for role, s in self._shares if s.tier is tier and role in PASSING)

    def pool_nbytes(self, tier: Tier) -> int:
        """Return the bytes of all buffer pools."""
        return sum(pool.nbytes for pool in self.pools if pool.tier is tier)

    def peak(self, tier: Tier) -> int:
        """Return the most bytes in use at any time: the sum of all parts."""
        return self.at_rest(tier) + self.activations(tier) + self.pool_nbytes(tier)

    def parts(self, tier: Tier) -> Iterator[tuple[str, int]]:
        """Yield the name and the bytes of each part of the peak."""
        by_role: Counter[Role] = Counter()
        for role, share in self._shares:
            if share.tier is tier:
                by_role[role] += share.nbytes
        yield from ((role.value, by_role[role]) for role in Role if by_role[role])
        yield from ((pool.what, pool.nbytes) for pool in self.pools if pool.tier is tier)

    @property
    def context_nbytes(self) -> int:
        """Bytes of the CUDA context; 0 if the CPU computes."""
        return sum(pool.nbytes for pool in self.pools if pool.what == CONTEXT)

    @property
    def allocator_nbytes(self) -> int:
        """Bytes of the HBM budget that PyTorch's allocator may use as its limit.

        That is all but the CUDA context, NCCL's own memory, and the pages by which it may exceed
        its limit.
        """
        context = self.context_nbytes
        pages = PAGE + SMALL_PAGE if context else 0  # without a GPU there is no such allocator
        nccl = sum(pool.nbytes for pool in self.pools if pool.what == NCCL)
        return self.budget.of(Tier.HBM) - context - nccl - pages

    @property
    def host_nbytes(self) -> int:
        """Host memory of the whole process: its share of the tiers, and `process_memory`.

        If the CPU computes, the HBM tier is host memory too.
        """
        tiers = [Tier.DRAM, Tier.CXL] + ([] if self.context_nbytes else [Tier.HBM])
        return sum(self.peak(tier) for tier in tiers) + self.process_memory

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes per parameter at rest, over all tiers and ranks: 14 with fp32 moments.

        With several ranks, weights in HBM count on each of them.
        """
        return self.workload.world * sum(self.at_rest(tier) for tier in Tier) / self.parameters

    def memory_pools(self, memory: WorkingMemory) -> dict[str, int]:
        """Return the sizes of pools in HBM that follow from working memory, by name."""
        context = sum(pool.nbytes for pool in self.pools if pool.what == CONTEXT)
        if context and memory.context is not None:
            context = memory.context
        return memory_pools(self.workload, self.placement, memory, context_nbytes=context)

    def with_memory(self, memory: WorkingMemory) -> Plan:
        """Return the plan with pools for another working memory, and the same placement.

        Raises PlanError if that exceeds the budget.
        """
        sizes = self.memory_pools(memory)
        kept = [pool for pool in self.pools if pool.what not in sizes]
        new = [BufferPool(tier=Tier.HBM, what=k, nbytes=v) for k, v in sizes.items() if v]
        return replace(self, pools=(*new, *kept))

    # Checks.

    def check_model(self, inventory: Inventory) -> None:
        """Raise PlanError if the plan was made for another model."""
        if self.fingerprint != inventory.fingerprint:
            raise PlanError(
                "fingerprint",
                f"is {self.fingerprint} ({self.model}), but {inventory.model} has "
                f"{inventory.fingerprint}; make a plan for it with `penstock plan`",
            )
        blocks = self.placement.blocks
        if [block.block for block in blocks] != [block.name for block in inventory.blocks]:
            raise PlanError(
                "placement.blocks", f"must be the blocks of {inventory.model}, in order"
            )
        inventory = self.workload.stored(inventory)
        for number in range(len(blocks)):
            self._check_attention(inventory.blocks[number], number)
            self._check_homes(inventory, number)
            self._check_sweep(inventory.blocks[number], number)
            self._check_late_moments(number)
            self._check_kept(inventory, number)

    def _check_homes(self, inventory: Inventory, number: int) -> None:
        """Raise PlanError unless a block has a home of sufficient size for everything it needs."""
        rounds, step = self.placement.rounds, self.placement.piece_elements
        spec, formats = inventory.blocks[number], self.workload.formats(rounds)
        placed = self.placement.blocks[number]
        required: tuple[Role, ...] = (Role.WEIGHT,)
        required += STATE if spec.flat_elements(True) else ()
        where, split = f"placement.blocks[{number}].homes", placed.is_split
        if split:
            self._check_split(spec, placed, where)
            required += (Role.FROZEN,)
        sizes = {
            role: role_nbytes(
                spec, role, formats, step, in_hbm=placed.all_on(role, Tier.HBM), split=split
            )
            for role in required
        }
        if spec.kind == "layer":
            sizes[Role.ACTIVATION] = activation_nbytes(inventory, self.workload, rounds)
        if placed.attention:
            sizes[Role.ATTENTION] = placed.attention * attention_micro_nbytes(spec, self.workload)
        for role, nbytes in sizes.items():
            if formats.has(role) and placed.home(role) is None and nbytes:
                raise PlanError(where, f"has no home for {role}, which {spec.name} needs")
        for home in placed.homes:
            needed = sizes.get(home.role) or role_nbytes(spec, home.role, formats, step)
            if any(share.nbytes % EXTENT for share in home.shares):
                raise PlanError(where, f"{home.role} must have multiples of {EXTENT} B")
            if home.nbytes < needed:
                raise PlanError(
                    where,
                    f"has {home.nbytes} B for {home.role}, but {spec.name} needs {needed} B",
                )

    def _check_sweep(self, spec: Block, number: int) -> None:
        """Raise PlanError if nothing sweeps what is trained of a block, or the GPU cannot."""
        placed, where = self.placement.blocks[number], f"placement.blocks[{number}].sweep"
        if placed.sweep == "none" and spec.flat_elements(True):
            raise PlanError(
                where, f"is none, but {spec.name} is trained: it must be cpu, or gpu in HBM"
            )
        if not placed.streams_states:
            return
        trained = [home for home in placed.homes if home.role in TRAINED]
        if any(home.on(Tier.HBM) or home.on(Tier.NVME) for home in trained):
            raise PlanError(
                where,
                f"is gpu, so all that is trained of {spec.name} must be in HBM, or all of it in "
                f"dram and cxl",
            )
        if spec.second is not None:
            raise PlanError(
                where,
                f"is gpu, but {self.workload.optimizer} updates whole tensors: it must be cpu for "
                f"{spec.name}, which is not in HBM",
            )
        if self.workload.world > 1:
            raise PlanError(
                where, f"is gpu, and {spec.name} is in host memory, which needs a single rank"
            )
        if self.placement.gpu_piece_elements < SWEEP_LEAF:
            raise PlanError(
                "placement.gpu_piece_elements",
                f"must be {SWEEP_LEAF} or more, got {self.placement.gpu_piece_elements}",
            )

    def _check_late_moments(self, number: int) -> None:
        """Raise PlanError if the moments of a block cannot be updated after its weights."""
        placed, where = self.placement.blocks[number], f"placement.blocks[{number}].late_moments"
        if not placed.late_moments:
            return
        if not self.workload.may_update_moments_late:
            raise PlanError(
                where,
                "is true, which needs AdamW, a single rank, and a loss that Penstock computes",
            )
        trained = [role for role in TRAINED if placed.home(role) is not None]
        in_hbm = any(placed.touches(role, Tier.HBM) for role in trained)
        on_nvme = any(placed.touches(role, Tier.NVME) for role in trained)
        if placed.sweep == "none" or in_hbm or placed.is_split:
            raise PlanError(
                where,
                f"is true, so nothing that is trained of {placed.block} may be in HBM: the CPU "
                f"updates its moments",
            )
        if on_nvme and not all(placed.all_on(role, Tier.NVME) for role in MOMENTS):
            raise PlanError(
                where,
                f"is true, so the moments of {placed.block} must be on nvme, or all that is "
                f"trained of it in dram and cxl",
            )
        if self.placement.sweeps_interleaved and not on_nvme:
            raise PlanError(
                where,
                f"is true, so placement.sweeps_interleaved must be false: {placed.block} is in "
                f"host memory",
            )

    def _check_kept(self, inventory: Inventory, number: int) -> None:
        """Raise PlanError if a block cannot keep what its forward pass saves."""
        placed, where = self.placement.blocks[number], f"placement.blocks[{number}].kept"
        if not placed.kept:
            return
        if inventory.blocks[number].kind != "layer":
            raise PlanError(where, f"must be 0 for {placed.block}, which is no layer")
        if not self.workload.may_keep:
            raise PlanError(
                where,
                f"is {placed.kept}, but with "
                + (
                    "a loss that the caller computes"
                    if self.workload.caller_loss
                    else "the numerics of an earlier version (numerics.forward is inference)"
                )
                + " every layer is recomputed; make a new plan with `penstock plan`",
            )
        if not placed.all_on(Role.ACTIVATION, Tier.HBM):
            raise PlanError(
                where,
                f"is {placed.kept}, so the activation of {placed.block} must be in HBM: what is "
                f"saved refers to it",
            )

    def _check_attention(self, spec: Block, number: int) -> None:
        """Raise PlanError if what a block's attention returns cannot be saved."""
        placed, where = self.placement.blocks[number], f"placement.blocks[{number}].attention"
        if not placed.attention:
            if placed.home(Role.ATTENTION) is not None:
                raise PlanError(where, f"is 0, but {placed.block} has a home for its results")
            return
        if not spec.heads:
            raise PlanError(
                where,
                f"is {placed.attention}, but {placed.block} does not call attention once; it must "
                f"be 0",
            )
        if not self.workload.may_save_attention:
            raise PlanError(
                where,
                f"is {placed.attention}, but results of attention are saved only with attention "
                f"varlen, numerics.forward training, and a loss that the engine computes; make a "
                f"new plan with `penstock plan`",
            )
        home = placed.home(Role.ATTENTION)
        in_hbm = home is not None and home.on(Tier.HBM)
        if placed.touches(Role.ATTENTION, Tier.NVME) or in_hbm not in (0, home and home.nbytes):
            raise PlanError(
                where,
                f"is {placed.attention}, so what attention of {placed.block} returns must be in "
                f"HBM, or in dram and cxl",
            )

    def _check_split(self, spec: Block, placed: BlockPlacement, where: str) -> None:
        """Raise PlanError unless all that is trained of a split block is in HBM."""
        trained = (home for home in placed.homes if home.role in TRAINED)
        in_hbm = all(placed.all_on(home.role, Tier.HBM) for home in trained)
        if not (in_hbm and placed.sweep == "gpu" and spec.flat_elements(False)):
            raise PlanError(
                where, f"has a home for {Role.FROZEN}: all that is trained must be in HBM"
            )
        if self.workload.world > 1:
            raise PlanError(where, f"has a home for {Role.FROZEN}, which needs a single rank")

    def check(self, machine: Machine) -> None:
        """Raise PlanError unless the machine has the memory that the plan needs.

        The bytes of a plan are those of one rank. Without seats, all ranks are assumed to be on
        this machine, with a GPU each, and the same nodes and drives for all.
        """
        ranks = self.ranks
        if machine.gpus and len(machine.gpus) < ranks.local:
            raise PlanError(
                "workload.world",
                f"is {ranks.world}, and every rank needs a GPU, but "
                f"{machine.name or 'this machine'} has {len(machine.gpus)}; make a plan for fewer "
                f"ranks",
            )
        for gpu in machine.gpus[: ranks.local]:
            if gpu.memory is not None:
                _check_capacity("hbm", "the GPU", self.peak(Tier.HBM), gpu.memory)
        by_node: Counter[int] = Counter()
        by_path: Counter[str] = Counter()
        for rank in range(ranks.local):
            plan = self.for_rank(rank)
            plan._add_host_nbytes(machine, by_node)
            for _, share in plan._shares:
                by_path[share.path] += share.nbytes if share.path else 0
        capacities = {node.id: node.capacity for node in machine.nodes}
        for node, wanted in sorted(by_node.items()):
            _check_capacity(f"node {node}", f"node {node}", wanted, capacities.get(node, 0))
        self._check_paths(machine, by_path)

    def _add_host_nbytes(self, machine: Machine, by_node: Counter[int]) -> None:
        """Add what one rank needs of each node."""
        for _, share in self._shares:
            if share.node is not None:
                by_node[share.node] += share.nbytes
        host_node = self.placement.host_node
        if host_node is None:  # the OS decides, most likely on the node that a new plan would name
            host_node = choose_staging_node(machine)
        by_node[host_node] += self.pool_nbytes(Tier.DRAM)
        if not machine.gpus:  # the CPU computes, and the HBM tier is memory of that node
            by_node[host_node] += self.peak(Tier.HBM)

    def _check_paths(self, machine: Machine, by_path: Counter[str]) -> None:
        free = {s.path: s.free if s.free is not None else s.capacity for s in machine.storage}
        for path, wanted in sorted((+by_path).items()):
            if path not in free:
                listed = ", ".join(free) or "none"
                raise PlanError("nvme", f"{path} is not on this machine; it has {listed}")
            available = free[path]
            if available is not None:
                _check_capacity("nvme", path, wanted, available)

    # Files.

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. Raises PlanError naming the field that is wrong."""
        return records.load(cls, path, error=PlanError)

    def save(self, path: str | Path) -> None:
        """Write the plan. On failure, a previous file stays as it was."""
        records.save(self, path)


def _check_capacity(field_name: str, place: str, wanted: int, available: int) -> None:
    if wanted > available:
        raise PlanError(
            field_name,
            f"needs {format_bytes(wanted)} ({wanted} B), but {place} has "
            f"{format_bytes(available)}; plan again with a smaller budget",
        )
