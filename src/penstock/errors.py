"""Exceptions for failures that a user can fix.

Each message says what failed, how much it needed, how much there was, and what to do next. The
numbers are also attributes of the exception. A bug in Penstock raises an AssertionError instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.units import MiB, format_bytes


class PenstockError(Exception):
    """Base class of every Penstock exception."""


class PlacementError(PenstockError):
    """Memory could not be allocated where it was requested."""


class UnknownNodeError(PlacementError, ValueError):
    """The machine has no NUMA node with this number."""

    def __init__(self, node: int, known: Sequence[int]) -> None:
        self.node, self.known = node, tuple(known)
        super().__init__(f"there is no node {node}; this machine has {_nodes(known)}")


class OfflineNodeError(PlacementError):
    """The node exists, but the OS has none of its memory online."""

    def __init__(self, node: int, online: Sequence[int]) -> None:
        self.node, self.online = node, tuple(online)
        super().__init__(
            f"node {node} has no memory online; memory is online on {_nodes(online)}. "
            f"Run `daxctl online-memory` to bring a CXL device's memory online"
        )


class ForbiddenNodeError(PlacementError):
    """The process is not allowed to use this node."""

    def __init__(self, node: int, allowed: Sequence[int]) -> None:
        self.node, self.allowed = node, tuple(allowed)
        super().__init__(
            f"this process is not allowed to use node {node}: a cpuset or numactl confines it to "
            f"{_nodes(allowed)}; extend cpuset.mems, or place memory on one of those nodes"
        )


class NodeFullError(PlacementError, MemoryError):
    """A node has too little free memory."""

    def __init__(self, node: int, *, wanted: int, free: int, others: Mapping[int, int]) -> None:
        self.node, self.wanted, self.free = node, wanted, free
        self.roomier = {k: v for k, v in others.items() if v >= wanted and k != node}
        if self.roomier:
            best = max(self.roomier, key=lambda k: self.roomier[k])
            advice = f"node {best} has {format_bytes(self.roomier[best])} free"
        else:
            advice = (
                "no other node has that much free; request less memory, or stripe it over "
                "several nodes"
            )
        super().__init__(
            f"{format_bytes(wanted)} requested on node {node}, which has {format_bytes(free)} "
            f"free; {advice}"
        )


class MemoryLimitError(PlacementError, MemoryError):
    """The process would exceed its memory limit, and get killed if a control group sets it."""

    def __init__(
        self, *, wanted: int, free: int, limit: int, name: str, what: str = "requested"
    ) -> None:
        self.wanted, self.free, self.limit, self.name = wanted, free, limit, name
        super().__init__(
            f"{format_bytes(wanted)} {what}, but the memory limit of this process, "
            f"{format_bytes(limit)}, leaves {format_bytes(free)}; raise {name}, or request less "
            f"memory"
        )


class MapError(PlacementError, MemoryError):
    """The OS could not map the memory: no address space or no pages."""

    def __init__(self, *, wanted: int, errno: int, reason: str, advice: str) -> None:
        self.wanted, self.errno = wanted, errno
        super().__init__(f"could not map {format_bytes(wanted)}: {reason}; {advice}")


class HugePagesError(PlacementError, MemoryError):
    """Too few reserved huge pages are free, on one node or (`node=None`) on the machine."""

    def __init__(self, *, wanted: int, free: int, unit: int, node: int | None) -> None:
        self.wanted, self.free, self.node = wanted, free, node
        location = "on this machine" if node is None else f"on node {node}"
        path = "/proc/sys/vm/nr_hugepages"
        if node is not None:
            path = f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"
        super().__init__(
            f"{wanted} reserved huge pages of {format_bytes(unit)} requested {location}, {free} "
            f"free; reserve more with `echo N > {path}`, or use huge='thp'"
        )


class PlacementPermissionError(PlacementError, PermissionError):
    """The OS or a container's seccomp profile refused a system call."""

    def __init__(self, call: str, errno: int) -> None:
        self.call = call
        PermissionError.__init__(
            self,
            errno,
            f"{call} is not permitted here; in a container, run with --cap-add SYS_NICE or with "
            f"a seccomp profile that allows {call}",
        )


class MoveError(PlacementError):
    """Some pages could not be moved to another node."""

    def __init__(self, *, wanted: int, reason: str) -> None:
        self.wanted = wanted
        super().__init__(f"could not move {format_bytes(wanted)}: {reason}")


class PinError(PlacementError):
    """The GPU driver could not register (pin) host memory."""

    def __init__(self, *, wanted: int, code: int, name: str) -> None:
        self.wanted, self.code = wanted, code
        super().__init__(
            f"CUDA could not register {format_bytes(wanted)} of host memory ({name}); free some "
            "host memory, or use pinned=False, which copies at a quarter of the speed or less"
        )


class SizeError(PlacementError, ValueError):
    """A shape or size that is not valid for an allocation."""


