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
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.model.copy_check import may_draw
from penstock.model.experts import has_fused_experts, leave_notes_to_caller, note_rows
from penstock.model.parameter_adapters import outermost
from penstock.model.unneeded_outputs import copy_without_weights, skip_products


def tile_mlps(
    layers: Sequence[nn.Module], tile: int, unneeded: Sequence[Container[str]] | None = None
) -> None:
    """Make `layer.mlp` of every layer process at most `tile` tokens at a time from now on.

    An MLP that takes more than the hidden states, such as BLOOM's, stays as it is. Of an MLP with
    a router, its experts and its shared experts are tiled instead: the router's logits are another
    output of the layer.

    `unneeded` has, for each layer, the paths of modules whose outputs backward does not need. A
    layer that is recomputed skips the products of a tiled MLP among them (`skipping_unneeded`):
    backward computes each tile again in any case.
    """
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if has_fused_experts(module):
                leave_notes_to_caller(module)
        skipped = unneeded[index] if unneeded else ()
        for path, module in list(tiled_modules(layer)):
            forward = _TiledForward(module, module.forward, tile)
            if path in skipped:
                forward.skip_unneeded()
            module.forward = forward


def tiled_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a layer that are tiled, with their paths."""
    mlp = getattr(layer, "mlp", None)
    routed = [module for module in layer.modules() if has_fused_experts(module)]
    wanted: list[nn.Module] = []
    if routed:
        # With adapters of experts, their weights belong to PEFT's wrappers.
        experts = [outermost(layer, module) for module in routed]
        wanted = [*experts, *_shared_experts(layer)]
    elif isinstance(mlp, nn.Module) and _takes_hidden_states_only(mlp):
        wanted = [mlp]
    for path, module in layer.named_modules():
        if any(module is each for each in wanted):
            yield path, module


def _shared_experts(layer: nn.Module) -> list[nn.Module]:
    """Return the MLPs next to the routed experts, which compute all tokens."""
    names = ("shared_expert", "shared_experts", "shared_mlp")
    return [
        module
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] in names and _takes_hidden_states_only(module)
    ]


def _takes_hidden_states_only(mlp: nn.Module) -> bool:
    required = inspect.Parameter.empty
    parameters = inspect.signature(mlp.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is required and p.kind in positional for p in parameters) <= 1


def draws_in_tiles(layer: nn.Module) -> bool:
    """Return whether a tiled MLP of the layer contains dropout, which backward has to replay."""
    tiled = (vars(module).get("forward") for module in layer.modules())
    return any(isinstance(each, _TiledForward) and each.draws for each in tiled)


def differentiated_in_tiles(layer: nn.Module) -> set[nn.Module]:
    """Return the modules that backward of a tile calls: those of tiled MLPs without copies."""
    tiled = (vars(module).get("forward") for module in layer.modules())
    return {
        module
        for forward in tiled
        if isinstance(forward, _TiledForward) and forward.again is forward.mlp
        for module in forward.mlp.modules()
    }


def set_training(layer: nn.Module, training: bool) -> None:
    """Set training mode in a layer, and in the copies that tiled MLPs call."""
    layer.train(training)
    for module in layer.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _TiledForward):
            forward.train(training)


class _TiledForward:
    """The `forward` of an MLP, in tiles if there are more tokens than a tile has.

    Experts take the choices and the weights of each token in addition to the hidden states.
    """

    def __init__(self, mlp: nn.Module, original: Any, tile: int) -> None:
        self.mlp, self.original, self.tile = mlp, original, tile
        self.draws = any(map(may_draw, mlp.modules()))
        self.names = [name for name, _ in mlp.named_parameters(remove_duplicate=False)]
        self.first, self.again = mlp, mlp
        """What forward and backward call for one tile: the MLP, or copies without weights."""

    def skip_unneeded(self) -> None:
        """Let forward skip all products inside `skipping_unneeded`. Backward needs them.

        They are two copies, because compiled code cannot be told which of the two it is in.
        """
        routed = any(has_fused_experts(module) for module in self.mlp.modules())
        if routed or any(True for _ in self.mlp.buffers()):
            return
        self.first, self.again = (copy_without_weights(self.mlp) for _ in range(2))
        skip_products(self.first.modules())

    def train(self, training: bool) -> None:
        """Set training mode in the copies."""
        self.first.train(training)
        self.again.train(training)

    def __call__(
        self, hidden: torch.Tensor, *routing: torch.Tensor, is_tile: bool = False
    ) -> torch.Tensor:
        if routing and not is_tile:
            note_rows(self.mlp, routing[0])
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens <= self.tile:
            whole: torch.Tensor = self.original(hidden, *routing)
            return whole
        weights = [weight for _, weight in self.mlp.named_parameters(remove_duplicate=False)]
        tensors = (hidden, *routing, *weights)
        tiled: torch.Tensor = _Tiles.apply(self, 1 + len(routing), *tensors)  # type: ignore[no-untyped-call]
        return tiled

    def run_tile(
        self, mlp: nn.Module, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Run the MLP, or a copy of it, over one tile with these weights."""
        named = dict(zip(self.names, weights, strict=True))
        if len(inputs) > 1:
            routed: torch.Tensor = torch.func.functional_call(
                mlp, named, tuple(inputs), {"is_tile": True}
            )
            return routed
        # As one row: some MLPs, such as Moshi's, expect `[rows, tokens, hidden size]`.
        output: torch.Tensor = torch.func.functional_call(mlp, named, (inputs[0][None],))
        return output[0]

    def tiles(self, tokens: int) -> list[slice]:
        """Return the tokens of each tile."""
        return [slice(low, min(low + self.tile, tokens)) for low in range(0, tokens, self.tile)]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """Take the tiled forward, the number of inputs, the inputs and the MLP's weights.

        They come as `*args` because torch's compiler decides by the number of named parameters
        whether `ctx` is passed, and gets it wrong for an MLP of two weights.
        """
        tiled, count, *tensors = args
        ctx.tiled, ctx.count = tiled, count
        ctx.random_state = _random_state(tensors[0].device) if tiled.draws else None
        ctx.save_for_backward(*tensors)
        inputs, weights = tensors[:count], tensors[count:]
        flat = [_by_token(each) for each in inputs]
        outputs = (
            (rows, [tiled.run_tile(tiled.first, [each[rows] for each in flat], weights)])
            for rows in tiled.tiles(flat[0].shape[0])
        )
        return _assemble(inputs[:1], outputs)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        tensors: list[torch.Tensor] = list(ctx.saved_tensors)
        tiled: _TiledForward = ctx.tiled
        flat, flat_grad = [_by_token(each) for each in tensors[: ctx.count]], _by_token(grad)
        wanted = [i for i in range(len(tensors)) if ctx.needs_input_grad[2 + i]]
        inputs, trained = [[i for i in wanted if (i < ctx.count) is here] for here in (True, False)]
        sums = {i: torch.zeros_like(tensors[i], dtype=torch.float32) for i in trained}

        def gradients() -> Iterator[tuple[slice, Sequence[torch.Tensor]]]:
            previous = flat_grad
            for rows in tiled.tiles(flat_grad.shape[0]):
                tile = [each[rows] for each in flat]
                tile[0] = _after_previous(tile[0], previous)

                def run(*given: torch.Tensor) -> torch.Tensor:
                    values = [*tile, *tensors[ctx.count :]]  # noqa: B023
                    for place, value in zip((*inputs, *trained), given, strict=True):
                        values[place] = value
                    return tiled.run_tile(tiled.again, values[: ctx.count], values[ctx.count :])

                here = [*(tile[i] for i in inputs), *(tensors[i] for i in trained)]
                pull: Any = torch.func.vjp(run, *here)[1]
                found = pull(flat_grad[rows])
                for i, weight_grad in zip(trained, found[len(inputs) :], strict=True):
                    _add(sums[i], weight_grad)
                previous = found[0]
                yield rows, found[: len(inputs)]

        with _replaying(ctx.random_state, grad.device):
            input_grads = _assemble([tensors[i] for i in inputs], gradients())
        found = dict(zip(inputs, input_grads, strict=True))
        found |= {i: sums[i].to(tensors[i].dtype) for i in trained}
        return (None, None, *(found.get(i) for i in range(len(tensors))))


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _assemble(
    likes: Sequence[torch.Tensor], tiles: Iterable[tuple[slice, Sequence[torch.Tensor]]]
) -> list[torch.Tensor]:
    """Assemble tiles into tensors of the shapes of `likes`, writing each when it is computed.

    Compiled code concatenates them instead: the compiler writes each tile in place by itself.
    """
    if torch.compiler.is_compiling():
        every = [parts for _, parts in tiles]
        columns = zip(*every, strict=True) if likes else ()
        return [
            torch.cat(parts).view(like.shape) for like, parts in zip(likes, columns, strict=True)
        ]
    whole = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in likes]
    # Write to views and return the tensors: torch refuses to add in place to a view that comes
    # from a custom Function, and Falcon's layers add to the output of their MLP in place.
    flat = [_by_token(each) for each in whole]
    for rows, parts in tiles:
        for into, part in zip(flat, parts, strict=True):
            into[rows] = part
    return whole


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
