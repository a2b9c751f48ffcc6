"""Errors of a run that the user can fix, and the files that a failed step leaves."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.durable_files import replace_file
from penstock.errors import PenstockError

if TYPE_CHECKING:
    import torch

_HOST_OUT_OF_MEMORY = "can't allocate memory"
"""Part of torch's message when the host has too little memory; torch has no exception for it."""


class TrainError(PenstockError):
    """A run cannot start or continue."""


class OutNotEmptyError(TrainError, FileExistsError):
    """The output directory of a new run is not empty."""

    def __init__(self, path: str, found: Sequence[str]) -> None:
        self.path, self.found = path, tuple(found)
        more = ", ..." if len(found) > 3 else ""
        super().__init__(
            f"{path} is not empty ({', '.join(found[:3])}{more}); continue the run there with "
            f"--resume, or choose another --out"
        )


class OutNotADirectoryError(TrainError, NotADirectoryError):
    """A file, or a link to nothing, has the name of the output directory."""

    def __init__(self, path: str, found: str) -> None:
        self.path, self.found = path, found
        what = "a link to nothing" if Path(found).is_symlink() else "not a directory"
        where = "" if found == path else f", which is in the path {path}"
        super().__init__(f"{found} is {what}{where}; remove it, or choose another --out")


class OutInUseError(TrainError):
    """Another process trains into the same directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: another run writes there; wait until it ends, or choose another --out"
        )


class OutLostError(TrainError):
    """The output directory was removed or moved during the run, and cannot be used any more."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"{path} {problem}; the run cannot save there, and its earlier checkpoints are "
            f"wherever that directory is. While the run lasts, put the directory back or remove "
            f"what has its name: the next save tries again"
        )


class OutNotSharedError(TrainError):
    """The ranks of a run do not have the same output directory."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        super().__init__(
            f"{path} on rank {rank} is not the directory of rank 0: a file that rank 0 wrote there "
            f"does not appear. Every rank writes a part of each checkpoint, so several machines "
            f"need an --out on a file system that all of them mount at the same path"
        )


class RanksLostError(TrainError):
    """Processes of a run ended without a message of their own.

    `exit_codes` has the exit code of each, negative for a signal, by rank. `problem` is what other
    ranks noticed, or "".
    """

    def __init__(self, exit_codes: Mapping[int, int], problem: str) -> None:
        self.exit_codes, self.problem = dict(exit_codes), problem
        killed = [
            f"rank {rank} was killed by {signal.Signals(-code).name}"
            for rank, code in exit_codes.items()
            if code < 0
        ]
        ended = [f"rank {rank} ended with exit code {code}" for rank, code in exit_codes.items()]
        advice = "Continue from the last checkpoint with --resume"
        text = problem or f"{', '.join(ended) or 'the ranks ended'} without a message. {advice}"
        if killed:
            text = f"{', '.join(killed)}, so the other ranks have ended, too. "
            if -signal.SIGKILL in exit_codes.values():
                text += (
                    "The kernel sends SIGKILL when host memory runs out (see `dmesg`): lower "
                    "--dram in that case. "
                )
            text += advice
        super().__init__(text)


class NotResumableError(TrainError):
    """None of the checkpoints has optimizer states."""

    def __init__(self, path: str, newest: str, damaged: Sequence[Exception] = ()) -> None:
        self.path, self.newest, self.damaged = path, newest, tuple(damaged)
        if damaged:
            reasons = "; ".join(map(str, damaged))
            problem = f"{reasons}. The complete checkpoints have no optimizer states"
            repair = "Copy the damaged file back if you have it, or start"
        else:
            problem = (
                f"{path}: no checkpoint has optimizer states (they were saved with "
                f"--save-weights-only, or the states were deleted)"
            )
            repair = "Start"
        super().__init__(
            f"{problem}. {repair} a new run from the newest weights instead: penstock train "
            f"{newest}"
        )


class ModelChangedError(TrainError):
    """A resume names another model than the run has."""

    def __init__(self, path: str, *, model: str, given: str) -> None:
        self.path, self.model, self.given = path, model, given
        super().__init__(
            f"{path} is a run of {model}, and you passed {given}. Leave the model out to continue, "
            f"or choose another --out to start a new run"
        )


class AdapterChangedError(TrainError):
    """A resume adds an adapter to a run that trains all parameters, or takes it away.

    `saved` and `given` are the options of `--lora`; "" without one.
    """

    def __init__(self, path: str, *, model: str, saved: str, given: str) -> None:
        self.path, self.model, self.saved, self.given = path, model, saved, given
        if given:
            text = (
                f"{path}: this run trains all parameters; --lora cannot be added on resume. Leave "
                f"it out, or start a new run: penstock train {model} --lora {given} --out NEW"
            )
        else:
            text = (
                f"{path}: this run trains a LoRA adapter; it cannot continue without one. Resume "
                f"with --lora {saved}, or start a new run: penstock train {model} --out NEW"
            )
        super().__init__(text)


class TrainedTensorsError(TrainError):
    """A resume has other tensors than the checkpoint, or trains others.

    `changes` says which settings differ, as far as that is known.
    """

    def __init__(self, path: str, changes: Sequence[str]) -> None:
        self.path, self.changes = path, tuple(changes)
        reason = "; ".join(changes) or "the config of the model, or --blocks, has changed"
        super().__init__(
            f"{path}: the checkpoint has other tensors than this model, or others of them are "
            f"trained: {reason}. Resume with the former settings, or choose another --out to start "
            f"a new run"
        )


class BareModelError(TrainError):
    """A model directory has a config but no weights."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path} has a config but no weights; pass --init random to start from random weights, "
            f"or copy the model's .safetensors files there"
        )


