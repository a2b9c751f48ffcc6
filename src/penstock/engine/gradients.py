"""Gradients: differentiate a block, sum over micro-batches in fp32, round once, take the norm.

The norm that clipping uses starts here: `GradientSums.close` rounds a block's finished sum and
starts computing its norm and overflow on the device, and `Engine.forward_backward` adds up the
blocks. When gradients accumulate over several calls, `round_gradients` does both for the whole
model.

Every plan gives the same bits: sums are made in the order of the micro-batches, and the norm is
always taken from values in the data type that the model computes in. With fp32, nothing is rounded:
the sum is the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from penstock.engine.device import Device
from penstock.engine.spans import Span
from penstock.engine.tier_memory import TierMemory
from penstock.model.inventory import Inventory, TensorSpec
from penstock.model.meta_model import weight_dtype
from penstock.optim import sweep
from penstock.optim.norms import GradStats
from penstock.optim.thread_pool import Pool
from penstock.roles import Formats, Role
from penstock.ticket import Ticket

ROUND_ELEMENTS = 1 << 22
"""Elements rounded at a time where the sum stays in fp32: a multiple of the norm's leaf size."""


KERNEL_ELEMENTS = 1 << 20
"""Number of elements from which on our own kernel adds gradients: 5 microseconds of an H200."""


NO_GRADIENT = GradStats(0, 0.0, None)
"""The norm of nothing, to which others are added."""


