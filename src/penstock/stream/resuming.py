"""What an engine must remember beside its tensors to continue to the bit. Room: move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import EngineStateError
from penstock.records import Json
from penstock.roles import Dtype, Moments

if TYPE_CHECKING:
    from penstock.stream.engine import Engine

ENGINE_STATE = "engine.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """Small, and of no plan."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    fingerprint: str
    """Of the model's blocks and tensors, and of what is trained."""

    steps: int
    """Optimizer steps taken."""

    batches: int
    """Batches seen: what dropout depends on."""

    seed: int
    """Of dropout and of stochastic rounding."""

    dtype: Dtype
    moments: Moments

    loss_scale: float = 1.0
    good_steps: int = 0
    """Since the loss scale last changed."""

    groups: Json = None
    """The optimizer's param groups: settings, and names of tensors."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise EngineStateError("version", f"must be {self.FORMAT}, got {self.version}")

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        return cls(
            fingerprint=engine.inventory.fingerprint,
            steps=engine.steps,
            batches=engine.batches,
            seed=engine.settings.seed,
            dtype=engine.workload.dtype,
            moments=engine.workload.moments,
            loss_scale=engine.scale.value,
            good_steps=engine.scale.good_steps,
            groups=[_told(engine, group) for group in engine.optimizer.param_groups],
        )

    def check(self, engine: Engine) -> None:
        """Raise EngineStateError unless the engine can continue from it."""
        for name, mine in (
            ("fingerprint", engine.inventory.fingerprint),
            ("dtype", engine.workload.dtype),
            ("moments", engine.workload.moments),
            ("seed", engine.settings.seed),
        ):
            theirs = getattr(self, name)
            if theirs != mine:
                raise EngineStateError(
                    name, f"was {theirs} in the checkpoint and is {mine} now; resume with the same"
                )
        names = [_told(engine, group)["params"] for group in engine.optimizer.param_groups]
        groups: Any = self.groups
        if [group["params"] for group in groups] != names:
            raise EngineStateError(
                "groups", "hold other tensors than when the checkpoint was written"
            )

    def restore(self, engine: Engine) -> None:
        engine.steps, engine.batches = self.steps, self.batches
        engine.scale.value, engine.scale.good_steps = self.loss_scale, self.good_steps
        groups: Any = self.groups
        for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
            settings = {k: v for k, v in saved.items() if k != "params"}
            group.update(settings | {"betas": tuple(settings["betas"])})


def _told(engine: Engine, group: dict[str, Any]) -> dict[str, Any]:
    """A group as JSON: names for tensors, and the settings that are plain numbers."""
    kept = {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in group.items()
        if k != "params" and isinstance(v, int | float | str | bool | tuple | list)
    }
    return {"params": [engine.optimizer.name_of(p) for p in group["params"]], **kept}
