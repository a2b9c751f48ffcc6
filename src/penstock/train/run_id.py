"""The ID of a run, which run.yaml and all its checkpoints carry.

It tells checkpoints of one run from those of another, which may have the same shapes. Runs that
were started by Penstock 0.1 have none, and neither have their checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from penstock.checkpoint.errors import ForeignCheckpointError
from penstock.checkpoint.manifest import Checkpoint
from penstock.errors import SettingsError
from penstock.settings import RUN_FILE, read_run_id


def new_run_id() -> str:
    """Return a random ID for a new run."""
    return secrets.token_hex(8)


def find_run_id(out: Path, checkpoints: Sequence[Checkpoint]) -> str:
    """Return the ID of the run in a directory; "" if it was started without one.

    If run.yaml is missing or damaged, the newest checkpoint has it. Without checkpoints the run
    starts from scratch, and has an ID from then on. Raises ForeignCheckpointError if a checkpoint
    belongs to another run.
    """
    try:
        run_id = read_run_id(out / RUN_FILE)
        is_known = (out / RUN_FILE).stat().st_size > 0  # a power cut may have left it empty
    except (SettingsError, OSError):
        run_id, is_known = "", False
    if not checkpoints:
        return run_id or new_run_id()
    if not is_known:
        run_id = checkpoints[0].manifest.run_id
    for checkpoint in checkpoints:
        found = checkpoint.manifest.run_id
        if found != run_id:
            raise ForeignCheckpointError(str(checkpoint.path), run_id=run_id, found=found)
    return run_id
