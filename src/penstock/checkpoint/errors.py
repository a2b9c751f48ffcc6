"""What can go wrong with files of weights that a user can mend. Room: names.

Like penstock.errors: which thing, how much it wanted, how much there was, what to do next; the
numbers are attributes too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from penstock.errors import PenstockError, RecordError
from penstock.units import format_bytes


class CheckpointError(PenstockError):
    """Weights or states could not be read or kept. Every error here is one."""


class CheckpointWarning(UserWarning):
    """The checkpoint is whole, but something beside it is not as it should be."""


class CorruptShardError(CheckpointError, ValueError):
    """A file that is not the safetensors file it should be. `tensor` may be ""."""

    def __init__(self, path: str, problem: str, *, tensor: str = "") -> None:
        self.path, self.tensor, self.problem = path, tensor, problem
        what = f"{path}: tensor {_show(tensor)}" if tensor else path
        super().__init__(f"{what}: {problem}; download or copy the file again")


class TruncatedShardError(CorruptShardError):
    """A file that ends before its last tensor does."""

    def __init__(self, path: str, *, wanted: int, had: int, tensor: str = "") -> None:
        self.wanted, self.had = wanted, had
        problem = (
            f"the file should have {wanted} B ({format_bytes(wanted)}) and has {had} B; "
            f"its copying or download was cut short"
        )
        super().__init__(path, problem, tensor=tensor)


class CorruptIndexError(CheckpointError, ValueError):
    """An index of shards that cannot be followed."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}; download or copy the file again")


class NoWeightsError(CheckpointError, FileNotFoundError):
    """A place where there are no weights."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class MissingShardError(CheckpointError, FileNotFoundError):
    """Files that the index names and that are not there."""

    def __init__(self, path: str, *, missing: Sequence[str], total: int) -> None:
        self.path, self.missing, self.total = path, tuple(missing), total
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        super().__init__(
            f"{path} names {total} files of which {len(missing)} are missing: {shown}; download or "
            f"copy them into the same directory"
        )


class PickledWeightsError(CheckpointError, ValueError):
    """Weights in a format that runs code when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        source = path if os.path.isdir(path) else os.path.dirname(path) or "."
        super().__init__(
            f"{path}: Penstock reads safetensors only, not pickled .bin, .pt or .pth files. "
            f'Convert once, if you trust them: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('NEW')\", "
            f"and give NEW with the tokenizer's files copied into it"
        )


class TensorNotFoundError(CheckpointError, LookupError):
    """A tensor that the files do not hold."""

    def __init__(self, path: str, tensor: str, *, close: Sequence[str], total: int) -> None:
        self.path, self.tensor, self.close, self.total = path, tensor, tuple(close), total
        way_out = f"the nearest of its {total} is {_show(close[0])}" if close else f"it has {total}"
        super().__init__(
            f"{path} holds no tensor {_show(tensor)}; {way_out}. Check that these weights are of "
            f"the model that config.json describes"
        )


class TensorMismatchError(CheckpointError, ValueError):
    """A tensor of another type or size than what it is read into."""

    def __init__(self, path: str, tensor: str, *, wanted: str, had: str) -> None:
        self.path, self.tensor, self.wanted, self.had = path, tensor, wanted, had
        super().__init__(f"{path}: tensor {_show(tensor)}: {wanted} wanted, the file has {had}")


class CheckpointReadError(CheckpointError, OSError):
    """The kernel would not read."""

    def __init__(self, path: str, errno: int, *, tensor: str = "") -> None:
        self.path, self.tensor = path, tensor
        what = f"{path}: tensor {_show(tensor)}" if tensor else path
        super().__init__(f"{what}: cannot be read: {os.strerror(errno)} (errno {errno})")
        self.errno = errno  # by hand: OSError(errno, text) would choose a subclass and a text


class CheckpointWriteError(CheckpointError, OSError):
    """The kernel would not write. Nothing of the new checkpoint is left."""

    def __init__(self, path: str, errno: int) -> None:
        self.path = path
        super().__init__(
            f"{path}: cannot be written: {os.strerror(errno)} (errno {errno}); earlier checkpoints "
            f"are as they were. Check the disk and its permissions, or give another --out"
        )
        self.errno = errno


class CheckpointSpaceError(CheckpointError, OSError):
    """Too little room on the disk, found before the first step or (`saving`) during a save."""

    def __init__(self, path: str, *, wanted: int, free: int, saving: bool = False) -> None:
        self.path, self.wanted, self.free, self.saving = path, wanted, free, saving
        state = "the disk is full: the save needed" if saving else "checkpoints need"
        kept = "Earlier checkpoints are whole and training can go on. " if saving else ""
        super().__init__(
            f"{path}: {state} {format_bytes(wanted)} and {format_bytes(free)} are free. {kept}"
            f"Free some, lower --keep, leave optimizer states out with --save-weights-only, or "
            f"give an --out on another disk"
        )
        self.errno = errno.ENOSPC


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A whole checkpoint of this step is there already. It was left as it is."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step
        super().__init__(
            f"{path}: there is a whole checkpoint of step {step} already; it was left as it is. "
            f"Continue with --resume, or give another --out"
        )


class DamagedCheckpointError(CheckpointError, ValueError):
    """A directory that is not, or no longer, a whole checkpoint."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class StateError(CheckpointError, RecordError):
    """A record beside the tensors that does not hold together."""


def _show(name: str) -> str:
    """A name that came from a file may hold anything, and may be long."""
    text = repr(name) if not name.isprintable() or not name else name
    return text if len(text) <= 120 else f"{text[:117]}..."
