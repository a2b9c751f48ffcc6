"""Attention over packed rows in one call equals attention over each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.model import document_attention, varlen_attention
from penstock.model.attention import attending_over
from penstock.model.varlen_attention import attend_packed, flatten_bounds

CPU = torch.device("cpu")
BOUNDS = ([0, 5, 6, 16], [0, 16])
"""Documents of 5, 1, 10 and 16 tokens."""
SHAPES = ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
"""Two query heads for each head of keys and values."""


def make_inputs(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def attend(
    tensors: list[torch.Tensor], bounds: Any, window: int | None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    module = torch.nn.Module()
    module.num_key_value_groups = tensors[0].shape[1] // tensors[1].shape[1]
    with attending_over(bounds):
        made = document_attention.attend(
            module, *tensors, None, sliding_window=window, softcap=softcap, s_aux=sinks
        )
    return made[0]


@pytest.mark.parametrize("sinks", [None, [3.0, -2.0, 0.5, 8.0]], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 3, 10, 64])
def test_one_call_equals_one_call_per_document(
    window: int | None, softcap: float | None, sinks: list[float] | None
) -> None:
    """In fp32, for outputs and gradients, also of sinks."""
    made = []
    for bounds in (flatten_bounds(BOUNDS, CPU), BOUNDS):
        tensors = make_inputs()
        given = None if sinks is None else torch.tensor(sinks, requires_grad=True)
        out = attend(tensors, bounds, window, softcap, given)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        inputs = tensors if given is None else [*tensors, given]
        made.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for actual, wanted in zip(*made, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_documents_have_one_shape_for_every_batch() -> None:
    packed, whole = (flatten_bounds(b, CPU).spans for b in (BOUNDS, ([0, 16], [0, 16])))

    assert packed.shape == whole.shape == (2, 128 + 1)
    assert packed.dtype == torch.int32
    assert packed[0, :32].tolist() == [0] * 5 + [5] + [6] * 10 + [16] * 16
    assert packed[1, :32].tolist() == [4] * 5 + [5] + [15] * 10 + [31] * 16
    assert whole[0, :32].tolist() == [0] * 16 + [16] * 16
    assert int(packed[0, 32:128].min()) > 32  # padding sees no key


def test_the_models_scale_is_used() -> None:
    q, k, v = make_inputs()
    documents = flatten_bounds(BOUNDS, CPU)

    plain = attend_packed(q, k, v, documents, scale=None, window=None, softcap=None)
    scaled = attend_packed(
        2 * q, k, v, documents, scale=0.5 * 8**-0.5, window=None, softcap=None
    )  # fmt: skip

    torch.testing.assert_close(plain, scaled)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (0, 2.0)])
def test_the_operation_matches_its_registration(window: int, cap: float) -> None:
    flat = [
        t.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_()
        for t in make_inputs()
    ]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    spans = flatten_bounds(BOUNDS, CPU).spans
    given = (*flat, spans, 0.5, window, cap)

    torch.library.opcheck(varlen_attention._forward, given, test_utils=checks)
    out, sums = (t.detach() for t in varlen_attention._forward(*given))
    bare = [t.detach() for t in flat]
    back = (torch.ones_like(out), *bare, out, sums, spans, 0.5, window, cap)
    torch.library.opcheck(varlen_attention._backward, back, test_utils=checks[:2])


def test_documents_are_found_by_their_positions() -> None:
    rows = torch.stack([torch.cat([torch.arange(n) for n in (5, 1, 10)]), torch.arange(16)])

    assert document_attention.find_documents(rows) == [[0, 5, 6, 16], [0, 16]]
    assert document_attention.find_documents(rows[1:]) is None
    # As in transformers: wherever a position does not follow the one before it.
    jumps = torch.tensor([[3, 4, 7, 8, 8, 2]])
    assert document_attention.find_documents(jumps) == [[0, 2, 4, 5, 6]]


@pytest.mark.parametrize("heads", [2, 3])
def test_a_sink_takes_its_share_of_every_query_of_its_own_head(heads: int) -> None:
    query, key, value = make_inputs(((2, heads, 5, 8),) * 3)
    sinks = torch.tensor([3.0, -2.0, 1.0])[:heads]
    module = torch.nn.Module()
    with attending_over(None):
        out = document_attention.attend(module, query, key, value, None, s_aux=sinks)[0]

    for head in range(heads):
        scores = query[:, head] @ key[:, head].transpose(1, 2) * 8**-0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        share = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(out[:, :, head], share @ value[:, head])
