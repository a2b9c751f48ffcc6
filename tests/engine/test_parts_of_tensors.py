"""Tensors that are larger than one part: reading, writing, saving and rounding in several parts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import gradients, tensor_access
from penstock.roles import SCALE_BLOCK, Role
from tests.equivalence.runs import DRAM, RESIDENT, Setup, Way, differing, follow, state_of

SMALL = 2 * SCALE_BLOCK
"""Elements of a part: less than most tensors of the tiny models have."""

ON_DISK = Way("on disk in pieces of eight parts", ("nnnn",), {"piece": 8 * SMALL})
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "fp32"},
    {"dtype": "fp16", "moments": "bf16"},
    {"moments": "int8"},
)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_access, "PART", SMALL)


@pytest.mark.parametrize(
    ("way", "work"),
    [
        *((ON_DISK, work) for work in FORMATS),
        *(pytest.param(DRAM, work, marks=pytest.mark.long) for work in FORMATS),
    ],
    ids=[f"{way.name} {work}" for way in (ON_DISK, DRAM) for work in FORMATS],
)
def test_a_checkpoint_is_written_and_read_in_parts(
    way: Way, work: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, folder = Setup.of("llama", **work), tmp_path / "saved"
    with setup.engine(RESIDENT, tmp_path) as engine:
        follow(engine, setup.batches(2))
        expected = state_of(engine)
        monkeypatch.setattr(tensor_access, "PART", SMALL)
        engine.write(folder)
        in_parts = state_of(engine)
    with setup.engine(way, tmp_path) as engine:
        engine.read(folder)
        read = state_of(engine)
        moments = engine.optimizer.state_dict()
    with setup.engine(way, tmp_path) as engine:
        engine.optimizer.load_state_dict(moments)
        loaded = state_of(engine)

    assert differing(in_parts, expected) == []
    assert differing(read, expected) == []
    wanted = {k: v for k, v in expected.items() if "first" in k or "second" in k}
    assert wanted
    assert differing({k: loaded[k] for k in wanted}, wanted) == []


@pytest.mark.usefixtures("small_parts")
def test_no_part_is_larger_than_the_limit(tmp_path: Path) -> None:
    setup = Setup.of("llama", moments="int8")
    with setup.engine(ON_DISK, tmp_path) as engine:
        for block in engine.inventory.blocks:
            for tensor in block.tensors:
                sizes = [p.numel() for p in engine.access.parts(tensor.name, Role.WEIGHT)]
                assert sum(sizes) == tensor.elements
                assert max(sizes) <= SMALL
                if not tensor.trainable:
                    continue
                bases = engine.access.parts(tensor.name, Role.FIRST, bases=True)
                assert sum(p.numel() for p in bases) == -(-tensor.elements // SCALE_BLOCK)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", [DRAM, ON_DISK], ids=lambda way: way.name)
def test_a_source_is_asked_for_every_element_once(way: Way, tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        for index, block in enumerate(engine.inventory.blocks):
            asked: dict[str, list[tuple[int, int]]] = {}

            def source(tensor: Any, low: int, high: int, asked: Any = asked) -> torch.Tensor:
                asked.setdefault(tensor.name, []).append((low, high))
                return torch.arange(low, high).to(torch.bfloat16)

            engine.access.fill(index, Role.WEIGHT, source)
            for tensor in block.tensors:
                spans = sorted(asked[tensor.name])
                assert (spans[0][0], spans[-1][1]) == (0, tensor.elements)
                assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
                assert max(high - low for low, high in spans) <= SMALL
                found = torch.cat(
                    [p.clone() for p in engine.access.parts(tensor.name, Role.WEIGHT)]
                )
                assert torch.equal(found, torch.arange(tensor.elements).to(torch.bfloat16))


@pytest.mark.parametrize("rounds", [1, 2])
def test_gradients_are_rounded_in_parts(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums stay in fp32 with several rounds, and when calls accumulate."""
    setup = Setup.of("llama", accumulate=rounds == 1)
    way = Way("in DRAM and on disk", ("dddd", "ddnd"), {"rounds": rounds})
    with setup.engine(way, tmp_path) as engine:
        expected = [*follow(engine, setup.batches(2)), state_of(engine)]
    monkeypatch.setattr(gradients, "ROUND_ELEMENTS", 1024)
    with setup.engine(way, tmp_path) as engine:
        found = [*follow(engine, setup.batches(2)), state_of(engine)]

    assert found[:2] == expected[:2]
    assert differing(found[2], expected[2]) == []