class DtypeError(PlacementError, TypeError):
    """A data type that cannot be backed by plain memory."""


class ArenaFullError(PlacementError, MemoryError):
    """An arena has too little space left."""

    def __init__(self, *, name: str, wanted: int, free: int, capacity: int) -> None:
        self.name, self.wanted, self.free, self.capacity = name, wanted, free, capacity
        super().__init__(
            f"{name} needs {format_bytes(wanted)} ({wanted} B, padding included) in an arena of "
            f"{format_bytes(capacity)} that has {format_bytes(free)} ({free} B) left; "
            f"make the arena larger or reset it"
        )


class ArenaBusyError(PlacementError):
    """An arena was reset while tensors still use its memory."""

    def __init__(self, live: int) -> None:
        self.live = live
        super().__init__(
            f"{live} tensors of this arena are still alive; delete them before the reset"
        )


class RecordError(PenstockError, ValueError):
    """A file or value with a missing, unknown or invalid field."""

    def __init__(self, field: str, problem: str, *, where: str = "") -> None:
        self.field, self.problem, self.where = field, problem, where
        super().__init__(": ".join(part for part in (where, field, problem) if part))


class MachineError(RecordError):
    """A machine description that is invalid or inconsistent."""


class InventoryError(RecordError):
    """A model inventory that is invalid or inconsistent."""


class WorkloadError(RecordError):
    """A workload that is invalid, or that does not suit the model."""


class PlanError(RecordError):
    """A plan that is inconsistent, or that was made for another model or machine."""


class SettingsError(RecordError):
    """A setting of a run is unknown or has an invalid value."""


class SurveyError(PenstockError, ValueError):
    """A model whose transformer blocks could not be found."""


class InfeasibleError(PenstockError, ValueError):
    """No placement fits the memory budgets."""

    def __init__(self, problem: str, *, least: Mapping[str, int | None], advice: str = "") -> None:
        self.problem, self.least = problem, dict(least)
        """What does not fit, and for each tier the smallest budget that is enough: None if no
        budget of that tier alone is. The machine may have less than that."""
        self.advice = advice
        """Changes that would make it fit, as text for the user."""
        super().__init__(f"{problem}; {advice}" if advice else problem)


class ProbeError(PenstockError):
    """A measurement could not be made."""


class SweepError(PenstockError):
    """An optimizer step that failed, completely or for some elements."""


class SweepInputError(SweepError, ValueError):
    """A buffer or setting that the optimizer sweep cannot use. Nothing was updated."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"{name} {problem}")


class NonFiniteGradientError(SweepError, ArithmeticError):
    """A gradient contains an infinity or a NaN. Nothing was updated."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        super().__init__(
            f"the gradient of {name} is not finite, first at element {index}; nothing was updated. "
            f"Skip this step, lower the loss scale or the learning rate, or pass "
            f"nonfinite='trust' to apply the step anyway"
        )


class NonFiniteMasterError(SweepError, ArithmeticError):
    """The step would make a master weight infinite, NaN, or too large for its 16-bit weight."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        super().__init__(
            f"the step would make a weight of {name} infinite or NaN, first at element {index}; "
            f"such elements kept their weight and moments, and all others were updated. Lower the "
            f"learning rate, or return to the last checkpoint"
        )


class EngineError(PenstockError):
    """Training cannot continue."""


class PeerLostError(EngineError):
    """Another rank has failed or does not answer, so this one cannot continue.

    `rank` is the number of that rank, and `host` the name of its machine; None if they are not
    known, or if there is only one machine.
    """

    def __init__(self, rank: int | None, problem: str, host: str | None = None) -> None:
        self.rank, self.problem, self.host = rank, problem, host
        who = "another rank" if rank is None else f"rank {rank}"
        who = who if host is None else f"{who} on {host}"
        super().__init__(
            f"lost {who}: {problem}. Nothing is lost but the work since the last checkpoint: "
            f"resume from it"
        )


class RankFailedError(EngineError):
    """Another rank could not do its part, so no rank continues."""

    def __init__(self, rank: int, problem: str) -> None:
        self.rank, self.problem = rank, problem
        super().__init__(f"rank {rank}: {problem}")


class DeviceMemoryError(EngineError, MemoryError):
    """The GPU has too little free memory, or the plan allows too little of it.

    `holders` maps other processes, such as "process 4711 (python)", to their bytes of GPU memory.
    """

    def __init__(
        self,
        what: str,
        *,
        wanted: int | None,
        free: int,
        total: int,
        budget: int | None = None,
        allowed: int | None = None,
        allocated: int = 0,
        reserved: int = 0,
        holders: Mapping[str, int] | None = None,
        largest: int | None = None,
    ) -> None:
        self.what, self.wanted, self.free, self.total = what, wanted, free, total
        self.budget, self.allowed = budget, allowed
        """The HBM budget, and the part of it that PyTorch may allocate; None without a plan."""
        self.allocated, self.reserved = allocated, reserved
        """Bytes of this process's tensors, and of what PyTorch holds for them."""
        self.holders = dict(holders or {})
        self.largest = largest
        """The largest HBM budget that the GPU has memory for now."""
        # The driver still has what the plan leaves, so the plan's own limit was reached. A lower
        # budget would lower that limit as well, and not help.
        self.by_plan = allowed is not None and free >= allowed - reserved
        size = "memory" if wanted is None else f"{format_bytes(wanted)} of GPU memory"
        super().__init__(
            f"cannot allocate {size} for {what}: {'; '.join(self._numbers())}; {self._advice()}"
        )

    def _numbers(self) -> list[str]:
        numbers = []
        if self.allowed is not None and self.budget is not None:
            numbers.append(
                f"the plan allows PyTorch {format_bytes(self.allowed)} of the HBM budget of "
                f"{format_bytes(self.budget)}"
            )
        if self.reserved:
            numbers.append(
                f"this process has allocated {format_bytes(self.allocated)} and reserved "
                f"{format_bytes(self.reserved)}"
            )
        numbers.append(f"{format_bytes(self.free)} of {format_bytes(self.total)} is free")
        others = sorted(self.holders.items(), key=lambda holder: -holder[1])
        numbers += [f"{name} holds {format_bytes(nbytes)}" for name, nbytes in others]
        return numbers

    def _advice(self) -> str:
        if self.by_plan:
            return (
                "this needs more than the plan reserved: raise --hbm, or lower --micro-batch or "
                "--context"
            )
        stop = "stop other programs that use the GPU"
        if self.largest is None:
            return f"lower --hbm, or {stop}"
        if self.largest <= 0:
            return stop
        return f"{stop}, or plan with --hbm {self.largest // MiB}MiB or less"


