"""A tiled MLP computes the same function and the same gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.model.mlp_tiles import draws_in_tiles, tile_mlps


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        actual: torch.Tensor = x + self.mlp(2 * x)
        return actual


def test_tiles_give_the_gradients_of_the_whole_mlp() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])

    tile_mlps([Layer(mlp)], 3)
    tiled = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])

    for first, second in zip(whole, tiled, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)  # sums are fp32


def test_a_frozen_weight_gets_no_gradient() -> None:
    mlp = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mlp[0].weight.requires_grad_(False)
    tile_mlps([Layer(mlp)], 3)

    mlp(torch.randn(10, 8)).sum().backward()

    assert mlp[0].weight.grad is None
    assert mlp[1].weight.grad is not None


def test_backward_replays_dropout_tile_by_tile() -> None:
    """Backward uses the same dropout mask as forward."""
    torch.manual_seed(0)
    mlp = nn.Dropout(0.5)
    tile_mlps([Layer(mlp)], 4)
    x = torch.ones(1, 30, 8, requires_grad=True)

    out = mlp(x)
    torch.manual_seed(99)  # second code may draw random numbers in between
    out.sum().backward()

    assert x.grad is not None
    assert 0 < int((out == 0).sum()) < out.numel()
    assert torch.equal(x.grad, out.detach())


def test_backward_leaves_the_random_state_unchanged() -> None:
    torch.manual_seed(0)
    mlp = nn.Dropout(0.5)
    tile_mlps([Layer(mlp)], 4)
    out = mlp(torch.ones(1, 12, 8, requires_grad=True))
    before = torch.get_rng_state()

    out.sum().backward()

    assert torch.equal(before, torch.get_rng_state())


WIDTH = 64


def compiled_step(tile: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that forward saves for backward, and all gradients."""
    torch.manual_seed(0)
    layer = Layer(nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)))
    tile_mlps([layer], tile)
    x = torch.randn(2, 20, 8, requires_grad=True)
    out = torch.compile(layer, backend="aot_eager", dynamic=False, fullgraph=True)(x)
    grad_fn: Any = out.grad_fn
    saved = list(grad_fn.saved_tensors)
    return saved, list(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))


def test_compiled_tiles_save_nothing_of_the_mlps_width() -> None:
    """A compiler that merged backward's recomputation with forward would save the MLP's tensors."""
    tiles, tiled = compiled_step(13)
    whole, plain = compiled_step(4096)

    for first, second in zip(tiled, plain, strict=True):
        torch.testing.assert_close(first, second)
    by_token = [
        [t for t in grad_fn if t.dim() > 1 and t.shape[-1] == WIDTH and t.shape[0] != 8]
        for grad_fn in (tiles, whole)
    ]
    assert not by_token[0]
    assert by_token[1], "without tiles, the MLP's tensors are saved"


def test_dropout_in_tiles_is_detected() -> None:
    layers = [Layer(nn.Sequential(nn.Linear(8, 8), nn.Dropout(p))) for p in (0.0, 0.5)]
    tile_mlps(layers, 4)

    assert [draws_in_tiles(layer) for layer in layers] == [False, True]
    assert not draws_in_tiles(nn.Linear(8, 8))


def test_gradients_of_tiles_are_summed_in_fp32_and_rounded_once() -> None:
    """A sum in bf16 would lose the small gradients of all tiles but the first."""
    mlp = nn.Linear(1, 1, bias=False).bfloat16()
    tile_mlps([Layer(mlp)], 1)
    tokens = torch.tensor([[256.0], *[[1.0]] * 64]).bfloat16()

    mlp(tokens).sum().backward()

    assert mlp.weight.grad is not None
    assert mlp.weight.grad.item() == 256 + 64


def test_a_layer_may_add_to_the_output_of_a_tiled_mlp_in_place() -> None:
    """Falcon's layers do. Torch refuses it for a view that a custom Function returns."""
    torch.manual_seed(0)
    mlp = nn.Linear(8, 8)
    x = torch.randn(1, 7, 8, requires_grad=True)
    whole = torch.autograd.grad((mlp(x) + x).square().sum(), [x, *mlp.parameters()])
    tile_mlps([Layer(mlp)], 3)

    out = mlp(x)
    out += x
    tiled = torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])

    for first, second in zip(whole, tiled, strict=True):
        torch.testing.assert_close(first, second)


def test_a_tile_is_a_row_of_tokens() -> None:
    """Some MLPs, such as Moshi's, name all three dimensions of the hidden states."""

    class Gated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, tokens, width = x.shape
            halves = x.view(rows, tokens, 2, width // 2)
            return (halves[:, :, :1] * halves[:, :, 1:]).expand(-1, -1, 2, -1).flatten(2)

    mlp = Gated()
    x = torch.randn(2, 7, 8)
    whole = mlp(x)

    tile_mlps([Layer(mlp)], 3)

    assert torch.equal(mlp(x), whole)


def test_an_mlp_of_several_arguments_is_left_alone() -> None:
    """BLOOM's MLP takes the residual as well."""

    class Residual(nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return 2 * x + residual

    mlp = Residual()
    tile_mlps([Layer(mlp)], 3)

    assert torch.equal(mlp(torch.ones(2, 7, 8), torch.ones(2, 7, 8)), torch.full((2, 7, 8), 3.0))
    assert not draws_in_tiles(Layer(mlp))
