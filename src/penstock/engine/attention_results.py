"""What attention returned in forward, until backward recomputes the layer with it.

The attention operation asks a handler (`penstock.model.attention_replay`). In forward, a `Recorder`
copies what the operation returned to the home that the plan gives it in HBM or, if its home is in
host memory, to a slot in HBM, from which a lane offloads it. In backward, another lane fetches it
to the slot, and a `Replayer` copies it into new tensors, which the operation returns. Copies take
next to no time, and they leave the slot free for the next layer. There is one slot: it is written
and read early in a layer, and the lanes have the rest of the layer to empty and to fill it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from penstock.engine.step_state import StepState, attention_key
from penstock.engine.tier_memory import TierMemory
from penstock.model.attention_replay import Results, handling_attention
from penstock.model.attention_sizes import attention_result_nbytes, padded_tokens
from penstock.model.split import MicroBatch
from penstock.plan.buffers import ATTENTION_SLOT, attention_micro_nbytes, attention_slot_nbytes
from penstock.plan.schedule import Verb
from penstock.roles import Role


class AttentionResults:
    """Saves results and returns them again. It owns the slot, and knows their homes."""

    def __init__(self, tiers: TierMemory) -> None:
        plan, self._tiers = tiers.plan, tiers
        self._blocks = plan.placement.blocks
        self._device = tiers.device
        self._element = tiers.formats.weight_format.weight
        nbytes = attention_slot_nbytes(tiers.inventory, plan.workload, plan.placement)
        self._slot = tiers.device.empty(nbytes, ATTENTION_SLOT)

    def release(self) -> None:
        self._slot = self._slot.new_empty(0)

    def saves(self, block: int, micro: int) -> bool:
        """Return whether the results of a micro-batch of a round are saved."""
        return micro in self._blocks[block].attended

    def _fits(self, block: int, query: torch.Tensor, tokens: int) -> bool:
        """Return whether queries are those that the plan counted with."""
        spec = self._tiers.inventory.blocks[block]
        size = spec.query_width // spec.heads
        return query.shape == (tokens, spec.heads, size) and query.element_size() == self._element

    # While a layer computes, in the computing thread.

    @contextlib.contextmanager
    def recording(self, step: StepState, at: int, index: int, micro: MicroBatch) -> Iterator[None]:
        """Save what attention returns inside the block, if the plan says so.

        `at` is the layer's forward, and `index` the number of the micro-batch in its round.
        """
        op, tokens = step.program.operations[at], micro.input_ids.numel()
        if not self.saves(op.block, index):
            yield
            return
        offload = step.program.at.get((Verb.OFFLOAD, op.block, op.round, Role.ATTENTION))

        def into(query: torch.Tensor) -> torch.Tensor | None:
            if not self._fits(op.block, query, tokens):
                return None
            if offload is None:
                return self.home(op.block, index, tokens)
            if step.attention_offload is not None:
                step.tickets.order_after(step.attention_offload, self._device)
            return self.slot(op.block, tokens)

        def done() -> None:
            if offload is not None:
                step.attention_offload = (offload, index)
                step.tickets.post(attention_key(at, index), self._device.record())

        recorder = Recorder(into, done)
        with handling_attention(recorder):
            yield
        if recorder.recorded:
            step.recorded.add((op.round, op.block, index))
        else:
            done()  # the lane moves bytes that nobody will read, and must not wait for others

    @contextlib.contextmanager
    def replaying(self, step: StepState, at: int, index: int, micro: MicroBatch) -> Iterator[None]:
        """Let attention inside the block return what `recording` has saved, if anything.

        `at` is the layer's backward.
        """
        op, tokens = step.program.operations[at], micro.input_ids.numel()
        if not self.saves(op.block, index):
            yield
            return
        fetch = step.program.at.get((Verb.FETCH, op.block, op.round, Role.ATTENTION))

        def source() -> torch.Tensor:
            if fetch is None:
                return self.home(op.block, index, tokens)
            step.tickets.order_after((fetch, index), self._device)
            return self.slot(op.block, tokens)

        def done() -> None:
            if fetch is not None:
                step.tickets.post(attention_key(at, index), self._device.record())

        if (op.round, op.block, index) not in step.recorded:
            if fetch is not None:  # the slot must not be written before these bytes have arrived
                step.tickets.order_after((fetch, index), self._device)
            done()
            yield
            return
        replayer = Replayer(source, done)
        with handling_attention(replayer):
            yield
        assert replayer.replayed, f"block {op.block} called attention in forward only"

    # Where the results are. The lanes use this, too.

    def home(self, block: int, micro: int, tokens: int) -> torch.Tensor:
        """Return the bytes of a micro-batch where they live, in host or device memory."""
        spec = self._tiers.inventory.blocks[block]
        each = attention_micro_nbytes(spec, self._tiers.plan.workload)
        start = (micro - self._blocks[block].attended.start) * each
        data = self._tiers.data(block, Role.ATTENTION)
        return data[start : start + self._nbytes(block, tokens)]

    def slot(self, block: int, tokens: int) -> torch.Tensor:
        """Return the bytes of the slot that a micro-batch of a block uses."""
        return self._slot[: self._nbytes(block, tokens)]

    def _nbytes(self, block: int, tokens: int) -> int:
        spec = self._tiers.inventory.blocks[block]
        return attention_result_nbytes(
            tokens=tokens, query_width=spec.query_width, heads=spec.heads, element=self._element
        )


class Recorder:
    """Handles the attention calls of one forward pass: copies what the first of them returns.

    `into` returns the bytes to copy to, once they may be overwritten; None if nothing is to be
    copied. `done` is called when the copy has been issued.
    """

    def __init__(
        self, into: Callable[[torch.Tensor], torch.Tensor | None], done: Callable[[], None]
    ) -> None:
        self._into, self._done = into, done
        self._called = False
        self.recorded = False
        """Whether something was copied."""

    def __call__(self, query: torch.Tensor, compute: Callable[[], Results]) -> Results:
        made = compute()
        data = None if self._called else self._into(query)
        self._called = True
        if data is not None:
            for into, each in zip(_views(data, query), made, strict=True):
                into.copy_(each)
            self.recorded = True
            self._done()
        return made


class Replayer:
    """Handles the attention calls of a recomputation: returns what was saved of the first of them.

    `source` returns the saved bytes, and `done` is called when the copy has been issued.
    """

    def __init__(self, source: Callable[[], torch.Tensor], done: Callable[[], None]) -> None:
        self._source, self._done = source, done
        self.replayed = False
        """Whether something was returned."""

    def __call__(self, query: torch.Tensor, compute: Callable[[], Results]) -> Results:
        if self.replayed:  # a layer with several calls: the others were not saved
            return compute()
        self.replayed = True
        out, log_sums = (view.clone() for view in _views(self._source(), query))
        self._done()
        return out, log_sums


def _views(data: torch.Tensor, query: torch.Tensor) -> Results:
    """Return the output and the log-sum-exps as they lie in memory, one after the other."""
    tokens, heads, _ = query.shape
    nbytes = query.numel() * query.element_size()
    log_sums = data[nbytes:].view(torch.float32).view(heads, padded_tokens(tokens))
    return data[:nbytes].view(query.dtype).view(query.shape), log_sums
