"""The attention kernels on a GPU: as exact as FlashAttention-2, and the same bits every time."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.model.attention import attending_over
from penstock.model.attention_launch import attention_workspace_nbytes
from penstock.model.autograd_warmup import warm_up_autograd
from penstock.model.document_attention import attend
from penstock.model.varlen_attention import attend_packed, flatten_bounds
from tests.model.attention_cases import Case, relative_errors

pytestmark = pytest.mark.gpu

DOCUMENTS = (1, 2, 127, 128, 129, 700, 1, 64, 900)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
FP32 = 1e-5
"""Relative error of fp32. Products in TF32 would have errors of 5e-4."""


@pytest.fixture(autouse=True, scope="module")
def backward_thread() -> None:
    """As the engine does: the references run matrix products in the backward thread."""
    warm_up_autograd(cuda())


def cuda() -> torch.device:
    return torch.device("cuda")


def flash_errors(case: Case, inputs: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Return the errors of FlashAttention-2 for the same case."""
    query, key, value, grad = inputs
    starts = torch.tensor(case.bounds, dtype=torch.int32, device=cuda())
    longest = max(case.lengths)
    common = (starts, starts, longest, longest, 0.0, not case.window)
    window = {"window_size_left": case.window - 1, "window_size_right": 0} if case.window else {}
    operations = torch.ops.aten
    out, sums = operations._flash_attention_forward(
        query, key, value, *common, False, scale=case.scale, **window
    )[:2]
    rest = (torch.zeros(2, dtype=torch.uint64, device=cuda()), torch.empty(0, device=cuda()))
    gradients = operations._flash_attention_backward(
        grad, query, key, value, out, sums, *common, *rest, scale=case.scale, **window
    )
    return relative_errors([out, sums, *gradients], exact)


@pytest.mark.parametrize("window", [0, 100, 512])
@pytest.mark.parametrize("size", [16, 64, 72, 96, 128, 160, 256])
def test_errors_are_no_larger_than_those_of_flash_attention(size: int, window: int) -> None:
    case = Case(DOCUMENTS, 8, 2, size, window, dtype=torch.bfloat16)
    inputs = case.inputs(cuda())
    exact = case.exact(inputs)

    found = relative_errors(case.attend(inputs), exact)
    for ours, theirs in zip(found, flash_errors(case, inputs, exact), strict=True):
        assert ours < 1.1 * theirs + 1e-6


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize(("size", "cap"), [(128, 50.0), (256, 50.0), (256, 5.0), (80, 0.0)])
def test_capped_scores_and_shared_heads(
    size: int, cap: float, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    case = Case(DOCUMENTS, *heads, size, 0, cap, dtype)
    inputs = case.inputs(cuda())

    for error in relative_errors(case.attend(inputs), case.exact(inputs)):
        assert error < 1.5 * ROUNDING[dtype]


@pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
@pytest.mark.parametrize(
    ("size", "window", "cap"),
    [(16, 0, 0.0), (64, 100, 0.0), (72, 0, 0.0), (128, 0, 50.0), (160, 512, 0.0), (256, 0, 0.0)],
)
def test_fp32_is_exact_and_repeats_its_bits(
    size: int, window: int, cap: float, heads: tuple[int, int]
) -> None:
    case = Case(DOCUMENTS, *heads, size, window, cap, torch.float32)
    inputs = case.inputs(cuda())

    found = case.attend(inputs)

    for error in relative_errors(found, case.exact(inputs)):
        assert error < FP32
    assert all(torch.equal(a, b) for a, b in zip(found, case.attend(inputs), strict=True))


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_in_fp32_are_those_of_plain_code_and_repeat_their_bits(window: int | None) -> None:
    bounds = [[0, *itertools.accumulate(DOCUMENTS)]]
    drawn = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=cuda(), generator=drawn).requires_grad_()

    tokens = sum(DOCUMENTS)
    tensors = [draw(1, heads, tokens, 64) for heads in (8, 2, 2)]
    sinks, weight = draw(8), draw(1, tokens, 8, 64).detach()
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    found = []
    for documents in (bounds, *[flatten_bounds(bounds, cuda())] * 2):
        with attending_over(documents):
            out = attend(module, *tensors, None, sliding_window=window, s_aux=sinks)[0]
        gradients = torch.autograd.grad((out * weight).sum(), [*tensors, sinks])
        found.append((out.detach(), *gradients))

    plain, kernels, again = found
    assert max(relative_errors(list(kernels), list(plain))) < FP32
    assert all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True))


