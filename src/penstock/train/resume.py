"""Find the checkpoints that a run can be resumed from, and report what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import StateError
from penstock.checkpoint.manifest import Checkpoint, check_small_files
from penstock.checkpoint.run_directory import CheckpointList
from penstock.checkpoint.training_state import TrainingState
from penstock.errors import EngineStateError
from penstock.plan.workload import Numerics
from penstock.records import from_json, to_json
from penstock.settings import AFFECTS_RESULT, Settings
from penstock.train.errors import AdapterChangedError, NotResumableError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to resume from."""

    checkpoint: Checkpoint
    state: TrainingState

    @property
    def numerics(self) -> Numerics:
        """Numerics of the run, which do not depend on its budgets."""
        saved: Any = self._saved("workload")
        return from_json(Numerics, saved, where=str(self.checkpoint.path), error=StateError)

    @property
    def warmup_from_zero(self) -> bool:
        """Whether warmup begins at a rate of 0. Checkpoints of Penstock 0.1 do not say so."""
        schedule: Any = self.state.schedule
        return isinstance(schedule, Mapping) and bool(schedule.get("from_zero", True))

    def with_recorded_sizes(self, settings: Settings) -> Settings:
        """Return the settings with the sizes of the run where they are not given.

        run.yaml has them too, but it may be missing.
        """
        saved: Any = self._saved("settings")
        if not isinstance(saved, Mapping):
            return settings
        now = settings.flat()
        missing = [name for name in ("context", "batch") if now[name] is None]
        missing += ["overlong"] if now["overlong"] == "auto" else []
        return settings.replace({name: saved[name] for name in missing if name in saved})

    def check_formats(self, settings: Settings) -> None:
        """Raise an error if the checkpoint's tensors have other formats than the run.

        `Engine.read` checks this too, but only after the run has allocated its memory.
        """
        self._check_adapter(settings)
        engine, now = self.state.engine, settings.flat()
        # Checkpoints of earlier versions do not name their optimizer.
        earlier = now | {"optimizer": "adamw"}
        for name in ("optimizer", "dtype", "moments", "quantize"):
            saved = engine.get(name, earlier[name]) if isinstance(engine, Mapping) else now[name]
            if name == "quantize":
                saved = self.numerics.quantize
            if saved != now[name]:
                raise EngineStateError(
                    name,
                    f"was {saved} in the checkpoint and is {now[name]} now; resume with {saved}",
                    where=str(self.checkpoint.path),
                )

    def _check_adapter(self, settings: Settings) -> None:
        saved: Any = self._saved("settings")
        lora = saved.get("lora") if isinstance(saved, Mapping) else None
        if lora is not None and bool(lora) != bool(settings.model.lora):
            raise AdapterChangedError(
                settings.checkpoint.out,
                model=settings.model.model,
                saved=",".join(map(str, lora)),
                given=",".join(settings.model.lora),
            )

    def differences(self, settings: Settings, *, steps: int) -> list[str]:
        """Describe which settings of the run have changed that can change its result.

        `Engine.read` reports what the engine knows: its numerics, the software and the machine.
        """
        found = []
        schedule: Any = self.state.schedule
        if isinstance(schedule, Mapping) and schedule.get("steps", steps) != steps:
            found.append(f"the number of steps was {schedule['steps']} and is {steps}")
        return found + self.changed_settings(settings, AFFECTS_RESULT)

    def changed_settings(self, settings: Settings, names: Iterable[str]) -> list[str]:
        """Describe which of the named settings differ from those of the checkpoint."""
        saved: Any = self._saved("settings")
        if not isinstance(saved, Mapping):
            return []
        now = {name: to_json(value) for name, value in settings.flat().items()}
        return [
            f"{name} was {saved[name]} and is {now[name]}"
            for name in names
            if saved.get(name, now[name]) != now[name]
        ]

    def _saved(self, name: str) -> object:
        saved: Any = self.state.numerics
        if not isinstance(saved, Mapping) or name not in saved:
            raise StateError("numerics", f"has no {name}", where=str(self.checkpoint.path))
        return saved[name]


def load_resume_point(checkpoint: Checkpoint) -> ResumePoint:
    """Read the state of a checkpoint, after its small files were compared with their checksums."""
    check_small_files(checkpoint.path)
    return ResumePoint(checkpoint, TrainingState.load(checkpoint.path))


def find_resumable(out: Path, found: CheckpointList) -> tuple[Checkpoint, ...]:
    """Return the checkpoints with optimizer states, newest first; none if there is no checkpoint.

    Raises an error if there are checkpoints, but none to resume from.
    """
    resumable = tuple(checkpoint for checkpoint in found.whole if checkpoint.resumable)
    if not resumable and found.whole:
        raise NotResumableError(str(out), str(found.whole[0].path), found.damaged)
    if not resumable and found.damaged:
        raise found.damaged[0]
    return resumable


def resumed_numerics(fresh: Numerics, resume: ResumePoint | None, settings: Settings) -> Numerics:
    """Return the numerics of the checkpoint with what the user sets now, or `fresh` if new."""
    if resume is None:
        return fresh
    saved = resume.numerics
    micro_batch = settings.schedule.micro_batch_size or saved.micro_batch
    return replace(
        saved,
        micro_batch=min(micro_batch, settings.schedule.chosen_batch),
        deterministic=settings.schedule.deterministic,
        label_smoothing=settings.schedule.label_smoothing,
        neftune_noise_alpha=settings.schedule.neftune_noise_alpha,
    )
