"""On a GPU, saved results of attention give the bits of computed ones, and save kernel launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.model import attention_launch
from tests.equivalence.runs import ATTENDED, DRAM, Setup, Way, differing, state_of

pytestmark = pytest.mark.gpu

COMPILED = {"compiled": True, "loss_kernel": "fused"}
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 256}


def setup_of(family: str, **work: Any) -> Setup:
    sizes = {"attention": "varlen", "context": 160, "config": SIZES}
    return Setup.of(family, **sizes | work)


def trained(setup: Setup, way: Way, disk: Path) -> dict[str, torch.Tensor]:
    """Return the state after steps with whole rows, packed rows and fewer rows."""
    with setup.engine(way, disk, device="cuda") as engine:
        first, *batches = setup.batches(4)
        engine.step(first)
        documents = torch.arange(setup.work.context) % 37
        engine.step(first | {"position_ids": documents.expand_as(first["input_ids"]).clone()})
        for batch in batches:
            engine.step(batch)
        engine.step({name: rows[:3] for name, rows in first.items()})
        return state_of(engine)


@pytest.mark.parametrize("how", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("family", "work"),
    [("llama", {}), ("llama", {"dtype": "fp32"}), ("qwen3", {}), ("gemma2", {})],
    ids=["llama", "llama fp32", "qwen3", "gemma2"],
)
def test_saved_results_of_attention_give_the_bits_of_computed_ones(
    family: str, work: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    setup = setup_of(family, **work, **how)
    wanted = trained(setup, DRAM, tmp_path)

    for way in ATTENDED:
        assert differing(wanted, trained(setup, way, tmp_path)) == [], way.name


@pytest.mark.parametrize("how", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("way", "again"), [(DRAM, 9), *((way, 0) for way in ATTENDED[:4])],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_the_forward_kernel_is_launched_once_for_each_layer_and_micro_batch(
    way: Way,
    again: int,
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    original = attention_launch._launch

    def counted(kernel: str, *args: Any, **constants: Any) -> None:
        launched.append(kernel)
        original(kernel, *args, **constants)

    setup = setup_of("llama", **how)
    engine: Engine
    with setup.engine(way, tmp_path, device="cuda") as engine:
        first, second = setup.batches(2)
        engine.step(first)
        monkeypatch.setattr(attention_launch, "_launch", counted)
        engine.step(second)

    # Three layers, each with three micro-batches.
    assert launched.count("forward") == 9 + again
    assert launched.count("query_gradient") == 9


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_many_layers_through_one_slot_give_the_same_bits(tokens: int, tmp_path: Path) -> None:
    """With copies that take as long as a layer, a slot that is written too early would show."""
    config = {"num_hidden_layers": 8, "hidden_size": 64, "head_dim": 64, "num_attention_heads": 16,
              "num_key_value_heads": 4, "max_position_embeddings": tokens}  # fmt: skip
    setup = setup_of(
        "llama", freeze=(), config=config, context=tokens, batch=6, micro_batch=1, **COMPILED
    )
    ways = [
        DRAM,
        Way("eight layers", ("dddd",), {"attention": "d" * 8}),
        Way("eight layers, two rounds", ("dddd",), {"attention": "ddhddddh", "rounds": 2}),
    ]
    states = []
    for way in ways:
        with setup.engine(way, tmp_path, device="cuda") as engine:
            for batch in setup.batches(3):
                engine.step(batch)
            states.append(state_of(engine))

    assert [differing(states[0], other) for other in states[1:]] == [[], []]
