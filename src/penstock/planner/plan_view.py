"""Show a plan: tables for people and JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.optimizer_options import TITLES
from penstock.plan.buffers import micro_batches_per_round
from penstock.plan.placement import Share
from penstock.plan.plan import Plan
from penstock.plan.working_memory import WorkingMemory
from penstock.planner import PlanResult
from penstock.planner.cost import Cost
from penstock.planner.resource_names import (
    ROLE_NAMES,
    VERB_NAMES,
    bound_by,
    long_name,
    role_name,
)
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import format_bytes, format_seconds

BAR_WIDTH = 60
"""Maximum width of a bar in characters."""

SHADES = " ░▒▓█"

LANE_NAMES = {
    "compute": "GPU compute",
    "fetch": "weights to GPU",
    "fetch inputs": "activations to GPU",
    "drain": "gradients from GPU",
    "drain inputs": "activations from GPU",
    "fetch attention": "attention results to GPU",
    "drain attention": "attention results from GPU",
    "ranks": "GPU to GPU",
    "sweep": "CPU optimizer sweep",
    "gpu sweep": "GPU optimizer sweep",
    "fetch states": "states to GPU",
    "drain states": "states from GPU",
    "read": "NVMe reads",
    "write": "NVMe writes",
}

STATE_LANES = ("fetch states", "gpu sweep", "drain states")
"""Lanes of sweeps on the GPU over states in host memory."""

LANE_WIDTH = max(map(len, LANE_NAMES.values())) + len("  ") + len("  100%")
"""Characters of a line of the timeline next to the bar."""

# JSON. Programs read it, so its keys must not change.


def plan_json(result: PlanResult) -> dict[str, Any]:
    """Return a plan and its cost as JSON."""
    plan, cost = result.plan, result.cost
    return {
        "feasible": True,
        "tiers": {
            tier.value: {
                "budget": plan.budget.of(tier),
                "at_rest": plan.at_rest(tier),
                "peak": plan.peak(tier),
            }
            for tier in Tier
        },
        "step_seconds": cost.step_seconds,
        "tokens_per_second": cost.tokens_per_second,
        "bound_by": bound_by(cost.bounds),
        "bytes_per_parameter": plan.bytes_per_parameter,
        "phases": {
            phase: {tier.value: nbytes for tier, nbytes in most.items()}
            for phase, most in result.peaks.items()
        },
        "working_memory": {
            "origin": result.memory.origin,
            "largest": result.memory.largest.name,
            "parts": {
                part.name: {"forward": part.forward, "backward": part.backward}
                for part in result.memory.parts
            },
        },
        "recompute": _recompute_json(plan),
        "sweep": sweep_json(result),
        "host": {"process": plan.process_memory, "peak": plan.host_nbytes},
        "ranks": _ranks_json(plan),
        "not_trainable": plan.note or None,
    }


def _recompute_json(plan: Plan) -> dict[str, Any]:
    """Return how many forward passes of layers a round has, and how many are not recomputed.

    `saved_attention` has, by tier, the number of layers that are recomputed without attention.
    """
    kept, each = kept_passes(plan), micro_batches_per_round(plan.workload, plan.placement.rounds)
    return {
        "layers": len(kept),
        "kept_layers": sum(count == each for count in kept),
        "passes": each * len(kept),
        "kept_passes": sum(kept),
        "saved_attention": {tier.value: count for tier, count in saved_attention(plan).items()},
    }


def sweep_json(result: PlanResult) -> dict[str, Any]:
    """Return how many blocks each processor sweeps, and for how long it is busy with that.

    The seconds of the GPU include the copies of states in host memory. Those of blocks in HBM are
    part of its compute time.
    """
    blocks = result.plan.placement.blocks
    streamed = sum(block.streams_states for block in blocks)
    return {
        "cpu_blocks": sum(block.sweep == "cpu" for block in blocks),
        "cpu_seconds": _busy_seconds(result.cost, ("sweep",)),
        "gpu_blocks": streamed,
        "gpu_seconds": _busy_seconds(result.cost, STATE_LANES),
        "resident_blocks": sum(block.sweep == "gpu" for block in blocks) - streamed,
        "late_moments_blocks": sum(block.late_moments for block in blocks),
    }


def _busy_seconds(cost: Cost, lanes: tuple[str, ...]) -> float:
    """Return for how long at least one of the lanes is busy."""
    spans = sorted(
        (span.start, span.end)
        for operation, span in zip(cost.schedule.operations, cost.spans, strict=True)
        if span.end > span.start and operation.lane in lanes
    )
    total = reached = 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _ranks_json(plan: Plan) -> dict[str, Any]:
    """Return the number of ranks, and the bytes of all ranks of a machine; tiers are per rank."""
    ranks = plan.ranks
    return {
        "gpus": ranks.local,
        "machines": ranks.machines,
        "transport": plan.placement.transport,
        "machine_peak": {tier.value: ranks.local * plan.peak(tier) for tier in Tier},
        "machine_host_peak": ranks.local * plan.host_nbytes,
    }


def infeasible_json(
    problem: InfeasibleError, budgets: dict[str, int], not_trainable: str = ""
) -> dict[str, Any]:
    """Return the same keys for a workload that does not fit.

    `least` is the smallest budget of a tier that is enough if the other budgets stay as they are.
    `not_trainable` says why the model cannot be trained with any budget.
    """
    return {
        "feasible": False,
        "tiers": {
            tier: {
                "budget": nbytes,
                "at_rest": None,
                "peak": None,
                "least": problem.least.get(tier),
            }
            for tier, nbytes in budgets.items()
        },
        "step_seconds": None,
        "tokens_per_second": None,
        "bound_by": None,
        "bytes_per_parameter": None,
        "phases": None,
        "working_memory": None,
        "recompute": None,
        "sweep": None,
        "host": None,
        "ranks": None,
        "not_trainable": not_trainable or None,
    }


# Tables and text.


def plan_view(result: PlanResult, machine: Machine) -> RenderableType:
    """Return the memory table, the timeline of a step and the summary."""
    plan, cost = result.plan, result.cost
    work = plan.workload
    title = (
        f"{plan.model} ({_count(plan.parameters)} parameters) on {plan.machine or 'a machine'}"
        f"{_on_ranks(plan)}: {work.batch} x {work.context:,} tokens per step"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), tier_table(plan), Text()]
    parts += [_FittedTimeline(cost, machine), Text(), Text(summary(result, machine))]
    if plan.note:
        parts.append(Text(f"error: this model cannot be trained: {plan.note}", style="red"))
    if shortage := _host_shortage(plan, machine):
        parts.append(Text(shortage, style="yellow"))
    if result.memory.remark:
        parts.append(Text(result.memory.remark, style="yellow"))
    if result.assumed:
        parts.append(Text(f"Assumed: {'; '.join(result.assumed)}.", style="dim"))
    return Group(*parts)


def _on_ranks(plan: Plan) -> str:
    """Say how many GPUs and machines there are, if there are several."""
    ranks = plan.ranks
    if ranks.world == 1:
        return ""
    machines = f", {ranks.machines} machines" if ranks.machines > 1 else ""
    return f", {ranks.local} GPU{'s' if ranks.local > 1 else ''}{machines}"


def _host_shortage(plan: Plan, machine: Machine) -> str:
    """Say that the machine has less DRAM than the plan and the process need; "" if it has enough.

    It is no error: the memory of the process may be assumed.
    """
    capacity = sum(node.capacity for node in machine.dram_nodes)
    needed = plan.ranks.local * (plan.host_nbytes - plan.peak(Tier.CXL))
    if needed <= capacity:
        return ""
    return (
        f"The machine has {format_bytes(capacity)} of DRAM, but the plan and its process need "
        f"{format_bytes(needed)}: choose a smaller --dram, or auto."
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def tier_table(plan: Plan) -> Table:
    """Return a table of what each tier holds."""
    table = Table(box=None, pad_edge=False)
    for name in ("tier", "budget", "at rest", "peak", "contents"):
        table.add_column(name, justify="left" if name in ("tier", "contents") else "right")
    for tier in Tier:
        if not plan.budget.of(tier) and not plan.peak(tier):
            continue
        contents = ", ".join(
            f"{role_name(name, plan.workload.optimizer)} {format_bytes(nbytes)}"
            for name, nbytes in plan.parts(tier)
        )
        table.add_row(
            tier.value,
            format_bytes(plan.budget.of(tier)),
            format_bytes(plan.at_rest(tier)),
            format_bytes(plan.peak(tier)),
            contents or "-",
        )
    if plan.process_memory:
        parts = "Python, PyTorch" + (", CUDA, compiler" if plan.context_nbytes else "")
        whole = f"host memory in all {format_bytes(plan.host_nbytes)}"
        process = format_bytes(plan.process_memory)
        table.add_row("process", "-", "-", process, f"{parts}: outside the budgets; {whole}")
    return table


@dataclass(frozen=True, slots=True)
class _FittedTimeline:
    """The timeline, with bars as wide as the terminal allows: a bar in two lines is unreadable."""

    cost: Cost
    machine: Machine

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield timeline(
            self.cost, self.machine, max(1, min(BAR_WIDTH, options.max_width - LANE_WIDTH))
        )


def timeline(cost: Cost, machine: Machine, width: int = BAR_WIDTH) -> Table:
    """Return a bar for each lane over one step. Darker means busier."""
    table = Table(box=None, pad_edge=False, show_header=False)
    turn = round(width * cost.phases["forward"] / cost.step_seconds)
    forward = format_seconds(cost.phases["forward"])
    table.add_row("", f"{'forward ' + forward:<{turn}}|backward".ljust(width)[:width], "busy")
    names = LANE_NAMES if machine.gpus else LANE_NAMES | {"compute": "CPU compute"}
    for lane, name in names.items():
        busy = lane_shares(cost, lane, width)
        if any(busy):
            bar = "".join(SHADES[min(4, round(4 * share))] for share in busy)
            table.add_row(name, bar, f"{sum(busy) / width:.0%}")
    return table


def lane_shares(cost: Cost, lane: str, width: int) -> list[float]:
    """Divide the step into `width` intervals, and return how busy the lane is in each."""
    busy = [0.0] * width
    step = cost.step_seconds / width
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if operation.lane != lane or span.end <= span.start:
            continue
        for k in range(int(span.start / step), min(width, int(span.end / step) + 1)):
            overlap = min(span.end, (k + 1) * step) - max(span.start, k * step)
            busy[k] += max(0.0, overlap) / step
    return [min(1.0, share) for share in busy]


def summary(result: PlanResult, machine: Machine) -> str:
    """Return the step time and what limits it, bytes per parameter, and drive wear."""
    plan, cost = result.plan, result.cost
    limit = next(iter(cost.bounds))
    share = cost.bounds[limit] / cost.step_seconds
    lines = [
        f"{format_seconds(cost.step_seconds)} per step, {cost.tokens_per_second:,.0f} tokens/s; "
        f"limited by {long_name(limit, machine)} ({share:.0%} of the critical path)",
        f"{plan.bytes_per_parameter:.2f} bytes per parameter at rest{_optimizer(plan)}; "
        f"{plan.placement.rounds} round{'s' if plan.placement.rounds > 1 else ''}, "
        f"micro-batch {plan.workload.numerics.micro_batch}, {_residents(plan)}",
        *sweep_lines(result),
        *kept_lines(plan),
        *attention_lines(plan),
        *rank_lines(plan),
        *not_reproducible(plan),
    ]
    return "\n".join([*lines, *wear(result, machine)])


def _optimizer(plan: Plan) -> str:
    name = plan.workload.optimizer
    return "" if name == "adamw" else f" with {TITLES[name]}"


def sweep_lines(result: PlanResult) -> list[str]:
    """Return how sweeps are divided; nothing if the CPU makes all of them in one pass."""
    found, lines = sweep_json(result), []
    both = found["cpu_blocks"] + found["gpu_blocks"]
    cpu, gpu = (format_seconds(found[f"{side}_seconds"]) for side in ("cpu", "gpu"))
    late = found["late_moments_blocks"]
    if found["gpu_blocks"]:
        others = "the CPU sweeps the others" + ("" if late else f" ({cpu})")
        lines.append(
            f"optimizer sweep: {found['gpu_blocks']} of {both} blocks in host memory pass through "
            f"the GPU ({gpu}), {others}"
        )
    if late:
        lines.append(
            f"optimizer sweep: before forward, only the weights of {late} of {both} blocks outside "
            f"HBM are updated; the CPU updates their moments in backward ({cpu} of the CPU in all)"
        )
    return lines


def kept_lines(plan: Plan) -> list[str]:
    """Return how many layers are not recomputed in backward; nothing if all of them are."""
    kept = kept_passes(plan)
    if not any(kept):
        return []
    each = micro_batches_per_round(plan.workload, plan.placement.rounds)
    whole = sum(count == each for count in kept)
    text = f"recompute: {whole} of {len(kept)} layers kept"
    part = [count for count in kept if 0 < count < each]
    if len(part) == 1:
        text += f", and one for {part[0]} of {each} micro-batches"
    elif part:
        text += f", and {len(part)} for some of {each} micro-batches"
    return [text]


def attention_lines(plan: Plan) -> list[str]:
    """Return how many layers are recomputed without attention; nothing if none is."""
    saved = saved_attention(plan)
    if not saved:
        return []
    layers = len(plan.placement.blocks) - 2
    places = ", ".join(f"{count} in {tier.value.upper()}" for tier, count in saved.items())
    return [f"attention: results of {saved.total()} of {layers} layers saved ({places})"]


def saved_attention(plan: Plan) -> Counter[Tier]:
    """Return, by tier, the number of layers whose results of attention are saved.

    Results in DRAM and CXL memory count for the tier with more of them.
    """
    found: Counter[Tier] = Counter()
    for block in plan.placement.blocks:
        home = block.home(Role.ATTENTION)
        if home is not None:
            found[max(Tier, key=home.on)] += 1
    return Counter({tier: found[tier] for tier in Tier if found[tier]})


def kept_passes(plan: Plan) -> list[int]:
    """Return, for each layer, how many micro-batches of a round keep what forward saves."""
    each = micro_batches_per_round(plan.workload, plan.placement.rounds)
    return [min(block.kept, each) for block in plan.placement.blocks[1:-1]]


TRANSPORTS = {"shared": "shared host memory", "collective": "collective calls"}
"""Names of transports for people."""


def rank_lines(plan: Plan) -> list[str]:
    """Return what all ranks of a machine need together; nothing for one rank."""
    ranks = plan.ranks
    if ranks.world == 1:
        return []
    used = ", ".join(
        f"{format_bytes(ranks.local * plan.peak(tier))} of {tier.value}"
        for tier in Tier
        if tier is not Tier.HBM and plan.peak(tier)
    )
    how = TRANSPORTS.get(plan.placement.transport or "collective")
    host = format_bytes(ranks.local * plan.host_nbytes)
    return [
        f"{ranks.world} ranks, connected by {how}; bytes above are those of one rank",
        f"per machine: {used or 'no host memory'}; host memory in all {host}",
    ]


def not_reproducible(plan: Plan) -> list[str]:
    """Return a line that says so if the plan allows kernels that differ from run to run."""
    if plan.workload.numerics.deterministic:
        return []
    # Plan files and checkpoints that do not say are from before the kernels were restricted.
    return [
        "not reproducible: kernels may differ from run to run (--no-deterministic, or a plan or "
        "checkpoint of an earlier version)"
    ]


def wear(result: PlanResult, machine: Machine) -> list[str]:
    """Return what a run writes to NVMe, relative to the rated endurance of the drive in question.

    That is the drive that wears out first, of those that the plan writes to. Other drives of the
    machine do not count.
    """
    written, steps = sum(result.disk_writes.values()), result.plan.workload.steps
    if not written:
        return []
    text = f"{_gigabytes(written)} written to NVMe per step"
    if steps:
        total = written * steps
        # A small total in terabytes would read as 0.0 TB.
        amount = f"{total / 1e12:,.1f} TB" if total >= 1e12 else _gigabytes(total)
        text += f", {amount} in {steps:,} steps"
    rated = {s.path: s.rated_writes for s in machine.storage if s.rated_writes}
    worn = [(written / rated[path], path) for path, written in result.disk_writes.items()
            if path in rated]  # fmt: skip
    if not worn:
        return [text]
    share, path = max(worn)
    drive = f" of {path}" if len(result.disk_writes) > 1 else ""
    endurance = f"the rated endurance{drive} ({rated[path] / 1e12:,.0f} TB)"
    if steps:
        return [f"{text}: {share * steps:.0%} of {endurance}"]
    return [f"{text}; {endurance} is {rated[path] // result.disk_writes[path]:,} steps"]


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 10e9 else f"{nbytes / 1e9:.2g} GB"


def _residents(plan: Plan) -> str:
    blocks = [block for block in plan.placement.blocks if block.homes]
    swept = (block for block in blocks if block.sweep == "gpu" and not block.streams_states)
    resident = sum(not block.is_split for block in swept)
    if resident == len(blocks):
        return "everything in HBM"
    text = f"{resident} of {len(blocks)} blocks resident in HBM"
    split = sum(block.is_split for block in blocks)
    return f"{text}, and what is trained of {split} others" if split else text


def explain(result: PlanResult, inventory: Inventory, name: str) -> RenderableType:
    """Return where one block's roles are stored, and when its operations run."""
    block = inventory.block(name)
    index = inventory.blocks.index(block)
    at = result.plan.placement.blocks[index]
    homes = Table("role", "size", "stored in", box=None, pad_edge=False)
    for home in at.homes:
        places = [f"{_place(share)} {format_bytes(share.nbytes)}" for share in home.shares]
        role = role_name(home.role, result.plan.workload.optimizer)
        homes.add_row(role, format_bytes(home.nbytes), ", ".join(places))
    times = Table("start", "end", "operation", "roles", box=None, pad_edge=False)
    for operation, span in zip(result.cost.schedule.operations, result.cost.spans, strict=True):
        if operation.block == index and span.end > span.start:
            piece = f" (piece {operation.piece + 1})" if operation.piece is not None else ""
            start = format_seconds(span.start) if span.start else "0"
            verb = VERB_NAMES.get(operation.verb, operation.verb)
            roles = ", ".join(ROLE_NAMES[role] for role in operation.roles)
            times.add_row(start, format_seconds(span.end), f"{verb}{piece}", roles)
    updated = {"cpu": "updated by the CPU", "gpu": "updated on the GPU", "none": "frozen"}
    title = f"{name}: {block.parameters():,} parameters, {updated[at.sweep]}"
    title += ", through which its states pass" if at.streams_states else ""
    tables = (homes, times, phase_table(result), memory_table(result.memory))
    return Group(Text(title, style="bold"), *(part for each in tables for part in (each, Text())))


def phase_table(result: PlanResult) -> Table:
    """Return the most memory in use during each phase of the step."""
    used = [tier for tier in Tier if result.plan.peak(tier)]
    table = Table("peak memory during", *(tier.value for tier in used), box=None, pad_edge=False)
    for phase, most in result.peaks.items():
        table.add_row(VERB_NAMES.get(phase, phase), *(format_bytes(most[tier]) for tier in used))
    return table


def memory_table(memory: WorkingMemory) -> Table:
    """Return the working memory of each part, the largest first. The largest decides."""
    title = f"working memory ({memory.origin})"
    table = Table(title, "forward", "backward", "saved", box=None, pad_edge=False)
    for part in sorted(memory.parts, key=lambda part: -part.peak):
        saved = "" if part.saved is None else format_bytes(part.saved)
        table.add_row(part.name, format_bytes(part.forward), format_bytes(part.backward), saved)
    return table


def _place(share: Share) -> str:
    if share.node is not None:
        return f"{share.tier} node {share.node}"
    return f"{share.tier} {share.path}".strip()
