"""Send metrics to experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow.

Each tracker is a class with `log` and `close`. All use the names of metrics that transformers'
Trainer uses, so that runs of both can be compared. A resumed run continues the tracker's run: the
output directory remembers its id.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.durable_files import replace_file
from penstock.errors import RecordError
from penstock.records import read_json, to_json
from penstock.settings import Settings
from penstock.train.errors import MissingTrackerError, TrackerStartError
from penstock.train.events import Event

HF_NAMES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "epoch": "train/epoch",
        "tokens_per_second": "train/tokens_per_second",
        "expert_load_max": "train/expert_load_max",
        "expert_load_min": "train/expert_load_min",
        "idle_experts": "train/idle_experts",
    },
    "eval": {"loss": "eval/loss"},
}
"""Names of the metrics in transformers' Trainer, by event and by our name."""

STEP = "train/global_step"
"""Name of the step in trackers whose own count only goes up: a resumed run takes steps again."""

RUN_IDS = "trackers.json"
"""File in the output directory with the id of the run in each tracker."""


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """How a tracker identifies the run."""

    project: str
    name: str
    run_id: str
    """Id that an earlier part of the run had; "" if there was none."""
    out: Path
    """Output directory of the run."""
    after: int
    """Number of steps that the run has taken already."""
    settings: Mapping[str, Any]
    """All settings by name, as JSON."""


class TensorBoard:
    """Writes event files to `runs` in the output directory."""

    PACKAGE, ENVIRONMENT = "tensorboard", ("", "")

    def __init__(self, run: TrackedRun) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        # Hides what an interrupted run logged after the checkpoint that is continued.
        purge = run.after + 1 if run.after else None
        self._writer = module.SummaryWriter(log_dir=str(run.out / "runs"), purge_step=purge)
        self.run_id = ""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases."""

    PACKAGE, ENVIRONMENT = "wandb", ("WANDB_PROJECT", "WANDB_NAME")

    def __init__(self, run: TrackedRun) -> None:
        module: Any = importlib.import_module("wandb")
        self.run_id = run.run_id or secrets.token_hex(4)
        self._run = module.init(
            project=run.project, name=run.name, id=self.run_id, resume="allow", dir=str(run.out),
            config=dict(run.settings),
        )  # fmt: skip
        self._run.define_metric("*", step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Logs to Trackio, which identifies a run by its name within a project."""

    PACKAGE, ENVIRONMENT = "trackio", ("TRACKIO_PROJECT", "")

    def __init__(self, run: TrackedRun) -> None:
        self._module: Any = importlib.import_module("trackio")
        self.run_id = run.run_id or run.name
        self._module.init(
            project=run.project, name=self.run_id, resume="allow", config=dict(run.settings)
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._module.log({**metrics, STEP: step})

    def close(self) -> None:
        self._module.finish()


class MLflow:
    """Logs to MLflow, whose projects are called experiments."""

    PACKAGE, ENVIRONMENT = "mlflow", ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME")

    def __init__(self, run: TrackedRun) -> None:
        self._module: Any = importlib.import_module("mlflow")
        self._module.set_experiment(run.project)
        started = self._module.start_run(run_id=run.run_id or None, run_name=run.name)
        self.run_id = str(started.info.run_id)
        if not run.run_id:  # MLflow refuses parameters that change
            self._module.log_params({name: str(v)[:500] for name, v in run.settings.items()})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._module.end_run()


TRACKERS: Mapping[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""The classes of trackers by the name that `--log` takes."""


class TrackerListener:
    """Passes the metrics of events to a tracker. If it fails, training goes on without it."""

    def __init__(self, name: str, tracker: Tracker, note: Callable[[str], None]) -> None:
        self._name, self._note = name, note
        self._tracker: Tracker | None = tracker

    def handle(self, event: Event) -> None:
        metrics = hf_metrics(event)
        if metrics and self._tracker is not None:
            try:
                self._tracker.log(metrics, event["step"])
            except Exception as problem:  # trackers raise errors of their own kinds
                self._drop(problem)

    def close(self) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as problem:
                self._drop(problem)

    def _drop(self, problem: Exception) -> None:
        self._tracker = None
        self._note(
            f"warning: {self._name} failed and gets no more metrics: {problem}. Training "
            f"continues; metrics.jsonl has all metrics"
        )


def check_trackers(names: Sequence[str]) -> None:
    """Raise MissingTrackerError, before the run starts, if a tracker is not installed."""
    for name in names:
        package = TRACKERS[name].PACKAGE
        if importlib.util.find_spec(package) is None:
            raise MissingTrackerError(name, package)


def open_trackers(
    settings: Settings, *, after: int, note: Callable[[str], None]
) -> list[TrackerListener]:
    """Start or continue the run in each tracker that the settings name.

    Raises TrackerStartError if one of them fails, for example because nobody is logged in.
    """
    out = Path(settings.checkpoint.out)
    opened: list[TrackerListener] = []
    ids = _read_ids(out)
    for name in settings.logging.log:
        try:
            tracker = TRACKERS[name](_tracked_run(name, settings, ids.get(name, ""), after))
        except Exception as problem:  # trackers raise errors of their own kinds
            for earlier in opened:
                earlier.close()
            reason = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
            raise TrackerStartError(name, reason) from problem
        opened.append(TrackerListener(name, tracker, note))
        if tracker.run_id:
            ids[name] = tracker.run_id
    if ids:
        replace_file(out / RUN_IDS, json.dumps(ids) + "\n")
    return opened


def _tracked_run(name: str, settings: Settings, run_id: str, after: int) -> TrackedRun:
    """Name the run: by the settings, the tracker's own environment variables, or the directory."""
    out, (project, run_name) = Path(settings.checkpoint.out), TRACKERS[name].ENVIRONMENT
    chosen = settings.logging
    return TrackedRun(
        project=chosen.log_project or os.environ.get(project, "") or "penstock",
        name=chosen.log_name or os.environ.get(run_name, "") or out.resolve().name,
        run_id=run_id,
        out=out,
        after=after,
        settings={key: to_json(value) for key, value in settings.flat().items()},
    )


def _read_ids(out: Path) -> dict[str, str]:
    try:
        ids = read_json(out / RUN_IDS)
    except RecordError:
        return {}
    return {k: v for k, v in ids.items() if isinstance(v, str)} if isinstance(ids, dict) else {}


def hf_metrics(event: Event) -> dict[str, float]:
    """Return the numbers of an event under the names that transformers' Trainer uses."""
    names = HF_NAMES.get(event["event"], {})
    return {hf: float(event[ours]) for ours, hf in names.items() if event.get(ours) is not None}