def differentiate(
    out: torch.Tensor | GradientEdge,
    gradient: torch.Tensor | None,
    source: torch.Tensor | None,
    parameters: Mapping[str, torch.Tensor],
    add: Callable[[str, torch.Tensor], None],
    into: torch.Tensor | None = None,
    others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Write the gradient with respect to `source` into `into`; pass the parameters' to `add`.

    `add` must copy or add what it gets, whose memory is freed when it returns. `into` keeps its
    values if `out` does not depend on `source`. A `GradientEdge` stands for an output that is not
    held. `others` are more outputs, each with its gradient.
    """
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    inputs = [*([] if source is None else [source]), *wanted.values()]
    outputs = [out] if isinstance(out, torch.Tensor) else []
    # A frozen embedding has no inputs here. Its output needs a gradient all the same if a hook
    # asks for it, as that of `enable_input_require_grads` does.
    if not inputs or (outputs and not outputs[0].requires_grad):
        return
    # autograd.grad, not backward: AccumulateGrad nodes are bound to the stream on which they were
    # created, and compiled code creates them on another.
    more, upstream = [each for each, _ in others], [gradient, *(each for _, each in others)]
    every: Any = [out, *more]
    gradients = list(torch.autograd.grad(every, inputs, upstream, allow_unused=True))
    users = _count_users([*outputs, *more, *upstream, source, *gradients])
    source_gradient = None if source is None else gradients.pop(0)
    for name in wanted:
        parameter_gradient = gradients.pop(0)
        if parameter_gradient is not None:
            add(name, parameter_gradient)
            _free(parameter_gradient, users)  # before the next is added
    # Last: `into` may be `gradient`, and a parameter's gradient may be a view of that.
    if source_gradient is not None:
        if into is not None:
            into.copy_(source_gradient)
        _free(source_gradient, users)


def _count_users(tensors: Sequence[torch.Tensor | None]) -> Counter[int]:
    """Return how many of the tensors use each storage, by the storage's address."""
    return Counter(t.untyped_storage()._cdata for t in tensors if t is not None)


def _free(gradient: torch.Tensor, users: Counter[int]) -> None:
    """Free the memory of a gradient that has been used, unless another tensor uses it.

    Dropping the tensor is not enough. torch's backward thread holds the results of its last pass
    until the operating system runs it again. On a busy machine the next chunk or micro-batch
    begins earlier, and needs that memory.
    """
    storage = gradient.untyped_storage()
    if users[storage._cdata] == 1:
        storage.resize_(0)
    users[storage._cdata] -= 1


def add_in_order(
    total: torch.Tensor, gradients: Sequence[torch.Tensor], *, fresh: bool = False,
    weight: float = 1.0,
) -> None:  # fmt: skip
    """Add the gradients of micro-batches to a sum, one after another.

    Every addition rounds, so the order decides the bits. It is the order of the batch, whichever
    rank computed a micro-batch and whichever owns the sum. A `fresh` sum holds other data: the
    first gradient replaces it. A copy saves the pass that would set the buffer to zero. A `weight`
    that is a power of two multiplies every gradient, and changes no rounding.
    """
    for gradient in gradients:
        if weight == 1.0 and _has_kernel(total, gradient):
            from penstock.engine import gradient_kernels  # needs Triton

            gradient_kernels.add(total, gradient, fresh)  # type: ignore[no-untyped-call]
        elif fresh:
            total.copy_(gradient)
            if weight != 1.0:
                total.mul_(weight)
        else:
            total.add_(gradient, alpha=weight)
        fresh = False


def _has_kernel(total: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether our own kernel adds a gradient, with the bits of PyTorch's and in less time.

    It takes longer to launch, so small tensors are not worth it. Fake tensors have no data.
    """
    return (
        total.is_cuda
        and type(total) is type(gradient) is torch.Tensor
        and total.numel() >= KERNEL_ELEMENTS
        and total.dtype == torch.float32
        and gradient.dtype in (torch.bfloat16, torch.float16)
        and total.shape == gradient.shape
        and total.is_contiguous()
        and gradient.is_contiguous()
    )


@dataclass(slots=True)
class _OpenSum:
    """The gradient of one block while it is being summed."""

    flat: torch.Tensor
    """The sum, in fp32; or, where ranks exchange gradients, that of one micro-batch."""
    untouched: set[str]
    """Tensors without a sum yet: their bytes hold data of an earlier user of the buffer."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parts of `flat` by tensor name."""
    weight: float = 1.0
    """Factor of what is added, a power of two."""
    wait: Callable[[], None] | None = None
    """Orders the first addition after the last use of the buffer."""

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.before_write()
        add_in_order(self.views[name], [gradient], fresh=name in self.untouched, weight=self.weight)
        self.untouched.discard(name)

    def before_write(self) -> None:
        if self.wait is not None:
            self.wait()
            self.wait = None


class GradientSums:
    """Sums of gradients on the device. Only the computing thread uses it."""

    def __init__(self, inventory: Inventory, formats: Formats, device: Device) -> None:
        self._inventory, self._formats, self._device = inventory, formats, device
        self._owner = {t.name: i for i, b in enumerate(inventory.blocks) for t in b.tensors}
        self._open: dict[int, _OpenSum] = {}
        self._micro: dict[int, _OpenSum] = {}  # sums of one micro-batch, by block
        self._weight = 1.0
        self.stats: list[tuple[int, int, Ticket[GradStats]]] = []
        """Norms being computed: the block, the number of the first trained tensor, the ticket."""

    def start_step(self, weight: float = 1.0) -> None:
        """Forget the sums of the step before. `weight` multiplies all gradients of this one."""
        self._weight = weight
        self._open.clear()
        self._micro.clear()
        self.stats.clear()

    def open(
        self, block: int, flat: torch.Tensor, *, fresh: bool,
        wait: Callable[[], None] | None = None, untouched: set[str] | None = None,
    ) -> None:  # fmt: skip
        """Sum the block's gradient into `flat`, which holds the sum so far unless `fresh`.

        `wait` is called before `flat` is written. `untouched`, if given, names the tensors that are
        fresh; those that get a gradient are removed from it.
        """
        self._open[block] = self._view_sum(block, flat, fresh=fresh, weight=self._weight)
        self._open[block].wait = wait
        if untouched is not None:
            self._open[block].untouched = untouched

    def is_open(self, block: int) -> bool:
        return block in self._open

    def start_micro_batch(self) -> None:
        """Start separate sums for the open blocks; `end_micro_batch` adds them to the open ones.

        The memory for it, 4 bytes per parameter, is working memory: it lives while the head is
        computed, when the larger working memory of layers is free.
        """
        for block in self._open:
            count = self._inventory.blocks[block].flat_elements(True)
            flat = torch.empty(count, dtype=torch.float32, device=self._device.torch_device)
            self._micro[block] = self._view_sum(block, flat, fresh=True)

    def end_micro_batch(self) -> None:
        """Add the sums since `start_micro_batch`, if it was called, to those of the blocks."""
        micro, self._micro = self._micro, {}
        for block, part in micro.items():
            for name in part.views.keys() - part.untouched:
                self._open[block].add(name, part.views[name])

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add one micro-batch's, or one chunk's, gradient of a tensor."""
        block = self._owner[name]
        (self._micro.get(block) or self._open[block]).add(name, gradient)

    def _view_sum(
        self, block: int, flat: torch.Tensor, *, fresh: bool, weight: float = 1.0
    ) -> _OpenSum:
        tensors = [t for t in self._inventory.blocks[block].tensors if t.trainable]
        offsets = self._inventory.blocks[block].offsets(True)
        views = {
            t.name: flat[offsets[t.name] : offsets[t.name] + t.elements].view(t.shape)
            for t in tensors
        }
        return _OpenSum(flat, set(views) if fresh else set(), views, weight)

    def close(self, block: int, into: torch.Tensor | None, *, last: bool) -> None:
        """End the block's sum, and round it as `round_sum` does."""
        total = self._open.pop(block)
        for name in total.untouched:  # parameters that no micro-batch used
            total.views[name].zero_()
        total.untouched.clear()
        self.round_sum(block, total.flat, into, last=last)

    def close_micro_batch(self, block: int) -> set[str]:
        """End the block's gradient of one micro-batch, which the ranks will add up.

        Returns the tensors that the micro-batch did not use. They are set to -0.0, which changes no
        sum: 0.0 would change a sum of -0.0.
        """
        total = self._open.pop(block)
        total.before_write()
        for name in total.untouched:
            total.views[name].fill_(-0.0)
        return total.untouched

    def set_unused_to_zero(
        self, block: int, total: torch.Tensor, first: int, names: Iterable[str]
    ) -> None:
        """Turn -0.0 into 0.0 in a shard of a sum, for tensors that no micro-batch used."""
        for number, low, high in self._shard_parts(block, first, total.numel()):
            if self._trained(block)[number].name in names:
                total[low:high].add_(0.0)

    def round_sum(
        self, block: int, total: torch.Tensor, into: torch.Tensor | None, *, last: bool,
        first: int = 0,
    ) -> None:  # fmt: skip
        """Round a finished sum once and start computing its norm.

        The sum is rounded into `into`, in 16 bits. If that is None, the sum stays in fp32 where it
        is; once it is the `last`, it is rounded in place to values that the model's type can hold.
        `total` is the part of the block's gradient that this rank owns, from element `first` on.
        """
        parts = self._shard_parts(block, first, total.numel())
        if into is not None:
            into.copy_(total)
        if into is not None and parts:
            # Tensors of one shard are consecutive, so the first one's number gives all others.
            grads = [into[low:high] for _, low, high in parts]
            self.stats.append((block, parts[0][0], self._device.start_stats(grads)))
        elif into is None and last:
            for number, low, high in parts:
                for part in round_in_place(total[low:high], self._formats):
                    self.stats.append((block, number, self._device.start_stats([part])))

    def _shard_parts(self, block: int, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return the tensors in a shard: the number of each, and its elements in the shard."""
        offsets, parts = self._inventory.blocks[block].offsets(True), []
        for number, tensor in enumerate(self._trained(block)):
            low = max(offsets[tensor.name] - first, 0)
            high = min(offsets[tensor.name] + tensor.elements - first, count)
            if low < high:
                parts.append((number, low, high))
        return parts

    def _trained(self, block: int) -> list[TensorSpec]:
        return [t for t in self._inventory.blocks[block].tensors if t.trainable]

    def gather_stats(self) -> GradStats:
        """Wait for the norms of all blocks; return norm and overflow of the whole gradient."""
        total = NO_GRADIENT
        self._device.fetch_results(ticket for _, _, ticket in self.stats)
        for block, tensor, ticket in self.stats:
            stats = ticket.wait()
            bad = None if stats.first_bad is None else (block, tensor + stats.first_bad[0])
            total = total + GradStats(stats.units, stats.max_abs, bad)
        return total


def round_in_place(flat: torch.Tensor, formats: Formats) -> Iterator[torch.Tensor]:
    """Round fp32 values in place to what the model's type can hold, and yield them in that type.

    The norm needs the tensors of that type: its order of summation depends on the element type, and
    it must be the same whether a gradient is stored in 16 or in 32 bits.
    """
    dtype = weight_dtype(formats.dtype)
    for low in range(0, flat.numel(), ROUND_ELEMENTS):
        part = flat[low : low + ROUND_ELEMENTS]
        rounded = part.to(dtype)
        if rounded is not part:  # fp32 needs no rounding
            part.copy_(rounded)
        yield rounded


def round_gradients(
    tiers: TierMemory, staging: torch.Tensor, pool: Pool, factor: float
) -> dict[str, GradStats]:
    """Multiply every accumulated fp32 gradient, round it once; return norm and overflow by tensor.

    Gradients on NVMe pass through `staging` piece by piece.
    """
    found: dict[str, GradStats] = {}
    for block in range(len(tiers.inventory.blocks)):
        if not tiers.has(block, Role.GRADIENT):
            continue
        if not tiers.on_disk(block, Role.GRADIENT):
            span = tiers.span(block, Role.GRADIENT)
            _round_span(tiers, block, span, pool, factor, found)
            continue
        assert tiers.store is not None
        for piece in tiers.pieces(block, Role.GRADIENT):
            start, stop, _ = tiers.piece_span(block, piece)
            extent = tiers.extent(block, Role.GRADIENT, piece)
            data = staging[: extent.stored_nbytes]
            tiers.store.start_read(extent, data.numpy()).wait()
            first = tiers.first_element(block, True) + start
            span = Span(Role.GRADIENT, data, first, stop - start, tiers.formats)
            _round_span(tiers, block, span, pool, factor, found)
            tiers.store.start_write(extent, data.numpy()).wait()
    return found


def _round_span(
    tiers: TierMemory, block: int, span: Span, pool: Pool, factor: float,
    found: dict[str, GradStats],
) -> None:  # fmt: skip
    """Round one span of a block's gradient, and add its norm and overflow to what was found."""
    spec = tiers.inventory.blocks[block]
    for number, tensor in enumerate(t for t in spec.tensors if t.trainable):
        offset = spec.offsets(True)[tensor.name]
        low = max(span.first, offset)
        high = min(span.first + span.count, offset + tensor.elements)
        if low >= high:
            continue
        values = span.values(low, high)
        if factor != 1.0:  # before it is rounded: the sum may exceed fp16 where the mean does not
            values.mul_(factor)
        for part in round_in_place(values, tiers.formats):
            stats = _grad_stats(tiers.device, part, pool)
            bad = None if stats.first_bad is None else (block, number)
            before = found.get(tensor.name, NO_GRADIENT)
            found[tensor.name] = before + GradStats(stats.units, stats.max_abs, bad)


def _grad_stats(device: Device, part: torch.Tensor, pool: Pool) -> GradStats:
    if part.device.type == "cpu":
        return sweep.grad_stats(part, pool=pool)
    return device.start_stats([part]).wait()
