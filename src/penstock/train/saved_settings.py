"""Find the settings of a run that is resumed: in run.yaml or, if it is damaged, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.manifest import Checkpoint, check_small_files
from penstock.checkpoint.run_directory import list_checkpoints
from penstock.checkpoint.training_state import TrainingState
from penstock.errors import RecordError, SettingsError
from penstock.settings import RUN_FILE, Layer, read_yaml


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The settings of a run, as layers for `merge_layers`."""

    layers: tuple[tuple[str, Layer], ...]
    """Each with the file that it comes from, the weakest first."""

    note: str = ""
    """What is wrong with run.yaml, and what is used instead; "" if it is complete."""


def read_saved_settings(out: str | Path) -> SavedSettings:
    """Read run.yaml, and from the newest checkpoint what run.yaml lacks.

    Earlier versions wrote run.yaml in a way that a power cut could leave it empty or cut off.
    Raises SettingsError if the user has changed it and made a mistake.
    """
    path = Path(out) / RUN_FILE
    given, problem = _read_run_file(path)
    source, saved = _read_checkpoint(Path(out))
    if not saved:
        own = ((str(path), given),) if given else ()
        note = f"warning: {path} {problem}, and there is no checkpoint with the settings of the run"
        return SavedSettings(own, note if problem and path.is_file() else "")
    missing = [name for name in saved if name not in given]
    if missing and not problem:
        problem = f"lacks {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
        if not path.read_bytes().endswith(b"\n"):
            # It was cut off within a line, so that its last value may be wrong.
            given, problem = {}, "is cut off"
    if not missing:
        return SavedSettings(((str(path), given),))
    layers = ((source, saved), (str(path), given)) if given else ((source, saved),)
    what = "the missing settings" if given else "the settings of the run"
    return SavedSettings(layers, f"warning: {path} {problem}; {what} are taken from {source}")


def _read_run_file(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings, and what is wrong with the file as a whole."""
    if not path.is_file():
        return {}, "is missing"
    try:
        given = read_yaml(path)
    except SettingsError as wrong:
        try:
            raw = path.read_bytes()
        except OSError:
            raise wrong from None
        if raw.endswith(b"\n") and b"\0" not in raw:
            raise  # a mistake of the user's, not damage: it is not cut off within a line
        return {}, "is damaged"
    return given, "" if given else "is empty"


def _read_checkpoint(out: Path) -> tuple[str, dict[str, Any]]:
    """Return the settings in the newest checkpoint, and the file that they come from."""
    newest = next(filter(_is_undamaged, list_checkpoints(out).whole), None)
    if newest is None:
        return "", {}
    path = newest.path / RUN_FILE
    if path.is_file():
        return str(path), read_yaml(path)
    # Earlier versions stored only the settings that affect the result.
    try:
        numerics: Any = TrainingState.load(newest.path).numerics
    except RecordError:
        return "", {}
    saved = numerics.get("settings") if isinstance(numerics, Mapping) else None
    return str(newest.path), dict(saved) if isinstance(saved, Mapping) else {}


def _is_undamaged(checkpoint: Checkpoint) -> bool:
    try:
        check_small_files(checkpoint.path)
    except (CheckpointError, OSError):
        return False
    return True
