"""Forward and backward through the layers as separate passes, around a loss of the caller's.

A training step of the engine computes forward, loss and backward as one program. If the caller's
code computes the loss (`penstock.stream`), each half is a program of its own. A forward pass leaves
block inputs where the plan stores them, and a `LiveForward` stands for them until the backward pass
uses them, or until nobody refers to it any more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.engine.allocate import EngineMemory, Programs
from penstock.engine.hidden_states import EXTRA_SLOTS
from penstock.engine.pending_update import PendingUpdate
from penstock.engine.step_state import StepState
from penstock.errors import EngineError
from penstock.model.split import MicroBatch, SplitModel

TOO_MANY = (
    "{count} forward passes await their backward pass, and the plan has memory for the "
    "activations of {most}. Call backward() first, or drop every tensor that depends on the "
    "earlier output; use torch.no_grad() for forward passes without a backward pass; or plan for "
    "more with penstock.stream(..., live_forwards={more})"
)

SPENT = (
    "the backward pass of this forward pass has run, and its activations are gone. Penstock "
    "computes each backward pass once: retain_graph=True and a second backward() are not "
    "supported. Call the model again"
)

ROUNDED = (
    "the gradients of this update were rounded when their norm was taken, so no more can be added. "
    "Call backward() for all batches of an update first, then clip_grad_norm_, then "
    "optimizer.step() or optimizer.zero_grad()"
)

NOT_ZEROED = (
    "the gradients of the last update have not been cleared, and torch would add the new ones to "
    "them. Call optimizer.zero_grad() or model.zero_grad() after every optimizer.step()"
)

UPDATED = (
    "the weights were updated after this forward pass, so its backward pass would be wrong. Call "
    "backward() before optimizer.step(), or call the model again"
)


class LiveForward:
    """A forward pass whose block inputs are kept for its backward pass."""

    _held = False  # of an object without __init__, which torch.compile makes when it traces code

    def __init__(
        self, slot: int, micros: Sequence[MicroBatch], batch_number: int, version: int, *,
        training: bool, release: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.slot, self.micros, self.batch_number = slot, micros, batch_number
        self.version, self.training = version, training
        self.spent = False
        """Whether its backward pass has run, or has failed."""
        self._release = release
        self._held = True

    def release(self) -> None:
        """Let another forward pass use the memory."""
        if self._held:
            self._held = False
            self.spent = True
            self.micros = ()
            self._release(self.slot)

    def __del__(self) -> None:
        # The graph of a loss that is dropped without backward() ends here.
        self.release()


class CallerPasses:
    """Runs the separate passes of one engine."""

    def __init__(
        self, memory: EngineMemory, programs: Programs, split_model: SplitModel,
        run: Callable[[StepState], None],
    ) -> None:  # fmt: skip
        self._memory, self._programs, self._model, self._run = memory, programs, split_model, run
        self._most = memory.tiers.plan.workload.live_forwards
        self._free = list(range(self._most))
        self._held_current = False

    @property
    def live_forwards(self) -> int:
        """Number of forward passes that await their backward pass."""
        return self._most - len(self._free)

    # Forward.

    def start_live(
        self, micros: Sequence[MicroBatch], batch_number: int, version: int, *, training: bool
    ) -> LiveForward:
        """Reserve memory for a forward pass; EngineError if all of it is in use."""
        if not self._free:
            gc.collect()  # an exception's traceback may refer to itself, and to a loss
        if not self._free:
            raise EngineError(
                TOO_MANY.format(count=self._most, most=self._most, more=self._most + 1)
            )
        return LiveForward(
            self._free.pop(0), micros, batch_number, version,
            training=training, release=self._free.append,
        )  # fmt: skip

    def forward(self, live: LiveForward, pending: PendingUpdate | None) -> torch.Tensor:
        """Run a forward pass and keep the block inputs; return the output of the last layer."""
        program = "forward again" if pending is None else "forward"
        with self._settings(training=live.training):
            return self._output(self._step(program, live, pending))

    def infer(
        self, micros: Sequence[MicroBatch], batch_number: int, pending: PendingUpdate | None, *,
        training: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Run a forward pass that keeps nothing; return the output of the last layer."""
        program = self._programs["infer again" if pending is None else "infer"]
        step = StepState(
            program, [micros], [len(micros)], pending, batch_number, keeps_activations=False
        )
        with self._settings(training=training):
            out = self._output(step)
        for micro in micros:
            micro.calls = None
        return out

    def _output(self, step: StepState) -> torch.Tensor:
        self._run(step)
        hidden, head = self._memory.hidden, len(self._memory.tiers.inventory.blocks) - 1
        micros = step.rounds[0]
        parts = []
        for index, micro in enumerate(micros):
            slot = hidden.slot_of(head, index)
            assert slot is not None, "the head's input is not stored"
            parts.append(hidden.slot(slot, *micro.shape))
        return torch.cat(parts)  # a copy: the ring is used again by the next pass

    # Backward.

    def backward(self, live: LiveForward, gradient: torch.Tensor, *, adds: bool) -> None:
        """Run the backward pass, from the gradient of the output of the last layer."""
        hidden = self._memory.hidden
        hidden.start_separate_backward()
        row = 0
        for index, micro in enumerate(live.micros):
            rows, _ = micro.shape
            slot = hidden.slot(hidden.gradient_slot(index), *micro.shape)
            slot.copy_(gradient[row : row + rows])
            row += rows
        step = self._step("backward adding" if adds else "backward", live, None)
        step.fresh = not adds
        step.activation_slots[0] = [hidden.activation_slot(i) for i in range(EXTRA_SLOTS)]
        with self._settings(training=live.training):
            self._run(step)

    # Held blocks.

    def update_held(self, pending: PendingUpdate | None, batch_number: int) -> None:
        """Sweep the held blocks if an update is pending, and fetch their weights."""
        self._held_current = False
        name = "fetch held" if pending is None else "sweep held"
        self._run(StepState(self._programs[name], (), (), pending, batch_number))
        self._held_current = True

    def ensure_held(self, pending: PendingUpdate | None, batch_number: int) -> None:
        """Update held blocks if that failed before, or if their weights were replaced."""
        if not self._held_current:
            self.update_held(pending, batch_number)

    def store_held_gradients(self, batch_number: int) -> None:
        """Move the gradient sums of held blocks to where the update finds them."""
        step = StepState(self._programs["offload held"], (), (), None, batch_number)
        step.outgoing_gradients |= self._memory.held.complete_gradients()
        self._run(step)

    # Helpers.

    def _step(self, program: str, live: LiveForward, pending: PendingUpdate | None) -> StepState:
        return StepState(
            self._programs[program], [live.micros], [len(live.micros)], pending, live.batch_number,
            first_home=live.slot * self._memory.hidden.per_round,
        )  # fmt: skip

    @contextlib.contextmanager
    def _settings(self, *, training: bool) -> Iterator[None]:
        """Compute as the engine does, whatever the caller has set around the call."""
        device = self._memory.device.torch_device
        self._model.train(training)
        gpus = [device] if device.type == "cuda" else []
        seeds = self._model.drops_out and training  # the engine seeds torch's generator
        with (
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng(devices=gpus, enabled=seeds),
        ):
            yield
