"""Which rank of a run this process is, as its launcher says in environment variables.

A rank is one process with one GPU. `torchrun` and `penstock train --gpus N` set the variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import EngineError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that describe a rank. A process without one of them is not a rank."""

LAUNCH = "PENSTOCK_LAUNCH"
"""Environment variable with the directory in which ranks leave messages for Penstock's launcher;
not set under other launchers."""

REPORTED, LOST, CODE, STARTED = "reported", "lost", "code", "started"
"""Names of these messages: a rank has printed why it failed; why a rank could not continue without
another one; the exit code of the run; the first step begins."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a process is among the ranks of a run."""

    rank: int = 0
    """Number of the rank, from 0."""
    world: int = 1
    """Number of ranks on all machines."""
    local_rank: int = 0
    """Number of the rank on its machine, which is also the number of its GPU."""
    local_world: int = 1
    """Number of ranks on this machine."""
    machine: int = 0
    """Number of the machine, from 0."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
        """Read the place of this process; None if no launcher has started it as a rank."""
        if not all(name in environment for name in NAMES):
            return None
        values: dict[str, int] = {}
        for name in (*NAMES[:4], "GROUP_RANK"):
            text = environment.get(name, "0")
            if not text.isascii() or not text.isdigit():
                raise EngineError(f"the environment variable {name} must be a number, got {text!r}")
            values[name] = int(text)
        if values["WORLD_SIZE"] % max(1, values["LOCAL_WORLD_SIZE"]):
            raise EngineError(
                f"this machine has {values['LOCAL_WORLD_SIZE']} of {values['WORLD_SIZE']} ranks, "
                f"but all machines must have equally many"
            )
        return cls(
            rank=values["RANK"], world=values["WORLD_SIZE"], local_rank=values["LOCAL_RANK"],
            local_world=values["LOCAL_WORLD_SIZE"], machine=values["GROUP_RANK"],
        )  # fmt: skip

    @property
    def machines(self) -> int:
        """Number of machines. All of them have equally many ranks."""
        return self.world // self.local_world


def pid_name(rank: int) -> str:
    """Return the name of the message with a rank's process number."""
    return f"pid-{rank}"