class NotReproducibleError(EngineError):
    """An operation of the model or the loss has no deterministic kernel."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        super().__init__(
            f"{operation} has no deterministic kernel on this device, so the run could not be "
            f"reproduced; to train anyway, use --no-deterministic, or deterministic=False in Python"
        )


class EngineStateError(RecordError, EngineError):
    """A checkpoint that this engine cannot resume from."""


class UnsupportedModelError(EngineError, ValueError):
    """A model that Penstock can plan for but cannot train."""


class ModelRestoreError(EngineError, MemoryError):
    """The host has too little memory to give a model its trained weights."""

    def __init__(self, model: str, *, wanted: int, free: int) -> None:
        self.model, self.wanted, self.free = model, wanted, free
        super().__init__(
            f"the trained weights of the {model} need {format_bytes(wanted)} of host memory, and "
            f"{format_bytes(free)} are free. Save them with engine.write(folder) before "
            f"engine.close(), and load them with AutoModelForCausalLM.from_pretrained(folder)"
        )


class SelfCheckError(EngineError):
    """The engine does not train a small twin of the model as plain transformers and torch do.

    `tensor` names the first tensor that differs, `difference` says by how much of its size, and
    `limit` how much of that rounding explains. They are empty if the twin could not be trained.
    """

    def __init__(
        self,
        model: str,
        where: str,
        problem: str,
        *,
        tensor: str = "",
        difference: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        self.model, self.where, self.problem = model, where, problem
        self.tensor, self.difference, self.limit = tensor, difference, limit
        super().__init__(
            f"the self-check of {model} {where} failed: {problem}. Penstock would train this model "
            f"wrongly; please report it with this message. --no-self-check (self_check=False in "
            f"Python) trains anyway"
        )


class BatchError(EngineError, ValueError):
    """A batch that does not match the workload the engine was prepared for."""


class NonFiniteLossError(EngineError, ArithmeticError):
    """The loss or a gradient is infinite or NaN. This batch changed no weight."""

    def __init__(self, problem: str, *, step: int) -> None:
        self.problem, self.step = problem, step
        super().__init__(
            f"step {step}: {problem}; this batch changed no weight. Inspect the batch, lower the "
            f"learning rate, or return to an earlier checkpoint"
        )


class LossScaleError(EngineError, ArithmeticError):
    """Gradients overflow fp16 even at the lowest loss scale. These batches changed no weight."""

    def __init__(self, *, overflows: int, scale: float) -> None:
        self.overflows, self.scale = overflows, scale
        super().__init__(
            f"the last {overflows} steps overflowed fp16 at the lowest loss scale of {scale:g} and "
            f"were skipped, so the model no longer learns: its activations or gradients exceed "
            f"65,504, the largest number of fp16. Start again with --dtype bf16 (dtype='bf16' in "
            f"Python), or return to an earlier checkpoint and lower the learning rate"
        )


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) != 1 else ''} {', '.join(map(str, nodes)) or 'none'}"
