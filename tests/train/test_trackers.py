"""Experiment trackers, with stand-ins for their packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.settings import TRACKERS as NAMES
from penstock.settings import Settings
from penstock.train.errors import MissingTrackerError, TrackerStartError
from penstock.train.events import Listeners
from penstock.train.trackers import TRACKERS, check_trackers, hf_metrics, open_trackers
from tests.train.events import STEP

METRICS = {
    "train/loss": 2.5,
    "train/grad_norm": 0.7,
    "train/learning_rate": 1e-4,
    "train/epoch": 0.3,
    "train/tokens_per_second": 1234.0,
}


class Recorder:
    """Stands in for a module and for the objects it returns: records every call."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.info = SimpleNamespace(run_id="from-mlflow")

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    recorded: list[tuple[Any, ...]] = []
    for module in ("wandb", "trackio", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, Recorder(recorded))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return recorded


def track(out: Path, name: str, *, after: int = 0, **settings: Any) -> list[str]:
    """Log one step to a tracker, and return the notes."""
    notes: list[str] = []
    listeners = Listeners()
    chosen = Settings.of({"out": str(out), "log": (name,), **settings})
    for tracker in open_trackers(chosen, after=after, note=notes.append):
        listeners.add(tracker)
    listeners.emit(**{("kind" if k == "event" else k): v for k, v in STEP.items()})
    listeners.note("ignored")
    listeners.close()
    return notes


def test_every_tracker_that_the_settings_know_exists() -> None:
    assert tuple(TRACKERS) == NAMES


def test_metrics_have_the_names_of_the_transformers_trainer() -> None:
    assert hf_metrics(STEP) == METRICS
    assert hf_metrics({"event": "eval", "step": 1, "loss": 2.0}) == {"eval/loss": 2.0}


def test_wandb_continues_its_run_after_a_resume(tmp_path: Path, calls: list[Any]) -> None:
    (tmp_path / "out1").mkdir()
    track(tmp_path / "out1", "wandb")
    first = next(kwargs for name, _, kwargs in calls if name == "init")
    assert (first["project"], first["name"], first["resume"]) == ("penstock", "out1", "allow")
    assert first["config"]["lr"] == 1e-5
    assert ("log", ({**METRICS, "train/global_step": STEP["step"]},), {}) in calls
    assert calls[-1][0] == "finish"

    calls.clear()
    track(tmp_path / "out1", "wandb", after=3, log_project="mine", log_name="run")
    again = next(kwargs for name, _, kwargs in calls if name == "init")
    assert (again["id"], again["project"], again["name"]) == (first["id"], "mine", "run")


def test_project_and_name_come_from_the_environment(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "team")
    monkeypatch.setenv("WANDB_NAME", "friday")
    monkeypatch.setenv("TRACKIO_PROJECT", "local")
    track(tmp_path, "wandb")
    track(tmp_path, "trackio")
    wandb, trackio = (kwargs for name, _, kwargs in calls if name == "init")
    assert (wandb["project"], wandb["name"]) == ("team", "friday")
    assert (trackio["project"], trackio["name"]) == ("local", tmp_path.name)


def test_trackio_continues_the_run_of_the_same_name(tmp_path: Path, calls: list[Any]) -> None:
    track(tmp_path, "trackio", log_name="first")
    track(tmp_path, "trackio", after=3, log_name="renamed")
    started = [kwargs for name, _, kwargs in calls if name == "init"]
    assert [(k["name"], k["resume"]) for k in started] == [("first", "allow")] * 2


def test_mlflow_continues_its_run_after_a_resume(tmp_path: Path, calls: list[Any]) -> None:
    track(tmp_path, "mlflow", log_project="study")
    track(tmp_path, "mlflow", after=3, log_project="study")
    assert [args for name, args, _ in calls if name == "set_experiment"] == [("study",)] * 2
    started = [kwargs["run_id"] for name, _, kwargs in calls if name == "start_run"]
    assert started == [None, "from-mlflow"]
    assert [name for name, *_ in calls].count("log_params") == 1
    assert ("log_metrics", (METRICS,), {"step": STEP["step"]}) in calls


def test_tensorboard_hides_steps_after_the_checkpoint(tmp_path: Path, calls: list[Any]) -> None:
    track(tmp_path, "tensorboard")
    track(tmp_path, "tensorboard", after=3)
    started = [kwargs for name, _, kwargs in calls if name == "SummaryWriter"]
    assert [k["purge_step"] for k in started] == [None, 4]
    assert started[0]["log_dir"] == str(tmp_path / "runs")
    assert ("add_scalar", ("train/loss", 2.5, STEP["step"]), {}) in calls


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Recorder):
        def log(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no route")

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self

    monkeypatch.setitem(sys.modules, "wandb", Broken(calls))
    (note,) = track(tmp_path, "wandb")
    assert note.startswith("warning: wandb failed and gets no more metrics: no route. Training")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tracker_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingTrackerError, match=f"needs the package {name}: pip install {name}"):
        check_trackers([name])


def test_a_tracker_that_cannot_start_is_one_message_and_closes_the_others(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    chosen = Settings.of({"out": str(tmp_path), "log": ("tensorboard", "wandb")})

    with pytest.raises(TrackerStartError, match=r"--log wandb: .*No API key .*log in\. Fix that"):
        open_trackers(chosen, after=0, note=pytest.fail)

    assert calls[-1][0] == "close"
