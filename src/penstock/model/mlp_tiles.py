"""Run MLPs over a tile of tokens at a time, to bound memory in long contexts.

One tensor inside the MLP of an 8B model takes 3.5 GiB at 131,072 tokens, and backward holds
several. Tokens do not see each other there, so the tiles are computed one after the other. Backward
recomputes each tile, and sums the gradients of the weights over the tiles in fp32.

A compiled layer contains the tiles one by one. Two custom operations, `penstock::after` and
`penstock::add`, keep the compiler from reordering them: otherwise it would compute during forward
what backward recomputes, or all tiles together.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def tile_mlps(layers: Sequence[nn.Module], tile: int) -> None:
    """Make `layer.mlp` of every layer process at most `tile` tokens at a time from now on.

    An MLP that takes more than the hidden states, such as BLOOM's, stays as it is.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module) and _takes_hidden_states_only(mlp):
            original = mlp.forward
            mlp.forward = _TiledForward(mlp, original, tile)


def _takes_hidden_states_only(mlp: nn.Module) -> bool:
    required = inspect.Parameter.empty
    parameters = inspect.signature(mlp.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is required and p.kind in positional for p in parameters) <= 1


def draws_in_tiles(layer: nn.Module) -> bool:
    """Return whether a tiled MLP of the layer contains dropout, which backward has to replay."""
    tiled = getattr(getattr(layer, "mlp", None), "forward", None)
    return isinstance(tiled, _TiledForward) and tiled.draws


class _TiledForward:
    """The `forward` of an MLP, in tiles if there are more tokens than a tile has."""

    def __init__(self, mlp: nn.Module, original: Any, tile: int) -> None:
        self.mlp, self.original, self.tile = mlp, original, tile
        self.draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in mlp.modules())
        self.names = [name for name, _ in mlp.named_parameters(remove_duplicate=False)]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens <= self.tile:
            whole: torch.Tensor = self.original(hidden)
            return whole
        weights = [weight for _, weight in self.mlp.named_parameters(remove_duplicate=False)]
        tiled: torch.Tensor = _Tiles.apply(self, hidden, *weights)  # type: ignore[no-untyped-call]
        return tiled

    def run_tile(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the MLP over one tile, with these weights."""
        named = dict(zip(self.names, weights, strict=True))
        # As one row: some MLPs, such as Moshi's, expect `[rows, tokens, hidden size]`.
        output: torch.Tensor = torch.func.functional_call(self.mlp, named, (x[None],))
        return output[0]

    def tiles(self, tokens: int) -> list[slice]:
        """Return the tokens of each tile."""
        return [slice(low, min(low + self.tile, tokens)) for low in range(0, tokens, self.tile)]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """Take the tiled forward, the hidden states and the MLP's weights.

        They come as `*args` because torch's compiler decides by the number of named parameters
        whether `ctx` is passed, and gets it wrong for an MLP of two weights.
        """
        tiled, hidden, *weights = args
        ctx.tiled = tiled
        ctx.random_state = _random_state(hidden.device) if tiled.draws else None
        ctx.save_for_backward(hidden, *weights)
        flat = hidden.reshape(-1, hidden.shape[-1])
        tiles = tiled.tiles(flat.shape[0])
        outputs = ((rows, tiled.run_tile(flat[rows], weights)) for rows in tiles)
        return _assemble(hidden, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        hidden, *weights = ctx.saved_tensors
        tiled: _TiledForward = ctx.tiled
        flat, flat_grad = (t.reshape(-1, t.shape[-1]) for t in (hidden, grad))
        trained = [i for i in range(len(weights)) if ctx.needs_input_grad[2 + i]]
        sums = {i: torch.zeros_like(weights[i], dtype=torch.float32) for i in trained}

        def run(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            replaced = dict(zip(trained, given, strict=True))
            return tiled.run_tile(x, [replaced.get(i, w) for i, w in enumerate(weights)])

        def input_gradients() -> Iterator[tuple[slice, torch.Tensor]]:
            previous = flat_grad
            for rows in tiled.tiles(flat.shape[0]):
                x = _after_previous(flat[rows], previous)
                pull: Any = torch.func.vjp(run, x, *(weights[i] for i in trained))[1]
                previous, *weight_grads = pull(flat_grad[rows])
                for i, weight_grad in zip(trained, weight_grads, strict=True):
                    _add(sums[i], weight_grad)
                yield rows, previous

        with _replaying(ctx.random_state, hidden.device):
            input_grad = _assemble(hidden, input_gradients())
        weight_grads = [sums[i].to(w.dtype) if i in sums else None for i, w in enumerate(weights)]
        return (None, input_grad, *weight_grads)


def _assemble(like: torch.Tensor, tiles: Iterable[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """Assemble tiles into one tensor of the shape of `like`, writing each when it is computed.

    Compiled code concatenates them instead: the compiler writes each tile in place by itself.
    """
    if torch.compiler.is_compiling():
        return torch.cat([tile for _, tile in tiles]).view(like.shape)
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    # Write to a view and return the tensor: torch refuses to add in place to a view that comes
    # from a custom Function, and Falcon's layers add to the output of their MLP in place.
    flat = out.view(-1, like.shape[-1])
    for rows, tile in tiles:
        flat[rows] = tile
    return out


def _after_previous(x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Return `x`; compiled code does so only once `previous` is computed."""
    return _after(x, previous) if torch.compiler.is_compiling() else x


@torch.library.custom_op("penstock::add", mutates_args=("total",))
def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add to a sum. An operation of its own, or compiled code would keep all parts to the end."""
    total.add_(part)


@torch.library.custom_op("penstock::after", mutates_args=())
def _after(x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_after.register_fake
def _after_shape(x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def _replaying(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the same random numbers as after `state`: backward repeats forward's dropout."""
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