class MissingTrackerError(TrainError):
    """An experiment tracker is not installed."""

    def __init__(self, name: str, package: str) -> None:
        self.name, self.package = name, package
        super().__init__(
            f"--log {name} needs the package {package}: pip install {package}, or leave --log out "
            f"(metrics.jsonl is always written)"
        )


class TrackerStartError(TrainError):
    """An experiment tracker could not start or continue its run."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(
            f"--log {name}: the tracker could not start: {reason}. Fix that, or leave {name} out "
            f"of --log (metrics.jsonl is always written); then start again with --resume"
        )


class NoUpdateError(TrainError):
    """The run is over, and none of its steps changed a weight."""

    def __init__(self, path: str, *, steps: int, skipped: int) -> None:
        self.path, self.steps, self.skipped = path, steps, skipped
        reason = (
            f"{skipped} of {steps} were skipped because a loss or gradient was not finite"
            if skipped
            else f"the gradient was zero in all {steps}"
        )
        super().__init__(
            f"no step changed a weight: {reason}. The checkpoint in {path} has the weights that "
            f"training started from. Check the data with `penstock data show`, then --freeze and "
            f"--dtype"
        )


class ContextTooLongError(TrainError, ValueError):
    """The context is longer than the model's position embeddings."""

    def __init__(self, model: str, *, wanted: int, limit: int) -> None:
        self.model, self.wanted, self.limit = model, wanted, limit
        super().__init__(
            f"--context {wanted} exceeds the {limit} positions of {model}; use a shorter context, "
            f"or extend the positions with --model-config max_position_embeddings={wanted} (and "
            f"the matching rope settings, such as --model-config rope_theta=1e6)"
        )


class HostMemoryError(TrainError, MemoryError):
    """The host ran out of memory during a step."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"the host is out of memory ({problem}); lower --dram (and --hbm if the CPU computes) "
            f"or --micro-batch, then continue from the last checkpoint with --resume"
        )


@contextlib.contextmanager
def explain_host_out_of_memory() -> Iterator[None]:
    """Replace torch's error for too little host memory by one that names the budget to lower."""
    try:
        yield
    except RuntimeError as failed:
        if _HOST_OUT_OF_MEMORY not in str(failed):
            raise
        raise HostMemoryError(str(failed).splitlines()[0]) from failed


def save_bad_batch(
    out: Path, step: int, batch: Mapping[str, torch.Tensor], decode: Callable[[Any], str]
) -> Path:
    """Save the batch of a failed step as tensors and, in a second file, as text."""
    from safetensors.torch import save_file

    path = out / f"bad-batch-{step:06d}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in batch.items()}, path)
    rows = [
        f"--- row {number}\n{decode(row.tolist())}\n"
        for number, row in enumerate(batch["input_ids"])
    ]
    replace_file(path.with_suffix(".txt"), "".join(rows))
    return path
