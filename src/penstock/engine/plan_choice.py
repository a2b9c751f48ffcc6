"""Decide the plan of a run, in one place for `penstock plan`, `penstock train` and `prepare`.

`plan_request` turns a model, the settings and a machine into everything that a plan depends on.
`PlanRequest.make_plan` makes the plan from that and nothing else. Callers differ only in what they
pass, so the same settings on the same machine give the same plan file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.engine.memory_source import working_memory_source
from penstock.errors import EngineError, InfeasibleError, PlanError, SettingsError
from penstock.machine.machine import Figure, Machine, Nic
from penstock.machine.probe_cache import probed_paths
from penstock.model.adapters import Adapter, lora_adapter
from penstock.model.inventory import Inventory
from penstock.plan.budget import (
    Budget,
    check_budget_memory,
    check_budget_texts,
    describe_limit,
    parse_budget,
    process_memory,
    split_path_budget,
    with_budget_memory,
    with_gpus,
    with_paths,
)
from penstock.plan.buffers import CONTEXT, plan_pools
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import TransportName
from penstock.plan.plan import Plan
from penstock.plan.working_memory import NOISE, WorkingMemory, WorkingMemorySource
from penstock.plan.working_memory_estimate import (
    estimate_caller_loss,
    estimate_working_memory,
)
from penstock.plan.workload import CallerLoss, Workload, default_numerics
from penstock.planner import PlanResult, make_plan
from penstock.planner.resource_names import long_name
from penstock.probe.machine_choice import TargetMachine
from penstock.records import named_by
from penstock.settings import Settings
from penstock.storage.leftovers import clear_leftovers
from penstock.tiers import Tier
from penstock.units import format_bytes

NEEDS_KERNELS = "needs Triton and a GPU of compute capability 8.0 or higher"
"""What compiled layers need, for messages."""

ASSUMED_NIC = 1.25e9
"""Bytes per second of a network card whose speed is not known: 10 Gb/s."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan of a run, and the machine it is for."""

    plan: Plan
    """The plan."""

    machine: Machine
    """The machine, with the budget's NVMe paths."""

    planned: PlanResult | None = None
    """The plan with its estimated cost; None for a plan from a file."""

    request: PlanRequest | None = None
    """What the plan was made from; None for a plan from a file, which is not made again."""

    @property
    def bottleneck(self) -> str:
        """Name of the resource that limits the step, as estimated; "" if unknown."""
        if self.planned is None:
            return ""
        return long_name(next(iter(self.planned.cost.bounds)), self.machine)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything that a plan depends on."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    budget: Budget
    """How much of each tier may be used."""

    machine: Machine
    """The machine, with the budget's NVMe paths."""

    remarks: tuple[str, ...] = ()
    """Sentences for the user about the machine and its speeds."""

    source: WorkingMemorySource = estimate_working_memory
    """Says how much working memory the model needs."""

    transport: TransportName | None = None
    """How ranks reach each other; None for the faster way."""

    def make_plan(self) -> PlanChoice:
        """Make the best plan, or raise InfeasibleError."""
        try:
            planned = make_plan(
                self.inventory, self.workload, self.budget, self.machine, source=self.source,
                transport=self.transport,
            )  # fmt: skip
        except InfeasibleError as error:
            # `auto` budgets are small because of the limit, so more memory does not help.
            if not (limit := describe_limit(self.machine)):
                raise
            advice = f"{error.advice}. {limit}" if error.advice else limit
            raise InfeasibleError(error.problem, least=error.least, advice=advice) from None
        return PlanChoice(planned.plan, self.machine, planned, self)


