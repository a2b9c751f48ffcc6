"""The experts' function equals that of transformers, and says how many rows each expert has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from penstock.model.experts import (
    experts_forward,
    has_experts,
    has_fused_experts,
    noting_routing,
    use_experts_function,
)
from penstock.model.mlp_tiles import tile_mlps
from penstock.model.router_loss import RouterLoss, RouterSums
from tests.support.engines import EXPERTS, plain_model, tiny_config

TOKENS = 21


def experts_of(family: str) -> tuple[Any, Any]:
    """Return a layer with experts and its module of experts, in fp32 with random weights."""
    config = tiny_config(family, initializer_range=0.2)
    model = plain_model(config, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    layer = model.model.layers[-1 if family != "qwen3_moe" else 1]
    return layer, next(m for m in layer.modules() if has_fused_experts(m))


def routed_tokens(experts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens whose choices leave the last expert without any."""
    drawn = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, 32, generator=drawn)
    scores = torch.rand(TOKENS, experts.num_experts - 1, generator=drawn)
    weights, chosen = scores.topk(2, dim=-1)
    return hidden, chosen, weights


def gradients(forward: Any, experts: Any) -> list[torch.Tensor]:
    hidden, chosen, weights = routed_tokens(experts)
    inputs = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    out = forward(hidden, chosen, weights)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("family", EXPERTS)
def test_outputs_and_gradients_equal_the_eager_loop_of_transformers(family: str) -> None:
    _, experts = experts_of(family)
    experts.config._experts_implementation = "eager"

    expected = gradients(experts.forward, experts)
    found = gradients(lambda *given: experts_forward(experts, *given), experts)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(float(each[-1].abs().max()) == 0 for each in found[3:]), "the idle expert"


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_tiles_change_neither_outputs_nor_what_is_said_about_rows(family: str) -> None:
    layer, experts = experts_of(family)
    use_experts_function([layer])
    with noting_routing() as whole:
        expected = gradients(experts.forward, experts)

    tile_mlps([layer], 5)
    with noting_routing() as tiled:
        found = gradients(experts.forward, experts)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (rows,), (same,) = whole["offsets"], tiled["offsets"]
    assert torch.equal(rows, same)
    assert int(rows[-1]) == 2 * TOKENS == int(rows[-2])


def test_compiled_tiles_have_the_gradients_of_weights() -> None:
    """Inside of a vjp, the compiler's trace does not say which gradients are needed."""
    layer, experts = experts_of("olmoe")
    use_experts_function([layer])
    expected = gradients(experts.forward, experts)

    tile_mlps([layer], 5)
    compiled = torch.compile(experts.forward, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, experts)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_layers_without_experts_are_told_apart() -> None:
    model = plain_model(tiny_config("deepseek_v3"), torch.float32)

    assert [has_experts(layer) for layer in model.model.layers] == [False, True, True]


def test_the_router_loss_is_that_of_transformers_with_padding() -> None:
    config = tiny_config("olmoe", output_router_logits=True, initializer_range=0.3)
    model = plain_model(config, torch.float32)
    ids = torch.randint(3, 200, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    loss = RouterLoss.of(config)
    assert loss is not None
    sums = RouterSums(loss, mask.bool())
    for logits in output.router_logits:
        sums.add(logits)

    leaves = [logits.detach().requires_grad_() for logits in output.router_logits]
    expected = config.router_aux_loss_coef * load_balancing_loss_func(
        tuple(leaves), config.num_experts, config.num_experts_per_tok, mask
    )
    torch.testing.assert_close(sums.loss(), expected.detach(), rtol=1e-6, atol=0)
    found = torch.autograd.grad(3.0 * expected, leaves)
    for logits, gradient in zip(leaves, found, strict=True):
        ours = sums.logit_gradient(logits, torch.tensor(3.0))
        torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-9)
