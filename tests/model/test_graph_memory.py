"""The peak of small graphs, compared with sums made by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.model import mlp_tiles
from penstock.model.compiled_graphs import (
    capture_inference,
    capture_training,
    training_lifetimes,
)
from penstock.model.graph_memory import Buffer, graph_use
from penstock.model.lifetimes import Lifetime, Request, in_order, peak_nbytes

N = 64 * 64 * 4
"""Bytes of one fp32 matrix of 64 x 64."""


def graph_of(function: Callable[..., Tensor], count: int) -> torch.fx.GraphModule:
    graph: torch.fx.GraphModule = make_fx(function, tracing_mode="fake")(
        *(torch.empty(64, 64) for _ in range(count))
    )
    return graph


def peak(function: Callable[..., Tensor], count: int = 2) -> int:
    return graph_use(graph_of(function, count)).peak


def test_a_product_is_one_buffer() -> None:
    assert peak(lambda a, b: a @ b) == N


def test_pointwise_results_are_computed_inside_the_kernel_that_uses_them() -> None:
    assert peak(lambda a, b: ((a + 1) * b).exp() - a) == N


def test_inputs_of_a_product_are_in_memory() -> None:
    # a + 1, then the product next to it.
    assert peak(lambda a, b: (a + 1) @ b) == 2 * N


def test_views_have_no_memory() -> None:
    assert peak(lambda a, b: (a @ b).t().reshape(32, 128).view(64, 64)[:32]) == N


def test_a_pointwise_result_takes_the_place_of_an_input_that_dies() -> None:
    # The product dies where its successor is written, so the two share memory.
    assert peak(lambda a, b: (a @ b).relu()) == N


def test_a_value_that_is_still_needed_keeps_its_memory() -> None:
    def residual(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        return product.relu() @ b + product

    assert peak(residual) == 3 * N


def test_memory_of_a_chain_of_products_is_that_of_two() -> None:
    assert peak(lambda a, b: a @ b @ b @ b @ b) == 2 * N


def test_a_reduction_is_a_buffer_of_its_own_size() -> None:
    # The row sums take 256 bytes, which is less than a block of the allocator.
    assert peak(lambda a, b: a / a.sum(-1, keepdim=True)) == N + 512


def test_a_value_with_many_reads_and_users_is_computed_once() -> None:
    def few(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        shared = a + b + c + d
        return shared.sum(0) + (shared * 2).sum(0)

    def many(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        shared = a + b + c + d + e
        return shared.sum(0) + (shared * 2).sum(0)

    assert peak(few, 5) == 2 * 512
    assert peak(many, 5) == N + 2 * 512


def test_outputs_live_to_the_end() -> None:
    graph = make_fx(lambda a, b: (a @ b, b @ a, a), tracing_mode="fake")(
        torch.empty(64, 64), torch.empty(64, 64)
    )
    use = graph_use(graph)

    assert use.peak == 2 * N
    assert [None if out is None else out.nbytes for out in use.outputs] == [N, N, None]


def test_inputs_that_belong_to_the_graph_die_after_their_last_use() -> None:
    graph = graph_of(lambda a, b: (a @ b) @ b @ b, 2)

    assert graph_use(graph).peak == 2 * N
    # a counts until the first product exists, which is then the peak again.
    assert graph_use(graph, {0: Buffer(N, -1, -1)}).peak == 2 * N
    # b is needed by the last product.
    assert graph_use(graph, {1: Buffer(N, -1, -1)}).peak == 3 * N


def test_one_saved_buffer_may_be_several_inputs() -> None:
    graph = graph_of(lambda a, b: a + b, 2)
    shared = Buffer(N, -1, -1)

    assert graph_use(graph, {0: shared, 1: shared}).peak == N


def test_concatenated_parts_are_written_in_their_place() -> None:
    def ten(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a @ b for _ in range(10)])

    assert peak(ten) == 10 * N


@pytest.mark.parametrize("trained", [True, False])
def test_training_holds_what_is_saved_and_gradients(trained: bool) -> None:
    with FakeTensorMode():
        x = torch.empty(64, 64).requires_grad_()
        weight = torch.empty(64, 64).requires_grad_(trained)
        graphs = capture_training(lambda x, w: (x @ w).relu() @ w, (x, weight))

    # The peak is at the last product of backward. There are the output, which the caller holds, the
    # gradient of relu's input and that of x. If the weight is trained, there are also its two
    # gradients, which are added afterwards.
    assert peak_nbytes(training_lifetimes(graphs)) == (5 * N if trained else 3 * N)


def test_requests_free_memory_before_they_allocate_it() -> None:
    first, second = Lifetime("a", 100, 0, 3), Lifetime("b", 40, 3, 5)

    assert peak_nbytes([first, second]) == 100
    assert list(in_order([first, second])) == [
        Request("a", 100), Request("a", None), Request("b", 40), Request("b", None)
    ]  # fmt: skip


def test_requests_of_training_are_as_large_as_its_peak() -> None:
    with FakeTensorMode():
        x = torch.empty(64, 64).requires_grad_()
        weight = torch.empty(64, 64).requires_grad_()
        lifetimes = training_lifetimes(
            capture_training(lambda x, w: ((x @ w).relu() @ w).exp(), (x, weight))
        )
    sizes: dict[object, int] = {}
    most = 0
    for request in in_order(lifetimes):
        if request.nbytes is None:
            del sizes[request.key]
        else:
            assert request.key not in sizes
            sizes[request.key] = request.nbytes
        most = max(most, sum(sizes.values()))

    assert most == peak_nbytes(lifetimes)
    assert not sizes


def test_an_operation_that_updates_its_input_needs_no_copy_of_it() -> None:
    """Gradients of tiles are added to one sum."""

    def three(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(64, 64)
        for _ in range(3):
            mlp_tiles._add(total, a @ b)
        return total

    with FakeTensorMode():
        graph = capture_inference(three, (torch.empty(64, 64), torch.empty(64, 64)))

    assert sum("auto_functionalized" in str(node.target) for node in graph.graph.nodes) == 3
    assert graph_use(graph).peak == 2 * N
