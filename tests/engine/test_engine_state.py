"""`Engine.write` and `Engine.read` with training_state.json, and with the files of version 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import EngineStateError
from tests.equivalence.runs import DRAM, Setup, differing, state_of


def test_the_state_of_an_engine_is_one_object_in_training_state_json(tmp_path: Path) -> None:
    setup, folder = Setup.of("llama"), tmp_path / "saved"
    folder.mkdir()
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        engine.write(folder)

    state = json.loads((folder / "training_state.json").read_text())
    assert set(state) == {"version", "engine", "software"}
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
