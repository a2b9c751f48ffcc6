"""Whether the CPU or the GPU sweeps a block in host memory, the result is the same, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.device import CpuDevice
from penstock.errors import NonFiniteMasterError, PlanError
from penstock.plan.placement import SweepSide
from penstock.plan.plan import Plan
from penstock.roles import Role
from tests.equivalence.runs import DRAM, HYBRID, Setup, Way, differing, follow, state_of, whole
from tests.equivalence.test_plans import assert_same, train_each
from tests.support.engines import FAMILIES

ALL, KEPT, ON_DISK, ROUNDS = HYBRID


@pytest.mark.parametrize(
    ("family", "ways", "work"),
    [
        pytest.param("llama", HYBRID, {}, id="bf16"),
        pytest.param("qwen3", (ALL,), {"moments": "int8"}, id="int8 moments"),
        pytest.param("llama", (KEPT,), {"dtype": "fp32", "moments": "bf16"}, id="fp32"),
        pytest.param("gemma3", (ALL,), {"dtype": "fp16", "config": {"tie_word_embeddings": True}},
                     id="fp16, tied"),
        pytest.param("llama", (ALL, ROUNDS), {"optimizer": "lion", "accumulate": True}, id="lion"),
        pytest.param("llama", (ALL,), {"optimizer": "sgd"}, id="sgd without momentum"),
        *(pytest.param(family, HYBRID, {"dtype": dtype, "moments": moments, "freeze": ()},
                       marks=pytest.mark.long)
          for family in (*FAMILIES, "gptj", "olmo2", "gpt_neox", "olmoe")
          for dtype in ("bf16", "fp32") for moments in ("fp32", "bf16", "int8")),
    ],
)  # fmt: skip
def test_the_gpu_sweeps_states_in_dram_to_the_bits_of_the_cpu(
    family: str, ways: tuple[Way, ...], work: dict[str, Any], tmp_path: Path
) -> None:
    setup = Setup.of(family, **work)
    options = {"optimizer": {"lr": 1e-2}} if "optimizer" in work else {}

    assert_same(train_each(setup, (DRAM, *ways), tmp_path, steps=4, **options))


def test_a_checkpoint_continues_under_another_split(tmp_path: Path) -> None:
    setup = Setup.of("llama", moments="int8")
    batches = setup.batches(6)
    with setup.engine(DRAM, tmp_path) as engine:
        follow(engine, batches)
        wanted = state_of(engine)
    with setup.engine(KEPT, tmp_path) as engine:
        follow(engine, batches[:2])
        engine.write(tmp_path / "saved")
    with setup.engine(ALL, tmp_path) as engine:
        engine.read(tmp_path / "saved")
        follow_on(engine, batches[2:], done=2)

        assert differing(wanted, state_of(engine)) == []


def follow_on(engine: Any, batches: list[Any], done: int) -> None:
    """Train with the learning rates of `follow` after `done` steps."""
    from tests.equivalence.runs import OPTIMIZER, warm_up

    for number, batch in enumerate(batches, done):
        for group, factor in zip(engine.optimizer.param_groups, (1.0, 0.5), strict=False):
            group["lr"] = OPTIMIZER["lr"] * factor * warm_up(number)
        engine.step(batch)


@pytest.mark.parametrize("failing", [1, 4])
def test_a_sweep_that_fails_half_way_is_completed_once(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece counts as swept when it is back in host memory, and is never swept twice."""
    setup = Setup.of("llama")
    first, second = setup.batches(2)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(first)
        engine.step(second)
        wanted = state_of(engine)
    prepare, calls = CpuDevice.prepare_sweep, []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == failing:
            raise RuntimeError("no kernel")
        return prepare(*args)

    with setup.engine(ALL, tmp_path) as engine:
        engine.step(first)
        monkeypatch.setattr(CpuDevice, "prepare_sweep", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            engine.finish()
        engine.step(second)

        assert differing(wanted, state_of(engine)) == []


def test_an_element_that_the_gpu_refuses_is_reported(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(ALL, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        name = "model.layers.0.mlp.up_proj.weight"
        next(iter(engine.access.parts(name, Role.FIRST)))[3] = float("nan")

        with pytest.raises(NonFiniteMasterError) as caught:
            engine.finish()

        assert name in str(caught.value)
        assert torch.isfinite(whole(engine, name, Role.WEIGHT)).all()


@pytest.mark.parametrize(
    ("spots", "work", "words"),
    [
        ("dndd", {}, "must be in HBM, or all of it in dram and cxl"),
        ("dddd", {"optimizer": "adafactor"}, "adafactor updates whole tensors"),
        ("dddd", {"world": 2}, "needs a single rank"),
    ],
)
def test_a_plan_that_the_gpu_cannot_sweep_is_refused(
    spots: str, work: dict[str, Any], words: str, tmp_path: Path
) -> None:
    setup = Setup.of("llama", freeze=(), batch=6, **work)
    plan = setup.plan(Way("cpu", (spots,)), tmp_path)

    with pytest.raises(PlanError, match=words) as caught:
        swept_by("gpu", plan, 1).check_model(setup.model)

    assert caught.value.field == "placement.blocks[1].sweep"


@pytest.mark.parametrize("spots", ["dddd", "hhhh"])
def test_a_plan_that_never_updates_a_trained_block_is_refused(spots: str, tmp_path: Path) -> None:
    setup = Setup.of("llama", freeze=())
    plan = setup.plan(Way("cpu", (spots,)), tmp_path)

    with pytest.raises(PlanError, match=r"is none, but model\.layers\.0 is trained") as caught:
        swept_by("none", plan, 1).check_model(setup.model)

    assert caught.value.field == "placement.blocks[1].sweep"


def swept_by(side: SweepSide, plan: Plan, block: int) -> Plan:
    """Return a plan in which another processor sweeps one block."""
    blocks = list(plan.placement.blocks)
    blocks[block] = replace(blocks[block], sweep=side)
    return replace(plan, placement=replace(plan.placement, blocks=tuple(blocks)))