def plan_request(
    inventory: Inventory,
    settings: Settings,
    target: TargetMachine,
    *,
    config: Any = None,
    budget: Budget | Mapping[str, Any] | None = None,
    steps: int | None = None,
    accumulate: bool = False,
    compiled: bool | None = None,
    own_loss: bool = False,
    machines: int | None = None,
    adapter: Adapter | None = None,
    caller_loss: CallerLoss | None = None,
) -> PlanRequest:
    """Decide everything that a plan depends on.

    Args:
        inventory: The model.
        settings: Settings of the run.
        target: The machine to plan for.
        config: The model's config. Without it, working memory is estimated from the inventory.
        budget: Memory budgets; None for those in the settings.
        steps: Number of steps of the run, if it is known better than from the settings.
        accumulate: Whether several `forward_backward()` calls add to one step.
        compiled: Whether layers are compiled; None: if the machine runs Penstock's kernels.
        own_loss: Whether the caller brings a loss function.
        machines: Number of machines like the target; None for as many as its file says.
        adapter: The adapter that is trained; None for that of the settings, if there is one.
        caller_loss: Set if the caller's code computes the loss; see `workload_for`.
    """
    if adapter is None and settings.model.lora_options is not None:
        adapter = lora_adapter(settings.model.lora_options)
    check_quantize(settings.model.quantize, adapter)
    if compiled and target.is_here and not target.kernels:
        raise EngineError(
            f"compiled=True was passed, but this machine does not run compiled layers: that "
            f"{NEEDS_KERNELS}. Leave compiled out, and layers run as the model defines them"
        )
    ranks, machine = settings.memory.gpus, target.machine
    if machines is not None:
        machine = replace(machine, machines=machines)
    larger: tuple[str, ...] = ()
    if not target.is_here:
        machine, more = with_gpus(machine, ranks)
        larger = (more,)
    limits = budget_for(machine, settings.memory.budgets if budget is None else budget, ranks)
    if target.is_here:
        machine, network = _with_nic(machine)
        larger += (network,)
        _check_paths_exist(limits)
        check_budget_memory(machine, limits)
    else:
        machine, remarks = with_budget_memory(machine, limits)
        larger += remarks
    machine, disk_remark = with_paths(machine, limits)
    workload = workload_for(
        inventory, settings,
        compiled=target.kernels if compiled is None else compiled,
        steps=steps, accumulate=accumulate, own_loss=own_loss, machines=machine.machines,
        caller_loss=caller_loss,
    )  # fmt: skip
    remarks = tuple(filter(None, (target.remark, describe_limit(machine), disk_remark, *larger)))
    trust = settings.model.trust_remote_code
    source = working_memory_source(
        config, machine, own_loss=own_loss, trust_remote_code=trust, adapter=adapter
    )
    transport = None if settings.memory.transport == "auto" else settings.memory.transport
    return PlanRequest(inventory, workload, limits, machine, remarks, source, transport)


def _with_nic(machine: Machine) -> tuple[Machine, str]:
    """Return the machine with a network card if it is one of several; say so if that is assumed.

    The kernel does not report the speed of the cards of many virtual machines.
    """
    if machine.machines == 1 or any(nic.bytes_per_second for nic in machine.nics):
        return machine, ""
    assumed = Nic(name="assumed", bytes_per_second=Figure.from_number(ASSUMED_NIC))
    return replace(machine, nics=(assumed,)), (
        f"The speed of this machine's network cards is not known: assumed to be "
        f"{ASSUMED_NIC / 1e9:g} GB/s. It does not change the result."
    )


def check_quantize(quantize: str | None, adapter: Adapter | None) -> None:
    """Raise SettingsError if weights are to be quantized, but are trained."""
    if quantize is not None and adapter is None:
        raise SettingsError(
            "quantize",
            f"is {quantize}, but weights that are trained cannot be quantized; train an adapter, "
            f"for example with --lora r=16,alpha=32, or leave quantize out",
        )


def check_plan(plan: Plan, inventory: Inventory, target: TargetMachine, *, path: str) -> PlanChoice:
    """Check a plan from a file: is it for this model, and can the machine follow it?

    Raises PlanError otherwise.
    """
    with named_by(path):
        plan.check_model(inventory)
        machine, _ = with_paths(target.machine, plan.budget)
        plan.check(machine)
    if plan.workload.numerics.compiled and not target.kernels:
        raise PlanError(
            "workload.numerics.compiled",
            f"is true, but {machine.name or 'this machine'} does not run compiled layers: that "
            f"{NEEDS_KERNELS}; make a plan on this machine with `penstock plan --machine this`",
            where=path,
        )
    if not plan.process_memory:  # a file of an earlier version, which did not list it
        plan = replace(plan, process_memory=process_memory(machine))
    return PlanChoice(plan, machine)


