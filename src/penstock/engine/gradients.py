"""Gradients on the device: summed in fp32 over micro-batches, rounded once. Room: move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from penstock.engine.device import Device, StatsTicket
from penstock.model.inventory import Inventory
from penstock.roles import Formats

ROUND_ELEMENTS = 1 << 22
"""Elements that are rounded at a time where the sum stays in fp32: whole leaves of the norm."""


@dataclass(slots=True)
class Sum:
    """The sum of one block's gradients, being made."""

    block: int
    flat: torch.Tensor
    """fp32."""
    untouched: set[str]
    """Tensors that hold no sum yet: what is there is not theirs."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)


def differentiate(
    out: torch.Tensor,
    gradient: torch.Tensor | None,
    source: torch.Tensor | None,
    parameters: Mapping[str, torch.Tensor],
    add: Callable[[str, torch.Tensor], None],
) -> torch.Tensor | None:
    """The gradient by `source`; those by parameters are handed to `add`.

    Asked for, not accumulated: what accumulates them for a parameter belongs to the lane on which
    it was made, and compiled code makes it on another.
    """
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    inputs = [*([] if source is None else [source]), *wanted.values()]
    if not out.requires_grad:
        return None
    found = list(torch.autograd.grad(out, inputs, gradient, allow_unused=True))
    back = None if source is None else found.pop(0)
    for name in wanted:
        made = found.pop(0)
        if made is not None:
            add(name, made)
        del made  # each is freed before the next is added
    return back


class Gradients:
    """Of the thread that computes."""

    def __init__(self, inventory: Inventory, formats: Formats, device: Device) -> None:
        self._inventory, self._formats, self._device = inventory, formats, device
        self._owner = {t.name: i for i, b in enumerate(inventory.blocks) for t in b.tensors}
        self._open: dict[int, Sum] = {}
        self.stats: list[tuple[int, int, StatsTicket]] = []
        """By block and by the number of the first trained tensor that each is about."""

    def start_step(self) -> None:
        self._open.clear()
        self.stats.clear()

    def open(self, block: int, flat: torch.Tensor, *, fresh: bool) -> None:
        """Sum into `flat`; it holds the sum so far unless `fresh`."""
        tensors = [t for t in self._inventory.blocks[block].tensors if t.trainable]
        offsets = self._inventory.blocks[block].offsets(True)
        views = {
            t.name: flat[offsets[t.name] : offsets[t.name] + t.elements].view(t.shape)
            for t in tensors
        }
        self._open[block] = Sum(block, flat, set(views) if fresh else set(), views)

    def is_open(self, block: int) -> bool:
        return block in self._open

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """One micro-batch's, or one chunk's."""
        total = self._open[self._owner[name]]
        if name in total.untouched:
            total.untouched.discard(name)
            total.views[name].copy_(gradient)
        else:
            total.views[name].add_(gradient)

    def close(self, block: int, into: torch.Tensor | None, *, last: bool) -> None:
        """The sum is rounded into `into`, 16 bit. Without one it stays in fp32 where it is, and is
        rounded there, to what 16 bit would hold, once it is the `last`."""
        total = self._open.pop(block)
        for name in total.untouched:
            total.views[name].zero_()
        tensors = [t for t in self._inventory.blocks[block].tensors if t.trainable]
        if into is not None:
            into.copy_(total.flat)
            offsets = self._inventory.blocks[block].offsets(True)
            grads = [into[offsets[t.name] : offsets[t.name] + t.elements] for t in tensors]
            self.stats.append((block, 0, self._device.start_stats(grads)))
        elif last:
            for number, tensor in enumerate(tensors):
                for part in rounded_parts(total.views[tensor.name].view(-1), self._formats):
                    self.stats.append((block, number, self._device.start_stats([part])))


def rounded_parts(flat: torch.Tensor, formats: Formats) -> Iterator[torch.Tensor]:
    """Round fp32 in place to what the 16-bit type would hold; each part also in that type, for its
    norm: stored otherwise the same gradient would be summed up otherwise."""
    sixteen = torch.bfloat16 if formats.dtype == "bf16" else torch.float16
    for low in range(0, flat.numel(), ROUND_ELEMENTS):
        part = flat[low : low + ROUND_ELEMENTS]
        rounded = part.to(sixteen)
        part.copy_(rounded)
        yield rounded
