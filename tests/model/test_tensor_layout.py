"""Layouts of tensors: every element comes from where torch would take it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from penstock.checkpoint.assemble import SLABS, Assembler
from penstock.model import tensor_layout
from penstock.model.tensor_layout import Layout, LayoutError, whole

Sources = dict[str, torch.Tensor]


def make(layout: Layout, sources: Sources, part: int) -> torch.Tensor:
    """Read a tensor in parts."""

    def fill(name: str, first: int, out: torch.Tensor) -> None:
        out.copy_(sources[name].reshape(-1)[first : first + out.numel()])

    assembler, read = Assembler(fill), []
    for low in range(0, layout.elements, part):
        read.append(torch.full((min(part, layout.elements - low),), -1))
        assembler.read(layout, low, read[-1])
        assert len(assembler._slabs) <= SLABS
    return torch.cat(read).view(layout.shape)


def random_tensor(
    draw: random.Random, sources: Sources, shape: tuple[int, ...], depth: int
) -> tuple[Layout, torch.Tensor]:
    """Return a tensor of a shape that random operations make of new sources."""
    kinds = ["whole", "concatenate", "split", "transpose", "stack", "unstack"]
    kind = draw.choice(kinds) if depth else "whole"
    dim = draw.randrange(len(shape))
    bounds = [0, *sorted(draw.sample(range(1, shape[dim]), min(2, shape[dim] - 1))), shape[dim]]
    if kind == "concatenate":
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        parts = [
            random_tensor(draw, sources, (*shape[:dim], size, *shape[dim + 1 :]), depth - 1)
            for size in sizes
        ]
        joined = tensor_layout.concatenate([layout for layout, _ in parts], dim)
        return joined, torch.cat([tensor for _, tensor in parts], dim)
    if kind == "split":
        wide = (*shape[:dim], 2 * shape[dim] + 1, *shape[dim + 1 :])
        layout, tensor = random_tensor(draw, sources, wide, depth - 1)
        sizes = [shape[dim], 1, shape[dim]]
        return tensor_layout.split(layout, sizes, dim)[2], tensor.split(sizes, dim)[2]
    if kind == "transpose":
        other = draw.randrange(len(shape))
        swapped = list(shape)
        swapped[dim], swapped[other] = swapped[other], swapped[dim]
        layout, tensor = random_tensor(draw, sources, tuple(swapped), depth - 1)
        return tensor_layout.transpose(layout, dim, other), tensor.transpose(dim, other)
    if kind == "stack" and len(shape) > 1:
        rest = (*shape[:dim], *shape[dim + 1 :])
        parts = [random_tensor(draw, sources, rest, depth - 1) for _ in range(shape[dim])]
        stacked = tensor_layout.stack([layout for layout, _ in parts], dim)
        return stacked, torch.stack([tensor for _, tensor in parts], dim)
    if kind == "unstack":
        layout, tensor = random_tensor(
            draw, sources, (*shape[:dim], 3, *shape[dim:]), depth - 1
        )  # fmt: skip
        return tensor_layout.unstack(layout, dim)[1], tensor.unbind(dim)[1]
    name, count = f"t{len(sources)}", int(torch.tensor(shape).prod())
    sources[name] = torch.arange(count).view(shape) + 10_000 * len(sources)
    return whole(name, shape), sources[name]


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_give_the_elements_that_torch_gives(seed: int) -> None:
    draw = random.Random(seed)
    sources: Sources = {}
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))

    layout, expected = random_tensor(draw, sources, shape, depth=3)

    assert layout.shape == expected.shape == shape
    for part in (1, 7, 10_000):
        assert torch.equal(make(layout, sources, part), expected)


def test_experts_are_contiguous_runs() -> None:
    """They go straight to their places, without a copy."""
    gates, ups = ([whole(f"{k}{i}", (24, 32)) for i in range(5)] for k in "gu")
    fused = tensor_layout.concatenate(
        [tensor_layout.stack(gates, 0), tensor_layout.stack(ups, 0)], 1
    )

    pieces = list(fused.pieces(0, fused.elements))

    assert [piece.source for piece in pieces] == [f"{k}{i}" for i in range(5) for k in "gu"]
    assert all(piece.is_run and piece.elements == 24 * 32 for piece in pieces)


def test_the_slab_of_a_transposed_tensor_is_one_matrix() -> None:
    layout = tensor_layout.transpose(whole("t", (6, 10, 8)), 1, 2)

    pieces = [piece for low in range(0, 480, 7) for piece in layout.pieces(low, low + 3)]

    slabs = {piece.slab for piece in pieces if not piece.is_run}
    assert slabs == {(80 * i, 80 * i + 80) for i in range(6)}


def test_shapes_that_do_not_fit_are_refused() -> None:
    a, b = whole("a", (2, 3)), whole("b", (3, 3))
    with pytest.raises(LayoutError, match=r"stack.*\(2, 3\) and \(3, 3\)"):
        tensor_layout.stack([a, b], 0)
    with pytest.raises(LayoutError, match="along dimension 1"):
        tensor_layout.concatenate([a, b], 1)
    with pytest.raises(LayoutError, match="2 equal parts"):
        tensor_layout.chunk(b, 2, 0)
