"""Sums of gradients on the device."""

from __future__ import annotations

import pytest
import torch

from penstock.engine import gradients
from penstock.engine.device import pick_device
from penstock.engine.gradients import (
    KERNEL_ELEMENTS,
    GradientSums,
    add_in_order,
    differentiate,
)
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


def test_a_sum_is_made_in_the_order_of_its_parts() -> None:
    """Large values come and go, so that every order has other bits."""
    drawn = torch.Generator().manual_seed(3)
    exponents = torch.randint(-20, 20, (7, 1000), generator=drawn)
    signs = torch.randint(0, 2, (7, 1000), generator=drawn) * 2 - 1
    parts = (signs * 2.0**exponents * (1 + torch.rand((7, 1000), generator=drawn))).bfloat16()
    total = torch.full((1000,), 7.0)

    add_in_order(total, list(parts[:3]), fresh=True)
    add_in_order(total, list(parts[3:]))

    wanted, other = parts[0].float().numpy(), parts[-1].float().numpy()
    for k in range(1, 7):
        wanted, other = wanted + parts[k].float().numpy(), other + parts[-1 - k].float().numpy()
    assert torch.equal(total, torch.from_numpy(wanted))
    assert not torch.equal(total, torch.from_numpy(other))


def test_a_tensor_that_a_micro_batch_does_not_use_changes_no_sum() -> None:
    model = inventory(tiny_config("llama"))
    sums, block = GradientSums(model, Formats(), pick_device("cpu")), model.blocks[1]
    used, unused, *_ = block.tensors
    flat = torch.full((block.flat_elements(True),), 7.0)
    sums.open(1, flat, fresh=True)
    sums.add(used.name, torch.ones(used.shape))

    names = sums.close_micro_batch(1)

    assert used.name not in names
    assert unused.name in names
    start = block.offsets(True)[unused.name]
    for before in (-0.0, 0.0, 1.5):
        total = torch.full((unused.elements,), before)
        add_in_order(total, [flat[start : start + unused.elements]])
        assert torch.equal(
            total.view(torch.int32), torch.full_like(total, before).view(torch.int32)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_adds_with_the_bits_of_torch(dtype: torch.dtype, fresh: bool) -> None:
    """Values over all octaves, denormal ones and infinities among them; no multiple of a block."""
    count = KERNEL_ELEMENTS + 4097
    drawn = torch.Generator(device="cuda").manual_seed(3)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=drawn, device="cuda")
    total = bits.int().view(torch.float32)
    gradient = bits.short().view(dtype).roll(1)
    wanted = gradient.float() if fresh else total + gradient.float()
    assert gradients._has_kernel(total, gradient)

    add_in_order(total, [gradient], fresh=fresh)

    numbers = ~wanted.isnan()
    assert int(numbers.sum()) > count // 2
    assert torch.equal(total[numbers].view(torch.int32), wanted[numbers].view(torch.int32))
    assert torch.equal(total.isnan(), ~numbers)


@pytest.mark.gpu
def test_small_and_transposed_gradients_are_added_by_torch() -> None:
    total = torch.zeros(1024, 2048, device="cuda")
    gradient = torch.ones(2048, 1024, dtype=torch.bfloat16, device="cuda").T

    assert gradients._has_kernel(total, gradient.contiguous())
    assert not gradients._has_kernel(total, gradient)
    assert not gradients._has_kernel(total[:10], gradient[:10].contiguous())
