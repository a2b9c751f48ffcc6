"""What forward passes save may be kept or recomputed: the result is the same, bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.errors import PlanError
from penstock.model.split import SplitModel
from penstock.plan.build_schedule import step_schedule
from penstock.plan.schedule import Verb
from penstock.plan.workload import CallerLoss
from penstock.roles import Role
from tests.equivalence.compiled import breaks, compile_by, graphs
from tests.equivalence.runs import (
    DRAM,
    KEPT,
    OPTIMIZER,
    RESIDENT,
    Setup,
    Way,
    differing,
    state_of,
)
from tests.equivalence.test_models import packed_batch
from tests.equivalence.test_plans import assert_same, train_each
from tests.equivalence.test_ranks import batches_of, train_on_ranks
from tests.support.engines import FAMILIES, make_engine

ALL, SOME, FIRST, ROUNDS = KEPT

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.2}


@pytest.mark.parametrize(
    ("family", "ways", "work"),
    [
        pytest.param("llama", KEPT, {}, id="bf16"),
        pytest.param("gpt2", (SOME, FIRST), {"config": DROPOUT, "freeze": ()}, id="dropout"),
        pytest.param("gpt2", (SOME,), {"config": DROPOUT, "freeze": (), "mlp_tile": 5},
                     id="dropout in tiles"),
        pytest.param("gemma3", (SOME,), {"dtype": "fp32", "config": {"tie_word_embeddings": True}},
                     id="fp32, tied"),
        pytest.param("bloom", (SOME,), {"freeze": ()}, id="its own attention"),
        pytest.param("llama", (SOME,), {"freeze": ("model.layers.1.*",)}, id="a frozen layer"),
        *(pytest.param(family, KEPT, {"dtype": dtype, "freeze": ()}, marks=pytest.mark.long)
          for family in (*FAMILIES, "gptj", "falcon", "olmo2", "phi3", "gpt_neox", "gemma2")
          for dtype in ("bf16", "fp32")),
    ],
)  # fmt: skip
def test_kept_forward_passes_give_the_bits_of_recomputed_ones(
    family: str, ways: tuple[Way, ...], work: dict[str, Any], tmp_path: Path
) -> None:
    setup = Setup.of(family, **work)

    assert_same(train_each(setup, (DRAM, *ways), tmp_path, steps=4))


def test_packed_and_shorter_rows_are_the_same_when_kept(tmp_path: Path) -> None:
    setup = Setup.of("llama", attention="varlen")
    states = []
    for way in (RESIDENT, SOME, ROUNDS):
        with setup.engine(way, tmp_path) as engine:
            first, second = setup.batches(2)
            engine.step(first)
            engine.step(packed_batch(setup))
            engine.step({name: rows[:1, :9] for name, rows in second.items()})
            states.append(state_of(engine))

    assert [differing(states[0], other) for other in states[1:]] == [[], []]


def test_ranks_that_keep_give_the_result_of_one(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=9)
    one = train_on_ranks(setup, RESIDENT, tmp_path, 1, batches_of(setup))

    two = train_on_ranks(setup, SOME, tmp_path, 2, batches_of(setup))

    assert_same({"one": one, "two": two})


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_layers_run_one_graph_whether_they_are_kept_or_not(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(backend, monkeypatch)
    setup = Setup.of("llama", freeze=(), compiled=True, attention="varlen", batch=6)

    results = train_each(setup, (DRAM, SOME, ALL), tmp_path, steps=3)

    assert_same(results)
    assert graphs() == 3  # one for each engine
    assert breaks() == {}


@pytest.mark.parametrize(
    ("way", "recomputed"), [(DRAM, 9), (ALL, 0), (SOME, 4), (FIRST, 5), (ROUNDS, 4)]
)
def test_only_what_is_not_kept_is_computed_twice(
    way: Way, recomputed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[int] = Counter()
    original = SplitModel.routed_layer

    def counted(self: SplitModel, index: int, *args: Any) -> Any:
        calls[index] += 1
        return original(self, index, *args)

    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        monkeypatch.setattr(SplitModel, "routed_layer", counted)
        engine.step(setup.batches(1)[0])

    assert calls.total() == 9 + recomputed


def stepped(setup: Setup, batches: list[Any], disk: Path) -> dict[str, torch.Tensor]:
    """Return the state after steps that recompute every layer."""
    with setup.engine(DRAM, disk) as engine:
        for batch in batches:
            engine.step(batch)
        return state_of(engine)


def test_an_evaluation_between_steps_saves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    with setup.engine(SOME, tmp_path) as engine:
        engine.step(first)
        engine.evaluate([second])
        assert engine._runner._latest.saved == {}
        engine.step(second)
        state = state_of(engine)

    assert differing(state, stepped(setup, [first, second], tmp_path)) == []


def test_an_interrupted_step_leaves_nothing_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama")
    batch = setup.batches(1)[0]
    seen: list[Any] = []

    def fail(self: Any, step: Any, *_: Any) -> None:
        seen.append((step, len(step.saved)))
        raise RuntimeError("no loss")

    with setup.engine(SOME, tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.engine.compute.Computer._head_loss", fail)
            with pytest.raises(RuntimeError, match="no loss"):
                engine.step(batch)
        ((step, saved),) = seen
        assert saved == 5
        assert step.saved == {}
        engine.step(batch)
        state = state_of(engine)

    assert differing(state, stepped(setup, [batch], tmp_path)) == []


@pytest.mark.parametrize("way", KEPT, ids=lambda way: way.name)
def test_streamed_weights_stay_where_they_are_until_the_backward_of_a_kept_layer(
    way: Way, tmp_path: Path
) -> None:
    setup = Setup.of("llama")
    plan = setup.plan(way, tmp_path)
    kept = {i for i, block in enumerate(plan.placement.blocks) if block.kept}
    used: set[int] = set()
    for op in step_schedule(setup.model, plan.placement).operations:
        if op.verb is Verb.FORWARD and op.block in kept:
            used.add(op.block)
        elif op.verb is Verb.BACKWARD:
            used.discard(op.block)
        elif op.verb in (Verb.FETCH, Verb.DROP) and op.roles == (Role.WEIGHT,):
            assert op.block not in used, op
    assert kept


def with_kept(plan: Any, block: int, count: int) -> Any:
    blocks = list(plan.placement.blocks)
    blocks[block] = replace(blocks[block], kept=count)
    return replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))


@pytest.mark.parametrize("way", KEPT, ids=lambda way: way.name)
def test_buffers_of_a_plan_are_large_enough_if_it_keeps_less(way: Way, tmp_path: Path) -> None:
    """A rehearsal may find that a plan of the user's has to keep less than it says."""
    setup = Setup.of("llama")
    plan = setup.plan(way, tmp_path)
    kept = [i for i, block in enumerate(plan.placement.blocks) if block.kept]
    states = []
    for changed in (plan, with_kept(plan, kept[0], plan.placement.blocks[kept[0]].kept - 1)):
        given = (setup.config, changed, setup.model, setup.source)
        with make_engine(*given, optimizer=OPTIMIZER) as engine:
            for batch in setup.batches(2):
                engine.step(batch)
            states.append(state_of(engine))

    assert differing(*states) == []


