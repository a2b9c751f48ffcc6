"""Layers are compiled once, and compiled layers give the same bits under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model.compile import layer_kinds
from tests.equivalence.compiled import breaks, compile_by, every_batch, graphs
from tests.equivalence.runs import (
    DISK,
    DRAM,
    FEW,
    RESIDENT,
    Setup,
    Way,
    differing,
    follow,
    state_of,
)
from tests.equivalence.test_models import CONFIGS, OTHERS
from tests.support.engines import FAMILIES

TILE = 20
"""MLP tile for 32 tokens: two tiles, the second one smaller."""


def setup_of(family: str, **work: Any) -> Setup:
    given = {"compiled": True, "batch": 4, "micro_batch": 2, "mlp_tile": TILE} | work
    setup = Setup.of(family, freeze=(), config=CONFIGS.get(family), **given)
    if not setup.model.plain_attention or "attention" in work:
        return setup
    return Setup.of(family, freeze=(), config=CONFIGS.get(family), attention="varlen", **given)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_another_layer_slot_or_batch_does_not_recompile(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of layer is compiled once, with gradients, whatever the rows hold.

    There are no graph breaks.
    """
    compile_by("eager", monkeypatch)
    setup = setup_of(family)
    assert setup.work.numerics.attention == "varlen"

    with setup.engine(DRAM, tmp_path) as engine:
        kinds = len(set(layer_kinds(engine.split_model.layers)))
        for batch in every_batch(setup):
            engine.step(batch)

    assert kinds == (2 if family in ("gemma2", "gemma3") else 1)
    assert graphs() == kinds
    assert breaks() == {}


def results(setup: Setup, ways: tuple[Way, ...], disk: Path) -> list[tuple[Any, Any, Any]]:
    found = []
    for way in ways:
        with setup.engine(way, disk) as engine:
            losses, norms = follow(engine, every_batch(setup)[1:])
            found.append((losses, norms, state_of(engine)))
    return found


def assert_same(found: list[tuple[Any, Any, Any]]) -> None:
    (losses, norms, state), *others = found
    for other in others:
        assert other[:2] == (losses, norms)
        assert differing(state, other[2]) == []


def test_compiled_tiles_of_packed_rows_give_the_same_bits_under_every_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are also close to eager code without tiles and with one call per document."""
    compile_by("aot_eager", monkeypatch)
    found = results(setup_of("llama"), (RESIDENT, DISK), tmp_path)
    assert_same(found)
    # One with gradients in each engine, however rows were packed.
    assert graphs() == 2
    assert breaks() == {}

    plain = setup_of("llama", compiled=False, attention="sdpa", mlp_tile=4096)
    losses, norms, _ = results(plain, (RESIDENT,), tmp_path)[0]
    assert found[0][0] == pytest.approx(losses, rel=2e-3)
    assert found[0][1] == pytest.approx(norms, rel=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_code_gives_the_same_bits_under_every_plan(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by("inductor", monkeypatch)
    assert_same(results(setup_of(family, batch=6), FEW, tmp_path))
    assert breaks() == {}


def test_eager_packed_rows_give_the_same_bits_under_every_plan(tmp_path: Path) -> None:
    assert_same(results(setup_of("gemma3", compiled=False, batch=6), FEW, tmp_path))


def test_layers_of_one_kind_share_one_compiled_function() -> None:
    """Other sizes or submodules make another kind; the layer index does not matter."""
    layers = [torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.GELU()) for size in (4, 4, 8)]
    layers[0].layer_idx, layers[1].layer_idx = 0, 1
    first, second, third = layer_kinds(layers)
    assert first == second != third
