"""Sums of gradients on the device."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.device import pick_device
from penstock.engine.gradients import GradientSums
from penstock.roles import Formats
from tests.support.engines import inventory, tiny_config


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["rounded elsewhere", "in place"])
def test_a_tensor_without_a_gradient_has_a_gradient_of_zero(dtype: torch.dtype | None) -> None:
    """The buffer held something else before: a parameter that no batch uses must not get it."""
    model = inventory(tiny_config("llama"))
    sums = GradientSums(model, Formats(), pick_device("cpu"))
    block = model.blocks[1]
    used, *unused = block.tensors
    flat = torch.full((block.flat_elements(True),), 7.0)
    into = None if dtype is None else torch.full_like(flat, 7.0, dtype=dtype)
    sums.start_step()
    sums.open(1, flat, fresh=True)
    sums.add(used.name, torch.full(used.shape, 0.5))
    sums.add(used.name, torch.full(used.shape, 0.25))

    sums.close(1, into, last=True)

    found, offsets = flat if into is None else into, block.offsets(True)
    parts = {t.name: found[offsets[t.name] : offsets[t.name] + t.elements] for t in block.tensors}
    assert torch.equal(parts[used.name].float(), torch.full((used.elements,), 0.75))
    assert len(unused) > 3
    for tensor in unused:
        assert not parts[tensor.name].any(), tensor.name
    assert sums.gather_stats().sum_squares == used.elements * 0.75**2
