"""Whether moments are updated with the weights or later, the result is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.compute import Computer
from penstock.engine.engine import Engine
from penstock.engine.transfer import Mover
from penstock.errors import NonFiniteMasterError, PlanError
from penstock.optim.sweep import PreparedSweep
from penstock.plan.plan import Plan
from penstock.plan.schedule import Operation, Verb
from penstock.roles import Role
from tests.equivalence.runs import DRAM, LATE, Setup, Way, differing, follow, state_of, whole
from tests.equivalence.test_plans import assert_same, train_each
from tests.support.engines import FAMILIES

ALL, ROUNDS, ON_GPU, ON_DISK, SOME_ON_DISK = LATE[0], LATE[4], LATE[6], LATE[7], LATE[8]


@pytest.mark.parametrize(
    ("family", "ways", "work"),
    [
        pytest.param("llama", LATE, {}, id="bf16"),
        pytest.param("qwen3", (ALL, ON_GPU, ON_DISK), {"moments": "int8"}, id="int8 moments"),
        pytest.param("llama", (ALL, ON_GPU, SOME_ON_DISK), {"dtype": "fp32", "moments": "bf16"},
                     id="fp32"),
        pytest.param("gemma3", (ALL, ON_GPU, ON_DISK),
                     {"dtype": "fp16", "config": {"tie_word_embeddings": True}}, id="fp16, tied"),
        pytest.param("llama", (ALL, ROUNDS), {"accumulate": True}, id="accumulation"),
        *(pytest.param(family, LATE, {"dtype": dtype, "moments": moments, "freeze": ()},
                       marks=pytest.mark.long)
          for family in (*FAMILIES, "gptj", "olmo2", "gpt_neox", "olmoe")
          for dtype in ("bf16", "fp32") for moments in ("fp32", "bf16", "int8")),
    ],
)  # fmt: skip
def test_late_moments_have_the_bits_of_those_updated_with_the_weights(
    family: str, ways: tuple[Way, ...], work: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(train_each(Setup.of(family, **work), (DRAM, *ways), tmp_path, steps=4))


def test_a_plan_has_the_buffers_of_a_step_with_nothing_to_sweep(tmp_path: Path) -> None:
    """The first step has no sweeps of moments, so its gradients may need more bytes in HBM."""
    setup = Setup.of("gptj", freeze=(), config={"vocab_size": 509}, batch=3)
    spots = ("dddh", "dddd", "hhhh", "nddd", "dddh")

    with setup.engine(Way("some late", spots, {"late": True}), tmp_path) as engine:
        follow(engine, setup.batches(2))


def test_moments_are_updated_before_backward_replaces_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step but the first updates the weights of a block, then its moments, once each."""
    parts: list[str] = []
    start = PreparedSweep.start

    def note(*args: Any, **options: Any) -> Any:
        parts.append(options.get("part", "all"))
        return start(*args, **options)

    setup = Setup.of("llama", freeze=())
    monkeypatch.setattr(PreparedSweep, "start", note)
    with setup.engine(ALL, tmp_path) as engine:
        follow(engine, setup.batches(3))
        in_steps, parts[:] = list(parts), []
        engine.finish()
    blocks = len(setup.model.blocks)

    assert in_steps == 2 * (["weights"] * blocks + ["moments"] * blocks)
    # Nothing is gained by two passes if no backward follows.
    assert parts == ["all"] * blocks


def state_in_dram(setup: Setup, batches: Sequence[Any], disk: Path) -> dict[str, torch.Tensor]:
    """Return the state after steps in which nothing is late."""
    with setup.engine(DRAM, disk) as engine:
        steps(engine, batches)
        return state_of(engine)


def fail_in(monkeypatch: pytest.MonkeyPatch, verb: Verb, block: int) -> list[Operation]:
    """Let the next computation of a block fail, once; return what had been computed by then."""
    compute, computed = Computer.compute, []

    def fail(self: Computer, step: Any, at: int, op: Operation) -> None:
        if (op.verb, op.block) == (verb, block) and not any(
            (o.verb, o.block) == (verb, block) for o in computed
        ):
            computed.append(op)
            raise RuntimeError("no kernel")
        computed.append(op)
        compute(self, step, at, op)

    monkeypatch.setattr(Computer, "compute", fail)
    return computed


