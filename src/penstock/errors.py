"""What can go wrong that a user can mend. Room: names.

Each says which thing, how much it wanted, how much there was and what to do next; the numbers are
attributes too. A mistake of ours is an AssertionError, never one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.units import format_bytes, format_bytes_up


class PenstockError(Exception):
    """The root of all of them."""


class PlacementError(PenstockError):
    """Memory could not be had where it was asked for."""


class UnknownNodeError(PlacementError, ValueError):
    """The machine has no such node."""

    def __init__(self, node: int, known: Sequence[int]) -> None:
        self.node, self.known = node, tuple(known)
        super().__init__(f"there is no node {node}; this machine has {_nodes(known)}")


class OfflineNodeError(PlacementError):
    """The node exists but has no memory in use by the kernel."""

    def __init__(self, node: int, online: Sequence[int]) -> None:
        self.node, self.online = node, tuple(online)
        super().__init__(
            f"node {node} has no memory online; {_nodes(online)} have. "
            f"`daxctl online-memory` brings a CXL device's memory online"
        )


class ForbiddenNodeError(PlacementError):
    """The process is confined to other nodes."""

    def __init__(self, node: int, allowed: Sequence[int]) -> None:
        self.node, self.allowed = node, tuple(allowed)
        super().__init__(
            f"this process may not use node {node}: it is confined to {_nodes(allowed)} "
            f"(cpuset or numactl); widen cpuset.mems or place on one of those"
        )


class NodeFullError(PlacementError, MemoryError):
    """A node has too little memory left."""

    def __init__(self, node: int, *, wanted: int, free: int, others: Mapping[int, int]) -> None:
        self.node, self.wanted, self.free = node, wanted, free
        self.roomier = {k: v for k, v in others.items() if v >= wanted and k != node}
        if self.roomier:
            best = max(self.roomier, key=lambda k: self.roomier[k])
            way_out = f"node {best} has {format_bytes(self.roomier[best])}"
        else:
            way_out = "no other node has that much; ask for less or stripe over several nodes"
        super().__init__(
            f"{format_bytes(wanted)} wanted on node {node}, which has {format_bytes(free)} free; "
            f"{way_out}"
        )


class MemoryLimitError(PlacementError, MemoryError):
    """A control group would kill the process for taking that much."""

    def __init__(self, *, wanted: int, free: int, limit: int) -> None:
        self.wanted, self.free, self.limit = wanted, free, limit
        super().__init__(
            f"{format_bytes(wanted)} wanted, but the control group's limit of "
            f"{format_bytes(limit)} leaves {format_bytes(free)}; raise memory.max or ask for less"
        )


class MapError(PlacementError, MemoryError):
    """The kernel gave no address space or no pages."""

    def __init__(self, *, wanted: int, errno: int, reason: str, advice: str) -> None:
        self.wanted, self.errno = wanted, errno
        super().__init__(f"could not map {format_bytes(wanted)}: {reason}; {advice}")


class HugePagesError(PlacementError, MemoryError):
    """Too few reserved huge pages, on one node or (None) in all."""

    def __init__(self, *, wanted: int, free: int, unit: int, node: int | None) -> None:
        self.wanted, self.free, self.node = wanted, free, node
        where = "here" if node is None else f"on node {node}"
        path = "/proc/sys/vm/nr_hugepages"
        if node is not None:
            path = f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"
        super().__init__(
            f"{wanted} reserved huge pages of {format_bytes(unit)} wanted {where}, {free} free; "
            f"reserve them with `echo N > {path}` or use huge='thp'"
        )


class PlacementPermissionError(PlacementError, PermissionError):
    """The kernel, or a container's filter, refused the call."""

    def __init__(self, call: str, errno: int) -> None:
        self.call = call
        PermissionError.__init__(
            self,
            errno,
            f"{call} is not permitted here; in a container run with --cap-add SYS_NICE or a "
            f"seccomp profile that allows {call}",
        )


class MoveError(PlacementError):
    """Some pages stayed where they were."""

    def __init__(self, *, wanted: int, reason: str) -> None:
        self.wanted = wanted
        super().__init__(f"could not move {format_bytes(wanted)}: {reason}")


class PinError(PlacementError):
    """The GPU's driver refused to register memory."""

    def __init__(self, *, wanted: int, code: int, name: str) -> None:
        self.wanted, self.code = wanted, code
        super().__init__(
            f"CUDA could not register {format_bytes(wanted)} of host memory ({name}); "
            f"free host memory or use pinned=False, at a quarter of the copy speed or less"
        )


