"""The MLP of a long context, a tile of tokens at a time. Room: move.

One tensor inside the MLP of an 8 B model takes 3.5 GiB at 131,072 tokens, and backward holds
several. Tokens do not see each other there, so tiles pass one after the other; backward recomputes
each tile, and sums the weights' gradients over the tiles in fp32.

Compiled code has the tiles in it one by one; `_later` keeps its compiler from computing what
backward recomputes while forward runs, or all of it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def tile_mlps(layers: Sequence[nn.Module], tile: int) -> None:
    """From now on `layer.mlp` passes at most `tile` tokens at a time."""
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module):
            plain = mlp.forward
            mlp.forward = _Tiled(mlp, plain, tile)


def draws_in_tiles(layer: nn.Module) -> bool:
    """Whether what the layer's tiles recompute has dropout in it."""
    tiled = getattr(getattr(layer, "mlp", None), "forward", None)
    return isinstance(tiled, _Tiled) and tiled.draws


class _Tiled:
    def __init__(self, mlp: nn.Module, plain: Any, tile: int) -> None:
        self.mlp, self.plain, self.tile = mlp, plain, tile
        self.draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in mlp.modules())
        self.names = [name for name, _ in mlp.named_parameters(remove_duplicate=False)]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens <= self.tile:
            found: torch.Tensor = self.plain(hidden)
            return found
        weights = [held for _, held in self.mlp.named_parameters(remove_duplicate=False)]
        made: torch.Tensor = _Tiles.apply(self, hidden, *weights)  # type: ignore[no-untyped-call]
        return made

    def one(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tile through the MLP, with these weights."""
        named = dict(zip(self.names, weights, strict=True))
        found: torch.Tensor = torch.func.functional_call(self.mlp, named, (x,))
        return found

    def rows(self, tokens: int) -> list[slice]:
        return [slice(low, min(low + self.tile, tokens)) for low in range(0, tokens, self.tile)]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        """Of the MLP, what enters it, and its weights. Not by name: torch's compiler goes by how
        many there are, and takes an MLP of two weights for a call without `ctx`."""
        tiled, hidden, *weights = given
        ctx.tiled = tiled
        ctx.random = _random_state(hidden.device) if tiled.draws else None
        ctx.save_for_backward(hidden, *weights)
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows = tiled.rows(flat.shape[0])
        return _joined(flat, ((r, tiled.one(flat[r], weights)) for r in rows)).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        hidden, *weights = ctx.saved_tensors
        tiled: _Tiled = ctx.tiled
        flat, flat_grad = (t.reshape(-1, t.shape[-1]) for t in (hidden, grad))
        wanted = [at for at, w in enumerate(weights) if ctx.needs_input_grad[2 + at]]
        sums = {at: torch.zeros_like(weights[at], dtype=torch.float32) for at in wanted}

        def run(x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
            by_place = dict(zip(wanted, trained, strict=True))
            return tiled.one(x, [by_place.get(at, w) for at, w in enumerate(weights)])

        def tiles() -> Iterator[tuple[slice, torch.Tensor]]:
            before = flat_grad
            for rows in tiled.rows(flat.shape[0]):
                x = _later(flat[rows], before)
                pull: Any = torch.func.vjp(run, x, *(weights[at] for at in wanted))[1]
                before, *parts = pull(flat_grad[rows])
                for at, part in zip(wanted, parts, strict=True):
                    _add(sums[at], part)
                yield rows, before

        with _replaying(ctx.random, hidden.device):
            back = _joined(flat, tiles())
        made = [sums[at].to(w.dtype) if at in sums else None for at, w in enumerate(weights)]
        return (None, back.view(hidden.shape), *made)


def _joined(like: torch.Tensor, tiles: Iterable[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """Tiles as one tensor: written where they belong as they come, or, where compiled code knows
    how to do that itself, joined."""
    if torch.compiler.is_compiling():
        return torch.cat([tile for _, tile in tiles])
    out = torch.empty_like(like)
    for rows, tile in tiles:
        out[rows] = tile
    return out


def _later(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`x`, once `before` is there."""
    return _after(x, before) if torch.compiler.is_compiling() else x


@torch.library.custom_op("penstock::add", mutates_args=("total",))
def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Of its own, so that compiled code does not keep all parts to add them up at the end."""
    total.add_(part)


@torch.library.custom_op("penstock::after", mutates_args=())
def _after(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_after.register_fake
def _after_shape(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def _replaying(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """What is drawn inside was drawn before: the same dropout."""
    if state is None:
        yield
        return
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        if on_gpu:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
