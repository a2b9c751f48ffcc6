"""Gradients of several calls: rounded once, when the step is asked for. Room: move."""

from __future__ import annotations

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.gradients import rounded_parts
from penstock.engine.spans import Span
from penstock.optim import sweep
from penstock.optim.norms import GradStats
from penstock.roles import Role


def round_gradients(taken: EngineMemory) -> GradStats:
    """Every gradient that rests in fp32, to what 16 bit would hold; norm and overflow of them."""
    homes, total = taken.homes, GradStats(0, 0.0, None)
    for block in range(len(homes.inventory.blocks)):
        if not homes.has(block, Role.GRADIENT):
            continue
        if not homes.on_disk(block, Role.GRADIENT):
            total = total + _round(taken, block, homes.span(block, Role.GRADIENT))
            continue
        for piece in homes.pieces(block, Role.GRADIENT):
            start, stop, _ = homes.piece_span(block, piece)
            extent = homes.extent(block, Role.GRADIENT, piece)
            data = taken.staging[: extent.stored_nbytes]
            taken.store.start_read(extent, data.numpy()).wait()
            span = Span(Role.GRADIENT, data, start, stop - start, homes.formats)
            total = total + _round(taken, block, span)
            taken.store.start_write(extent, data.numpy()).wait()
    return total


def _round(taken: EngineMemory, block: int, span: Span) -> GradStats:
    model, total = taken.homes.inventory.blocks[block], GradStats(0, 0.0, None)
    for number, tensor in enumerate(t for t in model.tensors if t.trainable):
        at = model.offsets(True)[tensor.name]
        low, high = max(span.first, at), min(span.first + span.count, at + tensor.elements)
        if low >= high:
            continue
        for part in rounded_parts(span.values(low, high), taken.homes.formats):
            found = _stats(taken, part)
            bad = None if found.first_bad is None else (block, number)
            total = total + GradStats(found.units, found.max_abs, bad)
    return total


def _stats(taken: EngineMemory, part: torch.Tensor) -> GradStats:
    if part.device.type == "cpu":
        return sweep.grad_stats(part, pool=taken.pool)
    return taken.device.start_stats([part]).wait()
