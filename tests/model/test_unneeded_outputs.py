"""Products that a recomputed layer does not need are found by trying, and skipped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock.model import unneeded_outputs
from penstock.model.self_check import check_model
from penstock.model.survey import survey_config
from penstock.model.unneeded_outputs import (
    copy_without_weights,
    find_unneeded,
    skip_products,
    skipping_unneeded,
)
from tests.support.engines import tiny_config

# The operation.


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(24, 40, bias=False, dtype=dtype)


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    out = module(x)
    above = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], above)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (7, 24), (2, 5, 24)], ids=str)
def test_a_product_has_the_bits_of_a_linear_module(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    x = torch.randn(shape).to(dtype)
    expected = results(linear(dtype), x)
    module = linear(dtype)
    skip_products([module])

    got = results(module, x)

    assert all(map(torch.equal, got, expected))
    assert [each.stride() for each in got[1:]] == [each.stride() for each in expected[1:]]


def test_a_transposed_input_has_the_bits_of_a_contiguous_one() -> None:
    x = torch.randn(5, 2, 24).transpose(0, 1)
    expected = results(linear(), x)
    module = linear()
    skip_products([module])

    assert all(map(torch.equal, results(module, x), expected))


def test_what_a_product_returns_can_be_changed_in_place() -> None:
    module, x = linear(), torch.randn(2, 5, 24)
    expected = torch.autograd.grad(module(x).mul(2.0).sum(), module.weight)
    skip_products([module])

    out = module(x).mul_(2.0)

    assert torch.equal(torch.autograd.grad(out.sum(), module.weight)[0], expected[0])


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at a matrix product, and return what cannot be mistaken for a result."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a product was computed")

    def blank(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.new_full((*x.shape[:-1], weight.shape[0]), float("nan"))

    monkeypatch.setattr(torch, "mm", refuse)
    monkeypatch.setattr(unneeded_outputs, "_output_like", blank)


@pytest.mark.usefixtures("no_products")
def test_nothing_is_computed_inside_the_block_by_this_thread_alone() -> None:
    module, failed = linear(), list[BaseException]()
    skip_products([module])

    def run_elsewhere() -> None:
        try:
            module(torch.ones(3, 24))
        except AssertionError as error:
            failed.append(error)

    with skipping_unneeded():
        out = module(torch.ones(2, 3, 24))
        other = threading.Thread(target=run_elsewhere)
        other.start()
        other.join()

    assert out.shape == (2, 3, 40)
    assert out.isnan().all()
    assert len(failed) == 1
    with pytest.raises(AssertionError, match="a product was computed"):
        module(torch.ones(3, 24))


def test_gradients_of_a_skipped_product_do_not_depend_on_its_output() -> None:
    x, module = torch.randn(5, 24), linear()
    skip_products([module])
    expected = results(module, x)[1:]

    with skipping_unneeded():
        got = results(module, x)[1:]

    assert all(map(torch.equal, got, expected))


def test_only_the_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, products = linear(), list[Sequence[int]]()
    module.weight.requires_grad_(False)
    skip_products([module])
    plain = torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor, **into: Any) -> torch.Tensor:
        products.append(b.shape)
        return plain(a, b, **into)

    monkeypatch.setattr(torch, "mm", counted)
    x = torch.randn(5, 24, requires_grad=True)
    module(x).sum().backward()

    assert products == [(24, 40), (40, 24)]


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 4), nn.Bilinear(4, 4, 4, bias=False), nn.LayerNorm(4)]
)
def test_modules_that_compute_more_than_a_product_stay(module: nn.Module) -> None:
    skip_products([module])

    assert "forward" not in vars(module)


def test_copies_have_no_weights_and_run_with_those_of_the_original() -> None:
    module = nn.Sequential(linear(), nn.ReLU())
    copied = copy_without_weights(module)
    x = torch.randn(3, 24)

    out = torch.func.functional_call(copied, dict(module.named_parameters()), (x,))

    assert all(p.device.type == "meta" for p in copied.parameters())
    assert module[0].weight.device.type == "cpu"
    assert torch.equal(out, module(x))


# Finding them.


class Layer(nn.Module):
    """A layer that does something with the output of its last product."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.biased = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x)) + self.biased(x)
        return self.use(x, self.last(inner)) * self.scale.detach()


