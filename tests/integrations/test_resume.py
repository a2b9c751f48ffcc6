"""A trainer that is killed continues from its newest complete checkpoint, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.checkpoint.errors import CheckpointError, DamagedCheckpointError
from penstock.engine.result_record import NotBitIdenticalWarning
from penstock.errors import EngineStateError
from penstock.integrations import (
    PenstockConfig,
    PenstockTrainer,
    checkpoint_folder,
    engine_setup,
)
from tests.integrations.trainer_run import STEPS, make_trainer
from tests.support import fork_server
from tests.support.trainers import (
    SMALL,
    arguments,
    compare_logs,
    examples,
    largest_difference,
    pad,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER: dict[str, Any] = {"hbm": "5MiB", "dram": "2MiB"}
"""Budgets with another placement."""


def run(out: Path, budgets: dict[str, Any], *options: str) -> int:
    """Run the script in a process of its own, and return its exit code."""
    script = ["-m", "tests.integrations.trainer_run", str(out), json.dumps(budgets), *options]
    done = fork_server.run(script)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def history(folder: Path) -> list[Any]:
    state = json.loads((folder / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return [
        (e["step"], e["loss"], e["grad_norm"], e["learning_rate"]) for e in state["log_history"]
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    assert run(out, {}) == 0
    return out


@pytest.mark.parametrize(
    ("killed", "in_save"),
    [
        pytest.param(5, False, id="between saves"),
        pytest.param(6, True, id="during a save", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_continues_with_equal_bits(
    killed: int, in_save: bool, uninterrupted: Path, tmp_path: Path
) -> None:
    """It continues under other budgets and, after a second kill, under those of before."""
    options = ["--kill", str(killed), *(["--in-save"] if in_save else [])]
    assert run(tmp_path, {}, *options) == -signal.SIGKILL
    assert run(tmp_path, OTHER, "--resume", "--kill", "7") == -signal.SIGKILL
    assert run(tmp_path, {}, "--resume") == 0
    assert history(tmp_path) == history(uninterrupted)
    assert weights(tmp_path / "trained") == weights(uninterrupted / "trained")
    one, other = (
        load_file(path / f"checkpoint-{STEPS}/optimizer.safetensors")
        for path in (tmp_path, uninterrupted)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_a_path_to_an_older_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, OTHER, None, False)
    trainer.train(resume_from_checkpoint=str(uninterrupted / "checkpoint-4"))
    trainer.save_model(str(tmp_path / "trained"))
    assert weights(tmp_path / "trained") == weights(uninterrupted / "trained")


def small_trainer(out: Path, penstock: PenstockConfig = SMALL, **changes: Any) -> Any:
    args = arguments(out, save_strategy="steps", save_steps=3, **changes)
    return PenstockTrainer(tiny_model(), args, pad, examples(41), penstock=penstock)


def test_a_checkpoint_of_trainer_itself_continues(tmp_path: Path) -> None:
    """Its optimizer states are read, so that a run can move to Penstock in the middle."""
    args = arguments(tmp_path / "theirs", save_strategy="steps", save_steps=3)
    theirs = transformers.Trainer(tiny_model(), args, pad, examples(41))
    theirs.train()
    ours = small_trainer(tmp_path / "ours")
    ours.train(resume_from_checkpoint=str(tmp_path / "theirs/checkpoint-3"))
    compare_logs(ours.state.log_history[:-1], theirs.state.log_history[:-1])
    assert largest_difference(ours.model, theirs.model) < 1e-5


def test_what_a_resume_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trainer(tmp_path / "out").train()
    folder = tmp_path / "out/checkpoint-3"
    int8 = PenstockConfig(**{**_fields(SMALL), "moments": "int8"})
    with monkeypatch.context() as patch:
        # Formats are compared before memory is allocated for them.
        patch.setattr(engine_setup, "prepare", lambda *_, **__: pytest.fail("it was allocated"))
        with pytest.raises(EngineStateError, match=r"moments.* was fp32.* resume with fp32"):
            small_trainer(tmp_path / "new", int8).train(resume_from_checkpoint=str(folder))
    with pytest.raises(EngineStateError, match="seed"):
        small_trainer(tmp_path / "new", seed=8).train(resume_from_checkpoint=str(folder))
    with pytest.warns(NotBitIdenticalWarning, match="clip was 0.5 and is 0.25"):
        small_trainer(tmp_path / "new", max_grad_norm=0.25).train(
            resume_from_checkpoint=str(folder)
        )
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(DamagedCheckpointError, match=r"model.safetensors has 100 B"):
        small_trainer(tmp_path / "new").train(resume_from_checkpoint=str(folder))


def _fields(config: PenstockConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in PenstockConfig.__slots__}


def test_weights_alone_do_not_continue(tmp_path: Path) -> None:
    small_trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(CheckpointError, match="saved with save_only_model=True"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert loaded.num_parameters() == tiny_model().num_parameters()


def test_nothing_to_continue_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_incomplete_checkpoints_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_trainer(tmp_path).train()
    os.truncate(tmp_path / "checkpoint-6/trainer_state.json", 10)
    assert checkpoint_folder.last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert "checkpoint-6" in caplog.text
    assert "was never finished" in caplog.text


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    small_trainer(tmp_path).train()
    path = tmp_path / "checkpoint-6/scheduler.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"):
        small_trainer(tmp_path, max_steps=8).train(resume_from_checkpoint=True)
