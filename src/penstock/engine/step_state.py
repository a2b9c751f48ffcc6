"""The state of one step while the lanes and the computing thread carry it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from penstock.engine.loss import TokenValues
from penstock.engine.pending_update import PendingUpdate
from penstock.engine.program import Program
from penstock.engine.report import StepReport
from penstock.engine.ticket_board import TicketBoard
from penstock.model.router_loss import sizes_of
from penstock.model.split import MicroBatch
from penstock.ticket import Ticket

Part = int | tuple[int, int]
"""An operation, by its index in the program; or (index, micro-batch) for a part of one."""


def attention_key(at: int, micro: int) -> Hashable:
    """Return the ticket key of a micro-batch's attention, which ends before the computation `at`.

    In forward its results are in the slot then, and in backward the slot may be filled again.
    """
    return at, micro, "attention"


class SavedForward(NamedTuple):
    """What a layer's forward pass of one micro-batch has saved for its backward pass.

    The saved tensors belong to the graph behind `out`. The output itself is not held: the next
    layer has a copy of it. The layer's weights and its input are not copied, and must stay where
    they are.
    """

    out: GradientEdge
    """Where the backward pass begins."""
    source: torch.Tensor
    """The layer's input."""
    parameters: Mapping[str, torch.nn.Parameter]
    """The layer's weights, which backward must find in the same place."""
    logits: Sequence[torch.Tensor] = ()
    """The logits of the layer's routers, if the loss needs them."""


@dataclass(slots=True)
class StepState:
    """One execution of a program: a training step, an evaluation pass or a sweep alone.

    Fields without a note about threads are constant, or belong to the computing thread. What the
    computing thread writes for other threads, it writes before it posts the ticket that they wait
    for, so they need no lock.
    """

    program: Program
    rounds: Sequence[Sequence[MicroBatch]]
    """The micro-batches that this rank computes."""
    round_sizes: Sequence[int]
    """By round: the number of micro-batches of all ranks."""
    pending: PendingUpdate | None
    """The optimizer update whose sweeps this program makes."""
    batch_number: int
    """Number of batches before this one; dropout depends on it."""
    num_items: int = 1
    """Divisor of the loss sum: by default, the number of tokens in the whole step that have a
    target."""
    loss_scale: float = 1.0
    """Loss scale, for fp16."""
    fresh: bool = True
    """Whether gradients start from zero."""
    weight: float = 1.0
    """Factor of the gradients, relative to those of the update's first batch."""
    keeps_activations: bool = True
    """Whether block inputs are kept for a backward pass."""
    first_home: int = 0
    """Where the inputs of the first micro-batch are kept, counted in micro-batches: several forward
    passes may await their backward passes."""
    tickets: TicketBoard = field(default_factory=TicketBoard)
    """Tickets of operations and of their micro-batches. Shared by all threads."""
    origin: Ticket[None] | None = None
    """Recorded when the step began, with nothing else running on the device."""
    started: dict[Part, Ticket[object]] = field(default_factory=dict)
    """When each operation had everything it needs; for operations that move one micro-batch after
    another, with waits in between, one entry per micro-batch. Each key is written by one thread."""
    hidden_slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By round, block and micro-batch: the slot of the ring that holds the block's input. Written
    by the computing thread, read by the lane that offloads activations."""
    outgoing_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By block: the bytes of its gradient on the device. Written by the computing thread, read by
    the lane that offloads gradients."""
    activation_slots: dict[int, Sequence[int]] = field(default_factory=dict)
    """By round: the slots of the ring through which activations return for backward. Written by the
    computing thread at the end of forward, read by the lane that fetches activations."""
    losses: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Number of each micro-batch in the batch, and the sum of its loss over tokens that have a
    target. Written by the computing thread, read by the lane of the ranks."""
    token_values: dict[int, TokenValues] | None = None
    """By number of the micro-batch: what the loss turn says about each token; None if nobody
    asks."""
    logits: dict[int, torch.Tensor] | None = None
    """By number of the micro-batch: its logits on the host, in place of its loss; None if nobody
    asks."""
    expert_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    """By block: the number of rows that each of its experts computed in the forward pass, on the
    device."""
    unused: dict[int, set[str]] = field(default_factory=dict)
    """With several ranks, by block: tensors without a gradient in all micro-batches of this rank.
    Written by the computing thread, read by the lane of the ranks."""
    report: StepReport | None = None
    """The outcome of the step on all ranks. Written by the lane of the ranks."""
    device_sweeps: list[Ticket[object]] = field(default_factory=list)
    """Sweeps on the device; waiting for one raises if it refused an element."""
    state_sweeps: dict[tuple[int, int | None], Ticket[object]] = field(default_factory=dict)
    """By block and piece: the sweep on the device of states that are stored in host memory. Written
    by the lane that sweeps them before it posts its ticket, read by the lane that offloads them."""
    swept_in_staging: set[int] = field(default_factory=set)
    """Reads from NVMe whose piece was swept in staging, by their index in the program. Written by
    the sweep lane, read after it has ended."""
    saved: dict[tuple[int, int, int], SavedForward] = field(default_factory=dict)
    """By round, block and micro-batch: what backward does not recompute. Computing thread only."""
    recorded: set[tuple[int, int, int]] = field(default_factory=set)
    """By round, block and micro-batch: what attention returned was saved. Computing thread only."""
    attention_offload: Hashable | None = None
    """Ticket key of the offload that must end before the slot of attention's results is written.
    Computing thread only."""
    attention_user: Hashable | None = None
    """Ticket key of the recomputation that must have read the slot of attention's results before it
    is filled again. Only the lane that fetches them touches it."""
    activations_used: Counter[int] = field(default_factory=Counter)
    """By round: how many fetched activations backward has used. Computing thread only."""
    activation_users: dict[int, list[Hashable]] = field(default_factory=dict)
    """By round: ticket keys of the backward parts that use the fetched activations, in order.
    Only the lane that fetches activations touches it."""

    def note_unused(self, block: int, names: set[str]) -> None:
        """Note the tensors that a micro-batch has no gradient for."""
        self.unused[block] = self.unused.get(block, names) & names

    def count_rows(self, block: int, offsets: Sequence[torch.Tensor]) -> None:
        """Count the rows of a block's experts. Groups of experts follow one another."""
        if offsets:
            counts = torch.cat([sizes_of(each) for each in offsets])
            before = self.expert_rows.get(block)
            self.expert_rows[block] = counts if before is None else before + counts

    def shapes(self, round: int) -> list[tuple[int, int]]:
        """Return sequences and tokens of each micro-batch of a round."""
        return [micro.shape for micro in self.rounds[round]]

    def use_activation_slot(self, round: int) -> int:
        """Return the slot of the next fetched activation; they are used in the order of arrival."""
        number = self.activations_used[round]
        self.activations_used[round] += 1
        slots = self.activation_slots[round]
        return slots[number % len(slots)]

    def reserve_activation_slot(self, round: int, user: Hashable) -> tuple[int, Hashable | None]:
        """Return the slot for the next activation to fetch, and who must finish with it first.

        `user` is the ticket key of the backward part that will use the activation.
        """
        slots, users = self.activation_slots[round], self.activation_users.setdefault(round, [])
        number = len(users)
        users.append(user)
        previous = users[number - len(slots)] if number >= len(slots) else None
        return slots[number % len(slots)], previous
