"""`Engine.write` and `Engine.read` with training_state.json, and with the files of version 1."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.training_state import TrainingState
from penstock.engine.engine import EngineState
from penstock.engine.result_record import (
    NotBitIdenticalWarning,
    find_differences,
    result_record,
)
from penstock.errors import EngineError, EngineStateError, NonFiniteLossError
from tests.equivalence.runs import DRAM, RESIDENT, Setup, differing, state_of
from tests.support import engines
from tests.support.manifests import update_manifest


def test_a_new_engine_has_made_no_step_and_knows_no_gradient_norm(tmp_path: Path) -> None:
    with Setup.of("llama").engine(DRAM, tmp_path) as engine:
        assert (engine.steps, engine.batches, engine.skipped) == (0, 0, False)
        assert math.isnan(engine.grad_norm)


def test_the_state_of_an_engine_is_one_object_in_training_state_json(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)

    state = json.loads((folder / "training_state.json").read_text())
    assert set(state) == {"version", "engine", "software", "numerics"}
    assert state["engine"]["steps"] == 1
    assert not (folder / "engine.json").exists()


def test_a_folder_of_version_1_with_engine_json_alone_is_read(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)
        expected = state_of(engine)
    path = folder / "training_state.json"
    (folder / "engine.json").write_text(json.dumps(json.loads(path.read_text())["engine"]))
    path.unlink()
    (folder / "complete.json").unlink()

    with setup.engine(DRAM, tmp_path) as engine:
        engine.read(folder)
        assert engine.steps == 1
        assert differing(state_of(engine), expected) == []


def test_weights_alone_cannot_be_continued(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.write(folder, optimizer=False)
        with pytest.raises(EngineStateError, match=r"training_state\.json: cannot be read"):
            engine.read(folder)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    """Dropout and stochastic rounding would not continue as they were."""
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path, seed=3) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)

    with (
        setup.engine(DRAM, tmp_path, seed=4) as engine,
        pytest.raises(EngineStateError, match="seed: was 3 in the checkpoint and is 4 now"),
    ):
        engine.read(folder)


def test_a_model_with_other_tensors_is_refused_with_their_names(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)

    with (
        Setup.of("llama", freeze=()).engine(DRAM, tmp_path) as engine,
        pytest.raises(EngineStateError, match="tensors are trained now that it did not train"),
    ):
        engine.read(folder)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "micro-batch": ({"micro_batch": 1}, "micro_batch was 2 and is 1"),
    "clip": ({"clip": 0.25}, "clip was 0.5 and is 0.25"),
    "no clip": ({"clip": None}, "clip was 0.5 and is 0.0"),
    "loss chunk": ({"loss_chunk": 7}, "loss_chunk was .* and is 7"),
    "MLP tile": ({"mlp_tile": 5}, "mlp_tile was .* and is 5"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after one step with micro-batches of 2 rows, clipped to 0.5."""
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)
    return folder