def unneeded(layer: nn.Module, *others: str) -> set[str]:
    x = torch.linspace(-2, 2, 24).view(3, 8).requires_grad_()
    above = torch.linspace(0.5, 1.5, 24).view(3, 8)

    def differentiate() -> list[torch.Tensor]:
        sources = [x, *(p for p in layer.parameters() if p.requires_grad)]
        grads = torch.autograd.grad(layer(x), sources, above, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    found = find_unneeded(layer, others, differentiate)
    return {path for path, is_unneeded in found.items() if is_unneeded}


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda x, y: x + y, {"last"}),
        (lambda x, y: x + 0.5 * y, {"last"}),
        (lambda x, y: torch.cat([x, y])[3:] + y, {"last"}),
        (lambda x, y: x + nn.functional.layer_norm(y, (8,)), set()),
        (lambda x, y: x + nn.functional.relu(y), set()),
        (lambda x, y: x + y * x.sigmoid(), set()),
        (lambda x, y: x + y.clamp(-1e9, 1e9), set()),
        (lambda x, y: x + y.nan_to_num(), set()),
        (lambda x, y: x + torch.where(y > 1e3, 2 * y, y), set()),
        (lambda x, y: x + torch.where(y > 1e30, 2 * y, y), set()),
        (lambda x, y: x + torch.where(y < -1e30, 2 * y, y), set()),
        (lambda x, y: x + y if y.isfinite().all() else x, set()),
        (lambda x, y: x + y if y.detach().sum() < 100 else 1 / 0, set()),
    ],
    ids=["sum", "scaled", "slice", "norm", "relu", "gate", "clamp", "nan_to_num", "large values",
         "huge values", "huge negative values",         "looks at values", "fails"],
)  # fmt: skip
def test_an_output_is_unneeded_if_no_gradient_depends_on_it(use: Any, found: set[str]) -> None:
    assert unneeded(Layer(use)) == found


def test_a_module_that_is_called_twice_is_needed() -> None:
    layer = Layer(lambda x, y: x + y)
    layer.use = lambda x, y: x + y + layer.last(x)

    assert unneeded(layer) == set()


def test_other_modules_are_looked_at_if_they_return_a_tensor() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x, 1

    layer = Layer(lambda x, y: x + layer.norm(y) + layer.pair(y)[0])
    layer.norm, layer.pair = nn.LayerNorm(8), Pair()

    assert unneeded(layer, "norm", "pair") == {"norm"}


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("llama", ("mlp", "mlp.down_proj")),
        ("phi3", ("mlp", "mlp.down_proj")),
        # Dense layers and others with experts.
        ("qwen3_moe", ("mlp", "mlp.down_proj", "mlp.experts")),
        ("gptj", ("attn.out_proj", "mlp")),
        ("gemma3", ()),  # a norm follows
        ("olmo2", ()),
        ("deepseek_v3", ("mlp", "mlp.down_proj", "mlp.experts", "mlp.shared_experts",
                         "mlp.shared_experts.down_proj")),
    ],
)  # fmt: skip
def test_the_unneeded_outputs_of_families(family: str, paths: tuple[str, ...]) -> None:
    found = survey_config(tiny_config(family), name=family, check=check_model)

    assert {layer.unneeded for layer in found.layers} == {paths}
    for layer in found.layers:
        weights = {t.name.removeprefix(f"{layer.name}."): t.elements for t in layer.tensors}
        expected = sum(weights.get(f"{path}.weight", 0) for path in paths)
        assert layer.unneeded_elements == expected