@pytest.mark.parametrize(
    ("verb", "block"),
    [(Verb.FORWARD, 1), (Verb.LOSS, 4), (Verb.BACKWARD, 3), (Verb.BACKWARD, 0)],
    ids=["in forward", "in the loss", "early in backward", "at the end of backward"],
)
@pytest.mark.parametrize("completes", ["step", "finish"])
@pytest.mark.parametrize("way", [ALL, ON_GPU, ON_DISK, SOME_ON_DISK],
                         ids=["CPU", "GPU", "disk", "some on disk"])  # fmt: skip
def test_a_step_that_fails_loses_no_moment(
    verb: Verb,
    block: int,
    completes: str,
    way: Way,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step, or `finish`, updates the moments that were left, and no moment twice."""
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    wanted = state_in_dram(setup, (first, second), tmp_path)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        fail_in(monkeypatch, verb, block)
        with pytest.raises(RuntimeError, match="no kernel"):
            engine.step(second)
        if completes == "finish":
            engine.finish()
        engine.step(second)

        assert differing(wanted, state_of(engine)) == []


@pytest.mark.parametrize("failing", [1, 4, 9])
@pytest.mark.parametrize("completes", ["step", "finish"])
@pytest.mark.parametrize("lane", ["sweep_states", "offload_states"])
def test_a_sweep_on_the_gpu_that_fails_half_way_loses_no_moment(
    failing: int, completes: str, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces have new weights and old moments then, and others have neither."""
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    wanted = state_in_dram(setup, (first, second), tmp_path)
    work, calls = getattr(Mover, lane), []

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) == failing:
            raise RuntimeError("no kernel")
        work(*args)

    with setup.engine(ON_GPU, tmp_path) as engine:
        engine.step(first)
        monkeypatch.setattr(Mover, lane, fail)
        # The lanes of an engine have their methods from its first step on.
        with pytest.raises(RuntimeError, match="no kernel"):
            engine.step(second)
        if completes == "finish":
            engine.finish()
        engine.step(second)

        assert differing(wanted, state_of(engine)) == []


