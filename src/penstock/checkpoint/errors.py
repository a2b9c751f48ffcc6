"""Checkpoint errors that a user can act on.

Each message says what failed, how much it needed, how much there was, and what to do next. The
numbers are attributes as well.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from penstock.errors import PenstockError, RecordError
from penstock.units import format_bytes


class CheckpointError(PenstockError):
    """Base class of every error in reading or writing weights and training states."""


class CheckpointWarning(UserWarning):
    """The checkpoint is complete, but something around it needs attention."""


class CorruptShardError(CheckpointError, ValueError):
    """A file is not a valid safetensors file. `tensor` is "" if no single tensor is affected."""

    def __init__(self, path: str, problem: str, *, tensor: str = "") -> None:
        self.path, self.tensor, self.problem = path, tensor, problem
        subject = f"{path}: tensor {_printable(tensor)}" if tensor else path
        super().__init__(f"{subject}: {problem}; download or copy the file again")


class TruncatedShardError(CorruptShardError):
    """A file ends before its last tensor does."""

    def __init__(self, path: str, *, wanted: int, had: int, tensor: str = "") -> None:
        self.wanted, self.had = wanted, had
        problem = (
            f"the file should have {wanted} B ({format_bytes(wanted)}) and has {had} B; "
            f"its download or copy was interrupted"
        )
        super().__init__(path, problem, tensor=tensor)


class CorruptIndexError(CheckpointError, ValueError):
    """An index of shards is invalid."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}; download or copy the file again")


class IncompleteModelFileError(CheckpointError, ValueError):
    """A small file of a model, such as tokenizer.json, is empty or ends too early."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: the file is empty or ends too early, as after a power cut, so it is not "
            f"saved with the model; copy it again from the original model"
        )


class NoModelFilesError(CheckpointError, FileNotFoundError):
    """The directory with a model's tokenizer and other small files does not exist any more."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: the directory that the model was loaded from does not exist any more, so its "
            f"tokenizer cannot be saved with the weights. Create it again, or pass the tokenizer: "
            f"engine.write(folder, tokenizer=tokenizer)"
        )


class NoWeightsError(CheckpointError, FileNotFoundError):
    """A path holds no weights."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class MissingShardError(CheckpointError, FileNotFoundError):
    """Files that an index names do not exist."""

    def __init__(self, path: str, *, missing: Sequence[str], total: int) -> None:
        self.path, self.missing, self.total = path, tuple(missing), total
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        super().__init__(
            f"{path} names {total} files, and {len(missing)} of them are missing: {shown}; "
            f"download or copy them into the same directory"
        )


class PickledWeightsError(CheckpointError, ValueError):
    """The weights are in a format that can run code when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        source = path if os.path.isdir(path) else os.path.dirname(path) or "."
        super().__init__(
            f"{path}: Penstock reads only safetensors, not pickled .bin, .pt or .pth files. If you "
            f'trust the file, convert it once: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('NEW')\", "
            f"copy the tokenizer's files into NEW, and use NEW as the model"
        )