def test_plans_that_cannot_keep_are_refused(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    plan = setup.plan(DRAM, tmp_path)
    old = replace(plan.workload, numerics=replace(plan.workload.numerics, forward="inference"))
    kept = setup.plan(SOME, tmp_path)
    adding = Setup.of("llama", accumulate=True).plan(SOME, tmp_path)
    own = replace(adding.workload, caller_loss=CallerLoss())

    for wrong, message in (
        (with_kept(plan, 0, 1), "which is no layer"),
        (with_kept(plan, 2, 1), "must be in HBM"),
        (replace(kept, workload=old), "earlier version"),
        (replace(adding, workload=own), "the caller computes"),
    ):
        with pytest.raises(PlanError, match=message):
            wrong.check_model(setup.model)


def test_numerics_of_earlier_versions_recompute_with_code_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    original = SplitModel.routed_layer

    def noted(self: SplitModel, index: int, hidden: torch.Tensor, calls: Any) -> Any:
        modes.append(hidden.requires_grad)
        return original(self, index, hidden, calls)

    monkeypatch.setattr(SplitModel, "routed_layer", noted)
    for forward in ("inference", "training"):
        setup = Setup.of("llama", forward=forward, batch=2)
        modes.clear()
        engine: Engine
        with setup.engine(DRAM, tmp_path) as engine:
            engine.step(setup.batches(1)[0])
        assert modes == [forward == "training"] * 3 + [True] * 3