@pytest.mark.parametrize("completes", ["step", "finish"])
@pytest.mark.parametrize("lane", ["read", "sweep", "write"])
@pytest.mark.parametrize("part", [0.1, 0.4, 0.6, 0.8, 0.95])
def test_a_lane_of_the_disk_that_fails_half_way_loses_no_moment(
    part: float, completes: str, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces have new weights, and others new moments, too, on disk or in staging only."""
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    wanted = state_in_dram(setup, (first, second), tmp_path)
    work, calls = getattr(Mover, lane), []

    with setup.engine(SOME_ON_DISK, tmp_path) as engine:
        engine.step(first)
        operations = engine._programs["step"].by_lane[lane]
        failing = operations[int(part * len(operations))][0]

        def fail(self: Mover, step: Any, at: int, op: Operation) -> None:
            if at == failing and not calls:
                calls.append(at)
                raise RuntimeError("no disk")
            work(self, step, at, op)

        monkeypatch.setattr(Mover, lane, fail)
        with pytest.raises(RuntimeError, match="no disk"):
            engine.step(second)
        if completes == "finish":
            engine.finish()
        engine.step(second)

        assert differing(wanted, state_of(engine)) == []


def test_a_checkpoint_continues_with_and_without_late_moments(tmp_path: Path) -> None:
    setup = Setup.of("llama", moments="int8")
    batches = setup.batches(5)
    wanted = state_in_dram(setup, batches, tmp_path)
    ways = [(ALL, DRAM), (DRAM, ON_GPU), (ON_GPU, ON_DISK), (ON_DISK, ALL)]
    for number, (first, second) in enumerate(ways):
        with setup.engine(first, tmp_path) as engine:
            steps(engine, batches[:3])
            engine.write(tmp_path / f"saved {number}")
        with setup.engine(second, tmp_path) as engine:
            engine.read(tmp_path / f"saved {number}")
            steps(engine, batches[3:])

            assert differing(wanted, state_of(engine)) == []


def steps(engine: Engine, batches: Sequence[Any]) -> None:
    for batch in batches:
        engine.step(batch)


def test_an_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    batches = setup.batches(3)
    results = []
    for way in (DRAM, ALL, ON_GPU, SOME_ON_DISK):
        with setup.engine(way, tmp_path) as engine:
            losses = []
            for batch in batches:
                engine.step(batch)
                losses.append(engine.evaluate([batches[0]]).loss)
            results.append((losses, state_of(engine)))
    (losses, wanted), *others = results

    for late_losses, state in others:
        assert late_losses == losses
        assert differing(wanted, state) == []


def test_a_refused_element_keeps_its_moments(tmp_path: Path) -> None:
    """The sweep of the weights reports it, and the rest of the update is completed."""
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    name = "model.layers.0.mlp.up_proj.weight"
    states = []
    for way in (DRAM, ALL, ON_GPU, ON_DISK, SOME_ON_DISK):
        with setup.engine(way, tmp_path) as engine:
            engine.step(first)
            spoil_a_moment(engine, name)
            with pytest.raises(NonFiniteMasterError) as caught:
                engine.step(second)
            assert name in str(caught.value)
            states.append(state_of(engine))
            assert torch.isfinite(whole(engine, name, Role.WEIGHT)).all()
    wanted, *others = states

    assert [differing(wanted, state) for state in others] == [[], [], [], []]


def spoil_a_moment(engine: Engine, name: str) -> None:
    """Set one element of a tensor's first moment to NaN, wherever it is stored."""
    block, _ = engine.access.tensor(name)
    trained = [t.name for t in engine.inventory.blocks[block].tensors if t.trainable]
    values = {each: whole(engine, each, Role.FIRST).flatten() for each in trained}
    values[name][3] = float("nan")
    engine.access.fill(
        block, Role.FIRST, lambda tensor, low, high: values[tensor.name][low:high], trainable=True
    )


def test_the_next_step_completes_an_update_that_refused_an_element(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    states = []
    for way in (DRAM, ALL, ON_DISK, SOME_ON_DISK):
        with setup.engine(way, tmp_path) as engine:
            engine.step(first)
            spoil_a_moment(engine, "model.layers.2.mlp.up_proj.weight")
            with pytest.raises(NonFiniteMasterError):
                engine.step(second)
            engine.forward_backward(second)
            states.append(state_of(engine))
    wanted, *others = states

    assert [differing(wanted, state) for state in others] == [[], [], []]


@pytest.mark.parametrize(
    ("spots", "work", "words"),
    [
        ("nddd", {}, "must be on nvme, or all"),
        ("ddnd", {}, "must be on nvme, or all"),
        ("hhhh", {}, "may be in HBM"),
        ("dddd", {"optimizer": "lion"}, "needs AdamW"),
        ("dddd", {"world": 2}, "a single rank"),
    ],
)
def test_a_plan_that_cannot_update_moments_late_is_refused(
    spots: str, work: dict[str, Any], words: str, tmp_path: Path
) -> None:
    setup = Setup.of("llama", freeze=(), batch=6, **work)
    plan = setup.plan(Way("moments with the weights", (spots,)), tmp_path)

    with pytest.raises(PlanError, match=words) as caught:
        with_late_moments(plan, 1).check_model(setup.model)

    assert caught.value.field == "placement.blocks[1].late_moments"


def with_late_moments(plan: Plan, block: int) -> Plan:
    """Return a plan that updates the moments of one block more in backward."""
    blocks = list(plan.placement.blocks)
    blocks[block] = replace(blocks[block], late_moments=True)
    return replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))