@pytest.mark.parametrize(("changes", "message"), CHANGES.values(), ids=CHANGES)
def test_reading_says_why_the_bits_will_differ(
    changes: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    setup = changed(Setup.of("llama"), changes)
    with setup.engine(DRAM, tmp_path) as engine:
        with pytest.warns(
            NotBitIdenticalWarning, match=f"^no longer bit-identical because {message}$"
        ):
            engine.read(saved)

        assert engine.steps == 1  # a warning, and not an error


def changed(setup: Setup, changes: dict[str, Any]) -> Setup:
    """Change fields of the workload, or of its numerics."""
    own = {k: v for k, v in changes.items() if k == "clip"}
    numerics = {k: v for k, v in changes.items() if k != "clip"}
    work = replace(setup.work, numerics=replace(setup.work.numerics, **numerics), **own)
    return replace(setup, work=work)


def test_reading_under_another_plan_warns_of_nothing(saved: Path, tmp_path: Path) -> None:
    with Setup.of("llama").engine(RESIDENT, tmp_path) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.read(saved)


def test_reading_passes_all_differences_to_the_caller(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, threads = torch.__version__, torch.get_num_threads()
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    found: list[str] = []
    with changed(Setup.of("llama"), {"clip": 2.0}).engine(DRAM, tmp_path) as engine:
        engine.read(saved, on_difference=found.extend)

    assert found == [
        f"torch was {version} and is 9.9",
        "clip was 0.5 and is 2.0",
        f"torch's number of threads was {threads} and is {threads + 1}",
    ]


@pytest.mark.parametrize(
    ("dtype", "found"),
    [("fp32", ["matrix products were IEEE fp32 and are TF32"]), ("bf16", [])],
)
def test_tf32_is_noticed_where_it_changes_results(
    dtype: str, found: list[str], tmp_path: Path
) -> None:
    work = engines.workload(dtype=dtype)
    TrainingState(numerics=result_record(work, on_gpu=True, self_checked=True)).save(tmp_path)
    same = find_differences(tmp_path, work, on_gpu=True)
    torch.set_float32_matmul_precision("high")
    try:
        different = find_differences(tmp_path, work, on_gpu=True)
    finally:
        torch.set_float32_matmul_precision("highest")

    assert (same, different) == ([], found)


def test_a_checkpoint_that_recorded_no_numerics_is_read(saved: Path, tmp_path: Path) -> None:
    path = saved / "training_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({"version": state["version"], "engine": state["engine"]}))
    update_manifest(saved, path.name)

    with changed(Setup.of("llama"), {"clip": 2.0}).engine(DRAM, tmp_path) as engine:
        engine.read(saved)
        assert engine.steps == 1


def test_damaged_numerics_are_named(saved: Path, tmp_path: Path) -> None:
    path = saved / "training_state.json"
    state = json.loads(path.read_text())
    state["numerics"]["workload"]["micro_batch"] = "many"
    path.write_text(json.dumps(state))
    update_manifest(saved, path.name)

    with (
        Setup.of("llama").engine(DRAM, tmp_path) as engine,
        pytest.raises(EngineStateError, match=r"training_state\.json: micro_batch"),
    ):
        engine.read(saved)


def test_options_of_param_groups_continue_as_they_were(tmp_path: Path) -> None:
    """A schedule changes them during a run; a new engine has those of the start."""
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.optimizer.param_groups[0] |= {"lr": 0.125, "betas": (0.5, 0.75)}
        engine.optimizer.param_groups[1] |= {"weight_decay": 0.25, "eps": 0.5}
        engine.write(folder)

    with setup.engine(DRAM, tmp_path) as engine:
        engine.read(folder)
        first, second = engine.optimizer.param_groups

    assert (first["lr"], first["betas"]) == (0.125, (0.5, 0.75))
    assert (second["weight_decay"], second["eps"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", True),
        ("lr", "0.1"),
        ("lr", float("inf")),
        ("lr", None),
        ("eps", [1e-8]),
        ("betas", [0.9]),
        ("betas", [0.9, "0.95"]),
        ("betas", [True, 0.95]),
        ("betas", 0.9),
        ("weight_decay", {}),
    ],
    ids=str,
)
def test_a_hyperparameter_of_another_type_is_refused_and_named(
    field: str, value: object, tmp_path: Path
) -> None:
    with Setup.of("llama").engine(DRAM, tmp_path) as engine:
        state = EngineState.of(engine)
        groups: Any = state.groups
        damaged = [groups[0], groups[1] | {field: value}]
        with pytest.raises(EngineStateError, match=rf"groups\[1\]\.{field}"):
            replace(state, groups=damaged).check(engine)
        integer = [groups[0] | {"lr": 1}, groups[1]]
        replace(state, groups=integer).check(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: None,
        lambda groups: {"0": groups[0]},
        lambda groups: [groups[0], "lr"],
        lambda groups: groups[:1],
        lambda groups: [*groups, groups[1]],
        lambda groups: [groups[1], groups[0]],
    ],
)
def test_other_param_groups_are_refused(change: Any, tmp_path: Path) -> None:
    with Setup.of("llama").engine(DRAM, tmp_path) as engine:
        state = EngineState.of(engine)
        with pytest.raises(EngineStateError, match="groups"):
            replace(state, groups=change(state.groups)).check(engine)


def test_a_state_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with Setup.of("llama").engine(DRAM, tmp_path) as engine:
        record: Any = engine.state_record()
    assert record["version"] == 1
    with pytest.raises(EngineStateError, match="version"):
        replace(EngineState(**record), version=2)


def test_reading_drops_what_was_computed_and_not_applied(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    batches = setup.batches(3)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(batches[0])
        engine.write(folder)
        expected = state_of(engine)
        engine.step(batches[1])  # its update is still pending
        engine.forward_backward(batches[2])
        engine.read(folder)
        with pytest.raises(EngineError, match="no gradients to apply"):
            engine.apply()
        assert differing(state_of(engine), expected) == []
        assert (engine.steps, engine.batches) == (1, 1)


def test_the_loss_scale_and_its_count_continue(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama", dtype="fp16"), tmp_path / "saved"
    with setup.engine(DRAM, tmp_path) as engine:
        engine.scale.value, engine.scale.good_steps = 2048.0, 7
        engine.write(folder)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.read(folder)
        assert (engine.scale.value, engine.scale.good_steps) == (2048.0, 7)
        for group in engine.optimizer.param_groups:
            assert isinstance(group["betas"], tuple)


def test_an_evaluation_drops_nothing_out_and_the_next_step_does(tmp_path: Path) -> None:
    setup = Setup.of("gpt2", freeze=(), config={"resid_pdrop": 0.5, "embd_pdrop": 0.5})
    without = Setup.of("gpt2", freeze=())
    batch = setup.batches(1)[0]
    with without.engine(DRAM, tmp_path) as engine:
        plain = engine.evaluate([batch]).loss
    with setup.engine(DRAM, tmp_path) as engine:
        first = float(engine.forward_backward(batch))
        engine.apply()
        engine.optimizer.param_groups[0]["lr"] = 0.0
    with setup.engine(DRAM, tmp_path, optimizer={"lr": 0.0}) as engine:
        assert engine.evaluate([batch]).loss == plain
        assert float(engine.step(batch)) == first != pytest.approx(plain, abs=1e-3)
        assert engine.evaluate([batch, batch]).loss == plain
        assert engine.evaluate([batch, batch]).tokens == 2 * engine.evaluate([batch]).tokens


def test_a_closed_engine_computes_nothing_and_closes_again(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(DRAM, tmp_path) as engine:
        batch = setup.batches(1)[0]
    engine.close()
    for call in (engine.finish, lambda: engine.step(batch), lambda: engine.evaluate([batch])):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert engine.tiers()["hbm"]["tensors"] == 0


def test_a_gradient_that_is_not_finite_is_named_with_the_step(tmp_path: Path) -> None:
    setup = Setup.of("llama", dtype="fp32")
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.finish()
        block = engine.inventory.blocks[2]
        name = next(t.name for t in block.tensors if "o_proj" in t.name)
        sums = engine._memory.gradients
        add = sums.add

        def poisoned(tensor: str, gradient: torch.Tensor) -> None:
            add(tensor, gradient * float("inf") if tensor == name else gradient)

        sums.add = poisoned  # type: ignore[method-assign]
        with pytest.raises(NonFiniteLossError, match=rf"step 2.*{name}|{name}.*step 2"):
            engine.step(setup.batches(1)[0])
        with pytest.raises(EngineError, match="no gradients"):
            engine.apply()
