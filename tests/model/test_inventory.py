"""Inventories: flat buffers, fingerprints and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InventoryError
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.records import from_json, to_json
from penstock.roles import SCALE_BLOCK, SWEEP_LEAF, TENSOR_ALIGNMENT, TRAINED, Formats, Role
from tests.support.models import model

KINDS: tuple[Any, ...] = ("embedding", "layer", "head")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_tensors_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
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


def test_a_tied_tensor_counts_once() -> None:
    tied, untied = model("8b-tied"), model("llama-3.1-8b")

    assert untied.parameters() == 8_030_261_248
    assert untied.parameters() - tied.parameters() == 128256 * 4096


def test_frozen_tensors_are_not_in_the_trainable_buffer() -> None:
    frozen = TensorSpec(name="a", shape=(512,), trainable=False)
    block = Block(name="b", kind="layer", tensors=(frozen, TensorSpec(name="c", shape=(256,))))

    assert (block.flat_elements(True), block.flat_elements(False)) == (256, 512)


def test_an_inventory_survives_json() -> None:
    inventory = model("qwen2.5-3b")
    loaded = from_json(Inventory, to_json(inventory))

    assert loaded == inventory
    assert loaded.fingerprint == inventory.fingerprint


def test_fingerprints_of_different_models_differ() -> None:
    prints = {model(name).fingerprint for name in ("llama-3.1-8b", "8b-tied", "qwen2.5-7b")}

    assert len(prints) == 3


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"shape": (2, 4)}, {"trainable": False}], ids=str
)
def test_the_fingerprint_depends_on_every_tensor(change: dict[str, Any]) -> None:
    def inventory(tensor: TensorSpec) -> Inventory:
        blocks = [Block(name=str(i), kind=k) for i, k in enumerate(KINDS)]
        blocks[1] = replace(blocks[1], tensors=(TensorSpec(name="first", shape=(3,)), tensor))
        return Inventory(model="m", hidden=8, vocabulary=8, blocks=tuple(blocks))

    tensor = TensorSpec(name="second", shape=(4, 2))
    changed = replace(tensor, **change)
    assert inventory(tensor).fingerprint != inventory(changed).fingerprint


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["layer", "layer", "head"], "must be an embedding, layers and a head"),
        (["embedding", "head"], "must be an embedding, layers and a head"),
    ],
)
def test_blocks_must_be_an_embedding_layers_and_a_head(kinds: list[str], message: str) -> None:
    blocks = tuple(Block(name=str(i), kind=k) for i, k in enumerate(kinds))  # type: ignore[arg-type]
    with pytest.raises(InventoryError, match=f"^blocks: {message}"):
        Inventory(model="m", hidden=8, vocabulary=8, blocks=blocks)


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from((4096, 8192, 1 << 20)),
)
def test_a_shard_begins_and_ends_where_the_sweep_may_cut(
    sizes: list[tuple[int, bool]], ranks: int, step: int
) -> None:
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(n,), trainable=trained)
        for i, (n, trained) in enumerate(sizes)
    )
    block = Block(name="b", kind="layer", tensors=tensors, shards=ranks)

    for trainable in (True, False):
        offsets, shard = block.offsets(trainable), block.shard_elements(trainable)
        assert ranks * shard == block.flat_elements(trainable)
        pieces = block.pieces(step, trainable)
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces)][: len(pieces)]
        assert not pieces or pieces[-1][1] == shard
        cuts = [rank * shard + stop for rank in range(ranks) for _, stop in pieces]
        for tensor in tensors:
            if tensor.trainable == trainable:
                first = offsets[tensor.name]
                inside = [cut for cut in cuts if first < cut < first + tensor.elements]
                assert all((cut - first) % SWEEP_LEAF == 0 for cut in inside)


def test_one_rank_stores_what_it_stored_before_there_were_ranks() -> None:
    inventory = model("qwen2.5-3b")

    assert inventory.sharded(1) is inventory
    assert {at % TENSOR_ALIGNMENT for b in inventory.blocks for at in b.offsets(True).values()} == {
        0
    }
    assert inventory.sharded(3).fingerprint == inventory.fingerprint
    assert inventory.sharded(3).sharded(1) == inventory


def test_blocks_are_shared_by_the_same_ranks() -> None:
    inventory = model("qwen2.5-3b")
    blocks = (replace(inventory.blocks[0], shards=2), *inventory.blocks[1:])

    with pytest.raises(InventoryError, match="the same number of ranks"):
        replace(inventory, blocks=blocks)
    with pytest.raises(InventoryError, match="must be 1 or more"):
        inventory.sharded(0)


@pytest.mark.parametrize("field", ["hidden", "vocabulary"])
def test_sizes_are_at_least_one(field: str) -> None:
    kinds = ("embedding", "layer", "head")
    blocks = tuple(Block(name=str(i), kind=k) for i, k in enumerate(kinds))  # type: ignore[arg-type]
    sizes = {"hidden": 8, "vocabulary": 8}
    Inventory(model="m", blocks=blocks, **sizes | {field: 1})
    with pytest.raises(InventoryError, match=f"^{field}: must be 1 or more, got 0"):
        Inventory(model="m", blocks=blocks, **sizes | {field: 0})
