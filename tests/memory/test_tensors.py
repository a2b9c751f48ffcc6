"""Placed tensors: dtypes, shapes, gradients, queries and moves."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

import penstock as ps
from penstock import _native
from penstock.errors import DtypeError, MoveError, PlacementPermissionError, SizeError
from penstock.machine.sysfs import System
from penstock.memory import tensors
from penstock.memory.residency import residency

HERE = ps.Node(System().allowed_nodes()[0])
PAGE = _native.page_nbytes()

Maker = Callable[..., torch.Tensor]
MAKERS: dict[str, Maker] = {
    "empty": ps.empty,
    "zeros": ps.zeros,
    "full": lambda shape, **options: ps.full(shape, 1.0, **options),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def double_by_default() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@makers
@pytest.mark.parametrize("shape", [7, (7,), (2, 3, 5), torch.Size([4, 1]), ()], ids=repr)
def test_a_tensor_has_the_requested_shape(make: Maker, shape: object) -> None:
    tensor = make(shape)

    assert tensor.shape == (torch.Size([7]) if shape == 7 else torch.Size(shape))
    assert tensor.is_contiguous()


@makers
@pytest.mark.parametrize("shape", [0, -1, (3, 0), (-2, -2)], ids=repr)
def test_an_empty_shape_is_refused(make: Maker, shape: object) -> None:
    with pytest.raises(SizeError, match="every dimension must be 1 or more, got"):
        make(shape)


@makers
@pytest.mark.parametrize("shape", [2**62, 2**64, (2**40, 2**40)], ids=repr)
def test_a_shape_beyond_the_address_space_is_refused(make: Maker, shape: object) -> None:
    with pytest.raises(SizeError, match="bytes, got"):
        make(shape, dtype=torch.float32)


@pytest.mark.parametrize("shape", [1.5, "3", (2, 1.0)], ids=repr)
def test_a_size_must_be_an_integer(shape: object) -> None:
    with pytest.raises(TypeError):
        ps.empty(shape)  # type: ignore[arg-type]


@makers
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
)
def test_a_tensor_has_the_requested_dtype(make: Maker, dtype: torch.dtype) -> None:
    tensor = make(5, dtype=dtype)

    assert tensor.dtype == dtype
    assert tensor.nbytes == 5 * dtype.itemsize


@pytest.mark.usefixtures("double_by_default")
def test_the_default_dtype_is_that_of_torch() -> None:
    assert ps.empty(1).dtype == ps.zeros(1).dtype == ps.full(1, 2.0).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_quantized_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"{dtype}; place int8"):
        ps.empty(4, dtype=dtype)


def test_the_name_of_a_dtype_is_refused() -> None:
    with pytest.raises(DtypeError, match=r"torch.dtype, got 'float32'"):
        ps.empty(4, dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, True, 1.5, 2j], ids=repr)
def test_full_infers_its_dtype_as_torch_does(value: float) -> None:
    placed, expected = ps.full((3, 2), value), torch.full((3, 2), value)

    assert placed.dtype == expected.dtype
    assert torch.equal(placed, expected)


def test_full_prefers_an_explicit_dtype() -> None:
    assert torch.equal(ps.full(3, 7, dtype=torch.uint8), torch.full((3,), 7, dtype=torch.uint8))


@makers
@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad_is_set_as_requested(make: Maker, requires_grad: bool) -> None:
    tensor = make(3, requires_grad=requires_grad)

    assert tensor.requires_grad is requires_grad
    assert tensor.is_leaf


def test_a_placed_copy_has_the_same_values_in_new_memory() -> None:
    source = torch.arange(60, dtype=torch.int32).view(5, 12)[:, ::3]

    placed = ps.from_tensor(source, place=HERE)
    source[0, 0] = -1

    assert placed.tolist() == torch.arange(60).view(5, 12)[:, ::3].tolist()
    assert placed.dtype == torch.int32
    assert placed.is_contiguous()
    assert _native.Region.at(placed.data_ptr()) is not None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_placed_copy_is_a_leaf_with_the_requires_grad_of_its_source(requires_grad: bool) -> None:
    placed = ps.from_tensor(torch.ones(3, requires_grad=requires_grad))

    assert placed.requires_grad is requires_grad
    assert placed.is_leaf


def test_a_sparse_tensor_cannot_be_placed() -> None:
    with pytest.raises(DtypeError, match=r"only dense.*torch.sparse_coo"):
        ps.from_tensor(torch.eye(3).to_sparse())


def test_where_covers_everything_that_strides_reach() -> None:
    rows = ps.zeros((3, 2 * PAGE), dtype=torch.uint8)

    assert sum(ps.where(rows[:, 0]).pages.values()) == 5  # pages 0 to 4, where the last row starts
    assert sum(ps.where(rows[1:, :PAGE]).pages.values()) == 3
    assert sum(ps.where(rows[0].expand(100, -1)).pages.values()) == 2


def test_where_distinguishes_touched_pages() -> None:
    tensor = ps.zeros(4 * PAGE, dtype=torch.uint8, prefault=False, huge=None)
    tensor[PAGE] = 1

    found = ps.where(tensor)

    assert (sum(found.pages.values()), found.unmapped) == (1, 3)


@pytest.mark.parametrize("query", [ps.where, lambda t: ps.move(t, HERE)], ids=["where", "move"])
@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (torch.empty(0), SizeError, r"shape \(0,\) has no memory"),
        (torch.eye(3).to_sparse(), SizeError, "only dense.*sparse_coo"),
        (torch.empty(3, device="meta"), TypeError, "this tensor is on meta"),
    ],
    ids=["empty", "sparse", "meta"],
)
def test_a_tensor_without_host_memory_is_refused(
    query: Callable[[torch.Tensor], object], tensor: torch.Tensor, error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        query(tensor)


@pytest.mark.parametrize("place", [None, 0, "node0"])
def test_move_needs_a_place(place: object) -> None:
    with pytest.raises(TypeError, match="place"):
        ps.move(torch.ones(3), place)  # type: ignore[arg-type]


def test_moving_memory_of_another_allocator_keeps_address_and_contents() -> None:
    tensor = torch.arange(1 << 18)
    address = tensor.data_ptr()

    ps.move(tensor, HERE)

    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(1 << 18))
    assert set(ps.where(tensor).pages) == {HERE.id}


def test_pages_of_another_allocator_that_do_not_move_raise_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.ones(1 << 18)
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(_native, "migrate_pages", lambda *given: asked.append(given) or 3)

    with pytest.raises(MoveError, match=r"could not move 1.00 MiB: 3 pages stayed") as caught:
        ps.move(tensor, HERE)

    assert caught.value.wanted == 1 << 20
    assert asked[0][:2] == (tensor.data_ptr(), 1 << 20)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (errno.EPERM, PlacementPermissionError, "move_pages is not permitted"),
        (errno.ENOMEM, MoveError, "1.00 MiB: .*out of memory"),
    ],
)
def test_a_failed_move_of_another_allocators_memory_is_explained(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type, text: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, "move_pages: failed")

    monkeypatch.setattr(_native, "migrate_pages", refuse)

    with pytest.raises(error, match=text):
        ps.move(torch.ones(1 << 18), HERE)


def test_moving_a_view_moves_its_part_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tensors, "move_region", lambda *given: asked.append(given))
    tensor = ps.zeros((4, 1000), dtype=torch.float32)

    ps.move(tensor[1:3, 10:20], HERE)

    region, offset, nbytes, place = asked[0]
    assert isinstance(region, _native.Region)
    assert region.address == tensor.data_ptr()
    assert (offset, nbytes, place) == (4 * 1010, 4 * 1010, HERE)


def test_where_of_an_arena_tensor_counts_its_own_pages() -> None:
    arena = ps.Arena(8 * PAGE)
    arena.take(3 * PAGE)
    tensor = arena.tensor((2, PAGE), torch.uint8, align=PAGE)

    assert ps.where(tensor) == residency(arena.address + 3 * PAGE, 2 * PAGE)
    assert ps.where(tensor).nbytes == {next(iter(arena.where().pages)): 2 * PAGE}
