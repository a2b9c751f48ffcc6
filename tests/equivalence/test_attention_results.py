"""What attention returned may be saved anywhere or computed again: the result is the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.attention_results import AttentionResults
from penstock.errors import PlanError
from penstock.model import varlen_attention
from penstock.plan.buffers import ATTENTION_SLOT
from penstock.plan.placement import Home, Placement, Share
from penstock.plan.plan import Plan
from penstock.plan.schedule import Verb
from penstock.plan.workload import CallerLoss
from penstock.roles import Role
from penstock.tiers import Tier
from tests.equivalence.compiled import breaks, compile_by, graphs
from tests.equivalence.runs import (
    ATTENDED,
    DRAM,
    OPTIMIZER,
    RESIDENT,
    Setup,
    Way,
    differing,
    state_of,
)
from tests.equivalence.test_adapters import train as train_adapter
from tests.equivalence.test_models import packed_batch
from tests.equivalence.test_plans import assert_same, train_each
from tests.equivalence.test_ranks import batches_of, train_on_ranks
from tests.support import engines
from tests.support.adapters import adapted, lora, trained
from tests.support.engines import FAMILIES

IN_HBM, IN_DRAM, _, BOTH, _, ROUNDS, _ = ATTENDED
FEW = (IN_HBM, IN_DRAM, BOTH)


def setup_of(family: str = "llama", **work: Any) -> Setup:
    return Setup.of(family, **{"attention": "varlen"} | work)


@pytest.mark.parametrize(
    ("family", "ways", "work"),
    [
        pytest.param("llama", ATTENDED, {}, id="bf16"),
        pytest.param("gemma2", FEW, {"dtype": "fp32", "config": {"tie_word_embeddings": True}},
                     id="capped scores and windows, fp32, tied"),
        pytest.param("qwen3_moe", (BOTH,), {"freeze": ()}, id="experts"),
        pytest.param("gpt_neox", (BOTH,), {"freeze": (), "mlp_tile": 5, "moments": "int8"},
                     id="tiles"),
        pytest.param("llama", (IN_DRAM,), {"freeze": ("model.layers.1.*",)}, id="a frozen layer"),
        pytest.param("gpt2", (BOTH,), {"freeze": (), "config": {"resid_pdrop": 0.2}},
                     id="dropout outside attention"),
        *(pytest.param(family, ATTENDED, {"dtype": dtype, "freeze": ()}, marks=pytest.mark.long)
          for family in (*FAMILIES, "mistral", "olmo2", "phi3", "gpt_neox", "gemma2", "gpt2",
                         "olmoe", "glm4_moe", "mixtral")
          for dtype in ("bf16", "fp32")),
    ],
)  # fmt: skip
def test_saved_results_of_attention_give_the_bits_of_computed_ones(
    family: str, ways: tuple[Way, ...], work: dict[str, Any], tmp_path: Path
) -> None:
    setup = setup_of(family, **work)

    assert_same(train_each(setup, (DRAM, *ways), tmp_path, steps=3))


def test_packed_and_shorter_rows_are_the_same(tmp_path: Path) -> None:
    setup = setup_of()
    states = []
    for way in (RESIDENT, IN_HBM, BOTH, ROUNDS):
        with setup.engine(way, tmp_path) as engine:
            first, second = setup.batches(2)
            engine.step(first)
            engine.step(packed_batch(setup))
            engine.step({name: rows[:1, :9] for name, rows in second.items()})
            engine.step({name: rows[:3] for name, rows in second.items()})
            states.append(state_of(engine))

    assert [differing(states[0], other) for other in states[1:]] == [[], [], []]


def test_accumulated_batches_are_the_same(tmp_path: Path) -> None:
    setup = setup_of(accumulate=True)
    states = []
    for way in (RESIDENT, IN_DRAM, BOTH):
        with setup.engine(way, tmp_path) as engine:
            for _ in range(2):
                for batch in setup.batches(2):
                    engine.forward_backward(batch)
                engine.apply()
            states.append(state_of(engine))

    assert [differing(states[0], other) for other in states[1:]] == [[], []]


def test_ranks_that_save_give_the_result_of_one(tmp_path: Path) -> None:
    setup = setup_of(batch=9)
    one = train_on_ranks(setup, RESIDENT, tmp_path, 1, batches_of(setup))

    two = train_on_ranks(setup, BOTH, tmp_path, 2, batches_of(setup))

    assert_same({"one": one, "two": two})


def test_adapters_are_the_same(tmp_path: Path, one_thread: None) -> None:
    """Their dropout draws the same numbers, because attention draws none."""
    split = Way("adapters in HBM", ("hhhdd",), {"attention": "dhd", "kept": (0, 1, 0)})
    found = []
    for way in (DRAM, IN_DRAM, split):
        model = adapted("llama", lora(lora_dropout=0.2))
        work = {"attention": "varlen"}
        losses = train_adapter(model, way, tmp_path, steps=3, work=work, seed=7)
        found.append((losses, trained(model)))

    for losses, tensors in found[1:]:
        assert losses == found[0][0]
        assert differing(found[0][1], tensors) == []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_layers_run_one_graph_whether_results_are_saved_or_not(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(backend, monkeypatch)
    setup = setup_of(freeze=(), compiled=True, batch=6)

    results = train_each(setup, (DRAM, *FEW), tmp_path, steps=3)

    assert_same(results)
    assert graphs() == 4  # one for each engine
    assert breaks() == {}


# What is computed.


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the tokens of each computation of attention's forward."""
    calls: list[int] = []
    original = varlen_attention._compute_on_cpu

    def counted(query: torch.Tensor, *args: Any) -> Any:
        calls.append(query.shape[0])
        return original(query, *args)

    monkeypatch.setattr(varlen_attention, "_compute_on_cpu", counted)
    return calls


