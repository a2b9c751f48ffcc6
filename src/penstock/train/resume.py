"""What a run goes on from, and what is no longer as it was. Room: show."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import StateError
from penstock.checkpoint.manifest import Checkpoint
from penstock.checkpoint.run_directory import list_checkpoints, remove_leftovers
from penstock.checkpoint.training_state import Software, TrainingState
from penstock.plan.workload import Numerics
from penstock.records import from_json, to_json
from penstock.settings import AFFECTS_RESULT, Settings
from penstock.train.checkpoints import torch_threads
from penstock.train.errors import NotResumableError, OutInUseError, OutNotEmptyError


@dataclass(frozen=True, slots=True)
class Past:
    """A checkpoint to go on from."""

    checkpoint: Checkpoint
    state: TrainingState

    @property
    def numerics(self) -> Numerics:
        """Those of the run, whatever budgets it has now."""
        kept: Any = self._told("workload")
        return from_json(Numerics, kept, where=str(self.checkpoint.path), error=StateError)

    def differences(
        self, settings: Settings, numerics: Numerics, *, steps: int, on_gpu: bool
    ) -> list[str]:
        """Why what follows is not, to the bit, what would have followed then."""
        found = list(self.state.software.differences(Software.here(gpu=on_gpu)))
        schedule: Any = self.state.schedule
        if isinstance(schedule, Mapping) and schedule.get("steps", steps) != steps:
            found.append(f"the run's steps were {schedule['steps']} and are {steps}")
        threads = self._told("threads")
        if threads is not None and not on_gpu and threads != torch_threads():
            found.append(f"torch's threads were {threads} and are {torch_threads()}")
        told: Any = self._told("settings")
        values = settings.flat()
        for name in AFFECTS_RESULT:
            now = to_json(values[name])
            if isinstance(told, Mapping) and told.get(name, now) != now:
                found.append(f"{name} was {told[name]} and is {now}")
        before = self.numerics
        for field in fields(Numerics):
            was, now = getattr(before, field.name), getattr(numerics, field.name)
            if was != now and field.name not in AFFECTS_RESULT:
                found.append(f"{field.name} was {was} and is {now}")
        return found

    def _told(self, name: str) -> object:
        kept: Any = self.state.numerics
        if not isinstance(kept, Mapping) or name not in kept:
            raise StateError("numerics", f"has no {name}", where=str(self.checkpoint.path))
        return kept[name]


class OutFolder:
    """A run's directory, of one process at a time."""

    def __init__(self, out: str | Path, *, resume: bool) -> None:
        self.path = Path(out)
        if not resume:
            found = sorted(os.listdir(self.path)) if self.path.is_dir() else []
            if found:
                raise OutNotEmptyError(str(self.path), found)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise OutInUseError(str(self.path)) from None
        except OSError:
            pass  # a file system without locks
        remove_leftovers(self.path)

    def past(self) -> Past | None:
        """The newest checkpoint with all that it takes; None if there is no checkpoint at all."""
        found = list_checkpoints(self.path)
        resumable = next((c for c in found.whole if c.resumable), None)
        if resumable is None:
            if found.whole:
                raise NotResumableError(str(self.path), str(found.whole[0].path))
            if found.damaged:
                raise found.damaged[0]
            return None
        return Past(resumable, TrainingState.load(resumable.path))

    def close(self) -> None:
        """A directory into which nothing was written is taken away again."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        os.close(self._lock)


def kept_numerics(fresh: Numerics, past: Past | None, settings: Settings) -> Numerics:
    """The past's, but for what the user says now; without a past, what follows from the model."""
    if past is None:
        return fresh
    kept = past.numerics
    micro_batch = settings.schedule.micro_batch_size or kept.micro_batch
    return replace(
        kept,
        micro_batch=min(micro_batch, settings.schedule.batch),
        deterministic=settings.schedule.deterministic,
    )
