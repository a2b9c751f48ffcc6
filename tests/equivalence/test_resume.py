"""A killed or stopped run continues under another plan, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.checkpoint.reader import ShardReader
from penstock.cli.store import remove_stores
from penstock.engine.state_io import OPTIMIZER
from penstock.errors import EngineStateError
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS, Setup, Way, differing, state_of
from tests.support import fork_server

STEPS, KEPT = 6, 3

VICTIM = """
import sys
from pathlib import Path
import torch
from tests.equivalence.runs import WAYS, Setup
torch.set_num_threads(1)
folder, disk, dtype, moments = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
setup = Setup.of("llama", dtype=dtype, moments=moments, config={"attention_dropout": 0.1})
engine = setup.engine(WAYS[3], disk)
for number, batch in enumerate(setup.batches(6), 1):
    engine.step(batch)
    if number == 3:
        engine.write(folder)
    print(number, flush=True)
    if number > 4:
        sys.stdin.readline()  # killed here, with sweeps pending and a store on disk
"""


def setup_with_dropout(dtype: str = "bf16", moments: str = "fp32") -> Setup:
    return Setup.of("llama", dtype=dtype, moments=moments, config={"attention_dropout": 0.1})


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        pytest.param("bf16", "fp32", marks=pytest.mark.long),
        ("bf16", "int8"),
        pytest.param("fp32", "fp32", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_resumed_under_another_plan_equals_an_uninterrupted_run(
    dtype: str, moments: str, tmp_path: Path
) -> None:
    folder, disk = tmp_path / "saved", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    victim = fork_server.start(["-c", VICTIM, str(folder), str(disk), dtype, moments])
    while victim.stdout.readline().strip() != "5":
        assert victim.poll() is None
    victim.kill()
    victim.communicate()
    setup = setup_with_dropout(dtype, moments)
    with setup.engine(WAYS[8], disk) as engine:
        engine.read(folder)
        assert engine.steps == KEPT
        for batch in setup.batches(STEPS)[KEPT:]:
            engine.step(batch)
        resumed = state_of(engine)
    with setup.engine(RESIDENT, disk) as engine:
        for batch in setup.batches(STEPS):
            engine.step(batch)
        assert differing(resumed, state_of(engine)) == []
    assert [left.kept_because for left in remove_stores([disk])] == [""]
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK, WAYS[8]], ids=lambda way: way.name)
def test_checkpoints_of_all_plans_are_equal_byte_for_byte(
    way: Way, dtype: str, tmp_path: Path
) -> None:
    setup = setup_with_dropout(dtype)
    kept = []
    for number, each in enumerate((DRAM, way)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with setup.engine(each, tmp_path) as engine:
            for batch in setup.batches(2):
                engine.step(batch)
            engine.write(folder)
        kept.append({path.name: path.read_bytes() for path in folder.iterdir()})

    assert kept[0] == kept[1]
    assert "model.safetensors" in kept[0] or "model.safetensors.index.json" in kept[0]


def test_an_fp32_run_resumed_under_another_plan_equals_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    """Its checkpoint has fp32 weights and moments, and no separate master weights."""
    setup, folder = setup_with_dropout("fp32"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(WAYS[3], tmp_path) as engine:
        for number, batch in enumerate(setup.batches(STEPS), 1):
            engine.step(batch)
            if number == KEPT:
                engine.write(folder)
        uninterrupted = state_of(engine)
    with setup.engine(WAYS[8], tmp_path) as engine:
        engine.read(folder)
        for batch in setup.batches(STEPS)[KEPT:]:
            engine.step(batch)
        assert differing(uninterrupted, state_of(engine)) == []
    with ShardReader(folder) as weights, ShardReader(folder, OPTIMIZER) as states:
        assert {weights.spec(name).dtype for name in weights.names} == {torch.float32}
        assert {name.rpartition(".")[2] for name in states.names} == {"first", "second"}


def test_saving_does_not_change_later_steps(tmp_path: Path) -> None:
    """Saving, evaluating and reading parameters finish sweeps early, with the same bits."""
    setup, states = setup_with_dropout(), []
    for inspects in (False, True):
        with setup.engine(DISK, tmp_path) as engine:
            for number, batch in enumerate(setup.batches(4)):
                engine.step(batch)
                if inspects and number == 1:
                    (tmp_path / "saved").mkdir()
                    engine.write(tmp_path / "saved")
                    engine.evaluate(setup.batches(1))
                if inspects and number == 2:
                    assert "exp_avg" in engine.state["lm_head.weight"]
            states.append(state_of(engine))

    assert differing(*states) == []


def test_a_later_change_of_the_learning_rate_does_not_affect_a_pending_sweep(
    tmp_path: Path,
) -> None:
    setup, states = setup_with_dropout(), []
    for changes in (False, True):
        with setup.engine(DISK, tmp_path) as engine:
            engine.step(setup.batches(1)[0])
            if changes:
                for group in engine.optimizer.param_groups:
                    group.update(lr=100.0, betas=(0.1, 0.1), weight_decay=3.0)
            states.append(state_of(engine))

    assert differing(*states) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"moments": "bf16"}, "moments"),
        ({"dtype": "fp16"}, "dtype"),
        ({"dtype": "fp32"}, "dtype"),
    ],
    ids=["moments", "fp16", "fp32"],
)
def test_a_checkpoint_with_other_numerics_is_rejected(
    change: dict[str, str], field: str, tmp_path: Path
) -> None:
    with setup_with_dropout().engine(DRAM, tmp_path) as engine:
        (tmp_path / "saved").mkdir()
        engine.write(tmp_path / "saved")
    other = Setup.of("llama", config={"attention_dropout": 0.1}, **change)
    with other.engine(DRAM, tmp_path) as engine:
        before = state_of(engine)
        with pytest.raises(EngineStateError, match=f"{field}: was"):
            engine.read(tmp_path / "saved")
        assert differing(before, state_of(engine)) == []
