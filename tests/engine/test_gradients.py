"""Sums of gradients on the device."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.device import pick_device
from penstock.engine.gradients import GradientSums, differentiate
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


def test_used_gradients_take_no_memory_though_another_thread_still_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's backward thread holds its last results until the operating system runs it again."""
    held: list[torch.Tensor] = []
    differentiated = torch.autograd.grad

    def held_elsewhere(*args: object, **keywords: object) -> tuple[torch.Tensor, ...]:
        gradients = differentiated(*args, **keywords)  # type: ignore[arg-type]
        held.extend(gradients)
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", held_elsewhere)
    source = torch.randn(3, 4, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    into, found = torch.zeros(3, 4), torch.zeros(5, 4)

    differentiate(
        source @ weight.T, torch.ones(3, 5), source, {"weight": weight},
        lambda _, value: found.copy_(value), into=into,
    )  # fmt: skip

    assert torch.equal(into, torch.ones(3, 5) @ weight.detach())
    assert torch.equal(found, torch.ones(5, 3) @ source.detach())
    assert [each.untyped_storage().nbytes() for each in held] == [0, 0]


def test_gradients_that_share_their_memory_are_all_used_before_it_is_freed() -> None:
    """The gradients of both terms of a sum are the gradient of the sum itself."""
    source = torch.randn(2, 3, requires_grad=True)
    first, second = (torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2))
    gradient, found = torch.full((2, 3), 2.0), dict[str, torch.Tensor]()

    differentiate(
        source * 3 + (first + second), gradient, source, {"first": first, "second": second},
        lambda name, value: found.update({name: value.clone()}), into=gradient,
    )  # fmt: skip

    assert torch.equal(found["first"], torch.full((2, 3), 2.0))
    assert torch.equal(found["second"], torch.full((2, 3), 2.0))
    assert torch.equal(gradient, torch.full((2, 3), 6.0))
