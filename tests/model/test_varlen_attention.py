"""Packed rows in one call: what each document alone gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.model import document_attention, varlen_attention
from penstock.model.attention import attending_over
from penstock.model.varlen_attention import BLOCK, DocumentStarts, attend_packed, flatten_bounds

CPU = torch.device("cpu")
BOUNDS = ([0, 5, 6, 16], [0, 16])
"""Documents of five tokens, one, ten and sixteen."""
SHAPES = ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
"""Two query heads for each head of keys and values."""


def drawn(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def attend(tensors: list[torch.Tensor], bounds: Any, window: int | None) -> torch.Tensor:
    module = torch.nn.Module()
    module.num_key_value_groups = tensors[0].shape[1] // tensors[1].shape[1]
    with attending_over(bounds):
        return document_attention.attend(module, *tensors, None, sliding_window=window)[0]


@pytest.mark.parametrize("window", [None, 1, 3, 10, 64])
def test_one_call_gives_what_a_call_for_each_document_gives(window: int | None) -> None:
    """In fp32, in value and in gradient."""
    one, other = (attend(drawn(), b, window) for b in (flatten_bounds(BOUNDS, CPU), BOUNDS))
    torch.testing.assert_close(one, other)

    weight = torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    made = []
    for bounds in (flatten_bounds(BOUNDS, CPU), BOUNDS):
        tensors = drawn()
        out = attend(tensors, bounds, window)
        made.append(torch.autograd.grad((out * weight).sum(), tensors))
    for found, wanted in zip(*made, strict=True):
        torch.testing.assert_close(found, wanted)


def test_where_documents_begin_has_one_shape_for_every_batch() -> None:
    packed, whole = (flatten_bounds(b, CPU) for b in (BOUNDS, ([0, 16], [0, 16])))

    assert packed.host.tolist() == [0, 5, 6, 16] + [32] * 29
    assert whole.host.tolist() == [0, 16] + [32] * 31


def test_the_scale_is_the_models() -> None:
    q, k, v = drawn()
    cuts = flatten_bounds(BOUNDS, CPU)

    plain = attend_packed(q, k, v, cuts, scale=None, window=None)
    scaled = attend_packed(2 * q, k, v, cuts, scale=0.5 * 8**-0.5, window=None)

    torch.testing.assert_close(plain, scaled)


@pytest.mark.parametrize("window", [0, 3])
def test_the_operation_is_what_it_tells_the_compiler(window: int) -> None:
    flat = [t.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_() for t in drawn()]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = (*flat, *flatten_bounds(BOUNDS, CPU), 0.5, window)

    torch.library.opcheck(varlen_attention._forward, given, test_utils=checks)
    out, sums = (t.detach() for t in varlen_attention._forward(*given))
    bare = [t.detach() for t in flat]
    back = (torch.ones_like(out), *bare, out, sums, *flatten_bounds(BOUNDS, CPU), 0.5, window)
    torch.library.opcheck(varlen_attention._backward, back, test_utils=checks[:2])


class Kernel:
    """What the GPU's kernel takes and gives, computed by hand; and what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def cuts(self, given: torch.Tensor, longest: int, tokens: int) -> DocumentStarts:
        lengths = given.diff()
        assert given.dtype == torch.int32
        assert given[0] == 0
        assert given[-1] == tokens
        assert lengths.min() > 0
        assert longest == max(2, int(lengths.max()))
        self.calls.append((len(lengths), tokens))
        return DocumentStarts(given, given)

    def forward(
        self, q: Any, k: Any, v: Any, cuts: Any, *told: Any, scale: float, **way: int
    ) -> Any:
        _same, longest, _again, dropout, causal, _debug = told
        assert dropout == 0.0
        found = self.cuts(cuts, longest, q.shape[0])
        return (
            *varlen_attention._forward_on_cpu(q, k, v, *found, scale, window(causal, way)),
            None,
        )

    def backward(self, *given: Any, scale: float, **way: int) -> Any:
        grad, q, k, v, out, sums, cuts, _same, longest, _again, dropout, causal, *_ = given
        assert dropout == 0.0
        assert sums.is_contiguous()
        found = self.cuts(cuts, longest, q.shape[0])
        return varlen_attention._backward_on_cpu(
            grad, q, k, v, out, sums, *found, scale, window(causal, way)
        )


def window(causal: bool, way: dict[str, int]) -> int:
    """A window is told in place of being causal, and is without the token itself."""
    assert causal is not bool(way)
    assert way.get("window_size_right", 0) == 0
    return way.get("window_size_left", -1) + 1


@pytest.mark.parametrize("wide", [0, 3])
@pytest.mark.parametrize("length", [1, 13, 160], ids="documents of {} tokens".format)
def test_the_kernel_is_called_for_documents_that_it_pads_little(
    length: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same as all of them at once."""
    tokens = 160
    kernel = Kernel()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    given = [t.detach() for t in drawn(((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8)))]
    told = (*flatten_bounds([[*range(0, tokens, length), tokens]], CPU), 0.5, wide)

    out, sums = varlen_attention._forward._init_fn(*given, *told)
    back = varlen_attention._backward._init_fn(out, *given, out, sums, *told)

    wanted, wanted_sums = varlen_attention._forward_on_cpu(*given, *told)
    torch.testing.assert_close((out, sums), (wanted, wanted_sums))
    torch.testing.assert_close(
        back, varlen_attention._backward_on_cpu(out, *given, out, sums, *told)
    )
    assert sum(rows for _, rows in kernel.calls) == 2 * tokens
    assert all(BLOCK * documents <= max(tokens, BLOCK) for documents, _ in kernel.calls)


def test_documents_of_a_batch_are_found() -> None:
    rows = torch.stack([torch.cat([torch.arange(n) for n in (5, 1, 10)]), torch.arange(16)])

    assert document_attention.find_documents(rows) == [[0, 5, 6, 16], [0, 16]]
    assert document_attention.find_documents(rows[1:]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [None, 100])
@pytest.mark.parametrize("length", [4096, 513, 40, 1])
def test_the_gpus_kernel_gives_what_a_call_for_each_document_gives(
    length: int, wide: int | None
) -> None:
    """Both round to bf16; the longest sums have some thousand terms."""
    tokens, heads, size = 4096, 4, 64
    shapes = ((2, heads, tokens, size), (2, 2, tokens, size), (2, 2, tokens, size))
    bounds = [[*range(0, tokens, length), tokens], [0, 7, tokens]]
    made = []
    for documents in (flatten_bounds(bounds, torch.device("cuda")), bounds):
        tensors = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in drawn(shapes)]
        out = attend(tensors, documents, wide)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    for found, wanted in zip(*made, strict=True):
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert float(error.detach()) < 2**-6


@pytest.mark.gpu
def test_the_gpus_kernel_gives_the_same_bits_every_time_where_that_is_asked_for() -> None:
    shapes = ((1, 8, 4096, 64), (1, 2, 4096, 64), (1, 2, 4096, 64))
    cuts = flatten_bounds([[0, 1000, 1003, 4096]], torch.device("cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        made = []
        for _ in range(5):
            tensors = [t.detach().cuda().bfloat16().requires_grad_() for t in drawn(shapes)]
            out = attend(tensors, cuts, None)
            made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    finally:
        torch.use_deterministic_algorithms(False)
    for again in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], again, strict=True))
