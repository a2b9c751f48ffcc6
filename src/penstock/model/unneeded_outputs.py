"""Skip matrix products whose results a recomputed layer does not need.

Backward recomputes a layer to have what autograd saves. The last product of most layers is not part
of that: its output is added to the residual stream, and the gradient of a sum needs no values. In
Llama, `mlp.down_proj` takes more than a quarter of a layer's products.

Which outputs backward does not need is found by trying (`find_unneeded`): a layer of the model's
twin is differentiated with other values in place of an output, and if every gradient keeps its
bits, no gradient depends on that output.

Such a product is an operation of its own, `penstock::project`. Compilers do not see inside it, so a
compiled layer runs the same code in forward and in the recomputation, and saves the same bits.
Inside `skipping_unneeded`, the operation returns memory that nobody has written.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

POISONS = (float("nan"), float("inf"), float("-inf"), 0.0, 1e4)
"""Values that take the place of an output to see whether a gradient depends on it. Memory that
nobody has written may hold any value, so there must be none that code could treat differently."""


class _Current(threading.local):
    """Whether this thread recomputes a layer for its backward pass."""

    def __init__(self) -> None:
        self.skips = False


_current = _Current()


class _Skipping:
    # Not a generator: one that Ctrl-C has left behind would end whenever its memory is freed, in
    # the middle of a later step.
    def __enter__(self) -> None:
        _current.skips = True

    def __exit__(self, *_: object) -> None:
        skip_nothing()


def skipping_unneeded() -> contextlib.AbstractContextManager[None]:
    """Skip, inside the block, what this thread computes only for the output of a layer."""
    return _Skipping()


def skip_nothing() -> None:
    """Let this thread compute everything again.

    Ctrl-C may come after the last line of a `with` block, and Python then leaves the block without
    calling `__exit__`. So a step calls this as well, before it begins and when it has failed.
    """
    _current.skips = False


# The operation.


@torch.library.custom_op("penstock::project", mutates_args=())
def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _output_like(x, weight)
    if not _current.skips:
        # The product that torch's linear computes, with its shapes, so that it has the same bits.
        # Written in place: what is returned must not be a view, to which torch refuses to add in
        # place. The layers of Llama 4 add the output of their experts to that of a linear module.
        torch.mm(_flat(x), weight.t(), out=made.view(-1, weight.shape[0]))
    return made


@_project.register_fake
def _output_like(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x, weight = ctx.saved_tensors
    of_input, of_weight = ctx.needs_input_grad
    flat = _flat(grad)
    return (
        torch.mm(flat, weight).view(x.shape) if of_input else None,
        torch.mm(flat.t(), _flat(x)) if of_weight else None,
    )


_project.register_autograd(_differentiate, setup_context=_save)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# Modules.


class _Projection:
    """The `forward` of a linear module without bias, by the operation above."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        made: torch.Tensor = _project(x, weight)
        return made


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a matrix product and nothing else.

    A bias is added by the same kernel as the product, which `penstock::project` does not call.
    """
    return type(module).forward is nn.Linear.forward and module.bias is None


def skip_products(modules: Iterable[nn.Module]) -> None:
    """Make linear modules skip their products inside `skipping_unneeded`, where they can."""
    for module in modules:
        if is_plain_linear(module) and "forward" not in vars(module):
            module.forward = _Projection(module)


def copy_without_weights(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no memory, to be called with those of the original."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, dict(empty))


# Which outputs backward does not need.

Differentiate = Callable[[], Sequence[torch.Tensor]]
"""Runs a layer forward and backward, and returns all gradients."""


def find_unneeded(
    layer: nn.Module, others: Iterable[str], differentiate: Differentiate
) -> dict[str, bool]:
    """Return, by path, whether no gradient depends on the output of a module of a layer.

    Looked at are linear modules without bias, and modules at the paths `others`. The output of a
    module that is not called once counts as needed.
    """
    expected = differentiate()
    paths = [path for path, module in layer.named_modules() if is_plain_linear(module)]
    return {
        path: _is_unneeded(layer.get_submodule(path), differentiate, expected)
        for path in dict.fromkeys((*paths, *others))
    }


def _is_unneeded(
    module: nn.Module, differentiate: Differentiate, expected: Sequence[torch.Tensor]
) -> bool:
    for poison in POISONS:
        calls = 0

        def replace_output(_module: nn.Module, _args: Any, output: Any) -> Any:
            nonlocal calls
            calls += 1
            if not isinstance(output, torch.Tensor):
                calls = 2  # several results: not looked into
                return output
            return _Poisoned.apply(output, poison)  # type: ignore[no-untyped-call]  # noqa: B023

        hook = module.register_forward_hook(replace_output)
        try:
            got = differentiate()
        except Exception:  # the model's own code looks at values, and may raise any exception
            return False
        finally:
            hook.remove()
        if calls != 1 or not all(map(torch.equal, got, expected)):
            return False
    return True


class _Poisoned(torch.autograd.Function):
    """Returns another value, and passes the gradient on as if it were the same."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, poison: float) -> torch.Tensor:
        return torch.full_like(output, poison)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