def fit_plan(
    plan: Plan, request: PlanRequest | None, inventory: Inventory, measured: WorkingMemory
) -> tuple[Plan, str]:
    """Return a plan within the same budgets that has room for what a rehearsal measured.

    The plan stays as it is if it is large enough. If only its budget is, the placement stays and
    its pools grow. Otherwise the plan is made again from its `request`, with the same numerics. A
    plan without a request is the user's own, and not made again: it recomputes layers that it would
    have kept, if that is enough.

    Returns the plan, and a sentence for the user about what changed; "" if nothing did. Raises
    InfeasibleError or PlanError if nothing fits.
    """
    if is_covered(plan, measured):
        return plan, ""
    needed = None
    with contextlib.suppress(PlanError):  # more than the budget
        needed = plan.with_memory(measured)
    found = (
        f"the rehearsal measured {format_bytes(measured.peak)} of working memory "
        f"({measured.largest.name}), the plan had {format_bytes(_pool(plan, 'working memory'))}"
    )
    if needed is not None:
        more = format_bytes(needed.peak(Tier.HBM) - plan.peak(Tier.HBM))
        return needed, f"{found}; the HBM budget has room for {more} more"
    if request is None:
        if (smaller := _keep_less(plan, inventory, measured)) is not None:
            before, after = _kept_passes(plan), _kept_passes(smaller)
            return smaller, f"{found}; {after} forward passes are kept in HBM instead of {before}"
        raise PlanError(
            "pools",
            f"are too small on this GPU: {found}, and the rest of its HBM budget of "
            f"{format_bytes(plan.budget.hbm)} is too small for the difference. Make a new plan, "
            f"which will use what was measured: run `penstock plan` again, or leave --plan out",
        )
    estimate = request.source

    def source(inventory: Inventory, workload: Workload, /) -> WorkingMemory:
        # Suggestions for what does not fit ask for other workloads, too.
        return measured if workload == plan.workload else estimate(inventory, workload)

    try:
        again = replace(request, source=source).make_plan().plan
    except InfeasibleError as error:
        problem = f"{error.problem}: {found}"
        raise InfeasibleError(problem, least=error.least, advice=error.advice) from None
    before, after = _resident_blocks(plan), _resident_blocks(again)
    return again, f"{found}; planned again: {after} blocks stay in HBM instead of {before}"


def _keep_less(plan: Plan, inventory: Inventory, measured: WorkingMemory) -> Plan | None:
    """Return the plan with fewer kept forward passes, as many as its budget allows.

    The first layers are recomputed first, because their saved tensors stay the longest. Returns
    None if the plan does not fit even if it keeps nothing.
    """
    stored = plan.workload.stored(inventory)
    context = plan.memory_pools(measured)[CONTEXT]
    blocks = list(plan.placement.blocks)
    for number, block in enumerate(blocks):
        for kept in reversed(range(block.kept)):
            blocks[number] = replace(block, kept=kept)
            placement = replace(plan.placement, blocks=tuple(blocks))
            # All pools, because the schedule is another one: the streamed weights of a layer that
            # is no longer kept leave their slots after forward and are fetched again.
            schedule = step_schedule(stored, placement)
            pools = plan_pools(
                inventory, plan.workload, placement, schedule, measured, context_nbytes=context
            )
            with contextlib.suppress(PlanError):  # more than the budget
                return replace(plan, placement=placement, pools=pools)
    return None


def _kept_passes(plan: Plan) -> int:
    """Return how many forward passes of layers are kept, over all micro-batches of a round."""
    return sum(block.kept for block in plan.placement.blocks)


def is_covered(plan: Plan, measured: WorkingMemory) -> bool:
    """Return whether a plan has the HBM that was measured, in torch's allocator and outside of it.

    The margins that a rehearsal adds on a GPU are larger than `NOISE`, so a plan that misses no
    more than that is large enough.
    """
    sizes = plan.memory_pools(measured)
    noise = NOISE if sizes[CONTEXT] else 0
    planned = sum(_pool(plan, name) for name in sizes)
    context = _pool(plan, CONTEXT)
    return sum(sizes.values()) <= planned + noise and sizes[CONTEXT] <= context + noise


def _pool(plan: Plan, what: str) -> int:
    return sum(pool.nbytes for pool in plan.pools if pool.what == what)


def _resident_blocks(plan: Plan) -> int:
    """Return the number of blocks whose weights stay in HBM."""
    homes = (block.streamed for block in plan.placement.blocks)
    return sum(home is not None and home.shares[0].tier is Tier.HBM for home in homes)


def budget_for(machine: Machine, budget: Budget | Mapping[str, Any], ranks: int = 1) -> Budget:
    """Resolve sizes such as `auto` or `16GiB` for the machine. A `Budget` stays as it is.

    The HBM budget is for each of the `ranks` on the machine, and the others are for all of them.
    """
    if isinstance(budget, Budget):
        return budget
    return parse_budget(machine, ranks=ranks, **_budget_texts(budget))


def check_budget(budget: Mapping[str, Any]) -> None:
    """Check the spelling of sizes and that paths exist, before anything slow runs."""
    check_budget_texts(**_budget_texts(budget))
    for path in budget_paths(budget):
        _check_path_exists(path)


