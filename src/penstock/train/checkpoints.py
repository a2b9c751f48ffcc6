"""Checkpoints of a run, and its model at the end. Room: show."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.disk import check_room, sync
from penstock.checkpoint.manifest import folder_name
from penstock.checkpoint.model_files import copy_model_files, write_config
from penstock.checkpoint.run_directory import list_checkpoints, new_checkpoint
from penstock.checkpoint.training_state import Software, TrainingState
from penstock.records import to_json
from penstock.settings import AFFECTS_RESULT, Settings

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.model.inventory import Inventory

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run is, beside what the engine knows."""

    step: int
    """Batches taken, skipped ones too: what checkpoints are numbered by."""
    position: Any
    """In the data."""
    schedule: Any
    """Of the learning rate."""


class CheckpointSaver:
    """Writes an engine into a run's directory."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._out = Path(settings.checkpoint.out)
        self._sizes = [writer.nbytes for writer in self._writers()]
        self.saved_step: int | None = None
        """Of the newest checkpoint of this run."""

    @property
    def nbytes(self) -> int:
        """Of one checkpoint."""
        return sum(self._sizes)

    def check_room(self) -> None:
        """While one is written, those that are kept are all there, one with optimizer state."""
        weights, rest = self._sizes[0], sum(self._sizes[1:])
        wanted = (self._settings.checkpoint.keep + 1) * weights + 2 * rest
        there = sum(found.nbytes for found in list_checkpoints(self._out).whole)
        check_room(self._out, max(self.nbytes, wanted - there))

    def save(self, standing: Standing, tell: Tell | None = None) -> Path:
        """A whole checkpoint, or an error and none. Training can go on in either case."""
        optimizer = not self._settings.checkpoint.save_weights_only
        keep, out = self._settings.checkpoint.keep, self._out
        with new_checkpoint(out, standing.step, keep=keep, nbytes=self.nbytes) as folder:
            self._engine.write(folder, optimizer=optimizer, progress=tell)
            self._state(standing).save(folder)
            trust = self._settings.model.trust_remote_code
            copy_model_files(out, folder, trust_remote_code=trust)
        self.saved_step = standing.step
        return out / folder_name(standing.step)

    def publish(self) -> None:
        """The newest checkpoint's weights as the run's own, beside config and tokenizer."""
        assert self.saved_step is not None
        folder = self._out / folder_name(self.saved_step)
        names = sorted(n for n in os.listdir(folder) if n.startswith("model"))
        for name in sorted(names, key=lambda n: n.endswith(".json")):  # the index last
            _link(folder / name, self._out / name)
        sync(self._out)

    def _writers(self) -> list[Any]:
        return self._engine.files.writers(optimizer=not self._settings.checkpoint.save_weights_only)

    def _state(self, standing: Standing) -> TrainingState:
        engine, settings = self._engine, self._settings
        on_gpu = engine.device.torch_device.type == "cuda"
        values = settings.flat()
        numerics: Any = {
            "workload": to_json(engine.workload.numerics),
            "settings": {name: to_json(values[name]) for name in AFFECTS_RESULT},
            "threads": None if on_gpu else torch_threads(),
        }
        return TrainingState(
            engine=engine.state_record(),
            software=Software.here(gpu=on_gpu),
            schedule=standing.schedule,
            data=standing.position,
            numerics=numerics,
        )


def write_companions(
    out: Path, source: Path, config: Any, inventory: Inventory, settings: Settings
) -> None:
    """Config and tokenizer into the run's directory, from where every checkpoint takes them."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.model.dtype]
    write_config(config, out, dtype=dtype, architecture=inventory.architecture)
    copy_model_files(source, out, trust_remote_code=settings.model.trust_remote_code)


def torch_threads() -> int:
    """On the CPU, sums are cut by threads: another number of them gives other bits."""
    import torch

    return torch.get_num_threads()


def _link(source: Path, target: Path) -> None:
    """The same file under a second name, or a copy where the file system has no such thing."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        os.link(source, draft)
    except OSError:
        shutil.copyfile(source, draft)
        sync(draft)
    os.replace(draft, target)
