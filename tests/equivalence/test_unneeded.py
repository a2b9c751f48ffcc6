"""Layers are recomputed without what backward does not need: the result is the same, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model import unneeded_outputs
from tests.equivalence.compiled import breaks, compile_by, graphs
from tests.equivalence.runs import DRAM, KEPT, RESIDENT, WAYS, Setup, Way
from tests.equivalence.test_plans import assert_same, train_each
from tests.support.engines import FAMILIES

ON_DISK = WAYS[8]


def computing_all(setup: Setup) -> Setup:
    """Return the setup with layers that are recomputed as they were computed."""
    blocks = tuple(replace(block, unneeded=()) for block in setup.model.blocks)
    return replace(setup, model=replace(setup.model, blocks=blocks))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill outputs with NaN first; return a list that gets an entry for each skipped product."""
    skipped = list[int]()

    def blank(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if unneeded_outputs._current.skips:
            skipped.append(x.numel() // x.shape[-1])
        return x.new_full((*x.shape[:-1], weight.shape[0]), float("nan"))

    monkeypatch.setattr(unneeded_outputs, "_output_like", blank)
    return skipped


@pytest.mark.parametrize(
    ("family", "work"),
    [
        pytest.param("llama", {}, id="bf16"),
        pytest.param("llama", {"dtype": "fp32", "freeze": ("*.down_proj.*",)}, id="frozen"),
        pytest.param("llama", {"mlp_tile": 5, "freeze": ()}, id="in tiles"),
        pytest.param("gptj", {"freeze": (), "config": {"resid_pdrop": 0.2}}, id="dropout"),
        pytest.param("gptj", {"freeze": (), "config": {"resid_pdrop": 0.2}, "mlp_tile": 5},
                     id="dropout in tiles"),
        pytest.param("deepseek_v3", {"freeze": (), "mlp_tile": 5}, id="shared experts in tiles"),
        *(pytest.param(family, {"freeze": (), **tiles}, marks=pytest.mark.long)
          for family in (*FAMILIES, "falcon", "olmo2", "phi3", "gpt_neox", "glm4_moe", "qwen3_moe")
          for tiles in ({}, {"mlp_tile": 5})),
    ],
)  # fmt: skip
def test_what_is_not_needed_changes_no_bit(
    family: str, work: dict[str, Any], tmp_path: Path, poisoned: list[int]
) -> None:
    setup = Setup.of(family, **work)
    plain = train_each(computing_all(setup), (RESIDENT,), tmp_path, steps=3)
    assert not poisoned

    results = train_each(setup, (DRAM, KEPT[1], ON_DISK), tmp_path, steps=3)

    assert_same({"all computed": plain[RESIDENT.name], **results})
    assert bool(poisoned) == any(layer.unneeded_elements for layer in setup.model.layers)


@pytest.mark.parametrize(
    ("tile", "way", "products"),
    [
        # Three layers and three micro-batches, of which the last one has one row of 16 tokens.
        (4096, DRAM, 9 * [1]),
        (4096, KEPT[1], 4 * [1]),
        (16, DRAM, 6 * [6] + 3 * [1]),
    ],
    ids=["all recomputed", "some kept", "in tiles"],
)
def test_a_recomputed_layer_computes_no_product_that_it_does_not_need(
    tile: int, way: Way, products: list[int], tmp_path: Path, poisoned: list[int]
) -> None:
    setup = Setup.of("llama", mlp_tile=tile)
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])

    assert len(poisoned) == sum(products)


@pytest.mark.parametrize("tile", [4096, 16], ids=["whole", "in tiles"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_layers_run_one_graph_and_give_the_bits_of_computing_all(
    backend: str, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poisoned: list[int]
) -> None:
    compile_by(backend, monkeypatch)
    setup = Setup.of("llama", freeze=(), compiled=True, attention="varlen", batch=6, mlp_tile=tile)

    plain = train_each(computing_all(setup), (RESIDENT,), tmp_path, steps=2)
    assert not poisoned
    results = train_each(setup, (DRAM, KEPT[1]), tmp_path, steps=2)

    assert_same({"all computed": plain[RESIDENT.name], **results})
    assert poisoned
    assert graphs() == 3  # one for each engine
    assert breaks() == {}
