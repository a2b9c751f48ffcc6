"""What can be wrong with a run that a user can mend. Room: show."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.units import format_bytes


class TrainError(PenstockError):
    """A run that cannot begin or go on."""


class OutNotEmptyError(TrainError, FileExistsError):
    """The run's directory holds something already."""

    def __init__(self, path: str, found: Sequence[str]) -> None:
        self.path, self.found = path, tuple(found)
        more = ", ..." if len(found) > 3 else ""
        super().__init__(
            f"{path} is not empty ({', '.join(found[:3])}{more}); continue what is there with "
            f"--resume, or give another --out"
        )


class OutInUseError(TrainError):
    """Another process trains into the same directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path}: another run writes there; wait for it, or give another --out")


class NotResumableError(TrainError):
    """There are checkpoints, but none that a run can go on from."""

    def __init__(self, path: str, newest: str) -> None:
        self.path, self.newest = path, newest
        super().__init__(
            f"{path}: no checkpoint has optimizer state (they were saved with --save-weights-only, "
            f"or it was removed). Begin a new run from its weights instead: penstock train {newest}"
        )


class MissingLoggerError(TrainError):
    """A logger that is not installed."""

    def __init__(self, name: str, package: str) -> None:
        self.name, self.package = name, package
        super().__init__(
            f"--log {name} needs the package {package}: pip install {package}, or leave it out "
            f"(metrics.jsonl is always written)"
        )


class ContextTooLongError(TrainError, ValueError):
    """A context beyond the positions that the model knows."""

    def __init__(self, model: str, *, wanted: int, limit: int) -> None:
        self.model, self.wanted, self.limit = model, wanted, limit
        super().__init__(
            f"--context {wanted} is beyond the {limit} positions of {model}; ask for less, or "
            f"widen them with --model-config max_position_embeddings={wanted} (and the rope "
            f"settings that go with it, such as --model-config rope_theta=1e6)"
        )


class TokenRangeError(TrainError, ValueError):
    """Data with tokens that the model has no embedding for."""

    def __init__(self, *, token: int, vocabulary: int) -> None:
        self.token, self.vocabulary = token, vocabulary
        super().__init__(
            f"the data holds token {token}, but the model's embedding has {vocabulary} rows; "
            f"tokenizer and model do not belong together"
        )


class GpuMemoryError(TrainError, MemoryError):
    """The GPU ran out of memory in the middle of a step."""

    def __init__(self, *, budget: int, free: int, total: int, by_plan: bool) -> None:
        """`by_plan`: the plan's own bound was reached, not the device's."""
        self.budget, self.free, self.total = budget, free, total
        if by_plan:  # a lower budget would lower the bound as well
            advice = "The step wanted more than the plan counted: lower --micro-batch or --context"
        else:
            advice = (
                f"Lower --hbm, say to {format_bytes(int(0.9 * budget))}, or --micro-batch, or end "
                f"what else uses the GPU"
            )
        super().__init__(
            f"the GPU is out of memory: the plan was given {format_bytes(budget)} of its "
            f"{format_bytes(total)}, {format_bytes(free)} are free now. {advice}; then go on from "
            f"the last checkpoint with --resume"
        )


class HostMemoryError(TrainError, MemoryError):
    """The host ran out of memory in the middle of a step."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"out of host memory ({problem}); lower --dram (and --hbm where the CPU computes) or "
            f"--micro-batch, then go on from the last checkpoint with --resume"
        )