@pytest.mark.parametrize(
    ("size", "window", "cap"), [(64, 0, 0.0), (128, 0, 0.0), (128, 512, 0.0), (256, 512, 50.0)]
)
def test_twenty_repetitions_give_the_same_bits_under_load(
    size: int, window: int, cap: float
) -> None:
    """Another stream computes at the same time, so that programs finish in varying order."""
    case = Case((1000, 3, 3093, 4096), 8, 2, size, window, cap, torch.bfloat16)
    inputs = case.inputs(cuda())
    wanted = case.attend(inputs)
    other, load = torch.cuda.Stream(), torch.randn(2048, 2048, device=cuda())
    for repetition in range(20):
        with torch.cuda.stream(other):
            for _ in range(repetition % 5):
                load = load @ load / load.norm()
        found = case.attend(inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    torch.cuda.synchronize()


def test_a_row_gives_the_same_bits_whatever_follows_it() -> None:
    """The first row of a batch does not depend on the number of rows."""
    whole = Case((1024, 1024, 1024), 4, 2, 64, dtype=torch.bfloat16)
    alone = whole._replace(lengths=(1024,))
    inputs = whole.inputs(cuda())
    found = alone.attend([t[:1024].contiguous() for t in inputs])

    for a, b in zip(found, whole.attend(inputs), strict=True):
        assert torch.equal(a, b[:, :1024] if b.dim() == 2 else b[:1024])


def test_the_backward_allocates_what_is_stated() -> None:
    rows, heads, shared, length, size = 2, 8, 2, 1000, 64
    shapes = ((rows, heads, length, size), *[(rows, shared, length, size)] * 2)
    tensors = [
        torch.randn(shape, device=cuda(), dtype=torch.bfloat16).transpose(1, 2).contiguous()
        .transpose(1, 2).requires_grad_()
        for shape in ((s[0], s[1], s[2], s[3]) for s in shapes)
    ]  # fmt: skip
    bounds = [[0, 600, length], [0, length]]
    documents = flatten_bounds(bounds, cuda())
    out = attend_packed(*tensors, documents, scale=None, window=None, softcap=None)
    grad = torch.randn_like(out)
    for _ in range(2):  # the first call compiles the kernels
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = torch.autograd.grad(out, tensors, grad, retain_graph=True)
        extra = torch.cuda.max_memory_allocated() - before
        results = sum(t.numel() * t.element_size() for t in made)
        del made
        warm_up_autograd(cuda())  # the backward thread may hold them until its next pass
    stated = results + attention_workspace_nbytes(tokens=rows * length, heads=heads)
    # `before` may count the block of 512 bytes that the warm-up leaves with the backward thread,
    # which frees it when the pass starts. The allocator rounds each of four tensors up.
    assert stated - 512 <= extra <= stated + 4 * 512


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_whole_rows_are_exact_and_repeat_their_bits(
    size: int, length: int, window: int | None
) -> None:
    """With gradients, through the operation that layers call."""
    rows, dtype = 2, torch.bfloat16
    case = Case((length,) * rows, 8, 2, size, window or 0, dtype=dtype)
    *flat, grad = case.inputs(cuda())
    documents = flatten_bounds([[0, length]] * rows, cuda())
    out, _, *gradients = case.exact([*flat, grad])
    made = []
    for _ in range(5):
        tensors = [
            t.view(rows, length, -1, size).transpose(1, 2).detach().requires_grad_() for t in flat
        ]
        found = attend_packed(*tensors, documents, scale=None, window=window, softcap=None)
        backward = torch.autograd.grad(found, tensors, grad.view(found.shape))
        made.append([found, *(t.transpose(1, 2) for t in backward)])

    for again in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], again, strict=True))
    flattened = [t.flatten(0, 1) for t in made[0]]
    for error in relative_errors(flattened, [out, *gradients]):
        assert error < ROUNDING[dtype]


def test_documents_do_not_see_each_other() -> None:
    """Each document alone gives what it gives inside a batch, up to rounding."""
    case = Case((300, 77, 500), 4, 2, 128, dtype=torch.bfloat16)
    inputs = case.inputs(cuda())
    whole = case.attend(inputs)
    for start, end in itertools.pairwise(case.bounds):
        alone = case._replace(lengths=(end - start,))
        found = alone.attend([t[start:end].contiguous() for t in inputs])
        wanted = [b[:, start:end] if b.dim() == 2 else b[start:end] for b in whole]
        for error in relative_errors(found, [t.double() for t in wanted]):
            assert error < 2**-8
