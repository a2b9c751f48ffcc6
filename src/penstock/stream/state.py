"""What is taken for the whole run, and what one step carries through. Room: move."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from penstock.optim.threads import Pool
from penstock.storage.store import Store
from penstock.stream.body import MicroBatch
from penstock.stream.device import Device, Mark
from penstock.stream.disk import DiskPipe
from penstock.stream.gradients import Gradients
from penstock.stream.hidden import Hidden
from penstock.stream.homes import Homes
from penstock.stream.marks import Marks
from penstock.stream.program import Program
from penstock.stream.slots import WeightSlots
from penstock.stream.updates import Pending

Part = int | tuple[int, int]
"""An operation of a program, by its place in it; or a micro-batch of one."""


@dataclass(slots=True)
class Taken:
    """Everything taken before the first step."""

    device: Device
    homes: Homes
    hidden: Hidden
    weights: WeightSlots
    gradients: Gradients
    gradient_pool: torch.Tensor
    """Device memory for sums, and for gradients on their way out."""
    staging: torch.Tensor
    """Host memory for pieces from disk."""
    pipes: dict[str, DiskPipe]
    pool: Pool
    """The CPU sweep's threads."""

    @contextlib.contextmanager
    def lending(self) -> Iterator[int]:
        """Inside, others may have the memory of gradient buffers: so many bytes. Between runs, when
        nothing is in them."""
        nbytes = self.gradient_pool.numel()
        self.gradient_pool = self.gradient_pool.new_empty(0)
        self.device.returned(nbytes)
        try:
            yield nbytes
        finally:
            self.gradient_pool = self.device.empty(nbytes, "gradient buffers")

    def release(self) -> None:
        """Give everything back; the store leaves its disks."""
        self.homes.close()
        self.weights.release()
        self.hidden.release()
        self.gradients.start_step()
        self.gradient_pool = self.staging = torch.empty(0, dtype=torch.uint8)
        self.pipes.clear()
        self.device.limit(None)

    @property
    def store(self) -> Store:
        assert self.homes.store is not None
        return self.homes.store


@dataclass(slots=True)
class Run:
    """One program being carried out. `slots` and `leaving` are written by the thread that computes
    before it puts the mark that others wait for."""

    program: Program
    rounds: Sequence[Sequence[MicroBatch]]
    pending: Pending | None
    step: int
    """Of the run so far: what dropout depends on."""
    items: int = 1
    """Trained tokens of the whole step."""
    scale: float = 1.0
    """On the loss, for fp16."""
    fresh: bool = True
    """Whether gradients start from zero."""
    marks: Marks = field(default_factory=Marks)
    origin: Mark | None = None
    """When it began, with nothing under way."""
    began: dict[Part, Mark] = field(default_factory=dict)
    """When all that it needs was there: of an operation, or of each of its micro-batches where they
    move one by one, with waits in between."""
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By round, block and micro-batch: where in the ring its input is."""
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)
    """By block: the bytes of its gradient on the device."""
    turned: dict[int, Sequence[int]] = field(default_factory=dict)
    """By round: the slots through which inputs come back, once forward has no use for them."""
    loss: torch.Tensor | None = None
    """The sum over trained tokens."""
    swept: list[Mark] = field(default_factory=list)
    """Sweeps on the device, which may have refused an element."""
    swept_now: set[tuple[int, int | None]] = field(default_factory=set)
    """Blocks and pieces that the CPU swept in this run."""
    used: Counter[int] = field(default_factory=Counter)
    """By round: inputs that came back and were used."""
    came_back: dict[int, list[Hashable]] = field(default_factory=dict)
    """By round: who used the inputs that came back, in order."""

    def shapes(self, round: int) -> list[tuple[int, int]]:
        return [micro.shape for micro in self.rounds[round]]

    def input_slot(self, round: int) -> int:
        """The slot of the next input to be used; they are used in the order they come back."""
        number = self.used[round]
        self.used[round] += 1
        return self.turned[round][number % len(self.turned[round])]

    def next_input(self, round: int, user: Hashable) -> tuple[int, Hashable | None]:
        """The slot for the next input to come back, and who must be done with it before."""
        slots, users = self.turned[round], self.came_back.setdefault(round, [])
        number = len(users)
        users.append(user)
        freed = users[number - len(slots)] if number >= len(slots) else None
        return slots[number % len(slots)], freed
