"""Formats, blocks and workloads: bytes to the byte, and checks that name the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InventoryError, WorkloadError
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.plan.workload import Workload, default_numerics
from penstock.records import from_json, to_json
from penstock.roles import SCALE_BLOCK, TENSOR_ALIGNMENT, TRAINED, Formats, Role
from tests.support.models import model, work


@pytest.mark.parametrize(
    ("dtype", "moments", "wide", "nbytes"),
    [
        ("bf16", "fp32", False, 14),
        ("bf16", "bf16", False, 10),
        ("bf16", "int8", False, 8 + 2 * 2 / 256),
        ("fp16", "fp32", False, 16),
        ("bf16", "fp32", True, 16),
    ],
)
def test_bytes_a_parameter(dtype: str, moments: str, wide: bool, nbytes: float) -> None:
    formats = Formats(dtype=dtype, moments=moments, wide_gradient=wide)  # type: ignore[arg-type]

    assert formats.per_parameter == nbytes


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_tensors_start_aligned_and_never_overlap(sizes: list[int]) -> None:
    tensors = tuple(TensorSpec(name=f"t{i}", shape=(n,)) for i, n in enumerate(sizes))
    block = Block(name="b", kind="layer", tensors=tensors)
    starts = block.offsets(trainable=True)

    end = 0
    for tensor in tensors:
        assert starts[tensor.name] >= end
        for role in TRAINED:
            before = Formats(moments="int8").nbytes(role, starts[tensor.name])
            bases = (
                2 * starts[tensor.name] // SCALE_BLOCK if role in (Role.FIRST, Role.SECOND) else 0
            )
            assert (before - bases) % TENSOR_ALIGNMENT == 0
        end = starts[tensor.name] + tensor.elements
    assert block.flat_elements(True) >= end


def test_a_tied_tensor_is_counted_once() -> None:
    tied, untied = model("8b-tied"), model("llama-3.1-8b")

    assert untied.parameters() == 8_030_261_248
    assert untied.parameters() - tied.parameters() == 128256 * 4096


def test_frozen_tensors_have_no_place_in_the_trained_buffer() -> None:
    frozen = TensorSpec(name="a", shape=(512,), trainable=False)
    block = Block(name="b", kind="layer", tensors=(frozen, TensorSpec(name="c", shape=(256,))))

    assert (block.flat_elements(True), block.flat_elements(False)) == (256, 512)


def test_an_inventory_survives_its_file() -> None:
    inventory = model("qwen2.5-3b")
    again = from_json(Inventory, to_json(inventory))

    assert again == inventory
    assert again.fingerprint == inventory.fingerprint


def test_a_fingerprint_tells_models_and_frozen_parts_apart() -> None:
    prints = {model(name).fingerprint for name in ("llama-3.1-8b", "8b-tied", "qwen2.5-7b")}

    assert len(prints) == 3


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["layer", "layer", "head"], "must be an embedding, layers and a head"),
        (["embedding", "head"], "must be an embedding, layers and a head"),
    ],
)
def test_a_row_of_blocks_must_be_one(kinds: list[str], message: str) -> None:
    blocks = tuple(Block(name=str(i), kind=k) for i, k in enumerate(kinds))  # type: ignore[arg-type]
    with pytest.raises(InventoryError, match=f"^blocks: {message}"):
        Inventory(model="m", hidden=8, vocabulary=8, blocks=blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "^context: must be 1 or more, got 0"),
        ({"batch": -1}, "^batch: must be 1 or more, got -1"),
        ({"clip": -0.5}, "^clip: must be above 0, got -0.5"),
        ({"rank": 2}, "^rank: must be 0 to 0, got 2"),
    ],
)
def test_a_workload_names_what_is_wrong(change: dict[str, float], message: str) -> None:
    numerics = default_numerics(model("qwen2.5-3b"), context=4096, batch=4)
    with pytest.raises(WorkloadError, match=message):
        Workload(**{"context": 4096, "batch": 4, "numerics": numerics, **change})  # type: ignore[arg-type]


def test_a_context_beyond_the_model_is_refused() -> None:
    inventory = model("qwen2.5-3b")
    with pytest.raises(WorkloadError, match=r"^context: is 200000, .* cover 131072"):
        work(inventory, 200_000, 1).check(inventory)


def test_numerics_follow_from_model_and_context() -> None:
    short = default_numerics(model("llama-3.1-8b"), context=4096, batch=64)
    long = default_numerics(model("llama-3.1-8b"), context=131072, batch=64)

    assert (short.micro_batch, long.micro_batch) == (4, 1)
    assert short.loss_chunk == long.loss_chunk == 1024
    assert default_numerics(model("qwen2.5-7b"), context=4096, batch=64).loss_chunk == 512


def test_a_loss_of_ones_own_or_capped_logits_go_without_the_fused_kernel() -> None:
    plain = model("llama-3.1-8b")

    def chosen(inventory: Inventory, **told: bool) -> tuple[str, int]:
        found = default_numerics(inventory, context=4096, batch=8, kernels=True, **told)
        return found.loss_kernel, found.loss_chunk

    assert chosen(plain) == ("fused", 2048)
    assert chosen(plain, own_loss=True) == ("torch", 1024)
    assert chosen(replace(plain, caps_logits=True)) == ("torch", 1024)


def test_packed_rows_pass_in_one_call_where_there_is_a_kernel_for_the_models_attention() -> None:
    capped = model("llama-3.1-8b")
    plain = replace(capped, plain_attention=True)

    def chosen(inventory: Inventory, kernels: bool) -> str:
        return default_numerics(inventory, context=4096, batch=8, kernels=kernels).attention

    assert chosen(plain, True) == "varlen"
    assert chosen(plain, False) == chosen(capped, True) == "sdpa"
    numerics = default_numerics(plain, context=4096, batch=8, kernels=True)
    wanted = Workload(context=4096, batch=8, numerics=numerics)
    wanted.check(plain)
    with pytest.raises(WorkloadError, match=r"^numerics.attention: is varlen, but .* use sdpa"):
        wanted.check(capped)