def _budget_texts(budget: Mapping[str, Any]) -> dict[str, Any]:
    tiers = [tier.value for tier in Tier]
    for name in budget:
        if name not in tiers:
            raise PlanError("budget", f"has no tier {name!r}; the tiers are {', '.join(tiers)}")
    for name, size in budget.items():
        if name != "nvme" and (isinstance(size, bool) or not isinstance(size, str | int)):
            wanted = 'text such as "24GiB" or "auto", or a number of bytes'
            raise PlanError(name, f"must be {wanted}, got {size!r}")
    return {**budget, "nvme": _nvme_texts(budget.get("nvme", ()))}


def budget_paths(budget: Budget | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the storage paths that a budget names."""
    if isinstance(budget, Budget):
        return tuple(path.path for path in budget.nvme)
    texts = _nvme_texts(budget.get("nvme", ()))
    return tuple(filter(None, (split_path_budget(text)[0] for text in texts)))


def clear_budget_paths(budget: Budget | Mapping[str, Any]) -> tuple[str, ...]:
    """Remove what killed runs left on the paths of a budget of this machine.

    Call this before the machine is described: its free disk space does not include that of stores
    which are still there. Returns sentences for the user about what stays.
    """
    paths = budget_paths(budget)
    named = budget.nvme if isinstance(budget, Budget) else _nvme_texts(budget.get("nvme", ()))
    if len(paths) < len(named):  # a size without a path is for the first path that was probed
        paths += tuple(path for path in probed_paths() if Path(path).exists())[:1]
    return clear_leftovers(dict.fromkeys(paths))


def workload_for(
    inventory: Inventory,
    settings: Settings,
    *,
    compiled: bool,
    steps: int | None = None,
    accumulate: bool = False,
    own_loss: bool = False,
    machines: int = 1,
    caller_loss: CallerLoss | None = None,
) -> Workload:
    """Describe the optimizer step that the settings ask for.

    Args:
        inventory: The model's inventory.
        settings: Settings of the run.
        compiled: Whether layers are compiled and Penstock's kernels are used.
        steps: Number of steps of the run, if it is known better than from the settings.
        accumulate: Whether several `forward_backward()` calls add to one step.
        own_loss: Whether the caller brings a loss function.
        machines: Number of machines, each with as many GPUs as the settings say.
        caller_loss: Set if the caller's code computes the loss. If it has no bytes, there will be
            enough for the logits of all tokens.
    """
    settings = settings.with_assumed_sizes(inventory.max_context)
    schedule = settings.schedule
    context, batch = settings.data.chosen_context, schedule.chosen_batch
    if caller_loss is not None and not caller_loss.nbytes:
        tokens, dtype = context * batch, settings.model.dtype
        nbytes = estimate_caller_loss(inventory, tokens=tokens, dtype=dtype)
        caller_loss = replace(caller_loss, nbytes=nbytes)
    options = schedule.optimizer_options
    numerics = default_numerics(
        inventory,
        context=context,
        batch=batch,
        dtype=settings.model.dtype,
        micro_batch=schedule.micro_batch_size,
        kernels=compiled,
        own_loss=own_loss or caller_loss is not None,
    )
    return Workload(
        context=context,
        batch=batch,
        dtype=settings.model.dtype,
        optimizer=schedule.optimizer,
        momentum=schedule.optimizer == "sgd" and options["momentum"] > 0,
        moments=settings.memory.moments,
        clip=schedule.clip or None,
        accumulate=accumulate,
        steps=schedule.steps if steps is None else steps,
        world=settings.memory.gpus * machines,
        caller_loss=caller_loss,
        numerics=replace(
            numerics,
            deterministic=schedule.deterministic,
            label_smoothing=schedule.label_smoothing,
            neftune_noise_alpha=schedule.neftune_noise_alpha,
            quantize=settings.model.quantize,
        ),
    )


def _nvme_texts(nvme: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(nvme, str):
        return (nvme,)
    if not (isinstance(nvme, Iterable) and all(isinstance(each, str) for each in nvme)):
        raise PlanError(
            "nvme", f'must be text such as "/mnt/nvme:400GiB", or several, got {nvme!r}'
        )
    return tuple(nvme)


def _check_paths_exist(budget: Budget) -> None:
    """Check every path, even one that the plan will not use: it may be mistyped."""
    for disk in budget.nvme:
        _check_path_exists(disk.path)


def _check_path_exists(path: str) -> None:
    if not Path(path).is_dir() and not Path(path).is_block_device():
        raise SettingsError("nvme", f"{path} is neither a directory nor a block device")