class TensorNotFoundError(CheckpointError, LookupError):
    """The files do not contain a tensor, nor `others`."""

    def __init__(
        self, path: str, tensor: str, *, close: Sequence[str], total: int,
        others: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.path, self.tensor, self.close, self.total = path, tensor, tuple(close), total
        self.others = tuple(others)
        names = f"it has {total} tensors"
        if close:
            names += f", and the closest name is {_printable(close[0])}"
        missing = ", ".join(_printable(name) for name in (tensor, *others[:3]))
        missing += f" and {len(others) - 3} more" if others[3:] else ""
        super().__init__(
            f"{path} has no tensor {missing}; {names}. Check that these weights belong to the "
            f"model that config.json describes"
        )


class TensorMismatchError(CheckpointError, ValueError):
    """A tensor has another dtype or size than the tensor it is read into."""

    def __init__(self, path: str, tensor: str, *, wanted: str, had: str) -> None:
        self.path, self.tensor, self.wanted, self.had = path, tensor, wanted, had
        super().__init__(
            f"{path}: tensor {_printable(tensor)}: expected {wanted}, but the file has {had}"
        )


class ChecksumError(CheckpointError, ValueError):
    """A file or tensor has other bytes than were written. `tensor` is "" for a whole file."""

    def __init__(
        self, path: str, *, expected: str, found: str, tensor: str = "", older: str = ""
    ) -> None:
        self.path, self.tensor, self.older = path, tensor, older
        self.expected, self.found = expected, found
        subject = f"{path}: tensor {_printable(tensor)}" if tensor else path
        folder = os.path.dirname(path)
        use = f"use the older {older}, or another copy" if older else "use another copy"
        super().__init__(
            f"{subject}: the disk returned different bytes than were written: their CRC-32C is "
            f"{found}, and {expected} was written. To continue, {use}; `penstock check {folder}` "
            f"lists everything that is damaged. If you changed the file yourself, remove "
            f"complete.json: the directory is then a model without checksums"
        )


class NonFiniteTensorError(CheckpointError, ValueError):
    """A tensor has NaN or infinity."""

    def __init__(self, path: str, tensor: str) -> None:
        self.path, self.tensor = path, tensor
        super().__init__(f"{path}: tensor {_printable(tensor)}: has NaN or infinity")


class CheckpointReadError(CheckpointError, OSError):
    """The operating system could not read a file."""

    def __init__(self, path: str, errno: int, *, tensor: str = "") -> None:
        self.path, self.tensor = path, tensor
        subject = f"{path}: tensor {_printable(tensor)}" if tensor else path
        super().__init__(f"{subject}: cannot be read: {os.strerror(errno)} (errno {errno})")
        # Set here: OSError(errno, text) would choose a subclass and replace the message.
        self.errno = errno


class CheckpointWriteError(CheckpointError, OSError):
    """The operating system could not write a file. The new checkpoint was removed."""

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        advice = (
            "choose another directory, or remove the model that is there"
            if number == errno.EEXIST
            else "check the disk and its permissions, or choose another directory"
        )
        super().__init__(
            f"{path}: cannot be written: {os.strerror(number)} (errno {number}); earlier "
            f"checkpoints are unchanged. To continue, {advice}"
        )
        self.errno = number


class CheckpointSpaceError(CheckpointError, OSError):
    """The disk has too little free space, before the first step or (`saving`) during a save."""

    def __init__(self, path: str, *, wanted: int, free: int, saving: bool = False) -> None:
        self.path, self.wanted, self.free, self.saving = path, wanted, free, saving
        state = "the disk is full: the save needed" if saving else "checkpoints need"
        unchanged = (
            "Earlier checkpoints are complete, and training can continue. " if saving else ""
        )
        super().__init__(
            f"{path}: {state} {format_bytes(wanted)}, and {format_bytes(free)} are free. "
            f"{unchanged}Free some space, lower --keep, leave out optimizer states with "
            f"--save-weights-only, or choose an --out on another disk"
        )
        self.errno = errno.ENOSPC


class ForeignCheckpointError(CheckpointError, ValueError):
    """A checkpoint in a run's directory was written by another run. An ID may be ""."""

    def __init__(self, path: str, *, run_id: str, found: str) -> None:
        self.path, self.run_id, self.found = path, run_id, found
        out = os.path.dirname(path)
        super().__init__(
            f"{path}: the checkpoint was written by {_named_run(found)}, and {out}/run.yaml "
            f"belongs to {_named_run(run_id)}; move it out of {out}, or resume the run that it "
            f"belongs to. To start a new run from its weights, pass it as the model with another "
            f"--out"
        )


class BaseModelError(CheckpointError, ValueError):
    """An adapter was trained with other frozen weights than those that were loaded."""

    def __init__(self, path: str, *, base: str, found: str) -> None:
        self.path, self.base, self.found = path, base, found
        name = base or "a model that was in memory"
        super().__init__(
            f"{path}: the adapter was trained with the weights of {name}, and those of "
            f"{found or 'the model in memory'} differ from them; use the weights that it was "
            f"trained with"
        )


class AdapterConfigError(CheckpointError, ValueError):
    """An adapter's file has other tensors than its config describes.

    `missing` and `unknown` are the names of tensors, each with the entry of the config that says
    whether the adapter has it.
    """

    def __init__(
        self, path: str, *, config: str, missing: Mapping[str, str], unknown: Mapping[str, str]
    ) -> None:
        self.path, self.config = path, config
        self.missing, self.unknown = dict(missing), dict(unknown)
        problems = []
        if missing:
            problems.append(f"{config} describes tensors that the file lacks: {_listed(missing)}")
        if unknown:
            problems.append(f"{config} does not describe these tensors: {_listed(unknown)}")
        super().__init__(
            f"{path}: {'; '.join(problems)}. Use the config that the adapter was saved with"
        )


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is already a complete checkpoint of this step. It was not changed."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step
        super().__init__(
            f"{path}: there is already a complete checkpoint of step {step}; it was not changed. "
            f"Continue with --resume, or choose another --out"
        )


class DamagedCheckpointError(CheckpointError, ValueError):
    """A directory is not a complete checkpoint."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class IncompleteCheckpointError(CheckpointError):
    """Another program removed or changed files of a new checkpoint while it was saved."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"{path}: {problem}, so the checkpoint is not complete. Another program changes files "
            f"there: find it and stop it"
        )


class DamagedOnRankError(CheckpointError):
    """Another rank found that a checkpoint is damaged: every rank reads only a part of it."""

    def __init__(self, rank: int, problem: str) -> None:
        self.rank, self.problem = rank, problem
        super().__init__(f"rank {rank}: {problem}")


class SaveOnRankError(CheckpointError):
    """Another rank could not write its part of a checkpoint, which was removed."""

    def __init__(self, rank: int, problem: str) -> None:
        self.rank, self.problem = rank, problem
        super().__init__(f"rank {rank}: {problem}")


SAVE_FAILURES = (
    CheckpointSpaceError,
    CheckpointWriteError,
    IncompleteCheckpointError,
    SaveOnRankError,
)
"""Errors of a save after which training can continue: the next save may succeed."""

UNREADABLE = (
    ChecksumError,
    CorruptShardError,
    CorruptIndexError,
    MissingShardError,
    NoWeightsError,
    CheckpointReadError,
    DamagedCheckpointError,
    DamagedOnRankError,
)
"""Errors that say that a checkpoint is damaged. An older one may be intact."""


class StateError(CheckpointError, RecordError):
    """A training state is invalid."""


def _listed(tensors: Mapping[str, str]) -> str:
    """Return the first tensors of each entry of a config."""
    by_entry: dict[str, list[str]] = {}
    for name, entry in tensors.items():
        by_entry.setdefault(entry, []).append(_printable(name))
    return ", ".join(
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''} ({entry})"
        for entry, names in by_entry.items()
    )


def _named_run(run_id: str) -> str:
    return f"the run {_printable(run_id)}" if run_id else "a run without an ID"


def _printable(name: str) -> str:
    """Return a name from a file in a form that is safe to print, at most 120 characters long."""
    text = repr(name) if not name.isprintable() or not name else name
    return text if len(text) <= 120 else f"{text[:117]}..."