class SizeError(PlacementError, ValueError):
    """A shape or size that holds nothing."""


class DtypeError(PlacementError, TypeError):
    """An element type that cannot be laid over plain memory."""


class ArenaFullError(PlacementError, MemoryError):
    """An arena has too little left."""

    def __init__(self, *, name: str, wanted: int, free: int, capacity: int) -> None:
        self.name, self.wanted, self.free, self.capacity = name, wanted, free, capacity
        super().__init__(
            f"{name} needs {format_bytes(wanted)} ({wanted} B, padding included) in an arena of "
            f"{format_bytes(capacity)} that has {format_bytes(free)} ({free} B) left; "
            f"make the arena larger or reset it"
        )


class ArenaBusyError(PlacementError):
    """An arena was reset while tensors still lie in it."""

    def __init__(self, live: int) -> None:
        self.live = live
        super().__init__(f"{live} tensors of this arena are still alive; drop them, then reset")


class RecordError(PenstockError, ValueError):
    """A file, or a value made by hand, that does not hold what its form asks for."""

    def __init__(self, field: str, problem: str, *, where: str = "") -> None:
        self.field, self.problem, self.where = field, problem, where
        super().__init__(": ".join(part for part in (where, field, problem) if part))


class MachineError(RecordError):
    """A machine description that does not hold together."""


class InventoryError(RecordError):
    """A description of a model that does not hold together."""


class WorkloadError(RecordError):
    """A piece of work that makes no sense, or not for this model."""


class PlanError(RecordError):
    """A plan that does not hold together, or is for another model or machine."""


class SurveyError(PenstockError, ValueError):
    """A model whose blocks could not be found."""


class InfeasibleError(PenstockError, ValueError):
    """No placement fits the budgets."""

    def __init__(self, problem: str, *, least: Mapping[str, int | None]) -> None:
        self.problem, self.least = problem, dict(least)
        rows = [
            f"with --{tier} {format_bytes_up(nbytes)} or more"
            for tier, nbytes in self.least.items()
            if nbytes is not None
        ]
        way_out = f"; it fits {', or '.join(rows)}" if rows else ""
        super().__init__(f"{problem}{way_out}")


class ProbeError(PenstockError):
    """Something could not be measured."""


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) != 1 else ''} {', '.join(map(str, nodes)) or 'none'}"


class SweepError(PenstockError):
    """An optimizer step that was not, or not wholly, taken."""


class SweepInputError(SweepError, ValueError):
    """A buffer, or a setting, that the sweep cannot work with. Nothing was changed."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"{name} {problem}")


class NonFiniteGradientError(SweepError, ArithmeticError):
    """A gradient holds an infinity or a NaN. Nothing was changed."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        super().__init__(
            f"the gradient of {name} is not finite, first at element {index}; nothing was updated. "
            f"Skip this step, lower the loss scale or the learning rate, or pass "
            f"nonfinite='trust' to step all the same"
        )


class NonFiniteMasterError(SweepError, ArithmeticError):
    """A master would have become infinite, NaN or too large for its weight."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        super().__init__(
            f"the step would make a weight of {name} infinite or NaN, first at element {index}; "
            f"such elements kept their weight and moments, all others were updated. Lower the "
            f"learning rate, or go back to the last checkpoint"
        )


class EngineError(PenstockError):
    """Training that cannot go on."""


class DeviceMemoryError(EngineError, MemoryError):
    """The GPU has too little memory left."""

    def __init__(self, what: str, *, wanted: int, free: int, total: int) -> None:
        self.what, self.wanted, self.free, self.total = what, wanted, free, total
        super().__init__(
            f"{format_bytes(wanted)} of GPU memory wanted for {what}, {format_bytes(free)} of "
            f"{format_bytes(total)} free; lower --hbm, or end what else uses the GPU"
        )


class EngineStateError(RecordError, EngineError):
    """A checkpoint that this engine cannot continue from."""


class UnsupportedModelError(EngineError, ValueError):
    """A model that can be planned for but not trained."""


class BatchError(EngineError, ValueError):
    """A batch that the engine was not prepared for."""


class NonFiniteLossError(EngineError, ArithmeticError):
    """The loss or a gradient is infinite or NaN. No weight was changed by this batch."""

    def __init__(self, problem: str, *, step: int) -> None:
        self.problem, self.step = problem, step
        super().__init__(
            f"step {step}: {problem}; this batch changed no weight. Look at the batch, lower the "
            f"learning rate, or go back to an earlier checkpoint"
        )