PASSES = 9
"""Three layers compute three micro-batches each."""


@pytest.mark.parametrize(
    ("way", "again", "compiled"),
    [
        (DRAM, PASSES, False),
        *((way, 3 if "some" in way.name else 0, False) for way in ATTENDED),
        (BOTH, 0, True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_attention_is_computed_once_where_its_results_are_saved(
    way: Way,
    again: int,
    compiled: bool,
    computed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiled:
        compile_by("aot_eager", monkeypatch)
    setup = setup_of(compiled=compiled)
    with setup.engine(way, tmp_path) as engine:
        for batch in setup.batches(2):
            computed.clear()
            engine.step(batch)
            assert len(computed) == PASSES + again


def with_passes(plan: Plan, *passes: int) -> Plan:
    """Return the plan with the results of fewer micro-batches of each layer."""
    blocks = list(plan.placement.blocks)
    for number, count in enumerate(passes, 1):
        block = blocks[number]
        home = block.home(Role.ATTENTION)
        others = tuple(each for each in block.homes if each is not home)
        if home is not None and count:
            each = home.nbytes // block.attention
            share = replace(home.shares[0], nbytes=count * each)
            others += (Home(role=Role.ATTENTION, shares=(share,)),)
        blocks[number] = replace(block, homes=others, attention=count)
    return replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))


def test_results_may_be_saved_for_some_micro_batches(computed: list[int], tmp_path: Path) -> None:
    setup = setup_of()
    plan = with_passes(setup.plan(BOTH, tmp_path), 2, 1, 1)
    expected = stepped(setup, setup.batches(2), tmp_path)
    engine = engines.make_engine(setup.config, plan, setup.model, setup.source, optimizer=OPTIMIZER)
    with engine:
        for batch in setup.batches(2):
            computed.clear()
            engine.step(batch)
            # Layer 1 saves two of three, layer 2 keeps one and saves one, layer 3 keeps two and
            # saves one.
            assert len(computed) == PASSES + 1 + 1
        assert differing(state_of(engine), expected) == []


def stepped(setup: Setup, batches: list[Any], disk: Path) -> dict[str, torch.Tensor]:
    """Return the state after steps that compute attention twice."""
    with setup.engine(DRAM, disk) as engine:
        for batch in batches:
            engine.step(batch)
        return state_of(engine)


@pytest.mark.parametrize(
    ("way", "again"), [(IN_HBM, 9), (IN_DRAM, 9), (ROUNDS, 7)],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_attention_that_is_not_as_planned_is_computed_again(
    way: Way, again: int, computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded, and lanes do not wait for it."""
    setup = setup_of()
    expected = stepped(setup, setup.batches(2), tmp_path)
    monkeypatch.setattr(AttentionResults, "_fits", lambda *_: False)
    with setup.engine(way, tmp_path) as engine:
        for batch in setup.batches(2):
            computed.clear()
            engine.step(batch)
            assert len(computed) == PASSES + again
        assert differing(state_of(engine), expected) == []


@pytest.mark.parametrize("way", FEW, ids=lambda way: way.name)
def test_an_evaluation_between_steps_saves_nothing_and_changes_nothing(
    way: Way, computed: list[int], tmp_path: Path
) -> None:
    setup = setup_of()
    first, second = setup.batches(2)
    expected = stepped(setup, [first, second], tmp_path)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        computed.clear()
        engine.evaluate([second])
        assert len(computed) == PASSES
        assert engine._runner._latest.recorded == set()
        engine.step(second)
        state = state_of(engine)

    assert differing(state, expected) == []


@pytest.mark.parametrize("fails", ["_head_loss", "_backward"])
@pytest.mark.parametrize("way", [IN_HBM, IN_DRAM], ids=lambda way: way.name)
def test_a_step_after_a_failed_one_is_the_same(
    way: Way, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of()
    first, second = setup.batches(2)
    calls: Counter[str] = Counter()

    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        original = getattr(type(engine._runner._computer), fails)

        def fail(self: Any, step: Any, at: int, op: Any) -> None:
            calls[fails] += 1
            if calls[fails] > (1 if fails == "_backward" else 0):
                raise RuntimeError("no memory")
            original(self, step, at, op)

        with monkeypatch.context() as patch:
            patch.setattr(f"penstock.engine.compute.Computer.{fails}", fail)
            with pytest.raises(RuntimeError, match="no memory"):
                engine.step(second)
        engine.step(second)
        state = state_of(engine)

    assert differing(state, stepped(setup, [first, second], tmp_path)) == []


def test_a_run_continues_from_a_checkpoint_with_or_without_saved_results(tmp_path: Path) -> None:
    setup = setup_of()
    first, second = setup.batches(2)
    expected = stepped(setup, [first, second], tmp_path)
    for before, after in ((IN_DRAM, DRAM), (DRAM, BOTH), (IN_HBM, IN_DRAM)):
        folder = tmp_path / f"{before.name} {after.name}"
        with setup.engine(before, tmp_path) as engine:
            engine.step(first)
            engine.write(folder)
        with setup.engine(after, tmp_path) as engine:
            engine.read(folder)
            engine.step(second)
            assert differing(state_of(engine), expected) == [], (before.name, after.name)


def test_the_timeline_has_the_copies_of_each_micro_batch(tmp_path: Path) -> None:
    setup = setup_of()
    with setup.engine(IN_DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        events = [e for e in engine.timeline() if e.operation.roles == (Role.ATTENTION,)]

    moved = Counter[tuple[Verb, int]]()
    for event in events:
        (nbytes,) = (t.nbytes for t in event.transfers if t.link in ("h2d", "d2h"))
        moved[event.operation.verb, nbytes] += 1
    # Micro-batches of 32, 32 and 16 tokens: 32 numbers in bf16, 4 heads of 128 fp32 log-sum-exps.
    full, half = 32 * 64 + 4 * 4 * 128, 16 * 64 + 4 * 4 * 128
    verbs = (Verb.OFFLOAD, Verb.FETCH)
    assert moved == {(verb, n): count for verb in verbs for n, count in ((full, 6), (half, 3))}


# Memory and plans.


def test_a_slot_is_planned_only_if_results_leave_hbm(tmp_path: Path) -> None:
    setup = setup_of()
    pools = [
        {pool.what: pool.nbytes for pool in setup.plan(way, tmp_path).pools}
        for way in (DRAM, IN_HBM, IN_DRAM)
    ]

    # 32 tokens of 32 numbers in bf16, and 4 heads of 128 log-sum-exps in fp32: one page each.
    assert [each.get(ATTENTION_SLOT, 0) for each in pools] == [0, 0, 4096]


def replaced(plan: Plan, block: int, **changes: Any) -> Plan:
    blocks = list(plan.placement.blocks)
    blocks[block] = replace(blocks[block], **changes)
    placement: Placement = replace(plan.placement, blocks=tuple(blocks))
    return replace(plan, placement=placement)


def test_plans_that_cannot_save_are_refused(tmp_path: Path) -> None:
    setup = setup_of()
    plan = setup.plan(IN_DRAM, tmp_path)
    plan.check_model(setup.model)
    numerics = plan.workload.numerics
    home = plan.placement.blocks[2].home(Role.ATTENTION)
    assert home is not None
    others = tuple(each for each in plan.placement.blocks[2].homes if each is not home)
    half = Share(tier=Tier.HBM, nbytes=4096)
    striped = Home(role=Role.ATTENTION, shares=(*home.shares, half))
    adding = setup_of(accumulate=True).plan(IN_DRAM, tmp_path)
    unknown = tuple(replace(block, heads=0) for block in setup.model.blocks)

    for wrong, model, message in (
        (replaced(plan, 2, attention=0), setup.model, "has a home for its results"),
        (replaced(plan, 2, attention=4), setup.model, "needs 16384 B"),
        (replaced(plan, 2, homes=others), setup.model, "no home for attention"),
        (replaced(plan, 2, homes=(*others, striped)), setup.model, "must be in HBM, or in dram"),
        (plan, replace(setup.model, blocks=unknown), "does not call attention once"),
        *(
            (replace(plan, workload=replace(plan.workload, numerics=replace(numerics, **old))),
             setup.model, "saved only with attention varlen")
            for old in ({"attention": "sdpa"}, {"forward": "inference"})
        ),
        (replace(adding, workload=replace(adding.workload, caller_loss=CallerLoss())),
         setup.model, "a loss that the engine computes"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            wrong.check_model(model)


def test_results_in_host_memory_use_that_of_gradients(tmp_path: Path) -> None:
    setup = setup_of()
    plan = setup.plan(IN_DRAM, tmp_path)

    overlaid = [block for block, role in plan.overlaid_activations() if role is Role.ATTENTION]
    assert overlaid == [2, 3]  # before layer 1 there is only the gradient of the embedding
    without = setup.plan(DRAM, tmp_path).peak(Tier.DRAM)
    assert plan.peak(Tier.DRAM) == without + 3 * 4096
