"""Attention over packed rows in one call equals attention over each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.model import document_attention, varlen_attention
from penstock.model.attention import attending_over
from penstock.model.varlen_attention import BLOCK, DocumentStarts, attend_packed, flatten_bounds

CPU = torch.device("cpu")
BOUNDS = ([0, 5, 6, 16], [0, 16])
"""Documents of 5, 1, 10 and 16 tokens."""
SHAPES = ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
"""Two query heads for each head of keys and values."""


def make_inputs(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def attend(tensors: list[torch.Tensor], bounds: Any, window: int | None) -> torch.Tensor:
    module = torch.nn.Module()
    module.num_key_value_groups = tensors[0].shape[1] // tensors[1].shape[1]
    with attending_over(bounds):
        return document_attention.attend(module, *tensors, None, sliding_window=window)[0]


@pytest.mark.parametrize("window", [None, 1, 3, 10, 64])
def test_one_call_equals_one_call_per_document(window: int | None) -> None:
    """In fp32, for outputs and gradients."""
    one, other = (attend(make_inputs(), b, window) for b in (flatten_bounds(BOUNDS, CPU), BOUNDS))
    torch.testing.assert_close(one, other)

    weight = torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    made = []
    for bounds in (flatten_bounds(BOUNDS, CPU), BOUNDS):
        tensors = make_inputs()
        out = attend(tensors, bounds, window)
        made.append(torch.autograd.grad((out * weight).sum(), tensors))
    for actual, wanted in zip(*made, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_document_starts_have_one_shape_for_every_batch() -> None:
    packed, whole = (flatten_bounds(b, CPU) for b in (BOUNDS, ([0, 16], [0, 16])))

    assert packed.host.tolist() == [0, 5, 6, 16] + [32] * 29
    assert whole.host.tolist() == [0, 16] + [32] * 31


def test_the_models_scale_is_used() -> None:
    q, k, v = make_inputs()
    starts = flatten_bounds(BOUNDS, CPU)

    plain = attend_packed(q, k, v, starts, scale=None, window=None)
    scaled = attend_packed(2 * q, k, v, starts, scale=0.5 * 8**-0.5, window=None)

    torch.testing.assert_close(plain, scaled)


@pytest.mark.parametrize("window", [0, 3])
def test_the_operation_matches_its_registration(window: int) -> None:
    flat = [
        t.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_()
        for t in make_inputs()
    ]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = (*flat, *flatten_bounds(BOUNDS, CPU), 0.5, window)

    torch.library.opcheck(varlen_attention._forward, given, test_utils=checks)
    out, sums = (t.detach() for t in varlen_attention._forward(*given))
    bare = [t.detach() for t in flat]
    back = (torch.ones_like(out), *bare, out, sums, *flatten_bounds(BOUNDS, CPU), 0.5, window)
    torch.library.opcheck(varlen_attention._backward, back, test_utils=checks[:2])


class Kernel:
    """The contract of the GPU's kernel, computed on the CPU; records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def starts(self, given: torch.Tensor, longest: int, tokens: int) -> DocumentStarts:
        lengths = given.diff()
        assert given.dtype == torch.int32
        assert given[0] == 0
        assert given[-1] == tokens
        assert lengths.min() > 0
        assert longest == max(2, int(lengths.max()))
        self.calls.append((len(lengths), tokens))
        return DocumentStarts(given, given)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        starts: Any,
        *arguments: Any,
        scale: float,
        **options: int,
    ) -> Any:
        _same, longest, _again, dropout, causal, _debug = arguments
        assert dropout == 0.0
        actual = self.starts(starts, longest, q.shape[0])
        return (
            *varlen_attention._forward_on_cpu(q, k, v, *actual, scale, window(causal, options)),
            None,
        )

    def backward(self, *given: Any, scale: float, **options: int) -> Any:
        grad, q, k, v, out, sums, starts, _same, longest, _again, dropout, causal, *_ = given
        assert dropout == 0.0
        assert sums.is_contiguous()
        actual = self.starts(starts, longest, q.shape[0])
        return varlen_attention._backward_on_cpu(
            grad, q, k, v, out, sums, *actual, scale, window(causal, options)
        )


def window(causal: bool, options: dict[str, int]) -> int:
    """Return the window. It replaces the causal flag, and does not count the token itself."""
    assert causal is not bool(options)
    assert options.get("window_size_right", 0) == 0
    return options.get("window_size_left", -1) + 1


@pytest.mark.parametrize("wide", [0, 3])
@pytest.mark.parametrize("length", [1, 13, 160], ids="documents of {} tokens".format)
def test_short_documents_are_split_over_several_kernel_calls(
    length: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls for groups of documents give the same as one call for all."""
    tokens = 160
    kernel = Kernel()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    given = [t.detach() for t in make_inputs(((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8)))]
    arguments = (*flatten_bounds([[*range(0, tokens, length), tokens]], CPU), 0.5, wide)

    out, sums = varlen_attention._forward._init_fn(*given, *arguments)
    back = varlen_attention._backward._init_fn(out, *given, out, sums, *arguments)

    wanted, wanted_sums = varlen_attention._forward_on_cpu(*given, *arguments)
    torch.testing.assert_close((out, sums), (wanted, wanted_sums))
    torch.testing.assert_close(
        back, varlen_attention._backward_on_cpu(out, *given, out, sums, *arguments)
    )
    assert sum(rows for _, rows in kernel.calls) == 2 * tokens
    assert all(BLOCK * documents <= max(tokens, BLOCK) for documents, _ in kernel.calls)


def test_documents_are_found_by_their_positions() -> None:
    rows = torch.stack([torch.cat([torch.arange(n) for n in (5, 1, 10)]), torch.arange(16)])

    assert document_attention.find_documents(rows) == [[0, 5, 6, 16], [0, 16]]
    assert document_attention.find_documents(rows[1:]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [None, 100])
@pytest.mark.parametrize("length", [4096, 513, 40, 1])
def test_the_gpu_kernel_equals_one_call_per_document(length: int, wide: int | None) -> None:
    """Both round to bf16; the longest sums have a few thousand terms."""
    tokens, heads, size = 4096, 4, 64
    shapes = ((2, heads, tokens, size), (2, 2, tokens, size), (2, 2, tokens, size))
    bounds = [[*range(0, tokens, length), tokens], [0, 7, tokens]]
    made = []
    for documents in (flatten_bounds(bounds, torch.device("cuda")), bounds):
        tensors = [
            t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in make_inputs(shapes)
        ]
        out = attend(tensors, documents, wide)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    for actual, wanted in zip(*made, strict=True):
        error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        assert float(error.detach()) < 2**-6


@pytest.mark.gpu
def test_the_gpu_kernel_is_deterministic_if_asked() -> None:
    shapes = ((1, 8, 4096, 64), (1, 2, 4096, 64), (1, 2, 4096, 64))
    starts = flatten_bounds([[0, 1000, 1003, 4096]], torch.device("cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        made = []
        for _ in range(5):
            tensors = [t.detach().cuda().bfloat16().requires_grad_() for t in make_inputs(shapes)]
            out = attend(tensors, starts, None)
            made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    finally:
        torch.use_deterministic_algorithms(False)
    for again in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], again, strict=True))
